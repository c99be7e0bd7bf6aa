"""The table in transitions.py is what the state machine does: every row is driven, and no way out of it lacks a row."""

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from test_admission_table import TIMEOUT, Desk

from tilert_ref.connector import admission, codec
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
    Offer,
    Released,
    Reply,
)
from tilert_ref.connector.codec import Accept, Announce, Done, Reject
from tilert_ref.connector.layout import BF16, BufferLayout, model_profile
from tilert_ref.connector.transitions import CANCELLING, COMPLETE, FREE, REASONS, ROWS, TRANSFERRING, Row

LAYOUT = BufferLayout(model_profile(4, True, False), BF16, 1000)
Scene = Callable[[Desk, str], Event]
SCENES: dict[str, Scene] = {}
CASES = [pytest.param(row, state, id=f"{row.number}-{state}") for row in ROWS for state in row.states]


def scene(number: str) -> Callable[[Scene], Scene]:
    """Registers what has to happen for a row's guard to hold. Returns the row's event.

    It is given a desk for two ranks whose slot 0 is in the row's state: by request z, of which connection h was
    accepted (rank 0), and in state COMPLETE also h1 (rank 1).
    """

    def register(function: Scene) -> Scene:
        SCENES[number] = function
        return function

    return register


def says(desk: Desk, conn: str, rid: str, **fields: Any) -> Announced:
    """The event that conn, new if it is not yet open, announces."""
    with contextlib.suppress(ValueError):
        desk.connect(conn)
    return Announced(conn, Announce(**({"rid": rid, "rank": 0, "seq_len": 70, "last_prompt_token": 5} | fields)))


def done(desk: Desk, conn: str, said: bool = True) -> DoneReceived:
    accept = desk.accepted[conn]
    return DoneReceived(conn, Done(done=said, rid=accept.rid, rank=accept.rank, generation=accept.generation))


def prepared(state: str, row: str) -> Desk:
    desk = Desk(senders=2, slots=2 if row in ("7a", "7b", "8c") else 1, layout=LAYOUT if row == "1d" else None)
    geometry = {"tilert_ref": LAYOUT.geometry()} if row == "1d" else {}
    if state != FREE:
        desk.announce("h", "z", **geometry)
    if state == COMPLETE:
        desk.announce("h1", "z", rank=1, **geometry)
        for conn in ("h", "h1"):
            desk.done(conn)
    if state == CANCELLING:
        desk.handle(Released("z"))
    return desk


@scene("0")
def _(desk: Desk, _: str) -> Event:
    return Connected("c")


@scene("0a")
def _(desk: Desk, _: str) -> Event:
    desk.handle(says(desk, "c", "y", seq_len=0))
    return says(desk, "c", "y")


@scene("0b")
def _(desk: Desk, _: str) -> Event:
    return says(desk, "c", "y", failed="why")


@scene("0c")
def _(desk: Desk, state: str) -> Event:
    return says(desk, "c", "z", failed="why", rank=0 if state == COMPLETE else 9)


@scene("0d")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Released("y"))
    return says(desk, "c", "y", failed="why")


def refused(number: str, **fields: Any) -> None:
    SCENES[number] = lambda desk, _: says(desk, "c", "y", **fields)


refused("1", seq_len=1001)
refused("1a", seq_len=0)
refused("1b", rank=2)
refused("1c", kv_scales=[0.5])
refused("1d")


@scene("2")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Released("y"))
    return says(desk, "c", "y")


@scene("3")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Released("y"))
    desk.now = TIMEOUT
    return says(desk, "c", "y")


@scene("4")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Expected("z"))
    return says(desk, "c", "z", rank=1)


@scene("5")
def _(desk: Desk, _: str) -> Event:
    desk.done("h")
    return says(desk, "c", "z")


@scene("5a")
def _(desk: Desk, _: str) -> Event:
    return says(desk, "c", "z", rank=1, seq_len=71)


@scene("6")
def _(desk: Desk, _: str) -> Event:
    return says(desk, "c", "z", rank=1)


@scene("7")
def _(desk: Desk, state: str) -> Event:
    desk.now = UNCLAIMED_GRACE_S if state == COMPLETE else TIMEOUT
    desk.handle(Expected("z"))
    return says(desk, "c", "y")


@scene("7c")
def _(desk: Desk, _: str) -> Event:
    desk.now = UNCLAIMED_GRACE_S - 0.1
    return says(desk, "c", "y")


@scene("7a")
def _(desk: Desk, _: str) -> Event:
    return says(desk, "c", "y")


@scene("7b")
def _(desk: Desk, _: str) -> Event:
    assert desk.connect("first") == 0, "z misses one rank, and is offered once"
    assert desk.connect("c") == 1
    return says(desk, "c", "z", rank=1)


@scene("8")
def _(desk: Desk, _: str) -> Event:
    return says(desk, "c", "y")


@scene("8a")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Closed("h"))
    desk.now = TIMEOUT
    return says(desk, "c", "y")


@scene("8b")
def _(desk: Desk, _: str) -> Event:
    desk.now = UNCLAIMED_GRACE_S
    return says(desk, "c", "y")


@scene("8c")
def _(desk: Desk, _: str) -> Event:
    desk.connect("c")
    desk.announce("h", "z")
    return says(desk, "c", "y", any_slot=True)


@scene("9")
def _(desk: Desk, state: str) -> Event:
    """What was accepted, as "x", is over: its slot was given to z, whose state is the one to see."""
    return stale(desk, state, lambda conn: done(desk, conn))


@scene("13")
def _(desk: Desk, state: str) -> Event:
    return stale(desk, state, Closed)


def stale(desk: Desk, state: str, event: Callable[[str], Event]) -> Event:
    """As `prepared`, after a request x whose connections are done, but not closed yet."""
    fresh = Desk(senders=2)
    desk.admission, desk.accepted = fresh.admission, fresh.accepted
    for rank in (0, 1):
        desk.announce(f"x{rank}", "x", rank=rank)
        desk.done(f"x{rank}")
    desk.handle(Released("x"))
    if state != FREE:
        desk.announce("h", "z")
    if state == COMPLETE:
        desk.announce("h1", "z", rank=1)
        desk.done("h")
        desk.done("h1")
    if state == CANCELLING:
        desk.handle(Released("z"))
    return event("x0")


@scene("9a")
def _(desk: Desk, _: str) -> Event:
    desk.connect("c")
    return DoneReceived("c", Done(done=True, rid="z", rank=0, generation=1))


@scene("9b")
def _(desk: Desk, state: str) -> Event:
    if state == TRANSFERRING:  # a right done would complete the request
        desk.announce("h1", "z", rank=1)
        desk.done("h1")
    return DoneReceived("h", Done(done=True, rid="z", rank=1, generation=1))


@scene("10")
def _(desk: Desk, _: str) -> Event:
    return done(desk, "h")


@scene("10a")
def _(desk: Desk, _: str) -> Event:
    return done(desk, "h", said=False)


@scene("10b")
def _(desk: Desk, state: str) -> Event:
    if state == TRANSFERRING:
        desk.announce("again", "z")
    return done(desk, "h", said=False)


@scene("11")
def _(desk: Desk, _: str) -> Event:
    return done(desk, "h")


@scene("12")
def _(desk: Desk, _: str) -> Event:
    desk.announce("h1", "z", rank=1)
    desk.done("h1")
    return done(desk, "h")


@scene("12a")
def _(desk: Desk, _: str) -> Event:
    return done(desk, "h")


@scene("14")
def _(desk: Desk, _: str) -> Event:
    return Closed("h")


@scene("14a")
def _(desk: Desk, _: str) -> Event:
    fresh = prepared(TRANSFERRING, "")
    desk.admission, desk.accepted = fresh.admission, fresh.accepted
    desk.announce("h1", "z", rank=1)
    desk.handle(Released("z"))
    return Closed("h")


@scene("14b")
def _(desk: Desk, _: str) -> Event:
    desk.done("h")
    return Closed("h")


@scene("14c")
def _(desk: Desk, _: str) -> Event:
    return Closed("h")


@scene("16")
def _(desk: Desk, _: str) -> Event:
    return Released("y")


@scene("17")
def _(desk: Desk, _: str) -> Event:
    return Released("z")


@scene("17a")
def _(desk: Desk, _: str) -> Event:
    """A second connection of a rank that is done."""
    fresh = prepared(TRANSFERRING, "")
    desk.admission, desk.accepted = fresh.admission, fresh.accepted
    desk.announce("again", "z")
    desk.announce("h1", "z", rank=1)
    desk.done("h")
    desk.done("h1")
    return Released("z")


@scene("18")
def _(desk: Desk, _: str) -> Event:
    desk.handle(Closed("h"))
    return Released("z")


@scene("19")
def _(desk: Desk, _: str) -> Event:
    return Expected("z")


@scene("21")
def _(desk: Desk, _: str) -> Event:
    return Claimed("z")


@scene("21a")
def _(desk: Desk, state: str) -> Event:
    if state == COMPLETE:
        desk.handle(Claimed("z"))
    return Claimed("z")


def label(action: Action) -> str:
    match action:
        case Offer():
            return "offer"
        case Reply(_, Reject(error=error)):
            return f"reject `{error}`"
        case Reply(_, Accept(), None):
            return "accept"
        case Reply(_, Accept()):
            return "accept elsewhere"
        case Close():
            return "close"
        case Completed():
            return "completed"
        case Evicted():
            return "evicted"
        case GaveUp():
            return "gave up"
    raise AssertionError(action)


def drive(row: Row, state: str) -> tuple[tuple[str, ...], str, list[Action]]:
    """The actions, the slot's next state ("" if it stays), and the actions as they came."""
    desk = prepared(state, row.number)
    event = SCENES[row.number](desk, state)
    slot = 1 if row.number == "8c" else 0
    assert isinstance(event, row.event)
    assert desk.admission.snapshot(desk.now)["slots"][slot]["state"] == state, "the scene is another one"
    before = set(desk.admission.writable())
    try:
        actions = desk.handle(event)
        labels = tuple(map(label, actions))
    except NotClaimable:
        actions, labels = [], ("NotClaimable",)
    after = desk.admission.snapshot(desk.now)["slots"][slot]["state"]
    new_request = bool(set(desk.admission.writable()) - before)
    return labels, after if after != state or new_request else "", actions


def test_every_row_has_its_scene() -> None:
    assert list(SCENES) and set(SCENES) == {row.number for row in ROWS}
    assert len(SCENES) == len(ROWS), "a number stands twice"


@pytest.mark.parametrize(("row", "state"), CASES)
def test_the_machine_does_what_the_row_says(row: Row, state: str) -> None:
    actions, then, _ = drive(row, state)
    assert (actions, then) == (row.actions, row.then)


WAYS = ("_connected", "_announced", "_refuse", "_busy_reject", "_accept", "_done", "_give_up", "_closed", "_fail")
CHECKS = ("_claimed", "_released", "_check_request", "_check_geometry", "_check_tombstone", "_check_same_rid")


def ways_out() -> set[int]:
    """The lines of the machine on which one of its handlers or checks ends."""
    tree = ast.parse(inspect.getsource(admission))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = {
        node.lineno
        for name in (*WAYS, *CHECKS)
        for node in ast.walk(functions[name])
        if isinstance(node, ast.Return | ast.Raise)
    }
    assert len(found) > 30
    return found


@contextlib.contextmanager
def lines_run(of: str) -> Iterator[set[int]]:
    seen: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != of:
            return None
        if event == "line":
            seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def test_no_way_out_of_the_machine_is_without_a_row() -> None:
    with lines_run(inspect.getsourcefile(Admission)) as seen:
        for row in ROWS:
            for state in row.states:
                drive(row, state)
    assert ways_out() - seen == set()


def test_rejects_are_those_of_the_list_with_its_extras() -> None:
    rejects = [
        action.message
        for row in ROWS
        for state in row.states
        for action in drive(row, state)[2]
        if isinstance(action, Reply) and isinstance(action.message, Reject)
    ]
    listed = {reason.error: set(reason.extras) for reason in REASONS}
    assert {reject.error for reject in rejects} == listed.keys() - {"secret_required", "wrong_secret"}
    assert listed.keys() > codec.TRANSIENT_REASONS
    fields = ("rid", "rank", "detail", "busy_rid", "busy_state", "max_seq_len")
    for reject in rejects:
        assert {name for name in fields if getattr(reject, name) is not None} <= listed[reject.error], reject


def test_events_and_actions_are_all_in_the_table() -> None:
    assert {row.event for row in ROWS} == set(Event.__args__)
    labels = {label for row in ROWS for label in row.actions if not label.startswith("reject")}
    spelled = {"offer", "accept", "accept elsewhere", "close", "completed", "evicted", "gave up", "NotClaimable"}
    assert labels == spelled
