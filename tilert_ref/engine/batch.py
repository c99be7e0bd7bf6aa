"""The tokens that one forward pass feeds, and what each of them sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilert_ref.engine.numerics import Kernels


@dataclass(frozen=True)
class Selected:
    """The cached rows that each query attends to, on the device: slots int32 [T, n], and how many, counts int32 [T]."""

    slots: torch.Tensor
    counts: torch.Tensor

    def __getitem__(self, queries: slice | torch.Tensor) -> "Selected":
        return Selected(self.slots[queries], self.counts[queries])


Seen = list[slice | torch.Tensor] | Selected
"""Per query, the cached positions that it attends to: a slice from 0, or ascending int64 positions [n]. In a captured
step, whose position the host doesn't know, they are Selected."""


@dataclass(frozen=True)
class Pieces:
    """What runs in the place of a layer's functions, with the same arguments and bits (compiled.py)."""

    before: Callable[..., Any]  # model.before_attention
    after: Callable[..., Any]  # model.after_attention
    attend: Callable[..., torch.Tensor] | None = None  # what decode attends with: CppAttention


@dataclass(frozen=True)
class Batch:
    """Consecutive tokens of one sequence: where they stand and how they attend.

    absorbed: decode's form of attention; otherwise prefill's. keep_rows: KV rows and index keys of these positions are
    in the cache already and stay as they are (they came over the wire); the tokens are only run for their hidden
    states. chosen: what each query attends to where that is known beforehand, so that no indexer runs. kernels: what
    the peer's fused kernels do (numerics.py).

    first is None in a captured step: it runs at whatever `positions` holds then, so nothing may ask the host for it.
    everything: all that is cached, which the queries of such a step attend to where none has to choose: in a dense
    model, and while no query has more than index_topk tokens before it.

    pieces: compiled forms of a layer's functions; None: plain torch.
    """

    first: int | None
    positions: torch.Tensor  # [T] int64
    cos_sin: torch.Tensor  # [T, 2, rope / 2]
    absorbed: bool
    kernels: Kernels
    keep_rows: bool = False
    chosen: Seen | None = None
    everything: Selected | None = None
    pieces: Pieces | None = None

    @property
    def captured(self) -> bool:
        return self.first is None

    @property
    def end(self) -> int:
        return self.first + len(self.positions)

    def lengths(self) -> list[int] | None:
        """Cached tokens up to each query, itself included; None where only a GPU knows."""
        if self.captured:
            return None if self.positions.is_cuda else (self.positions + 1).tolist()
        return list(range(self.first + 1, self.end + 1))

    def causal(self) -> Seen:
        """Dense attention: each query sees every token up to itself."""
        return [slice(0, length) for length in self.lengths()]

    def seen(self) -> Seen:
        """What each query attends to before any indexer chooses for it."""
        if self.chosen is not None:
            return self.chosen
        return self.everything if self.captured else self.causal()
