"""The prefill leg: rewrite the client's body for vLLM, post it, read the first token (http-api.md 3.4, case K5)."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tilert_ref.connector.rid import derive_rid
from tilert_ref.router.errors import RouterError, UpstreamReply, bad_field
from tilert_ref.router.fetch import BadReply, Fetched, fetch
from tilert_ref.router.fields import EndpointName, fields_of
from tilert_ref.router.request import Request, Sampling

HEALTH_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 64 * 2**20  # the ids of a prompt of a million tokens, and its logprobs, are under 20
MODELS_TIMEOUT_S = 10.0
PATHS: dict[EndpointName, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Prefilled:
    """What decode and the reply need of vLLM's one-token answer.

    rid: the handoff key. prompt_token_ids: None if vLLM is too old to return them. ms: duration of the call.
    """

    rid: str
    first_token_id: int
    model: str
    created: int
    prompt_tokens: int
    prompt_tokens_details: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    ms: float


def prefill_body(
    body: Mapping[str, Any], endpoint: EndpointName, sampling: Sampling, key: str, host: str, ctrl_port: int
) -> dict[str, Any]:
    """The body for vLLM: everything that shapes the prompt is kept, everything that shapes the answer is one token.

    key becomes vLLM's request id. host and ctrl_port name the decode node that the KV goes to. Which fields are copied,
    dropped or set is the `prefill` column of the field table. Fields outside the table are copied.
    """
    table = fields_of(endpoint)
    kept = {k: v for k, v in body.items() if v is not None and (k not in table or table[k].prefill == "copy")}
    return kept | sampling.as_dict() | _logprobs(body, endpoint) | {
        "max_tokens": 1,
        "stream": False,
        "request_id": key,
        # Either one is enough to read the first token; older servers know only the second.
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "kv_transfer_params": {"tilert_host": host, "tilert_ctrl_port": ctrl_port},
    }  # fmt: skip


def _logprobs(body: Mapping[str, Any], endpoint: EndpointName) -> dict[str, Any]:
    """Logprobs are always on, for the token's name; as many candidates as the client wants for token 0."""
    if endpoint == "completions":
        return {"logprobs": max(1, body.get("logprobs") or 1)}
    return {"logprobs": True, "top_logprobs": max(1, body.get("top_logprobs") or 1)}


def forwardable(authorization: str | None) -> str | None:
    """The client's Authorization header if vLLM can be sent it; else RouterError 400, which doesn't quote it."""
    if authorization and not (authorization.isascii() and authorization.isprintable()):
        raise bad_field("Authorization", "Authorization header: legal: printable ASCII characters only")
    return authorization


class PrefillClient:
    """Posts prefills to one vLLM. timeout_s bounds a whole call; cancelling the task closes the connection, upon which
    vLLM aborts the request. authorization is what `forwardable` returned."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, timeout_s: float) -> None:
        self._http = http
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s

    async def run(
        self, request: Request, key: str, host: str, ctrl_port: int, authorization: str | None = None
    ) -> Prefilled:
        """Raises UpstreamReply for vLLM's 4xx, RouterError 502 or 504 for everything else that goes wrong."""
        body = prefill_body(request.body, request.endpoint, request.sampling, key, host, ctrl_port)
        start = time.monotonic()
        # No X-Request-Id: vLLM prefers that header to the body's request_id, and the handoff key would be lost.
        response = await self._call("POST", PATHS[request.endpoint], json.dumps(body).encode(), authorization)
        if 400 <= response.status_code < 500:
            raise UpstreamReply(
                response.status_code, response.content, response.headers.get("content-type", "application/json")
            )
        if response.status_code != 200:
            raise _failed(f"prefill: vLLM answered {response.status_code}: {response.text[:500]}")
        return read_reply(response.content, request.endpoint, key, (time.monotonic() - start) * 1e3)

    async def models(self, authorization: str | None = None) -> Fetched:
        """vLLM's /v1/models as it is."""
        return await self._call("GET", "/v1/models", None, authorization, MODELS_TIMEOUT_S)

    async def problem(self) -> str | None:
        """None if vLLM's /health answers 200, else what is wrong."""
        try:
            response = await self._call("GET", "/health", None, None, HEALTH_TIMEOUT_S)
        except RouterError as e:
            return e.message
        return None if response.status_code == 200 else f"vLLM /health answered {response.status_code}"

    async def _call(
        self, method: str, path: str, content: bytes | None, authorization: str | None, timeout_s: float | None = None
    ) -> Fetched:
        headers = {"Content-Type": "application/json"} if content else {}
        if authorization:
            headers["Authorization"] = authorization
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit):
                url = self._base_url + path
                return await fetch(self._http, method, url, MAX_REPLY_BYTES, content=content, headers=headers)
        except TimeoutError:
            raise RouterError(504, f"vLLM didn't answer {path} within {limit:g} s", code="prefill_timeout") from None
        except BadReply as e:
            raise _failed(f"prefill: {e}") from None
        except httpx.HTTPError as e:
            raise _failed(f"vLLM can't be reached at {self._base_url}{path}: {describe(e)}") from None


def read_reply(content: bytes, endpoint: EndpointName, key: str, ms: float) -> Prefilled:
    """Reads vLLM's one-token reply; raises RouterError 502 if it isn't one or belongs to another key."""
    try:
        reply = json.loads(content)
        refused = (reply.get("kv_transfer_params") or {}).get("tilert_error")
        choice = reply["choices"][0]
        rid = derive_rid(reply["id"])
        usage = reply.get("usage") or {}
        prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids") or None
        prefilled = Prefilled(
            rid=rid,
            first_token_id=first_token(choice, endpoint),
            model=reply["model"],
            created=reply["created"],
            prompt_tokens=_count(usage.get("prompt_tokens")),
            prompt_tokens_details=usage.get("prompt_tokens_details"),
            prompt_token_ids=None if prompt_ids is None else [token_id(i) for i in prompt_ids],
            ms=ms,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise _failed(f"prefill: can't read vLLM's reply ({type(e).__name__}: {e}): {content[:300]!r}") from None
    if rid != key:
        # Without this check the decode node would wait for KV that arrives under another key.
        raise _failed(
            f"prefill: vLLM ran the request as {reply['id']!r} instead of {key!r}; does something between router and "
            "vLLM set X-Request-Id?"
        )
    if refused:
        raise RouterError(502, f"prefill: vLLM's connector refused the handoff: {refused}", code="kv_transfer_failed")
    return prefilled


def first_token(choice: Mapping[str, Any], endpoint: EndpointName) -> int:
    """The id of the sampled token, from `token_ids` or from the logprob's name `token_id:N`; raises ValueError."""
    if ids := choice.get("token_ids"):
        return token_id(ids[0])
    logprobs = choice["logprobs"]
    name = logprobs["content"][0]["token"] if endpoint == "chat" else logprobs["tokens"][0]
    prefix, _, number = name.partition(":")
    if prefix != "token_id" or not number.isdecimal():
        raise ValueError(f"the first token is named {name!r}, not token_id:N; is this vLLM?")
    return token_id(int(number))


def token_id(value: Any) -> int:
    """Raises ValueError unless value is an integer from 0 to 2**31 - 1."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is not a token id")
    return value


def _count(value: Any) -> int:
    """A number of tokens; unknown counts as 0."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of tokens")
    return value


def _failed(message: str) -> RouterError:
    return RouterError(502, message, code="prefill_failed")


def describe(error: Exception) -> str:
    """httpx leaves some of its errors without a text; then the class name has to do."""
    return str(error) or type(error).__name__
