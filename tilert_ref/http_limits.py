"""What an HTTP client may cost us before it has sent a whole request: time, bytes, connections. For uvicorn's h11.

uvicorn alone lets a client that connects and says nothing, or drips a header byte by byte, stay for ever; so it does a
client that drips the rest of a body after its answer is out. Here a header has `HEADER_S`, a body `BODY_S`, a header
`HEADER_BYTES`; when all places are taken, the oldest connection that has not sent a whole header goes. A peer that is
not on the allow-list is told so with 403 before anything of what it sends is parsed.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilert_ref.connector.allow import EVERYBODY, AllowList
from tilert_ref.connector.guests import Full, Guests

HEADER_S = 10.0
BODY_S = 70.0  # the router has its own, shorter one, which answers 408
HEADER_BYTES = 1 << 16
TURNED_AWAY_S = 1.0
_REASONS = {403: "Forbidden", 413: "Content Too Large", 503: "Service Unavailable"}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class LimitedProtocol(H11Protocol):
    """One connection. `uvicorn_limits` makes the subclass with a server's peers and guests."""

    peers: AllowList
    guests: Guests

    _timer: asyncio.TimerHandle | None = None
    _phase: str | None = None  # "header", "body" or None: what the client owes us
    _turned_away: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        peer = (transport.get_extra_info("peername") or ("",))[0]
        if refused := self.peers.refusal_of_address(peer):
            self._turned_away = 403, refused
        else:
            try:
                leaver = self.guests.enter(self, peer)
            except Full as error:
                self._turned_away = 503, str(error)
            else:
                if leaver is not None:
                    leaver.transport.abort()
        if self._turned_away is not None:
            self._timer = self.loop.call_later(TURNED_AWAY_S, transport.abort)
            return
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._turned_away is not None:  # not before: a reply to what has not been read may get lost
            self.transport.write(_reply(*self._turned_away))
            self.transport.close()
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self.guests.leave(self)
        if self._turned_away is None:
            super().connection_lost(error)

    def _watch(self) -> None:
        """Starts the clock of the phase that has begun, stops that of the one that is over."""
        phase = {h11.IDLE: "header", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        if phase != "header":
            self.guests.announced(self)
        if phase == self._phase:
            return
        self._stop_timer()
        self._phase = phase
        if phase is not None:
            self._timer = self.loop.call_later(HEADER_S if phase == "header" else BODY_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def uvicorn_limits(max_connections: int, peers: AllowList = EVERYBODY) -> dict[str, Any]:
    """Settings for uvicorn.Config."""
    places = {"peers": peers, "guests": Guests(max_connections, max_connections)}
    return {
        "http": type("LimitedProtocol", (LimitedProtocol,), places),
        "h11_max_incomplete_event_size": HEADER_BYTES,
        "ws": "none",
    }


class BodyLimit:
    """ASGI middleware: reads the whole body before the application sees it; 413 over `limit` bytes."""

    def __init__(self, app: App, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        first = await self._whole(scope, receive)
        if first is None:
            return await _refuse(send, 413, f"the body is over the limit of {self._limit} bytes")
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return first

        return await self._app(scope, replay, send)

    async def _whole(self, scope: MutableMapping[str, Any], receive: Receive) -> Message | None:
        """The body as one message, or the client's leaving; None if it is too long."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._limit:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}


def _reply(status: int, error: str) -> bytes:
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _refuse(send: Send, status: int, error: str) -> None:
    # The connection stays: closed before the body's end, it would be reset, and this reply might never be seen. What is
    # left of the body is read and dropped, for BODY_S.
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
