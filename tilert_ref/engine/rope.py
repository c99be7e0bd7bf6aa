"""Rotary position embedding with YaRN (arXiv 2104.09864, 2309.00071)."""

import math

import torch

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.config import ModelConfig, YarnScaling, yarn_mscale
from tilert_ref.engine.numerics import Pointwise


def inverse_frequencies(
    dim: int, theta: float, yarn: YarnScaling | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[dim / 2] fp32. YaRN blends position interpolation into the slow pairs and leaves the fast ones alone."""
    freqs = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if yarn is None:
        return 1.0 / freqs
    low, high = _ramp_bounds(dim, theta, yarn)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (yarn.factor * freqs) * (1 - keep) + 1.0 / freqs * keep


def _ramp_bounds(dim: int, theta: float, yarn: YarnScaling) -> tuple[float, float]:
    """Pairs that turn beta_fast and beta_slow times over the original context (YaRN, section 3.2)."""

    def pair_of(rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(yarn.beta_fast)), 0), min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    return low, high if high != low else high + 0.001


def table_dtype(config: ModelConfig, rule: Pointwise) -> torch.dtype:
    """vLLM keeps its table in the model's dtype, but in fp32 for YaRN on CUDA, where FlashInfer's kernel reads it
    (rotary_embedding/base.py, cos_sin_cache; deepseek_scaling_rope.py)."""
    return torch.float32 if rule is Pointwise.FUSED and config.rope_scaling is not None else torch.bfloat16


def rope_table(
    config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """cos and sin side by side, [positions, 2, qk_rope_head_dim / 2]: angles in fp32, stored in `dtype`, on which KV
    bytes depend.

    It is made on the device that uses it, as vLLM's is (rotary_embedding/base.py, _compute_inv_freq): a GPU's pow, cos
    and sin differ from a CPU's in the last bit, and one in some ten thousand entries is then rounded the other way.
    """
    yarn = config.rope_scaling
    inv_freq = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, yarn, device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inv_freq
    scale = (
        1.0 if yarn is None else yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    )
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1).to(dtype)


def apply_rope(
    x: torch.Tensor, cos_sin: torch.Tensor, rule: Pointwise = Pointwise.NATIVE, *, interleaved: bool = True
) -> torch.Tensor:
    """Rotates pairs of x [T, ..., d] by cos_sin [T, 2, d/2], in x's dtype.

    interleaved: pairs (x0,x1), (x2,x3), ...: MLA's q_pe and k_pe in every model of the family (is_neox_style=False in
    vLLM) and GLM-5's indexer. Otherwise half-split pairs (x0,xd/2), ...: DeepSeek-V3.2's indexer. Case K3.
    """
    if rule is Pointwise.FUSED and tensor_cores.there(x):
        return rotate_on_device(x, cos_sin, interleaved)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (x.shape[-1] // 2,)
    cos, sin = cos_sin[:, 0].view(shape), cos_sin[:, 1].view(shape)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if rule is Pointwise.FUSED:
        a, b, cos, sin = (t.float() for t in (a, b, cos, sin))
    rotated = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return out.to(x.dtype) if rule is Pointwise.FUSED else out


def rotate_on_device(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """apply_rope, FUSED, on the first values of x [T, ..., d], as many as cos_sin [T, 2, R / 2] has angles for."""
    heads = x if x.dim() == 3 else x[:, None]
    return tensor_cores.pointwise().rope(heads, cos_sin, interleaved, 2 * cos_sin.shape[2]).view(x.shape)
