"""Which requests are claimed, and in which step: the scheduler half against SchedulerOutput look-alikes.

The shapes are vLLM 0.32's (v1/core/sched/output.py), as its V1 runner sends them unless a test says V2. Chunked
prefill and preemption are covered here because vLLM on a CPU without AVX512 switches chunked prefill off.
"""

import logging
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilert_ref.connector.allow import EVERYBODY, LOOPBACK_HOSTS
from tilert_ref.connector.claims import Claim, ClaimTracker, transfer_params

HOST = {"tilert_host": "decode-1", "tilert_ctrl_port": 7001}


@dataclass
class NewRequest:
    req_id: str
    prompt_token_ids: list[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    sampling_params: Any = None


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)


def sampling(params: Any = HOST, **values: Any) -> Any:
    extra = None if params is None else {"kv_transfer_params": params}
    return SimpleNamespace(**({"extra_args": extra, "repetition_penalty": 1.0} | values))


def new(
    req_id: str, prompt: int | None, blocks: list[int], computed: int = 0, params: Any = HOST, **values: Any
) -> NewRequest:
    ids = None if prompt is None else list(range(100, 100 + prompt))
    return NewRequest(req_id, ids, (blocks,), computed, sampling(params, **values))


def cached(*entries: tuple[str, tuple[list[int], ...] | None, int], resumed: set[str] = frozenset()) -> Cached:
    ids, blocks, computed = (list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
    return Cached(ids, set(resumed), blocks, computed)


def tracker(**options: Any) -> ClaimTracker:
    return ClaimTracker(5556, **({"max_seq_len": 4096, "allowed_hosts": EVERYBODY} | options))


def test_whole_prompt_in_one_step() -> None:
    request = new("chatcmpl-" + "ab" * 16 + "-0123abcd", 70, [7, 3, 9, 1, 4])
    assert tracker().step(Output([request], num_scheduled_tokens={request.req_id: 70})) == [
        Claim(
            request_id=request.req_id,
            rid="ab" * 16,
            seq_len=70,
            last_prompt_token=169,
            block_ids=[[7, 3, 9, 1, 4]],
            host="decode-1",
            port=7001,
            sampling=None,
            prompt_token_ids=[],
        )
    ]


def test_chunked_prefill_collects_blocks_and_emits_once() -> None:
    t = tracker()
    assert t.step(Output([new("r", 70, [1, 2])], num_scheduled_tokens={"r": 32})) == []
    assert t.step(Output([], cached(("r", ([3, 4],), 32)), {"r": 32})) == []
    (claim,) = t.step(Output([], cached(("r", None, 64)), {"r": 6}))
    assert claim.block_ids == [[1, 2, 3, 4]]
    assert t.step(Output([], cached(("r", ([5],), 70)), {"r": 1})) == []
    t.step(Output(finished_req_ids={"r"}))
    assert t.idle


def test_every_group_keeps_its_own_blocks() -> None:
    t = tracker()
    request = NewRequest("r", list(range(40)), ([1, 2], [9]), 0, sampling())
    assert t.step(Output([request], num_scheduled_tokens={"r": 20})) == []
    (claim,) = t.step(Output([], cached(("r", ([3], [8]), 20)), {"r": 20}))
    assert claim.block_ids == [[1, 2, 3], [9, 8]]


def test_prefix_cache_hit_sends_the_whole_prompt() -> None:
    (claim,) = tracker().step(Output([new("r", 70, [5, 6, 7], computed=64)], num_scheduled_tokens={"r": 6}))
    assert (claim.seq_len, claim.block_ids) == (70, [[5, 6, 7]])


def test_prefix_cache_hit_then_chunks() -> None:
    t = tracker()
    assert t.step(Output([new("r", 100, [5, 6], computed=32)], num_scheduled_tokens={"r": 30})) == []
    (claim,) = t.step(Output([], cached(("r", ([8],), 62)), {"r": 38}))
    assert claim.block_ids == [[5, 6, 8]]


def test_several_claims_among_unmarked_requests() -> None:
    t = tracker()
    requests = [
        new("a", 10, [1]),
        new("plain", 10, [2], params=None),
        new("other", 10, [3], params={"do_remote_decode": True}),
        new("b", 90, [4]),
        new("c", 20, [5, 6]),
    ]
    scheduled = {"a": 10, "plain": 10, "other": 10, "b": 40, "c": 20}
    assert [c.request_id for c in t.step(Output(requests, num_scheduled_tokens=scheduled))] == ["a", "c"]
    step = cached(("plain", ([7],), 10), ("b", ([8],), 40), ("a", None, 10))
    (claim,) = t.step(Output([], step, {"plain": 1, "b": 50, "a": 1}))
    assert (claim.request_id, claim.block_ids) == ("b", [[4, 8]])


def test_preempted_prefill_resumes_with_replaced_blocks() -> None:
    t = tracker()
    t.step(Output([new("r", 70, [1, 2])], num_scheduled_tokens={"r": 32}))
    t.step(Output([], cached(("r", ([3],), 32)), {"r": 16}))
    t.step(Output())  # preempted: not scheduled, its blocks belong to others now
    assert t.step(Output([], cached(("r", ([21, 22],), 0), resumed={"r"}), {"r": 32})) == []
    (claim,) = t.step(Output([], cached(("r", ([23],), 32)), {"r": 38}))
    assert claim.block_ids == [[21, 22, 23]]


def test_resumption_that_hits_the_prefix_cache_and_finishes_at_once() -> None:
    t = tracker()
    t.step(Output([new("r", 70, [1, 2])], num_scheduled_tokens={"r": 32}))
    (claim,) = t.step(Output([], cached(("r", ([1, 22, 23],), 16), resumed={"r"}), {"r": 54}))
    assert claim.block_ids == [[1, 22, 23]]


def test_preempted_prefill_reappears_as_new_in_the_v2_runner() -> None:
    t = tracker()
    t.step(Output([new("r", 70, [1, 2])], num_scheduled_tokens={"r": 32}))
    (claim,) = t.step(Output([new("r", 70, [31, 32, 33])], num_scheduled_tokens={"r": 70}))
    assert claim.block_ids == [[31, 32, 33]]


@pytest.mark.parametrize("style", ["v1", "v2"])
def test_preemption_after_the_handoff_does_not_send_again(style: str) -> None:
    t = tracker()
    assert len(t.step(Output([new("r", 70, [1, 2, 3])], num_scheduled_tokens={"r": 70}))) == 1
    if style == "v1":
        again = Output([], cached(("r", ([41, 42, 43],), 0), resumed={"r"}), {"r": 71})
    else:
        again = Output([new("r", 70, [41, 42, 43])], num_scheduled_tokens={"r": 71})
    assert t.step(again) == []


def test_aborted_prefill_is_forgotten() -> None:
    for forget in (lambda t: t.finished("r"), lambda t: t.step(Output(finished_req_ids={"r"}))):
        t = tracker()
        t.step(Output([new("r", 70, [1, 2])], num_scheduled_tokens={"r": 32}))
        forget(t)
        assert t.idle
        assert t.step(Output([], cached(("r", ([3],), 32)), {"r": 38})) == []


def test_unmarked_requests_leave_no_state() -> None:
    t = tracker()

    class Untouchable:
        """Every look at it fails."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"looked at {name}")

    request = NewRequest("r", Untouchable(), Untouchable(), Untouchable(), sampling(None))
    output = Output([request], scheduled_cached_reqs=Untouchable(), num_scheduled_tokens=Untouchable())
    assert t.step(output) == [] and t.idle


@pytest.mark.parametrize(
    ("params", "claimed"),
    [
        (None, False),
        ({}, False),
        ({"tilert_host": ""}, False),
        ({"tilert_host": None}, False),
        ("tilert_host", False),
        ([("tilert_host", "d")], False),
        ({"tilert_host": "d"}, True),
    ],
)
def test_claim_filter(params: Any, claimed: bool) -> None:
    assert (transfer_params(sampling(params)) is not None) is claimed


def test_requests_without_sampling_params_or_extra_args() -> None:
    assert transfer_params(None) is None
    assert transfer_params(SimpleNamespace()) is None
    assert transfer_params(SimpleNamespace(extra_args={"something": 1})) is None


def test_default_port_sampling_and_prompt_ids() -> None:
    params = {"tilert_host": "d", "sampling": {"temperature": 0.5}}
    request = new("r", 4, [1], params=params, repetition_penalty=1.1)
    (claim,) = tracker().step(Output([request], num_scheduled_tokens={"r": 4}))
    assert (claim.port, claim.sampling, claim.prompt_token_ids) == (5556, {"temperature": 0.5}, [100, 101, 102, 103])


@pytest.mark.parametrize(
    ("request_", "options", "text"),
    [
        (new("r", 5, [1], params={"tilert_host": 7}), {}, "tilert_host is 7, a string is legal"),
        (new("r", 5, [1], params=HOST | {"tilert_ctrl_port": "5556"}), {}, "tilert_ctrl_port is '5556'"),
        (new("r", 5, [1], params=HOST | {"tilert_ctrl_port": 70000}), {}, "tilert_ctrl_port is 70000"),
        (new("r", 5, [1], params=HOST | {"sampling": [1]}), {}, r"sampling is \[1\]"),
        (new("r", None, [1]), {}, "no prompt token ids"),
        (new("r", 5, [1]), {"max_seq_len": 4}, "5 prompt tokens exceed tilert_max_seq_len 4"),
        (new("r", 5, [1]), {"allowed_hosts": LOOPBACK_HOSTS}, "tilert_host 'decode-1' is not in tilert_allowed_hosts"),
    ],
)
def test_refusals_name_the_reason_once(
    request_: NewRequest, options: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    t = tracker(**options)
    with caplog.at_level(logging.ERROR):
        assert t.step(Output([request_], num_scheduled_tokens={"r": 5})) == []
        assert t.step(Output([request_], num_scheduled_tokens={"r": 5})) == []
    (record,) = caplog.records
    assert re.search(text, record.getMessage())
    t.finished("r")
    assert t.idle


MOVES = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from(["goes on", "preempted v1", "preempted v2"])), max_size=8
)


@given(block=st.integers(1, 8), prompt=st.integers(1, 60), moves=MOVES)
def test_any_schedule_yields_the_final_blocks_exactly_once(
    block: int, prompt: int, moves: list[tuple[int, str]]
) -> None:
    """Chunks, pauses and preemptions in any order, then the rest: one claim, with the blocks of the last run."""
    t, fresh = tracker(), iter(range(10_000))
    computed, blocks = 0, []
    for index, (tokens, what) in enumerate([*moves, (prompt, "goes on")]):
        if index and what != "goes on":
            computed, blocks = 0, []
            assert t.step(Output()) == []
        tokens = min(tokens, prompt - computed)
        added = [next(fresh) for _ in range(-(-(computed + tokens) // block) - len(blocks))]
        blocks = blocks + added
        if index == 0 or what == "preempted v2":
            output = Output([new("r", prompt, list(blocks), computed)], num_scheduled_tokens={"r": tokens})
        else:
            resumed = {"r"} if what == "preempted v1" else set()
            output = Output([], cached(("r", (added,) if added else None, computed), resumed=resumed), {"r": tokens})
        claims = t.step(output)
        computed += tokens
        if computed == prompt:
            break
        assert claims == []
    assert [claim.block_ids for claim in claims] == [[blocks]]
    assert t.step(Output([], cached(("r", ([next(fresh)],), computed)), {"r": 1})) == []
