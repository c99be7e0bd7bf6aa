"""Control connections: frames of `codec` over TCP, every operation with its own deadline.

Deadlines are values of `time.monotonic()`. A deadline that passes raises TimeoutError, an end of stream ConnectionLost
(a ConnectionError), so `except OSError` covers whatever the network does.

Source: protocol.md 3.1.
"""

import contextlib
import socket
import time
from collections import deque

from tilert_ref.connector.codec import FrameDecoder, Message, Reject, encode

BACKLOG = 32
RECEIVE_BYTES = 1 << 16
WILDCARDS = ("", "::", "0.0.0.0")
# A peer whose machine vanished sends no FIN. These find it within 10 + 3 * 5 s, where Linux's defaults take two hours.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class ConnectionLost(ConnectionError):
    """The peer closed the connection, or we did from another thread."""


class Connection:
    """One control connection: one rank's transfer of one request."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = FrameDecoder()
        self._payloads: deque[bytes] = deque()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def local_address(self) -> str:
        """The address at which the peer reached us."""
        return _plain_address(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        try:
            host, port = self._socket.getpeername()[:2]
        except OSError:
            return "a closed connection"
        return f"{_plain_address(host)}:{port}"

    def send(self, message: Message, deadline: float) -> None:
        self._socket.settimeout(_remaining(deadline))
        self._socket.sendall(encode(message))

    def receive(self, deadline: float | None) -> bytes:
        """The next frame's payload. deadline None waits until the peer speaks or its end of the connection is gone.

        Raises ProtocolError (codec) for a frame over the limit and for a stream that ends inside a frame.
        """
        while not self._payloads:
            self._socket.settimeout(None if deadline is None else _remaining(deadline))
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                self._decoder.finish()
                raise ConnectionLost(f"{self.peer} closed the connection")
            self._payloads.extend(self._decoder.feed(data))
        return self._payloads.popleft()

    def close(self) -> None:
        """Legal from any thread and more than once; a receive in another thread ends with ConnectionLost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(host: str, port: int, deadline: float) -> Connection:
    """Tries every address of the host, IPv6 and IPv4."""
    return Connection(socket.create_connection((host, port), timeout=_remaining(deadline)))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks one. "" and "::" take IPv4 too, and only IPv4 where the machine has no IPv6."""
    if host in ("", "::"):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def describe(reject: Reject) -> str:
    """A reject for logs: its reason and what came with it."""
    extras = ("rid", "rank", "detail", "busy_rid", "busy_state", "max_seq_len")
    said = [f"{name} {getattr(reject, name)!r}" for name in extras if getattr(reject, name) is not None]
    return f"{reject.error} ({', '.join(said)})" if said else reject.error


def _plain_address(address: str) -> str:
    """An IPv4 peer of a dual-stack socket shows as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:") if "." in address else address


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining
