"""Between vLLM's paged caches and the planes of a handoff: gather (prefill) and scatter (the way back, for tests).

A cache block holds `block` tokens; token t of a prompt lies in block `block_ids[t div block]` at row t mod block. vLLM
chooses the block size (16, 64, 128 seen), the wire always counts in pages of 64 tokens.

An index-key block holds the codes of all its tokens first, then their scales (protocol.md 10): block * 128 bytes, then
block * 4 bytes. With block = 64 it is a wire page; with any other size the pages are built from the tokens.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from tilert_ref.connector.layout import (
    INDEX_HEAD_DIM,
    INDEX_PAGE,
    INDEX_PAGE_BYTES,
    PAGE_TOKENS,
    LayoutError,
    index_code_offset,
    page_count,
)

CODE_BYTES = INDEX_HEAD_DIM * INDEX_PAGE["codes"].dtype.itemsize
SCALE_BYTES = INDEX_PAGE["scales"].dtype.itemsize
INDEX_TOKEN_BYTES = CODE_BYTES + SCALE_BYTES


def block_index(block_ids: Sequence[int], seq_len: int, cache: torch.Tensor) -> torch.Tensor:
    """The blocks of a prompt as an int64 tensor on the cache's device; block ids beyond the prompt are left out.

    vLLM allocates ahead, so there may be more ids than the prompt needs. Fewer, or one outside the cache, is an error.
    Make it once per prompt and hand it to the gathers of all layers: they take a tensor as it is.
    """
    num_blocks, block = cache.shape[:2]
    needed = -(-seq_len // block)
    used = list(block_ids[:needed])
    if len(used) < needed:
        raise LayoutError(f"{seq_len} tokens need {needed} blocks of {block}, got {len(used)}")
    if bad := [b for b in used if not 0 <= b < num_blocks]:
        raise LayoutError(f"block ids {bad} of a cache with {num_blocks} blocks")
    return torch.tensor(used, dtype=torch.int64, device=cache.device)


def gather_rows(
    cache: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    seq_len: int,
    out_kv: torch.Tensor,
    out_pe: torch.Tensor,
) -> None:
    """Copies a prompt's rows out of one layer's MLA cache; each row is split between the two planes.

    Args:
        cache: [num_blocks, block, W], any dtype.
        block_ids: the prompt's blocks in order, or the tensor of `block_index`.
        out_kv, out_pe: uint8 [seq_len, kv_bytes] and [seq_len, pe_bytes], kv_bytes + pe_bytes = bytes of a row.
    """
    rows = _cache_bytes(cache)
    ids = _resolve(block_ids, seq_len, rows)
    for part, out in _row_parts(rows, out_kv, out_pe, seq_len):
        out.copy_(part.index_select(0, ids).flatten(0, 1)[:seq_len])


def scatter_rows(
    kv: torch.Tensor, pe: torch.Tensor, cache: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, seq_len: int
) -> None:
    """The inverse of `gather_rows`. Rows of the last block beyond seq_len keep their bytes."""
    rows = _cache_bytes(cache)
    ids = _resolve(block_ids, seq_len, rows)
    block = cache.shape[1]
    position = torch.arange(seq_len, device=cache.device)
    for part, plane in _row_parts(rows, kv, pe, seq_len):
        part[ids[position // block], position % block] = plane


def gather_index_pages(
    cache: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, seq_len: int, out_pages: torch.Tensor
) -> None:
    """Copies a prompt's index keys out of one layer's indexer cache, whole pages.

    Tokens beyond seq_len in the last page: whatever vLLM's last block holds there, zero where it holds nothing.

    Args:
        cache: uint8 [num_blocks, block, 132].
        out_pages: uint8 [page_count(seq_len), 8448].
    """
    _check_index_shapes(cache, seq_len, out_pages)
    blocks = _flat_blocks(cache).index_select(0, _resolve(block_ids, seq_len, cache))  # [n, block * 132]
    if cache.shape[1] == PAGE_TOKENS:
        out_pages.copy_(blocks)
        return
    out_pages.zero_()
    for source, target in zip(_index_parts(blocks), _index_parts(out_pages), strict=True):
        _copy_tokens(source, target, blocks.shape[0] * cache.shape[1])


def scatter_index_pages(
    pages: torch.Tensor, cache: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, seq_len: int
) -> None:
    """The inverse of `gather_index_pages`; tokens of the last block beyond seq_len keep their bytes."""
    _check_index_shapes(cache, seq_len, pages)
    ids = _resolve(block_ids, seq_len, cache)
    flat = _flat_blocks(cache)
    blocks = flat.index_select(0, ids)
    for source, target in zip(_index_parts(pages), _index_parts(blocks), strict=True):
        _copy_tokens(source, target, seq_len)
    flat.index_copy_(0, ids, blocks)


def index_tokens(pages: torch.Tensor, seq_len: int) -> torch.Tensor:
    """uint8 [n, 8448] -> the tokens' codes and scales, uint8 [seq_len, 132], without what lies behind them."""
    return torch.cat([part.flatten(0, 1)[:seq_len] for part in _index_parts(pages)], dim=1)


def tile_index_pages(pages: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 8448] with linear codes -> the same pages with tiled codes (protocol.md 8.3). Scales stay."""
    tiled = pages.clone()
    tiled[:, _tiled_order(pages.device)] = pages[:, : PAGE_TOKENS * CODE_BYTES]
    return tiled


def untile_index_pages(pages: torch.Tensor) -> torch.Tensor:
    """The inverse of `tile_index_pages`."""
    linear = pages.clone()
    linear[:, : PAGE_TOKENS * CODE_BYTES] = pages[:, _tiled_order(pages.device)]
    return linear


@cache
def _tiled_order(device: torch.device) -> torch.Tensor:
    """[8192]: where value (token, dim) lies in a tiled page, in linear order of (token, dim)."""
    tokens, dims = range(PAGE_TOKENS), range(INDEX_HEAD_DIM)
    offsets = [index_code_offset(token, dim, tiled=True) for token in tokens for dim in dims]
    return torch.tensor(offsets, device=device)


def _cache_bytes(cache: torch.Tensor) -> torch.Tensor:
    if cache.ndim != 3:
        raise LayoutError(f"a cache is [num_blocks, block, width], got {list(cache.shape)}")
    return cache.view(torch.uint8)


def _resolve(block_ids: Sequence[int] | torch.Tensor, seq_len: int, cache: torch.Tensor) -> torch.Tensor:
    return block_ids if isinstance(block_ids, torch.Tensor) else block_index(block_ids, seq_len, cache)


def _row_parts(
    rows: torch.Tensor, kv: torch.Tensor, pe: torch.Tensor, seq_len: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of the cache row, plane) for kv and pe."""
    split, width = kv.shape[1], rows.shape[2]
    if kv.shape[0] != seq_len or pe.shape != (seq_len, width - split):
        got = f"{list(kv.shape)} and {list(pe.shape)}"
        raise LayoutError(f"planes of {seq_len} rows of {width} bytes must add up to them, got {got}")
    yield rows[:, :, :split], kv
    yield rows[:, :, split:], pe


def _check_index_shapes(cache: torch.Tensor, seq_len: int, pages: torch.Tensor) -> None:
    if cache.ndim != 3 or cache.shape[2] != INDEX_TOKEN_BYTES or cache.dtype != torch.uint8:
        got = f"{cache.dtype} {list(cache.shape)}"
        raise LayoutError(f"an indexer cache is torch.uint8 [num_blocks, block, {INDEX_TOKEN_BYTES}], got {got}")
    if pages.shape != (page_count(seq_len), INDEX_PAGE_BYTES):
        want = [page_count(seq_len), INDEX_PAGE_BYTES]
        raise LayoutError(f"index pages of {seq_len} tokens are {want}, got {list(pages.shape)}")


def _flat_blocks(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block * 132], never a copy: layers may share one storage, so blocks may lie far apart."""
    return cache.view(cache.shape[0], -1)


def _index_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, block * 132] -> views: codes [n, block, 128] and scales [n, block, 4]."""
    block = blocks.shape[1] // INDEX_TOKEN_BYTES
    codes, scales = blocks.split([block * CODE_BYTES, block * SCALE_BYTES], dim=1)
    return codes.unflatten(1, (block, CODE_BYTES)), scales.unflatten(1, (block, SCALE_BYTES))


def _copy_tokens(source: torch.Tensor, target: torch.Tensor, tokens: int) -> None:
    """First `tokens` tokens (at most what both hold) from [n, a, bytes] to [m, b, bytes]."""
    room = target.shape[0] * target.shape[1]
    rows = source.flatten(0, 1)[: min(tokens, room)]
    token = torch.arange(rows.shape[0], device=target.device)
    target[token // target.shape[1], token % target.shape[1]] = rows
