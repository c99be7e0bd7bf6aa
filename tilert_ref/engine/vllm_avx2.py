"""Two operators in the summation order of vLLM's AVX2 kernels, so that their results can be matched bit for bit.

The formulas are those of attention.attend_absorbed and of a linear layer; what is fixed here is the order of fp32
operations, found by comparing outputs with vLLM 0.32.0:

MLA decode (csrc/cpu/mla_decode.cpp)
- a score is summed in 16 lanes over the 576 dimensions, then lanes 0..7 and 8..15 one after the other, then both;
- softmax runs over blocks of 16 tokens, exponentials correctly rounded, sums and weighted values token after token,
  product and sum rounded apart (no fused multiply-add);
- blocks are merged in order by their log-sum-exp (arXiv 2501.01005, section 2.2).

Expert matrices (csrc/cpu/cpu_fused_moe.cpp, isa "vec")
- every output is summed over the inputs one after the other.

Left open: glibc's expf and logf miss the correctly rounded value about once in a thousand calls, by one ulp of fp32. It
shows in a bf16 result once in some thousand decode steps.
"""

import numpy as np
import torch

LANES = 16
BLOCK = 16


def attend(query: torch.Tensor, rows: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """query [H, W] fp32, rows [S, W] fp32 -> [H, value_width] fp32, attending to all S rows."""
    heads, tokens = len(query), len(rows)
    scores = _in_order(_lane_sums(query, rows)) * scale  # [H, S]
    padding = -tokens % BLOCK
    scores = torch.nn.functional.pad(scores, (0, padding), value=float("-inf")).view(heads, -1, BLOCK)  # [H, N, 16]
    values = torch.nn.functional.pad(rows[:, :value_width], (0, 0, 0, padding)).view(-1, BLOCK, value_width)

    top = scores.amax(-1, keepdim=True)
    weights = _exp(scores - top)  # [H, N, 16]; padded tokens weigh exactly 0
    total = _sum_last(weights)  # [H, N]
    weights = weights / total[..., None]
    partial = torch.zeros(heads, len(values), value_width)
    product = torch.empty_like(partial)  # one for all: fresh memory costs more than the product
    for weight, value in zip(weights[..., None].unbind(2), values.unbind(1), strict=True):
        partial += torch.mul(weight, value, out=product)  # [H, N, V]
    return _merge(partial, _log(total) + top[..., 0])


def _lane_sums(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[H, S, 16]: lane l sums dimensions l, l + 16, l + 32, ... in order. Products of bf16 values are exact."""
    steps = query.shape[-1] // LANES
    q = query.view(len(query), steps, 1, LANES).unbind(1)  # steps x [H, 1, 16]
    k = rows.view(len(rows), steps, LANES).transpose(0, 1).contiguous().unbind()  # steps x [S, 16]
    sums = torch.zeros(len(query), len(rows), LANES)
    for q_step, k_step in zip(q, k, strict=True):
        sums.addcmul_(q_step, k_step)
    return sums


def _in_order(lanes: torch.Tensor) -> torch.Tensor:
    return _sum_last(lanes[..., : LANES // 2]) + _sum_last(lanes[..., LANES // 2 :])


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sums the last dimension element after element (torch.sum may take another order)."""
    total = torch.zeros(x.shape[:-1])
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


def _merge(partial: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """partial [H, N, V] with log-sum-exp [H, N] -> [H, V], block after block."""
    kept, added = _merge_weights(lse.numpy())  # [N, H]
    merged = partial[:, 0].clone()
    scaled = (partial * added.T[..., None]).unbind(1)  # N x [H, V]
    for keep, part in zip(kept[1:, :, None].unbind(), scaled[1:], strict=True):
        merged.mul_(keep).add_(part)
    return merged


def _merge_weights(lse: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """lse [H, N] fp32 -> [N, H] twice: what is left of the blocks before, and how much of each block is added.

    In numpy: in torch this chain of tiny steps took half of a layer's attention, 3 ms of 6 at 1,000 tokens.
    """
    blocks = np.ascontiguousarray(lse.T)
    kept, added = np.empty_like(blocks), np.empty_like(blocks)
    kept[0], added[0], merged = 0.0, 1.0, blocks[0]
    for index in range(1, len(blocks)):
        top = np.maximum(merged, blocks[index])
        before = np.exp((merged - top).astype(np.float64)).astype(np.float32)
        here = np.exp((blocks[index] - top).astype(np.float64)).astype(np.float32)
        both = before + here
        kept[index], added[index] = before / both, here / both
        merged = np.log(both.astype(np.float64)).astype(np.float32) + top
    return torch.from_numpy(kept), torch.from_numpy(added)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 exponential: closer to glibc's expf than torch.exp is."""
    return x.double().exp().float()


def _log(x: torch.Tensor) -> torch.Tensor:
    return x.double().log().float()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, K] fp32 times weight [N, K] fp32 transposed, [n, N]; products of bf16 values are exact."""
    sums = torch.zeros(len(x), len(weight))
    columns, rows = x.T.contiguous()[..., None].unbind(), weight.T.contiguous().unbind()
    for column, row in zip(columns, rows, strict=True):
        sums.addcmul_(column, row)
    return sums
