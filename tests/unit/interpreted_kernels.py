"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1, under which kernels are Python over CPU tensors."""

import math

import torch

from tilert_ref.connector.rounding import INDEX_KEY_FLOOR, quantize_index
from tilert_ref.engine import triton_attention, triton_pointwise, triton_products, triton_steps
from tilert_ref.engine.block_fp8 import (
    ActivationScale,
    BlockScale,
    dequantize_blocks,
    quantize_activations,
    quantize_blocks,
)
from tilert_ref.engine.decode import place
from tilert_ref.engine.graph import DecodeState, accept, next_window
from tilert_ref.engine.indexer import top_positions


def choice(capacity: int, ends: list[int], count: int) -> None:
    scores = torch.randn(len(ends), capacity)
    scores[:, 100:2000] = 0.0
    scores[0, ::2] = -0.0
    scores[-1] = 1.0
    table, positions = torch.randperm(capacity // 64), torch.tensor(ends)
    slots, counts = triton_attention.choose(scores, table, positions, count)
    best = top_positions(scores.masked_fill(torch.arange(capacity) > positions[:, None], -math.inf), count)
    for ours, n, theirs, end in zip(slots, counts.tolist(), best, ends, strict=True):
        theirs = torch.arange(end + 1) if end < count else theirs
        assert n == min(count, end + 1), (capacity, end)
        assert ours[:n].tolist() == (table[theirs // 64] * 64 + theirs % 64).tolist(), (capacity, end)


def products() -> None:
    triton_products._multiprocessors = lambda device: 132
    for rows, columns in ((64, 256), (128, 2048)):  # the second is cut along K
        codes, scales = quantize_blocks(torch.randn(rows, columns), BlockScale.PLAIN)
        a, a_scales = quantize_activations(torch.randn(3, columns).bfloat16(), ActivationScale.UE8M0)
        ours = triton_products.fp8_product(a.flatten(1), a_scales, codes, scales)
        theirs = (a.float() * a_scales[..., None]).flatten(1) @ dequantize_blocks(codes, scales).T
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def index_scores() -> None:
    pool, table = torch.zeros(5, 8448, dtype=torch.uint8), torch.randperm(5)
    keys, key_scales = quantize_index(torch.randn(5 * 64, 128), INDEX_KEY_FLOOR)
    pool[:, :8192] = keys.view(torch.uint8).view(5, -1)
    pool.view(torch.float32)[:, 2048:] = key_scales.view(5, 64)
    query, weights = torch.randn(2, 4, 128).to(torch.float8_e4m3fn), torch.randn(2, 4)
    ours = triton_attention.index_scores(query, weights, pool, table, torch.tensor([319, 70]))
    at = (table[:, None] * 64 + torch.arange(64)).flatten()
    dots = torch.einsum("thd,sd->ths", query.float(), keys[at].float()).relu()
    theirs = (dots * weights[..., None]).sum(1) * key_scales[at]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[1, :71], theirs[1, :71], rtol=1e-4, atol=1e-4)


def norms() -> None:
    """In fp32: what is compared is which values are added and where they go; their order is a GPU's business."""
    for tokens, width in ((2, 128), (1, 512), (2, 6144), (256, 2304)):
        x, residual, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(width)
        for before in (None, residual):
            out, stream = triton_pointwise.add_rms_norm(x, before, weight, 1e-6)
            total = x if before is None else x + residual
            assert stream.equal(total)
            expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def steps(num_drafts: int) -> None:
    """Three steps' bookkeeping as graph.py has it in torch; the last one runs behind the end of the room."""
    table = torch.randn(11, 2, 4)
    ours, theirs = (DecodeState.empty(4, num_drafts, torch.device("cpu")) for _ in range(2))
    for state in (ours, theirs):
        state.start(6, 3)
    for step in range(3):
        ids = torch.randint(0, 2, (1 + num_drafts,))
        drafts = torch.randint(0, 2, (num_drafts,)) if num_drafts else None
        placed = triton_steps.place(ours.position, 2, 1 + num_drafts, table)
        for mine, other in zip(placed, place(theirs.position, 2, 1 + num_drafts, table), strict=True):
            assert mine.equal(other), (mine, other)
        results = ours.emitted, ours.accepted, ours.total, ours.steps
        count = triton_steps.accept(ids, ours.tokens, *results)
        assert count.equal(accept(theirs, ids))
        triton_steps.next_window(ids, drafts, count, ours.tokens, ours.position, 10 - num_drafts)
        next_window(theirs, ids, drafts, count, 10 - num_drafts)
        for name in ("tokens", "position", "accepted", "total", "steps"):
            assert getattr(ours, name).equal(getattr(theirs, name)), (step, name)
        emitted = min(int(ours.total), 4)
        assert ours.emitted[:emitted].equal(theirs.emitted[:emitted])
    rows = torch.randint(0, 3, (3, 9000)).float()
    rows[2] = -torch.inf
    assert triton_steps.best(rows).equal(rows.argmax(-1))
    assert triton_steps.best(rows[:, :1000]).equal(rows[:, :1000].argmax(-1))


if __name__ == "__main__":
    torch.manual_seed(0)
    choice(4608, [4000, 255, 300, 20, 4607], 256)  # in one program's registers
    choice(20_032, [20_031, 9000, 255, 20, 12_345], 256)  # by many
    products()
    index_scores()
    norms()
    for number in (0, 1, 3):
        steps(number)
    print("all equal")
