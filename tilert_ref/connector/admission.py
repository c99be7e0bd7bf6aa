"""Who may write into which receive slot, and when. A pure state machine: events and a clock value in, actions out.

A slot is a receive buffer of its own; each holds one request, and a request is in one slot at most. A slot's states
(protocol.md 5):

    FREE          no request
    TRANSFERRING  at least one rank was accepted, not every sender is done
    COMPLETE      every sender is done; the consumer may claim the record and read the slot
    CANCELLING    released while writers were connected; one-sided writes may still land, so nobody else may write

A *writer* is an accepted connection that has not said done. An open connection is the only sign that its writes may be
in flight: a sender must not close it while a write is pending (a NIXL write goes on after its handle is released).

Offers. hello names a slot's addresses before the sender has said what it brings, so `Connected` answers with an
`Offer`, and the announce may turn out to belong elsewhere:
    1. a retry is due (see 5): the slot that its request needs;
    2. else the oldest transfer that still misses ranks, unless as many connections have been offered that slot already;
    3. else a free slot, one that other ranks have just been offered first;
    4. else a slot that may be taken from its request, the oldest first; else any.
    5. An announce whose request lives in, or could have, another slot than the offered one is moved there if its sender
       takes the addresses from accept (`any_slot`, ours). TileRT's can't: it gets the transient reject `busy`, comes
       back after 0.2, 0.4, ... s, and the first connection from then on is offered that slot.

When a slot with a request may be taken for another one: never while it has writers or is being read; a complete record
never while a consumer expects it, else after UNCLAIMED_GRACE_S; a transfer without writers after the same grace if one
of its ranks has failed or there is only one, else `request_timeout` after its start.

A rank has *failed* if it said so (done false, or an announce with `failed`), if its accepted connection closed before
done, or if its announce was refused for good. That counts until it is accepted again, or its request is released.
`failure` tells the consumer, which need not wait for its deadline.

Stricter than TileRT's server, on purpose (http-api.md 7, items 2 to 5 and 43): ranks outside the sender set, a seq_len
below 1, and ranks that disagree about the prompt are refused; done must repeat what was accepted; a record completes
once per generation; a slot that is being read, or that just completed, is not given away; time is monotonic.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tilert_ref.connector.codec import Accept, Announce, Done, HandoffRefused, Reject, check_geometry
from tilert_ref.connector.events import (
    Action,
    Announced,
    Claimed,
    Close,
    Closed,
    Completed,
    Conn,
    Connected,
    DoneReceived,
    Event,
    Evicted,
    Expected,
    GaveUp,
    Offer,
    Record,
    Released,
    Reply,
)
from tilert_ref.connector.layout import BufferLayout

UNCLAIMED_GRACE_S = 2.0
"""How long a complete record waits for its consumer before another request may take its slot. The consumer normally
comes a few milliseconds later, with the router's decode call. An abandoned transfer waits as long for its sender."""
RETRY_STEP_S = 0.2
"""First pause of a sender that met a transient reject; each further one is twice as long (protocol.md 6.3)."""
RETRY_FORGOTTEN_S = 5.0
MAX_FAILURES = 1024


class State(StrEnum):
    TRANSFERRING = "TRANSFERRING"
    COMPLETE = "COMPLETE"
    CANCELLING = "CANCELLING"


class NotClaimable(Exception):
    """Claimed came for a rid whose complete KV is in no slot, or which is being read already."""


@dataclass
class _Peer:
    """An open connection: the slot that its hello named, and what it was accepted for."""

    offered: int
    announced: bool = False
    accept: Accept | None = None


@dataclass
class _Wish:
    """A rank that was refused only because it was offered the wrong slot, and when it will be back."""

    announce: Announce
    refusals: int
    due: float
    used: bool = False  # some connection has been offered the slot because of it


@dataclass
class _Slot:
    index: int
    announce: Announce  # the first accepted one: its values are the request's
    generation: int
    started_at: float
    state: State = State.TRANSFERRING
    completed_at: float = 0.0
    claimed: bool = False
    done_ranks: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # ranks that failed and have not come back
    writers: dict[Conn, int] = field(default_factory=dict)  # connection -> rank
    left_at: float = 0.0  # when the last writer left
    prompt_token_ids: list[int] | None = None

    @property
    def rid(self) -> str:
        return self.announce.rid

    def leave(self, conn: Conn, now: float) -> None:
        if self.writers.pop(conn, None) is not None:
            self.left_at = now

    def settled(self, rank: int, done_only: bool) -> bool:
        """Is this rank done, or at it on some connection?"""
        return rank in self.done_ranks or (not done_only and rank in self.writers.values())

    def record(self) -> Record:
        first = self.announce
        return Record(
            rid=first.rid,
            generation=self.generation,
            seq_len=first.seq_len,
            last_prompt_token=first.last_prompt_token,
            first_token_id=first.first_token_id,
            sampling=first.sampling,
            prompt_token_ids=self.prompt_token_ids,
            started_at=self.started_at,
            completed_at=self.completed_at,
            slot=self.index,
        )

    def facts(self, now: float) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "rid": self.rid,
            "claimed": self.claimed,
            "writers": len(self.writers),
            "done_ranks": sorted(self.done_ranks),
            "age_s": round(now - self.started_at, 3),
        }


class Admission:
    """The state machine of a node's receive slots. Not thread-safe: the caller holds one lock around every call.

    Args:
        senders: ranks whose done completes a request.
        max_seq_len: capacity of a slot, tokens.
        request_timeout: seconds; life of a tombstone, and patience with a transfer whose writers are all gone while
            other ranks may still come.
        layout: if given, announces whose geometry does not fit it are refused.
        slots: how many requests' KV can be here at the same time.
        checkpoint: digest of the decode side's checkpoint; an announce that names another one is refused.
    """

    def __init__(
        self,
        senders: frozenset[int],
        max_seq_len: int,
        request_timeout: float = 120.0,
        layout: BufferLayout | None = None,
        slots: int = 1,
        checkpoint: str | None = None,
    ) -> None:
        if not senders or max_seq_len < 1 or slots < 1:
            got = f"{set(senders)}, {max_seq_len} and {slots}"
            raise ValueError(f"at least one sender, one token and one slot are needed, got {got}")
        self._senders = senders
        self._max_seq_len = max_seq_len
        self._request_timeout = request_timeout
        self._layout = layout
        self._checkpoint = checkpoint
        self._slots: list[_Slot | None] = [None] * slots
        self._generation = 0
        self._connections: dict[Conn, _Peer] = {}
        self._tombstones: dict[str, float] = {}  # rid -> until when nobody waits for it
        self._expected: set[str] = set()  # rids that a consumer waits for
        self._wishes: dict[tuple[str, int], _Wish] = {}  # by rid and rank
        self._failures: dict[str, dict[int, tuple[str, float]]] = {}  # rid -> rank -> why, when
        self._retrying: dict[str, float] = {}  # rid -> until when its sender comes again after a transient reject
        self._now = float("-inf")
        # In protocol.md's row order. The first reject wins.
        self._checks: tuple[Callable[[Announce], Reject | None], ...] = (
            self._check_request,
            self._check_geometry,
            self._check_tombstone,
            self._check_same_rid,
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event at clock value `now` (monotonic, seconds) and says what to do about it."""
        # Threads read the clock before they get the lock, so a value may come in late. Time must not go back for that.
        self._now = max(self._now, now)
        match event:
            case Connected(conn):
                return self._connected(conn)
            case Announced(conn, announce):
                return self._announced(conn, announce)
            case DoneReceived(conn, done):
                return self._done(conn, done)
            case Closed(conn):
                return self._closed(conn)
            case Expected(rid):
                self._tombstones.pop(rid, None)
                self._expected.add(rid)
                return []
            case Claimed(rid):
                return self._claimed(rid)
            case Released(rid):
                return self._released(rid)
        raise TypeError(f"not an admission event: {event!r}")

    def busy(self, now: float) -> bool:
        """`hello.busy`: a new request would be refused at this moment."""
        self._now = max(self._now, now)
        return not any(map(self._reusable, range(len(self._slots))))

    def writable(self) -> dict[tuple[str, int], int]:
        """Which transfers may write, and where: (rid, generation) -> slot."""
        slots = [slot for slot in self._slots if slot and slot.state is State.TRANSFERRING]
        return {(slot.rid, slot.generation): slot.index for slot in slots}

    def failure(self, rid: str) -> str | None:
        """Why rid's KV will not be complete, if a rank of it has failed."""
        failed = self._failures.get(rid)
        return "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in sorted(failed.items())) if failed else None

    def announced(self, rid: str, now: float) -> bool:
        """Is rid in a slot, or was a rank of it sent away to come back soon?"""
        self._now = max(self._now, now)
        return self._find(rid) is not None or self._retrying.get(rid, self._now) > self._now

    def transferring(self) -> bool:
        """Is anybody writing?"""
        return any(slot.writers for slot in self._slots if slot)

    def stuck(self, now: float) -> bool:
        """Is every slot taken by a transfer that hangs: begun over `request_timeout` ago, with writers connected?"""
        self._now = max(self._now, now)
        return all(slot and slot.writers and self._expired(slot.started_at) for slot in self._slots)

    def snapshot(self, now: float) -> dict[str, Any]:
        """For health pages: plain values only. The facts of the oldest request are also at the top level."""
        busy = self.busy(now)
        taken = sorted((slot for slot in self._slots if slot), key=lambda slot: slot.generation)
        return {
            "state": "FREE",
            "busy": busy,
            "connections": len(self._connections),
            "tombstones": len(self._tombstones),
            "generation": self._generation,
            "slots": [slot.facts(self._now) if slot else {"state": "FREE"} for slot in self._slots],
        } | (taken[0].facts(self._now) if taken else {})

    # Which slot

    def _connected(self, conn: Conn) -> list[Action]:
        if conn in self._connections:
            raise ValueError(f"connection {conn!r} is open already")
        offered = self._offered()
        self._connections[conn] = _Peer(offered)
        return [Offer(conn, offered, self.busy(self._now))]

    def _offered(self) -> int:
        if (wished := self._wished()) is not None:
            return wished
        offers = [0] * len(self._slots)
        for peer in self._connections.values():
            offers[peer.offered] += not peer.announced
        incomplete = [slot for slot in self._slots if slot and self._missing(slot) > offers[slot.index]]
        if incomplete:
            return min(incomplete, key=lambda slot: slot.generation).index
        return min(range(len(self._slots)), key=lambda index: self._offer_rank(index, offers[index]))

    def _missing(self, slot: _Slot) -> int:
        """How many ranks of a transfer are still to come, as far as one can know."""
        if slot.state is not State.TRANSFERRING:
            return 0
        return len(self._senders - slot.done_ranks - slot.given_up - set(slot.writers.values()))

    def _offer_rank(self, index: int, offers: int) -> tuple[int, int]:
        """Least is best. Ranks of one request come close together, so a free slot is offered to all of them."""
        slot = self._slots[index]
        if slot is None:
            return (0 if 0 < offers < len(self._senders) else 1 if offers == 0 else 2), offers
        return (3 if self._reusable(index) else 4), slot.generation

    def _wished(self) -> int | None:
        """The slot of the first retry that is due."""
        self._forget_wishes()
        for wish in sorted(self._wishes.values(), key=lambda wish: wish.due):
            if wish.due <= self._now and not wish.used:
                index = self._home(wish.announce.rid)
                if index is not None:
                    wish.used = True
                    return index
        return None

    def _forget_wishes(self) -> None:
        self._wishes = {k: w for k, w in self._wishes.items() if self._now - w.due < RETRY_FORGOTTEN_S}

    def _home(self, rid: str, offered: int | None = None) -> int | None:
        """The slot that rid is in, else the best that it could have, else None."""
        if (slot := self._find(rid)) is not None:
            return slot.index
        usable = [index for index in range(len(self._slots)) if self._reusable(index)]
        return min(usable, key=lambda i: (self._slots[i] is not None, i != offered, i), default=None)

    def _find(self, rid: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot and slot.rid == rid), None)

    def _place(self, announce: Announce, offered: int) -> int | None:
        """The slot to accept an announce in, None if it has to come again."""
        home = self._home(announce.rid, offered)
        if home is None or home == offered or announce.any_slot:
            return home
        if self._find(announce.rid) is None and self._reusable(offered):
            return offered
        key = announce.rid, announce.rank
        refusals = self._wishes[key].refusals + 1 if key in self._wishes else 1
        self._wishes[key] = _Wish(announce, refusals, self._now + RETRY_STEP_S * 2 ** (refusals - 1))
        return None

    def _reusable(self, index: int) -> bool:
        """May another rid take the slot? Never while somebody may still write to it or reads it."""
        slot = self._slots[index]
        if slot is None:
            return True
        if slot.writers or slot.claimed:
            return False
        if slot.state is State.COMPLETE:
            return slot.rid not in self._expected and self._now - slot.completed_at >= UNCLAIMED_GRACE_S
        if self._now - slot.started_at >= self._request_timeout:
            return True
        # Of several senders, one may come minutes after another: no writer is then no sign of an end.
        abandoned = len(self._senders) == 1 or bool(slot.given_up)
        return abandoned and self._now - slot.left_at >= UNCLAIMED_GRACE_S

    # What happens on a connection

    def _announced(self, conn: Conn, announce: Announce) -> list[Action]:
        peer = self._peer(conn)
        if peer.announced:
            return [Close(conn)]  # one connection carries one rank of one request
        peer.announced = True
        if announce.failed is not None:
            self._fail(announce.rid, announce.rank, announce.failed, final=True)
            return [Close(conn)]
        for check in self._checks:
            if reject := check(announce):
                return self._refuse(conn, announce, reject)
        index = self._place(announce, peer.offered)
        if index is None:
            return self._refuse(conn, announce, self._busy_reject(announce.rid, peer.offered))
        return self._accept(conn, announce, index)

    def _refuse(self, conn: Conn, announce: Announce, reject: Reject) -> list[Action]:
        if reject.transient:
            self._retrying = {rid: until for rid, until in self._retrying.items() if until > self._now}
            self._retrying[announce.rid] = self._now + min(announce.admission_window_s, self._request_timeout)
        elif reject.error != "duplicate_rank":
            self._fail(announce.rid, announce.rank, _refused(reject), final=False)
        return [Reply(conn, reject), Close(conn)]

    def _busy_reject(self, rid: str, offered: int) -> Reject:
        slot = self._slots[offered]
        if slot is None or slot.rid == rid:  # the offered slot would do, but another one is rid's
            return Reject(error="busy", rid=rid, detail="another slot was offered: come again")
        return Reject(error="busy", rid=rid, busy_rid=slot.rid, busy_state=slot.state.value)

    def _accept(self, conn: Conn, announce: Announce, index: int) -> list[Action]:
        evicted: list[Action] = []
        slot = self._slots[index]
        if slot is None or slot.rid != announce.rid:
            if slot and slot.state is State.COMPLETE:
                evicted.append(Evicted(slot.rid, slot.generation))
            self._generation += 1
            slot = self._slots[index] = _Slot(index, announce, self._generation, self._now)
        slot.writers[conn] = announce.rank
        slot.given_up.discard(announce.rank)
        slot.prompt_token_ids = slot.prompt_token_ids or announce.prompt_token_ids
        self._wishes.pop((announce.rid, announce.rank), None)
        self._failures.get(announce.rid, {}).pop(announce.rank, None)
        peer = self._peer(conn)
        peer.accept = Accept(rid=announce.rid, rank=announce.rank, generation=slot.generation)
        return [*evicted, Reply(conn, peer.accept, None if index == peer.offered else index)]

    def _done(self, conn: Conn, done: Done) -> list[Action]:
        accept = self._peer(conn).accept
        if accept is None or not _repeats(done, accept):
            return [Close(conn)]
        slot = self._slot_of(accept)
        if slot is None or slot.state is State.CANCELLING:
            return [Close(conn)]
        if not done.done:
            return [Close(conn), *self._give_up(slot, conn, accept, done.error or "it gave up")]
        slot.leave(conn, self._now)
        slot.done_ranks.add(accept.rank)
        slot.given_up.discard(accept.rank)
        self._failures.get(accept.rid, {}).pop(accept.rank, None)
        if slot.state is State.TRANSFERRING and slot.done_ranks >= self._senders:
            slot.state, slot.completed_at = State.COMPLETE, self._now
            return [Close(conn), Completed(slot.record())]
        return [Close(conn)]

    def _give_up(self, slot: _Slot, conn: Conn, accept: Accept, reason: str) -> list[Action]:
        """Stale if its rank is done, has failed, or tries on another connection. This one stays a writer until it is
        closed."""
        others = {rank for other, rank in slot.writers.items() if other != conn}
        if accept.rank in slot.done_ranks | slot.given_up | others:
            return []
        slot.given_up.add(accept.rank)
        self._note_failure(slot.rid, accept.rank, reason)
        return [GaveUp(slot.rid, slot.generation, reason)]

    def _closed(self, conn: Conn) -> list[Action]:
        peer = self._connections.pop(conn, None)
        slot = self._slot_of(peer.accept) if peer and peer.accept else None
        if slot is None:
            return []
        lost: list[Action] = []
        if conn in slot.writers and slot.state is not State.CANCELLING:
            lost = self._give_up(slot, conn, peer.accept, "its connection ended before it was done")
        slot.leave(conn, self._now)
        if slot.state is State.CANCELLING and not slot.writers:
            self._slots[slot.index] = None
        return lost

    def _peer(self, conn: Conn) -> _Peer:
        if conn not in self._connections:
            raise ValueError(f"connection {conn!r} is not open")
        return self._connections[conn]

    def _slot_of(self, accept: Accept) -> _Slot | None:
        """None if what was accepted is over."""
        return next((slot for slot in self._slots if slot and slot.generation == accept.generation), None)

    # Failures

    def _fail(self, rid: str, rank: int, reason: str, final: bool) -> None:
        """A rank has failed otherwise than on its accepted connection. Nothing to say if nobody waits for rid any more.

        final: its sender says so. It may still be connected, for a write that it gave up, but that can't stop. Not
        final: an announce was refused, which does not matter while the rank is at it on another connection.
        """
        slot = self._find(rid)
        unwanted = self._tombstones.get(rid, self._now) > self._now
        if unwanted or rank not in self._senders or (slot and slot.settled(rank, final)):
            return
        if slot:
            slot.given_up.add(rank)
        self._note_failure(rid, rank, reason)

    def _note_failure(self, rid: str, rank: int, reason: str) -> None:
        old = [r for r, ranks in self._failures.items() if all(self._expired(at) for _, at in ranks.values())]
        for known in old or list(self._failures)[: len(self._failures) - MAX_FAILURES + 1]:
            del self._failures[known]
        self._failures.setdefault(rid, {})[rank] = reason, self._now

    def _expired(self, at: float) -> bool:
        return self._now - at >= self._request_timeout

    # What the consumer does

    def _claimed(self, rid: str) -> list[Action]:
        slot = self._find(rid)
        if slot is None or slot.state is not State.COMPLETE or slot.claimed:
            raise NotClaimable(f"the KV of {rid!r} cannot be read: the slots are {self.snapshot(self._now)['slots']}")
        slot.claimed = True
        return []

    def _released(self, rid: str) -> list[Action]:
        alive = {other: deadline for other, deadline in self._tombstones.items() if deadline > self._now}
        self._tombstones = alive | {rid: self._now + self._request_timeout}
        self._expected.discard(rid)
        self._failures.pop(rid, None)
        slot = self._find(rid)
        if slot:
            slot.state, slot.claimed = State.CANCELLING, False
            if not slot.writers:
                self._slots[slot.index] = None
        return []

    # Checks of an announce: None, or the reject that it gets.

    def _check_request(self, announce: Announce) -> Reject | None:
        """What is wrong whatever the state."""
        rid = announce.rid
        if announce.seq_len > self._max_seq_len:
            return Reject(error="seq_len exceeds max_seq_len", rid=rid, max_seq_len=self._max_seq_len)
        if announce.seq_len < 1:
            return Reject(
                error="invalid_seq_len", rid=rid, detail=f"seq_len is {announce.seq_len}, at least 1 is legal"
            )
        if announce.rank not in self._senders:
            legal = f"the senders are {sorted(self._senders)}"
            return Reject(error="unknown_rank", rid=rid, rank=announce.rank, detail=legal)
        if any(scale != 1.0 for scale in announce.kv_scales or ()):
            return Reject(error="unsupported_kv_scales", rid=rid, detail="no supported row format has per-layer scales")
        return None

    def _check_geometry(self, announce: Announce) -> Reject | None:
        if self._layout is None:
            return None
        try:
            check_geometry(announce.tilert_ref, self._layout, self._checkpoint)
        except HandoffRefused as refusal:
            return Reject(error="geometry_mismatch", rid=announce.rid, detail=refusal.reason)
        return None

    def _check_tombstone(self, announce: Announce) -> Reject | None:
        """A released rid stays refused until a consumer expects it again, and as long as its sender keeps retrying."""
        deadline = self._tombstones.get(announce.rid)
        if deadline is None:
            return None
        if deadline <= self._now:
            del self._tombstones[announce.rid]
            return None
        window = min(announce.admission_window_s, self._request_timeout)
        self._tombstones[announce.rid] = max(deadline, self._now + window)
        return Reject(error="cancelling", rid=announce.rid, detail="no_consumer")

    def _check_same_rid(self, announce: Announce) -> Reject | None:
        slot = self._find(announce.rid)
        if slot is None:
            return None
        if slot.state is State.CANCELLING:
            return Reject(error="cancelling", rid=announce.rid)
        if announce.rank in slot.done_ranks:
            return Reject(error="duplicate_rank", rid=announce.rid, rank=announce.rank)
        for name in ("seq_len", "last_prompt_token"):
            first, got = getattr(slot.announce, name), getattr(announce, name)
            if first != got:
                detail = f"{name} is {got}, rank {slot.announce.rank} said {first}"
                return Reject(error="mismatch", rid=announce.rid, rank=announce.rank, detail=detail)
        return None


def _repeats(done: Done, accept: Accept) -> bool:
    return (done.rid, done.rank, done.generation) == (accept.rid, accept.rank, accept.generation)


def _refused(reject: Reject) -> str:
    return f"refused: {reject.error}" + (f" ({reject.detail})" if reject.detail else "")
