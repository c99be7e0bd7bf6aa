"""Scheduler half of the plugin: which requests are handed off, and in which step. Pure.

It reads vLLM's SchedulerOutput by attribute and imports nothing of vLLM. A request is claimed if its
`sampling_params.extra_args["kv_transfer_params"]` is a dict with a truthy `tilert_host`; everything else passes
untouched.

Block ids arrive in pieces: with the new request, then what each chunk adds, and from the start again after a preemption
(`resumed_req_ids` of cached requests in vLLM's V1 runner, the request reappearing as new in V2). The step that
computes the last prompt token emits the claim, exactly once in the request's life.

Source: protocol.md 6.1 and 6.2; vLLM v1/core/sched/output.py (SchedulerOutput, CachedRequestData).
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilert_ref.connector.allow import LOOPBACK_HOSTS, AllowList
from tilert_ref.connector.rid import derive_rid

logger = logging.getLogger(__name__)

BlockIds = list[list[int]]


@dataclass(frozen=True)
class Claim:
    """One request to hand off in this step. block_ids: one list per KV cache group, for the whole prompt.

    prompt_token_ids is empty unless decode needs them (a repetition penalty).
    """

    request_id: str
    rid: str
    seq_len: int
    last_prompt_token: int
    block_ids: BlockIds
    host: str
    port: int
    sampling: dict[str, Any] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass
class _Pending:
    """A claimed request whose prompt is not computed yet."""

    request_id: str
    prompt: list[int]
    params: Mapping[str, Any]
    port: int
    wants_prompt: bool
    block_ids: BlockIds

    def claim(self) -> Claim:
        return Claim(
            request_id=self.request_id,
            rid=derive_rid(self.request_id),
            seq_len=len(self.prompt),
            last_prompt_token=self.prompt[-1],
            block_ids=self.block_ids,
            host=self.params["tilert_host"],
            port=self.port,
            sampling=self.params.get("sampling"),
            prompt_token_ids=self.prompt if self.wants_prompt else [],
        )


class ClaimTracker:
    """Feed it every SchedulerOutput; it returns the claims of that step.

    allowed_hosts: the legal `tilert_host` values. Whoever reaches vLLM's API can name a host, and would get the
    prompt's KV sent there.
    """

    def __init__(self, default_port: int, max_seq_len: int, allowed_hosts: AllowList = LOOPBACK_HOSTS) -> None:
        self._default_port = default_port
        self._max_seq_len = max_seq_len
        self._allowed_hosts = allowed_hosts
        self._pending: dict[str, _Pending] = {}
        self._closed: dict[str, str | None] = {}  # emitted (None) or refused (why): not looked at again as new

    def step(self, output: Any) -> list[Claim]:
        """output: vLLM's SchedulerOutput of the step that is about to run."""
        if self._pending or self._closed:
            self._forget(output.finished_req_ids)
        claims: list[Claim] = []
        for request in output.scheduled_new_reqs:
            params = transfer_params(request.sampling_params)
            if params is not None and self._start(request, params):
                computed = request.num_computed_tokens + output.num_scheduled_tokens[request.req_id]
                claims += self._emit(request.req_id, computed)
        if self._pending:
            claims += self._advance(output.scheduled_cached_reqs, output.num_scheduled_tokens)
        return claims

    def finished(self, request_id: str) -> str | None:
        """vLLM is through with the request, also if it was aborted. Returns why it was not handed off, if so."""
        reason = self._closed.get(request_id)
        if request_id in self._pending:
            reason = "the request ended before its prompt was computed"
        self._forget((request_id,))
        return reason

    @property
    def idle(self) -> bool:
        """True if no claimed request is known."""
        return not self._pending and not self._closed

    def _start(self, request: Any, params: Mapping[str, Any]) -> bool:
        if request.req_id in self._closed:
            return False
        if (reason := self._refusal(request, params)) is not None:
            logger.error("request %s is not handed off: %s", request.req_id, reason)
            self._pending.pop(request.req_id, None)
            self._closed[request.req_id] = reason
            return False
        self._pending[request.req_id] = _Pending(
            request.req_id,
            request.prompt_token_ids,
            params,
            params.get("tilert_ctrl_port") or self._default_port,
            float(getattr(request.sampling_params, "repetition_penalty", 1.0)) != 1.0,
            [list(group) for group in request.block_ids],
        )
        return True

    def _refusal(self, request: Any, params: Mapping[str, Any]) -> str | None:
        host, port, sampling = (params.get(key) for key in ("tilert_host", "tilert_ctrl_port", "sampling"))
        if not isinstance(host, str):
            return f"tilert_host is {host!r}, a string is legal"
        if (refused := self._allowed_hosts.refusal(host)) is not None:
            return f"tilert_host {refused}"
        if port is not None and (type(port) is not int or not 0 < port < 65536):
            return f"tilert_ctrl_port is {port!r}, 1 .. 65535 is legal"
        if sampling is not None and not isinstance(sampling, dict):
            return f"sampling is {sampling!r}, an object is legal"
        if not request.prompt_token_ids:
            return "it has no prompt token ids (prompt embeddings are not supported)"
        if len(request.prompt_token_ids) > self._max_seq_len:
            return f"its {len(request.prompt_token_ids)} prompt tokens exceed tilert_max_seq_len {self._max_seq_len}"
        return None

    def _advance(self, cached: Any, scheduled: Mapping[str, int]) -> list[Claim]:
        claims: list[Claim] = []
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._pending:
                continue
            resumed = request_id in cached.resumed_req_ids
            self._add_blocks(self._pending[request_id], cached.new_block_ids[index], resumed)
            claims += self._emit(request_id, cached.num_computed_tokens[index] + scheduled.get(request_id, 0))
        return claims

    def _add_blocks(self, pending: _Pending, new: Iterable[Iterable[int]] | None, resumed: bool) -> None:
        """A preempted request lost its blocks: what comes with its resumption is the whole list."""
        if resumed:
            pending.block_ids = [[] for _ in pending.block_ids]
        if new is not None:
            for group, added in zip(pending.block_ids, new, strict=True):
                group.extend(added)

    def _emit(self, request_id: str, computed: int) -> list[Claim]:
        """The request's claim if this step computes the last token of its prompt."""
        pending = self._pending[request_id]
        if computed < len(pending.prompt):
            return []
        del self._pending[request_id]
        self._closed[request_id] = None
        return [pending.claim()]

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)
            self._closed.pop(request_id, None)


def transfer_params(sampling_params: Any) -> Mapping[str, Any] | None:
    """The kv_transfer_params of a request that is meant for us, else None. sampling_params: vLLM's, or None."""
    extra = getattr(sampling_params, "extra_args", None)
    if not extra:
        return None
    params = extra.get("kv_transfer_params")
    return params if isinstance(params, dict) and params.get("tilert_host") else None
