"""Data plane: move byte ranges from this process's memory into a receiver's, nothing else (protocol.md 7).

    sender     register(staging)   staged(sources)   prepared(hello's meta, copies, staged)   write(meta, copies, ...)
    receiver   register(slot) ...  local_meta(address) -> merged into hello   admit(tags)

`nixl` and `mooncake` write one-sided: the receiver cannot refuse. `zmq` asks the receiver to write: slower, works
everywhere, and a late write is refused. That difference is `fenced`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilert_ref.connector.allow import LOOPBACK_PEERS, AllowList
from tilert_ref.connector.layout import Copy
from tilert_ref.connector.secret import Secret

TRANSPORTS = ("nixl", "mooncake", "zmq")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")


@dataclass(frozen=True)
class MooncakeNetwork:
    """What transport mooncake runs over; the same on both ends. devices: names of RDMA devices, empty for all."""

    protocol: str = "tcp"
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.protocol not in MOONCAKE_PROTOCOLS:
            raise ValueError(f"Mooncake's protocol is {self.protocol!r}; legal: {', '.join(MOONCAKE_PROTOCOLS)}")
        if self.protocol != "rdma" and self.devices:
            raise ValueError(f"RDMA devices ({', '.join(self.devices)}) mean nothing to Mooncake over {self.protocol}")


class TransferError(Exception):
    """A write failed. No byte of it moves any more."""


class TransferTimeout(TransferError):
    """A write missed its deadline and may still be going on.

    The source memory, and the claim on the destination, must be kept until `settled` is done (its result is None).
    """

    def __init__(self, reason: str, settled: "Future[None]") -> None:
        super().__init__(reason)
        self.settled = settled


class Transport(Protocol):
    name: str
    fenced: bool
    """True if the receiver refuses writes whose tag is not admitted, so that nothing lands late."""

    def start(self) -> None:
        """Starts what would otherwise start at first use. TransferError if the transport does not work here."""

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        """Makes [ptr, ptr + nbytes) usable as a source or destination; `tensor` owns it and is kept alive."""

    def unregister(self, ptr: int) -> None:
        """Forgets the region at ptr and drops its tensor, at once or soon. Never blocks, legal after close."""

    def local_meta(self, address: str) -> dict[str, Any]:
        """What a sender needs to write here, for hello. address: where the sender reached this machine."""

    def admit(self, tags: Mapping[bytes, int]) -> None:
        """Receiver: from now on only writes with these tags are legal, each within the registered region at its
        address. No effect unless fenced."""

    def staged(self, sources: Sequence[tuple[int, int]]) -> AbstractContextManager[Any]:
        """Gets ready for writes from these ranges (address, bytes) to a place that is not known yet. Its value is for
        `prepared`, in the context. Waits for others for a second at most, raises nothing: what is wrong is left to the
        write."""

    def prepared(
        self, hello_meta: dict[str, Any], copies: Sequence[Copy], staged: Any = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Gets ready for writes of some of these copies, and moves none. In the context its value may stand for
        hello_meta in `write`. staged: what `staged` made of their sources, in this order. Raises nothing, as `staged`.
        """

    def write(self, hello_meta: dict[str, Any], copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        """Blocks until every byte is in the receiver's memory.

        Args:
            hello_meta: the receiver's `local_meta()` as it came in hello, or what `prepared` made of it.
            tag: names the transfer, see `write_tag`.
            deadline: `time.monotonic()` value.

        Raises:
            TransferTimeout: the deadline passed.
            TransferError: the write failed.
        """

    def close(self) -> None:
        """Ends threads and sockets. Writes that are going on end with TransferError."""


def write_tag(rid: str, generation: int, secret: Secret | None = None) -> bytes:
    """Names one admitted transfer: the generation never repeats in the receiver's lifetime.

    With a shared secret nobody else can make one.
    """
    tag = f"{rid}:{generation}".encode()
    return tag if secret is None else tag + b":" + secret.digest(b"write tag", tag).encode()


def make_transport(
    name: str,
    host: str,
    *,
    receiver: bool = True,
    from_host: bool = True,
    peers: AllowList = LOOPBACK_PEERS,
    network: MooncakeNetwork = MooncakeNetwork(),
) -> Transport:
    """A transport by its wire name.

    Args:
        host: address to listen on, receiver only; "" or "::" for all interfaces. mooncake always listens on all.
        receiver: False for the sending end, which opens no port (mooncake does, and has nothing behind it over tcp).
        from_host: what a sender writes lies in host memory, which processors copy if the receiver is near.
        peers: whose connections a receiver takes, where the transport can choose: zmq. NIXL and Mooncake take any.
        network: for mooncake only.
    """
    if name == "nixl":
        from tilert_ref.connector.transport.nixl import COPIERS, NixlTransport

        return NixlTransport(receiver=receiver, copiers=COPIERS if from_host else 0)
    if name == "zmq":
        from tilert_ref.connector.transport.zmq import ZmqTransport

        return ZmqTransport(host if receiver else None, peers)
    if name == "mooncake":
        from tilert_ref.connector.transport.mooncake import MooncakeTransport

        return MooncakeTransport(host if receiver else None, network)
    raise ValueError(f"unknown transport {name!r}; legal: {', '.join(TRANSPORTS)}")
