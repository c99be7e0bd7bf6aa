"""Named roundings of block fp8: weights as DeepSeek publishes them, e4m3 codes and one fp32 scale per 128x128 block,
and the activations that meet them in a product, one scale per token and 128 values.

Stored as NAME and NAME_scale_inv with weight = code * scale_inv. In spite of its name the scale is a factor, not a
divisor (DeepSeek-V3, README_WEIGHTS.md and inference/fp8_cast_bf16.py). It stands here and not with the KV rules of
connector/rounding.py, because the connector never sees a weight and the floors differ.
"""

from enum import Enum

import torch
import torch.nn.functional as F

from tilert_ref.connector.rounding import E4M3_MAX, next_power_of_two, over_448
from tilert_ref.engine import tensor_cores

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


ACTIVATION_FLOOR = 1e-10
"""Smallest amax of a group of activations that its scale still follows; UE8M0 has the same floor for amax / 448
(vLLM, fp8_utils.py, per_token_group_quant_fp8; csrc per_token_group_quant.cu, ComputeGroupScale)."""

FEW_ROWS = 32
"""Products of fewer tokens go to FlashInfer's kernel, where vLLM has it (kernels/linear/scaled_mm/flashinfer.py)."""


class ActivationScale(Enum):
    """Scale of 128 activations of a token with largest magnitude amax, and code = e4m3(x / scale).

    Which one applies is a property of the vLLM that is followed, not of the checkpoint:

    UE8M0: 2^ceil(log2(max(max(amax, 1e-10) / 448, 1e-10))). DeepGEMM on Hopper, whatever the checkpoint's scale_fmt
        says (VLLM_USE_DEEP_GEMM_E8M0, on by default), and the fused experts on the same machine.
    PLAIN: max(amax, 1e-10) / 448. vLLM without DeepGEMM, or with VLLM_USE_DEEP_GEMM_E8M0=0.
    FLASHINFER: UE8M0, but linear layers over fewer than 32 tokens: code = e4m3(x * (448 / amax)), scale =
        1 / (448 / amax), both 1 for amax 0. vLLM 0.26.0 on Hopper unless VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0;
        FlashInfer's kernel is TensorRT-LLM's (fp8_blockscale_gemm, scale_1x128_kernel).
    """

    UE8M0 = "ue8m0"
    PLAIN = "plain"
    FLASHINFER = "flashinfer"

    @property
    def recasts_weights(self) -> bool:
        """DeepGEMM's linear layers take power-of-two scales: vLLM recasts weights that have others while loading."""
        return self is not ActivationScale.PLAIN

    @property
    def experts(self) -> "ActivationScale":
        """The rule of the fused expert kernel beside such linear layers; it takes weights with their own scales."""
        return ActivationScale.PLAIN if self is ActivationScale.PLAIN else ActivationScale.UE8M0


def block_scales(amax: torch.Tensor, rule: BlockScale) -> torch.Tensor:
    """fp32 scales for the magnitudes of blocks, any shape. NaN and infinity stay visible."""
    ratio = over_448(amax.float().clamp_min(WEIGHT_FLOOR))
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


def recast_ue8m0(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes and scales -> those of the same weights under UE8M0, rounded a second time.

    What vLLM does with the weights of DeepGEMM's linear layers while it loads them (fp8_utils.py,
    requant_weight_ue8m0_inplace). Power-of-two scales stay, or are halved with doubled codes: the same weights.
    """
    return quantize_blocks(dequantize_blocks(codes, scales), BlockScale.UE8M0)


def quantize_activations(x: torch.Tensor, rule: ActivationScale) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations of a product, each token and group of 128 for itself, rounded to nearest even.

    Args:
        x: [T, K] bf16 or fp32, K a multiple of 128. ValueError otherwise. T counts for FLASHINFER.

    Returns:
        codes e4m3 [T, K / 128, 128] and scales fp32 [T, K / 128].
    """
    if x.shape[1] % BLOCK:
        raise ValueError(f"activations of width {x.shape[1]}, legal: multiples of {BLOCK}")
    if tensor_cores.there(x) and rule is not ActivationScale.FLASHINFER:
        power = rule is ActivationScale.UE8M0
        codes, scales = tensor_cores.pointwise().quantize(x, ACTIVATION_FLOOR, power, power)
        return codes.unflatten(1, (-1, BLOCK)), scales
    groups = x.float().unflatten(1, (-1, BLOCK))  # [T, G, 128]
    amax = groups.abs().amax(dim=2)  # [T, G]
    if rule is ActivationScale.FLASHINFER and len(x) < FEW_ROWS:
        factors = torch.where(amax == 0, 1.0, E4M3_MAX / amax)
        return (groups * factors[..., None]).to(torch.float8_e4m3fn), 1.0 / factors
    scales = over_448(amax.clamp_min(ACTIVATION_FLOOR))
    if rule is not ActivationScale.PLAIN:
        scales = next_power_of_two(scales.clamp_min(ACTIVATION_FLOOR))
    # No quotient exceeds 448 by more than a rounding error, which the cast takes back.
    return (groups / scales[..., None]).to(torch.float8_e4m3fn), scales


def _blocks(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    x = F.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [O, 128, I, 128]


def _cut(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows, columns = like.shape
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
