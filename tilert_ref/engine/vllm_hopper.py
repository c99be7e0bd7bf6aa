"""Operators in the arithmetic of vLLM's kernels on NVIDIA Hopper (H100, H200), so that any device can match them.

What is fixed here was found by comparing every operator of vLLM 0.26.0 on an H200 with candidates, value by value
(docs/numerics.md, "vLLM on an H200", has the counts).

Tensor cores. A dot product is taken a few values at a time: 32 in fp8, 16 in bf16. The products and the running sum are
aligned to the largest of their exponents, cut (toward zero) below 13 fraction bits of it in fp8, 25 in bf16, and added
exactly; the sum is cut too, to 13 bits in fp8, to fp32 in bf16. A product's exponent is the sum of its factors'
exponents, even where its value is 2 or more times that power. In fp8 DeepGEMM, Triton's fused experts and the indexer's
logits all start a new sum every 128 values.

Sparse attention. Chosen rows are taken in the order in which the indexer gives them, in blocks of 64; weights are
rounded to bf16 before they multiply the rows, their sum is taken of the unrounded ones, as a warp has them: four
threads have pairs of a head's weights, eight apart, and add up their own first. Two functions are left open: the GPU's
exp2 may miss the correctly rounded value by 2 ulp of fp32, which shows about once in 30,000 weights, its reciprocal by
1 ulp.

RMSNorm. A thread squares vectors of eight values, 32 threads add up in pairs of neighbours, then the warps one after
the other (csrc/libtorch_stable/layernorm_kernels.cu; cub's BlockReduce).

Orders of fp32 sums, and where a multiply-add is fused, were read from the sm_90 code of those kernels in vLLM's wheel.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

FP8_GROUP, FP8_BITS = 32, 13
BF16_GROUP, BF16_BITS = 16, 25
MIN_EXPONENT = -6  # of e4m3; subnormals have it too
ZERO_EXPONENT = -60  # below the exponent of any product of two e4m3 values
BLOCK = 64
VECTOR, WARP = 8, 32
FEW_TOKENS, MOST_THREADS = 256, (1024, 256)  # threads of a norm for fewer tokens, and from that many on


class Operand(NamedTuple):
    """One side of a dot product, the long dimension first, so that sums over it run along memory."""

    values: torch.Tensor  # [K, N]
    exponents: torch.Tensor  # [K, N]

    def rows(self, start: int, count: int) -> "Operand":
        return Operand(*(part[start : start + count] for part in self))


def operand(codes: torch.Tensor) -> Operand:
    """codes [N, K]: e4m3 values in any float dtype -> values in fp32, exponents in int8."""
    values = codes.T.float().contiguous()
    exponents = (
        ((values.view(torch.int32) >> 23 & 255) - 127).clamp_min_(MIN_EXPONENT).masked_fill_(values == 0, ZERO_EXPONENT)
    )
    return Operand(values, exponents.to(torch.int8))


def fp8_dot(a: Operand, b: Operand) -> torch.Tensor:
    """a [K, T] and b [K, N], K a multiple of 32 -> a^T b [T, N] fp32."""
    total = torch.zeros(a.values.shape[1], b.values.shape[1], device=a.values.device)
    for start in range(0, len(a.values), FP8_GROUP):
        x, y = a.rows(start, FP8_GROUP), b.rows(start, FP8_GROUP)
        top = (x.exponents[:, :, None] + y.exponents[:, None]).amax(0).int()  # [T, N]
        top = torch.maximum(top, _exponents(total))
        units = x.values[:, :, None] * y.values[:, None]  # [32, T, N], exact
        sums = units.mul_(_power(FP8_BITS - top)).trunc_().sum(0)  # whole numbers below 2^24: exact
        sums += (total * _power(FP8_BITS - top)).trunc_()
        total = _cut(sums * _power(top - FP8_BITS))
    return total


def norm_threads(tokens: int, width: int) -> int:
    """Threads of vLLM's norm kernels that have values to square; thread t takes vectors t, t + threads, ..."""
    return min(-(-width // VECTOR), MOST_THREADS[tokens >= FEW_TOKENS])


def sum_of_squares(x: torch.Tensor, added: bool) -> torch.Tensor:
    """bf16 values x [T, D] -> [T, 1] fp32. added: by the kernel that adds the residual, in pairs within a vector; else
    one value after the other. (Squares of bf16 are exact in fp32, so a fused multiply-add changes nothing.)"""
    tokens, width = x.shape
    threads = norm_threads(tokens, width)
    rounds = -(-width // (VECTOR * threads))
    squares = F.pad(x.float().square(), (0, rounds * threads * VECTOR - width)).view(tokens, rounds, threads, VECTOR)
    total = torch.zeros(tokens, threads, device=x.device)
    for vector in squares.unbind(1):  # [T, threads, 8]
        if added:
            first, second, third, fourth = (vector[..., 0::2] + vector[..., 1::2]).unbind(-1)
            total = total + (((first + second) + third) + fourth)
        else:
            for value in vector.unbind(-1):
                total = total + value
    lanes = F.pad(total, (0, -threads % WARP)).view(tokens, -1, WARP)  # [T, warps, 32]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    whole = lanes[:, 0]
    for warp in lanes.unbind(1)[1:]:
        whole = whole + warp
    return whole


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """floor(log2(|x|)) of normal fp32 numbers; for zero one that doesn't matter beside a product's."""
    return ((x.view(torch.int32) >> 23 & 255) - 127).clamp_min_(2 * ZERO_EXPONENT)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, exactly; int32 in -126 .. 127."""
    return (exponent.clamp(-126, 127) + 127 << 23).view(torch.float32)


def _cut(x: torch.Tensor) -> torch.Tensor:
    """fp32 with FP8_BITS of its 23 fraction bits."""
    return (x.view(torch.int32) & -(1 << 23 - FP8_BITS)).view(torch.float32)


def bf16_operand(x: torch.Tensor) -> Operand:
    """x [N, K]: bf16 values in any float dtype; values are kept in float64 here, exponents in int32."""
    values = x.T.float().contiguous()
    return Operand(values.double(), _exponents(values))


def bf16_dot(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """bf16 values a [M, K] and b [N, K], K a multiple of 16 -> total + a b^T, [M, N] fp32."""
    return bf16_operand_dot(bf16_operand(a), bf16_operand(b), total)


def bf16_operand_dot(a: Operand, b: Operand, total: torch.Tensor | None = None) -> torch.Tensor:
    """bf16_dot on any device, of a [K, M] and b [K, N]."""
    if total is None:
        total = torch.zeros(a.values.shape[1], b.values.shape[1], device=a.values.device)
    for start in range(0, len(a.values), BF16_GROUP):
        x, y = a.rows(start, BF16_GROUP), b.rows(start, BF16_GROUP)
        top = (x.exponents[:, :, None] + y.exponents[:, None]).amax(0)  # [M, N]
        top = torch.maximum(top, _exponents(total)).long()
        unit = (1023 + BF16_BITS - top << 52).view(torch.float64)  # 2^(bits - top)
        sums = (x.values[:, :, None] * y.values[:, None]).mul_(unit).trunc_().sum(0)  # whole numbers, exact
        sums += (total.double() * unit).trunc_()
        total = (sums.div_(unit).view(torch.int64) & -(1 << 29)).view(torch.float64).float()  # toward zero
    return total


def attend_fp8_rows(query: torch.Tensor, rows: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """query [H, W] fp32, rows [n, W] fp32 in the indexer's order -> [H, value_width] fp32.

    FlashMLA's sparse decode kernel for fp8_ds_mla rows: for few queries its scheduler gives every block of 64 rows to a
    part of the GPU of its own, and a second kernel merges the parts by their log-sum-exp.
    """
    outputs, sums = [], []
    for scores, block in _blocks(bf16_dot(query, rows), rows):
        top = scores.amax(-1, keepdim=True) * log2_scale(scale)
        weights = _exp2(scores, scale, top)
        first, second, third, fourth = _thread_sums(weights).split(1, dim=-1)
        total = (first + second) + (third + fourth)
        outputs.append(bf16_dot(_rounded(weights), block[:, :value_width].T) * _reciprocal(total))  # [H, V]
        sums.append(total.log2() + top)
    parts = torch.stack(sums)  # [blocks, H, 1]
    top = parts.amax(0)
    merged = _lanes_sum((parts - top).exp2()).log2() + top
    whole = torch.zeros_like(outputs[0])
    for share, output in zip((parts - merged).exp2(), outputs, strict=True):
        whole = _fma(share, output, whole)
    return whole


def attend_bf16_rows(query: torch.Tensor, rows: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """The same for bf16 rows, which vLLM gives to FlashAttention 3: rotary values before latent ones in a score, and
    from the last block of 64 rows to the first, each rescaling what is there to its own maximum (vLLM
    flashattn_mla_sparse.py)."""
    rope_first = [torch.cat((x[:, value_width:], x[:, :value_width]), dim=1) for x in (query, rows)]
    top, sums = query.new_full((len(query), 1), -math.inf), query.new_zeros(len(query), 4)
    out = query.new_zeros(len(query), value_width)
    for scores, block in reversed(_blocks(bf16_dot(*rope_first), rows)):
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = _exp2(scores, scale, new_top * log2_scale(scale))
        rescale = ((top - new_top) * log2_scale(scale)).exp2()
        out = bf16_dot(_rounded(weights), block[:, :value_width].T, out * rescale)
        sums = _thread_sums(weights, rescale * sums.double())
        top = new_top
    first, second, third, fourth = sums.split(1, dim=-1)
    return out * _reciprocal((first + third) + (second + fourth))


def _thread_sums(weights: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [H, 64] -> what each of four threads has of them, [H, 4]; before: an exact product to begin with."""
    heads = len(weights)
    own = weights.view(heads, 8, 4, 2).transpose(1, 2).reshape(heads, 4, 16)
    total = own[..., 0] if before is None else (before + own[..., 0].double()).float()
    for value in own.unbind(-1)[1:]:
        total = total + value
    return total


def _lanes_sum(parts: torch.Tensor) -> torch.Tensor:
    """[n, H, 1] -> [H, 1] as the lanes of a warp add up by butterflies, the farthest first; n up to 32."""
    parts = F.pad(parts, (0, 0, 0, 0, 0, (1 << (len(parts) - 1).bit_length()) - len(parts)))
    while len(parts) > 1:
        near, far = parts.chunk(2)
        parts = near + far
    return parts[0]


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of fp32, rounded once (but for the rounding of float64 before it)."""
    return (x.double() * y.double() + z.double()).float()


def _blocks(scores: torch.Tensor, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores [H, n] and rows [n, W] in blocks of 64; the last one is filled up with rows that weigh nothing."""
    filling = -len(rows) % BLOCK
    scores, rows = F.pad(scores, (0, filling), value=-math.inf), F.pad(rows, (0, 0, 0, filling))
    return list(zip(scores.split(BLOCK, dim=1), rows.split(BLOCK), strict=True))


def log2_scale(scale: float) -> float:
    """The softmax scale for powers of two, as the kernels have it: an fp32 number."""
    return torch.tensor(scale * math.log2(math.e), dtype=torch.float32).item()


def _exp2(scores: torch.Tensor, scale: float, top: torch.Tensor) -> torch.Tensor:
    """2^(score * scale - top), the argument in one fused multiply-add."""
    return (scores.double() * log2_scale(scale) - top.double()).float().exp2()


def _reciprocal(total: torch.Tensor) -> torch.Tensor:
    return 1.0 / total


def _rounded(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(torch.bfloat16).float()
