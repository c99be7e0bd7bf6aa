"""A tiny model under examination: greedy runs of our engine, and what is counted of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from tilert_ref.engine.api import FinishReason, Token
from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import DraftStats, decode_mtp, decode_plain, prefill, prefill_mtp, until_stop
from tilert_ref.engine.model import logits
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.model_files import InputError
from tilert_ref.router.detokenize import Detokenizer, read_tokenizer
from tilert_ref.router.parsing import Parsing, choose_parsing
from tilert_ref.tiny.chat import DEEPSEEK, GLM
from tilert_ref.tiny.families import CONTEXT
from tilert_ref.tiny.golden import Golden, Speaker
from tilert_ref.tiny.margins import Margin, WatchingSampler

DRAFTS = 3
DIALECTS = {"glm47": GLM, "dsv32": DEEPSEEK}
"""The dialect that goes with the grammar which the router chooses for a tokenizer."""


@dataclass
class Run:
    """A greedy answer. windows: what each verified window gave, before a stop token or the budget cut it."""

    ids: list[int]
    reason: FinishReason
    margins: list[Margin]
    windows: list[list[int]] = field(default_factory=list)

    def is_exactly(self, answer: Sequence[int]) -> bool:
        """The whole answer, token by token, and then a stop token."""
        return self.reason == "stop" and self.ids == list(answer)


@dataclass
class Drafted:
    """How often the draft at each position of a window held. Drafts behind a stop token are drafts of nothing and
    don't count. `held` is unconditional, as in vLLM's metrics: a draft behind a wrong one doesn't hold.
    """

    asked: list[int] = field(default_factory=lambda: [0] * DRAFTS)
    held: list[int] = field(default_factory=lambda: [0] * DRAFTS)

    def add(self, window: Sequence[int], stops: frozenset[int]) -> None:
        """One verified window: the tokens of its accepted drafts, and one more."""
        stop = next((i for i, token in enumerate(window) if token in stops), DRAFTS)
        for i in range(min(stop + 1, DRAFTS)):
            self.asked[i] += 1
            self.held[i] += len(window) > i + 1

    def merge(self, other: "Drafted") -> None:
        self.asked = [a + b for a, b in zip(self.asked, other.asked, strict=True)]
        self.held = [a + b for a, b in zip(self.held, other.held, strict=True)]

    @property
    def rates(self) -> list[float]:
        return [held / asked if asked else 0.0 for held, asked in zip(self.held, self.asked, strict=True)]

    @property
    def mean_length(self) -> float:
        """Tokens a verified window gives on average: its accepted drafts and one more."""
        return 1 + sum(self.rates)


class Subject:
    """The model, and how it is spoken to. drafted: what was counted so far, by kind of task."""

    def __init__(self, engine: RefEngine, speaker: Speaker, parsing: Parsing):
        self.engine, self.speaker, self.parsing = engine, speaker, parsing
        self.stops = frozenset(engine.model.config.eos_token_ids)
        self.drafted: dict[str, Drafted] = {}

    @classmethod
    def load(cls, directory: Path, device: str, say: Callable[[str], None]) -> "Subject":
        """Raises ValueError for a tokenizer that speaks neither dialect, and load_engine's errors."""
        path = directory / "tokenizer.json"
        tokenizer = read_tokenizer(path)
        parsing = choose_parsing("auto", Detokenizer(tokenizer))
        if parsing is None:
            raise InputError(f"{path} has the tokens of none of these answer formats: {', '.join(DIALECTS)}")
        if (room := load_config(directory).max_position_embeddings) < CONTEXT:
            raise InputError(f"max_position_embeddings = {room}, the scorecard's prompts need {CONTEXT}")
        engine = load_engine(directory, device=device, max_seq_len=CONTEXT, num_mtp=DRAFTS, progress=say)
        return cls(engine, Speaker(DIALECTS[parsing.grammar.name], tokenizer), parsing)

    def run(self, kind: str, prompt: Sequence[int], budget: int, *, ignore_stops: bool = False) -> Run:
        """Prefill, then decoding with drafts."""
        model, cache, sampler = self.engine.model, self.engine.cache, WatchingSampler()
        hidden = prefill(model, cache, prompt)
        first = sampler(_last_logits(self.engine, hidden)).id
        prefill_mtp(model, cache, [*prompt[1:], first], hidden)
        steps = decode_mtp(model, cache, len(prompt), prompt[-1], first, sampler, DRAFTS, DraftStats())
        stops = frozenset() if ignore_stops else self.stops
        run = self._collect(steps, first, sampler, budget, stops)
        tally = self.drafted.setdefault(kind, Drafted())
        for window in run.windows:
            tally.add(window, stops)
        return run

    def run_after(self, cached: int, prompt: Sequence[int], budget: int) -> Run:
        """As run, without drafts, for a prompt whose first `cached` tokens were prefilled before."""
        model, cache, sampler = self.engine.model, self.engine.cache, WatchingSampler()
        first = sampler(_last_logits(self.engine, prefill(model, cache, prompt, cached=cached))).id
        steps = decode_plain(model, cache, len(prompt), first, sampler)
        return self._collect(steps, first, sampler, budget, self.stops)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Fills the cache for run_after."""
        prefill(self.engine.model, self.engine.cache, prompt)

    def answer(self, question: Golden, spare: int = 0) -> Run:
        """An answer that may be as long as the right one and its stop token, and `spare` tokens more."""
        return self.run(question.kind, question.prompt, len(question.answer) + 2 + spare)

    def text(self, ids: Sequence[int]) -> str:
        return self.parsing.detokenizer.decode(ids)

    def _collect(
        self,
        steps: Iterator[list[Token]],
        first: int,
        sampler: WatchingSampler,
        budget: int,
        stops: frozenset[int],
    ) -> Run:
        run = Run([], "length", sampler.margins)
        for event in until_stop(_watched(steps, run.windows), first, budget, stops):
            if isinstance(event, list):
                run.ids += [token.id for token in event]
            else:
                run.reason = event
        run.margins = list(islice(sampler.margins, len(run.ids)))
        return run


def _watched(steps: Iterator[list[Token]], windows: list[list[int]]) -> Iterator[list[Token]]:
    for tokens in steps:
        windows.append([token.id for token in tokens])
        yield tokens


@torch.inference_mode()
def _last_logits(engine: RefEngine, hidden: torch.Tensor) -> torch.Tensor:
    return logits(engine.model.weights, hidden[-1:])[0]
