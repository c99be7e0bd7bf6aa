"""Gather and scatter between paged caches and planes, against one loop per token."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilert_ref.connector.layout import LayoutError, page_count
from tilert_ref.connector.planes import (
    block_index,
    gather_index_pages,
    gather_rows,
    scatter_index_pages,
    scatter_rows,
    tile_index_pages,
    untile_index_pages,
)

BLOCKS = st.sampled_from([1, 3, 16, 32, 64, 100, 128])


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[int], int]:
    """(tokens in a block, blocks in the cache, block ids in any order and maybe too many, seq_len)."""
    block = draw(BLOCKS)
    seq_len = draw(st.integers(1, 200))
    needed = -(-seq_len // block)
    spare = draw(st.integers(0, 3))
    num_blocks = needed + spare + draw(st.integers(0, 3))
    ids = draw(st.permutations(range(num_blocks)))[: needed + spare]
    return block, num_blocks, list(ids), seq_len


def one_layer(num_blocks: int, block: int, width: int, shared: bool) -> torch.Tensor:
    """A cache of its own, or (vLLM does both) the second of three layers whose blocks lie side by side."""
    if shared:
        return random_bytes(num_blocks, 3, block, width, seed=block)[:, 1]
    return random_bytes(num_blocks, block, width, seed=block)


@settings(max_examples=80, deadline=None)
@given(prompt=prompts(), split=st.integers(1, 4), shared=st.booleans(), as_bf16=st.booleans(), once=st.booleans())
def test_gather_rows_takes_every_token_from_its_slot(
    prompt: tuple[int, int, list[int], int], split: int, shared: bool, as_bf16: bool, once: bool
) -> None:
    block, num_blocks, ids, seq_len = prompt
    cache = one_layer(num_blocks, block, 12, shared)
    kv, pe = torch.zeros(seq_len, 2 * split, dtype=torch.uint8), torch.zeros(seq_len, 12 - 2 * split, dtype=torch.uint8)
    source = cache.view(torch.bfloat16) if as_bf16 else cache
    gather_rows(source, block_index(ids, seq_len, source) if once else ids, seq_len, kv, pe)
    for t in range(seq_len):
        row = cache[ids[t // block], t % block]
        assert torch.equal(torch.cat([kv[t], pe[t]]), row), f"token {t}"


@settings(max_examples=60, deadline=None)
@given(prompt=prompts(), shared=st.booleans())
def test_scatter_rows_undoes_gather_and_touches_nothing_else(
    prompt: tuple[int, int, list[int], int], shared: bool
) -> None:
    block, num_blocks, ids, seq_len = prompt
    cache = one_layer(num_blocks, block, 12, shared)
    kv, pe = random_bytes(seq_len, 8, seed=1), random_bytes(seq_len, 4, seed=2)
    expected = cache.clone()
    for t in range(seq_len):
        expected[ids[t // block], t % block] = torch.cat([kv[t], pe[t]])
    scatter_rows(kv, pe, cache, ids, seq_len)
    assert torch.equal(cache, expected)


def index_token(cache: torch.Tensor, block_id: int, row: int) -> torch.Tensor:
    """128 codes and 4 scale bytes of one token of a vLLM indexer block."""
    block = cache.shape[1]
    flat = cache[block_id].reshape(-1)
    return torch.cat([flat[row * 128 : row * 128 + 128], flat[block * 128 + row * 4 : block * 128 + row * 4 + 4]])


def page_token(pages: torch.Tensor, t: int) -> torch.Tensor:
    page, o = pages[t // 64], t % 64
    return torch.cat([page[o * 128 : o * 128 + 128], page[8192 + 4 * o : 8192 + 4 * o + 4]])


@settings(max_examples=60, deadline=None)
@given(prompt=prompts(), shared=st.booleans())
@example(prompt=(32, 5, [3, 0], 64), shared=True)  # blocks and pages hold the same number of tokens
@example(prompt=(128, 2, [1], 70), shared=False)
def test_gather_index_pages_for_any_block_size(prompt: tuple[int, int, list[int], int], shared: bool) -> None:
    block, num_blocks, ids, seq_len = prompt
    cache = one_layer(num_blocks, block, 132, shared)
    pages = random_bytes(page_count(seq_len), 8448, seed=9)
    gather_index_pages(cache, ids, seq_len, pages)
    held = -(-seq_len // block) * block  # tokens in the prompt's blocks, the unused ones of the last block included
    for t in range(64 * page_count(seq_len)):
        want = index_token(cache, ids[t // block], t % block) if t < held else torch.zeros(132, dtype=torch.uint8)
        assert torch.equal(page_token(pages, t), want), f"token {t}"


@settings(max_examples=60, deadline=None)
@given(prompt=prompts(), shared=st.booleans())
def test_scatter_index_pages_undoes_gather_and_touches_nothing_else(
    prompt: tuple[int, int, list[int], int], shared: bool
) -> None:
    block, num_blocks, ids, seq_len = prompt
    cache = one_layer(num_blocks, block, 132, shared)
    before = cache.clone()
    pages = random_bytes(page_count(seq_len), 8448, seed=9)
    scatter_index_pages(pages, cache, ids, seq_len)
    position = {(ids[t // block], t % block): t for t in range(seq_len)}
    for block_id in range(num_blocks):
        for row in range(block):
            t = position.get((block_id, row))
            want = index_token(before, block_id, row) if t is None else page_token(pages, t)
            assert torch.equal(index_token(cache, block_id, row), want)


def test_a_block_of_64_tokens_is_a_wire_page() -> None:
    cache = random_bytes(5, 64, 132, seed=0)
    pages = torch.zeros(2, 8448, dtype=torch.uint8)
    gather_index_pages(cache, [4, 1], 65, pages)
    assert torch.equal(pages, cache[[4, 1]].reshape(2, 8448))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 3), seed=st.integers(0, 1000))
def test_tiling_is_a_permutation_of_the_codes(n: int, seed: int) -> None:
    pages = random_bytes(n, 8448, seed=seed)
    tiled = tile_index_pages(pages)
    assert torch.equal(untile_index_pages(tiled), pages)
    assert torch.equal(tiled[:, 8192:], pages[:, 8192:])
    for o, d in ((0, 0), (17, 18), (63, 127), (15, 16)):  # protocol.md 8.3
        byte = o // 16 * 2048 + d // 16 * 256 + o % 16 * 16 + d % 16
        assert torch.equal(tiled[:, byte], pages[:, o * 128 + d])


@pytest.mark.parametrize(
    ("ids", "seq_len", "message"),
    [
        ([0, 1], 9, "9 tokens need 3 blocks of 4, got 2"),
        ([0, 6], 8, r"block ids \[6\] of a cache with 6 blocks"),
        ([-1], 4, r"block ids \[-1\]"),
    ],
)
def test_block_lists_that_do_not_fit(ids: list[int], seq_len: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        block_index(ids, seq_len, torch.zeros(6, 4, 8))


def test_planes_of_the_wrong_size() -> None:
    cache, plane = torch.zeros(2, 4, 12, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="must add up"):
        gather_rows(cache, [0], 4, plane, torch.zeros(4, 5, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="index pages of 65 tokens"):
        gather_index_pages(torch.zeros(3, 64, 132, dtype=torch.uint8), [0, 1], 65, torch.zeros(1, 8448))
    with pytest.raises(LayoutError, match="an indexer cache is"):
        gather_index_pages(torch.zeros(3, 64, 128, dtype=torch.uint8), [0], 5, torch.zeros(1, 8448))
