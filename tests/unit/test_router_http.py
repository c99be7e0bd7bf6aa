"""The router over real sockets, all well: answers, what goes to the servers behind, refusals, the command line."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from router_fakes import WAIT_S, Exchange, Loop, last_line, running_router
from router_stack import HTTP, IDS, MESSAGES, TEXT, TOKENIZER, Stack, error_of, events_of, stack

from tilert_ref.router import prefill as prefill_module
from tilert_ref.router.pd_router import main
from tilert_ref.router.request import Sampling

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


@pytest.mark.parametrize("stream", [False, True])
def test_an_authorization_that_cannot_be_sent_on_is_400(st: Stack, stream: bool) -> None:
    asked = len(st.vllm.asked("/v1/chat/completions")), len(st.vllm.asked("/v1/models"))
    headers = {"Authorization": "Bearer schl\xfcssel".encode("latin-1")}
    response = st.post(headers=headers, stream=stream)
    error = error_of(response, 400, "invalid_parameter")
    assert error["param"] == "Authorization" and "schl" not in response.text
    error_of(HTTP.get(st.url + "/v1/models", headers=headers), 400, "invalid_parameter")
    assert (len(st.vllm.asked("/v1/chat/completions")), len(st.vllm.asked("/v1/models"))) == asked


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


# Other routes and the command line


def test_models_and_health(st: Stack) -> None:
    assert [m.id for m in st.openai.models.list()] == ["tiny"]
    assert st.get("/health").json() == {"status": "ok", "decode_free": 1}


def test_health_is_fresh(loop: Loop) -> None:
    """It asks the nodes: what the last round of probes saw may be two seconds old."""
    with stack(loop) as s:
        s.await_free()
        s.node.down()
        assert s.get("/health").status_code == 503
        s.node.up()
        assert s.get("/health").status_code == 200


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
    with pytest.raises(SystemExit) as info:
        main(["--vllm-url", "http://127.0.0.1:1", "--decode", "127.0.0.1:1:2", *flags])
    assert info.value.code == 2 and word in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    page = capsys.readouterr().out
    for word in ("example", "--decode", "23333", "0.0.0.0", "as in TileRT", "glm47", "/pool_status"):
        assert word in page
