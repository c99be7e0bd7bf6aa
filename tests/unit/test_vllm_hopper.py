"""The arithmetic of Hopper's tensor cores and of the sparse attention kernels on them, on literal numbers."""

import math

import pytest
import torch

from tilert_ref.connector.rounding import E4M3_MAX, over_448
from tilert_ref.engine.attention import attend
from tilert_ref.engine.model import add_rms_norm, rms_norm
from tilert_ref.engine.numerics import Pointwise
from tilert_ref.engine.rope import apply_rope
from tilert_ref.engine.vllm_hopper import (
    _lanes_sum,
    _thread_sums,
    attend_bf16_rows,
    attend_fp8_rows,
    bf16_dot,
    fp8_dot,
    operand,
    sum_of_squares,
)

BF16 = torch.bfloat16


def fp8(*values: float) -> torch.Tensor:
    """[1, 32]: these e4m3 values, then zeros."""
    row = torch.zeros(1, 32)
    row[0, : len(values)] = torch.tensor(values)
    assert row.to(torch.float8_e4m3fn).float().equal(row)
    return row


def dot8(a: torch.Tensor, b: torch.Tensor) -> float:
    return fp8_dot(operand(a), operand(b)).item()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # 256 * 256 = 2^16: what lies below 2^(16 - 13) = 8 is cut off, each product for itself
        (fp8(256, 2), fp8(256, 2), 65536.0),
        (fp8(256, 2, 2), fp8(256, 2, 2), 65536.0),
        (fp8(256, 4), fp8(256, 2), 65544.0),
        (fp8(256, 3), fp8(256, 5), 65544.0),  # 15 -> 8
        (fp8(256, -3), fp8(256, 5), 65528.0),  # toward zero: -15 -> -8
        # the exponent of a product is the sum of its factors': 3.5 * 3.5 = 12.25 has 2, not 3, and 2^-11 is kept twice
        (fp8(3.5, 2**-6, 2**-6), fp8(3.5, 2**-5, 2**-5), 12.25 + 2**-10),
        (fp8(8, 2**-6, 2**-6), fp8(1.5, 2**-5, 2**-5), 12.0),  # here it is 3
        (fp8(0), fp8(0), 0.0),
        (fp8(2**-9), fp8(2**-9), 2.0**-18),  # subnormals
    ],
)
def test_fp8_products_are_aligned_and_cut(a: torch.Tensor, b: torch.Tensor, expected: float) -> None:
    assert dot8(a, b) == expected


def test_fp8_sums_are_cut_between_groups_of_32() -> None:
    """The second group starts with the first one's sum, which has 13 fraction bits left."""
    a, b = torch.cat((fp8(256), fp8(2)), dim=1), torch.cat((fp8(256), fp8(2)), dim=1)
    assert dot8(a, b) == 65536.0
    assert dot8(b.flip(1).roll(0, 1), a.flip(1)) == 65536.0  # the small one first: cut when the large one comes


def test_fp8_without_loss_equals_the_exact_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(1, 8, (n, 128), generator=generator).float() for n in (3, 5))
    torch.testing.assert_close(fp8_dot(operand(a), operand(b)), a @ b.T, rtol=0, atol=0)


def test_bf16_products_keep_25_bits() -> None:
    row = torch.zeros(1, 16)
    row[0, 0], small = 1.0, torch.zeros(1, 16)
    small[0, 0], small[0, 1] = 1.0, 2.0**-25
    ones = torch.ones(1, 16)
    assert bf16_dot(row, ones).item() == 1.0
    assert bf16_dot(small, ones).item() == 1.0  # 2^-25 is kept in the sum, and lost when that becomes fp32
    assert bf16_dot(torch.cat((small, small), 1), torch.ones(1, 32)).item() == 2.0
    two = small.clone()
    two[0, 1:5] = 2.0**-25
    assert bf16_dot(two, ones).item() == 1.0 + 2.0**-23  # four of them are one bit of fp32
    assert bf16_dot(two, ones, torch.tensor([[0.5]])).item() == 1.5 + 2.0**-23
    assert bf16_dot(-two, ones).item() == -(1.0 + 2.0**-23)


@pytest.mark.parametrize("rows", [1, 15, 64, 65, 128, 200, 256])
def test_attention_is_softmax_up_to_rounded_weights(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(4, 576, generator=generator).to(BF16).float()
    keys = torch.randn(rows, 576, generator=generator).to(BF16).float()
    plain = attend(query, keys, 512, 0.06)
    for kernel in (attend_fp8_rows, attend_bf16_rows):
        torch.testing.assert_close(kernel(query, keys, 512, 0.06), plain, rtol=2e-2, atol=2e-2)


def test_the_order_of_rows_decides_bits() -> None:
    """As in vLLM, where threads race for it; within a block it doesn't matter."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(n, 576, generator=generator).to(BF16).float() for n in (4, 256))
    within = torch.cat([block[torch.randperm(64, generator=generator)] for block in keys.split(64)])
    across = keys[torch.randperm(256, generator=generator)]
    out = attend_fp8_rows(query, keys, 512, 0.06)
    torch.testing.assert_close(attend_fp8_rows(query, within, 512, 0.06), out, rtol=1e-5, atol=1e-5)
    assert (attend_fp8_rows(query, across, 512, 0.06).to(BF16) != out.to(BF16)).float().mean() > 0.01


def test_rope_comes_before_latent_in_scores_of_bf16_rows() -> None:
    """16 products of 2^-26 are 2^-22 together, but nothing once 1 is there. The scale makes that a factor of two."""
    query, rows = torch.zeros(1, 32), torch.zeros(2, 32)  # 16 latent values, 16 rotary ones
    query[0, 0], query[0, 16:] = 1.0, 2.0**-13
    rows[:, 0], rows[0, 1], rows[0, 16:] = 1.0, 1.0, 2.0**-13
    scale = 2.0**22 * math.log(2)
    torch.testing.assert_close(attend_bf16_rows(query, rows, 16, scale)[0, :2], torch.tensor([1.0, 2 / 3]))
    torch.testing.assert_close(attend_fp8_rows(query, rows, 16, scale)[0, :2], torch.tensor([1.0, 1 / 2]))


def test_norms_round_once_or_twice() -> None:
    x, weight = torch.tensor([[1.0, 3.0]], dtype=BF16), torch.tensor([1.3984375, 1.3984375], dtype=BF16)
    exact = (x.double() / x.double().pow(2).mean().sqrt() * weight.double()).to(BF16)
    assert rms_norm(x, weight, 0.0, Pointwise.FUSED).equal(exact)
    generator = torch.Generator().manual_seed(0)
    x, residual, w = (torch.randn(8, 128, generator=generator).to(BF16) for _ in range(3))
    fused, stream = add_rms_norm(x, residual, w[0], 1e-5, Pointwise.FUSED)
    assert stream.equal((x.float() + residual.float()).to(BF16))
    assert fused.equal(rms_norm(stream, w[0], 1e-5, Pointwise.FUSED))
    assert not fused.equal(add_rms_norm(x, residual, w[0], 1e-5, Pointwise.NATIVE)[0])


def squares(width: int, *at: int, tokens: int = 1, added: bool = False) -> float:
    """Less 2^24, the sum of squares of a row with 2^12 at 0 and 1 at these places: 1 is lost beside 2^24, 2 isn't."""
    row = torch.zeros(tokens, width)
    row[:, 0], row[:, list(at)] = 2**12, 1
    return sum_of_squares(row, added)[0].item() - 2**24


def test_the_order_of_a_norms_squares() -> None:
    """Within a vector of 8, among the 32 threads of a warp, among warps."""
    assert squares(512, 2, 3) == 0  # one value after the other
    assert squares(512, 2, 3, added=True) == 2  # pairs
    assert squares(512, 1, 2, added=True) == 0
    assert squares(512, 8, 16) == 0  # threads 0 and 1 first, then both and the pair of 2 and 3
    assert squares(512, 16, 24) == 2
    assert squares(512, 8, 16, 24) == 2
    assert squares(512, 256, 264) == 2  # the other warp has added its own before
    assert squares(1024, 256, 512) == 0  # warps one after the other
    # From 256 tokens on a thread of 256 has vectors 0, 256 and 512 of 6,144 values; of fewer tokens others have those.
    assert squares(6144, 2048, 2056, tokens=255) == 2
    assert squares(6144, 2048, 2056, tokens=256) == 0


def test_the_order_of_attentions_weights() -> None:
    """Four threads have pairs of columns, eight apart; the blocks' shares meet as the lanes of a warp do."""
    weights = torch.zeros(1, 64)
    weights[0, [0, 1, 8, 9, 63]] = torch.tensor([2.0**24, 1, 1, 1, 5])
    assert _thread_sums(weights).tolist() == [[2.0**24, 0, 0, 5]]
    before = torch.tensor([[2.0, 0, 0, 7]], dtype=torch.float64)
    assert _thread_sums(weights[:, [0, *[5] * 62, 63]], before).tolist() == [[2.0**24 + 2, 0, 0, 12]]
    assert _lanes_sum(torch.tensor([2.0**24, 1, 1, 1]).view(4, 1, 1)) == 2.0**24 + 2
    assert _lanes_sum(torch.tensor([2.0**24, 1, 1]).view(3, 1, 1)) == 2.0**24


def test_rope_rounds_once_or_each_product() -> None:
    """cos = sin = 0.703125 (bf16): 1.0078125 * cos - 1.015625 * sin = -0.0054931640625."""
    x = torch.tensor([[1.0078125, 1.015625]], dtype=BF16)
    cos_sin = torch.full((1, 2, 1), 0.703125, dtype=BF16)
    assert apply_rope(x, cos_sin, Pointwise.FUSED)[0, 0].item() == -0.0054931640625
    assert apply_rope(x, cos_sin, Pointwise.NATIVE)[0, 0].item() == -0.0078125


def test_scales_are_divided_not_multiplied() -> None:
    x = torch.arange(1, 4000).float() / 7
    assert over_448(x).equal((x.double() / E4M3_MAX).float())
    assert not over_448(x).equal(x * (1 / E4M3_MAX))
