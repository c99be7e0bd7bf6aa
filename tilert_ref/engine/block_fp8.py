"""Named roundings of weights: block fp8 as DeepSeek publishes it, e4m3 codes and one fp32 scale per 128x128 block.

Stored as NAME and NAME_scale_inv with weight = code * scale_inv. In spite of its name the scale is a factor, not a
divisor (DeepSeek-V3, README_WEIGHTS.md and inference/fp8_cast_bf16.py). It stands here and not with the KV rules of
connector/rounding.py, because the connector never sees a weight and the floors differ.
"""

from enum import Enum

import torch
import torch.nn.functional as F

from tilert_ref.connector.rounding import E4M3_MAX, next_power_of_two

BLOCK = 128

WEIGHT_FLOOR = 1e-4
"""Smallest amax of a block that its scale still follows; keeps the scale of an all-zero block away from 0
(DeepGEMM, deep_gemm/utils/math.py, per_block_cast_to_fp8)."""


class BlockScale(Enum):
    """Scale of a block with largest magnitude amax, a = max(amax, WEIGHT_FLOOR). Both are stored as fp32.

    PLAIN: a / 448. DeepSeek-V3, GLM-5-FP8.
    UE8M0: 2^ceil(log2(a / 448)), announced by "scale_fmt": "ue8m0". DeepSeek-V3.1 and V3.2. It is what the config
    announces, not a promise: in the published V3.1 the scales of o_proj are no powers of two (deepseek-ai/DeepSeek-V3,
    issue 961), so readers use the whole fp32 value.
    """

    PLAIN = "plain"
    UE8M0 = "ue8m0"


def block_scales(amax: torch.Tensor, rule: BlockScale) -> torch.Tensor:
    """fp32 scales for the magnitudes of blocks, any shape. NaN and infinity stay visible."""
    ratio = amax.float().clamp_min(WEIGHT_FLOOR) / E4M3_MAX
    return next_power_of_two(ratio) if rule is BlockScale.UE8M0 else ratio


def quantize_blocks(weight: torch.Tensor, rule: BlockScale) -> tuple[torch.Tensor, torch.Tensor]:
    """code = e4m3(w * (1 / scale)), rounded to nearest even; the reciprocal is fp32 (DeepGEMM, per_block_cast_to_fp8).

    Blocks at the lower and right edge are filled up with zeros, which change no amax (README_WEIGHTS.md).

    Args:
        weight: [out, in] bf16 or fp32.

    Returns:
        codes e4m3 [out, in] and scales fp32 [ceil(out / 128), ceil(in / 128)].
    """
    blocks = _blocks(weight.float())  # [O, 128, I, 128]
    scales = block_scales(blocks.abs().amax(dim=(1, 3)), rule)  # [O, I]
    # No quotient exceeds 448 by more than a rounding error, which the cast takes back.
    codes = (blocks * (1.0 / scales)[:, None, :, None]).to(torch.float8_e4m3fn)
    return _cut(codes, weight), scales


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [out, in] = code * scale. Right for either rule. The inverse of quantize_blocks up to the code's rounding.

    Args:
        codes: e4m3 [out, in].
        scales: fp32 [ceil(out / 128), ceil(in / 128)]. ValueError on another shape.
    """
    blocks = _blocks(codes.float())  # [O, 128, I, 128]
    if scales.shape != (expected := (blocks.shape[0], blocks.shape[2])):
        raise ValueError(f"scales {list(scales.shape)} for codes {list(codes.shape)}, not {list(expected)}")
    return _cut(blocks * scales.float()[:, None, :, None], codes)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    x = F.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [O, 128, I, 128]


def _cut(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows, columns = like.shape
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
