"""How sure a model is of its greedy tokens: the gap between the two best logits, counted in bf16 steps.

Logits are bf16 values, so the step of the best one says which gaps a change of summation order can close.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tilert_ref.engine.api import SamplingParams, Token
from tilert_ref.engine.sampling import Sampler

NEAR_TIE_ULP = 2.0
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Lower ends of the histogram's bars, in ulp of the best logit."""


def bf16_ulp(x: float) -> float:
    """Distance from |x| to the next larger bf16 value (8 bits of significand); the subnormals' step for 0."""
    if x == 0 or abs(x) < 2.0**-126:
        return 2.0**-133
    return 2.0 ** (math.frexp(abs(x))[1] - 8)


@dataclass(frozen=True)
class Margin:
    """The two best logits at one position."""

    best: float
    second: float

    @property
    def ulps(self) -> float:
        return (self.best - self.second) / bf16_ulp(self.best)

    @property
    def near_tie(self) -> bool:
        return self.ulps < NEAR_TIE_ULP


class WatchingSampler(Sampler):
    """A greedy sampler that keeps the margin of every token it gives, in order."""

    def __init__(self) -> None:
        super().__init__(SamplingParams(temperature=0.0))
        self.margins: list[Margin] = []

    def __call__(self, logits: torch.Tensor) -> Token:
        self.margins.append(Margin(*logits.topk(2).values.tolist()))
        return super().__call__(logits)


def histogram(margins: Iterable[Margin]) -> list[int]:
    """Counts of gaps in ulp: EDGES[i] <= gap < EDGES[i + 1], the last bar without an end."""
    counts = [0] * len(EDGES)
    for margin in margins:
        counts[sum(margin.ulps >= edge for edge in EDGES) - 1] += 1
    return counts


def bars(counts: Sequence[int], width: int = 50) -> list[str]:
    """One line of text a bar; a bar that isn't empty shows at least one mark."""
    total, lines = sum(counts), []
    for i, count in enumerate(counts):
        end = f"{EDGES[i + 1]:>4}" if i + 1 < len(EDGES) else "   …"
        marks = "#" * max(count > 0, round(width * count / max(total, 1)))
        lines.append(f"  {EDGES[i]:>4} to {end} ulp  {count:>6}  {marks}".rstrip())
    return lines
