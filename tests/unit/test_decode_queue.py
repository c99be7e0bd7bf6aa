"""A decode server with two receive slots over real NIXL: the next request's KV arrives while one is at work.

The double decodes to tokens made of the bytes that it was given, and each sender has its own bytes: an answer with one
byte of another request's KV is a wrong answer.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from decode_doubles import plane_token
from decode_node import LIMIT_S, Server
from handoff_sender import Sender
from test_decode_http import CONFIG, DOUBLE, DOUBLE_LAYOUT, SEQ_LEN, until

from tilert_ref.connector.codec import Accept

FREED_S = 1.0
ROUNDS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(CONFIG)
    server = Server(*DOUBLE, "--model-weights-dir", str(model), "--transport", "nixl")
    try:
        yield server.start(DOUBLE_LAYOUT)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def senders(server: Server) -> Iterator[list[Sender]]:
    made = [Sender(DOUBLE_LAYOUT, server.ctrl_port, transport_name="nixl", seed=seed) for seed in (1, 2)]
    yield made
    for sender in made:
        sender.close()


@pytest.fixture
def node(server: Server) -> Server:
    until(server.free)
    return server


def answer(sender: Sender) -> list[int]:
    """The tokens of a request with this sender's KV."""
    return [42, *(plane_token(plane) for plane in sender.planes(SEQ_LEN, 3))]


def offered(sender: Sender, rid: str) -> str:
    assert isinstance(sender.offer(rid, SEQ_LEN), Accept)
    return rid


def slots(node: Server) -> list[tuple[str, bool]]:
    facts = node.get("/health")[1]["receiver"]["slots"]
    return [(slot["state"], slot.get("claimed", False)) for slot in facts]


def freed_within_a_second(node: Server, rid: str) -> None:
    """Cancels rid; then its lease, its slot and the engine's run must be gone."""
    assert node.cancel(rid)
    began = time.monotonic()
    until(node.free)
    assert time.monotonic() - began < FREED_S


def test_kv_arrives_while_the_slot_before_is_read(node: Server, senders: list[Sender]) -> None:
    """The first request's injection takes long; the second one's KV comes into the other slot."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(node.decode, offered(senders[0], "inject_layers-1"))
        until(lambda: ("COMPLETE", True) in slots(node))
        second = threads.submit(node.decode, offered(senders[1], "second"), queue=True)
        until(lambda: slots(node).count(("COMPLETE", True)) == 2)
        assert node.get("/decode_status")[1] == {
            "status": "busy",
            "current_rid": "inject_layers-1",
            "queued": ["second"],
        }
        assert node.decode("third") == (429, {"error": "busy", "current_rid": "inject_layers-1"})
        assert node.decode("third", queue=True)[0] == 429, "the queue is full"
        assert node.cancel("inject_layers-1")
        assert first.result(LIMIT_S)[0] == 499
        status, reply = second.result(LIMIT_S)
    assert (status, reply["token_ids"]) == (200, answer(senders[1]))
    assert reply["timing_ms"]["queue"] > 0


def test_answers_are_made_of_their_own_kv(node: Server, senders: list[Sender]) -> None:
    """Two clients at once, one queued behind the other most of the time."""

    def client(number: int) -> None:
        for round_number in range(ROUNDS):
            rid = f"own{number}-{round_number}"
            offered(senders[number], rid)
            status, reply = node.decode(rid, queue=True)
            assert (status, reply.get("token_ids")) == (200, answer(senders[number])), reply

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(client, number) for number in range(2)]:
            future.result(LIMIT_S)


def test_a_queued_stream_over_http(node: Server, senders: list[Sender]) -> None:
    with node.opened(offered(senders[0], "endless-1")) as current:
        next(current)
        with node.opened(offered(senders[1], "streamed"), queue=True) as lines:
            assert next(lines) == {"queued": True}
            assert node.cancel("endless-1")
            *tokens, end = [line for line in lines if "queued" not in line]
    assert [t for line in tokens for t in line["t"]] == answer(senders[1]) and end["finish_reason"] == "length"


POINTS: dict[str, Callable[[Server], bool]] = {
    "waiting": lambda node: not node.idle(),
    "inject_layers": lambda node: ("COMPLETE", True) in slots(node),
    "endless": lambda node: slots(node) == [("FREE", False)] * 2 and not node.idle(),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_cancel_frees_everything_within_a_second(node: Server, senders: list[Sender], point: str) -> None:
    """While the KV is awaited, while it is injected, while tokens are made."""
    rid = f"{point}-cancelled"
    if point != "waiting":
        offered(senders[0], rid)
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(node.decode, rid, max_tokens=10**6)
        until(lambda: POINTS[point](node))
        freed_within_a_second(node, rid)
        assert reply.result(LIMIT_S)[0] == (200 if point == "endless" else 499)


@pytest.mark.parametrize("arrived", [True, False])
def test_a_cancel_frees_a_queued_request_within_a_second(node: Server, senders: list[Sender], arrived: bool) -> None:
    rid = f"queued-{arrived}"
    with node.opened(offered(senders[0], f"endless-{rid}")) as current, ThreadPoolExecutor(1) as threads:
        next(current)
        if arrived:
            offered(senders[1], rid)
        reply = threads.submit(node.decode, rid, queue=True)
        until(lambda: node.get("/decode_status")[1].get("queued") == [rid])
        assert node.cancel(rid)
        began = time.monotonic()
        assert reply.result(LIMIT_S)[0] == 499
        until(lambda: slots(node) == [("FREE", False)] * 2 and "queued" not in node.get("/decode_status")[1])
        assert time.monotonic() - began < FREED_S
        assert node.cancel(f"endless-{rid}")


def test_a_failure_that_the_prefill_side_reports_is_the_answer(node: Server, senders: list[Sender]) -> None:
    """Also while it is queued; the current request goes on."""
    with node.opened(offered(senders[0], "endless-reported")) as current:
        next(current)
        with node.opened("reported", queue=True, timeout_s=60) as lines:
            assert next(lines) == {"queued": True}
            senders[1].report("reported", "all staging memory is in use")
            *_, end = lines
        assert (end["status"], end["error_type"]) == (502, "kv_transfer_failed")
        assert "rank 0: all staging memory is in use" in end["error"]
        assert next(current) == {"t": [1]}
        assert node.cancel("endless-reported")


def test_a_request_that_no_prefill_offers_fails_before_its_deadline(node: Server) -> None:
    status, reply = node.decode("nobody", timeout_s=60, announce_timeout_s=0.3)
    assert (status, reply["error_type"]) == (502, "kv_transfer_failed")
    assert "no prefill node offered the KV of 'nobody' within 0.3 s" in reply["error"]
