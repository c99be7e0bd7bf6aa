"""Sparse attention of a few queries on Hopper, as Triton kernels: index scores, the choice of the best tokens, and
multi-head latent attention over the chosen rows. Nothing waits for the host, and every shape is fixed beforehand, so a
step can be captured once and replayed at any position.

Sums are taken in the order of vLLM's kernels (DeepGEMM's logits, FlashMLA, FlashAttention 3), see vllm_hopper.py.
Imported only where there is a Hopper GPU.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilert_ref.engine import vllm_hopper
from tilert_ref.engine.triton_overlap import ON_A_GPU, OVERLAPPED, begin

ROWS = 64  # cached rows that a program attends to, and keys that it scores
KEY_WIDTH = 128
IN_REGISTERS = 8192  # scores of a query that one program chooses from
VALUES = 64  # of a row that a program sums which goes through all of its rows
CHUNK = 2048  # scores of a program where there are more
HEADS, TILE = 64, 128  # of a program of attention: heads, and values of a row at a time


@triton.jit
def _scores_kernel(
    query,
    weights,
    codes,
    scales,
    block_table,
    positions,
    scores,
    capacity,
    heads,
    page_bytes,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    begin()
    page, t = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions + t) + 1
    if page * ROWS >= length:
        return
    j, h, d = tl.arange(0, ROWS), tl.arange(0, HEADS), tl.arange(0, KEY_WIDTH)
    block = tl.load(block_table + page)
    keys = tl.load(codes + block * page_bytes + j[:, None] * KEY_WIDTH + d[None, :])
    q = tl.load(query + (t * heads + h[None, :]) * KEY_WIDTH + d[:, None], mask=h[None, :] < heads, other=0.0)
    w = tl.load(weights + t * heads + h, mask=h < heads, other=0.0)
    dots = tl.maximum(tl.dot(keys, q), 0.0)
    scale = tl.load(scales + block * (page_bytes // 4) + (ROWS * KEY_WIDTH) // 4 + j)
    total = tl.sum(dots * w[None, :], 1) * scale
    tl.store(scores + t.to(tl.int64) * capacity + page * ROWS + j, total, mask=page * ROWS + j < length)


def index_scores(
    query: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Eq. 1 of indexer.py over the cached keys; fp32 [T, S], S the cache's capacity; nothing behind positions[t].

    query e4m3 [T, Hi, 128], weights fp32 [T, Hi], pool uint8 [blocks, 64 * 132], positions int64 [T].
    """
    tokens, heads, _ = query.shape
    capacity = len(block_table) * ROWS
    scores = torch.empty(tokens, capacity, dtype=torch.float32, device=query.device)
    _scores_kernel[(len(block_table), tokens)](
        query,
        weights,
        pool.view(torch.float8_e4m3fn),
        pool.view(torch.float32),
        block_table,
        positions,
        scores,
        capacity,
        heads,
        pool.shape[1],
        HEADS=max(16, triton.next_power_of_2(heads)),
        KEY_WIDTH=KEY_WIDTH,
        ROWS=ROWS,
        num_warps=4,
        **OVERLAPPED,
    )
    return scores


@triton.jit
def _rank(score):
    """An unsigned number for every fp32 that isn't NaN, in the same order; both zeros are one."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _take_all(block_table, slots, length, count, lane, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """A query with no more than count tokens before it sees them all."""
    for start in range(0, count, CHUNK):
        p = start + lane
        block = tl.load(block_table + p // ROWS, mask=p < length, other=0)
        tl.store(slots + p, (block * ROWS + p % ROWS).to(tl.int32), mask=p < length)


@triton.jit
def _write_chosen(rank, edge, wanted, written, equal_before, p, length, block_table, slots, ROWS: tl.constexpr):
    """Slots of all positions p above the edge, and of those on it the first ones: ascending positions."""
    equal = ((rank == edge) & (p < length)).to(tl.int32)
    first = equal_before + tl.cumsum(equal, 0) <= wanted
    taken = ((rank > edge) & (p < length)) | ((equal > 0) & first)
    order = written + tl.cumsum(taken.to(tl.int32), 0) - 1
    block = tl.load(block_table + p // ROWS, mask=taken, other=0)
    tl.store(slots + order, (block * ROWS + p % ROWS).to(tl.int32), mask=taken)


@triton.jit
def _choice_kernel(
    scores, block_table, positions, slots, counts, capacity, count, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    """A query's scores in one program's registers."""
    begin()
    t = tl.program_id(0)
    length = (tl.load(positions + t) + 1).to(tl.int32)
    lane = tl.arange(0, CHUNK)
    scores += t.to(tl.int64) * capacity
    slots += t.to(tl.int64) * count
    tl.store(counts + t, tl.minimum(length, count))
    if length <= count:
        _take_all(block_table, slots, length, count, lane, CHUNK, ROWS)
        return
    # The count-th highest rank, two bits at a time: the highest number that at least `count` ranks reach.
    rank = _rank(tl.load(scores + lane, mask=lane < length, other=0.0))
    rank = tl.where(lane < length, rank, 0)
    edge = tl.zeros((), tl.uint32)
    one = tl.full((), 1, tl.uint32)
    for shift in range(30, -1, -2):
        low, middle, high = edge | (one << shift), edge | (one << (shift + 1)), edge | ((one + 2) << shift)
        # Three counts in one sum: each sum is a round through all warps, and there are sixteen.
        reach = (rank >= low).to(tl.int64) + ((rank >= middle).to(tl.int64) << 20) + ((rank >= high).to(tl.int64) << 40)
        reach = tl.sum(reach, 0)
        edge = tl.where((reach & 0xFFFFF) >= count, low, edge)
        edge = tl.where(((reach >> 20) & 0xFFFFF) >= count, middle, edge)
        edge = tl.where((reach >> 40) >= count, high, edge)
    above = tl.sum((rank > edge).to(tl.int32), 0)
    _write_chosen(rank, edge, count - above, 0, 0, lane, length, block_table, slots, ROWS)


@triton.jit
def _narrowed(histogram, edge, wanted, SHIFT: tl.constexpr):
    """One digit of eight bits further: the edge's digit, and how many are wanted of those that share all of it."""
    bins = tl.arange(0, 256)
    held = tl.load(histogram + bins)
    from_top = tl.cumsum(held, 0, reverse=True)
    at = tl.sum((from_top >= wanted).to(tl.int32), 0) - 1
    wanted -= tl.sum(tl.where(bins > at, held, 0), 0)
    return edge | (at.to(tl.uint32) << SHIFT), wanted


@triton.jit
def _edge(histograms, count, DIGITS: tl.constexpr):
    """The upper DIGITS digits of the count-th highest rank, from the histograms of the digits before."""
    edge = tl.zeros((), tl.uint32)
    wanted = tl.zeros((), tl.int32) + count
    for digit in tl.static_range(DIGITS):
        edge, wanted = _narrowed(histograms + 256 * digit, edge, wanted, 24 - 8 * digit)
    return edge, wanted


@triton.jit
def _histogram_kernel(scores, positions, histograms, capacity, count, DIGIT: tl.constexpr, CHUNK: tl.constexpr):
    """Adds a chunk's ranks that share the edge's digits so far to the histogram of the next one."""
    begin()
    t = tl.program_id(1)
    length = (tl.load(positions + t) + 1).to(tl.int32)
    start = tl.program_id(0) * CHUNK
    if (length <= count) | (start >= length):
        return
    histograms += t * 4 * 256
    p = start + tl.arange(0, CHUNK)
    rank = _rank(tl.load(scores + t.to(tl.int64) * capacity + p, mask=p < length, other=0.0))
    same = p < length
    if DIGIT > 0:
        edge, _ = _edge(histograms, count, DIGIT)
        same = same & (rank >> (32 - 8 * DIGIT) == edge >> (32 - 8 * DIGIT))
    held = tl.histogram(((rank >> (24 - 8 * DIGIT)) & 255).to(tl.int32), 256, mask=same)
    bins = tl.arange(0, 256)
    tl.atomic_add(histograms + 256 * DIGIT + bins, held, mask=held > 0)


@triton.jit
def _tally_kernel(scores, positions, histograms, tallies, capacity, count, chunks, CHUNK: tl.constexpr):
    """How many ranks of a chunk are above the edge, and how many on it."""
    begin()
    t, chunk = tl.program_id(1), tl.program_id(0)
    length = (tl.load(positions + t) + 1).to(tl.int32)
    if (length <= count) | (chunk * CHUNK >= length):
        return
    edge, _ = _edge(histograms + t * 4 * 256, count, 4)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    rank = _rank(tl.load(scores + t.to(tl.int64) * capacity + p, mask=p < length, other=0.0))
    tl.store(tallies + t * 2 * chunks + chunk, tl.sum(((rank > edge) & (p < length)).to(tl.int32), 0))
    tl.store(tallies + (t * 2 + 1) * chunks + chunk, tl.sum(((rank == edge) & (p < length)).to(tl.int32), 0))


@triton.jit
def _compact_kernel(
    scores,
    block_table,
    positions,
    histograms,
    tallies,
    slots,
    counts,
    capacity,
    count,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes a chunk's chosen slots behind those of the chunks before it."""
    begin()
    t, chunk = tl.program_id(1), tl.program_id(0)
    length = (tl.load(positions + t) + 1).to(tl.int32)
    lane = tl.arange(0, CHUNK)
    slots += t.to(tl.int64) * count
    if chunk == 0:
        tl.store(counts + t, tl.minimum(length, count))
        if length <= count:
            _take_all(block_table, slots, length, count, lane, CHUNK, ROWS)
    if (length <= count) | (chunk * CHUNK >= length):
        return
    edge, wanted = _edge(histograms + t * 4 * 256, count, 4)
    before = tl.arange(0, CHUNKS)
    above = tl.sum(tl.load(tallies + t * 2 * chunks + before, mask=before < chunk, other=0), 0)
    equal = tl.sum(tl.load(tallies + (t * 2 + 1) * chunks + before, mask=before < chunk, other=0), 0)
    p = chunk * CHUNK + lane
    rank = _rank(tl.load(scores + t.to(tl.int64) * capacity + p, mask=p < length, other=0.0))
    _write_chosen(rank, edge, wanted, above + tl.minimum(equal, wanted), equal, p, length, block_table, slots, ROWS)


def choose(
    scores: torch.Tensor, block_table: torch.Tensor, positions: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """indexer.top_positions for queries at `positions`, as cache slots: int32 [T, count] and how many of them, [T].

    Ascending positions, of equal scores the lowest first. A query with no more than count tokens before it sees all.
    Up to IN_REGISTERS scores are one program's business; more are searched by many, a digit of their ranks a launch.
    """
    tokens, capacity = scores.shape
    slots = torch.empty(tokens, count, dtype=torch.int32, device=scores.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=scores.device)
    if capacity <= IN_REGISTERS:
        chunk = triton.next_power_of_2(capacity)
        warps = min(16, max(4, chunk // 512))
        _choice_kernel[(tokens,)](
            scores,
            block_table,
            positions,
            slots,
            counts,
            capacity,
            count,
            CHUNK=chunk,
            ROWS=ROWS,
            num_warps=warps,
            **OVERLAPPED,
        )
        return slots, counts
    chunks = triton.cdiv(capacity, CHUNK)
    grid, sizes = (chunks, tokens), {"CHUNK": CHUNK, "num_warps": 4} | OVERLAPPED
    histograms = torch.zeros(tokens, 4, 256, dtype=torch.int32, device=scores.device)
    tallies = torch.empty(tokens, 2, chunks, dtype=torch.int32, device=scores.device)
    for digit in range(4):
        _histogram_kernel[grid](scores, positions, histograms, capacity, count, DIGIT=digit, **sizes)
    _tally_kernel[grid](scores, positions, histograms, tallies, capacity, count, chunks, **sizes)
    _compact_kernel[grid](
        scores,
        block_table,
        positions,
        histograms,
        tallies,
        slots,
        counts,
        capacity,
        count,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        ROWS=ROWS,
        **sizes,
    )
    return slots, counts


@triton.jit
def _dequantized(codes, scales):
    """fp8_ds_mla codes as FlashMLA multiplies them: by the scale rounded to bf16, the product rounded too."""
    return (codes.to(tl.float32) * scales.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _reciprocal(x):
    """1 / x as the GPU has it in one instruction; FlashMLA and FlashAttention 3 multiply by that."""
    if ON_A_GPU:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _log2(x):
    """CUDA's log2f; tl.log2 is the GPU's own, which is less exact."""
    return libdevice.log2(x) if ON_A_GPU else tl.log2(x)


@triton.jit
def _attend_kernel(
    q_latent,
    q_rope,
    rows,
    codes,
    scales,
    slots,
    counts,
    out,
    sums,
    heads,
    chosen,
    row_stride,
    code_stride,
    rope_at,
    scale_log2,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One query's heads over one block of 64 rows: the weighted rows, and the logarithm of the weights' sum."""
    begin()
    block, t, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + t)
    if block * ROWS >= count:
        return
    group, part = part // (LATENT // TILE), part % (LATENT // TILE)
    # A head's weights lie in four threads, pairs of columns in turns. FlashMLA adds threads 0 and 1 first, Triton 0 and
    # 2: so threads 1 and 2 get one another's rows. (The product with the rows doesn't mind: it takes 16 at a time.)
    j = tl.arange(0, ROWS)
    j = (j // 8) * 8 + ((j & 2) << 1) + ((j & 4) >> 1) + (j & 1)
    h = group * HEADS + tl.arange(0, HEADS)
    valid = block * ROWS + j < count
    slot = tl.load(slots + t.to(tl.int64) * chosen + block * ROWS + j, mask=valid, other=0).to(tl.int64)
    q_row = q_latent + (t * heads + h[:, None]) * LATENT
    # All loads first: one program has one block of rows, so nothing else would hide their time.
    keys, key_scales = (), ()
    for tile in tl.static_range(LATENT // TILE):
        c = tile * TILE + tl.arange(0, TILE)
        keys += (tl.load(codes + slot[None, :] * code_stride + c[:, None]),)
        if FP8:
            key_scales += (tl.load(scales + slot * (row_stride // 2) + LATENT // 4 + tile),)
    c = part * TILE + tl.arange(0, TILE)
    v = tl.load(codes + slot[:, None] * code_stride + c[None, :])
    if FP8:
        v = _dequantized(v, tl.load(scales + slot * (row_stride // 2) + LATENT // 4 + part)[:, None])
    scores = tl.zeros((HEADS, ROWS), tl.float32)
    for tile in tl.static_range(LATENT // TILE):
        q = tl.load(q_row + tile * TILE + tl.arange(0, TILE)[None, :], mask=h[:, None] < heads, other=0.0)
        k = keys[tile]
        if FP8:
            k = _dequantized(k, key_scales[tile][None, :])
        scores = tl.dot(q, k, scores)
    r = tl.arange(0, ROPE)
    q = tl.load(q_rope + (t * heads + h[:, None]) * ROPE + r[None, :], mask=h[:, None] < heads, other=0.0)
    scores = tl.dot(q, tl.load(rows + slot[None, :] * row_stride + rope_at + r[:, None]), scores)
    scores = tl.where(valid[None, :], scores, float("-inf"))
    top = tl.max(scores, 1) * scale_log2
    factor = tl.full((HEADS, ROWS), 0.0, tl.float32) + scale_log2
    weights = tl.exp2(tl.fma(scores, factor, tl.zeros_like(scores) - top[:, None]))
    total = tl.sum(weights, 1)
    p = weights.to(tl.bfloat16)
    base = (t * tl.num_programs(0) + block).to(tl.int64) * heads + h
    o = tl.dot(p, v) * _reciprocal(total)[:, None]
    tl.store(out + base[:, None] * LATENT + c[None, :], o, mask=h[:, None] < heads)
    if part == 0:
        tl.store(sums + base, _log2(total) + top, mask=h < heads)


@triton.jit
def _merge_kernel(
    out, sums, counts, merged, heads, blocks, LATENT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    begin()
    h, t = tl.program_id(0), tl.program_id(1)
    b, c = tl.arange(0, BLOCKS), tl.arange(0, LATENT)
    used = tl.cdiv(tl.load(counts + t), ROWS)
    base = t.to(tl.int64) * blocks * heads + h
    parts = tl.load(sums + base + b * heads, mask=b < used, other=float("-inf"))
    top = tl.max(parts, 0)
    whole = _log2(tl.sum(tl.exp2(parts - top), 0)) + top
    total = tl.zeros((LATENT,), tl.float32)
    for i in range(used):
        share = tl.exp2(tl.load(sums + base + i * heads) - whole)
        total = tl.fma(share + tl.zeros_like(total), tl.load(out + (base + i * heads) * LATENT + c), total)
    tl.store(merged + (t * heads + h).to(tl.int64) * LATENT + c, total.to(merged.dtype.element_ty))


@triton.jit
def _attend_backwards_kernel(
    q_latent,
    q_rope,
    rows,
    slots,
    counts,
    out,
    heads,
    chosen,
    scale_log2,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One query's heads over all of its rows, from the last block of 64 to the first."""
    begin()
    part, t = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + t)
    h = (part // (LATENT // VALUES)) * HEADS + tl.arange(0, HEADS)
    part = part % (LATENT // VALUES)
    j, r = tl.arange(0, ROWS), tl.arange(0, ROPE)
    q_row = q_latent + (t * heads + h[:, None]) * LATENT
    v_at = part * VALUES + tl.arange(0, VALUES)
    q_turned = tl.load(q_rope + (t * heads + h[:, None]) * ROPE + r[None, :], mask=h[:, None] < heads, other=0.0)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    threads_total = tl.zeros((HEADS, 4), tl.float32)  # four threads have a head's weights, and add up their own first
    value = tl.zeros((HEADS, VALUES), tl.float32)
    blocks = tl.cdiv(count, ROWS)
    slots += t.to(tl.int64) * chosen
    at = (blocks - 1) * ROWS + j
    slot = tl.load(slots + at, mask=(at >= 0) & (at < count), other=0).to(tl.int64)
    for _ in range(0, blocks):
        row = rows + slot * (LATENT + ROPE)
        # All loads of a block first, and the slots of the next: nothing else would hide their time.
        turned_keys = tl.load(row[None, :] + LATENT + r[:, None])
        keys = ()
        for tile in tl.static_range(LATENT // TILE):
            keys += (tl.load(row[None, :] + tile * TILE + tl.arange(0, TILE)[:, None]),)
        v = tl.load(row[:, None] + v_at[None, :])
        valid = at < count
        at -= ROWS
        slot = tl.load(slots + at, mask=at >= 0, other=0).to(tl.int64)
        scores = tl.dot(q_turned, turned_keys)
        for tile in tl.static_range(LATENT // TILE):
            c = tile * TILE + tl.arange(0, TILE)
            q = tl.load(q_row + c[None, :], mask=h[:, None] < heads, other=0.0)
            scores = tl.dot(q, keys[tile], scores)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        factor = tl.full((HEADS, ROWS), 0.0, tl.float32) + scale_log2
        weights = tl.exp2(tl.fma(scores, factor, tl.zeros_like(scores) - (new_top * scale_log2)[:, None]))
        rescale = tl.exp2((top - new_top) * scale_log2)
        value = tl.dot(weights.to(tl.bfloat16), v, value * rescale[:, None])
        own = tl.reshape(tl.permute(tl.reshape(weights, (HEADS, 8, 4, 2)), (0, 2, 1, 3)), (HEADS, 4, 16))
        begun = tl.fma(rescale[:, None, None] + tl.zeros_like(own), threads_total[:, :, None] + tl.zeros_like(own), own)
        threads_total = tl.sum(tl.where(tl.arange(0, 16)[None, None, :] == 0, begun, own), 2)
        top = new_top
    value = value * _reciprocal(tl.sum(threads_total, 1))[:, None]
    to = out + ((t * heads + h[:, None]) * LATENT).to(tl.int64) + v_at[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=h[:, None] < heads)


def attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    backwards: bool,
) -> torch.Tensor:
    """softmax(scale q k^T) v over chosen rows, as vllm_hopper.attend_fp8_rows takes it: every block of 64 rows for
    itself, merged by log-sum-exp. backwards: as attend_bf16_rows does, one block after the other from the last.

    Args:
        q_latent, q_rope: bf16 [T, H, latent] and [T, H, rope].
        rows: a layer's cache, bf16 [S, latent + rope], or uint8 [S, 656] of fp8_ds_mla rows.
        slots, counts: int32 [T, n] rows that each query attends to, and how many of them are.

    Returns:
        bf16 [T, H, latent].
    """
    form = _attend_backwards if backwards else _attend_blocks
    return form(q_latent.contiguous(), q_rope.contiguous(), rows, slots, counts, vllm_hopper.log2_scale(scale))


def _attend_backwards(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale_log2: float,
) -> torch.Tensor:
    tokens, heads, latent = q_latent.shape
    out = torch.empty_like(q_latent)
    values = min(VALUES, latent)
    _attend_backwards_kernel[(triton.cdiv(heads, HEADS) * (latent // values), tokens)](
        q_latent,
        q_rope,
        rows,
        slots,
        counts,
        out,
        heads,
        slots.shape[1],
        scale_log2,
        HEADS=HEADS,
        LATENT=latent,
        ROPE=q_rope.shape[2],
        TILE=min(TILE, latent),
        VALUES=values,
        ROWS=ROWS,
        num_warps=4,
        **OVERLAPPED,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def _attend_blocks(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale_log2: float,
) -> torch.Tensor:
    (tokens, heads, latent), rope = q_latent.shape, q_rope.shape[2]
    fp8, chosen, halves = rows.dtype == torch.uint8, slots.shape[1], rows.view(torch.bfloat16)
    blocks, tile = triton.cdiv(chosen, ROWS), min(TILE, latent)
    out = torch.empty(tokens, blocks, heads, latent, dtype=torch.float32, device=rows.device)
    sums = torch.empty(tokens, blocks, heads, dtype=torch.float32, device=rows.device)
    merged = torch.empty_like(q_latent)
    _attend_kernel[(blocks, tokens, triton.cdiv(heads, HEADS) * (latent // tile))](
        q_latent,
        q_rope,
        halves,
        rows.view(torch.float8_e4m3fn) if fp8 else halves,
        rows.view(torch.float32) if fp8 else halves,
        slots,
        counts,
        out,
        sums,
        heads,
        chosen,
        halves.shape[1],
        rows.shape[1],
        halves.shape[1] - rope,
        scale_log2,
        FP8=fp8,
        HEADS=HEADS,
        LATENT=latent,
        ROPE=rope,
        TILE=tile,
        ROWS=ROWS,
        num_warps=4,
        **OVERLAPPED,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _merge_kernel[(heads, tokens)](
        out,
        sums,
        counts,
        merged,
        heads,
        blocks,
        LATENT=latent,
        BLOCKS=triton.next_power_of_2(blocks),
        ROWS=ROWS,
        num_warps=4,
        **OVERLAPPED,
        enable_fp_fusion=False,
    )
    return merged
