"""Mooncake's transfer engine: writes into a receiver's registered memory over TCP or RDMA, as TileRT does by default.

On the wire is Mooncake's own protocol. hello carries `session_id` = "host:rpc_port", at which the sender's engine asks
for the rest. What was measured with 0.3.13.post1 on TCP shapes the file:

- `batch_transfer_sync_write` answers -1 as soon as one part fails, while the others still write, and after 30 s in any
  case. So every part is submitted alone and asked for its end: only then no byte of it moves any more.
- A write cannot be called back. Mooncake's own timeout (MC_TCP_PROGRESS_TIMEOUT_SEC) closes the connection, but what
  the kernel of a stopped receiver holds by then, up to 4 MB here, lands when it runs again. So that timeout is switched
  off: the write ends when the receiver answers or dies, and `TransferTimeout.settled` says when.
- More than 2,048 parts for one receiver are refused, and the engine may not recover. A write has `WINDOW` under way.
- An engine keeps what it learnt about a receiver for ever, also when another process took its port, and connecting to
  one that is stopped blocks the engine for 60 s. So a sender has an engine per receiver, and a new one after a failure.
  Ending an engine holds the GIL for up to a second; failed ones are kept until there are `MAX_RETIRED`.
- An engine does not work in a forked child: writes never end there.

Whoever reaches the engine's two ports can read and write all registered memory, and Mooncake opens them on every IPv4
interface whatever host it is given: keep them behind a firewall. Over TCP a sender needs no registration, so nothing
of it is exposed. IPv6 does not work.

RDMA is written against Mooncake's documentation and has NOT been run: there was no such device. Mooncake takes TCP in
silence where it finds none; here that is an error.
"""

import contextlib
import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import MooncakeNetwork, TransferError, TransferTimeout
from tilert_ref.connector.transport.regions import Regions
from tilert_ref.connector.wire import WILDCARDS

CHUNK_BYTES = 4 << 20
WINDOW = 16
MAX_LINKS = 32
MAX_RETIRED = 4
POLL_MIN_S, POLL_MAX_S = 2e-5, 2e-3
CLOSE_PATIENCE_S = 2.0
RDMA_DEVICES = Path("/sys/class/infiniband")
_CUDA_PACKAGES = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_PACKAGES = ("mooncake-transfer-engine-non-cuda", *_CUDA_PACKAGES)
_NEVER_S = str(2**30)
# Read when the package is imported, or later; there is no call for them. A user's own values win. Its logging would be
# ten lines for each engine; one error remains, about a descriptor that is not there before there is one.
_DEFAULTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": _NEVER_S,
    "MC_TCP_STATUS_TIMEOUT_SEC": _NEVER_S,
    "MC_LOG_LEVEL": "ERROR",
}
_NO_BATCH = (0, ctypes.c_uint64(-1).value)
_DONE, _FAILED = 1, -1
_CLOSED = "the Mooncake transport is closed"

logger = logging.getLogger(__name__)


def mooncake_version() -> str | None:
    """Version of the installed Mooncake, None without one."""
    return next((found for package in _PACKAGES if (found := _version(package))), None)


class MooncakeTransport:
    """Both ends. `host` is where a receiver is reached, None for a sender. Engines start at first use."""

    name = "mooncake"
    fenced = False

    def __init__(self, host: str | None, network: MooncakeNetwork) -> None:
        self._host = host
        self._network = network
        self._regions = Regions()
        self._lock = threading.Lock()
        self._receiver: _Engine | None = None
        self._links: dict[str, _Engine] = {}  # session id -> engine that writes there, oldest first
        self._retired: list[_Engine] = []
        self._running: set[_Write] = set()
        self._closing = threading.Event()
        self._stopped = threading.Event()  # closed, and no engine moves a byte any more

    def start(self) -> None:
        _engine_class()
        _check_network(self._network)
        if self._host is not None:
            with self._lock:
                self._receiving()

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        if tensor.is_cuda and not any(map(_version, _CUDA_PACKAGES)):
            raise TransferError(
                f"this build of Mooncake moves host memory only, got a tensor on {tensor.device}; "
                f"for device memory install {' or '.join(_CUDA_PACKAGES)}"
            )
        with self._lock:
            if self._host is not None:
                self._receiving().register(ptr, nbytes)
            self._regions.add(ptr, nbytes, tensor)

    def unregister(self, ptr: int) -> None:
        with self._lock:
            self._regions.remove(ptr)
            for engine in (self._receiver, *self._links.values(), *self._retired):
                if engine is not None:
                    engine.unregister(ptr)

    def local_meta(self, address: str) -> dict[str, Any]:
        with self._lock:
            port = self._receiving().rpc_port
        host = address if self._host in WILDCARDS else self._host
        _check_ipv4(host)
        return {"session_id": f"{host}:{port}"}

    def admit(self, tags: Mapping[bytes, int]) -> None:
        """One-sided writes cannot be refused."""

    def staged(self, sources: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepared(
        self, hello_meta: dict[str, Any], copies: Sequence[Copy], staged: None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        return contextlib.nullcontext(hello_meta)

    def write(self, hello_meta: dict[str, Any], copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        session = _session(hello_meta)
        for copy in copies:
            self._regions.find(copy.src, copy.nbytes)
        write = _Write(session, copies)
        with self._lock:
            self._check_open()
            self._running.add(write)
        # Submitting blocks while the engine connects, so it must not happen on a thread that has a deadline.
        threading.Thread(target=self._run, args=(write,), name="tilert-mooncake", daemon=True).start()
        try:
            write.settled.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            write.abandoned.set()
            raise TransferTimeout("the write missed its deadline and may still be going on", _quiet(write)) from None

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            running = list(self._running)
        for write in running:  # nobody may ask an engine that has ended
            write.left.wait(timeout=CLOSE_PATIENCE_S)
        with self._lock:
            engines = [*self._links.values(), *self._retired, *([self._receiver] if self._receiver else [])]
            self._receiver, self._links, self._retired = None, {}, []
        for engine in engines:
            engine.end()
        self._stopped.set()
        for write in running:
            if not write.left.is_set():  # still connecting: its thread ends when Mooncake gives that up
                self._settle(write, TransferError(_CLOSED))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise TransferError(_CLOSED)

    def _receiving(self) -> "_Engine":
        """The receiver's engine. Call with the lock."""
        self._check_open()
        if self._host is None:
            raise ValueError("a sending Mooncake transport has no address; make it with receiver=True")
        if self._receiver is None:
            _check_receiver(self._host, self._network)
            # The name is only looked at over RDMA, where senders connect to it.
            self._receiver = _Engine("127.0.0.1" if self._host in WILDCARDS else self._host, self._network)
        return self._receiver

    # A write's own thread.

    def _run(self, write: "_Write") -> None:
        error: TransferError | None = None
        try:
            self._move(write)
        except TransferError as caught:
            error = caught
        except Exception as caught:  # a bug, or the engine's own: whoever waits must hear of it
            error = TransferError(f"Mooncake: {caught!r}")
        write.left.set()
        if write.under_way:  # closing, or an error that nobody foresaw: only the end of the engine ends it
            self._stopped.wait()
        self._settle(write, error)

    def _settle(self, write: "_Write", error: TransferError | None) -> None:
        with self._lock:
            if write not in self._running:
                return
            self._running.remove(write)
        if error is None:
            write.settled.set_result(None)
        else:
            write.settled.set_exception(error.with_traceback(None))  # whose frames would keep the engine alive

    def _move(self, write: "_Write") -> None:
        engine = self._link(write.session)
        if engine.protocol == "rdma":  # over TCP any source will do
            regions = [self._regions.find(copy.src, copy.nbytes) for copy in write.copies]
            for start, nbytes in {region.start: region.nbytes for region in regions}.items():
                engine.register(start, nbytes)
        write.run(engine, self._closing)
        if self._closing.is_set():
            raise TransferError(_CLOSED)
        if write.failure is not None:
            self._retire(write.session, engine)
            raise TransferError(f"{write.failure} (over {engine.protocol}; both ends must use the same)")

    def _link(self, session: str) -> "_Engine":
        """The engine that writes to this receiver."""
        with self._lock:
            self._check_open()
            engine = self._links.pop(session, None)
            if engine is None:
                # Receivers over RDMA tell senders apart by this name.
                host = socket.gethostname() if self._network.protocol == "rdma" else "127.0.0.1"
                engine = _Engine(host, self._network)
            self._links[session] = engine
            if len(self._links) > MAX_LINKS:
                self._park(self._links.pop(next(iter(self._links))))
            return engine

    def _retire(self, session: str, engine: "_Engine") -> None:
        with self._lock:
            if self._links.get(session) is engine:
                self._park(self._links.pop(session))

    def _park(self, engine: "_Engine") -> None:
        self._retired.append(engine)
        del self._retired[:-MAX_RETIRED]  # one that still writes ends with its last write


class _Write:
    """One `write` call as its thread sees it."""

    def __init__(self, session: str, copies: Sequence[Copy]) -> None:
        self.session = session
        self.copies = copies
        self.settled: Future[None] = Future()  # done when no byte moves any more; raises if the write failed
        self.abandoned = threading.Event()
        self.left = threading.Event()  # this write asks no engine any more
        self.under_way: list[int] = []  # the engine's handles of the parts that have not ended
        self.failure: str | None = None

    def run(self, engine: "_Engine", closing: threading.Event) -> None:
        """Returns when nothing is under way any more, or when closing."""
        chunks, pause = _chunks(self.copies), POLL_MIN_S
        while not closing.is_set():
            self._fill(engine, chunks)
            if not self.under_way:
                return
            if self._poll(engine):
                pause = POLL_MIN_S
            else:
                time.sleep(pause)
                pause = min(2 * pause, POLL_MAX_S)

    def _fill(self, engine: "_Engine", chunks: Iterator[tuple[int, int, int]]) -> None:
        while len(self.under_way) < WINDOW and self.failure is None and not self.abandoned.is_set():
            if (chunk := next(chunks, None)) is None:
                return
            handle = engine.submit(self.session, *chunk)
            if handle is None:
                self.failure = f"{self.session} cannot be reached, or is no Mooncake receiver"
            else:
                self.under_way.append(handle)

    def _poll(self, engine: "_Engine") -> bool:
        """Asks for every part once. True if one of them has ended."""
        pending = []
        for handle in self.under_way:
            state = engine.state(handle)
            if state == _FAILED:
                self.failure = f"{self.session} died, or refused the write"
            elif state != _DONE:  # 0, or -2: overdue by the engine's own timeout, and still under way
                pending.append(handle)
        ended = len(pending) < len(self.under_way)
        self.under_way = pending
        return ended


class _Engine:
    """Mooncake's engine with errors as exceptions. Thread-safe, but for a `state` after its handle has ended."""

    def __init__(self, host: str, network: MooncakeNetwork) -> None:
        self.protocol = network.protocol
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        self._engine: Any = _engine_class()()
        _check_network(network)
        if network.protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"  # else it takes RDMA where it finds a device, whatever it is told
        status = self._engine.initialize(host, "P2PHANDSHAKE", network.protocol, ",".join(network.devices))
        if status != 0:
            raise TransferError(f"Mooncake {mooncake_version()} does not start on {host!r}: status {status}")

    @property
    def rpc_port(self) -> int:
        return int(self._engine.get_rpc_port())

    def register(self, ptr: int, nbytes: int) -> None:
        with self._lock:
            if ptr in self._registered:
                return
            if (status := self._engine.register_memory(ptr, nbytes)) != 0:
                raise TransferError(f"Mooncake could not register {nbytes} bytes at {ptr:#x}: status {status}")
            self._registered.add(ptr)

    def unregister(self, ptr: int) -> None:
        with self._lock:
            if ptr not in self._registered:
                return
            self._registered.remove(ptr)
            if (status := self._engine.unregister_memory(ptr)) != 0:  # it is merely reachable for longer
                logger.error("Mooncake could not unregister the memory at %#x: status %d", ptr, status)

    def submit(self, session: str, source: int, target: int, nbytes: int) -> int | None:
        """Starts a write; a handle for `state`. None if the receiver cannot be reached, which may take a while."""
        handle = self._engine.transfer_submit_write(session, source, target, nbytes)
        return None if handle in _NO_BATCH else handle

    def state(self, handle: int) -> int:
        """_DONE and _FAILED end the handle: asking again would crash."""
        return int(self._engine.transfer_check_status(handle))

    def end(self) -> None:
        """Stops what is under way; other threads must have left. Takes up to a second."""
        self._engine = None


def _engine_class() -> Any:
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        hint = (
            "pip install mooncake-transfer-engine-non-cuda; Debian: apt install libibverbs1 libnl-route-3-200 libnuma1"
        )
        raise TransferError(f"Mooncake is not usable here: {error} ({hint})") from error
    return TransferEngine


def _check_network(network: MooncakeNetwork) -> None:
    """Mooncake itself takes TCP in silence where RDMA is not to be had."""
    if network.protocol != "rdma":
        return
    found = sorted(device.name for device in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    if not found:
        raise TransferError(f"no RDMA device on this machine (none in {RDMA_DEVICES}); Mooncake over tcp needs none")
    if missing := set(network.devices) - set(found):
        raise TransferError(f"no RDMA device {', '.join(sorted(missing))}; this machine has {', '.join(found)}")
    if "MC_FORCE_TCP" in os.environ:
        raise TransferError("MC_FORCE_TCP is set, by the user or by a transport over tcp: there is no RDMA beside it")


def _check_receiver(host: str, network: MooncakeNetwork) -> None:
    if network.protocol == "rdma" and host in WILDCARDS:
        raise TransferError(f"Mooncake over rdma needs the address at which senders reach this host, not {host!r}")
    _check_ipv4("" if host in WILDCARDS else host)


def _check_ipv4(host: str) -> None:
    if ":" in host:
        raise TransferError(f"Mooncake listens on IPv4 only; {host} is not an IPv4 address")


def _session(hello_meta: dict[str, Any]) -> str:
    session = hello_meta.get("session_id")
    host, _, port = session.rpartition(":") if isinstance(session, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TransferError(f"the receiver's hello has no usable session_id (host:port): {session!r}")
    return session


def _chunks(copies: Sequence[Copy]) -> Iterator[tuple[int, int, int]]:
    """(source address, destination address, bytes) of at most CHUNK_BYTES."""
    for copy in copies:
        for offset in range(0, copy.nbytes, CHUNK_BYTES):
            yield copy.src + offset, copy.dst + offset, min(CHUNK_BYTES, copy.nbytes - offset)


def _quiet(write: _Write) -> "Future[None]":
    """A future that is done when the write is, without its error: the caller has its own already."""
    ended: Future[None] = Future()
    write.settled.add_done_callback(lambda _: ended.set_result(None))
    return ended


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
