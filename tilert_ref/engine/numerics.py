"""Named numerics: where fp32 results become bf16, by which rule, and in which order long sums are taken.

A sum of bf16 products has as many fp32 results as there are orders, and one of them is vLLM's. Where its order is known
it is reproduced, so that tokens and KV bytes can be compared without a tolerance; where it isn't, torch's own order
stands in and the difference is measured (docs/numerics.md).

Rounding: torch rounds fp32 to bf16 to the nearest even value. vLLM's own CPU kernels do so only where the processor has
AVX512-BF16; their other x86 builds cut the low 16 bits off (csrc/cpu/cpu_types_x86.hpp, FP32Vec to BF16Vec), which
shifts the outputs of the fused MoE kernel and of MLA decode by up to one bf16 step toward zero. With the right rule
these operators agree with vLLM 0.32.0 to the last bit, with the wrong one half of their values differ.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.block_fp8 import ActivationScale


class KernelRounding(Enum):
    """How vLLM's fused kernels turn an fp32 accumulator into bf16."""

    NEAREST = "nearest"  # ties to even: CUDA kernels, AVX512-BF16, AMX
    TRUNCATE = "truncate"  # toward zero: x86 without AVX512-BF16


class SumOrder(Enum):
    """In which order, and with how many bits, the long sums of vLLM's own kernels are taken."""

    TORCH = "torch"  # whatever the matmul of this device does
    VLLM_AVX2 = "vllm_avx2"  # dense MLA decode and the expert matrices on a CPU, see vllm_avx2.py
    VLLM_HOPPER = "vllm_hopper"  # fp8 products, sparse attention and index scores on an H200, see vllm_hopper.py


class Pointwise(Enum):
    """Where norms and rotary embeddings are rounded to bf16."""

    NATIVE = "native"  # vLLM's torch code, which its CPU build runs: x * w and each product of RoPE rounded; the norm
    # after a residual sees the unrounded sum
    FUSED = "fused"  # its CUDA kernels: fp32 inside, rounded once at the end; the norm sees the rounded sum


class DecodeAttention(Protocol):
    """A back end for decode's attention that is not the engine's own (flashinfer_mla.py)."""

    name: str

    def __call__(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: list[int] | torch.Tensor,
    ) -> torch.Tensor:
        """q_latent [T, H, L], q_rope [T, H, R]; query t sees the first counts[t] of rows[slots[t]]. -> [T, H, L].

        rows: all of a layer by slot, bf16 [S, L + R] or fp8_ds_mla's bytes; slots int32 [T, n]. counts are on the
        device in a captured step, and the softmax scale is the model's.
        """

    def replays(self, length: int) -> bool:
        """Whether a captured step is right at positions from `length` - 1 on."""


@dataclass(frozen=True)
class Kernels:
    """What the fused kernels of the peer do that a plain formula leaves open.

    fp8: how activations are rounded for block-fp8 weights. The peer of a fp8 checkpoint is vLLM on CUDA whatever this
    engine's device is; the default is DeepGEMM, which the recording kit runs (VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0).
    attention: what computes decode's attention where it isn't the peer's arithmetic, by an operator's choice.
    """

    rounding: KernelRounding = KernelRounding.NEAREST
    order: SumOrder = SumOrder.TORCH
    pointwise: Pointwise = Pointwise.NATIVE
    fp8: ActivationScale = ActivationScale.UE8M0
    attention: DecodeAttention | None = None

    def on_tensor_cores(self, x: torch.Tensor) -> bool:
        """Whether x is on a Hopper GPU and its arithmetic is the one that is followed."""
        return self.order is SumOrder.VLLM_HOPPER and tensor_cores.there(x)


TORCH = Kernels()
"""Plain torch, rounded to nearest."""

HOPPER = Kernels(order=SumOrder.VLLM_HOPPER, pointwise=Pointwise.FUSED)
"""vLLM 0.26.0 on an H200 (eager, without FlashInfer's block-fp8 products)."""


OTHER_CUDA = Kernels(pointwise=Pointwise.FUSED)
"""vLLM on another NVIDIA GPU, as far as it is known: Hopper's roundings, torch's sums."""


def round_kernel(x: torch.Tensor, dtype: torch.dtype, rule: KernelRounding) -> torch.Tensor:
    """fp32 -> dtype by the rule. 1.00585938 (0x3f80c000) -> 1.0078125 nearest, 1.0 truncated (bf16)."""
    if rule is KernelRounding.TRUNCATE and dtype is torch.bfloat16:
        x = (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return x.to(dtype)


def vllm_kernels(device: str) -> Kernels:
    """The kernels that vLLM would use on `device` of this machine (its CPU build is chosen by instruction set).

    Of GPUs only Hopper is known, whose sums are emulated nowhere but on a CPU: other CUDA devices are taken to round
    like it. Where there is no vLLM of this family at all (Apple's MPS, which has no float64 either) it is plain torch.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        other = torch.cuda.is_available() and not tensor_cores.is_hopper(torch.device(device))
        return OTHER_CUDA if other else HOPPER
    if kind != "cpu":
        return TORCH
    flags = _cpu_flags()
    if "avx512_bf16" in flags:
        return Kernels()
    if "avx512f" in flags:
        return Kernels(KernelRounding.TRUNCATE)
    if "avx2" in flags:
        return Kernels(KernelRounding.TRUNCATE, SumOrder.VLLM_AVX2)
    return Kernels()


@cache
def _cpu_flags() -> frozenset[str]:
    """x86 feature names as Linux spells them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())
