"""Admission, driven by Hypothesis without a network: any order of events, checked against a model kept by the test."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
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
    Offer,
    Released,
    Reply,
)
from tilert_ref.connector.codec import Accept, Announce, Done, Reject

TIMEOUT, MAX_SEQ_LEN = 120.0, 1000
RIDS = st.sampled_from(["a", "a", "b", "c"])
STATELESS_REASONS = {"seq_len exceeds max_seq_len", "invalid_seq_len", "unknown_rank"}


@dataclass
class Held:
    """A generation that has a slot."""

    slot: int
    first: Announce
    started: float
    done: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    writers: dict[int, int] = field(default_factory=dict)  # connection -> rank; accepted, not done, not closed
    left: float = 0.0  # when a writer was last seen to leave
    completed: float | None = None
    claimed: bool = False
    cancelling: bool = False

    @property
    def rid(self) -> str:
        return self.first.rid


class AdmissionMachine(RuleBasedStateMachine):
    """The model: what each connection was accepted for, which generation has which slot, which records can be read."""

    connections = Bundle("connections")

    @initialize(senders=st.sampled_from([1, 2, 3]), slots=st.sampled_from([1, 2, 2, 3]))
    def start(self, senders: int, slots: int) -> None:
        self.senders, self.slots = frozenset(range(senders)), slots
        self.admission = Admission(self.senders, MAX_SEQ_LEN, TIMEOUT, slots=slots)
        self.now = 1000.0  # and every wait is a multiple of 1/8: sums are exact
        self.next_conn = 0
        self.newest = 0  # generation
        self.offered: dict[int, int] = {}
        self.said: set[int] = set()  # connections that have announced
        self.open: dict[int, Accept | None] = {}
        self.held: dict[int, Held] = {}  # by generation
        self.tombstones: dict[str, float] = {}
        self.expected: set[str] = set()
        self.failed: dict[str, dict[int, float]] = {}  # rid -> rank -> when

    # What the outside world does.

    @rule(target=connections)
    def connect(self) -> int:
        self.next_conn += 1
        conn = self.next_conn
        (offer,) = self.admission.handle(Connected(conn), self.now)
        assert isinstance(offer, Offer) and offer.conn == conn and 0 <= offer.slot < self.slots
        assert offer.busy == (not any(map(self.usable, range(self.slots))))
        self.offered[conn], self.open[conn] = offer.slot, None
        return conn

    @rule(
        target=connections,
        rid=RIDS,
        rank=st.sampled_from([0, 0, 1, 2]),
        expected=st.booleans(),
        late=st.booleans(),
        any_slot=st.booleans(),
    )
    def arrive(self, rid: str, rank: int, expected: bool, late: bool, any_slot: bool) -> int:
        """A rank announces as it should; maybe its thread read the clock long before it got the lock."""
        if expected:
            self.expect(rid)
        conn = self.connect()
        self.announce(conn, 3.0, late, rid=rid, rank=rank, seq_len=70, last_prompt_token=5, any_slot=any_slot)
        return conn

    @rule(
        conn=connections,
        rid=RIDS,
        rank=st.sampled_from([0, 0, 1, 1, 2, 3]),
        seq_len=st.sampled_from([70, 70, 70, 70, 71, 0, -5, MAX_SEQ_LEN + 1]),
        last_prompt_token=st.sampled_from([5, 5, 5, 6]),
        window=st.sampled_from([0.0, 3.0, 1e9]),
        any_slot=st.booleans(),
    )
    def announce(self, conn: int, window: float, late: bool = False, **fields: Any) -> None:
        announce = Announce(admission_window_s=window, **fields)
        actions = self.admission.handle(Announced(conn, announce), self.now - 50 if late else self.now)
        if conn in self.said:
            assert actions == [Close(conn)]
            return
        self.said.add(conn)
        (reply,) = (action for action in actions if isinstance(action, Reply))
        assert reply.conn == conn
        if isinstance(reply.message, Accept):
            self.check_accept(conn, announce, reply, [a for a in actions if isinstance(a, Evicted)])
        else:
            assert actions == [reply, Close(conn)] and reply.moved_to is None
            self.check_reject(conn, announce, reply.message)

    @rule(conn=connections, rid=RIDS, rank=st.sampled_from([0, 0, 1, 2, 3]))
    def report(self, conn: int, rid: str, rank: int) -> None:
        """A sender tells that a rank's handoff will not come."""
        announce = Announce(rid=rid, rank=rank, failed="why")
        assert self.admission.handle(Announced(conn, announce), self.now) == [Close(conn)]
        if conn not in self.said:
            self.said.add(conn)
            self.fail(rid, rank, final=True)

    @rule(conn=connections, wrong=st.sampled_from([{}] * 6 + [{"rank": 9}, {"generation": 77}, {"rid": "x"}]))
    def say_done(self, conn: int, wrong: dict[str, Any]) -> None:
        accept = self.open[conn] or Accept(rid="a", rank=0, generation=max(1, self.newest))
        fields = {"rid": accept.rid, "rank": accept.rank, "generation": accept.generation} | wrong
        actions = self.admission.handle(DoneReceived(conn, Done(done=True, **fields)), self.now)
        assert actions[0] == Close(conn)
        held = self.held.get(accept.generation)
        if self.open[conn] is None or wrong or held is None or held.cancelling:
            assert actions == [Close(conn)]
            return
        self.leave(conn, held)
        held.done.add(accept.rank)
        self.recover(held, accept.rank)
        if held.done == self.senders and held.completed is None:
            held.completed = self.now
            self.check_completed(accept.generation, held, actions)
        else:
            assert actions == [Close(conn)], "a record completes once, when its last sender is done"

    @rule(conn=connections)
    def give_up(self, conn: int) -> None:
        accept = self.open[conn] or Accept(rid="a", rank=0, generation=1)
        done = Done(rid=accept.rid, rank=accept.rank, generation=accept.generation, error="why")
        actions = self.admission.handle(DoneReceived(conn, done), self.now)
        if self.open[conn] is not None and self.gives_up(conn, accept):
            assert actions == [Close(conn), GaveUp(accept.rid, accept.generation, "why")]
        else:
            assert actions == [Close(conn)], "a stale give-up changes nothing"

    def gives_up(self, conn: int, accept: Accept) -> bool:
        held = self.held.get(accept.generation)
        if held is None or held.cancelling or accept.rank in held.done | held.given_up:
            return False
        if any(other != conn and rank == accept.rank for other, rank in held.writers.items()):
            return False
        held.given_up.add(accept.rank)
        self.note_failure(held.rid, accept.rank)
        return True

    def leave(self, conn: int, held: Held) -> None:
        if held.writers.pop(conn, None) is not None:
            held.left = self.now

    @rule(conn=consumes(connections), again=st.booleans())
    def close(self, conn: int, again: bool) -> None:
        actions = self.admission.handle(Closed(conn), self.now)
        accept = self.open.pop(conn)
        held = self.held.get(accept.generation) if accept else None
        lost = held is not None and conn in held.writers and self.gives_up(conn, accept)
        assert [type(action) for action in actions] == [GaveUp] * lost
        if again:
            assert self.admission.handle(Closed(conn), self.now) == []
        if held is not None:
            self.leave(conn, held)
            if held.cancelling and not held.writers:
                del self.held[accept.generation]

    @rule(rid=RIDS)
    def expect(self, rid: str) -> None:
        assert self.admission.handle(Expected(rid), self.now) == []
        self.tombstones.pop(rid, None)
        self.expected.add(rid)

    @rule(rid=RIDS)
    def claim(self, rid: str) -> None:
        held = self.of(rid)
        readable = held is not None and held.completed is not None and not held.cancelling and not held.claimed
        try:
            assert self.admission.handle(Claimed(rid), self.now) == []
        except NotClaimable:
            assert not readable
        else:
            assert readable
            held.claimed = True

    @rule(rid=RIDS)
    def release(self, rid: str) -> None:
        assert self.admission.handle(Released(rid), self.now) == []
        self.tombstones[rid] = self.now + TIMEOUT
        self.expected.discard(rid)
        self.failed.pop(rid, None)
        for generation, held in list(self.held.items()):
            if held.rid == rid:
                held.claimed, held.cancelling = False, True
                if not held.writers:
                    del self.held[generation]

    @rule(rid=RIDS, ranks=st.permutations(range(3)))
    def transfer(self, rid: str, ranks: list[int]) -> None:
        """Every sender does what it should, one after the other."""
        for rank in ranks:
            if rank in self.senders:
                conn = self.connect()
                self.announce(conn, 3.0, rid=rid, rank=rank, seq_len=70, last_prompt_token=5, any_slot=True)
                self.say_done(conn, {})
                self.close(conn, False)

    @rule(seconds=st.sampled_from([0.125, UNCLAIMED_GRACE_S / 2, UNCLAIMED_GRACE_S, 3.0, TIMEOUT - 1, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # What the model says about the answers.

    def of(self, rid: str) -> Held | None:
        return next((held for held in self.held.values() if held.rid == rid), None)

    def usable(self, slot: int) -> bool:
        """For a request that is in no slot yet."""
        held = next((held for held in self.held.values() if held.slot == slot), None)
        if held is None:
            return True
        if held.writers or held.claimed:
            return False
        if held.completed is not None and not held.cancelling:
            return held.rid not in self.expected and self.now >= held.completed + UNCLAIMED_GRACE_S
        if self.now >= held.started + TIMEOUT:
            return True
        nobody_else_comes = len(self.senders) == 1 or len(held.given_up) > 0
        return nobody_else_comes and self.now >= held.left + UNCLAIMED_GRACE_S

    def tombstoned(self, rid: str) -> bool:
        return self.tombstones.get(rid, -math.inf) > self.now

    def fail(self, rid: str, rank: int, final: bool = False) -> None:
        held = self.of(rid)
        at_it = held is not None and (rank in held.done or (not final and rank in held.writers.values()))
        if rank in self.senders and not self.tombstoned(rid) and not at_it:
            if held:
                held.given_up.add(rank)
            self.note_failure(rid, rank)

    def note_failure(self, rid: str, rank: int) -> None:
        fresh = {r: ranks for r, ranks in self.failed.items() if any(self.now - at < TIMEOUT for at in ranks.values())}
        self.failed = fresh
        self.failed.setdefault(rid, {})[rank] = self.now

    def recover(self, held: Held, rank: int) -> None:
        held.given_up.discard(rank)
        self.failed.get(held.rid, {}).pop(rank, None)

    def check_accept(self, conn: int, announce: Announce, reply: Reply, evicted: list[Evicted]) -> None:
        accept, slot = reply.message, self.offered[conn] if reply.moved_to is None else reply.moved_to
        assert reply.moved_to is None or (announce.any_slot and reply.moved_to != self.offered[conn])
        assert (accept.rid, accept.rank) == (announce.rid, announce.rank)
        assert 1 <= announce.seq_len <= MAX_SEQ_LEN
        assert announce.rank in self.senders
        assert not self.tombstoned(announce.rid)
        held = self.of(announce.rid)
        if held is not None:
            assert self.held.get(accept.generation) is held and held.slot == slot
            assert not held.cancelling and announce.rank not in held.done and evicted == []
            said, first = announce, held.first
            assert (said.seq_len, said.last_prompt_token) == (first.seq_len, first.last_prompt_token)
        else:
            assert accept.generation > self.newest, "generations grow"
            assert self.usable(slot), "the slot is in use"
            self.newest = accept.generation
            before = {generation: other for generation, other in self.held.items() if other.slot == slot}
            complete = [Evicted(other.rid, g) for g, other in before.items() if other.completed is not None]
            assert evicted == complete
            for generation in before:
                del self.held[generation]
            held = self.held[accept.generation] = Held(slot, announce, self.now)
        self.open[conn] = accept
        held.writers[conn] = accept.rank
        self.recover(held, accept.rank)

    def check_reject(self, conn: int, announce: Announce, reject: Reject) -> None:
        """Every reject has its cause, in the order of the table."""
        bad = not 1 <= announce.seq_len <= MAX_SEQ_LEN or announce.rank not in self.senders
        assert (reject.error in STATELESS_REASONS) == bad
        held, offered = self.of(announce.rid), self.offered[conn]
        if bad:
            self.fail(announce.rid, announce.rank)
        elif self.tombstoned(announce.rid):
            assert (reject.error, reject.detail) == ("cancelling", "no_consumer")
            window = min(announce.admission_window_s, TIMEOUT)
            self.tombstones[announce.rid] = max(self.tombstones[announce.rid], self.now + window)
        elif held is not None and held.cancelling:
            assert reject.error == "cancelling"
        elif held is not None and announce.rank in held.done:
            assert reject.error == "duplicate_rank"
        elif reject.error != "busy":
            assert reject.error == "mismatch" and held is not None
            assert (announce.seq_len, announce.last_prompt_token) != (held.first.seq_len, held.first.last_prompt_token)
            self.fail(announce.rid, announce.rank)
        elif held is not None:
            assert not announce.any_slot and held.slot != offered
        else:
            wanted = range(self.slots) if announce.any_slot else [offered]
            assert not any(map(self.usable, wanted))

    def check_completed(self, generation: int, held: Held, actions: list[Any]) -> None:
        close, completed = actions
        assert isinstance(close, Close) and isinstance(completed, Completed)
        record, first = completed.record, held.first
        assert (record.rid, record.generation, record.slot) == (held.rid, generation, held.slot)
        assert (record.seq_len, record.last_prompt_token) == (first.seq_len, first.last_prompt_token)
        assert (record.started_at, record.completed_at) == (held.started, self.now)

    @invariant()
    def state_is_what_the_model_says(self) -> None:
        if not hasattr(self, "admission"):
            return
        assert len({held.slot for held in self.held.values()}) == len(self.held), "one request a slot"
        assert len({held.rid for held in self.held.values()}) == len(self.held), "one slot a request"
        assert self.admission.busy(self.now) == (not any(map(self.usable, range(self.slots))))
        snapshot = self.admission.snapshot(self.now)
        assert snapshot["connections"] == len(self.open)
        slots: list[tuple[Any, ...]] = [(None, 0, False, [])] * self.slots
        for held in self.held.values():
            slots[held.slot] = held.rid, len(held.writers), held.claimed, sorted(held.done)
        names = {"rid": None, "writers": 0, "claimed": False, "done_ranks": []}
        seen = [tuple(slot.get(name, free) for name, free in names.items()) for slot in snapshot["slots"]]
        assert seen == slots
        writable = {
            (held.rid, generation): held.slot
            for generation, held in self.held.items()
            if held.completed is None and not held.cancelling
        }
        assert self.admission.writable() == writable
        for rid in "abc":
            assert (self.admission.failure(rid) is None) == (not self.failed.get(rid))

    def teardown(self) -> None:
        """No stuck slot: every connection closed, nobody waiting, timeouts passed: as many new rids as slots get in."""
        if not hasattr(self, "admission"):
            return
        for conn in list(self.open):
            self.admission.handle(Closed(conn), self.now)
        for rid in self.expected | {held.rid for held in self.held.values() if held.claimed}:
            self.admission.handle(Released(rid), self.now)
        later = self.now + TIMEOUT
        for number in range(self.slots):
            conn = f"fresh {number}"
            self.admission.handle(Connected(conn), later)
            fresh = Announce(rid=conn, rank=0, seq_len=1, any_slot=True)
            actions = self.admission.handle(Announced(conn, fresh), later)
            assert isinstance(actions[-1], Reply) and isinstance(actions[-1].message, Accept), actions


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAdmission = AdmissionMachine.TestCase


class Prefill:
    """One prefill node in simulated time. Its ranks hand requests over in order, each with a thread of its own.

    TileRT's sender: strictly one job after the other, at most 5 attempts at each, 0.2, 0.4, 0.8, 1.6 s apart.
    """

    def __init__(self, desk: "Simulation", any_slot: bool) -> None:
        self.desk, self.any_slot = desk, any_slot
        self.jobs: dict[int, list[str]] = {rank: [] for rank in desk.senders}

    def prefill(self, rid: str) -> None:
        for rank, jobs in self.jobs.items():
            jobs.append(rid)
            if len(jobs) == 1:
                self.desk.later(self.desk.jitter(0.3), self.attempt, rank, 1)

    def attempt(self, rank: int, number: int) -> None:
        self.desk.later(self.desk.jitter(0.02), self.announce, rank, number, self.desk.connect())

    def announce(self, rank: int, number: int, conn: int) -> None:
        rid, desk = self.jobs[rank][0], self.desk
        announce = Announce(rid=rid, rank=rank, seq_len=70, any_slot=self.any_slot, admission_window_s=3.0)
        (reply,) = (a for a in desk.handle(Announced(conn, announce)) if isinstance(a, Reply))
        if isinstance(reply.message, Accept):
            desk.later(desk.jitter(0.1), self.done, rank, conn, reply.message)
            return
        assert reply.message.transient and not self.any_slot
        desk.handle(Closed(conn))
        assert number < 5, f"{rid} rank {rank} was refused 5 times, at {desk.now:.2f} s: {reply.message}"
        desk.later(0.2 * 2 ** (number - 1) + desk.jitter(0.01), self.attempt, rank, number + 1)

    def done(self, rank: int, conn: int, accept: Accept) -> None:
        message = Done(done=True, rid=accept.rid, rank=rank, generation=accept.generation)
        self.desk.handle(DoneReceived(conn, message))
        self.desk.handle(Closed(conn))
        self.jobs[rank].pop(0)
        if self.jobs[rank]:
            self.attempt(rank, 1)


class Simulation:
    """A desk with two slots. A router sends at most two requests at a time its way, through two prefill nodes."""

    def __init__(self, seed: int, senders: int, ours: list[bool]) -> None:
        self.random = random.Random(seed)
        self.senders = range(senders)
        self.admission = Admission(frozenset(self.senders), MAX_SEQ_LEN, TIMEOUT, slots=2)
        self.now, self.order, self.conns = 0.0, itertools.count(), itertools.count()
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.nodes = [Prefill(self, any_slot) for any_slot in ours]

    def jitter(self, seconds: float) -> float:
        return self.random.uniform(0, seconds)

    def later(self, seconds: float, what: Any, *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, arguments))

    def connect(self) -> int:
        conn = next(self.conns)
        self.handle(Connected(conn))
        return conn

    def handle(self, event: Any) -> list[Any]:
        actions = self.admission.handle(event, self.now)
        for action in actions:
            assert not isinstance(action, Evicted | GaveUp)
            if isinstance(action, Completed):
                self.handle(Claimed(action.record.rid))
                self.later(self.jitter(0.2), self.release, action.record.rid)
        return actions

    def request(self) -> None:
        if self.started == self.wanted:
            return
        rid = f"request {self.started}"
        self.started += 1
        self.handle(Expected(rid))
        self.random.choice(self.nodes).prefill(rid)

    def release(self, rid: str) -> None:
        self.handle(Released(rid))
        self.finished.append(rid)
        self.later(self.jitter(0.2), self.request)

    def run(self, requests: int) -> list[str]:
        self.wanted, self.started, self.finished = requests, 0, []
        for _ in range(2):
            self.later(self.jitter(0.1), self.request)
        while self.events:
            self.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        return self.finished


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    senders=st.integers(1, 8),
    ours=st.lists(st.booleans(), min_size=1, max_size=2),
)
def test_requests_with_several_ranks_block_neither_each_other_nor_themselves(
    seed: int, senders: int, ours: list[bool]
) -> None:
    """Two requests at a time have two slots: no rank may run out of attempts, whichever way they interleave.

    Ours are moved to their slot and never refused; TileRT's may need further attempts.
    """
    finished = Simulation(seed, senders, ours).run(8)
    assert sorted(finished) == [f"request {number}" for number in range(8)]
