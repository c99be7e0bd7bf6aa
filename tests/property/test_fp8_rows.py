"""fp8_ds_mla rows between the wire and the engine's cache: nothing is lost, and a row tells which rule wrote it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, model_profile, plane_views
from tilert_ref.connector.planes import gather_rows
from tilert_ref.connector.rounding import ScaleRead, ScaleRule, check_scale_rule, dequantize_latent, quantize_fp8_ds_mla
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import ModelConfig, load_config

RULES = st.sampled_from(ScaleRule)
ROOM = 200


@pytest.fixture(scope="module")
def config(tiny) -> ModelConfig:
    return load_config(tiny("glm5"))


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@st.composite
def latents(draw: st.DrawFn) -> torch.Tensor:
    """bf16 [n, 512] with a magnitude of its own per tile, zero and the extremes of bf16 included."""
    tokens = draw(st.integers(1, 6))
    exponents = draw(st.lists(st.integers(-140, 120), min_size=4 * tokens, max_size=4 * tokens))
    silent = draw(st.lists(st.booleans(), min_size=4 * tokens, max_size=4 * tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(tokens, 4, 128, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.0 if zero else 2.0**e for zero, e in zip(silent, exponents, strict=True)])
    return (values * scale.double().view(tokens, 4, 1)).flatten(1).bfloat16()


@settings(max_examples=60, deadline=None)
@given(seq_len=st.integers(1, ROOM), block_size=st.sampled_from([1, 16, 64, 100]), seed=st.integers(0, 2**32))
def test_planes_to_cache_rows_to_planes_is_every_byte(
    config: ModelConfig, seq_len: int, block_size: int, seed: int
) -> None:
    """All byte patterns, NaN codes and scales too, through a shuffled block table; other rows stay untouched."""
    layout = BufferLayout(model_profile(2, has_mtp=False, has_index=True), FP8_DS_MLA, ROOM)
    buffer = random_bytes(layout.total_bytes, seed=seed)
    cache = KVCache(config, 2, ROOM, block_size=block_size, scale_rule=ScaleRule.PLAIN)
    cache.block_table = torch.randperm(len(cache.block_table), generator=torch.Generator().manual_seed(seed))
    cache.rows.fill_(0x55)
    for layer in range(2):
        kv, pe, _ = plane_views(layout, buffer, layer, seq_len)
        cache.inject(layer, [kv], [pe.view(torch.bfloat16)], len(kv))
        assert torch.equal(cache.read_rows(layer, seq_len), torch.cat((kv, pe), dim=1))
        back = torch.zeros_like(kv), torch.zeros_like(pe)
        gather_rows(cache.rows[layer], cache.block_table.tolist(), seq_len, *back)
        assert torch.equal(back[0], kv) and torch.equal(back[1], pe)
    whole = cache.rows[0].flatten(0, 1)
    rest = torch.ones(len(whole), dtype=torch.bool)
    rest[cache.slots(torch.arange(seq_len))] = False
    assert bool((whole[rest] == 0x55).all())


@settings(max_examples=60, deadline=None)
@given(latent=latents(), rule=RULES, seed=st.integers(0, 2**32))
def test_the_cache_writes_vllms_bytes(config: ModelConfig, latent: torch.Tensor, rule: ScaleRule, seed: int) -> None:
    rope = torch.randn(len(latent), 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    cache = KVCache(config, 1, 64, scale_rule=rule)
    cache.write(0, torch.arange(len(latent)), latent, rope)
    rows = cache.read_rows(0, len(latent))
    assert torch.equal(rows, quantize_fp8_ds_mla(latent, rope, rule))
    assert torch.equal(rows[:, 528:], rope.view(torch.uint8))
    values = cache.read(0, len(latent))
    assert values.dtype == torch.bfloat16 and torch.equal(values[:, 512:], rope)
    fields = FP8_DS_MLA.unpack(rows)
    assert torch.equal(values[:, :512], dequantize_latent(fields["latent"], fields["latent_scale"], ScaleRead.BF16))


@settings(max_examples=100, deadline=None)
@given(latent=latents(), rule=RULES)
def test_rows_are_recognised_by_the_rule_that_wrote_them(latent: torch.Tensor, rule: ScaleRule) -> None:
    rope = torch.zeros(len(latent), 64, dtype=torch.bfloat16)
    fields = FP8_DS_MLA.unpack(quantize_fp8_ds_mla(latent, rope, rule))
    check_scale_rule(fields["latent"], fields["latent_scale"], rule)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), magnitude=st.integers(-5, 12), rule=RULES)
def test_rows_of_the_other_rule_are_refused(seed: int, magnitude: int, rule: ScaleRule) -> None:
    """128 values whose largest is 448 times a power of two look the same under both rules; these are not such."""
    latent = torch.randn(3, 512, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    latent[0, 0] = 20 * 2.0**magnitude  # the tile's largest: 448 / 20 is no power of two
    fields = FP8_DS_MLA.unpack(quantize_fp8_ds_mla(latent, torch.zeros(3, 64, dtype=torch.bfloat16), rule))
    other = next(r for r in ScaleRule if r is not rule)
    with pytest.raises(ValueError, match=f"token 0, tile 0: scale .* is not of scale rule '{other.value}'; legal: .*"):
        check_scale_rule(fields["latent"], fields["latent_scale"], other)


@settings(max_examples=60, deadline=None)
@given(latent=latents())
def test_readers_agree_on_powers_of_two(latent: torch.Tensor) -> None:
    rope = torch.zeros(len(latent), 64, dtype=torch.bfloat16)
    fields = FP8_DS_MLA.unpack(quantize_fp8_ds_mla(latent, rope, ScaleRule.POWER_OF_TWO))
    values = [dequantize_latent(fields["latent"], fields["latent_scale"], read) for read in ScaleRead]
    assert torch.equal(*values)
