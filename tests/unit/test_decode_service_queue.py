"""The decode server's queue behind the current request, without processes and sockets (see test_decode_service.py)."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from test_decode_service import RECORD, Client, Node, body, run

from tilert_ref.connector.admission import Record
from tilert_ref.connector.receiver import HandoffFailed, HandoffTimeout
from tilert_ref.decode_server import app
from tilert_ref.decode_server.messages import Injected, Stepped
from tilert_ref.decode_server.service import Decode, Lease
from tilert_ref.decode_server.validation import DecodeError

ENDLESS = [Injected(1, 0, 0, 0), Stepped(1, [5])]  # until it is cancelled


async def begun(node: Node, **fields: Any) -> tuple[Lease, asyncio.Task[Decode]]:
    """A lease whose request has come as far as it can."""
    lease = node.service.try_lease(body(**fields))
    task = asyncio.create_task(node.service.begin(lease))
    await asyncio.wait({task}, timeout=0.1)
    return lease, task


def test_only_who_asks_is_queued_and_only_as_many_as_there_are_slots() -> None:
    async def work() -> None:
        service = Node(receive_slots=2).service
        first = service.try_lease(body(queue=True))
        assert first.turn.is_set()
        assert service.try_lease(body(rid="b")) is None, "a stock client gets its 429"
        assert service.try_lease(body(queue=True)) is None, "the same request twice"
        second = service.try_lease(body(rid="b", queue=True))
        assert not second.turn.is_set() and service.try_lease(body(rid="c", queue=True)) is None
        assert (service.current_rid, service.queued_rids) == ("r", ["b"])
        await service.release(first)
        assert second.turn.is_set() and (service.current_rid, service.queued_rids) == ("b", [])

    run(work())
    assert Node().service.try_lease(body()) is not None


def test_a_queued_request_starts_the_moment_the_engine_is_free() -> None:
    async def work() -> None:
        node = Node(ENDLESS, receive_slots=2)
        first, task = await begun(node)
        second, queued = await begun(node, rid="b", queue=True)
        assert task.done() and not queued.done() and len(node.engine.requests) == 1
        await node.service.release(first)
        decode = await queued
        assert [request.rid for request in node.engine.requests] == ["r", "b"]
        assert decode.timing.queue > 0 and "queue" in decode.timing.rounded()
        await node.service.release(second)

    run(work())


def test_the_engine_reads_the_slot_that_the_record_names() -> None:
    node = Node(outcome=replace(RECORD, slot=3))
    run(node.complete())
    assert node.engine.requests[0].slot == 3


@pytest.mark.parametrize("outcome", [RECORD, None])
def test_cancel_of_a_queued_request_leaves_the_current_one_alone(outcome: Record | None) -> None:
    """It has its KV and waits for its turn, or it still waits for its KV."""

    async def work() -> None:
        node = Node(ENDLESS, receive_slots=2)
        first, _ = await begun(node)
        node.receiver.outcome = outcome
        second, queued = await begun(node, rid="b", queue=True)
        assert node.service.cancel("b") and not node.service.cancel("c")
        with pytest.raises(DecodeError) as caught:
            await queued
        assert (caught.value.status, caught.value.body["rid"]) == (499, "b")
        await node.service.release(second)
        assert node.service.queued_rids == [] and not first.cancelled.is_set()
        assert node.log[-1] == "release" and "cancel" not in node.log
        await node.service.release(first)

    run(work())


def test_a_queued_request_whose_kv_does_not_come_fails_in_the_queue() -> None:
    async def work() -> None:
        node = Node(ENDLESS, receive_slots=2)
        first, _ = await begun(node)
        node.receiver.outcome = HandoffFailed("rank 0: it gave up")
        with pytest.raises(DecodeError) as caught:
            lease, queued = await begun(node, rid="b", queue=True)
            await queued
        assert caught.value.body["error_type"] == "kv_transfer_failed"
        await node.service.release(lease)
        await node.service.release(first)

    run(work())


def test_a_queued_stream_says_that_it_is_alive_and_how_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "QUEUE_BEAT_S", 0.05)

    async def work() -> None:
        node = Node(ENDLESS, receive_slots=2)
        first, _ = await begun(node)
        client, failing = Client(), Client()
        asking = asyncio.create_task(client.ask(node, rid="b", queue=True, stream=True))
        await asyncio.sleep(0.2)
        assert client.status == 200 and len(client.lines) > 2
        node.service.cancel("b")
        await asking
        *beats, end = client.lines
        assert all(beat == {"queued": True} for beat in beats)
        assert (end["error_type"], end["status"]) == ("request_cancelled", 499)
        node.receiver.outcome = HandoffTimeout("late")
        await failing.ask(node, rid="c", queue=True, stream=True)
        assert failing.lines[-1] == {"error": "kv_transfer_timeout", "error_type": "decode_failed", "status": 504}
        await node.service.release(first)

    run(work())


def test_a_queued_stream_goes_on_as_any_other() -> None:
    async def work() -> None:
        node = Node(receive_slots=2)
        first = node.service.try_lease(body())
        client = Client()
        asking = asyncio.create_task(client.ask(node, rid="b", queue=True, stream=True))
        await asyncio.sleep(0.1)
        await node.service.release(first)
        await asking
        lines = [line for line in client.lines if "queued" not in line]
        assert [t for line in lines[:-1] for t in line["t"]] == [5, 6] and lines[-1]["n"] == 2

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(stream: bool) -> None:
    async def work() -> None:
        node = Node(ENDLESS, receive_slots=2)
        first, _ = await begun(node)
        await Client(gone=True).ask(node, rid="b", queue=True, stream=stream)
        assert node.service.queued_rids == [] and node.service.current_rid == "r"
        await node.service.release(first)

    run(work())
