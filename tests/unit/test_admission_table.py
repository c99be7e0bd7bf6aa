"""protocol.md 5.2 and 5.3 row by row, and where ours is stricter than the published server."""

from typing import Any

import pytest

from tilert_ref.connector.admission import (
    UNCLAIMED_GRACE_S,
    Action,
    Admission,
    Announced,
    Claimed,
    Close,
    Closed,
    Completed,
    Connected,
    DoneReceived,
    Event,
    Evicted,
    Expected,
    GaveUp,
    NotClaimable,
    Record,
    Released,
    Reply,
)
from tilert_ref.connector.codec import Accept, Announce, Done, Reject
from tilert_ref.connector.layout import BF16, BufferLayout, model_profile

TIMEOUT = 120.0


class Desk:
    """An Admission with a clock, and its peers: announce connects first, done repeats what was accepted."""

    def __init__(self, senders: int = 1, **options: Any) -> None:
        self.admission = Admission(frozenset(range(senders)), 1000, TIMEOUT, **options)
        self.now = 0.0
        self.accepted: dict[str, Accept] = {}

    def handle(self, event: Event) -> list[Action]:
        return self.admission.handle(event, self.now)

    def announce(self, conn: str, rid: str, **fields: Any) -> Accept | Reject:
        self.handle(Connected(conn))
        announce = Announce(**({"rid": rid, "rank": 0, "seq_len": 70, "last_prompt_token": 5} | fields))
        *_, reply = (action for action in self.handle(Announced(conn, announce)) if isinstance(action, Reply))
        if isinstance(reply.message, Accept):
            self.accepted[conn] = reply.message
        return reply.message

    def done(self, conn: str, **wrong: Any) -> list[Action]:
        accept = self.accepted[conn]
        fields = {"done": True, "rid": accept.rid, "rank": accept.rank, "generation": accept.generation} | wrong
        return self.handle(DoneReceived(conn, Done(**fields)))

    def complete(self, conn: str, rid: str) -> Record:
        self.announce(conn, rid)
        close, completed = self.done(conn)
        assert close == Close(conn) and isinstance(completed, Completed)
        self.handle(Closed(conn))
        return completed.record

    @property
    def state(self) -> str:
        return self.admission.snapshot(self.now)["state"]


def reason(reply: Accept | Reject) -> str:
    return "accepted" if isinstance(reply, Accept) else reply.error


def test_row_1_too_long_comes_first() -> None:
    desk = Desk()
    desk.handle(Released("a"))
    reply = desk.announce("c1", "a", seq_len=1001, rank=9)
    assert reply == Reject(error="seq_len exceeds max_seq_len", rid="a", max_seq_len=1000)


def test_rows_2_3_and_19_tombstones() -> None:
    desk = Desk()
    desk.handle(Released("a"))
    assert desk.announce("c1", "a") == Reject(error="cancelling", rid="a", detail="no_consumer")
    assert reason(desk.announce("c2", "b")) == "accepted"  # only that rid
    desk.handle(Closed("c2"))
    desk.handle(Released("b"))
    desk.now = TIMEOUT - 1
    assert reason(desk.announce("c3", "a", admission_window_s=3.0)) == "cancelling"
    desk.now = TIMEOUT + 1  # the retry window of c3 is not over
    assert reason(desk.announce("c4", "a")) == "cancelling"
    desk.now = TIMEOUT + 3
    assert reason(desk.announce("c5", "a")) == "accepted"
    assert reason(desk.announce("c6", "b")) == "busy"


def test_a_claimed_retry_window_extends_a_tombstone_by_one_timeout_at_most() -> None:
    desk = Desk()
    desk.handle(Released("a"))
    assert reason(desk.announce("c1", "a", admission_window_s=1e9)) == "cancelling"
    desk.now = TIMEOUT
    assert reason(desk.announce("c2", "a")) == "accepted"


def test_row_19_expect_lifts_the_tombstone() -> None:
    desk = Desk()
    desk.handle(Released("a"))
    desk.handle(Expected("a"))
    assert reason(desk.announce("c1", "a")) == "accepted"


def test_rows_4_10_14_17_cancelling_lasts_until_the_writers_are_gone() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.announce("c2", "a", rank=1)
    desk.handle(Released("a"))
    desk.handle(Expected("a"))
    assert desk.state == "CANCELLING"
    assert desk.announce("c3", "a") == Reject(error="cancelling", rid="a")
    assert desk.announce("c4", "b") == Reject(error="busy", rid="b", busy_rid="a", busy_state="CANCELLING")
    assert desk.done("c1") == [Close("c1")]
    desk.handle(Closed("c1"))
    desk.now = 10 * TIMEOUT
    assert desk.state == "CANCELLING"
    desk.handle(Closed("c2"))
    assert desk.state == "FREE"
    assert desk.announce("c5", "a") == Accept(rid="a", rank=0, generation=2)


def test_rows_5_6_11_12_every_sender_once() -> None:
    desk = Desk(senders=2)
    assert desk.announce("c1", "a", rank=1) == Accept(rid="a", rank=1, generation=1)
    assert desk.done("c1") == [Close("c1")]
    assert desk.announce("c2", "a", rank=1) == Reject(error="duplicate_rank", rid="a", rank=1)
    desk.now = 1.5
    assert desk.announce("c3", "a", rank=0, prompt_token_ids=[5, 6]) == Accept(rid="a", rank=0, generation=1)
    close, completed = desk.done("c3")
    assert close == Close("c3")
    assert completed == Completed(Record("a", 1, 70, 5, None, None, [5, 6], started_at=0.0, completed_at=1.5))
    assert reason(desk.announce("c4", "a", rank=0)) == "duplicate_rank"
    assert desk.state == "COMPLETE"


def test_rows_7_and_8_one_request_at_a_time() -> None:
    desk = Desk()
    assert desk.announce("c1", "a") == Accept(rid="a", rank=0, generation=1)
    assert desk.announce("c2", "b") == Reject(error="busy", rid="b", busy_rid="a", busy_state="TRANSFERRING")
    assert desk.admission.busy(desk.now)


def test_rows_9_and_13_a_stale_connection_changes_nothing() -> None:
    """A connection that is done, but not closed yet, when the same rid gets the slot a second time."""
    desk = Desk()
    desk.announce("c1", "a")
    desk.done("c1")
    desk.handle(Released("a"))
    desk.handle(Expected("a"))
    assert desk.announce("c2", "a") == Accept(rid="a", rank=0, generation=2)
    assert desk.done("c1") == [Close("c1")]
    assert desk.state == "TRANSFERRING"
    desk.handle(Closed("c1"))
    assert desk.admission.snapshot(0)["writers"] == 1


def test_rows_15_16_18_release() -> None:
    desk = Desk()
    desk.complete("c1", "a")
    desk.handle(Released("b"))
    assert desk.state == "COMPLETE"
    desk.handle(Released("a"))
    assert desk.state == "FREE"
    assert desk.admission.snapshot(0)["tombstones"] == 2
    desk.now = TIMEOUT
    desk.handle(Released("c"))
    assert desk.admission.snapshot(desk.now)["tombstones"] == 1


def test_a_dead_transfer_is_given_away_after_the_timeout() -> None:
    desk = Desk()
    desk.announce("c1", "a")
    desk.now = 10 * TIMEOUT
    assert reason(desk.announce("c2", "b")) == "busy"  # its writer is still connected
    desk.handle(Closed("c1"))
    assert reason(desk.announce("c3", "b")) == "accepted"


@pytest.mark.parametrize("says_so", [False, True])
def test_an_abandoned_transfer_of_the_only_sender_is_given_away_after_the_grace(says_so: bool) -> None:
    desk = Desk()
    desk.announce("c1", "a")
    desk.now = 50.0
    if says_so:
        assert desk.done("c1", done=False) == [Close("c1"), GaveUp("a", 1)]
    desk.handle(Closed("c1"))
    desk.now = 50.0 + UNCLAIMED_GRACE_S - 0.5
    assert desk.announce("c2", "b") == Reject(error="busy", rid="b", busy_rid="a", busy_state="TRANSFERRING")
    desk.handle(Closed("c1"))  # repeated: the grace does not start anew
    desk.now = 50.0 + UNCLAIMED_GRACE_S
    assert not desk.admission.busy(desk.now)
    assert desk.announce("c3", "b") == Accept(rid="b", rank=0, generation=2)


def test_of_several_senders_only_one_that_gives_up_shortens_the_wait() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.done("c1")
    desk.announce("c2", "a", rank=1)
    desk.handle(Closed("c2"))
    desk.now = TIMEOUT / 2
    assert reason(desk.announce("c3", "b")) == "busy"  # rank 1 may come back
    desk.announce("c4", "a", rank=1)
    assert desk.done("c4", done=False) == [Close("c4"), GaveUp("a", 1)]
    desk.now += 10
    assert reason(desk.announce("c5", "b")) == "busy"  # it is not closed: its writes may be in flight
    desk.handle(Closed("c4"))
    desk.now += UNCLAIMED_GRACE_S
    assert reason(desk.announce("c6", "b")) == "accepted"


def test_a_rank_that_comes_back_has_not_given_up() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.done("c1", done=False)
    desk.handle(Closed("c1"))
    assert desk.announce("c2", "a") == Accept(rid="a", rank=0, generation=1)
    desk.done("c2")
    desk.now = TIMEOUT - 1
    assert reason(desk.announce("c3", "b")) == "busy"  # rank 1 has not come yet
    desk.announce("c4", "a", rank=1)
    assert isinstance(desk.done("c4")[-1], Completed)


@pytest.mark.parametrize("retry_is_done", [False, True])
def test_a_stale_give_up_changes_nothing(retry_is_done: bool) -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.announce("c2", "a")
    if retry_is_done:
        desk.done("c2")
    assert desk.done("c1", done=False) == [Close("c1")]
    desk.handle(Closed("c1"))
    desk.handle(Closed("c2"))
    desk.now = TIMEOUT - 1
    assert reason(desk.announce("c3", "b")) == "busy"


def test_a_rank_that_lost_its_connection_may_come_back() -> None:
    desk = Desk()
    desk.announce("c1", "a")
    desk.handle(Closed("c1"))
    assert desk.announce("c2", "a") == Accept(rid="a", rank=0, generation=1)


def test_a_fresh_record_waits_for_its_consumer() -> None:
    desk = Desk()
    desk.complete("c1", "a")
    desk.now = UNCLAIMED_GRACE_S - 0.5
    assert desk.announce("c2", "b") == Reject(error="busy", rid="b", busy_rid="a", busy_state="COMPLETE")
    desk.now = UNCLAIMED_GRACE_S
    desk.handle(Connected("c3"))
    actions = desk.handle(Announced("c3", Announce(rid="b", rank=0, seq_len=1)))
    assert actions == [Evicted("a", 1), Reply("c3", Accept(rid="b", rank=0, generation=2))]
    with pytest.raises(NotClaimable, match="'a' cannot be read"):
        desk.handle(Claimed("a"))


def test_a_buffer_that_is_read_is_never_given_away() -> None:
    desk = Desk()
    desk.complete("c1", "a")
    desk.handle(Claimed("a"))
    desk.now = 100 * TIMEOUT
    assert reason(desk.announce("c2", "b")) == "busy"
    with pytest.raises(NotClaimable):
        desk.handle(Claimed("a"))
    desk.handle(Released("a"))
    assert reason(desk.announce("c3", "b")) == "accepted"


def test_a_second_connection_of_a_done_rank_may_still_write() -> None:
    """Both of rank 0's connections were accepted; the record is complete, but only one of them said done."""
    desk = Desk()
    desk.announce("c1", "a")
    desk.announce("c2", "a")
    assert len(desk.done("c1")) == 2
    desk.now = 10 * TIMEOUT
    assert reason(desk.announce("c3", "b")) == "busy"
    assert desk.done("c2") == [Close("c2")]  # not a second Completed
    assert reason(desk.announce("c4", "b")) == "accepted"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"rank": 2}, "unknown_rank"),
        ({"seq_len": 0}, "invalid_seq_len"),
        ({"seq_len": -1}, "invalid_seq_len"),
        ({"rank": 1, "seq_len": 71}, "mismatch"),
        ({"rank": 1, "last_prompt_token": 6}, "mismatch"),
        ({"rank": 1, "kv_scales": [1.0, 0.5]}, "unsupported_kv_scales"),
        ({"rank": 1, "kv_scales": [1.0, 1.0]}, "accepted"),
        ({"rank": 1}, "accepted"),
    ],
)
def test_permanent_refusals(fields: dict[str, Any], error: str) -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    reply = desk.announce("c2", "a", **fields)
    assert reason(reply) == error
    assert isinstance(reply, Accept) or not reply.transient


@pytest.mark.parametrize("wrong", [{"rid": "b"}, {"rank": 1}, {"generation": 2}])
@pytest.mark.parametrize("said", [True, False])
def test_done_must_repeat_what_was_accepted(wrong: dict[str, Any], said: bool) -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    assert desk.done("c1", done=said, **wrong) == [Close("c1")]
    assert desk.admission.snapshot(0)["done_ranks"] == []
    assert desk.state == "TRANSFERRING"


def test_one_connection_carries_one_announce() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    assert desk.handle(Announced("c1", Announce(rid="a", rank=1, seq_len=70, last_prompt_token=5))) == [Close("c1")]
    desk.handle(Connected("c2"))
    assert desk.handle(DoneReceived("c2", Done(done=True, rid="a", rank=0, generation=1))) == [Close("c2")]


def test_geometry_is_checked_if_a_layout_is_given() -> None:
    layout = BufferLayout(model_profile(4, True, False), BF16, 1000)
    other = BufferLayout(model_profile(5, True, False), BF16, 1000)
    desk = Desk(layout=layout)
    assert reason(desk.announce("c1", "a")) == "geometry_mismatch"
    reply = desk.announce("c2", "a", tilert_ref=other.geometry())
    assert isinstance(reply, Reject) and "num_layers 5, we have 4" in str(reply.detail)
    assert reason(desk.announce("c3", "a", tilert_ref=layout.geometry())) == "accepted"


def test_wrong_use_is_named() -> None:
    desk = Desk()
    desk.handle(Connected("c1"))
    with pytest.raises(ValueError, match="'c1' is open already"):
        desk.handle(Connected("c1"))
    with pytest.raises(ValueError, match="'c2' is not open"):
        desk.handle(Announced("c2", Announce(rid="a", rank=0)))
    with pytest.raises(ValueError, match="at least one sender"):
        Admission(frozenset(), 10)
