"""The client's end of one HTTP request, on bare ASGI: read the body, notice that the client left, write the answer.

Bare ASGI because one request is one coroutine here: its `with lease` block then covers validation, prefill, decode and
the last byte sent. With a framework's streaming response the body generator may never start, and a lease that it should
give back stays taken (http-api.md 7.13 is that fault in TileRT's decode server).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from tilert_ref.router.errors import RouterError
from tilert_ref.router.replies import error_events, to_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGone(Exception):
    """The client closed its connection or stopped reading."""


class Client:
    """One client. started: headers are out. complete: the whole answer is out."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive
        self._asgi_send = send
        self.started = False
        self.complete = False

    def header(self, name: str) -> str | None:
        return self._headers.get(name.lower())

    async def body(self, limit: int) -> bytes:
        """The request body; raises RouterError 413 over limit bytes, 408 if it is slow, ClientGone."""
        declared = self.header("content-length") or ""
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(limit)
        except TimeoutError:
            raise RouterError(
                408, f"the body didn't arrive within {BODY_TIMEOUT_S:g} s", code="request_timeout"
            ) from None

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)

    async def gone(self) -> None:
        """Returns when the client has closed the connection (or, after a complete answer, at once)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """A whole answer."""
        await self._start(status, {"Content-Length": str(len(content)), **headers})
        await self._body(content, more=False)

    async def json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.whole(status, to_json(body), {"Content-Type": "application/json", **(headers or {})})

    async def events(self, content: bytes) -> None:
        """Part of an event stream; the first call sends the headers."""
        if not self.started:
            await self._start(200, _SSE_HEADERS)
        await self._body(content, more=True)

    async def end(self) -> None:
        await self._body(b"", more=False)

    async def fail(self, error: RouterError) -> None:
        """Tells the client: as a status if nothing is out yet, else as the end of the event stream."""
        if not self.started:
            await self.json(error.status, error.body(), error.headers())
        elif not self.complete:
            await self.events(error_events(error))
            await self.end()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, content: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
        self.complete = self.complete or not more

    async def _send(self, message: Message) -> None:
        # A client that doesn't read fills the socket's buffer and would hold its decode node for ever.
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._asgi_send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None


def _too_large(limit: int) -> RouterError:
    return RouterError(413, f"the body is over the limit of {limit} bytes", code="body_too_large")
