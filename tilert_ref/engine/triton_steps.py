"""The bookkeeping of a captured step, one short Triton kernel each: where its tokens stand, which id is best, how many
drafts hold, the next window. graph.py has the same in torch, a dozen kernels that a step would wait for one by one.

Imported only where there is a Hopper GPU.
"""

import torch
import triton
import triton.language as tl

from tilert_ref.engine.triton_overlap import OVERLAPPED, begin

CHUNK = 4096  # logits of a program


@triton.jit
def _place_kernel(start, table, positions, cos_sin, offset, last, row, WIDTH: tl.constexpr):
    begin()
    t = tl.program_id(0)
    position = tl.minimum(tl.load(start) + offset + t, last)
    tl.store(positions + t, position)
    i = tl.arange(0, WIDTH)
    tl.store(cos_sin + t * row + i, tl.load(table + position * row + i, mask=i < row), mask=i < row)


def place(start: torch.Tensor, offset: int, tokens: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """decode.place: positions int64 [T] from start int64 [1] + offset on, and the rows of table [S, 2, R / 2] there."""
    positions = torch.empty(tokens, dtype=torch.int64, device=start.device)
    cos_sin = torch.empty(tokens, *table.shape[1:], dtype=table.dtype, device=start.device)
    row = table[0].numel()
    _place_kernel[(tokens,)](
        start, table, positions, cos_sin, offset, len(table) - 1, row,
        WIDTH=triton.next_power_of_2(row), num_warps=1, **OVERLAPPED,
    )  # fmt: skip
    return positions, cos_sin


@triton.jit
def _best_kernel(rows, values, ids, width, CHUNK: tl.constexpr):
    """The highest of a chunk, of equal ones the first; NaN counts as infinite."""
    begin()
    chunk, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(rows + t * width + i, mask=i < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    top = tl.max(value, 0)
    at = t * tl.num_programs(0) + chunk
    tl.store(values + at, top)
    tl.store(ids + at, tl.min(tl.where(value == top, i, width), 0).to(tl.int64))


@triton.jit
def _best_of_chunks_kernel(values, ids, best, chunks, CHUNKS: tl.constexpr):
    begin()
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CHUNKS)
    value = tl.load(values + t * chunks + i, mask=i < chunks, other=float("-inf"))
    first = tl.min(tl.where((value == tl.max(value, 0)) & (i < chunks), i, CHUNKS), 0)
    tl.store(best + t, tl.load(ids + t * chunks + first))


def best(rows: torch.Tensor) -> torch.Tensor:
    """rows.argmax(-1) of bf16 or fp32 [T, V], of equal ones the first, int64 [T]."""
    (tokens, width), device = rows.shape, rows.device
    chunk = min(CHUNK, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, chunk)
    values = torch.empty(tokens, chunks, dtype=torch.float32, device=device)
    ids = torch.empty(tokens, chunks, dtype=torch.int64, device=device)
    _best_kernel[(chunks, tokens)](rows.contiguous(), values, ids, width, CHUNK=chunk, num_warps=8, **OVERLAPPED)
    if chunks == 1:
        return ids[:, 0]
    found = torch.empty(tokens, dtype=torch.int64, device=device)
    several = triton.next_power_of_2(chunks)
    _best_of_chunks_kernel[(tokens,)](values, ids, found, chunks, CHUNKS=several, num_warps=1, **OVERLAPPED)
    return found


@triton.jit
def _accept_kernel(
    ids, guesses, emitted, accepted, total, steps, count, window, room, steps_room, WINDOW: tl.constexpr
):  # fmt: skip
    begin()
    i = tl.arange(0, WINDOW)
    chosen = tl.load(ids + i, mask=i < window, other=-1)
    guess = tl.load(guesses + 1 + i, mask=i < window - 1, other=-1)
    fails = (chosen != guess) | (i >= window - 1)
    found = tl.min(tl.where(fails, i, WINDOW), 0).to(tl.int64) + 1
    so_far, step = tl.load(total), tl.load(steps)
    tl.store(emitted + tl.minimum(so_far + i, room - 1), chosen, mask=i < window)
    tl.store(accepted + tl.minimum(step, steps_room - 1), found)
    tl.store(count, found)
    tl.store(total, so_far + found)
    tl.store(steps, step + 1)


def accept(
    ids: torch.Tensor,
    guesses: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    total: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    """graph.accept: all int64, ids and guesses [1 + d], and a DecodeState's results. -> how many ids hold, [1]."""
    count = torch.empty_like(total)
    _accept_kernel[(1,)](
        ids, guesses, emitted, accepted, total, steps, count, len(ids), len(emitted), len(accepted),
        WINDOW=triton.next_power_of_2(len(ids)), num_warps=1, **OVERLAPPED,
    )  # fmt: skip
    return count


@triton.jit
def _next_window_kernel(ids, drafts, count, tokens, position, last, num_drafts, WINDOW: tl.constexpr):
    begin()
    i = tl.arange(0, WINDOW)
    emitted = tl.load(count)
    tl.store(tokens, tl.load(ids + emitted - 1))
    tl.store(tokens + 1 + i, tl.load(drafts + i, mask=i < num_drafts), mask=i < num_drafts)
    tl.store(position, tl.minimum(tl.load(position) + emitted, last))


def next_window(
    ids: torch.Tensor,
    drafts: torch.Tensor | None,
    count: torch.Tensor,
    tokens: torch.Tensor,
    position: torch.Tensor,
    last: int,
) -> None:
    """graph.next_window: the window after the first `count` [1] of ids [1 + d] and drafts [d], at most at `last`."""
    num_drafts = len(tokens) - 1
    _next_window_kernel[(1,)](
        ids, ids if drafts is None else drafts, count, tokens, position, last, num_drafts,
        WINDOW=triton.next_power_of_2(len(tokens)), num_warps=1, **OVERLAPPED,
    )  # fmt: skip
