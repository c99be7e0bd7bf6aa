"""torch's own kernels, kept as they are where a step is compiled.

Inductor takes reductions in another order than torch, silu and sigmoid by other formulas, and small batched products as
sums of its own, so results would differ in the last bit. As operators of our own they stay calls of torch's kernels in
a compiled piece (compiled.py). Anywhere else they are plain torch and 3 us.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_LIBRARY = torch.library.Library("tilert_ref", "DEF")


def _operator(schema: str, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    return getattr(torch.ops.tilert_ref, name).default


total = _operator("total(Tensor x) -> Tensor", lambda x: x.sum(-1, keepdim=True))
"""Sum over the last dimension, [..., n] -> [..., 1]."""

softmax = _operator("softmax(Tensor x) -> Tensor", lambda x: x.softmax(-1))
"""Over the last dimension."""

sigmoid = _operator("sigmoid(Tensor x) -> Tensor", torch.sigmoid)

silu = _operator("silu(Tensor x) -> Tensor", F.silu)

heads_bmm = _operator(
    "heads_bmm(Tensor x, Tensor w) -> Tensor", lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
)
"""x [T, H, K], w [H, K, N] -> [T, H, N]."""
