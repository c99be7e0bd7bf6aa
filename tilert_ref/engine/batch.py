"""The tokens that one forward pass feeds, and what each of them sees."""

from dataclasses import dataclass

import torch

from tilert_ref.engine.numerics import Kernels

Seen = list[slice | torch.Tensor]
"""Per query, the cached positions that it attends to: a slice from 0, or ascending int64 positions [n]."""


@dataclass(frozen=True)
class Batch:
    """Consecutive tokens of one sequence: where they stand and how they attend.

    absorbed: decode's form of attention; otherwise prefill's. keep_rows: KV rows and index keys of these positions are
    in the cache already and stay as they are (they came over the wire); the tokens are only run for their hidden
    states. chosen: what each query attends to where that is known beforehand, so that no indexer runs. kernels: what
    the peer's fused kernels do (numerics.py).
    """

    first: int
    positions: torch.Tensor  # [T] int64
    cos_sin: torch.Tensor  # [T, 2, rope / 2]
    absorbed: bool
    kernels: Kernels
    keep_rows: bool = False
    chosen: Seen | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.positions)

    def lengths(self) -> list[int]:
        """Cached tokens up to each query, itself included."""
        return list(range(self.first + 1, self.end + 1))

    def causal(self) -> Seen:
        """Dense attention: each query sees every token up to itself."""
        return [slice(0, length) for length in self.lengths()]

    def seen(self) -> Seen:
        """What each query attends to before any indexer chooses for it."""
        return self.causal() if self.chosen is None else self.chosen
