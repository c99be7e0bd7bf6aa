"""The decode server as its peers see it: a real process, HTTP on one side, a sender of KV on the other."""

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from decode_doubles import plane_token
from decode_node import COMMON, CONFIG, DOUBLE, DOUBLE_LAYOUT, LIMIT_S, ROOT, TESTS, Server

from tilert_ref.connector.codec import Accept, Reject
from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, profile
from tilert_ref.decode_server.__main__ import main

SEQ_LEN = 70
NUMBERS = itertools.count()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
        time.sleep(0.02)


STUB_LAYOUT = BufferLayout(profile("glm5"), FP8_DS_MLA, 256)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """(with the double, with the stub), started side by side."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(CONFIG)
    double = Server(*DOUBLE, "--model-weights-dir", str(model))
    stub = Server("--engine", "stub", TILERT_DECODE_POLL_MS="200")
    try:
        yield double.start(DOUBLE_LAYOUT), stub.start(STUB_LAYOUT)
    finally:
        double.stop()
        stub.stop()


@pytest.fixture
def double(servers: tuple[Server, Server]) -> Server:
    until(servers[0].free)
    return servers[0]


@pytest.fixture
def stub(servers: tuple[Server, Server]) -> Server:
    until(servers[1].free)
    return servers[1]


@pytest.fixture(scope="module")
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def handed_over(server: Server, what: str) -> str:
    """Hands KV over for a new request id that starts with `what` (see decode_doubles); returns the id."""
    rid = f"{what}-{next(NUMBERS)}"
    assert isinstance(server.sender.offer(rid, SEQ_LEN), Accept)
    return rid


def test_health_and_capabilities(stub: Server, double: Server) -> None:
    status, health = stub.get("/health")
    assert (status, health["status"], health["engine"]["state"]) == (200, "ok", "ready")
    capabilities = {"penalties": True, "ignore_eos": True, "logprobs": True}
    assert stub.get("/capabilities") == (
        200,
        {
            "profile": "glm5",
            "engine": "StubEngine",
            "capabilities": capabilities,
            "receive_slots": 2,
            "max_seq_len": 256,
        },
    )
    assert double.get("/capabilities")[1]["capabilities"]["penalties"] is False
    assert any("stub engine: no weights" in line for line in stub.lines)


def test_stub_reply(stub: Server) -> None:
    rid = handed_over(stub, "a")
    status, reply = stub.decode(rid)
    assert status == 200
    timing = reply.pop("timing_ms")
    assert reply == {"rid": rid, "token_ids": [42, 11, 22, 33], "seq_len": SEQ_LEN}
    assert timing.pop("finish_reason") == "stop"
    assert set(timing) == {"wire_wait", "convert", "inject", "first_step", "decode"}
    assert all(isinstance(value, float) and value >= 0 for value in timing.values())


def test_stub_logprobs(stub: Server) -> None:
    _, reply = stub.decode(handed_over(stub, "a"), max_tokens=2, top_logprobs=2)
    assert reply["token_ids"] == [42, 11]
    assert reply["logprobs"] == {"lp": [-1.0, -1.25], "tp": [[[42, -1.0], [43, -1.5]], [[11, -1.25], [12, -1.75]]]}
    _, reply = stub.decode(handed_over(stub, "b"), max_tokens=1, top_logprobs=0)
    assert reply["logprobs"] == {"lp": [-1.0], "tp": [[]]}


def test_poll_interval_merges_all_but_the_first_token(stub: Server) -> None:
    *tokens, end = stub.stream(handed_over(stub, "a"))
    assert tokens == [{"t": [42]}, {"t": [11, 22, 33]}]
    assert (end["done"], end["n"], end["finish_reason"], end["seq_len"]) == (True, 4, "stop", SEQ_LEN)


def test_the_engine_reads_what_the_sender_wrote(double: Server) -> None:
    """KV before the request, and the request before the KV."""
    expected = [42, *map(plane_token, double.sender.planes(SEQ_LEN, layers=3))]
    assert double.decode(handed_over(double, "early"))[1]["token_ids"] == expected
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(double.decode, "late", timeout_s=LIMIT_S)
        until(lambda: double.get("/decode_status")[1] == {"status": "busy", "current_rid": "late"})
        assert isinstance(double.sender.offer("late", SEQ_LEN), Accept)
        assert reply.result(LIMIT_S)[1]["token_ids"] == expected


def test_stream_of_steps(double: Server) -> None:
    *tokens, end = double.stream(handed_over(double, "pairs"), top_logprobs=1)
    assert tokens[0] == {"t": [42], "lp": [-1.0], "tp": [[[42, -1.0]]]}
    assert [token for line in tokens for token in line["t"]] == [42, 100, 101]
    assert (end["n"], end["finish_reason"], end["timing_ms"]["steps"]) == (3, "length", 3)


def test_first_token_is_a_stop_token(double: Server) -> None:
    lines = double.stream(handed_over(double, "stop_first"))
    assert [(line["done"], line["n"], line["finish_reason"]) for line in lines] == [(True, 0, "stop")]
    assert double.decode(handed_over(double, "stop_first"))[1]["token_ids"] == []


def test_minus_infinity_stays_legal_json(double: Server) -> None:
    _, reply = double.decode(handed_over(double, "infinite_logprob"), top_logprobs=1)
    assert reply["logprobs"] == {"lp": [-1.0, -9999.0], "tp": [[[42, -1.0]], [[8, -9999.0]]]}


def test_missing_logprob_is_an_error(double: Server) -> None:
    status, reply = double.decode(handed_over(double, "no_logprob"), top_logprobs=1)
    assert (status, reply["error_type"]) == (501, "logprobs_unavailable")
    lines = double.stream(handed_over(double, "no_logprob"), top_logprobs=1)
    assert lines[0]["t"] == [42] and lines[1]["error_type"] == "logprobs_unavailable" and len(lines) == 2


@pytest.mark.parametrize(
    ("fields", "status", "error_type"),
    [
        ({"max_tokens": 0}, 400, "invalid_parameter"),
        ({"max_tokens": -1}, 400, "invalid_parameter"),
        ({"sampling": {"temperature": -1}}, 400, "invalid_parameter"),
        ({"sampling": {"repetition_penalty": 1.5}}, 501, "capability_unavailable"),
        ({"sampling": {"stop_token_ids": [1]}}, 501, "capability_unavailable"),
        ({"grammar_spec": {"type": "regex", "value": "a"}}, 501, "grammar_unsupported"),
    ],
)
def test_refusals_come_at_once(double: Server, fields: dict[str, Any], status: int, error_type: str) -> None:
    """The reply does not wait for the request's KV, and a KV that comes later is refused."""
    rid = f"refused-{next(NUMBERS)}"
    start = time.monotonic()
    got, reply = double.decode(rid, **fields)
    assert (got, reply["error_type"]) == (status, error_type) and time.monotonic() - start < 5
    rejected = double.sender.offer(rid)
    assert isinstance(rejected, Reject) and rejected.error == "cancelling"
    assert double.free()


def test_null_sampling_values_mean_absent(double: Server) -> None:
    sampling = {"temperature": None, "top_p": None, "top_k": None, "seed": 7, "ignore_eos": True}
    assert double.decode(handed_over(double, "nulls"), sampling=sampling)[0] == 200


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rid": NaN, "first_token_id": 1}', '{"rid": "x"}'])
def test_schema_violations(double: Server, content: str) -> None:
    reply = double.client.post("/pd/decode", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 422
    assert all({"type", "loc", "msg"} <= set(item) for item in reply.json()["detail"])


@pytest.mark.parametrize("rid", ['""', '"\\ud800"', f'"{"x" * 257}"'], ids=["empty", "surrogate", "long"])
def test_rids_that_replies_cannot_carry(double: Server, rid: str) -> None:
    for path in ("/pd/decode", "/pd/cancel"):
        content = f'{{"rid": {rid}, "first_token_id": 1, "timeout_s": 0.1}}'
        reply = double.client.post(path, content=content, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", "rid"])
    assert double.idle()


def test_a_prompt_that_fills_the_buffer(double: Server) -> None:
    assert isinstance(double.sender.offer("full", 256), Accept)
    status, reply = double.decode("full")
    assert (status, reply["error_type"]) == (400, "invalid_parameter")
    assert "256 tokens" in reply["error"] and "1 to 255" in reply["error"]


def test_busy(double: Server) -> None:
    rid = handed_over(double, "endless")
    with double.opened(rid) as lines:
        next(lines)
        assert double.decode("other") == (429, {"error": "busy", "current_rid": rid})
        assert double.get("/decode_status")[1] == {"status": "busy", "current_rid": rid}
        slot = double.get("/health")[1]["receiver"]["slot"]
        assert slot["state"] == "FREE"  # released when inject returned: the next prompt may come in
        following = handed_over(double, "next")
        cancel = double.client.post("/pd/cancel", json={"rid": rid})
        assert (cancel.status_code, cancel.json()) == (200, {"cancelled": rid})
        *tokens, end = lines
        assert end["finish_reason"] == "cancelled" and end["n"] == 1 + sum(len(line["t"]) for line in tokens)
        # The closing line is the permission to send the next request.
        assert double.decode(following)[0] == 200


def test_cancel_of_another_request(double: Server) -> None:
    reply = double.client.post("/pd/cancel", json={"rid": "nobody"})
    expected = {"error": "no matching in-flight request", "current_rid": None}
    assert (reply.status_code, reply.json()) == (404, expected)


def cancelled_while(server: Server, rid: str, pool: ThreadPoolExecutor, **fields: Any) -> tuple[int, Any]:
    reply: Future[tuple[int, Any]] = pool.submit(server.decode, rid, **fields)
    until(lambda: server.client.post("/pd/cancel", json={"rid": rid}).status_code == 200)
    return reply.result(LIMIT_S)


def test_cancel_while_waiting_for_kv(double: Server, background: ThreadPoolExecutor) -> None:
    assert cancelled_while(double, "waiting", background) == (
        499,
        {"error": "cancelled during KV transfer", "error_type": "request_cancelled", "rid": "waiting"},
    )


def test_cancel_during_inject(double: Server, background: ThreadPoolExecutor) -> None:
    rid = handed_over(double, "inject_slow")
    reply = background.submit(double.decode, rid)
    until(lambda: double.get("/health")[1]["receiver"]["slot"].get("claimed", False))
    double.client.post("/pd/cancel", json={"rid": rid})
    assert reply.result(LIMIT_S)[0] == 499


def test_kv_timeout(double: Server) -> None:
    assert double.decode("never", timeout_s=0.1) == (504, {"error": "kv_transfer_timeout", "rid": "never"})


def test_a_sender_that_dies_midway_fails_its_request_at_once(double: Server) -> None:
    with double.sender.announced("half", SEQ_LEN):
        pass
    status, reply = double.decode("half", timeout_s=60)
    assert (status, reply["error_type"]) == (502, "kv_transfer_failed")
    assert "rank 0: its connection ended before it was done" in reply["error"]
    assert double.decode(handed_over(double, "after"))[0] == 200


def test_client_gone_while_streaming(double: Server) -> None:
    with double.opened(handed_over(double, "endless")) as lines:
        next(lines)
    until(double.free)


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_while_waiting(double: Server, stream: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        body = {"rid": "gone", "first_token_id": 1, "stream": stream}
        httpx.post(f"{double.client.base_url}/pd/decode", json=body, timeout=0.3)
    until(double.free)


def test_engine_errors(double: Server) -> None:
    rid = handed_over(double, "inject_raise")
    assert double.decode(rid) == (500, {"error": "this prompt is refused", "rid": rid})
    lines = double.stream(handed_over(double, "raise"))
    assert lines == [{"t": [42]}, {"error": "RuntimeError: decode broke", "error_type": "decode_failed"}]


def test_engine_crash(double: Server) -> None:
    """A clear error, 503 while the engine restarts, and the next request works."""
    lines = double.stream(handed_over(double, "crash"))
    assert lines[0] == {"t": [42]} and lines[1]["error_type"] == "engine_crashed" and len(lines) == 2
    status, health = double.get("/health")
    assert status == 503 and "SIGKILL" in health["reason"]
    status, reply = double.decode("too-early")
    assert (status, reply["error_type"]) == (503, "engine_unavailable")
    until(double.free)
    assert double.decode(handed_over(double, "after"))[0] == 200


def test_a_hung_engine_holds_the_node_only_until_the_cancel_deadline(double: Server) -> None:
    with double.opened(handed_over(double, "hang")) as lines:
        next(lines)
    assert not double.idle()
    until(double.free)


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--engine", "stub", *COMMON, "--http-port", str(taken.getsockname()[1])]
        assert main(flags) == 1
    assert "Address already in use" in capsys.readouterr().err


def test_an_engine_that_does_not_load_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]))
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    assert main([*DOUBLE, "--model-weights-dir", str(model), *COMMON]) == 1
    assert "could not be loaded: missing weight: model.norm.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "what", "status"), [(signal.SIGTERM, "endless", 503), (signal.SIGINT, "waiting", 499)]
)
def test_signals_end_everything_within_two_seconds(
    servers: tuple[Server, Server], number: signal.Signals, what: str, status: int
) -> None:
    """Last in this file: it ends the servers. SIGTERM meets a request that decodes, SIGINT one that waits for KV."""
    server = servers[0] if what == "endless" else servers[1]
    until(server.free)
    rid = handed_over(server, what) if what == "endless" else "waiting"
    children = psutil.Process(server.process.pid).children(recursive=True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.decode, rid)
        until(lambda: server.get("/health")[1]["receiver"]["slot"]["state"] == "FREE" and not server.idle())
        start = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(LIMIT_S) == 0
        took = time.monotonic() - start
        assert reply.result(LIMIT_S)[0] == status
    assert children and not any(child.is_running() for child in children)
    assert took < 2
