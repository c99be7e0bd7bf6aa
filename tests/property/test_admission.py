"""Admission, driven by Hypothesis without a network: any order of events, checked against a model kept by the test."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tilert_ref.connector.admission import (
    UNCLAIMED_GRACE_S,
    Admission,
    Announced,
    Claimed,
    Close,
    Closed,
    Completed,
    Connected,
    DoneReceived,
    Evicted,
    Expected,
    GaveUp,
    NotClaimable,
    Released,
    Reply,
)
from tilert_ref.connector.codec import Accept, Announce, Done, Reject

TIMEOUT, MAX_SEQ_LEN = 120.0, 1000
RIDS = st.sampled_from(["a", "a", "b"])
STATELESS_REASONS = {"seq_len exceeds max_seq_len", "invalid_seq_len", "unknown_rank"}


class AdmissionMachine(RuleBasedStateMachine):
    """The model: what each connection was accepted for, who is done, which records are good to read."""

    connections = Bundle("connections")

    @initialize(senders=st.sampled_from([1, 2, 3]))
    def start(self, senders: int) -> None:
        self.senders = frozenset(range(senders))
        self.admission = Admission(self.senders, MAX_SEQ_LEN, TIMEOUT)
        self.now = 1000.0  # and every wait is a multiple of 1/8: sums are exact
        self.next_conn = 0
        self.open: dict[int, Accept | None] = {}
        self.writers: dict[int, Accept] = {}  # accepted, not done, not closed
        self.done: dict[int, set[int]] = {}  # generation -> ranks
        self.prompts: dict[int, Announce] = {}  # generation -> first accepted announce
        self.given_up: dict[int, set[int]] = {}  # generation -> ranks
        self.left: dict[int, float] = {}  # generation -> when a writer was last seen to leave
        self.started: dict[int, float] = {}
        self.completed: dict[int, float] = {}
        self.current = 0  # newest generation
        self.held = False  # does the slot hold that generation?
        self.cancelling = False
        self.claimed = False
        self.tombstones: dict[str, float] = {}

    # What the outside world does.

    @rule(target=connections)
    def connect(self) -> int:
        self.next_conn += 1
        assert self.admission.handle(Connected(self.next_conn), self.now) == []
        self.open[self.next_conn] = None
        return self.next_conn

    @rule(target=connections, rid=RIDS, rank=st.sampled_from([0, 0, 1, 2]), expected=st.booleans(), late=st.booleans())
    def arrive(self, rid: str, rank: int, expected: bool, late: bool) -> int:
        """A rank announces as it should; maybe its thread read the clock long before it got the lock."""
        if expected:
            self.expect(rid)
        conn = self.connect()
        self.announce(conn, 3.0, late, rid=rid, rank=rank, seq_len=70, last_prompt_token=5)
        return conn

    @rule(
        conn=connections,
        rid=RIDS,
        rank=st.sampled_from([0, 0, 1, 1, 2, 3]),
        seq_len=st.sampled_from([70, 70, 70, 70, 71, 0, -5, MAX_SEQ_LEN + 1]),
        last_prompt_token=st.sampled_from([5, 5, 5, 6]),
        window=st.sampled_from([0.0, 3.0, 1e9]),
    )
    def announce(self, conn: int, window: float, late: bool = False, **fields: Any) -> None:
        announce = Announce(admission_window_s=window, **fields)
        actions = self.admission.handle(Announced(conn, announce), self.now - 50 if late else self.now)
        if self.open[conn] is not None:
            assert actions == [Close(conn)]
            return
        (reply,) = (action for action in actions if isinstance(action, Reply))
        assert reply.conn == conn
        if isinstance(reply.message, Accept):
            self.check_accept(announce, reply.message, [a for a in actions if isinstance(a, Evicted)])
            self.open[conn] = self.writers[conn] = reply.message
            self.given_up[self.current].discard(announce.rank)
        else:
            assert actions == [reply, Close(conn)]
            self.check_reject(announce, reply.message)

    @rule(conn=connections, wrong=st.sampled_from([{}] * 6 + [{"rank": 9}, {"generation": 77}, {"rid": "x"}]))
    def say_done(self, conn: int, wrong: dict[str, Any]) -> None:
        accept = self.open[conn] or Accept(rid="a", rank=0, generation=max(1, self.current))
        fields = {"rid": accept.rid, "rank": accept.rank, "generation": accept.generation} | wrong
        actions = self.admission.handle(DoneReceived(conn, Done(done=True, **fields)), self.now)
        assert actions[0] == Close(conn)
        fits = self.open[conn] is not None and not wrong
        counts = fits and self.held and accept.generation == self.current and not self.cancelling
        if not counts:
            assert actions == [Close(conn)]
            return
        self.leave(conn)
        self.done[self.current].add(accept.rank)
        self.given_up[self.current].discard(accept.rank)
        if self.done[self.current] == self.senders and self.current not in self.completed:
            self.completed[self.current] = self.now
            self.check_completed(actions)
        else:
            assert actions == [Close(conn)], "a record completes once, when its last sender is done"

    @rule(conn=connections)
    def give_up(self, conn: int) -> None:
        accept = self.open[conn] or Accept(rid="a", rank=0, generation=1)
        done = Done(rid=accept.rid, rank=accept.rank, generation=accept.generation)
        actions = self.admission.handle(DoneReceived(conn, done), self.now)
        current = self.open[conn] is not None and self.held and accept.generation == self.current
        retried = any(other != conn and writer.rank == accept.rank for other, writer in self.writers.items())
        if current and not self.cancelling and not retried and accept.rank not in self.done[self.current]:
            assert actions == [Close(conn), GaveUp(accept.rid, self.current)]
            self.given_up[self.current].add(accept.rank)
        else:
            assert actions == [Close(conn)], "a stale give-up changes nothing"

    def leave(self, conn: int) -> None:
        if accept := self.writers.pop(conn, None):
            self.left[accept.generation] = self.now

    @rule(conn=consumes(connections), again=st.booleans())
    def close(self, conn: int, again: bool) -> None:
        for _ in range(1 + again):
            assert self.admission.handle(Closed(conn), self.now) == []
        del self.open[conn]
        self.leave(conn)
        if self.cancelling and not self.writers:
            self.held = self.cancelling = False

    @rule(rid=RIDS)
    def expect(self, rid: str) -> None:
        assert self.admission.handle(Expected(rid), self.now) == []
        self.tombstones.pop(rid, None)

    @rule(rid=RIDS)
    def claim(self, rid: str) -> None:
        readable = self.is_complete() and self.rid() == rid and not self.claimed
        try:
            assert self.admission.handle(Claimed(rid), self.now) == []
        except NotClaimable:
            assert not readable
        else:
            assert readable
            self.claimed = True

    @rule(rid=RIDS)
    def release(self, rid: str) -> None:
        assert self.admission.handle(Released(rid), self.now) == []
        self.tombstones[rid] = self.now + TIMEOUT
        if self.held and self.rid() == rid:
            self.claimed = False
            self.held = self.cancelling = bool(self.writers)

    @rule(rid=RIDS, ranks=st.permutations(range(3)))
    def transfer(self, rid: str, ranks: list[int]) -> None:
        """Every sender does what it should, one after the other."""
        for rank in ranks:
            if rank in self.senders:
                conn = self.connect()
                self.announce(conn, 3.0, rid=rid, rank=rank, seq_len=70, last_prompt_token=5)
                self.say_done(conn, {})
                self.close(conn, False)

    @rule(seconds=st.sampled_from([0.125, UNCLAIMED_GRACE_S / 2, UNCLAIMED_GRACE_S, 3.0, TIMEOUT - 1, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # What the model says about the answers.

    def rid(self) -> str:
        return self.prompts[self.current].rid

    def is_complete(self) -> bool:
        return self.held and not self.cancelling and self.current in self.completed

    def free_for_others(self) -> bool:
        if not self.held:
            return True
        if self.writers or self.claimed:
            return False
        if self.is_complete():
            return self.now >= self.completed[self.current] + UNCLAIMED_GRACE_S
        if self.now >= self.started[self.current] + TIMEOUT:
            return True
        nobody_else_comes = len(self.senders) == 1 or len(self.given_up[self.current]) > 0
        return nobody_else_comes and self.now >= self.left[self.current] + UNCLAIMED_GRACE_S

    def tombstoned(self, rid: str) -> bool:
        return self.tombstones.get(rid, -math.inf) > self.now

    def check_accept(self, announce: Announce, accept: Accept, evicted: list[Evicted]) -> None:
        assert (accept.rid, accept.rank) == (announce.rid, announce.rank)
        assert 1 <= announce.seq_len <= MAX_SEQ_LEN
        assert announce.rank in self.senders
        assert not self.tombstoned(announce.rid)
        if self.held and accept.generation == self.current:
            first = self.prompts[self.current]
            assert not self.cancelling and announce.rank not in self.done[self.current]
            assert (announce.rid, announce.seq_len, announce.last_prompt_token) == (
                first.rid,
                first.seq_len,
                first.last_prompt_token,
            )
            assert evicted == []
            return
        assert accept.generation > self.current, "generations grow"
        assert self.free_for_others(), "the buffer is in use"
        assert not self.held or self.rid() != announce.rid
        assert evicted == ([Evicted(self.rid(), self.current)] if self.is_complete() else [])
        self.current, self.held = accept.generation, True
        self.prompts[self.current], self.started[self.current] = announce, self.now
        self.done[self.current], self.given_up[self.current] = set(), set()

    def check_reject(self, announce: Announce, reject: Reject) -> None:
        """Every reject has its cause, in the order of the table."""
        bad = not 1 <= announce.seq_len <= MAX_SEQ_LEN or announce.rank not in self.senders
        assert (reject.error in STATELESS_REASONS) == bad
        if bad:
            return
        if self.tombstoned(announce.rid):
            assert (reject.error, reject.detail) == ("cancelling", "no_consumer")
            window = min(announce.admission_window_s, TIMEOUT)
            self.tombstones[announce.rid] = max(self.tombstones[announce.rid], self.now + window)
        elif self.held and self.rid() == announce.rid:
            if self.cancelling:
                assert reject.error == "cancelling"
            elif announce.rank in self.done[self.current]:
                assert reject.error == "duplicate_rank"
            else:
                assert reject.error == "mismatch"
        else:
            assert (reject.error, reject.busy_rid) == ("busy", self.rid())
            assert not self.free_for_others()

    def check_completed(self, actions: list[Any]) -> None:
        close, completed = actions
        assert isinstance(close, Close) and isinstance(completed, Completed)
        record, first = completed.record, self.prompts[self.current]
        assert (record.rid, record.generation) == (first.rid, self.current)
        assert (record.seq_len, record.last_prompt_token) == (first.seq_len, first.last_prompt_token)
        assert (record.started_at, record.completed_at) == (self.started[self.current], self.now)

    @invariant()
    def writers_are_of_one_generation(self) -> None:
        if hasattr(self, "writers"):
            assert len({accept.generation for accept in self.writers.values()}) <= 1
            assert len({accept.rid for accept in self.writers.values()}) <= 1

    @invariant()
    def busy_is_what_the_model_says(self) -> None:
        if hasattr(self, "admission"):
            assert self.admission.busy(self.now) == (not self.free_for_others())
            snapshot = self.admission.snapshot(self.now)
            assert snapshot.get("writers", 0) == len(self.writers)
            assert snapshot["connections"] == len(self.open)
            assert snapshot.get("claimed", False) == self.claimed
            assert snapshot.get("done_ranks", []) == (sorted(self.done[self.current]) if self.held else [])

    def teardown(self) -> None:
        """No stuck slot: every connection closed, nobody reading, timeouts passed: a new rid is admitted."""
        if not hasattr(self, "admission"):
            return
        for conn in list(self.open):
            self.admission.handle(Closed(conn), self.now)
        if self.claimed:
            self.admission.handle(Released(self.rid()), self.now)
        later = self.now + TIMEOUT
        self.admission.handle(Connected("fresh"), later)
        fresh = Announce(rid="fresh", rank=0, seq_len=1)
        actions = self.admission.handle(Announced("fresh", fresh), later)
        assert isinstance(actions[-1], Reply) and isinstance(actions[-1].message, Accept), actions


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAdmission = AdmissionMachine.TestCase
