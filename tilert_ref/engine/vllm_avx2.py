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

import functools

import numpy as np
import torch

LANES = 16
BLOCK = 16
BMM_LANES = 4
ROW_LANES = 64


def attend(query: torch.Tensor, rows: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """query [H, W] fp32, rows [S, W] fp32 -> [H, value_width] fp32, attending to all S rows."""
    heads, tokens = len(query), len(rows)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -tokens % BLOCK)) if tokens % BLOCK else rows
    scores = _scores(query, rows) * scale  # [H, S]
    scores[:, tokens:] = float("-inf")
    scores, values = scores.view(heads, -1, BLOCK), rows[:, :value_width].unflatten(0, (-1, BLOCK))

    top = scores.amax(-1, keepdim=True)
    weights = _exp(scores - top)  # [H, N, 16]; padded tokens weigh exactly 0
    total = _add_up(weights.flatten(0, 1).T).view(heads, -1)  # [H, N]
    weights = weights / total[..., None]
    partial = sums_of_rows((weights[..., None] * values).view(-1, value_width), BLOCK)
    return _merge(partial.view(heads, -1, value_width), _log(total) + top[..., 0])


def _scores(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[H, S]: lane l sums dimensions l, l + 16, l + 32, ... in order. Products of bf16 values are exact."""
    products = query[:, None] * rows  # [H, S, W]
    lanes = sums_of_rows(products.view(-1, LANES), query.shape[-1] // LANES).T.contiguous()  # [16, H * S]
    return (_add_up(lanes[: LANES // 2]) + _add_up(lanes[LANES // 2 :])).view(len(query), -1)


def _add_up(parts: torch.Tensor) -> torch.Tensor:
    """Sums the first dimension element after element (torch.sum may take another order)."""
    first, *others = parts.contiguous().unbind()
    total = first.clone()
    for part in others:
        total += part
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


def sums_of_rows(table: torch.Tensor, n: int) -> torch.Tensor:
    """[B * n, N] fp32 -> [B, N]: every n rows are added up, one after the other."""
    return torch.nn.functional.embedding_bag(torch.arange(len(table)).view(-1, n), table, mode="sum")


def weighted_rows(table: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """table [R, N] fp32, rows int64 [B, n], weights fp32 [B, n] -> [B, N]: sum over i of weights[b, i] *
    table[rows[b, i]], one term after the other; products are not rounded before they are added.

    It is torch's embedding bag, which holds a part of the sum in registers while it goes through the rows; a loop of n
    addcmul_ on small tensors takes forty times as long.
    """
    return torch.nn.functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)


@functools.cache
def in_four_lanes() -> bool:
    """Whether torch.bmm of bf16 takes its sums in four lanes here: lane l adds up the inputs l, l + 4, l + 8, ..., then
    lane after lane is added (ATen/native/cpu/BlasKernel.cpp, sum). A CPU with bf16 instructions has other kernels.

    Asked of sums that cancel (cancelling_columns), where another order leaves another rest.
    """
    weight = cancelling_columns(128, 64)
    for tokens in (1, 3):
        x = torch.arange(1.0, tokens + 1)[:, None].expand(-1, 128)
        ours = torch.zeros(tokens, BMM_LANES, 64)
        for at in range(0, 128, BMM_LANES):
            ours += x[:, at : at + BMM_LANES, None] * weight[at : at + BMM_LANES]
        ours = ours[:, 0] + ours[:, 1] + ours[:, 2] + ours[:, 3]
        if not torch.bmm(x[None].bfloat16(), weight[None].bfloat16())[0].equal(ours.bfloat16()):
            return False
    return True


@functools.cache
def rows_in_lanes() -> bool:
    """Whether torch's product of bf16 vectors and the rows of a matrix takes its sums in 64 lanes here, of which the
    upper half is added to the lower until one is left (ATen/native/cpu/ReducedPrecisionFloatGemvFastPathKernel.cpp,
    dot_with_fp32_arith on AVX2). Asked as in in_four_lanes.
    """
    weight = cancelling_columns(3 * ROW_LANES, 64)
    for tokens in (1, 3):
        x = torch.arange(1.0, tokens + 1)[:, None].expand(-1, len(weight))
        ours = torch.zeros(tokens, ROW_LANES, 64)
        for at in range(0, len(weight), ROW_LANES):
            ours += x[:, at : at + ROW_LANES, None] * weight[at : at + ROW_LANES]
        while ours.shape[1] > 1:
            low, high = ours.chunk(2, dim=1)
            ours = low + high
        rows = weight.T.contiguous().bfloat16()
        if not torch.nn.functional.linear(x.bfloat16(), rows).equal(ours[:, 0].bfloat16()):
            return False
    return True


def cancelling_columns(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] fp32 that bf16 holds: each column is values of many sizes and their negatives, shuffled. Its sum
    is 0 but for what fp32 rounds away on the way, which depends on the order."""
    draw = torch.Generator().manual_seed(0)
    half = torch.randn(rows // 2, columns, generator=draw) * 2.0 ** torch.randint(
        0, 20, (rows // 2, columns), generator=draw
    )
    half = half.bfloat16().float()
    shuffled = torch.rand(rows, columns, generator=draw).argsort(0)
    return torch.cat((half, -half)).gather(0, shuffled)
