"""The handoff under faults, without sockets or time: admission, the receiver's way of driving it, senders, and memory.

Everything that can be late, lost or doubled is a rule of its own, so Hypothesis finds the order of events. The model
has what test_admission.py has not: frames on their way, writes that land when they like, and what lies in the slots.

    frames     dropped, doubled, swapped, cut short, replayed from another generation
    writes     land after their sender gave up (ours keeps its connection open until then, TileRT's closes), after it
               was killed or its connection broke: then at most SETTLE_S later, which is what the receiver waits
    clock      jumps forward; values that threads read long ago come in late
    consumers  expect, claim, give up and release whenever they like

Held at every step: what a consumer has claimed is its own generation's bytes, of every rank, until it releases; no
generation is claimed twice; a record that somebody expects is not evicted. And at the end: every slot can be had again.

TILERT_REF_SOAK=1 runs 10,000 examples.
"""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tilert_ref.connector import admission
from tilert_ref.connector.admission import (
    UNCLAIMED_GRACE_S,
    Admission,
    Announced,
    Claimed,
    Closed,
    Completed,
    Connected,
    DoneReceived,
    Evicted,
    Expected,
    Record,
    Released,
    Reply,
)
from tilert_ref.connector.codec import (
    Accept,
    Announce,
    Done,
    FrameDecoder,
    Message,
    ProtocolError,
    Reject,
    decode_announce,
    decode_done,
    encode,
)
from tilert_ref.connector.receiver import SETTLE_S

SOAK = os.environ.get("TILERT_REF_SOAK") == "1"
TIMEOUT_S = 120.0
PARTS = 2  # writes of a rank
RIDS = st.sampled_from(["a", "a", "b", "c"])
PICK = st.integers(0, 1000)

Bytes = tuple[str, int, int, int]
"""Stands for what a rank writes: rid, generation, seq_len, rank."""


@dataclass
class Link:
    """One connection. The sender's end, what is on its way, and the receiver's end."""

    conn: int
    announce: Announce
    offered: int
    # Sender.
    open: bool = True
    told: Accept | Reject | None = None
    target: int | None = None
    to_write: list[int] = field(default_factory=lambda: list(range(PARTS)))
    gave_up: bool = False
    # On the way.
    frames: list[bytes] = field(default_factory=list)
    reply: Reply | None = None
    flying: list[int] = field(default_factory=list)  # writes that were posted and have not landed
    # Receiver.
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    reads: str = "announce"  # then "done", "end" (everything up to the sender's end is ignored), "nothing"
    accept: Accept | None = None
    settles: float | None = None  # it broke off: Closed comes at this time

    @property
    def rank(self) -> int:
        return self.announce.rank

    def bytes_of(self, accept: Accept) -> Bytes:
        return accept.rid, accept.generation, self.announce.seq_len, accept.rank


class Machine(RuleBasedStateMachine):
    make_admission: Callable[..., Any] = Admission

    @initialize(senders=st.sampled_from([1, 2, 2, 3]), slots=st.sampled_from([1, 2, 2, 3]))
    def start(self, senders: int, slots: int) -> None:
        self.senders, self.slots = range(senders), slots
        self.admission = self.make_admission(frozenset(self.senders), 1000, TIMEOUT_S, slots=slots)
        self.now, self.late = 1000.0, 0.0
        self.memory: dict[tuple[int, int, int], Bytes] = {}  # slot, rank, part
        self.links: list[Link] = []
        self.connections = 0
        self.said: list[tuple[Link, bytes]] = []  # done frames, for replays
        self.expected: set[str] = set()
        self.records: dict[str, Record] = {}
        self.reading: dict[str, Record] = {}
        self.decoded: set[int] = set()  # generations

    def handle(self, event: Any) -> list[Any]:
        late, self.late = self.late, 0.0
        actions = self.admission.handle(event, self.now - late)
        for action in actions:
            if isinstance(action, Completed):
                assert action.record.rid not in self.records
                self.records[action.record.rid] = action.record
            elif isinstance(action, Evicted):
                assert action.rid not in self.expected, "KV that somebody waits for was thrown away"
                assert self.records.pop(action.rid).generation == action.generation
        return actions

    # Senders

    @rule(rid=RIDS, rank=st.integers(0, 2), longer=st.integers(0, 9), any_slot=st.booleans(), steps=st.integers(0, 12))
    def connect(self, rid: str, rank: int, longer: int, any_slot: bool, steps: int) -> None:
        """any_slot: a sender of ours. longer 9: a rank that disagrees about the prompt."""
        self.connections += 1
        (offer,) = self.handle(Connected(self.connections))
        seq_len = 71 if longer == 9 else 70
        announce = Announce(rid=rid, rank=rank % len(self.senders), seq_len=seq_len, any_slot=any_slot)
        link = Link(self.connections, announce, offer.slot)
        self.links.append(link)
        self.say(link, announce)
        self.progress_of(link, steps)

    @rule(rid=RIDS, ranks=st.permutations(range(3)), any_slot=st.booleans())
    def transfer(self, rid: str, ranks: list[int], any_slot: bool) -> None:
        """Every rank does what it should."""
        for rank in ranks[: len(self.senders)]:
            self.connect(rid, rank, 0, any_slot, 12)

    @rule(rid=RIDS, any_slot=st.booleans())
    def serve(self, rid: str, any_slot: bool) -> None:
        """A whole request, up to the moment at which its consumer reads the slot."""
        self.expect(rid)
        self.transfer(rid, [0, 1, 2], any_slot)
        self.look(rid)

    @rule(rid=RIDS, ranks=st.permutations(range(3)), any_slot=st.booleans())
    def begin(self, rid: str, ranks: list[int], any_slot: bool) -> None:
        """A request whose last rank is at its first write, which is under way."""
        self.expect(rid)
        *others, last = ranks[: len(self.senders)]
        for rank in others:
            self.connect(rid, rank, 0, any_slot, 12)
        self.connect(rid, last, 0, any_slot, 3)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, rid=RIDS)
    def cancel_and_serve(self, pick: int, rid: str) -> None:
        """A request is given up while it is written, another one, or itself again, is served; then a write lands."""
        link = self.flying[pick % len(self.flying)]
        self.release(link.announce.rid)
        self.serve(rid, True)
        if link.flying:
            self.land(link, 0)

    @precondition(lambda self: self.links)
    @rule(pick=PICK, steps=st.integers(1, 12))
    def progress(self, pick: int, steps: int) -> None:
        self.progress_of(self.picked(pick), steps)

    def progress_of(self, link: Link, steps: int) -> None:
        for _ in range(steps):
            self.step(link)

    def step(self, link: Link) -> None:
        """What comes next on this connection if nothing goes wrong."""
        if link.frames and link.reads != "nothing":
            self.receive(link)
        elif link.reply is not None and link.open:
            self.hear(link)
        elif link.flying:
            self.land(link, 0)
        elif link.open and link.target is not None and link.to_write and not link.gave_up:
            self.post(link)
        elif link.open and isinstance(link.told, Accept):
            self.finish(link)
        elif not link.open:
            self.see_end(link)

    @precondition(lambda self: self.links)
    @rule(pick=PICK)
    def post_a_write(self, pick: int) -> None:
        link = self.picked(pick)
        if link.open and link.target is not None and link.to_write and not link.gave_up:
            self.post(link)

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, which=st.integers(0, 1))
    def late_write(self, pick: int, which: int) -> None:
        links = self.flying
        self.land(links[pick % len(links)], which)

    @precondition(lambda self: self.links)
    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        """A sender's deadline passed: it posts nothing more."""
        link = self.picked(pick)
        link.gave_up = link.open
        if link.open and (not link.announce.any_slot or not link.flying):
            self.finish(link)

    @precondition(lambda self: self.links)
    @rule(pick=PICK)
    def die(self, pick: int) -> None:
        self.picked(pick).open = False

    @precondition(lambda self: self.links)
    @rule(pick=PICK)
    def break_connection(self, pick: int) -> None:
        """Both ends see it; the sender then posts no further write."""
        link = self.picked(pick)
        link.open, link.frames, link.reply = False, [], None
        self.see_end(link)

    def say(self, link: Link, message: Message) -> None:
        link.frames.append(encode(message))
        if isinstance(message, Done):
            self.said.append((link, link.frames[-1]))

    def hear(self, link: Link) -> None:
        reply, link.reply = link.reply, None
        link.told = reply.message
        if isinstance(link.told, Reject):
            link.open = False
        else:
            moved = reply.moved_to is not None and link.announce.any_slot
            link.target = reply.moved_to if moved else link.offered

    def post(self, link: Link) -> None:
        link.flying.append(link.to_write.pop(0))

    def land(self, link: Link, which: int) -> None:
        part = link.flying.pop(which % len(link.flying))
        self.memory[link.target, link.rank, part] = link.bytes_of(link.told)
        if link.gave_up and link.open and not link.flying:
            self.finish(link)

    def finish(self, link: Link) -> None:
        """Done, true or false, and the end of the sender's side."""
        if isinstance(link.told, Accept):
            whole = not link.to_write and not link.flying
            if whole or link.announce.any_slot:  # TileRT's says nothing when it gives up
                told = link.told
                self.say(link, Done(done=whole, rid=told.rid, rank=told.rank, generation=told.generation))
        link.open = False

    # Frames

    @precondition(lambda self: any(link.frames for link in self.links))
    @rule(pick=PICK, fault=st.sampled_from(["drop", "double", "swap", "cut short"]), other=PICK)
    def frame_fault(self, pick: int, fault: str, other: int) -> None:
        links = [link for link in self.links if link.frames]
        link = links[pick % len(links)]
        match fault:
            case "drop":
                link.frames.pop(0)
            case "double":
                link.frames.insert(0, link.frames[0])
            case "swap":
                link.frames.reverse()
            case "cut short":
                link.frames[0] = link.frames[0][: 1 + other % len(link.frames[0])]

    @precondition(lambda self: self.said and self.links)
    @rule(pick=PICK, other=PICK)
    def stale_done(self, pick: int, other: int) -> None:
        """A done of another generation or rank comes in on a connection."""
        link, (source, frame) = self.picked(pick), self.said[other % len(self.said)]
        if link.accept is None or source.bytes_of(source.told) != link.bytes_of(link.accept):
            link.frames.insert(0, frame)
            self.step(link)

    @precondition(lambda self: any(link.reply for link in self.links))
    @rule(pick=PICK)
    def lose_reply(self, pick: int) -> None:
        """The sender's deadline passes: it closes."""
        links = [link for link in self.links if link.reply]
        link = links[pick % len(links)]
        link.reply, link.open = None, False

    # Receiver: what receiver.py's connection threads do

    def receive(self, link: Link) -> None:
        try:
            for payload in link.decoder.feed(link.frames.pop(0)):
                self.read(link, payload)
        except ProtocolError:
            self.misunderstood(link)

    def read(self, link: Link, payload: bytes) -> None:
        if link.reads == "announce":
            self.announced(link, decode_announce(payload))
        elif link.reads == "done":
            done = decode_done(payload)
            self.handle(DoneReceived(link.conn, done))
            accept = link.accept
            if (done.rid, done.rank, done.generation) == (accept.rid, accept.rank, accept.generation) and done.done:
                self.closed(link)
            else:
                link.reads = "end"

    def announced(self, link: Link, announce: Announce) -> None:
        (reply,) = (action for action in self.handle(Announced(link.conn, announce)) if isinstance(action, Reply))
        link.reply = reply
        if isinstance(reply.message, Accept):
            link.accept, link.reads = reply.message, "done"
        else:
            self.closed(link)

    def misunderstood(self, link: Link) -> None:
        if link.accept is None:
            self.closed(link)
        else:
            link.reads = "end"  # its writes may be in flight: only its own end says that they are over

    def see_end(self, link: Link) -> None:
        """The sender's end of the connection is gone, and everything that it had sent was read."""
        if link.reads != "nothing" and not link.frames and link.settles is None:
            if link.accept is None:
                self.closed(link)
            else:
                link.settles = self.now + SETTLE_S

    @precondition(lambda self: any(link.settles is not None for link in self.links))
    @rule(pick=PICK, landing=st.integers(0, PARTS))
    def settle(self, pick: int, landing: int) -> None:
        """A connection that broke off counts as closed; what its sender had posted has landed or never will."""
        links = [link for link in self.links if link.settles is not None]
        link = links[pick % len(links)]
        self.now = max(self.now, link.settles)
        for _ in range(min(landing, len(link.flying))):
            self.land(link, 0)
        self.closed(link)

    def closed(self, link: Link) -> None:
        """With a right done, or after it has settled, nothing of it is in flight."""
        link.reads, link.flying = "nothing", [] if link.settles is not None else link.flying
        link.settles = None
        self.handle(Closed(link.conn))
        if not link.open or link.accept is None:
            self.links.remove(link)
        else:
            link.open = False

    # Consumers

    @rule(rid=RIDS)
    def expect(self, rid: str) -> None:
        if rid not in self.reading:
            self.handle(Expected(rid))
            self.expected.add(rid)

    @rule(rid=RIDS)
    def look(self, rid: str) -> None:
        """What `ReceiveServer.wait` does when it is woken."""
        if rid not in self.expected or rid in self.reading:
            return
        if rid in self.records:
            self.handle(Claimed(rid))
            record = self.reading[rid] = self.records.pop(rid)
            assert record.generation not in self.decoded, "two decodes of one admission"
            self.decoded.add(record.generation)
        elif self.admission.failure(rid) is not None:
            self.release(rid)

    @rule(rid=RIDS)
    def release(self, rid: str) -> None:
        self.records.pop(rid, None)
        self.reading.pop(rid, None)
        self.expected.discard(rid)
        self.handle(Released(rid))

    # Clock

    @rule(seconds=st.sampled_from([0.2, UNCLAIMED_GRACE_S, 3.0, TIMEOUT_S - 1, TIMEOUT_S, 1e6]))
    def jump(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([0.1, 3.0, 500.0]))
    def read_the_clock_early(self, seconds: float) -> None:
        """The next event comes with a clock value that its thread read so long ago."""
        self.late = seconds

    # What holds

    @property
    def flying(self) -> list[Link]:
        return [link for link in self.links if link.flying]

    def picked(self, pick: int) -> Link:
        return self.links[pick % len(self.links)]

    @invariant()
    def claimed_slots_hold_their_own_request(self) -> None:
        for record in getattr(self, "reading", {}).values():
            for rank in self.senders:
                for part in range(PARTS):
                    wanted = record.rid, record.generation, record.seq_len, rank
                    assert self.memory.get((record.slot, rank, part)) == wanted, "KV of another request"

    def teardown(self) -> None:
        """Never a stuck slot: all connections close and all consumers give up; then as many requests as slots go
        through side by side, and afterwards every slot is free."""
        if not hasattr(self, "admission"):
            return
        self.late = 0.0
        for rid in "abc":
            self.release(rid)
        for link in list(self.links):
            link.open, link.frames = False, []
            self.see_end(link)
            if link.settles is not None:
                self.now = max(self.now, link.settles)
                self.closed(link)
        states = {slot["state"] for slot in self.admission.snapshot(self.now)["slots"]}
        assert states == {"FREE"}, states
        self.now += TIMEOUT_S
        rids = [f"fresh {number}" for number in range(self.slots)]
        for rid in rids:
            self.expect(rid)
            self.transfer(rid, [0, 1, 2], True)
        for rid in rids:
            self.look(rid)
            assert rid in self.reading, f"{rid} did not get through: {self.admission.snapshot(self.now)}"
        self.claimed_slots_hold_their_own_request()


Machine.TestCase.settings = settings(
    max_examples=10_000 if SOAK else 300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFaultyHandoff = Machine.TestCase

MUTANTS = {
    "a slot with writers is given away": [("if slot.writers or slot.claimed:", "if slot.claimed:")],
    "a slot that is read is given away": [
        ("if slot.writers or slot.claimed:", "if slot.writers:"),
        ("return slot.rid not in self._expected and", "return"),
    ],
    "a complete record is given away at once": [("return slot.rid not in self._expected and", "return True or")],
    "release frees a slot with writers": [
        ("if not slot.writers:\n                self._slots", "if True:\n                self._slots")
    ],
    "done need not repeat what was accepted": [("accept is None or not _repeats(done, accept)", "accept is None")],
    "one rank completes a request": [("slot.done_ranks >= self._senders", "slot.done_ranks")],
    "a record completes again": [("if slot.state is State.TRANSFERRING and slot.done", "if slot.done")],
    "ranks may disagree about the prompt": [("if first != got:", "if False:")],
    "accept does not say that the slot is another one": [("None if index == peer.offered else index", "None")],
    "a cancelled slot is never freed": [("if slot.state is State.CANCELLING and not slot.writers:", "if False:")],
    "a request gets a second slot": [("if (slot := self._find(rid)) is not None:", "if False:")],
    "a connection's end is forgotten": [("slot.leave(conn, self._now)\n        if slot.state", "if slot.state")],
}
"""One rule of admission broken at a time: what stands there, and what instead. Two rules can't be broken alone: a claim
protects a slot, but so does its consumer's Expected; a connection knows its generation, but its slot has no other one
as long as it is open."""


@pytest.mark.skipif(not SOAK, reason="only shows that the machine above finds faults; TILERT_REF_SOAK=1 runs it")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_of_admission_is_found(name: str) -> None:
    source = inspect.getsource(admission)
    for right, wrong in MUTANTS[name]:
        assert source.count(right) == 1, "admission.py has changed: write the mutant anew"
        source = source.replace(right, wrong)
    mutant = ModuleType("mutant")
    sys.modules["mutant"] = mutant  # dataclasses look their module up
    exec(source, vars(mutant))

    class Broken(Machine):
        make_admission = mutant.Admission

    few = settings(
        Machine.TestCase.settings,
        max_examples=2000,
        phases=[Phase.generate],
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, mutant.NotClaimable)):
        run_state_machine_as_test(Broken, settings=few)
