"""`tilert-ref scorecard [DIR]`: what a trained tiny model can do, and how sure it is, in our engine alone.

Every task is a fresh instance: its seed is f"score/{section}/{number}", which neither training nor the golden prompts
use. An answer is right if all of it is right, thought and stop token included.
"""

import argparse
import json
import random
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from tilert_ref.model_files import InputError, says_bad_input
from tilert_ref.router.parser import Call, Content, Event, Rejected
from tilert_ref.tiny import NAMES, golden, model_dir, skills
from tilert_ref.tiny.golden import Golden
from tilert_ref.tiny.margins import EDGES, NEAR_TIE_ULP, Margin, bars, histogram
from tilert_ref.tiny.scoring import Drafted, Subject
from tilert_ref.tiny.skills import Memory, Task

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is asked. only: says so, if it is not everything."""

    name: str
    conversations: int  # with codes over the whole context
    questions: int  # in each of them and each distance bucket
    tasks: int  # of each skill
    calls: int
    refusals: int
    golden: int
    tokens: int  # of each golden answer
    only: str = ""


FULL = Plan(
    "full",
    conversations=4,
    questions=8,
    tasks=32,
    calls=40,
    refusals=16,
    golden=golden.GOLDEN_PROMPTS,
    tokens=golden.GOLDEN_TOKENS,
)
QUICK = Plan(
    "quick",
    conversations=1,
    questions=2,
    tasks=2,
    calls=4,
    refusals=2,
    golden=8,
    tokens=48,
    only="one conversation for recall, a sixteenth of the tasks, 48 tokens of 8 golden prompts",
)


@dataclass(frozen=True)
class Bound:
    """One demand on one score."""

    score: str
    limit: float
    why: str
    at_most: bool = False

    def complaint(self, value: float) -> str:
        """What is wrong with the value; empty if nothing is."""
        if value <= self.limit if self.at_most else value >= self.limit:
            return ""
        return f"{self.score} {value:.4g} {'>' if self.at_most else '<'} {self.limit:g}"


_LEARNED = "learned or not: what is learned hardly ever misses"

BOUNDS = (
    Bound("recall", 0.99, "in the worst distance bucket: a wrong KV row must show as a wrong answer"),
    *(Bound(skill, 0.9, _LEARNED) for skill in ("add", "copy", "sort", "answer", "recite", "tool call")),
    Bound("first draft", 0.80, "the share of windows whose first draft holds: drafting must be worth testing"),
    Bound(
        "golden answers",
        0.97,
        "share of golden positions that are right; behind a wrong token all count as wrong: a prompt may cost 1.6%",
    ),
    Bound("near ties", 0.001, "share of golden positions that another order of summation may flip", at_most=True),
)
"""What a model must reach. "tool refusal" has no bound: the committed models call a tool that they know from training
even where it isn't offered. They never learned better, so a bound would only say so again."""

WRONG_KEPT = 10
RECALL_ROOM = 96
"""Tokens kept free behind a conversation full of codes, for a question and its answer."""

# Sections: each returns what goes into the JSON.


@dataclass
class Tally:
    """Answers of one kind."""

    asked: int = 0
    right: int = 0

    def add(self, right: bool) -> None:
        self.asked, self.right = self.asked + 1, self.right + right


DISTANCES = (0, 256, 1024, 2048, 3072, 4096)
"""Lower ends of the distance buckets, in tokens from a code's entry to the answer. The first is what a sparse model
sees whole (index_topk 256); the last reaches to the end of the trained context."""


def bucket(distance: int) -> int:
    """Index of the distance's bucket in DISTANCES. Raises ValueError for a negative distance."""
    if distance < 0:
        raise ValueError(f"a distance of {distance} tokens: the entry stands behind the answer")
    return sum(distance >= start for start in DISTANCES) - 1


def bucket_name(index: int) -> str:
    end = f"{DISTANCES[index + 1] - 1}" if index + 1 < len(DISTANCES) else "on"
    return f"{DISTANCES[index]}-{end}"


@dataclass(frozen=True)
class Codes:
    """A conversation that fills the context with codes. starts: key -> token at which its entry begins."""

    memory: Memory
    task: Task
    ids: list[int]
    starts: dict[str, int]


def codes_over(subject: Subject, seed: str, tokens: int, filler: int) -> Codes:
    """Codes, with `filler` lines of known text strewn between, that take up `tokens` tokens or a few less."""
    lines = [line for work in skills.works().values() for line in work]
    entries = tokens // 8
    while True:
        rng, memory = random.Random(seed), Memory()
        task = skills.remember(rng, memory, entries, [rng.choice(lines) for _ in range(filler)])
        said = subject.speaker.dialect.render(task.messages(thinking=False))
        encoded = subject.speaker.tokenizer.encode(said, add_special_tokens=False)
        if len(encoded.ids) <= tokens:
            begins = [start for start, _ in encoded.offsets]
            starts = {key: bisect_right(begins, said.index(f" {key}=") + 1) - 1 for key in memory.codes}
            return Codes(memory, task, encoded.ids, starts)
        entries -= max(1, (len(encoded.ids) - tokens) // 9)


def questions(subject: Subject, codes: Codes, rng: random.Random, each: int) -> Iterator[tuple[int, Golden]]:
    """(bucket, question), `each` of every bucket that the conversation has entries in, in random order."""
    left = [each] * len(DISTANCES)
    for number, key in enumerate(rng.sample(list(codes.memory.codes), len(codes.memory.codes))):
        task = skills.recall(rng, codes.memory, key)
        question = subject.speaker.ask([codes.task], task, thinking=number % 2 == 0)
        where = bucket(len(question.prompt) - codes.starts[key])
        if left[where]:
            left[where] -= 1
            yield where, question


def score_recall(subject: Subject, plan: Plan, say: Say) -> dict[str, Any]:
    """One code at a time, by the distance of its entry. A conversation is prefilled once, each question goes on from
    there."""
    tallies, wrong = [Tally() for _ in DISTANCES], list[dict]()
    room = subject.engine.max_seq_len - RECALL_ROOM
    for i in range(plan.conversations):
        codes = codes_over(subject, f"score/recall/{i}", room, filler=(0, 8)[i % 2])
        subject.prefill(codes.ids)
        rng = random.Random(f"score/recall/{i}/questions")
        for where, question in questions(subject, codes, rng, plan.questions):
            if question.prompt[: len(codes.ids)] != codes.ids:
                raise RuntimeError("the conversation's tokens are not the beginning of the question's")
            run = subject.run_after(len(codes.ids), question.prompt, len(question.answer) + 2)
            right = run.is_exactly(question.answer)
            tallies[where].add(right)
            if not right:
                wrong.append(miss(subject, question, run.ids, distance=bucket_name(where)))
        say(f"recall: conversation {i + 1} of {plan.conversations}, {len(codes.ids)} tokens")
    buckets = {bucket_name(i): counted(tally) for i, tally in enumerate(tallies) if tally.asked}
    return {"buckets": buckets, "wrong": wrong[:WRONG_KEPT]}


def score_skills(subject: Subject, plan: Plan, say: Say) -> dict[str, Any]:
    """The other skills without tools, with and without thoughts; long sums always with one."""
    report, wrong = dict[str, Any](), list[dict]()
    for kind, make in SKILLS.items():
        tally = Tally()
        for i in range(plan.tasks):
            task = make(random.Random(f"score/{kind}/{i}"), i)
            question = subject.speaker.ask([], task, thinking=i % 2 == 0 or kind == "add")
            run = subject.answer(question)
            right = run.is_exactly(question.answer)
            tally.add(right)
            if not right:
                wrong.append(miss(subject, question, run.ids))
        report[kind] = counted(tally)
        say(f"{kind}: {tally.right} of {tally.asked}")
    return {"kinds": report, "wrong": wrong[:WRONG_KEPT]}


def long_sum(rng: random.Random, number: int) -> Task:
    """Two numbers of three digits each."""
    while True:
        task = skills.add(rng, 3)
        if task.thought.count(", ") == 2 and min(map(len, re.findall(r"\d+", task.user))) == 3:
            return task


def known_answer(rng: random.Random, number: int) -> Task:
    """Every way to ask, in turn."""
    pairs = [(question, text) for ways, text in skills.known_answers() for question in ways]
    question, text = pairs[number % len(pairs)]
    return Task("answer", question, "I know this.", text)


SKILLS: dict[str, Callable[[random.Random, int], Task]] = {
    "add": long_sum,
    "copy": lambda rng, number: skills.copy(rng, rng.randint(4, 40)),
    "sort": lambda rng, number: (skills.sort_words, skills.sort_numbers)[number % 2](rng, rng.randint(4, 12)),
    "answer": known_answer,
    "recite": lambda rng, number: skills.recite(rng, list(skills.works())[number % len(skills.works())]),
}


def tool_tasks(seed: str, wanted: int, refusal: bool) -> Iterator[Task]:
    """Requests that one of the offered tools serves, or (refusal) that none does."""
    fitting = (skills.use_tool(rng, skills.offer(rng)) for i in count() for rng in [random.Random(f"{seed}/{i}")])
    return islice((task for task in fitting if (task.call is None) == refusal), wanted)


def score_tools(subject: Subject, plan: Plan, say: Say) -> dict[str, Any]:
    """Calls and refusals as the router reads them out of the answer."""
    report, wrong = dict[str, Any](), list[dict]()
    for kind, wanted in (("call", plan.calls), ("refusal", plan.refusals)):
        tally = Tally()
        for i, task in enumerate(tool_tasks(f"score/{kind}", wanted, kind == "refusal")):
            question = subject.speaker.ask([], task, thinking=i % 2 == 0)
            run = subject.answer(question, spare=64)
            right = run.reason == "stop" and fits(task, read(subject, task, question.prompt, run.ids))
            tally.add(right)
            if not right:
                wrong.append(miss(subject, question, run.ids))
        report[kind] = counted(tally)
        say(f"tool {kind}: {tally.right} of {tally.asked}")
    return {"kinds": report, "wrong": wrong[:WRONG_KEPT]}


def read(subject: Subject, task: Task, prompt: Sequence[int], ids: Sequence[int]) -> list[Event]:
    """The answer's parts."""
    parser = subject.parsing.parser({"tools": list(task.tools)}, prompt)
    return parser.feed(subject.text(ids)) + parser.finish()


def fits(task: Task, events: Sequence[Event]) -> bool:
    """One call of the right tool with the right arguments, or none and the words of refusal."""
    calls = [event for event in events if isinstance(event, Call | Rejected)]
    if task.call is None:
        return not calls and "".join(e.text for e in events if isinstance(e, Content)) == task.answer
    if len(calls) != 1 or not isinstance(calls[0], Call):
        return False
    try:
        arguments = json.loads(calls[0].arguments)
    except ValueError:
        return False
    return calls[0].name == task.call.name and arguments == task.call.arguments


def score_margins(subject: Subject, plan: Plan, say: Say) -> dict[str, Any]:
    """Gaps between the two best logits, over the greedy answers to the golden prompts."""
    margins, places, right = list[Margin](), list[tuple[int, int]](), 0
    spoken = subject.speaker
    prompts = golden.golden_prompts(spoken.dialect, spoken.tokenizer, plan.golden)
    for i, prompt in enumerate(prompts):
        run = subject.run(prompt.kind, prompt.prompt, plan.tokens, ignore_stops=True)
        margins += run.margins
        places += [(i, position) for position in range(len(run.margins))]
        right += sum(a == b for a, b in zip(run.ids, prompt.answer, strict=False))
        if (i + 1) % 4 == 0:
            say(f"margins: golden prompt {i + 1} of {len(prompts)}")
    smallest = sorted(range(len(margins)), key=lambda i: margins[i].ulps)[:WRONG_KEPT]
    return {
        "prompts": len(prompts),
        "positions": len(margins),
        "right": right,
        "near_ties": sum(margin.near_tie for margin in margins),
        "histogram": dict(zip(map(str, EDGES), histogram(margins), strict=True)),
        "smallest": [
            {"prompt": at[0], "kind": prompts[at[0]].kind, "position": at[1], "ulp": round(margins[i].ulps, 2)}
            for i in smallest
            for at in [places[i]]
        ],
    }


def drafts_report(subject: Subject) -> dict[str, Any]:
    """By kind of task, and all together."""
    total = Drafted()
    for tally in subject.drafted.values():
        total.merge(tally)
    kinds = dict(sorted(subject.drafted.items())) | {"all": total}
    return {
        kind: asdict(tally) | {"rates": tally.rates, "mean_length": tally.mean_length} for kind, tally in kinds.items()
    }


def counted(tally: Tally) -> dict[str, int]:
    return {"asked": tally.asked, "right": tally.right}


def miss(subject: Subject, question: Golden, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    """A wrong answer, for the JSON."""
    asked = subject.text(question.prompt)[-120:]
    return {
        "kind": question.kind,
        **more,
        "asked": asked,
        "right": subject.text(question.answer),
        "got": subject.text(ids),
    }


# The whole card


def score(subject: Subject, plan: Plan, say: Say) -> dict[str, Any]:
    """All sections, the scores that have bounds, and what falls short of them."""
    card: dict[str, Any] = {
        "architecture": subject.engine.model.config.architecture,
        "index_topk": subject.engine.model.config.index_topk,
        "part": plan.name,
        "recall": score_recall(subject, plan, say),
        "skills": score_skills(subject, plan, say),
        "tools": score_tools(subject, plan, say),
        "margins": score_margins(subject, plan, say),
    }
    card["drafts"] = drafts_report(subject)
    card["scores"] = scores_of(card)
    card["complaints"] = complaints(card["scores"])
    return card


def share(counts: dict[str, int]) -> float:
    return counts["right"] / counts["asked"] if counts["asked"] else 0.0


def scores_of(card: dict[str, Any]) -> dict[str, float]:
    """The values that BOUNDS speak of."""
    margins = card["margins"]
    return {
        "recall": min(map(share, card["recall"]["buckets"].values())),
        **{kind: share(counts) for kind, counts in card["skills"]["kinds"].items()},
        **{f"tool {kind}": share(counts) for kind, counts in card["tools"]["kinds"].items()},
        "first draft": card["drafts"]["all"]["rates"][0],
        "golden answers": margins["right"] / margins["positions"],
        "near ties": margins["near_ties"] / margins["positions"],
    }


def complaints(scores: dict[str, float]) -> list[str]:
    return [said for bound in BOUNDS if (said := bound.complaint(scores[bound.score]))]


def verdict(card: dict[str, Any]) -> str:
    """The last line."""
    return f"scorecard: fail ({'; '.join(card['complaints'])})" if card["complaints"] else "scorecard: pass"


def lines(card: dict[str, Any]) -> Iterator[str]:
    """The card as text, without its last line."""
    sparse = f"sparse, top {card['index_topk']}" if card["index_topk"] else "dense"
    yield f"{card['architecture']}, {sparse}"
    yield "recall by distance from the code's entry to the answer, in tokens"
    yield from (counts_line(name, counts) for name, counts in card["recall"]["buckets"].items())
    yield "skills: the whole answer right"
    yield from (counts_line(name, counts) for name, counts in card["skills"]["kinds"].items())
    yield "tools: the right call with the right arguments; a refusal where no tool fits"
    yield from (counts_line(name, counts) for name, counts in card["tools"]["kinds"].items())
    yield "drafts that held, by position, and tokens a window"
    for kind, drafts in card["drafts"].items():
        yield f"  {kind:<14} " + "  ".join(f"{rate:.4f}" for rate in drafts["rates"]) + f"  {drafts['mean_length']:.2f}"
    margins = card["margins"]
    yield f"margins over {margins['positions']} greedy positions of {margins['prompts']} golden prompts"
    yield f"  right {margins['right']}, below {NEAR_TIE_ULP:g} ulp {margins['near_ties']}"
    yield from bars(list(margins["histogram"].values()))
    yield "  smallest: " + ", ".join(
        f"{m['ulp']:g} ulp ({m['kind']} prompt {m['prompt']}, token {m['position']})" for m in margins["smallest"][:5]
    )
    for wrong in (*card["recall"]["wrong"], *card["skills"]["wrong"], *card["tools"]["wrong"]):
        yield f"  wrong {wrong['kind']}: {wrong['asked']!r} -> {wrong['got']!r}, right is {wrong['right']!r}"


def counts_line(name: str, counts: dict[str, int]) -> str:
    return f"  {name:<14} {counts['right']:>4} of {counts['asked']:<4} {share(counts):.4f}"


@says_bad_input
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    plan = QUICK if args.quick else FULL
    if args.json and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: there is no directory {args.json.absolute().parent}")
    directory = model_dir(args.model) if args.model in NAMES else Path(args.model)
    say(f"scoring {directory}")
    card = score(Subject.load(directory, args.device, say), plan, say)
    print("\n".join(lines(card)))
    if args.json:
        args.json.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"part: {plan.name}" + (f" (only {plan.only})" if plan.only else ""))
    print(verdict(card))
    return bool(card["complaints"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilert-ref scorecard",
        description="Score a trained tiny model with our engine alone. Exit status 0: pass, 1: fail, 2: not scored.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="tiny-glm5",
        metavar="DIR",
        help=f"checkpoint directory, or one of {', '.join(NAMES)} (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK.only}; under a minute for a dense model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
