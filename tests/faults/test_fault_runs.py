"""Real processes, real NIXL, and what goes wrong between them; `scripts/fault_injector.py` runs many more of these.

TILERT_REF_SOAK=1: every process is killed and stopped at every step of the protocol, 100 seeds, and 1,000 requests.
"""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("nixl", reason="the transport under test is NIXL")

import fault_world
from fault_plan import PROCESSES, Ask, Plan, plan_of
from fault_proxies import STEPS, Fault
from fault_world import World

SOAK = os.environ.get("TILERT_REF_SOAK") == "1"
SEEDS = range(100) if SOAK else (0, 6, 10, 11, 12, 15)
EVERY = [(what, target, step) for what in ("kill", "stop") for target in PROCESSES for step in STEPS]
CHOSEN = [("kill", "rank1", "reply"), ("stop", "decode", "announce"), ("kill", "engine", "decode_reply")]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


@pytest.mark.parametrize("seed", SEEDS)
def test_seed(world: World, seed: int) -> None:
    report = world.run(plan_of(seed))
    assert not report.wrong, report


@pytest.mark.parametrize(("what", "target", "step"), EVERY if SOAK else CHOSEN)
def test_a_process_ends_or_stops_at_a_step(world: World, what: str, target: str, step: str) -> None:
    """Three requests; it happens to the second one's (or its second rank's) message."""
    asks = [
        Ask(2**28 + number, 130, stream=number > 0, prefill_ms=5, step_ms=2, start=0.02 * number) for number in range(3)
    ]
    report = world.run(Plan(asks, [Fault(step, what, 1, target, 1.0)]))
    assert report.happened, "the step never came"
    assert not report.wrong, report


def test_an_undisturbed_run_has_only_answers(world: World) -> None:
    """Else the checks above would pass on errors alone."""
    report = world.run(Plan([Ask(2**29 + number, 65 + number, stream=number == 0) for number in range(2)], []))
    assert report.answers == ["200 complete"] * 2 and not report.wrong, report


def test_wrong_tokens_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, right = Ask(2**29 + 10), fault_world.checksum
    (answer,) = world.ask_all([ask])
    assert world.check(ask, answer, disturbed=False) == []
    monkeypatch.setattr(fault_world, "checksum", lambda plane: right(plane) ^ 1)
    (wrong,) = world.check(ask, answer, disturbed=False)
    assert wrong.startswith("WRONG TOKENS")
