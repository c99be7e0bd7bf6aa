"""Who may write into the one receive buffer, and when. A pure state machine: events and a clock value in, actions out.

One slot holds one request. Its states (protocol.md 5):

    FREE          no slot
    TRANSFERRING  at least one rank was accepted, not every sender is done
    COMPLETE      every sender is done; the consumer may claim the record and read the buffer
    CANCELLING    released while writers were connected; one-sided writes may still land, so nobody else may write

A *writer* is an accepted connection that has not said done. An open connection is the only sign that its writes may be
in flight: a sender must not close it while a write is pending (a NIXL write goes on after its handle is released).

Stricter than TileRT's server, on purpose (http-api.md 7, items 2 to 5 and 43): ranks outside the sender set, a seq_len
below 1, and ranks that disagree about the prompt are refused; done must repeat what was accepted; a record completes
once per generation; a buffer that is being read, or that just completed, is not given away; time is monotonic.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tilert_ref.connector.codec import Accept, Announce, Done, HandoffRefused, Reject, check_geometry
from tilert_ref.connector.layout import BufferLayout

UNCLAIMED_GRACE_S = 2.0
"""How long a complete record waits for its consumer before another request may take the buffer. The consumer normally
comes a few milliseconds later, with the router's decode call. An abandoned transfer waits as long for its sender."""

Conn = Hashable


class State(StrEnum):
    TRANSFERRING = "TRANSFERRING"
    COMPLETE = "COMPLETE"
    CANCELLING = "CANCELLING"


@dataclass(frozen=True)
class Record:
    """A request whose KV is in the buffer. Times are the clock values that `handle` was given, in seconds."""

    rid: str
    generation: int
    seq_len: int
    last_prompt_token: int
    first_token_id: int | None
    sampling: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    started_at: float
    completed_at: float


# Events: what happened on a connection, and what the consumer of records does.


@dataclass(frozen=True)
class Connected:
    conn: Conn


@dataclass(frozen=True)
class Announced:
    conn: Conn
    announce: Announce


@dataclass(frozen=True)
class DoneReceived:
    conn: Conn
    done: Done


@dataclass(frozen=True)
class Closed:
    """The connection is gone, for whatever reason. Harmless if repeated."""

    conn: Conn


@dataclass(frozen=True)
class Expected:
    """A consumer wants rid, also if it was released before."""

    rid: str


@dataclass(frozen=True)
class Claimed:
    """The consumer starts to read the buffer. `NotClaimable` if the buffer no longer holds rid's complete KV."""

    rid: str


@dataclass(frozen=True)
class Released:
    """The consumer is through with rid, or gave up on it."""

    rid: str


Event = Connected | Announced | DoneReceived | Closed | Expected | Claimed | Released


# Actions: what the caller has to do, in this order.


@dataclass(frozen=True)
class Reply:
    conn: Conn
    message: Accept | Reject


@dataclass(frozen=True)
class Close:
    """Close the connection. `Closed` is still expected, and only that ends its claim on the buffer."""

    conn: Conn


@dataclass(frozen=True)
class Completed:
    record: Record


@dataclass(frozen=True)
class Evicted:
    """A record that was completed, but not claimed in time: its bytes are about to be overwritten. Forget it."""

    rid: str
    generation: int


@dataclass(frozen=True)
class GaveUp:
    """A sender said that its rank of this request will not be done. It may still announce again."""

    rid: str
    generation: int


Action = Reply | Close | Completed | Evicted | GaveUp


class NotClaimable(Exception):
    """Claimed came for a rid whose complete KV is not in the buffer, or which is being read already."""


@dataclass
class _Slot:
    announce: Announce  # the first accepted one: its values are the request's
    generation: int
    started_at: float
    state: State = State.TRANSFERRING
    completed_at: float = 0.0
    claimed: bool = False
    done_ranks: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # ranks that said so and have not come back
    writers: set[Conn] = field(default_factory=set)
    left_at: float = 0.0  # when the last writer left
    prompt_token_ids: list[int] | None = None

    @property
    def rid(self) -> str:
        return self.announce.rid

    def leave(self, conn: Conn, now: float) -> None:
        if conn in self.writers:
            self.writers.remove(conn)
            self.left_at = now

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
        )


class Admission:
    """The state machine of one receive buffer. Not thread-safe: the caller holds one lock around every call.

    Args:
        senders: ranks whose done completes a request.
        max_seq_len: capacity of the buffer, tokens.
        request_timeout: seconds; life of a tombstone, and patience with a transfer whose writers are all gone while
            other ranks may still come.
        layout: if given, announces whose geometry does not fit it are refused.
    """

    def __init__(
        self,
        senders: frozenset[int],
        max_seq_len: int,
        request_timeout: float = 120.0,
        layout: BufferLayout | None = None,
    ) -> None:
        if not senders or max_seq_len < 1:
            raise ValueError(f"at least one sender and one token are needed, got {set(senders)} and {max_seq_len}")
        self._senders = senders
        self._max_seq_len = max_seq_len
        self._request_timeout = request_timeout
        self._layout = layout
        self._slot: _Slot | None = None
        self._generation = 0
        self._connections: dict[Conn, Accept | None] = {}  # what each open connection was accepted for
        self._tombstones: dict[str, float] = {}  # rid -> until when nobody waits for it
        self._now = float("-inf")
        # In protocol.md's row order. The first reject wins.
        self._checks: tuple[Callable[[Announce], Reject | None], ...] = (
            self._check_request,
            self._check_geometry,
            self._check_tombstone,
            self._check_same_rid,
            self._check_other_rid,
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
                return []
            case Claimed(rid):
                return self._claimed(rid)
            case Released(rid):
                return self._released(rid)
        raise TypeError(f"not an admission event: {event!r}")

    def busy(self, now: float) -> bool:
        """`hello.busy`: a new request would be refused at this moment."""
        return self._slot is not None and not self._reusable(self._slot, max(self._now, now))

    def snapshot(self, now: float) -> dict[str, Any]:
        """For health pages: plain values only."""
        slot = self._slot
        facts: dict[str, Any] = {
            "state": slot.state.value if slot else "FREE",
            "busy": self.busy(now),
            "connections": len(self._connections),
            "tombstones": len(self._tombstones),
            "generation": self._generation,
        }
        if slot:
            facts |= {
                "rid": slot.rid,
                "claimed": slot.claimed,
                "writers": len(slot.writers),
                "done_ranks": sorted(slot.done_ranks),
                "age_s": round(max(self._now, now) - slot.started_at, 3),
            }
        return facts

    def _connected(self, conn: Conn) -> list[Action]:
        if conn in self._connections:
            raise ValueError(f"connection {conn!r} is open already")
        self._connections[conn] = None
        return []

    def _announced(self, conn: Conn, announce: Announce) -> list[Action]:
        if self._accepted(conn) is not None:
            return [Close(conn)]  # one connection carries one rank of one request
        for check in self._checks:
            if reject := check(announce):
                return [Reply(conn, reject), Close(conn)]
        return self._accept(conn, announce)

    def _accept(self, conn: Conn, announce: Announce) -> list[Action]:
        evicted: list[Action] = []
        if self._slot is None or self._slot.rid != announce.rid:
            if self._slot and self._slot.state is State.COMPLETE:
                evicted.append(Evicted(self._slot.rid, self._slot.generation))
            self._generation += 1
            self._slot = _Slot(announce, self._generation, self._now)
        slot = self._slot
        slot.writers.add(conn)
        slot.given_up.discard(announce.rank)
        slot.prompt_token_ids = slot.prompt_token_ids or announce.prompt_token_ids
        accept = Accept(rid=announce.rid, rank=announce.rank, generation=slot.generation)
        self._connections[conn] = accept
        return [*evicted, Reply(conn, accept)]

    def _done(self, conn: Conn, done: Done) -> list[Action]:
        accept, slot = self._accepted(conn), self._slot
        if accept is None or not _repeats(done, accept):
            return [Close(conn)]
        if slot is None or slot.generation != accept.generation or slot.state is State.CANCELLING:
            return [Close(conn)]
        if not done.done:
            return [Close(conn), *self._give_up(slot, conn, accept)]
        slot.leave(conn, self._now)
        slot.done_ranks.add(accept.rank)
        slot.given_up.discard(accept.rank)
        if slot.state is State.TRANSFERRING and slot.done_ranks >= self._senders:
            slot.state, slot.completed_at = State.COMPLETE, self._now
            return [Close(conn), Completed(slot.record())]
        return [Close(conn)]

    def _give_up(self, slot: _Slot, conn: Conn, accept: Accept) -> list[Action]:
        """Stale if its rank is done or tries on another connection. This one stays a writer until it is closed."""
        retried = any(self._connections[other].rank == accept.rank for other in slot.writers - {conn})
        if accept.rank in slot.done_ranks or retried:
            return []
        slot.given_up.add(accept.rank)
        return [GaveUp(slot.rid, slot.generation)]

    def _closed(self, conn: Conn) -> list[Action]:
        self._connections.pop(conn, None)
        if self._slot:
            self._slot.leave(conn, self._now)
            if self._slot.state is State.CANCELLING and not self._slot.writers:
                self._slot = None
        return []

    def _accepted(self, conn: Conn) -> Accept | None:
        if conn not in self._connections:
            raise ValueError(f"connection {conn!r} is not open")
        return self._connections[conn]

    def _claimed(self, rid: str) -> list[Action]:
        slot = self._slot
        if slot is None or slot.rid != rid or slot.state is not State.COMPLETE or slot.claimed:
            raise NotClaimable(f"the KV of {rid!r} cannot be read: the buffer is {self.snapshot(self._now)}")
        slot.claimed = True
        return []

    def _released(self, rid: str) -> list[Action]:
        alive = {other: deadline for other, deadline in self._tombstones.items() if deadline > self._now}
        self._tombstones = alive | {rid: self._now + self._request_timeout}
        slot = self._slot
        if slot and slot.rid == rid:
            slot.state, slot.claimed = State.CANCELLING, False
            if not slot.writers:
                self._slot = None
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
            check_geometry(announce.tilert_ref, self._layout)
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
        slot = self._slot
        if slot is None or slot.rid != announce.rid:
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

    def _check_other_rid(self, announce: Announce) -> Reject | None:
        slot = self._slot
        if slot is None or slot.rid == announce.rid or self._reusable(slot, self._now):
            return None
        return Reject(error="busy", rid=announce.rid, busy_rid=slot.rid, busy_state=slot.state.value)

    def _reusable(self, slot: _Slot, now: float) -> bool:
        """May another rid take the slot? Never while somebody may still write to the buffer or reads it."""
        if slot.writers or slot.claimed:
            return False
        if slot.state is State.COMPLETE:
            return now - slot.completed_at >= UNCLAIMED_GRACE_S
        if now - slot.started_at >= self._request_timeout:
            return True
        # Of several senders, one may come minutes after another: no writer is then no sign of an end.
        abandoned = len(self._senders) == 1 or bool(slot.given_up)
        return abandoned and now - slot.left_at >= UNCLAIMED_GRACE_S


def _repeats(done: Done, accept: Accept) -> bool:
    return (done.rid, done.rank, done.generation) == (accept.rid, accept.rank, accept.generation)
