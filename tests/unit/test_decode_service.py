"""The decode server's pipeline and its ASGI response, without processes and sockets."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tilert_ref.connector.admission import Record
from tilert_ref.connector.receiver import HandoffCancelled, HandoffError, HandoffFailed, HandoffTimeout
from tilert_ref.decode_server import app
from tilert_ref.decode_server.app import DecodeResponse
from tilert_ref.decode_server.engine_client import (
    EngineClosed,
    EngineCrashed,
    EngineDeadlines,
    EngineRun,
    EngineStatus,
    EngineUnavailable,
)
from tilert_ref.decode_server.messages import (
    Cancel,
    Command,
    Ended,
    Event,
    Failed,
    Generate,
    Injected,
    Ready,
    Stepped,
    decode_command,
    decode_event,
    encode,
)
from tilert_ref.decode_server.service import Decode, DecodeService, Timing
from tilert_ref.decode_server.stub import StubEngine
from tilert_ref.decode_server.validation import DecodeBody, DecodeError
from tilert_ref.engine.api import Capabilities, Finished, SamplingParams

ALL = Capabilities(penalties=True, ignore_eos=True, logprobs=True)
LIMIT_S = 10
RECORD = Record("r", 1, 70, 7, None, None, None, 0.0, 0.0)
GOOD = [Injected(1, 0.1, 0.2, 0), Stepped(1, [5]), Stepped(1, [6]), Ended(1, "length")]


def body(**fields: Any) -> DecodeBody:
    return DecodeBody(**({"rid": "r", "first_token_id": 5} | fields))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


class FakeEngine:
    """Delivers a script as soon as a request starts. A script that doesn't end waits for a cancel."""

    def __init__(self, script: list[Event | EngineCrashed], log: list[str]) -> None:
        self.status = EngineStatus("ready")
        self.ready: Ready | None = Ready("Fake", ALL, 128)
        self.deadlines = EngineDeadlines()
        self.requests: list[Generate] = []
        self._script, self._log = script, log
        self.current: EngineRun | None = None

    def generate(self, request: Generate) -> EngineRun:
        if self.status.state != "ready":
            raise EngineUnavailable(self.status.reason)
        self.requests.append(request)
        self._log.append("generate")
        self.current = EngineRun(self, 1)
        for event in self._script:
            self.current.deliver(event)
        return self.current

    def send(self, command: Command) -> None:
        assert command == Cancel(1)
        self._log.append("cancel")
        self.current.deliver(Ended(1, "cancelled"))

    def kill(self, why: EngineCrashed) -> None:
        raise AssertionError(f"killed: {why}")


class FakeReceiver:
    """Has the record at once, or raises, or waits for the cancel event."""

    def __init__(self, outcome: Record | Exception | None, log: list[str]) -> None:
        self.outcome, self._log = outcome, log
        self.waiting = threading.Event()

    def expect(self, rid: str) -> None:
        self._log.append("expect")

    def wait(
        self, rid: str, timeout: float, cancelled: threading.Event, announce_timeout: float | None = None
    ) -> Record:
        self.waiting.set()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None:
            assert cancelled.wait(LIMIT_S)
            self._log.append("wait cancelled")
            raise HandoffCancelled("cancelled")
        return self.outcome

    def release(self, rid: str) -> None:
        self._log.append("release")

    def health(self) -> dict[str, Any]:
        return {"ok": True}


class Node:
    def __init__(
        self, script: list[Any] = GOOD, outcome: Record | Exception | None = RECORD, receive_slots: int = 1
    ) -> None:
        self.log: list[str] = []
        self.engine = FakeEngine(script, self.log)
        self.receiver = FakeReceiver(outcome, self.log)
        self.service = DecodeService(self.engine, self.receiver, receive_slots)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        lease = self.service.try_lease(body(**fields))
        try:
            return await self.service.complete(lease)
        finally:
            await self.service.release(lease)

    def failure(self, **fields: Any) -> DecodeError:
        with pytest.raises(DecodeError) as caught:
            run(self.complete(**fields))
        assert self.service.current_rid is None and self.log[-1] == "release"
        return caught.value


class Client:
    """An ASGI client of one response. It goes away when `gone` is set."""

    def __init__(self, gone: bool = False, on_send: Callable[[dict[str, Any]], None] = lambda message: None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._on_send = on_send
        if gone:
            self.gone.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self._on_send(message)
        self.sent.append(message)

    async def ask(self, node: Node, **fields: Any) -> None:
        response = DecodeResponse(node.service, body(**fields), poll_s=0)
        await response({"type": "http"}, self.receive, self.send)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(message["body"]) for message in self.sent[1:]]


# Messages and the stub


def test_messages_survive_the_wire() -> None:
    request = Generate("r", 70, 7, 5, 16, SamplingParams(0.5, seed=3), 2, 9)
    assert decode_command(encode(request)) == request
    for event in [*GOOD, Stepped(1, [1], [None], [[(2, -1.0)]]), Failed(1, "x"), Ready("e", ALL, 4)]:
        assert decode_event(encode(event)) == event


def test_stub_counts_max_tokens_from_the_first_token() -> None:
    for max_tokens in (1, 3, 9):
        *steps, end = StubEngine(128).decode(5, max_tokens, SamplingParams())
        assert [token.id for step in steps for token in step] == [5, 11, 22, 33][:max_tokens]
        assert end == Finished("stop")


# Pipeline


def test_complete_request() -> None:
    node = Node()
    reply = run(node.complete(max_tokens=9, sampling={"temperature": 0}))
    assert (reply["token_ids"], reply["seq_len"], reply["rid"]) == ([5, 6], 70, "r")
    assert reply["timing_ms"]["finish_reason"] == "length" and reply["timing_ms"]["inject"] == 0.2
    assert "logprobs" not in reply
    request = node.engine.requests[0]
    assert (request.seq_len, request.last_prompt_token, request.max_tokens) == (70, 7, 9)
    assert request.sampling == SamplingParams(temperature=0.0)


def test_first_step_counts_from_the_last_byte_or_from_a_request_that_came_later() -> None:
    now = time.monotonic()
    late = now + 10  # the KV is there after the request
    node = Node([Injected(1, 0.1, 0.2, late + 0.004), Ended(1, "length")], replace(RECORD, completed_at=late))
    assert run(node.complete())["timing_ms"]["first_step"] == pytest.approx(4.0, abs=0.1)
    node = Node([Injected(1, 0.1, 0.2, now + 5), Ended(1, "length")])
    assert 0 < 5000 - run(node.complete())["timing_ms"]["first_step"] < 2000


def test_the_slot_is_free_before_the_first_token_is_read() -> None:
    node = Node()

    async def work() -> None:
        lease = node.service.try_lease(body())
        await node.service.begin(lease)
        assert node.log == ["expect", "generate", "release"]
        await node.service.release(lease)
        await node.service.release(lease)

    run(work())
    assert node.log.count("release") == 2


@pytest.mark.parametrize(
    ("outcome", "status", "content"),
    [
        (HandoffTimeout("late"), 504, {"error": "kv_transfer_timeout", "rid": "r"}),
        (HandoffFailed("gone"), 502, {"error": "gone", "error_type": "kv_transfer_failed", "rid": "r"}),
        (
            HandoffCancelled("c"),
            499,
            {"error": "cancelled during KV transfer", "error_type": "request_cancelled", "rid": "r"},
        ),
        (HandoffError("closed"), 503, {"error": "closed", "error_type": "receiver_unavailable", "rid": "r"}),
    ],
)
def test_kv_that_does_not_come(outcome: Exception, status: int, content: dict[str, Any]) -> None:
    error = Node(outcome=outcome).failure()
    assert (error.status, error.body) == (status, content)


@pytest.mark.parametrize(
    ("script", "status", "error_type"),
    [
        ([Failed(1, "bad prompt")], 500, None),
        ([EngineCrashed("signal SIGKILL")], 502, "engine_crashed"),
        ([Injected(1, 0, 0, 0), Stepped(1, [5]), EngineCrashed("signal SIGSEGV")], 502, "engine_crashed"),
        ([Injected(1, 0, 0, 0), EngineClosed("shutting down")], 503, "engine_unavailable"),
        ([Ended(1, "cancelled")], 499, "request_cancelled"),
    ],
)
def test_engine_failures(script: list[Any], status: int, error_type: str | None) -> None:
    error = Node(script).failure()
    assert (error.status, error.body.get("error_type"), error.body["rid"]) == (status, error_type, "r")


@pytest.mark.parametrize("seq_len", [128, 129])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_by_name(seq_len: int) -> None:
    node = Node(outcome=replace(RECORD, seq_len=seq_len))
    error = node.failure()
    assert (error.status, error.body["error_type"], error.body["rid"]) == (400, "invalid_parameter", "r")
    assert f"has {seq_len} tokens" in error.body["error"] and "max_seq_len is 128" in error.body["error"]
    assert node.log == ["expect", "release"]


def test_the_longest_legal_prompt() -> None:
    assert run(Node(outcome=replace(RECORD, seq_len=127)).complete())["seq_len"] == 127


@pytest.mark.parametrize("ready", [None, Ready("Fake", ALL, 128)])
def test_an_engine_that_restarts_is_reported_at_once(ready: Ready | None) -> None:
    node = Node()
    node.engine.ready, node.engine.status = ready, EngineStatus("restarting", "engine is restarting: it died")
    error = node.failure()
    assert (error.status, error.body["error"]) == (503, "engine is restarting: it died")
    assert node.log == ["release"]


def test_one_lease_at_a_time_and_cancel_by_rid() -> None:
    node = Node(outcome=None)

    async def work() -> None:
        lease = node.service.try_lease(body())
        assert node.service.try_lease(body(rid="second")) is None
        assert node.service.current_rid == "r"
        assert not node.service.cancel("second") and not lease.cancelled.is_set()
        assert node.service.cancel("r") and lease.cancelled.is_set()
        await node.service.release(lease)
        assert node.service.try_lease(body(rid="second"))

    run(work())


def test_cancel_while_decoding_keeps_what_there_is() -> None:
    async def work() -> dict[str, Any]:
        node = Node([Injected(1, 0, 0, 0), Stepped(1, [5])])
        reply = asyncio.create_task(node.complete())
        while not node.engine.current:
            await asyncio.sleep(0)
        assert node.service.cancel("r")
        return await reply

    reply = run(work())
    assert (reply["token_ids"], reply["timing_ms"]["finish_reason"]) == ([5], "cancelled")


def test_release_waits_for_the_kv_wait_and_for_the_engine() -> None:
    async def waiting() -> list[str]:
        node = Node(outcome=None)
        lease = node.service.try_lease(body())
        begin = asyncio.create_task(node.service.begin(lease))
        assert await asyncio.to_thread(node.receiver.waiting.wait, LIMIT_S)
        begin.cancel()
        await node.service.release(lease)
        return node.log

    async def decoding() -> list[str]:
        node = Node([Injected(1, 0, 0, 0), Stepped(1, [5])])
        lease = node.service.try_lease(body())
        await node.service.begin(lease)
        await node.service.release(lease)
        assert node.engine.current.over.is_set()
        return node.log

    assert run(waiting()) == ["expect", "wait cancelled", "release"]
    assert run(decoding()) == ["expect", "generate", "release", "cancel", "release"]


# Batches of a stream


def decode_of(script: list[Event]) -> tuple[Decode, EngineRun]:
    node = Node()
    lease = node.service.try_lease(body())
    lease.run = EngineRun(node.engine, 1)
    for event in script:
        lease.run.deliver(event)
    return Decode(lease, RECORD, Timing(), 0.0), lease.run


async def lines_of(decode: Decode, poll_s: float) -> list[dict[str, Any]]:
    return [line async for line in decode.lines(poll_s)]


@pytest.mark.parametrize("poll_s", [0, 5])
def test_first_token_alone_then_what_is_there(poll_s: float) -> None:
    async def work() -> None:
        decode, _ = decode_of([Stepped(1, [1, 2]), Stepped(1, [3]), Stepped(1, [4, 5]), Ended(1, "length")])
        assert await lines_of(decode, poll_s) == [{"t": [1]}, {"t": [2]}, {"t": [3, 4, 5]}]
        assert decode.closing_line()["n"] == 5

    run(work())


def test_no_token_at_all() -> None:
    async def work() -> None:
        decode, _ = decode_of([Ended(1, "stop")])
        assert await lines_of(decode, 0) == [] and decode.closing_line()["n"] == 0

    run(work())


@pytest.mark.parametrize(("poll_s", "expected"), [(0, [[1], [2], [3], [4]]), (LIMIT_S, [[1], [2, 3, 4]])])
def test_poll_interval(poll_s: float, expected: list[list[int]]) -> None:
    """Tokens that come one by one: interval 0 sends each when it is there, a long one all of them at the end."""

    async def work() -> None:
        decode, engine_run = decode_of([])

        async def feed() -> None:
            for token in (1, 2, 3, 4):
                engine_run.deliver(Stepped(1, [token]))
                await asyncio.sleep(0.02)
            engine_run.deliver(Ended(1, "length"))

        feeding = asyncio.create_task(feed())
        assert [line["t"] for line in await lines_of(decode, poll_s)] == expected
        await feeding

    run(work())


# The response: whatever the client does, the lease comes back


def test_stream_lines() -> None:
    async def work() -> None:
        client, node = Client(), Node()
        await client.ask(node, stream=True)
        tokens, end = client.lines[:-1], client.lines[-1]
        assert client.status == 200 and [t for line in tokens for t in line["t"]] == [5, 6]
        assert (end["done"], end["n"], end["finish_reason"]) == (True, 2, "length")
        assert [message.get("more_body") for message in client.sent[1:]] == [True] * len(tokens) + [False]
        assert node.service.current_rid is None

    run(work())


def test_stream_error_is_the_only_terminal_line() -> None:
    async def work() -> None:
        client, node = Client(), Node([Injected(1, 0, 0, 0), Stepped(1, [5]), EngineCrashed("gone")])
        await client.ask(node, stream=True)
        assert client.lines == [{"t": [5]}, {"error": "engine crashed: gone", "error_type": "engine_crashed"}]

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_the_node_is_free_before_the_last_byte_leaves(stream: bool) -> None:
    async def work() -> None:
        node = Node()
        seen: list[str | None] = []
        client = Client(on_send=lambda message: seen.append(node.service.current_rid))
        await client.ask(node, stream=stream)
        assert seen[-1] is None

    run(work())


def test_a_response_that_is_never_called_takes_no_lease() -> None:
    node = Node()
    DecodeResponse(node.service, body(stream=True), 0)
    assert node.service.current_rid is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outcome", [None, RECORD])
def test_client_that_is_gone_already(stream: bool, outcome: Record | None) -> None:
    async def work() -> None:
        node = Node([Injected(1, 0, 0, 0), Stepped(1, [5])], outcome)  # would go on for ever
        await Client(gone=True).ask(node, stream=stream)
        assert node.service.current_rid is None and node.log[-1] == "release"

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_send_that_fails(stream: bool) -> None:
    def fail(message: dict[str, Any]) -> None:
        raise OSError("connection lost")

    async def work() -> None:
        node = Node()
        with pytest.raises(OSError, match="connection lost"):
            await Client(on_send=fail).ask(node, stream=stream)
        assert node.service.current_rid is None

    run(work())


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SEND_TIMEOUT_S", 0.05)

    async def work() -> None:
        client, node = Client(), Node([Injected(1, 0, 0, 0), Stepped(1, [5])])

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(LIMIT_S)

        client.send = send
        await client.ask(node, stream=True)
        assert node.service.current_rid is None and "cancel" in node.log

    run(work())


def test_busy_reply_leaves_the_lease_with_its_owner() -> None:
    async def work() -> None:
        client, node = Client(), Node()
        lease = node.service.try_lease(body())
        await client.ask(node, rid="second")
        assert client.status == 429 and client.lines == [{"error": "busy", "current_rid": "r"}]
        assert node.service.current_rid == "r" and not lease.cancelled.is_set()

    run(work())


def test_a_bug_becomes_a_500_with_the_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        client, node = Client(), Node()
        monkeypatch.setattr(node.receiver, "expect", lambda rid: 1 / 0)
        await client.ask(node)
        assert client.status == 500
        assert client.lines == [{"error": "ZeroDivisionError: division by zero", "rid": "r"}]
        assert node.service.current_rid is None

    run(work())
