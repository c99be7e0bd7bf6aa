"""The lightning indexer alone: equation 1, rounding and page bytes, the tie rule, both rotary pairings (case K3)."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tilert_ref.connector.rounding import INDEX_KEY_FLOOR, INDEX_QUERY_FLOOR, quantize_index
from tilert_ref.engine.batch import Batch
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import ModelConfig, load_config
from tilert_ref.engine.indexer import (
    index_keys,
    index_scores,
    index_scores_apart,
    index_weights,
    lightning_index,
    top_positions,
)
from tilert_ref.engine.numerics import Kernels, SumOrder
from tilert_ref.engine.rope import rope_table
from tilert_ref.engine.weights import IndexerWeights

# Rounding


def e4m3_values() -> list[float]:
    """Magnitudes of codes 0x00 .. 0x7e, from the format's definition: 4 exponent bits (bias 7), 3 mantissa bits."""
    return [
        (mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]


def quantised_by_hand(vector: list[float], floor: float) -> tuple[list[int], float]:
    """Nearest code, ties to the even one, under the smallest power of two that keeps the largest value at most 448."""
    scale = 2.0 ** math.ceil(math.log2(max(*(abs(x) for x in vector), floor) / 448))
    table = e4m3_values()
    codes = [min(range(127), key=lambda c, x=x: (abs(table[c] - abs(x) / scale), c % 2)) for x in vector]
    return [code | (0x80 if math.copysign(1, x) < 0 else 0) for code, x in zip(codes, vector, strict=True)], scale


def test_literal_codes_and_scale() -> None:
    vector = torch.zeros(1, 128, dtype=torch.bfloat16)
    vector[0, :4] = torch.tensor([1.0, 0.3, -0.3, 2.0**-17])
    codes, scales = quantize_index(vector, INDEX_KEY_FLOOR)
    assert codes.view(torch.uint8)[0, :5].tolist() == [0x78, 0x6A, 0xEA, 0x01, 0x00]
    assert scales.tolist() == [2.0**-8]


@pytest.mark.parametrize(
    ("amax", "floor", "exponent"),
    [
        (448.0, INDEX_KEY_FLOOR, 0),
        (450.0, INDEX_KEY_FLOOR, 1),
        (0.875, INDEX_KEY_FLOOR, -9),
        (0.0, INDEX_KEY_FLOOR, -22),
        (0.0, INDEX_QUERY_FLOOR, -42),
        (1e-5, INDEX_KEY_FLOOR, -22),
        (1e-5, INDEX_QUERY_FLOOR, -25),
    ],
)
def test_scales_and_their_two_floors(amax: float, floor: float, exponent: int) -> None:
    _, scales = quantize_index(torch.tensor([[amax] + [0.0] * 127]), floor)
    assert scales.tolist() == [2.0**exponent]


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 300.0])
def test_rounding_equals_the_format_by_its_definition(spread: float) -> None:
    vectors = (torch.randn(20, 128, generator=torch.Generator().manual_seed(3)) * spread).bfloat16()
    codes, scales = quantize_index(vectors, INDEX_KEY_FLOOR)
    for vector, row, scale in zip(vectors.tolist(), codes.view(torch.uint8).tolist(), scales.tolist(), strict=True):
        assert (row, scale) == quantised_by_hand(vector, INDEX_KEY_FLOOR)


# Page bytes


def index_cache(block_size: int = 64, index_dtype: torch.dtype = torch.float8_e4m3fn) -> KVCache:
    config = SimpleNamespace(cache_width=576, index_topk=4, has_indexer=lambda layer: True)
    return KVCache(config, 2, 150, block_size=block_size, index_dtype=index_dtype)


def test_a_key_lies_where_the_page_layout_says() -> None:
    """Token 65 is token 1 of page 1: codes at 128, scale at 8196 (case K2)."""
    cache, key = index_cache(), torch.zeros(1, 128, dtype=torch.bfloat16)
    key[0, :2] = torch.tensor([1.0, 0.3])
    cache.write_index(1, torch.tensor([65]), key)
    page = cache.index[1, 1]
    assert page.shape == (8448,)
    assert page[128:130].tolist() == [0x78, 0x6A]
    assert bytes(page[8196:8200].tolist()).hex() == "0000803b"
    assert page.nonzero().flatten().tolist() == [128, 129, 8198, 8199]
    assert not cache.index[0].any() and not cache.index[1, 0].any()


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_keys_come_back_rounded_from_any_block_size_and_order(block_size: int) -> None:
    cache, generator = index_cache(block_size), torch.Generator().manual_seed(1)
    cache.block_table = cache.block_table[torch.randperm(len(cache.block_table), generator=generator)]
    keys = torch.randn(150, 128, generator=generator)
    for first, last in ((0, 70), (70, 71), (71, 150)):
        cache.write_index(0, torch.arange(first, last), keys[first:last])
    codes, scales = quantize_index(keys, INDEX_KEY_FLOOR)
    read, read_scales = cache.read_index(0, 150)
    assert torch.equal(read, codes.float()) and torch.equal(read_scales, scales)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_injected_pages_are_read_as_they_came(block_size: int) -> None:
    sender, receiver = index_cache(64), index_cache(block_size)
    keys = torch.randn(130, 128, generator=torch.Generator().manual_seed(2))
    sender.write_index(1, torch.arange(130), keys)
    receiver.index.fill_(7)
    receiver.inject_index([1], [sender.index[1]], 130)
    for left, right in zip(sender.read_index(1, 130), receiver.read_index(1, 130), strict=True):
        assert torch.equal(left, right)
    assert (receiver.index[0] == 7).all(), "another layer was touched"


def test_unrounded_keys_for_comparisons_come_back_as_they_are() -> None:
    cache, keys = index_cache(16, torch.float32), torch.randn(40, 128)
    cache.write_index(0, torch.arange(40), keys)
    read, scales = cache.read_index(0, 40)
    assert torch.equal(read, keys) and (scales == 1).all()


def test_an_index_dtype_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match=r"index_dtype = torch.bfloat16, legal: torch.float8_e4m3fn, torch.float32"):
        index_cache(index_dtype=torch.bfloat16)


# Equation 1


@pytest.mark.parametrize("apart", [True, False])
def test_scores_equal_the_equation_in_double_precision(apart: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    q, q_scale = quantize_index(torch.randn(3, 5, 128, generator=generator) * 3, INDEX_QUERY_FLOOR)
    k, k_scale = quantize_index(torch.randn(40, 128, generator=generator), INDEX_KEY_FLOOR)
    w = torch.randn(3, 5, generator=generator)
    score = partial(index_scores_apart, order=SumOrder.TORCH) if apart else index_scores
    scores = score(q.float(), w * q_scale, k.float(), k_scale, [38, 39, 40])
    true_q, true_k = q.double() * q_scale[..., None], k.double() * k_scale[:, None]
    for t, length in enumerate([38, 39, 40]):
        for s in range(40):
            expected = sum(w[t, j].double() * max(0.0, float(true_q[t, j] @ true_k[s])) for j in range(5))
            assert scores[t, s].item() == (
                pytest.approx(float(expected), rel=1e-4, abs=1e-4) if s < length else -math.inf
            )


def test_weights_carry_the_scale_of_the_query_and_both_roots(glm5: ModelConfig) -> None:
    """2 * 3 / (sqrt(128) * sqrt(32)) = 0.09375, times the query's scale."""
    weights_proj = torch.zeros(32, glm5.hidden_size, dtype=torch.bfloat16)
    weights_proj[5, 7] = 3.0
    x = torch.zeros(1, glm5.hidden_size, dtype=torch.bfloat16)
    x[0, 7] = 2.0
    weights = index_weights(glm5, x @ weights_proj.T, torch.full((1, 32), 2.0**-4))
    assert weights.dtype is torch.float32 and weights.nonzero().tolist() == [[0, 5]]
    assert weights[0, 5].item() == pytest.approx(0.09375 / 16, rel=1e-6)


# Top-k


def test_lowest_position_wins_a_tie() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 5.0, 2.0]])
    assert top_positions(scores, 3).tolist() == [[1, 2, 4]]
    assert top_positions(scores, 4).tolist() == [[1, 2, 3, 4]]
    assert top_positions(torch.zeros(2, 9), 4).tolist() == [[0, 1, 2, 3]] * 2
    assert top_positions(torch.tensor([[0.0, -0.0, -0.0, 1.0]]), 2).tolist() == [[0, 3]], "-0 equals 0"


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_top_positions_equal_a_stable_sort(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (50, 300), generator=generator).float()
    scores[:, 250:] = -math.inf  # the future
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 7, 249, 250):
        assert torch.equal(top_positions(scores, count), ranked[:, :count].sort(-1).values)


def test_scores_without_a_rank_are_refused() -> None:
    scores = torch.zeros(2, 5)
    scores[1, 3] = math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        top_positions(scores, 2)


# The whole


@pytest.fixture
def glm5(tiny) -> ModelConfig:
    return load_config(tiny("glm5", index_topk=32))


def random_indexer(config: ModelConfig) -> IndexerWeights:
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    heads, width = config.index_n_heads, config.index_head_dim
    norm = torch.rand(width, generator=generator) + 0.5, torch.randn(width, generator=generator)
    wq_b, wk = draw(heads * width, config.q_lora_rank), draw(width, config.hidden_size)
    return IndexerWeights(wq_b, wk, *norm, draw(heads, config.hidden_size))


def decode_batch(config: ModelConfig, first: int, tokens: int) -> Batch:
    positions = torch.arange(first, first + tokens)
    cos_sin = rope_table(config, 256, torch.bfloat16)[positions]
    return Batch(first, positions, cos_sin, absorbed=True, kernels=Kernels())


def test_a_querys_choice_does_not_depend_on_its_neighbours(glm5: ModelConfig) -> None:
    """64 queries and more at once, two, and one by one choose the same; up to index_topk tokens all are seen."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(150, glm5.hidden_size, generator=generator).bfloat16()
    c_q = torch.randn(150, glm5.q_lora_rank, generator=generator).bfloat16()
    w, choices = random_indexer(glm5), []
    for step in (150, 2, 1):
        cache = KVCache(glm5, 1, 200)
        seen = []
        for t in range(0, 150, step):
            batch = decode_batch(glm5, t, step)
            seen += lightning_index(w, glm5, cache, 0, batch, x[t : t + step], c_q[t : t + step])
        assert [s.stop for s in seen[:32]] == list(range(1, 33))
        choices.append(torch.stack(seen[32:]))
    assert torch.equal(choices[0], choices[1]) and torch.equal(choices[0], choices[2])
    assert (choices[0].diff(dim=-1) > 0).all(), "ascending"
    assert (choices[0][:, -1] <= torch.arange(32, 150)).all(), "never the future"
    assert (choices[0][:, -1] < torch.arange(32, 150)).any(), "the choice isn't just the latest tokens"


@pytest.mark.parametrize(("interleaved", "partner"), [(True, 1), (False, 32)])
def test_pairing_follows_the_config(glm5: ModelConfig, interleaved: bool, partner: int) -> None:
    """Position 1 turns pair 0 by one radian: (1, 2) becomes case K3's literal numbers wherever the pair lies."""
    config = replace(glm5, indexer_rope_interleave=interleaved)
    normed = torch.zeros(128)
    normed[0] = normed[70] = 1.0
    normed[1] = normed[32] = 2.0
    w = replace(random_indexer(config), k_norm=torch.zeros(128), k_norm_bias=normed)
    batch = replace(decode_batch(config, 1, 1), cos_sin=rope_table(config, 2, torch.float32)[1:])
    key = index_keys(w, config, batch, torch.ones(1, config.hidden_size, dtype=torch.bfloat16)).float()[0]
    assert [key[0].item(), key[partner].item()] == pytest.approx([-1.142640, 1.922076], abs=1e-5)
    assert torch.equal(key[64:], normed[64:]), "only the first qk_rope_head_dim values turn"
