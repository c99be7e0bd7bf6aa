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
from tilert_ref.connector.layout import BF16, BufferLayout, model_profile, profile

TIMEOUT = 120.0


class Desk:
    """An Admission with a clock, and its peers: announce connects first, done repeats what was accepted.

    `moved`: the slots of accepts that are not the offered ones.
    """

    def __init__(self, senders: int = 1, **options: Any) -> None:
        self.admission = Admission(frozenset(range(senders)), 1000, TIMEOUT, **options)
        self.now = 0.0
        self.accepted: dict[str, Accept] = {}
        self.moved: dict[str, int | None] = {}

    def handle(self, event: Event) -> list[Action]:
        return self.admission.handle(event, self.now)

    def connect(self, conn: str) -> int:
        """The slot that it is offered."""
        (offer,) = self.handle(Connected(conn))
        return offer.slot

    def announce(self, conn: str, rid: str, **fields: Any) -> Accept | Reject:
        self.connect(conn)
        return self.say(conn, rid, **fields)

    def say(self, conn: str, rid: str, **fields: Any) -> Accept | Reject:
        announce = Announce(**({"rid": rid, "rank": 0, "seq_len": 70, "last_prompt_token": 5} | fields))
        *_, reply = (action for action in self.handle(Announced(conn, announce)) if isinstance(action, Reply))
        if isinstance(reply.message, Accept):
            self.accepted[conn] = reply.message
            self.moved[conn] = reply.moved_to
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
        assert desk.done("c1", done=False) == [Close("c1"), GaveUp("a", 1, "it gave up")]
    desk.handle(Closed("c1"))
    desk.now = 50.0 + UNCLAIMED_GRACE_S - 0.5
    assert desk.announce("c2", "b") == Reject(error="busy", rid="b", busy_rid="a", busy_state="TRANSFERRING")
    desk.handle(Closed("c1"))  # repeated: the grace does not start anew
    desk.now = 50.0 + UNCLAIMED_GRACE_S
    assert not desk.admission.busy(desk.now)
    assert desk.announce("c3", "b") == Accept(rid="b", rank=0, generation=2)


def test_of_several_senders_a_failed_one_shortens_the_wait() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.done("c1")
    desk.handle(Closed("c1"))
    desk.now = TIMEOUT / 2
    assert reason(desk.announce("c3", "b")) == "busy"  # rank 1 may be on its way
    desk.announce("c4", "a", rank=1)
    assert desk.done("c4", done=False, error="no route") == [Close("c4"), GaveUp("a", 1, "no route")]
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
    assert desk.handle(Closed("c1")) == []
    assert desk.admission.failure("a") is None
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


def test_kv_of_another_checkpoint_is_refused_and_both_are_named() -> None:
    layout = BufferLayout(model_profile(4, True, False), BF16, 1000)
    desk = Desk(layout=layout, checkpoint="ours")
    reply = desk.announce("c1", "a", tilert_ref=layout.geometry(checkpoint="theirs"))
    assert isinstance(reply, Reject) and reply.error == "geometry_mismatch"
    assert reply.detail == "the peer has checkpoint 'theirs', we have 'ours'"
    assert reason(desk.announce("c2", "a", tilert_ref=layout.geometry(checkpoint="ours"))) == "accepted"
    published = BufferLayout(profile("glm5"), BF16, 1000)
    desk = Desk(layout=published, checkpoint="ours")
    assert reason(desk.announce("c1", "a")) == "accepted"  # TileRT's names none


def test_wrong_use_is_named() -> None:
    desk = Desk()
    desk.handle(Connected("c1"))
    with pytest.raises(ValueError, match="'c1' is open already"):
        desk.handle(Connected("c1"))
    with pytest.raises(ValueError, match="'c2' is not open"):
        desk.handle(Announced("c2", Announce(rid="a", rank=0)))
    with pytest.raises(ValueError, match="at least one sender"):
        Admission(frozenset(), 10)

    with pytest.raises(ValueError, match="one slot"):
        Admission(frozenset({0}), 10, slots=0)


# Failures: what the consumer is told before its deadline


def test_a_rank_fails_by_saying_so_by_leaving_or_by_being_refused() -> None:
    desk = Desk(senders=4)
    desk.announce("c0", "a")
    desk.done("c0", done=False, error="the write failed")
    desk.announce("c1", "a", rank=1)
    assert desk.handle(Closed("c1")) == [GaveUp("a", 1, "its connection ended before it was done")]
    desk.announce("c2", "a", rank=2, seq_len=71)
    desk.connect("c3")
    notice = Announced("c3", Announce(rid="a", rank=3, failed="no staging memory"))
    assert desk.handle(notice) == [Close("c3")]
    assert desk.admission.failure("a") == (
        "rank 0: the write failed; rank 1: its connection ended before it was done; "
        "rank 2: refused: mismatch (seq_len is 71, rank 0 said 70); rank 3: no staging memory"
    )
    for rank in range(4):
        desk.announce(f"again {rank}", "a", rank=rank)
    assert desk.admission.failure("a") is None, "a rank that is accepted has not failed"


def test_a_failure_before_anything_was_accepted_takes_no_slot_and_ends_with_the_release() -> None:
    desk = Desk()
    desk.connect("c1")
    desk.handle(Announced("c1", Announce(rid="a", rank=0, failed="refused 5 times")))
    assert desk.state == "FREE" and desk.admission.failure("a") == "rank 0: refused 5 times"
    assert desk.admission.failure("b") is None
    desk.handle(Released("a"))
    desk.connect("c2")
    desk.handle(Announced("c2", Announce(rid="a", rank=0, failed="late")))
    assert desk.admission.failure("a") is None, "nobody waits for a released rid"
    desk.handle(Expected("a"))
    desk.connect("c3")
    desk.handle(Announced("c3", Announce(rid="a", rank=0, failed="again")))
    assert desk.admission.failure("a") == "rank 0: again"


def test_no_failure_of_a_rank_that_is_done_or_unknown_or_refused_while_it_is_at_it() -> None:
    desk = Desk(senders=2)
    desk.announce("c1", "a")
    desk.announce("c2", "a", rank=1)
    desk.done("c2")
    for rank in (1, 2):
        desk.connect(f"f{rank}")
        desk.handle(Announced(f"f{rank}", Announce(rid="a", rank=rank, failed="stale")))
    assert reason(desk.announce("c3", "a", rank=1)) == "duplicate_rank"
    assert reason(desk.announce("c4", "a", seq_len=71)) == "mismatch"
    assert desk.admission.failure("a") is None


def test_a_sender_may_fail_while_its_write_goes_on() -> None:
    """It gave the write up, but can't stop it: the consumer is told, the slot is kept until the connection closes."""
    desk = Desk()
    desk.announce("c1", "a")
    desk.connect("notice")
    desk.handle(Announced("notice", Announce(rid="a", rank=0, failed="the write missed its deadline")))
    assert desk.admission.failure("a") == "rank 0: the write missed its deadline"
    desk.handle(Released("a"))
    desk.now = 10 * TIMEOUT
    assert desk.state == "CANCELLING" and reason(desk.announce("c2", "b")) == "busy"
    desk.handle(Closed("c1"))
    assert desk.state == "FREE"


def test_failures_of_requests_that_nobody_asks_for_are_forgotten() -> None:
    desk = Desk()
    for number in range(1500):
        desk.connect(f"c{number}")
        desk.handle(Announced(f"c{number}", Announce(rid=f"r{number}", rank=0, failed="x")))
    assert desk.admission.failure("r0") is None and desk.admission.failure("r1499") is not None
    desk.now = TIMEOUT
    desk.connect("last")
    desk.handle(Announced("last", Announce(rid="last", rank=0, failed="x")))
    assert desk.admission.failure("r1499") is None


def test_slots_that_hang_are_named() -> None:
    desk = Desk(slots=2)
    desk.announce("c1", "a")
    desk.announce("c2", "b")
    desk.now = TIMEOUT - 1
    assert not desk.admission.stuck(desk.now) and desk.admission.transferring()
    desk.now = TIMEOUT
    assert desk.admission.stuck(desk.now)
    desk.handle(Closed("c2"))
    assert not desk.admission.stuck(desk.now)


# Several slots


def test_two_requests_at_the_same_time_and_a_third_is_busy() -> None:
    desk = Desk(slots=2)
    assert desk.announce("c1", "a") == Accept(rid="a", rank=0, generation=1)
    assert not desk.admission.busy(desk.now)
    assert desk.connect("c2") == 1
    assert desk.say("c2", "b") == Accept(rid="b", rank=0, generation=2)
    assert desk.admission.writable() == {("a", 1): 0, ("b", 2): 1}
    assert desk.admission.busy(desk.now)
    assert desk.announce("c3", "c") == Reject(error="busy", rid="c", busy_rid="a", busy_state="TRANSFERRING")
    assert desk.done("c2")[-1].record.slot == 1
    assert desk.admission.writable() == {("a", 1): 0}, "nobody writes to what is complete"
    assert desk.done("c1")[-1].record.slot == 0


def test_the_next_request_arrives_while_one_is_read() -> None:
    desk = Desk(slots=2)
    desk.complete("c1", "a")
    desk.handle(Claimed("a"))
    for number in range(3):
        record = desk.complete(f"b{number}", f"b{number}")
        assert record.slot == 1
        desk.handle(Claimed(f"b{number}"))
        assert reason(desk.announce(f"c{number}", "c")) == "busy"
        desk.handle(Released(f"b{number}"))
    desk.handle(Released("a"))
    assert [slot["state"] for slot in desk.admission.snapshot(0)["slots"]] == ["FREE", "FREE"]


def test_ranks_of_one_request_are_offered_the_slot_that_misses_them() -> None:
    desk = Desk(senders=2, slots=2)
    assert desk.connect("a0") == desk.connect("a1") == 0, "they come together"
    assert desk.connect("b0") == 1
    desk.say("a0", "a")
    desk.say("b0", "b")
    desk.handle(Closed("a1"))
    assert desk.connect("a1 again") == 0, "the oldest transfer first"
    assert desk.connect("b1") == 1, "each transfer is offered to as many as it misses"
    assert desk.say("b1", "b", rank=1) == Accept(rid="b", rank=1, generation=2)
    assert desk.say("a1 again", "a", rank=1) == Accept(rid="a", rank=1, generation=1)
    assert set(desk.moved.values()) == {None}


def test_our_sender_is_moved_to_its_slot() -> None:
    desk = Desk(senders=2, slots=2)
    desk.announce("a0", "a")
    assert desk.connect("b0") == 0
    assert desk.say("b0", "b", any_slot=True) == Accept(rid="b", rank=0, generation=2)
    assert desk.moved["b0"] == 1
    assert desk.connect("b1") == 0 and desk.say("b1", "b", rank=1, any_slot=True).generation == 2
    assert desk.moved["b1"] == 1
    assert desk.admission.writable() == {("a", 1): 0, ("b", 2): 1}


def test_a_sender_of_tilert_comes_back_and_is_offered_its_slot() -> None:
    desk = Desk(senders=2, slots=2)
    desk.announce("a0", "a")
    assert desk.connect("b0") == 0
    reject = desk.say("b0", "b", admission_window_s=3.0)
    assert (reject.error, reject.busy_rid, reject.transient) == ("busy", "a", True)
    assert desk.admission.announced("b", desk.now)
    desk.now = 0.1
    assert desk.connect("a1") == 0, "too early for the retry"
    desk.say("a1", "a", rank=1)
    desk.now = 0.2
    assert desk.connect("b0 again") == 1
    assert desk.say("b0 again", "b") == Accept(rid="b", rank=0, generation=2)
    assert desk.connect("b1") == 1 and desk.say("b1", "b", rank=1).generation == 2


def test_a_wrong_guess_costs_one_more_retry_at_most() -> None:
    """a1 comes at the very moment at which b0's retry is due, and gets b's slot; both find home afterwards."""
    desk = Desk(senders=2, slots=2)
    desk.announce("a0", "a")
    assert reason(desk.announce("b0", "b")) == "busy"
    desk.now = 0.2
    assert desk.connect("a1") == 1
    reject = desk.say("a1", "a", rank=1)
    assert reject == Reject(error="busy", rid="a", detail="another slot was offered: come again")
    assert desk.connect("b0, 2") == 0 and reason(desk.say("b0, 2", "b")) == "busy"
    desk.now = 0.4
    assert desk.connect("a1, 2") == 0 and reason(desk.say("a1, 2", "a", rank=1)) == "accepted"
    desk.now = 0.6
    assert desk.connect("b0, 3") == 1 and reason(desk.say("b0, 3", "b")) == "accepted"


def test_a_retry_that_never_comes_is_forgotten() -> None:
    desk = Desk(senders=2, slots=2)
    desk.announce("a0", "a")
    desk.announce("b0", "b", admission_window_s=3.0)
    desk.now = 60.0
    assert not desk.admission.announced("b", desk.now)
    assert desk.connect("a1") == 0


def test_a_complete_record_that_a_consumer_expects_is_never_evicted() -> None:
    desk = Desk(slots=2)
    desk.complete("c1", "a")
    desk.handle(Expected("b"))
    desk.complete("c2", "b")
    desk.now = 10 * TIMEOUT
    assert desk.connect("c3") == 0
    actions = desk.handle(Announced("c3", Announce(rid="c", rank=0, seq_len=1)))
    assert actions[0] == Evicted("a", 1) and desk.admission.busy(desk.now)
    desk.handle(Claimed("b"))


def test_a_free_slot_is_taken_before_an_abandoned_one() -> None:
    desk = Desk(slots=2)
    desk.connect("late")  # offered slot 0
    desk.complete("c1", "a")
    assert desk.admission.snapshot(0)["slots"][1]["state"] == "COMPLETE"
    desk.now = UNCLAIMED_GRACE_S
    assert desk.say("late", "b", any_slot=True).generation == 2 and desk.moved["late"] is None
    assert desk.connect("c3") == 1


def test_one_rid_is_in_one_slot_at_most() -> None:
    desk = Desk(slots=2)
    desk.announce("c1", "a")
    desk.handle(Released("a"))
    desk.handle(Expected("a"))
    assert desk.announce("c2", "a") == Reject(error="cancelling", rid="a")
    desk.handle(Closed("c1"))
    assert reason(desk.announce("c3", "a")) == "accepted"
