"""The router over real sockets when vLLM, a decode node or the client fails."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from router_fakes import WAIT_S, Exchange, Loop, last_line
from router_stack import (
    IDS,
    MESSAGES,
    TEXT,
    Stack,
    deaf_client,
    error_of,
    events_of,
    eventually,
    leave_after,
    stack,
)

from tilert_ref.router import client as client_module
from tilert_ref.router import decode as decode_module

# Faults of vLLM


def test_a_4xx_of_vllm_passes_with_status_and_body(st: Stack) -> None:
    st.node.cancelled.clear()
    body = b'{"error":  {"message": "model not found", "type": "NotFoundError", "param": null, "code": 404}}'
    for status in (400, 401, 404, 422):
        st.vllm.plan = lambda e, status=status: e.respond(status, body)
        response = st.post(stream=True)
        assert (response.status_code, response.content) == (status, body)
    assert not st.node.cancelled.is_set()


@pytest.mark.parametrize("status", [500, 503, 302, 204])
def test_other_answers_of_vllm_are_502(st: Stack, status: int) -> None:
    st.vllm.plan = lambda e: e.respond(status, {"error": "engine died"} if status >= 500 else b"")
    message = error_of(st.post(), 502, "prefill_failed")["message"]
    assert str(status) in message


def test_garbage_from_vllm_is_502(st: Stack) -> None:
    st.vllm.plan = lambda e: e.respond(200, {"id": "chatcmpl-other", "choices": []})
    error_of(st.post(), 502, "prefill_failed")


def test_vllm_dies_during_prefill_and_comes_back(st: Stack) -> None:
    async def die(exchange: Exchange) -> None:
        exchange.abort()

    st.vllm.plan = die
    error_of(st.post(), 502, "prefill_failed")
    st.vllm.plan = None
    st.vllm.down()
    error_of(st.post(stream=True), 502, "prefill_failed")
    health = st.get("/health")
    assert health.status_code == 503 and str(st.vllm.port) in health.json()["reasons"][0]
    st.vllm.up()
    assert st.post().status_code == 200 and st.get("/health").status_code == 200


def test_a_request_has_a_deadline(loop: Loop) -> None:
    with stack(loop, request_timeout_s=1.0) as s:
        s.vllm.plan = s.vllm.hang
        assert s.post().status_code == 504
        assert s.vllm.client_left.wait(WAIT_S)
        s.vllm.plan, s.node.plan = None, s.node.one_token_then_hang
        events = events_of(s.post(stream=True).text)
        assert events[-2]["error"]["code"] == "request_timeout" and events[-1] == "[DONE]"
        assert s.node.cancelled.wait(WAIT_S)
        s.await_free()


# Faults of the decode node


def refusing(status: int, body: dict) -> Callable:
    return lambda e: e.respond(status, body)


@pytest.mark.parametrize(
    ("status", "body", "seen", "code"),
    [
        (504, {"error": "kv_transfer_timeout", "rid": "x"}, 504, "kv_transfer_timeout"),
        (501, {"error": "no", "error_type": "capability_unavailable"}, 501, "capability_unavailable"),
        (400, {"error": "no", "error_type": "invalid_parameter"}, 400, "invalid_parameter"),
        (499, {"error": "cancelled during KV transfer", "error_type": "request_cancelled"}, 499, "request_cancelled"),
        (500, {"error": "boom"}, 502, "decode_failed"),
        (502, {"error": "engine crashed", "error_type": "engine_crashed"}, 502, "engine_crashed"),
        (422, {"detail": ["x"]}, 502, "decode_failed"),
        (503, {"error": "engine is starting"}, 503, "decode_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_node_keep_their_meaning(
    st: Stack, status: int, body: dict, seen: int, code: str, stream: bool
) -> None:
    st.node.plan = refusing(status, body)
    error_of(st.post(stream=stream), seen, code)


@pytest.mark.parametrize("status", [400, 500, 503, 504])
def test_a_refusing_node_can_be_asked_again_at_once(loop: Loop, status: int) -> None:
    """It works on nothing of ours, so there is nothing to cancel."""
    with stack(loop) as s:
        s.node.let_cancel_answer(False)
        s.node.plan = refusing(status, {"error": "no"})
        assert s.post().status_code >= 400
        s.node.plan = None
        response = s.post()
        assert response.status_code == 200, response.text
        assert not s.node.cancelled.is_set()


def test_a_refusal_that_is_no_sane_json_is_502(st: Stack) -> None:
    st.node.plan = refusing(500, b"[" * 100_000)
    error_of(st.post(), 502, "decode_failed")


def test_timings_that_are_no_json_numbers_are_left_out(st: Stack) -> None:
    end = last_line(1)
    end["timing_ms"] |= {"wire_wait": float("nan"), "inject": float("inf"), "spread": [float("-inf")]}
    st.node.plan = ending(end)
    timing = json.loads(st.post().text, parse_constant=pytest.fail)["pd_timing_ms"]
    assert timing["decode"] == 4.0 and timing.keys().isdisjoint({"wire_wait", "inject", "spread"})


def test_a_busy_node_is_tried_again(st: Stack) -> None:
    answers = []

    async def busy_once(exchange: Exchange) -> None:
        answers.append(1)
        if len(answers) == 1:
            await exchange.respond(429, {"error": "busy", "current_rid": "someone"})
        else:
            await st.node.answer(exchange)

    st.node.plan = busy_once
    before = len(st.vllm.seen)
    assert st.post().status_code == 200
    assert len(answers) == 2 and len([e for e in st.vllm.seen[before:] if e.method == "POST"]) == 1


def test_a_node_that_stays_busy_is_429(st: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "BUSY_RETRY_S", 0.15)
    st.node.plan = refusing(429, {"error": "busy"})
    response = st.post()
    assert error_of(response, 429, "decode_busy")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"


def ending(*lines: dict | bytes) -> Callable:
    """A stream of one token and then these lines."""

    async def plan(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"t": IDS[:1]})
        for line in lines:
            await (exchange.raw(line) if isinstance(line, bytes) else exchange.line(line))
        await exchange.end()

    return plan


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        ([{"error": "decode stalled"}], 502, "decode_failed"),
        ([{"error": "crash", "error_type": "engine_crashed"}], 502, "engine_crashed"),
        ([{"error": "bad", "error_type": "grammar_violation"}], 400, "grammar_violation"),
        ([last_line(1, "cancelled")], 499, "request_cancelled"),
        ([last_line(2)], 502, "decode_truncated"),
        ([], 502, "decode_truncated"),
        ([b"no json\n"], 502, "decode_failed"),
        ([{"t": ["x"]}], 502, "decode_failed"),
        ([{"t": None}], 502, "decode_failed"),
        ([{"t": [-1]}], 502, "decode_failed"),
        ([{"t": [2**31]}], 502, "decode_failed"),
        ([b"[" * 100_000 + b"\n"], 502, "decode_failed"),
        ([b"[]\n"], 502, "decode_failed"),
        ([{"done": True}], 502, "decode_failed"),
    ],
)
def test_bad_ends_of_a_decode(st: Stack, lines: list, status: int, code: str) -> None:
    """Blocking: a status. Streaming: an error event, [DONE], no finish_reason, and only text that the model made."""
    st.node.plan = ending(*lines)
    error_of(st.post(), status, code)
    st.await_free()
    events = events_of(st.post(stream=True).text)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == code
    choices = [e["choices"][0] for e in events[:-2]]
    assert all(c["finish_reason"] is None for c in choices)
    assert "".join(c["delta"].get("content", "") for c in choices) == TEXT[0]


def test_a_node_that_dies_mid_stream_and_comes_back(loop: Loop) -> None:
    with stack(loop) as s:

        async def die(exchange: Exchange) -> None:
            s.node.health = 503  # the process restarts and isn't ready yet
            await s.node.one_token_then_die(exchange)

        s.node.plan = die
        texts = []
        with pytest.raises(openai.APIError, match="is gone"):
            for chunk in s.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
        assert "".join(texts) == TEXT[0]
        s.node.down()
        error_of(s.post(), 503, "no_decode_node")
        health = s.get("/health")
        assert health.status_code == 503 and health.json()["decode_free"] == 0
        assert s.node.spec in health.json()["reasons"][0]
        assert s.get("/pool_status").json()["nodes"][0]["down"]
        s.node.plan, s.node.health = None, 200
        s.node.up()
        assert s.post().status_code == 200, "no wait for the next round of probes"


def test_a_node_that_dies_under_a_blocking_request(loop: Loop) -> None:
    with stack(loop) as s:
        s.node.plan = s.node.one_token_then_hang
        with ThreadPoolExecutor() as threads:
            reply = threads.submit(s.post)
            assert s.node.arrived.wait(WAIT_S)
            s.node.down()
            error_of(reply.result(WAIT_S), 502, "decode_unreachable")
        s.node.plan = None
        s.node.up()
        assert s.post().status_code == 200


def test_a_dead_node_gets_no_traffic(loop: Loop) -> None:
    with stack(loop, nodes=2) as s:
        s.node.down()
        assert s.get("/health").json()["decode_free"] in (1, 2)
        codes = [s.post().status_code for _ in range(4)]
        assert codes[1:] == [200] * 3, f"at most the first request may find out: {codes}"
        assert [n["down"] is None for n in s.get("/pool_status").json()["nodes"]] == [False, True]


def test_a_silent_node_is_noticed(loop: Loop) -> None:
    with stack(loop, stall_timeout_s=0.2) as s:
        s.node.plan = s.node.one_token_then_hang
        error_of(s.post(), 504, "decode_stalled")
        s.await_free()
        events = events_of(s.post(stream=True).text)
        assert events[-2]["error"]["code"] == "decode_stalled"
        assert s.node.client_left.wait(WAIT_S) and s.node.cancelled.is_set()


def test_a_node_that_never_answers_is_noticed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "FIRST_LINE_GRACE_S", 0.1)
    with stack(loop, kv_timeout_s=0.2) as s:
        s.node.plan = s.node.hang
        error_of(s.post(), 504, "decode_stalled")


# The pool over HTTP


def test_requests_queue_for_the_node(loop: Loop) -> None:
    release = threading.Event()

    async def slow(exchange: Exchange) -> None:
        await asyncio.to_thread(release.wait, WAIT_S)
        await s.node.answer(exchange)

    with stack(loop, queue_timeout_s=WAIT_S) as s, ThreadPoolExecutor() as threads:
        s.node.plan = slow
        first = threads.submit(s.post)
        assert s.node.arrived.wait(WAIT_S)
        status = s.get("/pool_status").json()["nodes"][0]
        assert status["busy"] is True and status["host"] == "127.0.0.1" and s.free() == 0
        second = threads.submit(s.post)
        eventually(lambda: s.waiting() == 1, "the second request doesn't wait")
        release.set()
        assert first.result(WAIT_S).status_code == second.result(WAIT_S).status_code == 200


def test_without_a_queue_a_busy_node_is_429_at_once(loop: Loop) -> None:
    with stack(loop) as s, ThreadPoolExecutor() as threads:
        s.node.plan = s.node.one_token_then_hang
        busy = threads.submit(s.post)
        assert s.node.arrived.wait(WAIT_S)
        response = s.post()
        error_of(response, 429, "decode_busy")
        assert response.headers["retry-after"] == "1"
        s.node.down()
        busy.result(WAIT_S)


def test_one_client_can_ask_again_and_again(st: Stack) -> None:
    """The node is free before the answer is out: no 429 in between."""
    with httpx.Client(base_url=st.url, timeout=WAIT_S) as client:
        for i in range(30):
            response = client.post("/v1/completions", json={"prompt": "hi", "stream": i % 2 == 0})
            assert response.status_code == 200


# Nodes with a queue and a limit


SLOTS = {"receive_slots": 2, "max_seq_len": 256}


@contextlib.contextmanager
def roomy(loop: Loop, **changes: Any) -> Iterator[Stack]:
    """One node that says what ours say."""
    with stack(loop, facts=SLOTS, **changes) as s:
        eventually(lambda: s.get("/pool_status").json()["nodes"][0]["slots"] == 2, "it wasn't asked")
        yield s


def test_the_next_request_is_prefilled_and_queued_at_the_busy_node(loop: Loop) -> None:
    may_end = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.json["first_token_id"] == IDS[0] and len(s.node.bodies("/pd/decode")) == 1:
            await may_end.wait()
        else:
            await exchange.start()
            for line in ({"queued": True}, {"queued": True}, {"t": IDS[:1]}, last_line(1)):
                await exchange.line(line)
            await exchange.end()
            return
        await s.node.answer(exchange)

    with roomy(loop) as s, ThreadPoolExecutor() as threads:
        s.node.plan = answer
        first = threads.submit(s.post)
        assert s.node.arrived.wait(WAIT_S)
        assert s.post().json()["choices"][0]["message"]["content"] == TEXT[0], "heartbeats are no tokens"
        assert not first.done()
        loop.loop.call_soon_threadsafe(may_end.set)
        assert first.result(WAIT_S).status_code == 200
        assert [body["queue"] for body in s.node.bodies("/pd/decode")] == [True, True]
    with stack(loop) as s:
        assert s.post().status_code == 200
        assert "queue" not in s.node.bodies("/pd/decode")[0], "a node of TileRT's has none"


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ({"error": "kv_transfer_timeout", "error_type": "decode_failed", "status": 504}, 504, "kv_transfer_timeout"),
        ({"error": "rank 0: no", "error_type": "kv_transfer_failed", "status": 502}, 502, "kv_transfer_failed"),
        ({"error": "cancelled", "error_type": "request_cancelled", "status": 499}, 499, "request_cancelled"),
        ({"error": "engine restarts", "error_type": "engine_unavailable", "status": 503}, 503, "decode_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_in_the_queue_keeps_its_status(loop: Loop, line: dict, status: int, code: str, stream: bool) -> None:
    async def plan(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"queued": True})
        await exchange.line(line)
        await exchange.end()

    with roomy(loop) as s:
        s.node.plan = plan
        error_of(s.post(stream=stream), status, code)
        assert not s.node.cancelled.is_set(), "it is through with it"


def test_a_request_cancelled_in_the_queue_is_cancelled_at_the_node(loop: Loop) -> None:
    async def queued(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"queued": True})
        s.node.decoding.set()
        await s.node.hang(exchange)

    with roomy(loop) as s:
        s.node.plan = queued
        leave_after(s.url, "/v1/completions", {"prompt": "hi", "stream": True}, s.node.decoding)
        assert s.node.cancelled.wait(WAIT_S)
        s.await_free()


def test_a_queue_that_falls_silent_is_noticed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "QUEUE_SILENCE_S", 0.3)

    async def silent(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"queued": True})
        await s.node.hang(exchange)

    with roomy(loop) as s:
        s.node.plan = silent
        assert "sent nothing for 0.3 s" in error_of(s.post(), 504, "decode_stalled")["message"]


@pytest.mark.parametrize("prompt", ["x" * 256, [5] * 256, ["x" * 300], [[5] * 300]])
def test_a_prompt_that_no_node_can_hold_is_refused_before_prefill(loop: Loop, prompt: Any) -> None:
    with roomy(loop) as s:
        error = error_of(s.post("/v1/completions", prompt=prompt), 400, "context_length_exceeded")
        assert "legal are 1 to 255" in error["message"] and s.vllm.asked("/v1/completions") == []
        assert s.post("/v1/completions", prompt="x" * 255).status_code == 200


def test_a_chat_that_the_node_cannot_hold_is_refused_by_the_true_cause(loop: Loop) -> None:
    async def long(exchange: Exchange) -> None:
        reply = s.vllm.reply(exchange)
        reply["usage"]["prompt_tokens"] = 256
        await exchange.respond(200, reply)

    with roomy(loop) as s:
        s.vllm.plan = long
        error_of(s.post(), 400, "context_length_exceeded")
        assert not s.node.arrived.is_set()


def test_a_handoff_that_the_connector_refused_fails_before_decode(loop: Loop) -> None:
    async def refused(exchange: Exchange) -> None:
        why = "tilert_host 'x' is not in tilert_allowed_hosts"
        await exchange.respond(200, s.vllm.reply(exchange) | {"kv_transfer_params": {"tilert_error": why}})

    with stack(loop) as s:
        s.vllm.plan = refused
        assert "not in tilert_allowed_hosts" in error_of(s.post(), 502, "kv_transfer_failed")["message"]
        assert not s.node.arrived.is_set()


# The client leaves


PHASES = {
    "prefill": lambda s: (s.vllm, s.vllm.hang, s.vllm.arrived),
    "waiting for KV": lambda s: (s.node, s.node.hang, s.node.arrived),
    "decoding": lambda s: (s.node, s.node.one_token_then_hang, s.node.decoding),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_is_noticed_in_every_phase(loop: Loop, phase: str, stream: bool) -> None:
    with stack(loop) as s:
        server, server.plan, reached = PHASES[phase](s)
        leave_after(s.url, "/v1/chat/completions", {"messages": MESSAGES, "stream": stream}, reached)
        assert server.client_left.wait(WAIT_S), "the call to the server behind wasn't cancelled"
        if server is s.node:
            assert s.node.cancelled.wait(WAIT_S)
            assert s.node.bodies("/pd/cancel")[-1] == {"rid": s.node.bodies("/pd/decode")[-1]["rid"]}
        s.await_free()
        server.plan = None
        assert s.post().status_code == 200
        assert phase != "prefill" or not s.node.cancelled.is_set()


def test_a_client_that_leaves_the_queue(loop: Loop) -> None:
    with stack(loop, queue_timeout_s=WAIT_S) as s, ThreadPoolExecutor() as threads:
        s.node.plan = s.node.one_token_then_hang
        first = threads.submit(s.post)
        assert s.node.arrived.wait(WAIT_S)
        waiting = threading.Event()

        def watch() -> None:
            eventually(lambda: s.waiting() == 1, "the second request doesn't wait")
            waiting.set()

        threads.submit(watch)
        leave_after(s.url, "/v1/completions", {"prompt": "hi"}, waiting)
        eventually(lambda: s.waiting() == 0, "the client's leaving wasn't noticed")
        s.node.down()
        first.result(WAIT_S)
        assert len(s.vllm.asked("/v1/chat/completions")) == 1 and s.vllm.asked("/v1/completions") == []


def test_the_node_is_busy_until_the_cancel_is_delivered(loop: Loop) -> None:
    with stack(loop) as s:
        s.node.plan = s.node.one_token_then_hang
        s.node.let_cancel_answer(False)
        leave_after(s.url, "/v1/completions", {"prompt": "hi", "stream": True}, s.node.arrived)
        assert s.node.cancelled.wait(WAIT_S)
        s.node.plan = None
        error_of(s.post(), 429, "decode_busy")
        s.node.let_cancel_answer(True)
        s.await_free()
        assert s.post().status_code == 200


def test_a_cancelled_node_stays_busy_until_it_is_idle(loop: Loop) -> None:
    """One engine step may have to end first: the cancel is delivered, but the node still works."""
    step = asyncio.Event()

    async def stubborn(exchange: Exchange) -> None:
        await s.node.one_token_then_hang(exchange)
        await step.wait()

    with stack(loop) as s:
        s.node.plan = stubborn
        leave_after(s.url, "/v1/completions", {"prompt": "hi", "stream": True}, s.node.decoding)
        assert s.node.client_left.wait(WAIT_S) and s.node.cancelled.wait(WAIT_S)
        eventually(lambda: len(s.node.asked("/decode_status")) >= 3, "nobody asked whether the node is idle")
        s.node.plan = None
        error_of(s.post(), 429, "decode_busy")
        loop.loop.call_soon_threadsafe(step.set)
        s.await_free()


def test_a_slow_reader_does_not_hold_the_node(loop: Loop) -> None:
    """The answer is decoded, but bigger than the socket buffers, and the client doesn't read it."""

    async def long_answer(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"t": [IDS[0]] * 400_000})
        await exchange.line(last_line(400_000))
        await exchange.end()

    with stack(loop) as s:
        s.node.plan = long_answer
        with deaf_client(s.url, {"prompt": "hi", "stream": True}):
            assert s.node.arrived.wait(WAIT_S)
            s.await_free()
            s.node.plan = None
            assert s.post().status_code == 200


def test_a_client_that_stops_reading_loses_its_request(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SEND_TIMEOUT_S", 0.3)

    async def flood(exchange: Exchange) -> None:
        await exchange.start()
        while True:
            await exchange.line({"t": IDS * 50})

    with stack(loop) as s:
        s.node.plan = flood
        with deaf_client(s.url, {"prompt": "hi", "stream": True}):
            assert s.node.cancelled.wait(WAIT_S)
        s.await_free()
