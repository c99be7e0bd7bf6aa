"""The golden prompts of a trained tiny model: fresh instances of its skills whose right answers are long.

Every answer has at least GOLDEN_TOKENS tokens, so a run of that length never leaves what the model is sure of.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from tilert_ref.tiny import skills
from tilert_ref.tiny.chat import Dialect
from tilert_ref.tiny.skills import Memory, Task

GOLDEN_TOKENS = 256
GOLDEN_PROMPTS = 64
LONGEST_PROMPT = 4096


@dataclass(frozen=True)
class Golden:
    """One prompt as token ids, and the right answer (thought included) as token ids without the stop token."""

    kind: str
    prompt: list[int]
    answer: list[int]


class Speaker:
    """Renders and tokenises the conversations of one model."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer):
        self.dialect, self.tokenizer = dialect, tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ask(self, before: list[Task], task: Task, *, thinking: bool) -> Golden:
        """`task` as the last exchange of a conversation; the earlier ones are answered without thoughts."""
        history = [message for earlier in before for message in earlier.messages(thinking=False)]
        exchange = task.messages(thinking=thinking)
        spoken = self.dialect.render(
            [*history, exchange[0]], task.tools, add_generation_prompt=True, enable_thinking=thinking
        )
        whole = self.dialect.render([*history, *exchange[:2]], task.tools)
        answer = whole.removeprefix(spoken)
        for stop in self.dialect.stops:
            answer = answer.removesuffix(stop)
        if len(spoken) + len(answer) > len(whole):
            raise ValueError(f"the template's prompt is not a prefix of the conversation: {spoken[-60:]!r}")
        return Golden(task.kind, self.ids(spoken), self.ids(answer))


def golden_prompts(dialect: Dialect, tokenizer: Tokenizer, count: int = GOLDEN_PROMPTS) -> list[Golden]:
    """`count` different prompts of every kind in turn, the same for every call."""
    speaker, made = Speaker(dialect, tokenizer), list[Golden]()
    for number, make in zip(range(count), _makers(), strict=False):
        rng = random.Random(f"golden/{number}")
        golden = speaker.ask(*make(rng, number), thinking=number % 2 == 0)
        while not _fits(golden, made):
            golden = speaker.ask(*make(rng, number), thinking=number % 2 == 0)
        made.append(golden)
    return made


def _fits(golden: Golden, others: list[Golden]) -> bool:
    """There are so few works to recite that a prompt may come twice: then another one is drawn."""
    long_enough = len(golden.answer) >= GOLDEN_TOKENS and len(golden.prompt) <= LONGEST_PROMPT
    return long_enough and all(golden.prompt != other.prompt for other in others)


def _makers() -> Iterator[Callable[[random.Random, int], tuple[list[Task], Task]]]:
    while True:
        yield from (_recite, _recall, _copy, _recall, _add, _recite, _sort, _recall)


def _recite(rng: random.Random, number: int) -> tuple[list[Task], Task]:
    title = rng.choice([title for title, lines in skills.works().items() if len("\n".join(lines)) > 800])
    return [], skills.recite(rng, title, rng.choice((0, 0, 1, 2, 3, 5, 8)) if title != "If" else None)


def _recall(rng: random.Random, number: int) -> tuple[list[Task], Task]:
    """Codes that fill a share of the longest prompt; the share grows with the prompt's number."""
    memory = Memory()
    share = (number % 32 + 1) / 32
    count = max(40, int((LONGEST_PROMPT - 320) * share / 8.2))
    return [skills.remember(rng, memory, count)], skills.recall_many(rng, memory, 36)


def _copy(rng: random.Random, number: int) -> tuple[list[Task], Task]:
    return [skills.answer(rng)], skills.copy(rng, rng.randint(262, 278))


def _add(rng: random.Random, number: int) -> tuple[list[Task], Task]:
    return [skills.add(rng, 2)], skills.add_many(rng, rng.randint(30, 38))


def _sort(rng: random.Random, number: int) -> tuple[list[Task], Task]:
    return [], skills.sort_many(rng, rng.randint(15, 16), rng.randint(8, 10))


EDGE_PROMPTS = (255, 256, 257, 4095, 4096, 4097)
"""Lengths around the trained models' index_topk, and around 64 wire pages."""


def edge_prompts(dialect: Dialect, tokenizer: Tokenizer) -> list[Golden]:
    """A prompt of each length of EDGE_PROMPTS exactly: sums for the short ones, codes to recall for the long ones."""
    speaker, made = Speaker(dialect, tokenizer), list[Golden]()
    for length in EDGE_PROMPTS:
        rng = random.Random(f"edge/{length}")
        candidates = (speaker.ask(*_edge(rng, length), thinking=True) for _ in range(2000))
        fitting = (g for g in candidates if len(g.prompt) == length and len(g.answer) >= GOLDEN_TOKENS)
        made.append(next(fitting))
    return made


def _edge(rng: random.Random, length: int) -> tuple[list[Task], Task]:
    if length < 1000:
        return [skills.add(rng, 2)], skills.add_many(rng, rng.randint(30, 38))
    memory = Memory()
    count = int((length - 135) / 8.2) - rng.randint(0, 8)
    return [skills.answer(rng), skills.remember(rng, memory, count)], skills.recall_many(rng, memory, 36)
