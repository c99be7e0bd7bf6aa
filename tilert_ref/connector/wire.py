"""Control connections: frames of `codec` over TCP, every operation with its own deadline.

Deadlines are values of `time.monotonic()`. A deadline that passes raises TimeoutError, an end of stream ConnectionLost
(a ConnectionError), so `except OSError` covers whatever the network does.

Source: protocol.md 3.1.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tilert_ref.connector.allow import LOOPBACK_HOSTS, AllowList
from tilert_ref.connector.codec import (
    MAX_FRAME,
    MAX_HELLO,
    MAX_SMALL,
    Accept,
    Announce,
    Challenge,
    Done,
    FrameDecoder,
    Hello,
    Message,
    ProtocolError,
    Reject,
    decode_announce,
    decode_challenge,
    decode_done,
    decode_hello,
    decode_reply,
    encode,
)
from tilert_ref.connector.secret import Session

BACKLOG = 128  # connections that wait for accept; TileRT has 32, which a burst of idle ones fills
RECEIVE_BYTES = 1 << 16
REPLY_SOON_S = 1e-4
MAX_SAID = 1000  # characters of a peer's refusal that go into a log
WILDCARDS = ("", "::", "0.0.0.0")
# A peer whose machine vanished sends no FIN. These find it within 10 + 3 * 5 s, where Linux's defaults take two hours.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class ConnectionLost(ConnectionError):
    """The peer closed the connection, or we did from another thread."""


_M = TypeVar("_M", bound=Message)


class HostRefused(PermissionError):
    """The allow-list has no such host or address; the text names the list."""


class Connection:
    """One control connection: one rank's transfer of one request.

    session: set once the ends have agreed on a shared secret; then everything sent is signed, everything received is
    checked.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.session: Session | None = None
        self._socket = sock
        self._decoder = FrameDecoder()
        self._payloads: deque[bytes] = deque()
        self._arrivals = select.poll()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def local_address(self) -> str:
        """The address at which the peer reached us."""
        return plain_address(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        try:
            host, port = self._socket.getpeername()[:2]
        except OSError:
            return "a closed connection"
        return f"{plain_address(host)}:{port}"

    @property
    def peer_address(self) -> str:
        """Without its port. Raises OSError if the connection is gone."""
        return plain_address(self._socket.getpeername()[0])

    def send(self, message: Message, deadline: float) -> None:
        frame = self.session.sign(message) if self.session else encode(message)
        self._socket.settimeout(_remaining(deadline))
        self._socket.sendall(frame)

    # Every kind of message has its own limit. All raise ProtocolError (codec) for what is no such message.

    def hello(self, deadline: float) -> Hello:
        return self._next(decode_hello, deadline, MAX_HELLO)

    def challenge(self, deadline: float) -> Challenge:
        return self._next(decode_challenge, deadline, MAX_SMALL)

    def announce(self, deadline: float) -> Announce:
        return self._next(decode_announce, deadline, MAX_FRAME)

    def reply(self, deadline: float) -> Accept | Reject:
        """It mostly comes within REPLY_SOON_S. For so long this thread stays awake: to fall asleep and wake takes half
        of it, and costs the sender of the reply time too. Other threads may run meanwhile."""
        soon = time.monotonic() + REPLY_SOON_S
        while not self._payloads and not self._arrived() and time.monotonic() < soon:
            pass
        return self._next(decode_reply, deadline, MAX_SMALL)

    def done(self, deadline: float | None) -> Done:
        return self._next(decode_done, deadline, MAX_SMALL)

    def _next(self, decode: Callable[[bytes], _M], deadline: float | None, limit: int) -> _M:
        payload = self.receive(deadline, limit)
        message = decode(payload)
        return self.session.check(message, payload) if self.session else message

    def receive(self, deadline: float | None, limit: int = MAX_FRAME) -> bytes:
        """The next frame's payload. deadline None waits until the peer speaks or its end of the connection is gone.

        Raises ProtocolError (codec) for a frame over the limit and for a stream that ends inside a frame.
        """
        self._decoder.limit = limit
        while not self._payloads:
            self._socket.settimeout(None if deadline is None else _remaining(deadline))
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                self._decoder.finish()
                raise ConnectionLost(f"{self.peer} closed the connection")
            self._payloads.extend(self._decoder.feed(data))
        payload = self._payloads.popleft()
        if len(payload) > limit:  # it came together with the frame before it, which had a larger limit
            raise ProtocolError(f"a frame of {len(payload)} bytes; at most {limit} are legal")
        return payload

    def await_end(self) -> None:
        """Returns when the peer's end of the connection is gone, or ours is interrupted. Drops what still comes."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(None)
            while self._socket.recv(RECEIVE_BYTES):
                pass

    def check_open(self) -> None:
        """Raises ConnectionLost if the peer's end of the connection is gone. Never blocks, takes nothing away."""
        if self._arrived() and not self._payloads and not self._socket.recv(1, socket.MSG_PEEK):
            raise ConnectionLost(f"{self.peer} closed the connection")

    def _arrived(self) -> bool:
        """Is there something to read, or the end? Only for the thread that owns the connection."""
        self._arrivals.register(self._socket, select.POLLIN)  # each time: refuses a closed socket
        return bool(self._arrivals.poll(0))

    def interrupt(self) -> None:
        """For other threads: a send or receive that is going on, or comes, ends with an OSError.

        The socket stays open: were it closed here, its owner could go on with a number that is another socket's by now.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Legal more than once."""
        self.interrupt()
        self._socket.close()


def connect(host: str, port: int, deadline: float, allowed: AllowList = LOOPBACK_HOSTS) -> Connection:
    """Looks the host up once and tries every address of it that is allowed, IPv6 and IPv4, until the deadline.

    Raises HostRefused if none is, before anything is sent.
    """
    if refused := allowed.refusal(host):
        raise HostRefused(refused)
    failure: OSError = HostRefused(f"{host!r} has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no host name: {error}") from error
    for family, kind, protocol, _, address in found:
        if refused := allowed.refusal_of_address(str(address[0]), host):
            failure = HostRefused(refused)
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_remaining(deadline))
            sock.connect(address)
            return Connection(sock)
        except OSError as error:
            sock.close()
            failure = error
    raise failure


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
    error = reject.error if reject.error.isprintable() else repr(reject.error)
    return (f"{error} ({', '.join(said)})" if said else error)[:MAX_SAID]


def plain_address(address: str) -> str:
    """An IPv4 peer of a dual-stack socket shows as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:") if "." in address else address


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining
