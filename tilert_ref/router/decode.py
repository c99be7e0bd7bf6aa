"""Client of one decode node: POST /pd/decode as an ndjson stream, cancel, health (http-api.md 1).

The router always asks for a stream, also for blocking clients: there is one path to test, a stalled node is noticed by
its silence, and closing the connection cancels the request at the node.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tilert_ref.router.errors import NodeLost, RouterError
from tilert_ref.router.fetch import BadReply, Fetched, fetch, read
from tilert_ref.router.pool import Facts, Node
from tilert_ref.router.prefill import Prefilled, describe, token_id
from tilert_ref.router.request import Request

# Errors whose meaning is the client's business: they keep their status (http-api.md 4.7).
TYPED_STATUS = {
    "grammar_unsupported": 501,
    "invalid_grammar": 400,
    "grammar_violation": 400,
    "grammar_backend_unavailable": 500,
    "logprobs_unavailable": 501,
    "capability_unavailable": 501,
    "invalid_parameter": 400,
    "request_cancelled": 499,
    "kv_transfer_timeout": 504,
    "kv_transfer_failed": 502,
}
HEALTH_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 10.0  # one engine step may have to end first
BUSY_RETRY_S = 2.0  # another router's request, or the last clean-up of our own
DRAIN_TIMEOUT_S = 1.0
QUEUE_SILENCE_S = 30.0  # a queued request's node says so every 2 s; a long injection may end the queue
# On top of the wait for KV: a stock node drains KV for up to 30 s before it refuses, then there is injection.
FIRST_LINE_GRACE_S = 60.0
MAX_LINE_BYTES = 4 * 2**20
MAX_REPLY_BYTES = 2**20  # of everything but the token stream


@dataclass(frozen=True)
class Queued:
    """The request waits at the node behind another one; says so every few seconds."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of one line, in order; the first token is among them."""

    ids: list[int]


@dataclass(frozen=True)
class Done:
    """The last line. count: how many ids the node says it sent."""

    finish_reason: str
    count: int
    timing_ms: dict[str, Any]


def decode_body(
    request: Request, prefilled: Prefilled, kv_timeout_s: float, announce_timeout_s: float, queue: bool
) -> dict[str, Any]:
    """The body of /pd/decode; max_tokens counts the first token. TileRT's nodes ignore what they don't know."""
    ours = {"queue": True} if queue else {}
    return ours | {
        "rid": prefilled.rid,
        "first_token_id": prefilled.first_token_id,
        "max_tokens": request.max_tokens,
        "sampling": request.decode_sampling(),
        "timeout_s": kv_timeout_s,
        "announce_timeout_s": announce_timeout_s,
        "stream": True,
    }


class DecodeClient:
    """Talks to any number of nodes. stall_timeout_s bounds the silence between two lines of an answer."""

    def __init__(self, http: httpx.AsyncClient, kv_timeout_s: float, stall_timeout_s: float) -> None:
        self._http = http
        self._first_line_s = kv_timeout_s + FIRST_LINE_GRACE_S
        self._stall_s = stall_timeout_s

    async def stream(
        self, node: Node, body: dict[str, Any], on_refusal: Callable[[], None]
    ) -> AsyncIterator[Tokens | Done]:
        """Yields Tokens, then one Done, when the node is free again.

        Raises RouterError for what the node refuses, after on_refusal: a refusing node works on nothing of ours. Raises
        NodeLost if it went away.
        """
        async with self._open(node, body, on_refusal) as response:
            sent = 0
            lines = self._lines(node, response)
            async for line in lines:
                event = parse_line(line, node, on_refusal)
                if isinstance(event, Queued):
                    continue
                if isinstance(event, Done):
                    self._check_end(event, sent)
                    await _drain(lines)
                    yield event
                    return
                sent += len(event.ids)
                if sent > body["max_tokens"]:
                    text = f"decode node {node} sent more than the {body['max_tokens']} tokens that it was asked for"
                    raise RouterError(502, text, code="decode_failed")
                yield event
        raise NodeLost(502, f"decode node {node} ended its answer without a last line", code="decode_truncated")

    @staticmethod
    def _check_end(done: Done, sent: int) -> None:
        if done.count != sent:
            message = f"the decode node sent {sent} tokens and says it sent {done.count}"
            raise RouterError(502, message, code="decode_truncated")
        if done.finish_reason not in ("stop", "length"):
            # Cancelled, but not by this client: its answer is incomplete, and "stop" would hide that.
            status = TYPED_STATUS["request_cancelled"]
            raise RouterError(status, f"the decode ended as {done.finish_reason!r}", code="request_cancelled")

    @asynccontextmanager
    async def _open(
        self, node: Node, body: dict[str, Any], on_refusal: Callable[[], None]
    ) -> AsyncIterator[httpx.Response]:
        """Posts, again while the node is busy, and hands out the response once its status is 200."""
        give_up = time.monotonic() + BUSY_RETRY_S
        response = await self._post(node, body)
        while response.status_code == 429 and time.monotonic() < give_up:
            await response.aclose()
            await asyncio.sleep(0.1)
            response = await self._post(node, body)
        try:
            if response.status_code != 200:
                on_refusal()
                raise refusal(node, response.status_code, await self._error_body(response))
            yield response
        finally:
            await response.aclose()

    async def _post(self, node: Node, body: dict[str, Any]) -> httpx.Response:
        request = self._http.build_request("POST", node.url + "/pd/decode", json=body)
        try:
            async with asyncio.timeout(self._first_line_s):
                return await self._http.send(request, stream=True)
        except TimeoutError:
            raise NodeLost(
                504, f"decode node {node} didn't answer within {self._first_line_s:g} s", code="decode_stalled"
            ) from None
        except httpx.HTTPError as e:
            raise _lost(node, e) from None

    @staticmethod
    async def _error_body(response: httpx.Response) -> bytes:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await read(response, MAX_REPLY_BYTES)
        except (TimeoutError, BadReply, httpx.HTTPError):
            return b""

    async def _lines(self, node: Node, response: httpx.Response) -> AsyncIterator[bytes]:
        """Lines of the answer. httpx's own line reader splits at U+2028 and others too, which JSON strings may hold."""
        buffer = b""
        limit = self._first_line_s
        chunks = response.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(limit):
                    buffer += await anext(chunks)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise NodeLost(504, f"decode node {node} sent nothing for {limit:g} s", code="decode_stalled") from None
            except httpx.HTTPError as e:
                raise _lost(node, e) from None
            *lines, buffer = buffer.split(b"\n")
            if len(buffer) > MAX_LINE_BYTES:
                raise RouterError(
                    502, f"decode node {node} sent a line over {MAX_LINE_BYTES} bytes", code="decode_failed"
                )
            for line in filter(None, lines):
                limit = min(self._stall_s, QUEUE_SILENCE_S) if line.startswith(b'{"queued"') else self._stall_s
                yield line
        if buffer:
            yield buffer

    # What the pool asks (pool.NodeApi)

    async def probe(self, node: Node) -> Facts:
        """What the node says about itself; raises NodeLost unless /health answers 200."""
        health = await self._ask(node, "GET", "/health", HEALTH_TIMEOUT_S)
        if health.status_code != 200:
            raise NodeLost(503, f"/health answered {health.status_code}: {health.text[:200]}", code="no_decode_node")
        reply = await self._ask(node, "GET", "/capabilities", HEALTH_TIMEOUT_S)
        try:
            return read_facts(reply.json())
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            return Facts()

    async def cancel(self, node: Node, rid: str) -> None:
        """Tells the node to drop rid and waits until it works on it no more; raises NodeLost if it can't be told."""
        give_up = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            await self._ask(node, "POST", "/pd/cancel", CANCEL_TIMEOUT_S, {"rid": rid})
            status = await self._ask(node, "GET", "/decode_status", CANCEL_TIMEOUT_S)
            if not _works_on(status, rid):
                return
            if time.monotonic() > give_up:
                raise NodeLost(
                    503, f"still works on a cancelled request after {IDLE_TIMEOUT_S:g} s", code="no_decode_node"
                )
            await asyncio.sleep(0.05)

    async def _ask(
        self, node: Node, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> Fetched:
        try:
            async with asyncio.timeout(timeout_s):
                return await fetch(self._http, method, node.url + path, MAX_REPLY_BYTES, json=body)
        except TimeoutError:
            raise NodeLost(503, f"{path} didn't answer within {timeout_s:g} s", code="no_decode_node") from None
        except (BadReply, httpx.HTTPError) as e:
            raise NodeLost(503, f"{path}: {describe(e)}", code="no_decode_node") from None


async def _drain(lines: AsyncIterator[bytes]) -> None:
    """Waits, not for long, for the end of the answer: TileRT's node cleans up after its last line, then closes."""
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for _ in lines:
                pass
    except (TimeoutError, RouterError):
        pass  # the answer is complete; the next request finds out about the node


def read_facts(reply: dict[str, Any]) -> Facts:
    """The body of /capabilities. The numbers are ours; TileRT's nodes don't send them."""
    capabilities = frozenset(name for name, has in reply["capabilities"].items() if has is True)
    slots, max_seq_len = (
        value if type(value := reply.get(name)) is int and value > 0 else None
        for name in ("receive_slots", "max_seq_len")
    )
    return Facts(capabilities, slots or 1, max_seq_len)


def parse_line(line: bytes, node: Node, on_refusal: Callable[[], None] = lambda: None) -> Tokens | Done | Queued:
    """One ndjson line; raises RouterError for an error line and for a line that isn't one of the protocol's.

    An error line with a status is a refusal that came after the answer had begun, for a request that was queued.
    """
    try:
        message = json.loads(line)
        if message.get("queued") is True:
            return Queued()
        if "error" in message and type(message.get("status")) is int:
            on_refusal()
            raise refusal(node, message["status"], line)
        if "error" in message:
            raise _typed_error(message, 502)
        if message.get("done") is True:
            return Done(message["finish_reason"], message["n"], _timing(message.get("timing_ms")))
        return Tokens([token_id(i) for i in message["t"]])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        text = f"can't read the decode node's line {line[:200]!r} ({type(e).__name__}: {e})"
        raise RouterError(502, text, code="decode_failed") from None


def _timing(values: Any) -> dict[str, Any]:
    """timing_ms without NaN and infinities, which Python's JSON knows and the client's may not."""
    return {name: value for name, value in dict(values or {}).items() if _is_strict_json(value)}


def _is_strict_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def refusal(node: Node, status: int, content: bytes) -> RouterError:
    """The client's error for a /pd/decode status other than 200."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        message = {"error": content[:300].decode(errors="replace")}
    if status == 429:
        return RouterError(429, f"decode node {node} is busy", code="decode_busy", retry_after_s=1)
    if status == 504:
        text = "kv_transfer_timeout: the prompt's KV didn't reach the decode node in time"
        return RouterError(504, text, code="kv_transfer_timeout")
    if status == 503:
        return NodeLost(503, f"decode node {node}: {message.get('error')}", code="decode_unavailable", retry_after_s=1)
    message.setdefault("error", message.get("detail"))
    return _typed_error(message, 502)


def _typed_error(message: dict[str, Any], default_status: int) -> RouterError:
    code = message.get("error_type")
    code = code if isinstance(code, str) else "decode_failed"
    return RouterError(TYPED_STATUS.get(code, default_status), f"decode: {message['error']}", code=code)


def _works_on(status: Fetched, rid: str) -> bool:
    try:
        reply = status.json()
        return reply.get("current_rid") == rid or rid in reply.get("queued", ())
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False


def _lost(node: Node, error: Exception) -> NodeLost:
    return NodeLost(502, f"decode node {node} is gone: {describe(error)}", code="decode_unreachable")
