"""The transport that works everywhere: the receiver itself writes what it is sent over TCP.

    sender (DEALER) -> receiver (ROUTER)   tag | header: number, address | bytes      one chunk
    receiver -> sender                     number | error text, empty if written      one reply per chunk, in order

The sender keeps at most `WINDOW` chunks unanswered. The receiver writes a chunk only if its tag is an admitted one and
the whole range is in that tag's region, so a chunk that comes late, or from a stranger, changes nothing, and one that
goes astray changes no other request's KV. Whose connections it takes at all, it asks its allow-list, by ZeroMQ's own
way (ZAP, https://rfc.zeromq.org/spec/27): before any message. Frames over a chunk's size end the connection; but libzmq
has no limit to the frames of one message, so a peer on the list can fill the memory.
"""

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
import zmq

from tilert_ref.connector.allow import LOOPBACK_PEERS, AllowList
from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TransferError, TransferTimeout
from tilert_ref.connector.transport.regions import Regions
from tilert_ref.connector.wire import WILDCARDS

CHUNK_BYTES = 1 << 20
WINDOW = 8
POLL_S = 0.1
_HEADER = struct.Struct("!QQ")  # chunk number, destination address
_NUMBER = struct.Struct("!Q")
_WAKE = "inproc://tilert-zmq-close"
_ZAP = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"tilert"  # any; without one ZeroMQ does not ask
REPLY_BYTES = 1 << 16  # a sender takes no longer frames
HANDSHAKE_MS = 5000  # of a TCP connection that does not become a ZeroMQ one


class ZmqTransport:
    """Both ends. Threads and sockets start at first use.

    host: where a receiver listens, None for a sender. peers: from where a receiver takes connections.
    """

    name = "zmq"
    fenced = True

    def __init__(self, host: str | None, peers: AllowList = LOOPBACK_PEERS) -> None:
        self._host = host
        self._peers = peers
        self._regions = Regions()
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._writer: _Writer | None = None
        self._channels: dict[str, _Channel] = {}
        self._closed = False

    def start(self) -> None:
        with self._lock:
            self._zmq()

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise TransferError(f"transport zmq moves host memory only, got a tensor on {tensor.device}")
        with self._lock:
            self._regions.add(ptr, nbytes, tensor)

    def unregister(self, ptr: int) -> None:
        with self._lock:
            self._regions.remove(ptr)

    def local_meta(self, address: str) -> dict[str, Any]:
        port = self._receiving().port
        host = address if self._host in WILDCARDS else self._host
        return {"zmq_endpoint": f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"}

    def admit(self, tags: Mapping[bytes, int]) -> None:
        self._receiving().admit(tags)

    def staged(self, sources: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepared(
        self, hello_meta: dict[str, Any], copies: Sequence[Copy], staged: None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        return contextlib.nullcontext(hello_meta)

    def write(self, hello_meta: dict[str, Any], copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        endpoint = hello_meta.get("zmq_endpoint")
        if not endpoint:
            raise TransferError(f"the receiver's hello has no zmq_endpoint, only {sorted(hello_meta)}")
        for copy in copies:
            self._regions.find(copy.src, copy.nbytes)
        channel = self._channel(endpoint)
        try:
            channel.write(copies, tag, deadline)
        except TransferError:
            # Replies to the given-up chunks may still come. A new connection will not see them.
            self._drop(channel)
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
            writer, context = self._writer, self._context
        for channel in channels:
            channel.close()
        if writer:
            writer.close()
        if context:
            context.term()

    def _channel(self, endpoint: str) -> "_Channel":
        with self._lock:
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = self._channels[endpoint] = _Channel(self._zmq(), endpoint)
            return channel

    def _drop(self, channel: "_Channel") -> None:
        with self._lock:
            if self._channels.get(channel.endpoint) is channel:
                del self._channels[channel.endpoint]
        channel.close()

    def _receiving(self) -> "_Writer":
        with self._lock:
            if self._host is None:
                raise ValueError("a sending zmq transport has no address; make it with receiver=True")
            if self._writer is None:
                self._writer = _Writer(self._zmq(), self._host, self._regions, self._peers)
            return self._writer

    def _zmq(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._closed:
            raise TransferError("the zmq transport is closed")
        if self._context is None:
            self._context = zmq.Context()
        return self._context


class _Channel:
    """The sending side of one endpoint. One writer at a time."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.connect(endpoint)

    def write(self, copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        with self._lock:
            try:
                self._write(copies, tag, deadline)
            except zmq.ZMQError as error:
                raise TransferError(f"the channel to {self.endpoint} failed: {error}") from error

    def close(self) -> None:
        """Ends a write in another thread within POLL_S."""
        self._closing.set()
        with self._lock:
            self._socket.close()

    def _write(self, copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        sent = answered = 0
        for address, chunk in _chunks(copies):
            if sent - answered == WINDOW:
                answered = self._expect_reply(answered, deadline)
            self._wait(zmq.POLLOUT, deadline)
            self._socket.send_multipart([tag, _HEADER.pack(sent, address), chunk])
            sent += 1
        while answered < sent:
            answered = self._expect_reply(answered, deadline)

    def _expect_reply(self, number: int, deadline: float) -> int:
        """Reads the reply to chunk `number`; returns the next number."""
        self._wait(zmq.POLLIN, deadline)
        frames = self._socket.recv_multipart()
        if len(frames) != 2 or len(frames[0]) != _NUMBER.size:
            raise TransferError(f"{self.endpoint} answered with {len(frames)} frames, not number and error")
        got, error = frames
        if error:
            raise TransferError(f"{self.endpoint} refused a write: {error.decode(errors='replace')}")
        if _NUMBER.unpack(got) != (number,):
            raise TransferError(f"{self.endpoint} answered chunk {_NUMBER.unpack(got)[0]}, chunk {number} was due")
        return number + 1

    def _wait(self, flag: int, deadline: float) -> None:
        while (remaining := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(min(remaining, POLL_S) * 1000) + 1, flag):
                return
            if self._closing.is_set():
                raise TransferError("the zmq transport was closed")
        # Nothing reads the source again: zmq has copied what it took. What it still sends, the receiver refuses.
        settled: Future[None] = Future()
        settled.set_result(None)
        raise TransferTimeout(f"{self.endpoint} did not take or answer a chunk in time", settled)


class _Writer:
    """The receiving side: one thread that owns the ROUTER socket, lets peers in and writes admitted chunks."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, regions: Regions, peers: AllowList
    ) -> None:
        self._regions = regions
        self._peers = peers
        self._admitted: Mapping[bytes, int] = {}
        self._write_lock = threading.Lock()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(socket.has_dualstack_ipv6()))
        self._socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        self._socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._gate = context.socket(zmq.REP)
        self._gate.bind(_ZAP)
        self.port = _bind(self._socket, host)
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind(_WAKE)
        self._closer = context.socket(zmq.PAIR)
        self._closer.connect(_WAKE)
        self._thread = threading.Thread(target=self._run, name="tilert-zmq-receive", daemon=True)
        self._thread.start()

    def admit(self, tags: Mapping[bytes, int]) -> None:
        """Returns when no chunk of another tag is being written."""
        with self._write_lock:
            self._admitted = dict(tags)

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._closer.send(b"")
        self._thread.join(timeout=5)
        self._closer.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._gate, zmq.POLLIN)
        with self._socket, self._wake, self._gate:
            while self._wake not in (ready := dict(poller.poll())):
                if self._gate in ready:
                    self._gate.send_multipart(self._verdict(self._gate.recv_multipart()))
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart(copy=False))

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        """ZAP's reply to its question about a new connection: version, id, domain, address, ..."""
        version, number, _, address = request[:4]
        refused = self._peers.refusal_of_address(address.decode(errors="replace"))
        status = [b"400", b"not in the allow-list"] if refused else [b"200", b""]
        return [version, number, *status, b"", b""]

    def _answer(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 4 or len(frames[2].buffer) != _HEADER.size:
            return  # not our protocol: there is no number to answer to
        number, address = _HEADER.unpack(frames[2].bytes)
        error = self._store(frames[1].bytes, address, frames[3].buffer)
        self._socket.send_multipart([frames[0].bytes, _NUMBER.pack(number), error.encode()])

    def _store(self, tag: bytes, address: int, data: memoryview) -> str:
        """Writes one chunk, or says why not."""
        with self._write_lock:
            start = self._admitted.get(tag)
            if start is None:
                return f"transfer {tag[:300]!r} is not admitted"
            try:
                region = self._regions.find(address, len(data))
            except TransferError as error:
                return str(error)
            if region.start != start:
                return f"{len(data)} bytes at {address:#x} are not in the slot of transfer {tag!r}"
            _memory(address, len(data))[:] = data
            return ""


def _bind(receiving: "zmq.Socket[bytes]", host: str) -> int:
    """Binds to a free port of host, all interfaces for a wildcard; returns the port."""
    address = "*" if host in WILDCARDS else f"[{host}]" if ":" in host else host
    receiving.bind(f"tcp://{address}:*")
    return int(receiving.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])


def _chunks(copies: Sequence[Copy]) -> Iterator[tuple[int, memoryview]]:
    """(destination address, bytes) of at most CHUNK_BYTES."""
    for copy in copies:
        for offset in range(0, copy.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, copy.nbytes - offset)
            yield copy.dst + offset, _memory(copy.src + offset, nbytes)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
