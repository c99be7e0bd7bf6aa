#!/usr/bin/env python
"""Faults between real processes over real NIXL, each run chosen by one integer.

    python scripts/fault_injector.py --seed 17                  replay one run, with what happened in it
    python scripts/fault_injector.py --runs 500 --json FILE     sweep, with a table at the end
    python scripts/fault_injector.py --load                     1,000 requests one by one, then 32 at once, two nodes

Exit status 1 if an answer was wrong, a slot stuck, or anything leaked.
"""

import argparse
import json
import platform
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests/faults")]

from fault_plan import Ask, Plan, plan_of  # noqa: E402
from fault_world import Report, World  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first run's (default 0)")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--load", action="store_true", help="no faults: many requests")
    parser.add_argument("--json", type=Path, help="adds the figures to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: the processes are taken down
    figures = load() if args.load else sweep(args.seed, args.runs)
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(known | {"load" if args.load else "sweep": figures}, indent=2) + "\n")
    return 1 if figures["wrong"] else 0


def sweep(first: int, runs: int) -> dict[str, Any]:
    began = time.monotonic()
    reports: dict[int, Report] = {}
    with World() as world:
        started = round(time.monotonic() - began, 1)
        for seed in range(first, first + runs):
            report = reports[seed] = world.run(plan_of(seed))
            if report.wrong or runs == 1:
                tell(seed, report)
            elif (seed - first) % 25 == 24:
                print(f"seed {seed}: {len(reports)} runs in {time.monotonic() - began:.0f} s", flush=True)
    return summary(first, reports, started, time.monotonic() - began)


def tell(seed: int, report: Report) -> None:
    plan = plan_of(seed)
    for name, values in (("asked", plan.asks), ("planned", plan.faults), *vars(report).items()):
        print(f"seed {seed} {name}: {values}", flush=True)


def summary(first: int, reports: dict[int, Report], started: float, seconds: float) -> dict[str, Any]:
    answers = Counter(answer for report in reports.values() for answer in report.answers)
    faults = Counter(_kind(fault) for report in reports.values() for fault in report.happened)
    restarts = Counter(name for report in reports.values() for name in report.restarted)
    settled = sorted(report.settled_s for report in reports.values())
    wrong = {seed: report.wrong for seed, report in reports.items() if report.wrong}
    for title, counter in (("answers", answers), ("faults", faults), ("restarts", restarts)):
        print(f"\n{title}")
        for name, count in counter.most_common():
            print(f"  {count:6}  {name}")
    print(f"\nall as before within {settled[-1]} s, median {settled[len(settled) // 2]} s")
    print(f"{len(reports)} runs from seed {first} in {seconds:.0f} s (start {started} s): {len(wrong)} with findings")
    return {
        "seeds": [first, first + len(reports) - 1],
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "settled_s": {"median": settled[len(settled) // 2], "max": settled[-1]},
        "requests": sum(answers.values()),
        "answers": dict(answers.most_common()),
        "faults": dict(faults.most_common()),
        "restarts": dict(restarts.most_common()),
        "wrong": wrong,
    }


def _kind(fault: str) -> str:
    fields = dict(part.split("=", 1) for part in fault.removeprefix("Fault(").rstrip(")").split(", "))
    target = fields["target"].strip("'")
    return " ".join([fields["what"].strip("'"), *([target] if not target.isdecimal() and target else [])])


def load(sequential: int = 1000, concurrent: int = 32) -> dict[str, Any]:
    """Requests one by one, then all at once, to two nodes; per_node: how many each of them decoded."""
    wrong: list[str] = []
    with World(nodes=2) as world:
        began = time.monotonic()
        for number in range(sequential):
            wrong += run_load(world, [Ask(number, seq_len=4 + number * 7 % 500, stream=number % 2 == 0)])
        after = time.monotonic()
        asks = [Ask(10_000 + n, seq_len=4 + n * 15, stream=n % 2 == 0, step_ms=n % 3) for n in range(concurrent)]
        wrong += run_load(world, asks, patient=True)
        ended = time.monotonic()
        per_node = world.decodes()
        wrong += world.settle()
    times = {"sequential_s": round(after - began, 1), "concurrent_s": round(ended - after, 1)}
    figures = {"sequential": sequential, "concurrent": concurrent} | times | {"per_node": per_node, "wrong": wrong}
    print(figures)
    return figures


def run_load(world: World, asks: list[Ask], patient: bool = False) -> list[str]:
    """Every answer has to be complete and right. patient: what is refused because all nodes are busy asks again."""
    wrong = []
    plan = Plan(asks, [])
    while plan.asks:
        answers = world.ask_all(plan.asks)
        busy = [ask for ask, answer in zip(plan.asks, answers, strict=True) if answer.status == 429 and patient]
        for ask, answer in zip(plan.asks, answers, strict=True):
            if ask not in busy:
                wrong += world.check(ask, answer, disturbed=False)
        plan = Plan(busy, [])
    return wrong


if __name__ == "__main__":
    sys.exit(main())
