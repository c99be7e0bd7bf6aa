"""What `admission.Admission` does, as a table: for reading, and for docs/protocol.md.

The machine is code, because its checks have an order and its guards share helpers. So that this table can't tell
another story, tests/unit/test_transitions.py drives every row in every state that it names, compares the actions and
the state that follows, and fails if a way out of the machine is left without a row.

Numbers are the rows of protocol.md 5.2, with letters where a row is split or ours.
"""

from dataclasses import dataclass

from tilert_ref.connector.events import (
    Announced,
    Claimed,
    Closed,
    Connected,
    DoneReceived,
    Event,
    Expected,
    Released,
)

FREE, TRANSFERRING, COMPLETE, CANCELLING = "FREE", "TRANSFERRING", "COMPLETE", "CANCELLING"
ANY = (FREE, TRANSFERRING, COMPLETE, CANCELLING)
TAKEN = ANY[1:]
TILERT, OURS = "TileRT", "ours"


@dataclass(frozen=True)
class Row:
    """states: of the slot that the event is about: its request's, else the one that hello offered. actions: in order.

    then: the slot's next state, "" if it stays. effect: what else changes. source: whose rule it is.
    """

    number: str
    event: type[Event]
    states: tuple[str, ...]
    guard: str
    actions: tuple[str, ...]
    then: str = ""
    effect: str = ""
    source: str = TILERT


@dataclass(frozen=True)
class Reason:
    """A reject's `error`. extras: the fields that may come with it."""

    error: str
    extras: tuple[str, ...]
    when: str
    source: str = TILERT


REASONS = (
    Reason("seq_len exceeds max_seq_len", ("rid", "max_seq_len"), "checked before everything else"),
    Reason("cancelling", ("rid", "detail"), "nobody waits for this rid yet; or its slot still has writers"),
    Reason(
        "busy",
        ("rid", "busy_rid", "busy_state", "detail"),
        "other requests have the slots; or this request needs another slot than the offered one",
    ),
    Reason("duplicate_rank", ("rid", "rank"), "this rank is done"),
    Reason("invalid_seq_len", ("rid", "detail"), "seq_len below 1", OURS),
    Reason("unknown_rank", ("rid", "rank", "detail"), "the rank is none of the senders'", OURS),
    Reason("unsupported_kv_scales", ("rid", "detail"), "a scale other than 1.0: no row format here has them", OURS),
    Reason(
        "geometry_mismatch",
        ("rid", "detail"),
        "`tilert_ref` does not fit, or a layout that a model defines has none",
        OURS,
    ),
    Reason("mismatch", ("rid", "rank", "detail"), "another seq_len or last_prompt_token than the first rank's", OURS),
    Reason("secret_required", ("detail",), "instead of the second hello: what came is no challenge", OURS),
    Reason("wrong_secret", ("detail",), "instead of the second hello: the challenge's proof is wrong", OURS),
)


def _refused(error: str) -> tuple[str, ...]:
    return f"reject `{error}`", "close"


_FAILS = "the rank has failed"

ROWS = (
    Row("0", Connected, ANY, "", ("offer",), effect="hello names the offered slot"),
    Row("0a", Announced, ANY, "the connection has announced already", ("close",), source=OURS),
    Row("0b", Announced, ANY, "`failed`; rank neither done nor unknown", ("close",), effect=_FAILS, source=OURS),
    Row("0c", Announced, (TRANSFERRING, COMPLETE), "`failed`; rank done, or unknown", ("close",), source=OURS),
    Row("0d", Announced, ANY, "`failed`; rid tombstoned", ("close",), source=OURS),
    Row("1", Announced, ANY, "seq_len > max_seq_len", _refused("seq_len exceeds max_seq_len"), effect=_FAILS),
    Row("1a", Announced, ANY, "seq_len < 1", _refused("invalid_seq_len"), effect=_FAILS, source=OURS),
    Row("1b", Announced, ANY, "rank not among the senders", _refused("unknown_rank"), source=OURS),
    Row("1c", Announced, ANY, "a scale that is not 1.0", _refused("unsupported_kv_scales"), effect=_FAILS, source=OURS),
    Row("1d", Announced, ANY, "geometry does not fit", _refused("geometry_mismatch"), effect=_FAILS, source=OURS),
    Row(
        "2",
        Announced,
        ANY,
        "rid tombstoned",
        _refused("cancelling"),
        effect="the tombstone lasts for admission_window_s more, request_timeout at most",
    ),
    Row("3", Announced, (FREE,), "rid's tombstone expired", ("accept",), TRANSFERRING, "the tombstone goes"),
    Row("4", Announced, (CANCELLING,), "rid's own slot", _refused("cancelling")),
    Row("5", Announced, (TRANSFERRING, COMPLETE), "rid's own slot, rank done", _refused("duplicate_rank")),
    Row(
        "5a",
        Announced,
        (TRANSFERRING,),
        "rid's own slot; seq_len or last_prompt_token differ",
        _refused("mismatch"),
        effect=_FAILS,
        source=OURS,
    ),
    Row("6", Announced, (TRANSFERRING,), "rid's own slot otherwise", ("accept",), effect="one more writer"),
    Row("7", Announced, TAKEN, "another rid's slot, not to be taken", _refused("busy")),
    Row("7c", Announced, (COMPLETE,), "another rid's slot, complete for less than 2 s", _refused("busy"), source=OURS),
    Row(
        "7a",
        Announced,
        (TRANSFERRING,),
        "another rid's slot; a free one, but no `any_slot`",
        _refused("busy"),
        effect="the next connection from then on is offered the free slot",
        source=OURS,
    ),
    Row(
        "7b",
        Announced,
        (TRANSFERRING,),
        "rid's own slot, but another one was offered; no `any_slot`",
        _refused("busy"),
        effect="the next connection from then on is offered rid's slot",
        source=OURS,
    ),
    Row("8", Announced, (FREE,), "", ("accept",), TRANSFERRING, "new generation, one writer"),
    Row(
        "8a",
        Announced,
        (TRANSFERRING,),
        "another rid's slot, abandoned: no writers, and old enough",
        ("accept",),
        TRANSFERRING,
        "new generation, one writer",
    ),
    Row(
        "8b",
        Announced,
        (COMPLETE,),
        "another rid's slot: not expected, not claimed, no writers, complete for 2 s",
        ("evicted", "accept"),
        TRANSFERRING,
        "new generation, one writer",
        OURS,
    ),
    Row(
        "8c", Announced, (FREE,), "another slot was offered; `any_slot`", ("accept elsewhere",), TRANSFERRING, "", OURS
    ),
    Row("9", DoneReceived, ANY, "what was accepted is over", ("close",)),
    Row("9a", DoneReceived, ANY, "nothing was accepted", ("close",), source=OURS),
    Row("9b", DoneReceived, TAKEN, "done does not repeat what was accepted", ("close",), source=OURS),
    Row("10", DoneReceived, (CANCELLING,), "", ("close",)),
    Row(
        "10a",
        DoneReceived,
        (TRANSFERRING,),
        "done is false",
        ("close", "gave up"),
        effect=f"{_FAILS}; a writer until it is closed",
        source=OURS,
    ),
    Row(
        "10b",
        DoneReceived,
        (TRANSFERRING, COMPLETE),
        "done is false; the rank is done, has failed, or writes on another connection",
        ("close",),
        source=OURS,
    ),
    Row("11", DoneReceived, (TRANSFERRING,), "other ranks are missing", ("close",), effect="one writer less"),
    Row("12", DoneReceived, (TRANSFERRING,), "the last rank", ("close", "completed"), COMPLETE, "one writer less"),
    Row("12a", DoneReceived, (COMPLETE,), "", ("close",), effect="one writer less; no second record", source=OURS),
    Row("13", Closed, ANY, "nothing was accepted, or it is over", ()),
    Row("14", Closed, (CANCELLING,), "the last writer", (), FREE),
    Row("14a", Closed, (CANCELLING,), "others still write", (), effect="one writer less"),
    Row("14b", Closed, (TRANSFERRING, COMPLETE), "the rank is done", ()),
    Row(
        "14c",
        Closed,
        (TRANSFERRING,),
        "accepted, and not done",
        ("gave up",),
        effect=f"one writer less; {_FAILS}",
        source=OURS,
    ),
    Row("16", Released, ANY, "another rid, or none", (), effect="rid is tombstoned for request_timeout"),
    Row("17", Released, (TRANSFERRING,), "rid's own slot, with writers", (), CANCELLING, "rid is tombstoned"),
    Row("17a", Released, (COMPLETE,), "rid's own slot, with writers", (), CANCELLING, "rid is tombstoned", OURS),
    Row("18", Released, (TRANSFERRING, COMPLETE), "rid's own slot, no writers", (), FREE, "rid is tombstoned"),
    Row("19", Expected, ANY, "", (), effect="no tombstone any more; rid's record is not evicted"),
    Row("21", Claimed, (COMPLETE,), "rid's own slot, unclaimed", (), effect="nobody else takes it", source=OURS),
    Row("21a", Claimed, ANY, "else", ("NotClaimable",), source=OURS),
)
