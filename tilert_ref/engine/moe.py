"""Mixture of experts: DeepSeekMoE routing (V2: softmax, V3/GLM/Kimi: sigmoid with a correction bias) and the experts.

DeepSeek-V3 paper, section 2.1.2. The operations and their order follow vLLM's CPU path (fused_moe/router/cpu_router.py,
_grouped_topk; fused_moe/runner/moe_runner.py), so that the same experts are chosen with the same weights.
"""

import torch
import torch.nn.functional as F

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.linear import Fp8Matrix, InOrderMatrix, Matrix, OpenMatrix, experts_product, linear, product
from tilert_ref.engine.numerics import KernelRounding, Kernels, SumOrder, round_kernel
from tilert_ref.engine.weights import MlpWeights, MoeWeights


def mlp(w: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU, [T, D] -> [T, D]; silu(gate) is rounded before the product (vLLM SiluAndMul, native)."""
    return linear(silu_and_mul(linear(x, w.gate_up)), w.down)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> silu(gate) * up [T, I]."""
    if tensor_cores.there(gate_up):
        return tensor_cores.pointwise().silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def route(config: ModelConfig, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] -> weights [T, k] fp32 and expert ids [T, k].

    noaux_tc: the bias steers the choice only; the weights are the unbiased scores of the chosen (case K4: computing
    (bias + s) - bias instead loses them). Groups: only experts of the topk_group best groups may be chosen.
    """
    if tensor_cores.there(logits) and config.n_group == 1:
        sigmoid = config.scoring_func == "sigmoid"
        chosen = config.num_experts_per_tok, config.norm_topk_prob
        return tensor_cores.pointwise().route(logits, bias, sigmoid, *chosen)
    scores = logits.float().sigmoid() if config.scoring_func == "sigmoid" else logits.float().softmax(-1)
    choice = scores if bias is None else scores + bias  # [T, E]
    if config.n_group > 1 and config.topk_method != "greedy":
        choice = _mask_groups(config, choice, by_pairs=bias is not None)
    # On a GPU unsorted ids come in any order, and with them the sum over a token's experts.
    ids = choice.topk(config.num_experts_per_tok, dim=-1, sorted=logits.is_cuda).indices  # [T, k]
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def _mask_groups(config: ModelConfig, choice: torch.Tensor, by_pairs: bool) -> torch.Tensor:
    """-inf outside the best groups. A group's score: sum of its two best (V3), or its best (V2)."""
    grouped = choice.view(len(choice), config.n_group, -1)  # [T, G, E / G]
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if by_pairs else grouped.amax(-1)  # [T, G]
    best = group_scores.topk(config.topk_group, dim=-1, sorted=False).indices
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)


def moe(w: MoeWeights, config: ModelConfig, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """[T, D] -> [T, D]: weighted routed experts times routed_scaling_factor, plus the shared expert."""
    weights, ids = route(config, router_logits(config, x, w.gate), w.bias)
    if kernels.on_tensor_cores(x) and len(x) <= tensor_cores.FEW_TOKENS:
        return _moe_on_device(w, config, x, weights, ids)
    routed = experts(w, x, weights, ids, kernels)
    if config.routed_scaling_factor != 1.0:
        routed = routed * config.routed_scaling_factor
    return routed if w.shared is None else mlp(w.shared, x) + routed


def router_logits(config: ModelConfig, x: torch.Tensor, gate: Matrix) -> torch.Tensor:
    """[T, E]. The GLM models route in fp32 (vLLM deepseek_v2.py, _get_moe_router_dtype; glm4_moe.py, GateLinear), the
    others in the model's dtype. For GLM-5 that is vLLM on CUDA; its CPU build rounds the product to bf16 first."""
    if config.architecture.startswith("Glm"):
        return product(x, gate)
    return linear(x, gate)


def experts(w: MoeWeights, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Sum over the chosen experts of weight * SwiGLU_e(x), [T, D].

    fp32 inside an expert, its activation rounded to x's dtype, fp32 across experts in the order of their ids, one
    rounding at the end: the rounding points of vLLM's fused CPU kernel (cpu_fused_moe, isa "vec"). Those of its CUDA
    kernels: experts_cuda.
    """
    if isinstance(w.gate_up, Fp8Matrix) or kernels.order is SumOrder.VLLM_HOPPER:
        return experts_cuda(w.gate_up, w.down, x, weights, ids)
    if isinstance(w.gate_up, InOrderMatrix | OpenMatrix):
        return _experts_in_order(w.gate_up, w.down, x, weights, ids, kernels.rounding)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = _inner(F.linear(x[token].float(), w.gate_up[expert].float()), x.dtype, kernels.rounding)  # [n, I]
        expert_out = F.linear(inner, w.down[expert].float())  # [n, D]
        out.index_add_(0, token, expert_out * weights[token, slot, None])
    return round_kernel(out, x.dtype, kernels.rounding)


def _experts_in_order(
    gate_up: InOrderMatrix | OpenMatrix,
    down: InOrderMatrix | OpenMatrix,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    rounding: KernelRounding,
) -> torch.Tensor:
    """experts in vLLM's order of sums: a row for each token and expert, without a look at the ids from Python."""
    ids, order = ids.sort(dim=-1)
    pairs, chosen = ids.flatten(), ids.shape[1]  # [T * k]
    inner = _inner(gate_up.product(x.float().repeat_interleave(chosen, 0), pairs), x.dtype, rounding)  # [T * k, I]
    outputs = down.product(inner, pairs).view(*ids.shape, -1) * weights.gather(1, order)[..., None]  # [T, k, D]
    out = torch.zeros(x.shape, dtype=torch.float32)
    for output in outputs.unbind(1):
        out += output
    return round_kernel(out, x.dtype, rounding)


def _inner(gate_up: torch.Tensor, dtype: torch.dtype, rounding: KernelRounding) -> torch.Tensor:
    """[n, 2 I] fp32 -> SwiGLU's activation rounded to dtype, [n, I] fp32.

    silu as gate * sigmoid(gate): one fp32 rounding more than torch's, and vLLM's kernel has it too."""
    gate, up = gate_up.chunk(2, dim=-1)
    return round_kernel(gate * gate.sigmoid() * up, dtype, rounding).float()


def experts_cuda(
    gate_up: Matrix, down: Matrix, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The same sum with the rounding points of vLLM's Triton kernels on CUDA, [T, D].

    gate_up is rounded, so is silu(gate) before its product with up; the routing weight multiplies the second product
    in fp32, before its one rounding; the rounded outputs of a token are added in fp32 and rounded (experts/
    triton_moe.py, TritonExperts.apply; fused_moe.py, fused_moe_kernel; moe_sum).
    """
    outputs = x.new_empty(*ids.shape, x.shape[1])  # [T, k, D]
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = silu_and_mul(linear(x[token], gate_up[expert]))  # [n, I]
        expert_out = product(inner, down[expert])  # [n, D] fp32
        outputs[token, slot] = (expert_out * weights[token, slot, None]).to(x.dtype)
    return outputs.float().sum(dim=1).to(x.dtype)


def _moe_on_device(
    w: MoeWeights, config: ModelConfig, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """moe of a few tokens on a Hopper GPU, without a look at the ids from the host: a row for each token and expert."""
    with tensor_cores.beside(x, 1):
        shared = None if w.shared is None else mlp(w.shared, x)
    pairs = ids.flatten()  # [T * k]
    inner = silu_and_mul(experts_product(x, w.gate_up, pairs, x.dtype))  # [T * k, I]
    outputs = experts_product(inner, w.down, pairs, torch.float32)  # [T * k, D]
    tensor_cores.join(x, 1)
    return tensor_cores.pointwise().combine_experts(outputs, weights, config.routed_scaling_factor, shared, x.dtype)
