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
    for weight, value in zip(weights[..., None].unbind(2), values.unbind(1), strict=True):
        partial += weight * value  # [H, N, V]
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
    merged, merged_lse = partial[:, 0], lse[:, 0]
    for block in range(1, partial.shape[1]):
        top = torch.maximum(merged_lse, lse[:, block])
        before, here = _exp(merged_lse - top), _exp(lse[:, block] - top)
        both = before + here
        merged = merged * (before / both)[:, None] + partial[:, block] * (here / both)[:, None]
        merged_lse = _log(both) + top
    return merged


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
