"""The HTTP side of the decode server (http-api.md 1.2 to 1.7)."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from tilert_ref.decode_server.service import Decode, DecodeService, Lease
from tilert_ref.decode_server.validation import DecodeBody, DecodeError, Rid

logger = logging.getLogger(__name__)

QUEUE_BEAT_S = 2.0
"""How often a queued stream says that it is alive, until its request is begun."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long while its socket is full counts as gone: it holds the node."""


class CancelBody(BaseModel):
    rid: Rid


class ClientStalled(Exception):
    """The client did not read for SEND_TIMEOUT_S."""


def json_response(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


@dataclass(frozen=True)
class Identity:
    """profile: for `/capabilities`. poll_s: stream batching interval, seconds; 0 sends each step at once."""

    profile: str
    poll_s: float = 0.0


def create_app(service: DecodeService, identity: Identity) -> FastAPI:
    app = FastAPI(title="tilert_ref decode server", docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, refuse_schema)

    @app.get("/health")
    async def health() -> Response:
        return health_response(service)

    @app.get("/capabilities")
    async def capabilities() -> Response:
        ready = service.engine.ready
        if ready is None:
            return json_response({"error": service.engine.status.reason, "error_type": "engine_unavailable"}, 503)
        facts = {"profile": identity.profile, "engine": ready.name, "capabilities": asdict(ready.capabilities)}
        return json_response(facts | {"receive_slots": service.receive_slots, "max_seq_len": ready.max_seq_len})

    @app.get("/decode_status")
    async def decode_status() -> Response:
        rid = service.current_rid
        status = {"status": "idle" if rid is None else "busy", "current_rid": rid}
        return json_response(status | ({"queued": service.queued_rids} if service.queued_rids else {}))

    @app.post("/pd/cancel")
    async def cancel(body: CancelBody) -> Response:
        if service.cancel(body.rid):
            return json_response({"cancelled": body.rid})
        return json_response({"error": "no matching in-flight request", "current_rid": service.current_rid}, 404)

    @app.post("/pd/decode")
    async def decode(body: DecodeBody) -> Response:
        return DecodeResponse(service, body, identity.poll_s)

    return app


async def refuse_schema(request: Request, error: RequestValidationError) -> Response:
    """FastAPI's 422 without the echoed input, which may hold what JSON can't say (NaN, lone surrogates)."""
    detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()]
    return json_response({"detail": detail}, 422)


def health_response(service: DecodeService) -> Response:
    """200 if a request could be served; else 503 with the reason."""
    engine, receiver = service.engine.status, service.receiver.health()
    reason = engine.reason or ("" if receiver["ok"] else f"receive server: {receiver['reason']}")
    facts = {"engine": asdict(engine), "receiver": receiver}
    if reason:
        return json_response({"status": "unavailable", "reason": reason} | facts, 503)
    return json_response({"status": "ok"} | facts)


class DecodeResponse(Response):
    """The reply to /pd/decode. Takes the node's lease when it is called and gives it back before it returns.

    Endpoint and streaming body are one call on purpose: a lease taken in an endpoint, for a body generator to release,
    is lost when the client goes before the generator is started.
    """

    def __init__(self, service: DecodeService, body: DecodeBody, poll_s: float) -> None:
        super().__init__()
        self._service = service
        self._body = body
        self._poll_s = poll_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease = self._service.try_lease(self._body)
        if lease is None:
            busy = {"error": "busy", "current_rid": self._service.current_rid}
            return await json_response(busy, 429)(scope, receive, send)
        watcher = asyncio.create_task(cancel_when_gone(receive, lease))
        try:
            if self._body.stream:
                await self._stream(lease, scope, receive, send)
            else:
                await self._whole(lease, scope, receive, send)
        except ClientStalled:
            logger.warning("the client of request %s does not read: dropped", lease.rid)
        finally:
            watcher.cancel()
            await self._service.release(lease)

    async def _whole(self, lease: Lease, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with typed_errors(lease):
                reply = json_response(await self._service.complete(lease))
        except DecodeError as error:
            reply = json_response(error.body, error.status)
        await self._service.release(lease)  # first: whoever has the reply may send the next request at once
        await reply(scope, receive, send)

    async def _stream(self, lease: Lease, scope: Scope, receive: Receive, send: Send) -> None:
        queued = not lease.turn.is_set()
        try:
            with typed_errors(lease):
                decode = await (self._begin_queued(lease, send) if queued else self._service.begin(lease))
        except DecodeError as error:
            await self._service.release(lease)
            if queued:
                return await send_line(send, error.line() | {"status": error.status}, more=False)
            return await json_response(error.body, error.status)(scope, receive, send)
        if not queued:
            await start_lines(send)
        try:
            with typed_errors(lease):
                async for line in decode.lines(self._poll_s):
                    await send_line(send, line)
                last = decode.closing_line()
        except DecodeError as error:
            last = error.line()
        await self._service.release(lease)
        await send_line(send, last, more=False)

    async def _begin_queued(self, lease: Lease, send: Send) -> Decode:
        """As `DecodeService.begin`, but the answer starts at once: whoever waits for minutes wants to see us alive."""
        await start_lines(send)
        beginning = asyncio.create_task(self._service.begin(lease))
        try:
            while not beginning.done():
                await send_line(send, {"queued": True})
                await asyncio.wait({beginning}, timeout=QUEUE_BEAT_S)
            return beginning.result()
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)


@contextlib.contextmanager
def typed_errors(lease: Lease) -> Iterator[None]:
    """Turns a bug of ours into a 500 that names the request, instead of a connection that just ends."""
    try:
        yield
    except (DecodeError, ClientStalled):
        raise
    except Exception as error:
        logger.exception("request %s failed", lease.rid)
        raise DecodeError(500, f"{type(error).__name__}: {error}", rid=lease.rid) from error


async def cancel_when_gone(receive: Receive, lease: Lease) -> None:
    """Cancels the request when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    lease.cancel()


async def start_lines(send: Send) -> None:
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_line(send: Send, line: Mapping[str, Any], more: bool = True) -> None:
    data = msgspec.json.encode(line) + b"\n"
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        raise ClientStalled from None
