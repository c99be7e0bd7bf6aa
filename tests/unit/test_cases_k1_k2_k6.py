"""Cases K1 (fp8_ds_mla scales), K2 (index-key page) and K6 (request ids): the literal numbers, and their class."""

import pytest
import torch

from tilert_ref.connector.layout import BF16, FP8_DS_MLA, INDEX_PAGE
from tilert_ref.connector.planes import gather_index_pages
from tilert_ref.connector.rid import derive_rid, new_request_id
from tilert_ref.connector.rounding import (
    ScaleRule,
    dequantize_fp8_ds_mla,
    quantize_fp8_ds_mla,
    scale_exponents,
    tile_scales,
)

# K1


def quantize(latent: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    return quantize_fp8_ds_mla(latent, torch.zeros(latent.shape[0], 64, dtype=torch.bfloat16), rule)


def k1_row(rule: ScaleRule) -> torch.Tensor:
    latent = torch.zeros(1, 512)
    latent[0, :2] = torch.tensor([1.0, 0.3])
    return quantize(latent, rule)


@pytest.mark.parametrize(
    ("rule", "scale_bytes", "codes", "second_value"),
    [
        (ScaleRule.POWER_OF_TWO, "0000803b", [0x78, 0x6A], 0.3125),
        (ScaleRule.PLAIN, "2549123b", [0x7E, 0x70], 0.285714),
    ],
)
def test_k1_literal(rule: ScaleRule, scale_bytes: str, codes: list[int], second_value: float) -> None:
    row = k1_row(rule)
    assert row.shape == (1, 656)
    assert row[0, :2].tolist() == codes
    assert bytes(row[0, 512:516].tolist()).hex() == scale_bytes
    fields = FP8_DS_MLA.unpack(row)
    exact = fields["latent"][0, :2].float() * fields["latent_scale"][0, 0]
    assert exact.tolist() == pytest.approx([1.0, second_value], abs=1e-6)
    latent, _ = dequantize_fp8_ds_mla(row)  # what is read is that, rounded to bf16
    assert latent[0, :2].tolist() == exact.bfloat16().tolist()


@pytest.mark.parametrize(("amax", "exponent"), [(448, 0), (0.875, -9), (1.75, -8), (7, -6), (1.0, -8), (0, -13)])
def test_k1_power_of_two_scales(amax: float, exponent: int) -> None:
    """0 shows the floor: 1e-4 rounds up to 2^-13."""
    assert tile_scales(torch.tensor([amax]), ScaleRule.POWER_OF_TWO).item() == 2.0**exponent


def test_k1_every_bf16_magnitude_gets_the_smallest_power_of_two_that_does_not_overflow() -> None:
    amax = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    scale = tile_scales(amax, ScaleRule.POWER_OF_TWO).double()
    ratio = (amax / 448).clamp_min(1e-4).double()
    assert bool(((scale >= ratio) & (scale / 2 < ratio)).all())
    assert torch.equal(scale_exponents(scale.float()), torch.log2(scale).round().int())


def test_k1_plain_scale_is_never_zero() -> None:
    assert tile_scales(torch.zeros(1), ScaleRule.PLAIN).item() == 2.0**-126


def test_k1_a_plain_scale_is_refused_where_only_the_exponent_is_kept() -> None:
    assert scale_exponents(FP8_DS_MLA.unpack(k1_row(ScaleRule.POWER_OF_TWO))["latent_scale"]).tolist()[0][0] == -8
    with pytest.raises(ValueError, match=r"0\.00223\d+ is not a power of two"):
        scale_exponents(FP8_DS_MLA.unpack(k1_row(ScaleRule.PLAIN))["latent_scale"])


@pytest.mark.parametrize("rule", ScaleRule)
def test_k1_every_tile_has_its_own_scale_and_the_error_is_bounded(rule: ScaleRule) -> None:
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(64, 512, generator=generator) * torch.tensor([1e-2, 1.0, 30.0, 400.0]).repeat_interleave(128)
    rope = torch.randn(64, 64, generator=generator).bfloat16()
    back, rope_back = dequantize_fp8_ds_mla(quantize_fp8_ds_mla(latent, rope, rule))
    assert torch.equal(rope_back, rope)
    tiles, error = latent.unflatten(1, (4, 128)), (back.float() - latent).abs().unflatten(1, (4, 128))
    scales = tile_scales(tiles.abs().amax(dim=2), rule)[..., None]
    # Half an e4m3 step, 2^-4 of a normal and 2^-10 * scale of a subnormal value, and half a bf16 step of the result.
    e4m3_error = torch.maximum(tiles.abs() * 2**-4, scales * 2**-10)
    bf16_error = back.float().abs().unflatten(1, (4, 128)) * 2**-8
    assert bool((error <= e4m3_error + bf16_error).all())


def test_k1_no_quotient_overflows() -> None:
    """x / scale may exceed 448 by a rounding error: the code is 0x7e, never the NaN 0x7f."""
    latent = torch.linspace(-3e4, 3e4, 512).repeat(8, 1) * torch.arange(1, 9)[:, None]
    for rule in ScaleRule:
        codes = quantize(latent, rule)[:, :512]
        assert not bool(((codes & 0x7F) == 0x7F).any())


# K2


def test_k2_positions_in_the_page() -> None:
    page = (torch.arange(8448) % 251).to(torch.uint8)[None]
    parts = INDEX_PAGE.unpack(page)
    codes, scales = parts["codes"].view(torch.uint8), parts["scales"].view(torch.uint8).view(64, 4)
    assert codes[0, 128:256].tolist() == page[0, 128:256].tolist()  # token 1
    assert scales[1].tolist() == page[0, 8196:8200].tolist()
    assert scales[31].tolist() == [33, 34, 35, 36]
    assert INDEX_PAGE["scales"].offset == 8192


def test_k2_a_page_gathered_from_smaller_blocks_reads_the_same() -> None:
    """Four blocks of 16 tokens, each with codes first and scales last, become one page with scales at 8192."""
    page = (torch.arange(8448) % 251).to(torch.uint8)
    codes, scales = page[:8192].view(4, 16 * 128), page[8192:].view(4, 16 * 4)
    cache = torch.cat([codes, scales], dim=1).view(4, 16, 132)
    out = torch.zeros(1, 8448, dtype=torch.uint8)
    gather_index_pages(cache[[2, 0, 3, 1]], [1, 3, 0, 2], 64, out)
    assert torch.equal(out[0], page)


# K6


def forms_of(request_id: str) -> list[str]:
    """What vLLM 0.32 makes of a request id, over HTTP and inside, for chat and for completions."""
    chat, completion = f"chatcmpl-{request_id}", f"cmpl-{request_id}"
    return [chat, f"{chat}-9f8e7d6c", completion, f"{completion}-0", f"{completion}-0-9f8e7d6c", f"{completion}-12"]


def test_k6_the_published_rule_fails_for_caller_ids() -> None:
    assert derive_rid("chatcmpl-order-2024") == "order" == derive_rid("chatcmpl-order-2025")
    assert derive_rid("chatcmpl-order-2024-9f8e7d6c") == "order-2024"


def test_k6_the_routers_key_is_the_same_everywhere_and_injective() -> None:
    keys = [new_request_id() for _ in range(200)]
    assert len({derive_rid(form) for key in keys for form in forms_of(key)}) == len(keys)
    assert all(derive_rid(form) == key for key in keys for form in forms_of(key))
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


def test_bf16_rows_are_bytes_as_they_are() -> None:
    row = torch.arange(1152).remainder(251).to(torch.uint8)[None]
    fields = BF16.unpack(row)
    assert fields["latent"].shape == (1, 512) and fields["rope"].shape == (1, 64)
    assert torch.equal(fields["rope"].view(torch.uint8), row[:, 1024:])
