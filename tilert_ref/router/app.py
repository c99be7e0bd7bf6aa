"""The HTTP surface, and the order of one request's steps: check, lease, prefill, decode, reply, release."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tilert_ref.connector.rid import new_request_id
from tilert_ref.router.answer import Answer
from tilert_ref.router.client import Client, ClientGone, Receive, Send
from tilert_ref.router.decode import DecodeClient, Done, Tokens, decode_body
from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.errors import NodeLost, RouterError, UpstreamReply, too_long
from tilert_ref.router.fetch import PLAIN
from tilert_ref.router.fields import EndpointName
from tilert_ref.router.parsing import Parsing
from tilert_ref.router.pool import Node, Pool
from tilert_ref.router.prefill import PATHS, PrefillClient, Prefilled, forwardable
from tilert_ref.router.replies import DONE_EVENT, Reply, event
from tilert_ref.router.request import Request, Sampling, parse_request

log = logging.getLogger(__name__)

FRESH_S = 1.0


@dataclass(frozen=True)
class Config:
    """Everything a router is made of. Times in seconds; request_timeout_s bounds a whole request.

    detokenizer None means: no text, token ids only. parsing None means: all text is content, tools are refused.
    """

    vllm_url: str
    nodes: list[Node]
    detokenizer: Detokenizer | None = None
    parsing: Parsing | None = None
    defaults: Sampling = field(default_factory=Sampling)
    queue_timeout_s: float = 0.0
    prefetch: bool = True
    kv_timeout_s: float = 120.0
    announce_timeout_s: float = 20.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 3600.0
    max_body_bytes: int = 64 * 2**20
    force_include_usage: bool = False


class Router:
    """One router: its clients of vLLM and of the decode nodes, and the pool."""

    def __init__(self, config: Config, http: httpx.AsyncClient) -> None:
        self.config = config
        self.prefill = PrefillClient(http, config.vllm_url, config.request_timeout_s)
        self.decode = DecodeClient(http, config.kv_timeout_s, config.stall_timeout_s)
        self.pool = Pool(config.nodes, self.decode, config.queue_timeout_s, config.prefetch)

    async def serve(self, client: Client, endpoint: EndpointName) -> None:
        """One request, from its body to the last byte of its answer. Every failure that can be told is told."""
        key = new_request_id()
        try:
            await self._serve(client, endpoint, key)
        except ClientGone:
            log.info("%s: the client left", key)

    async def _serve(self, client: Client, endpoint: EndpointName, key: str) -> None:
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                raw = await client.body(self.config.max_body_bytes)
                parses = self.config.parsing is not None
                request = parse_request(raw, endpoint, self.config.defaults, client.header("x-request-id"), parses)
                await _unless_gone(self._answer(request, client, key), client)
        except ClientGone:
            raise
        except UpstreamReply as e:
            log.info("%s: %s", key, e)
            await client.whole(e.status, e.content, {"Content-Type": e.content_type})
        except Exception as e:
            error = _as_router_error(e, self.config)
            log.log(_level(error), "%s: %d %s", key, error.status, error.message, exc_info=error.status == 500)
            await client.fail(error)

    async def _answer(self, request: Request, client: Client, key: str) -> None:
        started = time.monotonic()
        authorization = forwardable(client.header("authorization"))
        with await self.pool.acquire(request.needs, await self._tokens(request)) as lease:
            queue_ms = (time.monotonic() - started) * 1e3
            node = lease.node
            prefilled = await self.prefill.run(request, key, node.host, node.ctrl_port, authorization)
            limit = node.facts.max_seq_len
            if limit is not None and prefilled.prompt_tokens >= limit:
                raise too_long(prefilled.prompt_tokens, limit)
            reply = Reply(request, prefilled, self._parts(request, prefilled), started, queue_ms)
            lease.dispatched(prefilled.rid)
            timeouts = self.config.kv_timeout_s, self.config.announce_timeout_s
            body = decode_body(request, prefilled, *timeouts, queue=node.facts.slots > 1)
            try:
                async with aclosing(self.decode.stream(node, body, lease.terminated)) as events:
                    async for e in events:
                        if isinstance(e, Done):
                            # Before the answer goes out: a client that has it may send its next request at once.
                            lease.terminated()
                            lease.release()
                        await self._pass_on(e, request, reply, client)
            except NodeLost as e:
                self.pool.mark_down(node, e.message)
                raise
        log.info("%s: caller id %s, node %s, %d tokens", key, request.caller_id, node, len(reply.ids))

    async def _tokens(self, request: Request) -> int:
        """How many tokens the prompt has at least; 0 where only vLLM can count them (chats)."""
        prompt = request.body.get("prompt")
        if prompt is None or "truncate_prompt_tokens" in request.body:
            return 0
        alone = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
        if isinstance(alone, list):
            return len(alone)
        shortest = min((node.facts.max_seq_len or 0 for node in self.pool.nodes), default=0)
        if self.config.detokenizer is None or not 0 < shortest <= len(alone.encode()):
            return 0  # a token is a byte at least: it fits
        tokenizer = self.config.detokenizer.tokenizer
        return len(await asyncio.to_thread(lambda: tokenizer.encode(alone, add_special_tokens=False).ids))

    def _parts(self, request: Request, prefilled: Prefilled) -> Answer:
        """The answer's text, and its parts if there is a parser. Completions are never parsed."""
        detokenizer, parsing = self.config.detokenizer, self.config.parsing
        prompt_ids = prefilled.prompt_token_ids or ()
        if parsing is None or request.endpoint != "chat":
            return Answer(detokenizer.stream(prompt_ids) if detokenizer else None)
        return Answer(
            parsing.detokenizer.stream(prompt_ids),
            parsing.parser(request.body, prompt_ids),
            reasoning=request.include_reasoning,
            parallel=request.parallel_tool_calls,
        )

    async def _pass_on(self, e: Tokens | Done, request: Request, reply: Reply, client: Client) -> None:
        if request.stream:
            await _stream(e, reply, client, request.include_usage or self.config.force_include_usage)
        elif isinstance(e, Tokens):
            reply.take(e.ids)
        else:
            await client.json(200, reply.whole(e))

    # The other routes

    async def health(self, _: HttpRequest) -> Response:
        """200 if a request could be answered now or later, 503 with reasons if vLLM or every node is down."""
        asking = asyncio.create_task(self.pool.ask_all())
        vllm = await self.prefill.problem()
        await asyncio.wait({asking}, timeout=FRESH_S)  # a node that hangs must not make the router look hung
        nodes = self.pool.problems()
        body: dict[str, Any] = {"status": "ok", "decode_free": self.pool.free_count()}
        if vllm or len(nodes) == len(self.pool.nodes):
            body |= {"status": "unavailable", "reasons": ([vllm] if vllm else []) + nodes}
            return JSONResponse(body, 503)
        return JSONResponse(body)

    async def pool_status(self, _: HttpRequest) -> Response:
        return JSONResponse(self.pool.snapshot())

    async def models(self, http_request: HttpRequest) -> Response:
        reply = await self.prefill.models(forwardable(http_request.headers.get("authorization")))
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))


async def _stream(e: Tokens | Done, reply: Reply, client: Client, usage: bool) -> None:
    # Headers go out with the first event, so that everything that fails before it has an honest status.
    chunks = [] if client.started else list(reply.opening())
    if isinstance(e, Tokens):
        chunks += reply.pieces(e.ids)
        await client.events(b"".join(map(event, chunks)))
    else:
        chunks += reply.closing(e, usage)
        await client.events(b"".join(map(event, chunks)) + DONE_EVENT)
        await client.end()


async def _unless_gone(work: Coroutine[Any, Any, None], client: Client) -> None:
    """Awaits work, but cancels it and raises ClientGone as soon as the client closes the connection."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(client.gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not client.complete:
            raise ClientGone  # a complete answer also ends `gone`; what work has left to do then is soon done
        await task
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _as_router_error(error: Exception, config: Config) -> RouterError:
    if isinstance(error, RouterError):
        return error
    if isinstance(error, TimeoutError):
        return RouterError(504, f"the request took longer than {config.request_timeout_s:g} s", code="request_timeout")
    return RouterError(500, "internal error of the router; its log has the details", code="internal_error")


def _level(error: RouterError) -> int:
    return logging.ERROR if error.status >= 500 and error.status != 501 else logging.INFO


@dataclass(frozen=True)
class Generate:
    """ASGI application of one generation endpoint. `current` holds the router once the application has started."""

    current: Mapping[str, Router]
    endpoint: EndpointName

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await self.current["router"].serve(Client(scope, receive, send), self.endpoint)


def create_app(config: Config) -> Starlette:
    """The router as an ASGI application."""
    current: dict[str, Router] = {}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # No kept connections: a restarted server leaves stale ones behind, and the next request would fail on one.
        # No environment proxies: all peers are named on the command line.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=10.0)
        client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, headers=PLAIN)
        async with client as http:
            router = current["router"] = Router(config, http)
            watch = asyncio.create_task(router.pool.watch())
            yield
            watch.cancel()
            await router.pool.close()

    routes = [Route(path, Generate(current, endpoint), methods=["POST"]) for endpoint, path in PATHS.items()]
    for path, name in (("/health", "health"), ("/pool_status", "pool_status"), ("/v1/models", "models")):
        routes.append(Route(path, _method(current, name), methods=["GET"]))
    handlers = {HTTPException: _http_error, RouterError: _router_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _method(current: Mapping[str, Router], name: str) -> Any:
    async def route(http_request: HttpRequest) -> Response:
        return await getattr(current["router"], name)(http_request)

    return route


async def _http_error(_: HttpRequest, error: HTTPException) -> Response:
    """Starlette's own 404 and 405, in OpenAI's shape."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = RouterError(error.status_code, str(error.detail), code=code).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _router_error(_: HttpRequest, error: RouterError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())
