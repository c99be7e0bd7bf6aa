"""The router over real sockets: the openai client in front, fake vLLM and fake decode nodes behind, with faults."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest
from router_fakes import WAIT_S, Exchange, FakeDecode, FakeVllm, Loop, byte_tokenizer, ids_of, last_line, running_router

from tilert_ref.router import client as client_module
from tilert_ref.router import decode as decode_module
from tilert_ref.router import prefill as prefill_module
from tilert_ref.router.app import Config
from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.pool import parse_node

TOKENIZER = byte_tokenizer()
TEXT = "Grüße, 世界 \ufffd"
IDS = ids_of(TOKENIZER, TEXT)
MESSAGES = [{"role": "user", "content": "hi"}]
HTTP = httpx.Client(timeout=WAIT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


class Stack:
    """A fake vLLM, fake decode nodes and a router in front of them."""

    def __init__(self, loop: Loop, nodes: int) -> None:
        self.vllm = FakeVllm(loop, IDS[0])
        self.nodes = [FakeDecode(loop, IDS[1:]) for _ in range(nodes)]
        self.node = self.nodes[0]
        self.url = ""

    def config(self, **changes) -> Config:
        specs = [parse_node(n.spec) for n in self.nodes]
        return replace(Config(self.vllm.url, specs, Detokenizer(TOKENIZER)), **changes)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="secret", max_retries=0, http_client=HTTP)

    def post(self, path: str = "/v1/chat/completions", headers: dict | None = None, **fields) -> httpx.Response:
        base = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
        return HTTP.post(self.url + path, json=base | fields, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.url + path)

    def free(self) -> int:
        return self.get("/health").json()["decode_free"]

    def await_free(self, count: int = 1) -> None:
        """Polls until so many nodes are free; the router has no event to wait for."""
        deadline = threading.Event()
        timer = threading.Timer(WAIT_S, deadline.set)
        timer.start()
        while self.free() != count:
            assert not deadline.wait(0.02), "the node was never freed"
        timer.cancel()


@contextlib.contextmanager
def stack(loop: Loop, nodes: int = 1, **changes) -> Iterator[Stack]:
    s = Stack(loop, nodes)
    try:
        with running_router(s.config(**changes)) as s.url:
            yield s
    finally:
        for server in (s.vllm, *s.nodes):
            server.down()


@pytest.fixture(scope="module")
def shared(loop: Loop) -> Iterator[Stack]:
    with stack(loop) as s:
        yield s


@pytest.fixture
def st(shared: Stack) -> Iterator[Stack]:
    """The shared stack in its healthy state."""
    yield shared
    shared.vllm.plan = shared.node.plan = None
    shared.await_free()


def error_of(response: httpx.Response, status: int, code: str | None) -> dict:
    """The error object; checks status and OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code, error
    return error


def events_of(text: str) -> list:
    lines = [e.removeprefix("data: ") for e in text.split("\n\n") if e]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# Answers


def test_chat_blocking(st: Stack) -> None:
    reply = st.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=100)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert reply.object == "chat.completion" and reply.model == "tiny" and reply.created == 1700000000
    assert reply.id == "chatcmpl-" + st.vllm.bodies("/v1/chat/completions")[-1]["request_id"]
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, len(IDS), 3 + len(IDS))
    timing = reply.model_extra["pd_timing_ms"]
    assert {"queue", "prefill", "wire_wait", "inject", "decode", "first_token"} <= set(timing)
    assert timing["decode"] == 4.0 and 0 < timing["prefill"] <= timing["first_token"]
    assert not hasattr(choice, "token_ids")


def test_chat_streaming(st: Stack) -> None:
    stream = st.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.object == "chat.completion.chunk" for c in chunks) and len({c.id for c in chunks}) == 1
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == TEXT and len(texts) == len(TEXT), "one chunk a character: none waits for the next"
    last, usage = chunks[-2], chunks[-1]
    assert last.choices[0].finish_reason == "stop" and last.model_extra["pd_timing_ms"]["inject"] == 0.5
    assert usage.choices == [] and usage.usage.completion_tokens == len(IDS) and usage.usage.prompt_tokens == 3
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)


def test_completions_blocking(st: Stack) -> None:
    reply = st.openai.completions.create(model="tiny", prompt="hi", max_tokens=4)
    choice = reply.choices[0]
    assert reply.id.startswith("cmpl-") and reply.object == "text_completion"
    assert choice.finish_reason == "length" and choice.text == "Grü" and choice.token_ids == IDS[:4]
    assert reply.usage.completion_tokens == 4


def test_completions_streaming(st: Stack) -> None:
    chunks = list(st.openai.completions.create(model="tiny", prompt="hi", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].model_extra["pd_timing_ms"]["decode"] == 4.0
    assert all(c.object == "text_completion" and c.usage is None for c in chunks)


def test_the_stream_ends_with_done_and_usage_only_when_asked(st: Stack) -> None:
    response = st.post(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in e for e in events[:-1])


def test_text_cut_by_max_tokens_inside_a_character(st: Stack) -> None:
    assert st.post(max_tokens=3).json()["choices"][0]["message"]["content"] == "Gr\ufffd"
    events = events_of(st.post(max_tokens=3, stream=True).text)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Gr\ufffd"


def test_token_ids_on_request(st: Stack) -> None:
    body = st.post(return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == IDS and body["prompt_token_ids"] == [7, 8, 9]
    events = events_of(st.post(return_token_ids=True, stream=True).text)[:-1]
    assert events[0]["prompt_token_ids"] == [7, 8, 9]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == IDS
    events = events_of(st.post("/v1/completions", return_token_ids=True, stream=True).text)[:-1]
    assert events[0]["choices"][0]["prompt_token_ids"] == [7, 8, 9]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == IDS


def test_an_empty_answer(st: Stack) -> None:
    """The first token was a stop token: nothing is emitted, and that is no error."""

    async def empty(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line(last_line(0))
        await exchange.end()

    st.node.plan = empty
    body = st.post().json()
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 0 and "first_token" not in body["pd_timing_ms"]
    events = events_of(st.post(stream=True).text)
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [{"role": "assistant", "content": ""}, {}]


def test_lines_cut_anywhere(st: Stack) -> None:
    """The node's bytes come in pieces of one; a line may also hold U+2028, which httpx would split at."""

    async def dribble(exchange: Exchange) -> None:
        await exchange.start()
        note = json.dumps({"t": IDS, "note": "\u2028"}, ensure_ascii=False) + "\n\n"
        for byte in (note + json.dumps(last_line(len(IDS)))).encode():
            await exchange.raw(bytes([byte]))
        await exchange.end()

    st.node.plan = dribble
    assert st.post().json()["choices"][0]["message"]["content"] == TEXT


def test_without_a_tokenizer_there_are_ids_and_null_text(loop: Loop) -> None:
    with stack(loop, detokenizer=None, force_include_usage=True) as s:
        choice = s.post().json()["choices"][0]
        assert choice["message"]["content"] is None and choice["token_ids"] == IDS
        assert s.post("/v1/completions").json()["choices"][0]["text"] is None
        events = events_of(s.post(stream=True).text)
        assert [i for e in events[:-1] for c in e["choices"] for i in c.get("token_ids", [])] == IDS
        assert events[-2]["usage"]["completion_tokens"] == len(IDS), "--force-include-usage"


# What goes to vLLM and to the decode node


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_case_k6_ids_on_the_wire(st: Stack, path: str, stream: bool) -> None:
    kind = "chatcmpl-" if "chat" in path else "cmpl-"
    keys = set()
    for caller in ("order-2024", "order-2025"):
        response = st.post(path, request_id=caller, stream=stream)
        assert f'"id":"{kind}{caller}"' in response.text.replace('": ', '":')
        prefill, decode = st.vllm.seen[-1], st.node.bodies("/pd/decode")[-1]
        assert re.fullmatch("[0-9a-f]{32}", prefill.json["request_id"])
        assert decode["rid"] == prefill.json["request_id"]
        assert "x-request-id" not in prefill.headers and caller not in prefill.content.decode()
        keys.add(decode["rid"])
    assert len(keys) == 2


def test_the_x_request_id_header_shows_in_the_reply_only(st: Stack) -> None:
    response = st.post(headers={"X-Request-Id": "abc-1"})
    assert response.json()["id"] == "chatcmpl-abc-1"
    assert "x-request-id" not in st.vllm.seen[-1].headers


def test_both_legs_get_the_same_sampling(loop: Loop) -> None:
    from tilert_ref.router.request import Sampling

    with stack(loop, defaults=Sampling(temperature=0.6, top_p=0.95)) as s:
        s.post(top_p=0.5, seed=7, ignore_eos=True, max_tokens=9)
        prefill, decode = s.vllm.bodies("/v1/chat/completions")[-1], s.node.bodies("/pd/decode")[-1]
        both = {"temperature": 0.6, "top_p": 0.5, "top_k": 0, "repetition_penalty": 1.0, "min_p": 0.0}
        assert decode["sampling"] == both | {"seed": 7, "ignore_eos": True}
        assert both | {"seed": 7, "ignore_eos": True, "max_tokens": 1, "stream": False} == {
            k: prefill[k] for k in (*both, "seed", "ignore_eos", "max_tokens", "stream")
        }
        assert prefill["kv_transfer_params"] == {"tilert_host": "127.0.0.1", "tilert_ctrl_port": 5556}
        assert decode["first_token_id"] == IDS[0] and decode["max_tokens"] == 9 and decode["timeout_s"] == 120.0


def test_the_clients_authorization_goes_to_vllm_alone(st: Stack) -> None:
    st.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert st.vllm.seen[-1].headers["authorization"] == "bearer secret"
    assert all("authorization" not in e.headers for e in st.node.seen)


def test_the_first_token_may_come_by_name(st: Stack) -> None:
    async def old_server(exchange: Exchange) -> None:
        reply = st.vllm.reply(exchange)
        del reply["choices"][0]["token_ids"]
        await exchange.respond(200, reply)

    st.vllm.plan = old_server
    assert st.post().json()["choices"][0]["message"]["content"] == TEXT


# Refusals


def test_refused_fields_over_http(st: Stack) -> None:
    before = len(st.vllm.seen)
    with pytest.raises(openai.APIStatusError) as info:
        st.openai.chat.completions.create(
            model="m", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert info.value.status_code == 501 and info.value.param == "tools" and info.value.code == "capability_unavailable"
    assert error_of(st.post(temprature=1), 400, "invalid_parameter")["param"] == "temprature"
    error = error_of(st.post(stop=["x"], stream=True), 501, "capability_unavailable")
    assert error["param"] == "stop" and error["type"] == "invalid_request_error"
    assert len(st.vllm.seen) == before, "refused before anything was contacted"


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b"\xff\xfe"])
def test_malformed_bodies(st: Stack, content: bytes) -> None:
    response = HTTP.post(st.url + "/v1/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(st: Stack) -> None:
    error_of(st.get("/v1/nothing"), 404, "not_found")
    error_of(st.get("/v1/completions"), 405, "method_not_allowed")


def test_lone_surrogates_pass_through(st: Stack) -> None:
    """Legal JSON, no legal UTF-8: vLLM decides about it."""
    body = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert HTTP.post(st.url + "/v1/chat/completions", content=body).status_code == 200
    response = HTTP.post(st.url + "/v1/chat/completions", content=rb'{"\ud800": 1}')
    assert error_of(response, 400, "invalid_parameter")["param"] == "\ud800"


def test_body_limit(loop: Loop) -> None:
    with stack(loop, max_body_bytes=1000) as s:
        assert s.post().status_code == 200
        error_of(s.post(user="x" * 1000), 413, "body_too_large")

        def chunks() -> Iterator[bytes]:
            yield from [b'{"user": "', *[b"x" * 500] * 5]

        response = HTTP.post(s.url + "/v1/completions", content=chunks())
        error_of(response, 413, "body_too_large")


def test_ignore_eos_needs_a_node_that_can(loop: Loop) -> None:
    s = Stack(loop, 1)
    s.node.capabilities = {}
    with running_router(s.config()) as s.url:
        assert error_of(s.post(ignore_eos=True), 501, "capability_unavailable")["param"] == "ignore_eos"
        assert s.post(ignore_eos=False).status_code == 200
    s.vllm.down()
    s.node.down()


# Faults of vLLM


def test_a_4xx_of_vllm_passes_with_status_and_body(st: Stack) -> None:
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
    with stack(loop, request_timeout_s=0.3) as s:
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
        while s.get("/pool_status").json()["waiting"] != 1:
            assert not second.done()
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


# The client leaves


@contextlib.contextmanager
def deaf_client(url: str, body: dict, path: str = "/v1/completions") -> Iterator[None]:
    """Posts on a bare socket, reads nothing, and closes it at the end of the block."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as sock:
        sock.settimeout(WAIT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + content)
        yield


def leave_after(url: str, path: str, body: dict, event: threading.Event) -> None:
    """Posts and closes the connection once the event has happened."""
    with deaf_client(url, body, path):
        assert event.wait(WAIT_S), "the request never came so far"


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
            while s.get("/pool_status").json()["waiting"] != 1:
                pass
            waiting.set()

        threads.submit(watch)
        leave_after(s.url, "/v1/completions", {"prompt": "hi"}, waiting)
        while s.get("/pool_status").json()["waiting"] != 0:
            assert not first.done()
        s.node.down()
        first.result(WAIT_S)
        assert len(s.vllm.seen) - len([e for e in s.vllm.seen if e.path == "/health"]) == 1


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
        with deaf_client(s.url, {"prompt": "hi"}):
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


# Other routes and the command line


def test_models_and_health(st: Stack) -> None:
    assert [m.id for m in st.openai.models.list()] == ["tiny"]
    assert st.get("/health").json() == {"status": "ok", "decode_free": 1}


def test_a_silent_vllm_is_unhealthy(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "HEALTH_TIMEOUT_S", 0.1)
    with stack(loop) as s:
        s.vllm.routes["/health"] = s.vllm.hang
        health = s.get("/health")
        assert health.status_code == 503 and "within 0.1 s" in health.json()["reasons"][0]


def test_models_without_vllm(loop: Loop) -> None:
    with stack(loop) as s:
        s.vllm.down()
        error_of(s.get("/v1/models"), 502, "prefill_failed")


def router_process(*flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tilert_ref.router.pd_router", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_program_serves_and_stops(loop: Loop, tmp_path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    s = Stack(loop, 1)
    process = router_process(
        *("--vllm-url", s.vllm.url, "--decode", s.node.spec, "--model-path", str(tmp_path)),
        *("--host", "127.0.0.1", "--port", "0"),
    )
    try:
        for line in process.stdout:
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                s.url = found[1]
                break
        assert s.post().json()["choices"][0]["message"]["content"] == TEXT
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(WAIT_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait(WAIT_S)
        s.vllm.down()
        s.node.down()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--parser", "glm47"], "glm47"),
        (["--model-path", "/nonexistent"], "tokenizer.json"),
        (["--vllm-url", "127.0.0.1:8000"], "http://"),
        (["--decode", "host:5556"], "host:ctrl_port:http_port"),
        (["--default-repetition-penalty", "1.1"], "repetition_penalty"),
        (["--queue-timeout", "-1"], "-1"),
        (["--kv-timeout", "0"], "above 0"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: list[str], word: str, capsys: pytest.CaptureFixture) -> None:
    from tilert_ref.router.pd_router import main

    with pytest.raises(SystemExit) as info:
        main(["--vllm-url", "http://127.0.0.1:1", "--decode", "127.0.0.1:1:2", *flags])
    assert info.value.code == 2 and word in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    from tilert_ref.router.pd_router import main

    with pytest.raises(SystemExit):
        main(["--help"])
    page = capsys.readouterr().out
    for word in ("example", "--decode", "23333", "0.0.0.0", "as in TileRT", "glm47", "/pool_status"):
        assert word in page
