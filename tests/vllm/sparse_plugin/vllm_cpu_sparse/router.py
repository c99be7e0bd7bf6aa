"""The router of GLM-5 in fp32, as vLLM has it on CUDA."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear


@GateLinear.register_oot
class Fp32GateLinear(GateLinear):
    """Where the model asks for fp32 logits (deepseek_v2.py, _get_moe_router_dtype), they are never rounded to bf16.

    On CUDA GateLinear.forward multiplies bf16 matrices into fp32 (cuteDSL, cuBLAS). Its fallback, which a CPU takes,
    rounds the product to bf16 and casts it up: a difference between two builds of vLLM, undone here because CUDA's is
    the one that serves these models. DeepSeek-V3.2 asks for nothing and keeps vLLM's own way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cpu_skip_gemm_dispatch = self.out_dtype is torch.float32  # else the weight is packed and gone

    def forward(self, x: torch.Tensor) -> Any:
        if self.out_dtype is not torch.float32:
            return super().forward(x)
        return self._return(F.linear(x.float(), self.weight.float()))
