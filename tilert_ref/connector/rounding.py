"""Named roundings of KV cache rows. Every rule has its formula, its source and a literal-number test (case K1).

vLLM changed the scale of fp8_ds_mla between versions. Which rule wrote a row is a property of the vLLM that wrote it:
it is recorded, never assumed. Readers differ too: in how much of a scale they use (`ScaleRead`).
"""

from enum import Enum

import torch

from tilert_ref.connector.layout import FP8_DS_MLA

E4M3_MAX = 448.0
TILE = FP8_DS_MLA["latent"].count // FP8_DS_MLA["latent_scale"].count
"""Values that share a scale: 128."""

INDEX_KEY_FLOOR = 1e-4
INDEX_QUERY_FLOOR = 1e-10
"""Smallest amax of an indexer vector that its scale still follows. vLLM has one for keys (cache_kernels.cu,
indexer_k_quant_and_cache_kernel) and one for queries (sparse_attn_indexer.py and fp8_utils.py)."""

SMALLEST_POWER_OF_TWO_RATIO = 1e-4
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_FLT_MIN = torch.finfo(torch.float32).tiny


class ScaleRule(Enum):
    """Scale of a 128-value tile with largest magnitude amax (vLLM, concat_and_cache_ds_mla_kernel in cache_kernels.cu).

    POWER_OF_TWO: 2^ceil(log2(max(amax / 448, 1e-4))), vLLM 0.32.
    PLAIN: max(amax / 448, smallest normal fp32), older vLLM: 0.26.0 and whatever lacks pull request 49435.
    """

    POWER_OF_TWO = "power_of_two"
    PLAIN = "plain"


class ScaleRead(Enum):
    """How a reader turns codes and scales into the bf16 values that attention sees.

    BF16: bf16(code * bf16(scale)). FlashMLA's sparse fp8 decode on Hopper (sm90/decode/sparse_fp8, cvt_fp8x8_bf16x8).
    FP32: bf16(fp32(code) * scale). TileRT (protocol.md 9), and vLLM where it converts a prompt's rows for a bf16 kernel
    (cache_kernels.cu, cp_gather_and_upconvert_fp8_kv_cache).

    On scales of ScaleRule.POWER_OF_TWO both give the exact product, on PLAIN ones they differ by a bf16 step.
    """

    BF16 = "bf16"
    FP32 = "fp32"


def tile_scales(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """fp32 scales for fp32 magnitudes, any shape."""
    ratio = over_448(amax.float())
    if rule is ScaleRule.PLAIN:
        return ratio.clamp_min(_FLT_MIN)
    return next_power_of_two(ratio.clamp_min(SMALLEST_POWER_OF_TWO_RATIO))


def over_448(x: torch.Tensor) -> torch.Tensor:
    """x / 448 on every device: on CUDA torch multiplies by 1 / 448 where the divisor is a number, not a tensor, which
    misses the last bit of one scale in seven."""
    return x / torch.full_like(x, E4M3_MAX)


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(x)) of positive fp32 values.

    The exponent is read, not computed with log2: same value for every bf16 amax, and no libm in between.
    """
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def quantize_index(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer vectors as vLLM stores and compares them (scale format ue8m0, case K2): one power-of-two scale each.

    scale = 2^ceil(log2(max(amax, floor) / 448)), code = e4m3(x / scale), rounded to nearest even.

    Args:
        x: [..., 128] bf16 or fp32.
        floor: INDEX_KEY_FLOOR or INDEX_QUERY_FLOOR.

    Returns:
        codes e4m3 [..., 128] and scales fp32 [...].
    """
    x = x.float()
    scales = next_power_of_two(over_448(x.abs().amax(dim=-1).clamp_min(floor)))
    return (x / scales[..., None]).to(torch.float8_e4m3fn), scales


def quantize_fp8_ds_mla(latent: torch.Tensor, rope: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Rows as vLLM writes them: code = e4m3(x / scale), rounded to nearest even.

    Args:
        latent: [n, 512] fp32 or bf16.
        rope: [n, 64] bf16, stored as it is.

    Returns:
        uint8 [n, 656].
    """
    tiles = latent.float().unflatten(1, (-1, TILE))  # [n, 4, 128]
    scales = tile_scales(tiles.abs().amax(dim=2), rule)  # [n, 4]
    # vLLM saturates here. No quotient exceeds 448 by more than a rounding error, which the cast takes back.
    codes = (tiles / scales[..., None]).to(torch.float8_e4m3fn)
    return FP8_DS_MLA.pack({"latent": codes.flatten(1), "latent_scale": scales, "rope": rope})


def dequantize_fp8_ds_mla(rows: torch.Tensor, read: ScaleRead = ScaleRead.FP32) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, 656] -> (latent bf16 [n, 512], rope bf16 [n, 64])."""
    fields = FP8_DS_MLA.unpack(rows)
    return dequantize_latent(fields["latent"], fields["latent_scale"], read), fields["rope"]


def dequantize_latent(codes: torch.Tensor, scales: torch.Tensor, read: ScaleRead = ScaleRead.FP32) -> torch.Tensor:
    """e4m3 [n, 512] and fp32 [n, 4] -> bf16 [n, 512]."""
    if read is ScaleRead.BF16:
        scales = scales.bfloat16().float()
    tiles = e4m3_values(codes).unflatten(1, (-1, TILE)) * scales[..., None]
    return tiles.flatten(1).bfloat16()


def e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """codes.float(), by table on a CPU, where torch's cast takes five times as long (2 million codes: 19 ms to 4)."""
    if codes.device.type != "cpu":
        return codes.float()
    return _E4M3_VALUES.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def check_scale_rule(codes: torch.Tensor, scales: torch.Tensor, rule: ScaleRule) -> None:
    """Raises ValueError if a tile of e4m3 [n, 512] and fp32 [n, 4] can't have been written by `rule`.

    Each rule leaves its mark on a tile whose scale is above the rule's floor: PLAIN a largest code of exactly 448,
    POWER_OF_TWO a power of two and a largest code of 224 or more.
    """
    top = codes.float().unflatten(1, (-1, TILE)).abs().amax(dim=2)  # [n, 4]
    floor = tile_scales(torch.zeros((), device=scales.device), rule)
    if rule is ScaleRule.PLAIN:
        marked = top == E4M3_MAX
    else:
        marked = (top >= E4M3_MAX / 2) & (torch.frexp(scales).mantissa == 0.5)
    marked = (scales == floor) | (marked & (scales > floor))
    if not bool(marked.all()):
        token, tile = (~marked).nonzero()[0].tolist()
        scale, code = scales[token, tile].item(), top[token, tile].item()
        other = next(r for r in ScaleRule if r is not rule)
        raise ValueError(
            f"token {token}, tile {tile}: scale {scale!r} with a largest code of {code:g} is not of scale rule "
            f"{rule.value!r}; legal: rows written by that rule, or an engine with scale rule {other.value!r}"
        )


def scale_exponents(scales: torch.Tensor) -> torch.Tensor:
    """int32 exponents of power-of-two scales, for kernels that keep nothing else of a scale.

    ValueError if a scale is not a power of two: its mantissa would be lost silently (1.0 would read as 0.875, case K1).
    """
    mantissa, exponent = torch.frexp(scales)
    if bool((mantissa != 0.5).any()):
        worst = scales[mantissa != 0.5][0].item()
        raise ValueError(f"scale {worst!r} is not a power of two: these rows were written with {ScaleRule.PLAIN}")
    return exponent - 1
