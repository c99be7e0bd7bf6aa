"""Matrix products for a few tokens on Hopper, as Triton kernels: every weight is read once, and every sum is taken in
the order of the kernel that vLLM runs there (cuBLAS, DeepGEMM, its fused experts).

What vllm_hopper.py emulates is done here by the tensor cores themselves; tests/gpu holds one against the other, bit for
bit. A token's result doesn't depend on how many others stand beside it. The weight is the left operand: a warpgroup
multiplies 64 of its rows, and tokens, of which decode has one to four, fill the narrow side.

Imported only where there is a Hopper GPU.
"""

import functools

import torch
import triton
import triton.language as tl

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.triton_overlap import OVERLAPPED, let_next_start, wait_for_last

OUT_TILE = 64  # rows of a weight that a program multiplies
FP8_BLOCK = 128  # values that share a scale, and after which DeepGEMM starts a new sum
BF16_BLOCK = 128
MIN_TOKENS, MAX_TOKENS = 16, 64
COUNTERS = 1 << 16
STAGES, LONG_STAGES = 8, 6  # blocks of K on their way at a time, and of a long K, where programs share a processor


@triton.jit
def _fp8_kernel(
    codes,
    scales,
    weight,
    weight_scales,
    expert_ids,
    out,
    partials,
    arrived,
    tokens,
    rows,
    columns,
    codes_per_row,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    ADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    tile, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * OUT_TILE + tl.arange(0, OUT_TILE)
    k = tl.arange(0, BLOCK)
    blocks = columns // BLOCK
    first = part * PART_BLOCKS
    wait_for_last()
    if EXPERTS:  # a group is one token with one of its experts
        t = group + tl.arange(0, TOKENS)
        legal = t == group
        source = tl.zeros((TOKENS,), tl.int32) + group // SHARED
        expert = tl.load(expert_ids + group).to(tl.int64)
        weight += expert * rows * columns
        weight_scales += expert * tl.cdiv(rows, BLOCK) * blocks
    else:
        t = group * TOKENS + tl.arange(0, TOKENS)
        legal = t < tokens
        source = t
    w_row = weight + n[:, None].to(tl.int64) * columns + k[None, :]
    x_row = codes + source[None, :] * codes_per_row + k[:, None]
    last = tl.minimum(first + PART_BLOCKS, blocks)
    total = tl.zeros((OUT_TILE, TOKENS), tl.float32)
    at = t[None, :].to(tl.int64) * rows + n[:, None]
    inside = (n[:, None] < rows) & legal[None, :]
    plane = tokens * rows
    for b in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_row + b * BLOCK, mask=n[:, None] < rows, other=0.0)
        x = tl.load(x_row + b * BLOCK, mask=legal[None, :], other=0.0)
        a_scale = tl.load(scales + source * blocks + b, mask=legal, other=0.0)
        w_scale = tl.load(weight_scales + (n // BLOCK) * blocks + b, mask=n < rows, other=0.0)
        product = (tl.dot(w, x) * a_scale[None, :]) * w_scale[:, None]
        if PARTS == 1:
            total += product
        else:
            tl.store(partials + b * plane + at, product, mask=inside)
    let_next_start()
    if PARTS > 1:  # the part that arrives last adds the blocks up, in their order
        tl.debug_barrier()
        mine = arrived + group * tl.num_programs(0) + tile
        if tl.atomic_add(mine, 1, sem="acq_rel") < PARTS - 1:
            return
        tl.atomic_xchg(mine, 0)
        t = group * (1 if EXPERTS else TOKENS) + tl.arange(0, ADDED)
        at = t[None, :].to(tl.int64) * rows + n[:, None]
        inside = (n[:, None] < rows) & (t[None, :] < tokens)
        sums = tl.zeros((OUT_TILE, ADDED), tl.float32)
        for b in range(0, blocks, AT_ONCE):  # loads first, so that they don't wait for one another
            for i in tl.static_range(AT_ONCE):
                there = inside & (b + i + tl.zeros_like(at) < blocks)
                sums += tl.load(partials + (b + i) * plane + at, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def fp8_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    expert_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over blocks b: (a_b . w_b) * a_scale_b * w_scale_b, rounded once to dtype.

    Within a block the tensor core sums 32 products at a time; over blocks it is fp32 and no multiply-add is fused
    (DeepGEMM sm90_fp8_gemm_1d2d.cuh). A matrix with few rows is cut along K too, so that all of the GPU reads it; then
    every block's product goes to memory and the last program adds them up in order.

    Args:
        codes, scales: activations, e4m3 [T, K] and fp32 [T, K / 128].
        weight, weight_scales: e4m3 [N, K] and fp32 [ceil(N / 128), K / 128]; [E, ...] with expert_ids.
        expert_ids: int [P], P a multiple of T: row p of the result is token p // (P / T) times that expert's matrix.

    Returns:
        [T, N], or [P, N] with expert_ids.
    """
    (tokens, columns), rows = codes.shape, weight.shape[-2]
    experts = expert_ids is not None
    pairs = len(expert_ids) if experts else tokens
    tile = MIN_TOKENS if experts else min(MAX_TOKENS, max(MIN_TOKENS, triton.next_power_of_2(tokens)))
    tiles, groups, blocks = (
        triton.cdiv(rows, OUT_TILE),
        pairs if experts else triton.cdiv(tokens, tile),
        columns // FP8_BLOCK,
    )
    part_blocks = _part_blocks(tiles * groups, blocks, codes.device) if pairs <= MAX_TOKENS else blocks
    parts = triton.cdiv(blocks, part_blocks)
    added = 1 if experts else min(tile, triton.next_power_of_2(tokens))
    out = torch.empty(pairs, rows, dtype=dtype, device=codes.device)
    partials = torch.empty(blocks, pairs, rows, dtype=torch.float32, device=codes.device) if parts > 1 else out
    _fp8_kernel[(tiles, parts, groups)](
        codes,
        scales,
        weight,
        weight_scales,
        expert_ids if experts else scales,
        out,
        partials,
        _counters(codes.device)[tensor_cores.current_branch(codes.device)],
        pairs,
        rows,
        columns,
        columns,
        EXPERTS=experts,
        SHARED=pairs // tokens,
        TOKENS=tile,
        OUT_TILE=OUT_TILE,
        BLOCK=FP8_BLOCK,
        PARTS=parts,
        PART_BLOCKS=part_blocks,
        STAGES=LONG_STAGES if part_blocks > 16 else STAGES,
        ADDED=added,
        AT_ONCE=max(4, 32 // added),
        num_warps=4,
        **OVERLAPPED,
        enable_fp_fusion=False,
    )
    return out


def _part_blocks(programs: int, blocks: int, device: torch.device) -> int:
    """How many blocks of K a program takes: all, where that makes three programs for two multiprocessors; else four at
    least, for three programs on each (docs/gpu.md has the measured times)."""
    processors = _multiprocessors(device)
    if 2 * programs >= 3 * processors:
        return blocks
    return max(4, triton.cdiv(blocks, round(3 * processors / programs)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Arrivals of the parts of a product, for the trunk of a step and each branch. Zero between launches: the last part
    sets its own back."""
    return torch.zeros(1 + tensor_cores.BRANCHES, COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _bf16_kernel(
    x,
    weight,
    expert_ids,
    out,
    tokens,
    rows,
    columns,
    x_token,
    x_head,
    w_head,
    out_token,
    out_head,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * OUT_TILE + tl.arange(0, OUT_TILE)
    k = tl.arange(0, BLOCK)
    wait_for_last()
    if EXPERTS:
        t = group + tl.arange(0, TOKENS)
        legal = t == group
        source = tl.zeros((TOKENS,), tl.int32) + group // SHARED
        weight += tl.load(expert_ids + group).to(tl.int64) * rows * columns
    else:
        t = group * TOKENS + tl.arange(0, TOKENS)
        legal = t < tokens
        source = t
    w_row = weight + head.to(tl.int64) * w_head + n[:, None].to(tl.int64) * columns + k[None, :]
    x_row = x + head * x_head + source[None, :].to(tl.int64) * x_token + k[:, None]
    total = tl.zeros((OUT_TILE, TOKENS), tl.float32)
    for b in tl.range(0, columns, BLOCK, num_stages=STAGES):
        if WHOLE:
            w = tl.load(w_row + b, mask=n[:, None] < rows, other=0.0)
            v = tl.load(x_row + b, mask=legal[None, :], other=0.0)
        else:
            w = tl.load(w_row + b, mask=(n[:, None] < rows) & (b + k[None, :] < columns), other=0.0)
            v = tl.load(x_row + b, mask=legal[None, :] & (b + k[:, None] < columns), other=0.0)
        total = tl.dot(w, v, total)
    let_next_start()
    at = out + t[None, :].to(tl.int64) * out_token + head * out_head + n[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(n[:, None] < rows) & legal[None, :])


def bf16_product(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, expert_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T, summed 16 values at a time from the first to the last, rounded once to dtype.

    Args:
        x: bf16 [T, K].
        weight: bf16 [N, K]; [E, N, K] with expert_ids.
        expert_ids: int [P] as in fp8_product.

    Returns:
        [T, N], or [P, N] with expert_ids.
    """
    (tokens, columns), rows = x.shape, weight.shape[-2]
    pairs = tokens if expert_ids is None else len(expert_ids)
    out = torch.empty(pairs, rows, dtype=dtype, device=x.device)
    _launch_bf16(
        x, weight, expert_ids, out, rows, columns, (x.stride(0), 0), 0, (rows, 0), heads=1, shared=pairs // tokens
    )
    return out


def heads_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every head's vector times its matrix: x bf16 [T, H, K], weight bf16 [H, N, K] -> bf16 [T, H, N]."""
    tokens, heads, columns = x.shape
    rows = weight.shape[1]
    out = torch.empty(tokens, heads, rows, dtype=x.dtype, device=x.device)
    strides = (x.stride(0), x.stride(1)), rows * columns, (heads * rows, rows)
    _launch_bf16(x, weight, None, out, rows, columns, *strides, heads=heads, shared=1)
    return out


def _launch_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    columns: int,
    x_strides: tuple[int, int],
    w_head: int,
    out_strides: tuple[int, int],
    *,
    heads: int,
    shared: int,
) -> None:
    experts = expert_ids is not None
    tile = MIN_TOKENS if experts else min(MAX_TOKENS, max(MIN_TOKENS, triton.next_power_of_2(len(x))))
    block = min(BF16_BLOCK, max(16, triton.next_power_of_2(columns)))
    tiles, groups = triton.cdiv(rows, OUT_TILE), len(out) if experts else triton.cdiv(len(x), tile)
    alone = tiles * heads * groups <= _multiprocessors(x.device)  # on its multiprocessor, with all of its shared memory
    _bf16_kernel[(tiles, heads, groups)](
        x,
        weight,
        expert_ids if experts else x,
        out,
        len(out),
        rows,
        columns,
        *x_strides,
        w_head,
        *out_strides,
        EXPERTS=experts,
        SHARED=shared,
        TOKENS=tile,
        OUT_TILE=OUT_TILE,
        BLOCK=block,
        WHOLE=columns % block == 0,
        STAGES=8 if tile == MIN_TOKENS and alone else 5,
        num_warps=4,
        **OVERLAPPED,
    )
