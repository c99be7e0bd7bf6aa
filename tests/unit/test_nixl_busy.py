"""The NIXL transport beside an agent that is busy, or whose bytes never stop moving: a stand-in that says so."""

import base64
import threading
import time
from typing import Any

import pytest
import torch

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TransferError, TransferTimeout, nixl
from tilert_ref.connector.transport.nixl import NixlTransport

META = {"nixl_meta": base64.b64encode(b"a receiver").decode()}


class Agent:
    """Takes whatever it is told; a posted write goes on for ever."""

    def __init__(self) -> None:
        self.posted = 0

    def transfer(self, handle: Any) -> str:
        self.posted += 1
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "PROC"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: object()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> NixlTransport:
    monkeypatch.setattr(nixl, "LAST_COPIES_S", 0.1)
    made = NixlTransport(receiver=False)
    made._agent = Agent()
    return made


def copies(transport: NixlTransport) -> list[Copy]:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    transport.register(memory.data_ptr(), memory.nbytes, memory)
    return [Copy(memory.data_ptr(), 4096, memory.nbytes, 0, "kv")]


def busy_for(transport: NixlTransport, seconds: float) -> None:
    transport._lock.acquire()
    threading.Timer(seconds, transport._lock.release).start()


@pytest.mark.parametrize("prepared", [True, False])
def test_nothing_is_posted_after_the_deadline(transport: NixlTransport, prepared: bool) -> None:
    whole = copies(transport)
    with transport.prepared(META, whole) as meta:
        busy_for(transport, 0.5)
        with pytest.raises(TransferError) as error:
            transport.write(meta if prepared else META, whole, b"", time.monotonic() + 0.1)
        assert not isinstance(error.value, TransferTimeout)
        time.sleep(0.6)
        assert transport._agent.posted == 0


def test_a_deadline_that_has_passed_posts_nothing(transport: NixlTransport) -> None:
    whole = copies(transport)
    with transport.prepared(META, whole) as meta, pytest.raises(TransferError, match="before it could begin"):
        transport.write(meta, whole, b"", time.monotonic() - 0.1)
    assert transport._agent.posted == 0


def test_a_late_write_that_outlives_the_transport_never_counts_as_ended(transport: NixlTransport) -> None:
    with pytest.raises(TransferTimeout) as late:
        transport.write(META, copies(transport), b"", time.monotonic() + 0.1)
    transport.close()
    time.sleep(0.1)
    assert transport._agent is None
    assert not late.value.settled.done()


def test_a_close_while_the_agent_is_busy_happens_later(
    transport: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "CLOSE_PATIENCE_S", 0.1)
    busy_for(transport, 0.5)
    transport.close()
    assert transport._agent is not None
    with pytest.raises(TransferError, match="closed"):
        transport.start()
    deadline = time.monotonic() + 5
    while transport._agent is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert transport._agent is None


def test_who_hears_that_a_write_ended_may_use_the_transport(transport: NixlTransport) -> None:
    heard, whole = list[int](), copies(transport)

    def told(_: Any) -> None:
        with transport.prepared(META, whole):
            heard.append(1)

    with pytest.raises(TransferTimeout) as late:
        transport.write(META, whole, b"", time.monotonic() + 0.1)
    late.value.settled.add_done_callback(told)
    transport._agent.check_xfer_state = lambda handle: "DONE"
    late.value.settled.result(timeout=10)
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard == [1]


def test_nixls_lists_are_let_go_with_their_context_and_the_transport(transport: NixlTransport) -> None:
    whole = copies(transport)
    sources = [(copy.src, copy.nbytes) for copy in whole]
    with transport.staged(sources) as staged, transport.prepared(META, whole, staged) as meta:
        assert transport._lists == [staged.list, meta.list]
    assert transport._lists == []
    with transport.staged(sources) as staged, transport.prepared(META, whole, staged):
        transport.close()
        assert transport._lists == []


def test_a_busy_agent_is_not_waited_for_while_a_receiver_waits(
    transport: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "STAGING_PATIENCE_S", 0.05)
    whole = copies(transport)
    with transport._turn(), transport.staged([(copy.src, copy.nbytes) for copy in whole]) as staged:
        assert staged is None


def test_what_is_let_go_while_the_agent_is_busy_goes_with_the_next_turn(transport: NixlTransport) -> None:
    whole = copies(transport)
    began = time.monotonic()
    with transport.prepared(META, whole):
        transport._lock.acquire()
    assert time.monotonic() - began < 1.0 and len(transport._lists) == 2
    transport._lock.release()
    transport.start()
    assert (transport._lists, transport._prepared) == ([], {})


def test_a_write_that_nothing_was_prepared_for_has_one_deadline(transport: NixlTransport) -> None:
    (whole,) = copies(transport)
    lists = transport._new_list

    def slow(*arguments: Any) -> Any:
        time.sleep(0.4)
        return lists(*arguments)

    transport._new_list = slow
    began = time.monotonic()
    with pytest.raises(TransferError, match="before it could begin|did not answer within 0.0"):
        transport.write(META, [whole], b"", began + 0.2)
    assert time.monotonic() - began < 2.0 and transport._agent.posted == 0


def test_nothing_to_prepare(transport: NixlTransport) -> None:
    with transport.prepared(META, []) as meta:
        transport.write(meta, [], b"", time.monotonic() + 1)
    assert meta == META


def test_a_region_that_is_about_to_go_is_no_more_in_the_hello(transport: NixlTransport) -> None:
    (first,), (second,) = copies(transport), copies(transport)
    transport._agent.get_agent_metadata = lambda: b"meta"
    transport._regions.remove(first.src)
    assert transport.local_meta("")["nixl_dev"] == 0
    transport._regions.remove(second.src)
    with pytest.raises(TransferError, match="exactly one device"):
        transport.local_meta("")
