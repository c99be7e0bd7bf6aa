"""What stands between a step's products, one Triton kernel each: norms, rotary embedding, roundings to fp8, activation,
routing, and writing to the cache.

The formulas and every rounding are those of the torch functions that call these on a Hopper GPU (model.py, rope.py,
block_fp8.py, rounding.py, moe.py, cache.py; the FUSED pointwise rules); no multiply-add is fused. A graph of some two
hundred kernels takes ten times as long when each of these is a dozen. Imported only where there is a Hopper GPU.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilert_ref.engine import vllm_hopper
from tilert_ref.engine.triton_overlap import OVERLAPPED, begin

GROUP = 128  # values that share a scale
E4M3_MAX = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _power_of_two(x):
    """2^ceil(log2(x)) of positive normal fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _over(x, y):
    """x / y, correctly rounded; y of x's shape or a number."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def _add_squares(total, squares, ADDED: tl.constexpr, LANES: tl.constexpr):
    """total [LANES] and the eight squares of each, [LANES, 8], in the order of vllm_hopper.sum_of_squares."""
    even, odd = tl.split(tl.reshape(squares, (LANES, 4, 2)))
    if ADDED:
        pairs_02, pairs_13 = tl.split(tl.reshape(even + odd, (LANES, 2, 2)))
        pair_0, pair_2 = tl.split(pairs_02)
        pair_1, pair_3 = tl.split(pairs_13)
        return total + (((pair_0 + pair_1) + pair_2) + pair_3)
    values_04, values_26 = tl.split(tl.reshape(even, (LANES, 2, 2)))
    values_15, values_37 = tl.split(tl.reshape(odd, (LANES, 2, 2)))
    value_0, value_4 = tl.split(values_04)
    value_1, value_5 = tl.split(values_15)
    value_2, value_6 = tl.split(values_26)
    value_3, value_7 = tl.split(values_37)
    total = (((total + value_0) + value_1) + value_2) + value_3
    return (((total + value_4) + value_5) + value_6) + value_7


@triton.jit
def _norm_kernel(
    x, residual, weight, out, stream, sums, eps, width, x_row,
    ADD: tl.constexpr, ADDED: tl.constexpr, THREADS: tl.constexpr, ROUNDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program norms one token. Its squares are added up as vllm_hopper.sum_of_squares says."""
    t = tl.program_id(0).to(tl.int64)
    # A warp adds its farthest lanes first, vLLM's its neighbours: so lane i takes the vector of i's bits reversed.
    lane = tl.arange(0, LANES)
    low = ((lane & 1) << 4) | ((lane & 2) << 2) | (lane & 4) | ((lane & 8) >> 2) | ((lane & 16) >> 4)
    vector = (lane // 32) * 32 + low
    d = vector[:, None] * 8 + tl.arange(0, 8)[None, :]
    factors, values = (), ()
    for r in tl.static_range(ROUNDS):
        at = r * THREADS * 8 + d
        inside = (vector[:, None] < THREADS) & (at < width)
        factors += (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32),)  # nobody writes it: it needn't wait
    begin()
    total = tl.zeros((LANES,), tl.float32)
    for r in tl.static_range(ROUNDS):
        at = r * THREADS * 8 + d
        inside = (vector[:, None] < THREADS) & (at < width)
        value = tl.load(x + t * x_row + at, mask=inside, other=0.0)
        if ADD:
            before = tl.load(residual + t * width + at, mask=inside, other=0.0)
            value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
            tl.store(stream + t * width + at, value, mask=inside)
        wide = value.to(tl.float32)
        total = _add_squares(total, wide * wide, ADDED, LANES)
        values += (wide,)
    WARPS: tl.constexpr = LANES // 32
    warps = tl.sum(tl.reshape(total, (WARPS, 32)), 1)
    if WARPS == 1:
        whole = tl.sum(warps, 0)
    else:
        sums += t * WARPS
        tl.store(sums + tl.arange(0, WARPS), warps)
        tl.debug_barrier()
        whole = tl.load(sums, cache_modifier=".cg")
        for warp in tl.static_range(1, (THREADS + 31) // 32):
            whole += tl.load(sums + warp, cache_modifier=".cg")
    scale = tl.rsqrt(_over(whole, width.to(tl.float32)) + eps)
    for r in tl.static_range(ROUNDS):
        at = r * THREADS * 8 + d
        inside = (vector[:, None] < THREADS) & (at < width)
        normed = (values[r] * scale) * factors[r]
        tl.store(out + t * width + at, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, added: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """model.add_rms_norm: x bf16 [T, D] (rows may lie apart), residual bf16 [T, D] -> the norm and the new stream.
    added: the sum was taken before."""
    tokens, width = x.shape
    threads = vllm_hopper.norm_threads(tokens, width)
    lanes = max(32, triton.next_power_of_2(threads))
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    stream = torch.empty_like(out) if residual is not None else x
    sums = torch.empty(tokens, lanes // 32, dtype=torch.float32, device=x.device) if lanes > 32 else out
    _norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, out, stream, sums, eps, width, x.stride(0),
        ADD=residual is not None, ADDED=added or residual is not None, THREADS=threads,
        ROUNDS=triton.cdiv(width, 8 * threads), LANES=lanes, num_warps=min(8, lanes // 32),
        **OVERLAPPED, enable_fp_fusion=False,
    )  # fmt: skip
    return out, stream


@triton.jit
def _layer_norm_kernel(x, weight, bias, out, eps, x_row, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    factor, shift = tl.load(weight + d), tl.load(bias + d)
    begin()
    value = tl.load(x + t * x_row + d).to(tl.float32)
    mean = tl.sum(value, 0) / WIDTH
    centred = value - mean
    variance = tl.sum(centred * centred, 0) / WIDTH
    normed = centred * tl.rsqrt(variance + eps)
    normed = normed * factor + shift
    tl.store(out + t * WIDTH + d, normed.to(out.dtype.element_ty))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """In fp32, rounded once: x bf16 [T, d], weight and bias fp32 [d], d a power of two."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _layer_norm_kernel[(tokens,)](
        x, weight, bias, out, eps, x.stride(0), WIDTH=width, num_warps=1, **OVERLAPPED, enable_fp_fusion=False
    )
    return out


@triton.jit
def _rope_kernel(
    x,
    cos_sin,
    out,
    x_token,
    x_head,
    out_token,
    out_head,
    heads,
    width,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program turns one head's first 2 * HALF values and copies the rest of it."""
    begin()
    t, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.arange(0, HALF)
    source, target = x + t * x_token + h * x_head, out + t * out_token + h * out_head
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + HALF
    a, b = tl.load(source + first).to(tl.float32), tl.load(source + second).to(tl.float32)
    cos = tl.load(cos_sin + t * 2 * HALF + i).to(tl.float32)
    sin = tl.load(cos_sin + t * 2 * HALF + HALF + i).to(tl.float32)
    tl.store(target + first, (a * cos - b * sin).to(out.dtype.element_ty))
    tl.store(target + second, (b * cos + a * sin).to(out.dtype.element_ty))
    if WIDTH > 2 * HALF:
        rest = tl.arange(0, WIDTH)
        kept = (rest >= 2 * HALF) & (rest < width)
        tl.store(target + rest, tl.load(source + rest, mask=kept), mask=kept)


def rope(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool, rotary: int) -> torch.Tensor:
    """rope.apply_rope on the first `rotary` values of x bf16 [T, H, d], the rest copied; cos_sin [T, 2, rotary / 2]."""
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    _rope_kernel[(tokens * heads,)](
        x,
        cos_sin,
        out,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        heads,
        width,
        INTERLEAVED=interleaved,
        HALF=rotary // 2,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
        **OVERLAPPED,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _quantize_kernel(
    x,
    codes,
    scales,
    floor,
    groups,
    x_row,
    POWER: tl.constexpr,
    SECOND: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
):
    begin()
    t, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tile * G + tl.arange(0, G), tl.arange(0, GROUP)
    inside = g[:, None] < groups
    value = tl.load(x + t * x_row + g[:, None] * GROUP + d[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = _over(tl.maximum(tl.max(tl.abs(value), 1), floor), E4M3_MAX)
    if POWER:
        if SECOND:
            scale = tl.maximum(scale, floor)
        scale = _power_of_two(scale)
    code = tl.div_rn(value, tl.zeros_like(value) + scale[:, None]).to(codes.dtype.element_ty)
    tl.store(codes + (t * groups + g[:, None]) * GROUP + d[None, :], code, mask=inside)
    tl.store(scales + t * groups + g, scale, mask=g < groups)


def quantize(x: torch.Tensor, floor: float, power_of_two: bool, floor_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 128: scale = max(amax, floor) / 448, as a power of two if wanted (floor_scale: of that at least floor).

    block_fp8.quantize_activations and rounding.quantize_index. x bf16 [T, K] (rows may lie apart) -> e4m3 [T, K], fp32
    [T, K / 128].
    """
    tokens, columns = x.shape
    groups = columns // GROUP
    tile = min(8, triton.next_power_of_2(groups))
    codes = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    _quantize_kernel[(tokens, triton.cdiv(groups, tile))](
        x,
        codes,
        scales,
        floor,
        groups,
        x.stride(0),
        POWER=power_of_two,
        SECOND=floor_scale,
        G=tile,
        GROUP=GROUP,
        num_warps=tile if tile > 1 else 1,
        **OVERLAPPED,
        enable_fp_fusion=False,
    )
    return codes, scales


@triton.jit
def _index_queries_kernel(
    x, head_weights, cos_sin, codes, weights, floor, first, second, heads,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program turns one head's first 2 * HALF values, rounds all WIDTH of them to fp8, and scales its weight."""
    begin()
    at = tl.program_id(0).to(tl.int64)
    kind = x.dtype.element_ty
    i = tl.arange(0, HALF)
    first_of = 2 * i if INTERLEAVED else i
    second_of = 2 * i + 1 if INTERLEAVED else i + HALF
    turns = cos_sin + (at // heads) * 2 * HALF + i
    a, b = tl.load(x + at * WIDTH + first_of).to(tl.float32), tl.load(x + at * WIDTH + second_of).to(tl.float32)
    cos, sin = tl.load(turns).to(tl.float32), tl.load(turns + HALF).to(tl.float32)
    turned_a, turned_b = (a * cos - b * sin).to(kind).to(tl.float32), (b * cos + a * sin).to(kind).to(tl.float32)
    d = tl.arange(0, WIDTH)
    rest = tl.load(x + at * WIDTH + d, mask=d >= 2 * HALF, other=0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(turned_a), 0), tl.max(tl.abs(turned_b), 0))
    highest = tl.maximum(highest, tl.max(tl.abs(rest), 0))
    scale = _power_of_two(_over(tl.maximum(highest, floor), E4M3_MAX))
    fp8 = codes.dtype.element_ty
    tl.store(codes + at * WIDTH + first_of, _over(turned_a, scale).to(fp8))
    tl.store(codes + at * WIDTH + second_of, _over(turned_b, scale).to(fp8))
    tl.store(codes + at * WIDTH + d, _over(rest, scale).to(fp8), mask=d >= 2 * HALF)
    tl.store(weights + at, tl.load(head_weights + at).to(tl.float32) * scale * first * second)


def index_queries(
    x: torch.Tensor,
    head_weights: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    floor: float,
    factors: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """indexer.rounded_queries behind its products: x bf16 [T, Hi, d] turned, its e4m3 codes, and head_weights bf16
    [T, Hi] times the codes' scales times both factors, one after the other, fp32."""
    tokens, heads, width = x.shape
    codes = torch.empty(tokens, heads, width, dtype=torch.float8_e4m3fn, device=x.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    _index_queries_kernel[(tokens * heads,)](
        x, head_weights, cos_sin, codes, weights, floor, *factors, heads,
        INTERLEAVED=interleaved, HALF=cos_sin.shape[2], WIDTH=width, num_warps=1, **OVERLAPPED, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, weights


@triton.jit
def _silu_mul_kernel(x, out, width, BLOCK: tl.constexpr):
    begin()
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(x + t * 2 * width + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (t * 2 + 1) * width + d, mask=inside, other=0.0)
    silu = tl.div_rn(gate, 1.0 + libdevice.exp(-gate)).to(up.dtype)
    tl.store(out + t * width + d, (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded, times up: bf16 [T, 2 I] -> [T, I]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(tokens, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4, **OVERLAPPED)
    return out


@triton.jit
def _write_fp8_kernel(
    latent, rope, positions, block_table, codes, scales, halves, latent_row, rope_row, block_size,
    PLAIN: tl.constexpr, FLOOR: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    begin()
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    slot = tl.load(block_table + position // block_size) * block_size + position % block_size
    g, d, r = tl.arange(0, 4), tl.arange(0, 128), tl.arange(0, 64)
    at = g[:, None] * 128 + d[None, :]
    value = tl.load(latent + t * latent_row + at).to(tl.float32)
    scale = _over(tl.max(tl.abs(value), 1), E4M3_MAX)
    scale = tl.maximum(scale, SMALLEST_NORMAL) if PLAIN else _power_of_two(tl.maximum(scale, FLOOR))
    tl.store(
        codes + slot * ROW + at, tl.div_rn(value, tl.zeros_like(value) + scale[:, None]).to(codes.dtype.element_ty)
    )
    tl.store(scales + slot * (ROW // 4) + 128 + g, scale)
    tl.store(halves + slot * (ROW // 2) + 264 + r, tl.load(rope + t * rope_row + r))


@triton.jit
def _write_bf16_kernel(
    latent,
    rope,
    positions,
    block_table,
    rows,
    latent_row,
    rope_row,
    block_size,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    begin()
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    slot = tl.load(block_table + position // block_size) * block_size + position % block_size
    c, r = tl.arange(0, LATENT), tl.arange(0, ROPE)
    tl.store(rows + slot * (LATENT + ROPE) + c, tl.load(latent + t * latent_row + c))
    tl.store(rows + slot * (LATENT + ROPE) + LATENT + r, tl.load(rope + t * rope_row + r))


def write_rows(
    rows: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    plain_scales: bool,
    scale_floor: float,
) -> None:
    """KVCache.write: latent bf16 [T, L] and rope bf16 [T, R] into a layer's rows, bf16 [S, L + R] or uint8 [S, 656]."""
    if rows.dtype == torch.uint8:
        _write_fp8_kernel[(len(positions),)](
            latent,
            rope,
            positions,
            block_table,
            rows.view(torch.float8_e4m3fn),
            rows.view(torch.float32),
            rows.view(torch.bfloat16),
            latent.stride(0),
            rope.stride(0),
            block_size,
            PLAIN=plain_scales,
            FLOOR=scale_floor,
            ROW=rows.shape[1],
            num_warps=4,
            **OVERLAPPED,
            enable_fp_fusion=False,
        )
        return
    _write_bf16_kernel[(len(positions),)](
        latent, rope, positions, block_table, rows, latent.stride(0), rope.stride(0), block_size,
        LATENT=latent.shape[1], ROPE=rope.shape[1], num_warps=4, **OVERLAPPED,
    )  # fmt: skip


@triton.jit
def _write_index_kernel(keys, positions, block_table, codes, scales, page_bytes, block_size, FLOOR: tl.constexpr):
    begin()
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    block, token = tl.load(block_table + position // block_size), position % block_size
    d = tl.arange(0, 128)
    value = tl.load(keys + t * 128 + d).to(tl.float32)
    scale = _power_of_two(_over(tl.maximum(tl.max(tl.abs(value), 0), FLOOR), E4M3_MAX))
    tl.store(codes + block * page_bytes + token * 128 + d, _over(value, scale).to(codes.dtype.element_ty))
    tl.store(scales + block * (page_bytes // 4) + block_size * 32 + token, scale)


def write_index(
    pool: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    keys: torch.Tensor,
    floor: float,
) -> None:
    """KVCache.write_index: keys bf16 [T, 128] into uint8 [blocks, block_size * 132]."""
    _write_index_kernel[(len(positions),)](
        keys,
        positions,
        block_table,
        pool.view(torch.float8_e4m3fn),
        pool.view(torch.float32),
        pool.shape[1],
        block_size,
        FLOOR=floor,
        num_warps=1,
        **OVERLAPPED,
        enable_fp_fusion=False,
    )


@triton.jit
def _route_kernel(
    logits, bias, weights, ids, experts,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, NORMALISE: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    begin()
    t = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, EXPERTS), tl.arange(0, WIDTH)
    inside = e < experts
    value = tl.load(logits + t * experts + e, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.div_rn(tl.full((EXPERTS,), 1.0, tl.float32), 1.0 + libdevice.exp(-value))
    else:
        power = libdevice.exp(value - tl.max(value, 0))
        score = _over(power, tl.sum(power, 0))
    choice = score
    if BIAS:
        choice = score + tl.load(bias + e, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    chosen = tl.zeros((WIDTH,), tl.float32)
    for i in tl.static_range(CHOSEN):
        best = tl.argmax(choice, 0, tie_break_left=True)
        chosen = tl.where(slot == i, tl.sum(tl.where(e == best, score, 0.0), 0), chosen)
        tl.store(ids + t * CHOSEN + i, best.to(tl.int64))
        choice = tl.where(e == best, float("-inf"), choice)
    if NORMALISE:
        chosen = _over(chosen, tl.sum(chosen, 0))
    tl.store(weights + t * CHOSEN + slot, chosen, mask=slot < CHOSEN)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, sigmoid: bool, chosen: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe.route without groups: logits [T, E], bias fp32 [E] -> weights fp32 and ids int64 [T, k], the best first."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    _route_kernel[(tokens,)](
        logits, logits if bias is None else bias, weights, ids, experts,
        SIGMOID=sigmoid, BIAS=bias is not None, NORMALISE=normalise, CHOSEN=chosen,
        EXPERTS=triton.next_power_of_2(experts), WIDTH=triton.next_power_of_2(chosen),
        num_warps=4 if experts > 128 else 1, **OVERLAPPED, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids


@triton.jit
def _combine_kernel(
    outputs, weights, shared, out, factor, width, CHOSEN: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    kind = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(CHOSEN):
        value = tl.load(outputs + (t * CHOSEN + i) * width + d, mask=inside, other=0.0)
        total += (value * tl.load(weights + t * CHOSEN + i)).to(kind).to(tl.float32)
    result = total.to(kind)
    if SCALED:
        result = (result.to(tl.float32) * factor).to(kind)
    if SHARED:
        other = tl.load(shared + t * width + d, mask=inside, other=0.0).to(tl.float32)
        result = (other + result.to(tl.float32)).to(kind)
    tl.store(out + t * width + d, result, mask=inside)


def combine_experts(
    outputs: torch.Tensor, weights: torch.Tensor, factor: float, shared: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The end of moe.moe: fp32 [T * k, D] times weights [T, k], each rounded, added in fp32, rounded, times factor,
    rounded, plus the shared expert's bf16 [T, D]."""
    tokens, chosen = weights.shape
    width = outputs.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=outputs.device)
    block = min(1024, triton.next_power_of_2(width))
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        outputs, weights, out if shared is None else shared, out, factor, width,
        CHOSEN=chosen, SHARED=shared is not None, SCALED=factor != 1.0, BLOCK=block, num_warps=4, **OVERLAPPED,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
