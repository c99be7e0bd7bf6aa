"""What goes into `admission.Admission` and what comes out of it: events, actions, the record of a finished handoff."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tilert_ref.connector.codec import Accept, Announce, Done, Reject

Conn = Hashable


@dataclass(frozen=True)
class Record:
    """A request whose KV is in a slot. Times are the clock values that `handle` was given, in seconds."""

    rid: str
    generation: int
    seq_len: int
    last_prompt_token: int
    first_token_id: int | None
    sampling: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    started_at: float
    completed_at: float
    slot: int = 0


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
    """The consumer starts to read rid's slot. `NotClaimable` if no slot holds rid's complete KV."""

    rid: str


@dataclass(frozen=True)
class Released:
    """The consumer is through with rid, or gave up on it."""

    rid: str


Event = Connected | Announced | DoneReceived | Closed | Expected | Claimed | Released


# Actions: what the caller has to do, in this order.


@dataclass(frozen=True)
class Offer:
    """Say hello with the addresses of this slot. busy: a new request would be refused at this moment."""

    conn: Conn
    slot: int
    busy: bool


@dataclass(frozen=True)
class Reply:
    """moved_to: the accepted slot if it isn't the offered one; the accept has to name its addresses."""

    conn: Conn
    message: Accept | Reject
    moved_to: int | None = None


@dataclass(frozen=True)
class Close:
    """Close the connection. `Closed` is still expected, and only that ends its claim on its slot."""

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
    """An accepted rank of this request will not be done, see `Admission.failure`. It may still announce again."""

    rid: str
    generation: int
    reason: str


Action = Offer | Reply | Close | Completed | Evicted | GaveUp
