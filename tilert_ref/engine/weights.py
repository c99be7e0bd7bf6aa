"""Weights of one MLA model as plain dataclasses of tensors, filled from a Hugging Face checkpoint.

Names on the right are the checkpoint's; `x_proj` matrices are [out, in] as in torch.nn.Linear. kv_b_proj is also kept
split into W_UK and W_UV, because absorbed decode multiplies by them on either side of attention. A Matrix is bf16
(with Hopper's sums where those are followed), or block fp8 where the checkpoint has a scale NAME_scale_inv; a Tensor is
never fp8.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilert_ref.engine import vllm_avx2
from tilert_ref.engine.block_fp8 import BLOCK, recast_ue8m0
from tilert_ref.engine.checkpoint import Checkpoint, CheckpointError, Progress, StrictTensors
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.linear import (
    Fp8Matrix,
    HopperMatrix,
    InOrderMatrix,
    LanesMatrix,
    Matrix,
    concat_rows,
    place,
    room_for,
)
from tilert_ref.engine.numerics import TORCH, Kernels, SumOrder


@dataclass(frozen=True)
class IndexerWeights:
    """Lightning indexer (DeepSeek-V3.2 report, section 2.1). Hi index heads of width d = 128."""

    wq_b: Matrix  # [Hi * d, q_lora_rank]
    wk: Matrix  # [d, D]; dequantised where it is stored in fp8, as vLLM does to fuse it with weights_proj
    k_norm: torch.Tensor  # [d] fp32
    k_norm_bias: torch.Tensor  # [d] fp32
    weights_proj: Matrix  # [Hi, D]


@dataclass(frozen=True)
class AttentionWeights:
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1). H heads, L = kv_lora_rank."""

    q_a: Matrix | None  # [q_lora_rank, D]; None: q_b multiplies the hidden state directly
    q_a_norm: torch.Tensor | None  # [q_lora_rank]
    q_b: Matrix  # [H * (nope + rope), q_lora_rank or D]
    kv_a: Matrix  # [L + rope, D]
    kv_a_norm: torch.Tensor  # [L]
    kv_b: Matrix  # [H * (nope + v), L]
    w_uk: torch.Tensor | LanesMatrix  # [H, nope, L]: absorbs into the query
    w_uv: torch.Tensor  # [H, L, v]: expands the attended latent; stored as [H, v, L], the order vLLM's product reads
    o: Matrix  # [D, H * v]
    indexer: IndexerWeights | None  # None: attends densely, or to what a lower layer has chosen


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Matrix  # [2 * I, D]
    down: Matrix  # [D, I]


@dataclass(frozen=True)
class MoeWeights:
    """E routed experts and the shared expert (DeepSeekMoE); the correction bias stays fp32 (case K4)."""

    gate: Matrix  # [E, D]
    bias: torch.Tensor | None  # [E] fp32, e_score_correction_bias
    gate_up: Matrix  # [E, 2 * I, D]
    down: Matrix  # [E, D, I]
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights:
    input_norm: torch.Tensor  # [D]
    attention: AttentionWeights
    post_attention_norm: torch.Tensor  # [D]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token prediction module (DeepSeek-V3 paper, section 2.2)."""

    embed: torch.Tensor  # [V, D]
    enorm: torch.Tensor  # [D]
    hnorm: torch.Tensor  # [D]
    eh_proj: Matrix  # [D, 2 * D]
    layer: LayerWeights
    norm: torch.Tensor  # [D], shared_head.norm
    head: Matrix  # [V, D], shared_head.head


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor  # [V, D]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [D]
    head: Matrix  # [V, D]
    mtp: MtpWeights | None


def _inner_last(w: torch.Tensor) -> torch.Tensor:
    """[H, n, L] stored as [H, L, n]: torch's bf16 product over n is 4.6 times faster on an AVX2 machine than over rows.

    For sparse models, whose prompts take this product too. Sums come out in another order, one bf16 result in 20,000
    differs; dense models keep the order that equals vLLM's CPU kernels.
    """
    return w.transpose(1, 2).contiguous().transpose(1, 2)


class _Loader:
    def __init__(
        self, config: ModelConfig, checkpoint: StrictTensors, device: str, dtype: torch.dtype, kernels: Kernels
    ):
        self.config, self.checkpoint, self.device, self.dtype = config, checkpoint, device, dtype
        self.rule, self.order = kernels.fp8, kernels.order

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.take(name, shape, dtype or self.dtype).to(self.device)

    def matrix(self, weight: torch.Tensor) -> Matrix:
        """A bf16 matrix that is multiplied as it is."""
        hopper = self.order is SumOrder.VLLM_HOPPER and self.dtype is torch.bfloat16
        return HopperMatrix(weight) if hopper else weight

    def plain(self, w: Matrix) -> torch.Tensor:
        """Its values, for other uses than a product."""
        if isinstance(w, Fp8Matrix):
            return w.dequantized(self.dtype)
        return w.weight if isinstance(w, HopperMatrix) else w

    def linear(self, name: str, *shape: int) -> Matrix:
        """A linear layer's matrix [out, in]; vLLM's DeepGEMM has fp8 ones with power-of-two scales only."""
        w = self.stored(name, *shape)
        if not isinstance(w, Fp8Matrix) or not self.rule.recasts_weights:
            return w
        return Fp8Matrix(*recast_ue8m0(w.codes, w.scales), w.rule, w.order)

    def stored(self, name: str, rows: int, columns: int) -> Matrix:
        """A matrix [out, in] as it is stored: bf16, or fp8 with its scales if the model is quantised and has them."""
        scale = f"{name}_scale_inv"
        if not self.config.block_fp8 or scale not in self.checkpoint:
            return self.matrix(self.take(name, rows, columns))
        if rows % 64 or columns % BLOCK:
            # vLLM gives these to other kernels (utils/deep_gemm.py, should_use_deepgemm_for_fp8_linear), or to none.
            raise self.error(f"weight {name} is fp8 [{rows}, {columns}], legal: multiples of 64 and {BLOCK}")
        codes = self.take(name, rows, columns, dtype=torch.float8_e4m3fn)
        scales = self.take(scale, -(-rows // BLOCK), columns // BLOCK, dtype=torch.float32)
        return Fp8Matrix(codes, scales, self.rule, self.order)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.where}: {text}")

    def attention(self, p: str, has_indexer: bool) -> AttentionWeights:
        c = self.config
        heads, latent, d = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
        kv_b = self.linear(f"{p}kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
        w_uk, w_uv = self.plain(kv_b).view(heads, -1, latent).split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        rank = c.q_lora_rank
        return AttentionWeights(
            q_a=self.linear(f"{p}q_a_proj.weight", rank, d) if rank else None,
            q_a_norm=self.take(f"{p}q_a_layernorm.weight", rank) if rank else None,
            q_b=self.linear(f"{p}{'q_b_proj' if rank else 'q_proj'}.weight", heads * c.qk_head_dim, rank or d),
            kv_a=self.linear(f"{p}kv_a_proj_with_mqa.weight", c.cache_width, d),
            kv_a_norm=self.take(f"{p}kv_a_layernorm.weight", latent),
            kv_b=kv_b,
            w_uk=self.folding(w_uk),
            w_uv=w_uv.contiguous().transpose(1, 2),
            o=self.linear(f"{p}o_proj.weight", d, heads * c.v_head_dim),
            indexer=self.indexer(f"{p}indexer.") if has_indexer else None,
        )

    def folding(self, w_uk: torch.Tensor) -> torch.Tensor | LanesMatrix:
        """W_UK [H, nope, L] as the product that folds it into queries reads it."""
        if self.config.index_topk is not None:
            return _inner_last(w_uk)
        w_uk = w_uk.contiguous()
        bf16 = self.order is SumOrder.VLLM_AVX2 and w_uk.dtype is torch.bfloat16
        lanes = bf16 and w_uk.shape[1] % vllm_avx2.BMM_LANES == 0 and vllm_avx2.in_four_lanes()
        return LanesMatrix(w_uk) if lanes else w_uk

    def indexer(self, p: str) -> IndexerWeights:
        c = self.config
        heads, width = c.index_n_heads, c.index_head_dim
        wk = self.stored(f"{p}wk.weight", width, c.hidden_size)
        return IndexerWeights(
            wq_b=self.linear(f"{p}wq_b.weight", heads * width, c.q_lora_rank),
            wk=self.matrix(self.plain(wk)),
            # Published in fp32 or bf16; vLLM computes this norm in fp32 either way.
            k_norm=self.take(f"{p}k_norm.weight", width, dtype=torch.float32),
            k_norm_bias=self.take(f"{p}k_norm.bias", width, dtype=torch.float32),
            weights_proj=self.matrix(self.take(f"{p}weights_proj.weight", heads, c.hidden_size)),
        )

    def mlp(self, p: str, inner: int) -> MlpWeights:
        return self.swiglu(self.linear, p, inner)

    def expert(self, p: str) -> MlpWeights:
        """Unlike linear layers these keep their scales in vLLM on Hopper, whose expert kernel is Triton's (fused_moe/
        oracle/fp8.py, _get_priority_backends; without expert parallelism)."""
        return self.swiglu(self.stored, p, self.config.moe_intermediate_size)

    def swiglu(self, matrix: Callable[..., Matrix], p: str, inner: int) -> MlpWeights:
        d = self.config.hidden_size
        gate_up = [matrix(f"{p}{name}_proj.weight", inner, d) for name in ("gate", "up")]
        down = matrix(f"{p}down_proj.weight", d, inner)
        try:
            return MlpWeights(concat_rows(gate_up), down)
        except ValueError as error:
            raise self.error(f"{p}gate_proj and up_proj, multiplied as one: {error}") from error

    def experts(self, p: str) -> tuple[Matrix, Matrix]:
        """gate_up [E, 2 * I, D] and down [E, D, I], each expert put in its place as it is read: a GPU has no room for a
        layer's experts twice."""
        count, stacks = self.config.n_routed_experts, []
        for e in range(count):
            expert = self.expert(f"{p}{e}.")
            each = expert.gate_up, expert.down
            stacks = stacks or [room_for(count, w) for w in each]
            try:
                for stacked, w in zip(stacks, each, strict=True):
                    place(stacked, e, w)
            except ValueError as error:
                raise self.error(f"{p}*: {error}") from error
        if len({type(w) for w in stacks}) > 1:  # one kernel runs both products of an expert
            raise self.error(f"{p}*: of gate_up and down one is fp8 and one is not; legal: both or none")
        if isinstance(stacks[0], Fp8Matrix):
            return tuple(replace(w, rule=self.rule.experts) for w in stacks)
        return tuple(map(InOrderMatrix, stacks)) if self.order is SumOrder.VLLM_AVX2 else stacks

    def moe(self, p: str) -> MoeWeights:
        c = self.config
        gate = self.take(f"{p}gate.weight", c.n_routed_experts, c.hidden_size)  # before room is made for all
        gate_up, down = self.experts(f"{p}experts.")
        biased = c.topk_method == "noaux_tc"
        bias_name = f"{p}gate.e_score_correction_bias"
        return MoeWeights(
            gate=self.matrix(gate),
            bias=self.take(bias_name, c.n_routed_experts, dtype=torch.float32) if biased else None,
            gate_up=gate_up,
            down=down,
            shared=self.mlp(f"{p}shared_experts.", c.moe_intermediate_size * c.n_shared_experts)
            if c.n_shared_experts
            else None,
        )

    def layer(self, index: int) -> LayerWeights:
        p, c = f"model.layers.{index}.", self.config
        return LayerWeights(
            input_norm=self.take(f"{p}input_layernorm.weight", c.hidden_size),
            attention=self.attention(f"{p}self_attn.", c.has_indexer(index)),
            post_attention_norm=self.take(f"{p}post_attention_layernorm.weight", c.hidden_size),
            mlp=self.moe(f"{p}mlp.") if c.is_moe(index) else self.mlp(f"{p}mlp.", c.intermediate_size),
        )

    def mtp(self, embed: torch.Tensor, head: torch.Tensor) -> MtpWeights:
        c = self.config
        p, d, vocab = f"model.layers.{c.num_hidden_layers}.", c.hidden_size, c.vocab_size

        def own_or_shared(name: str, shared: torch.Tensor) -> torch.Tensor:
            """Published checkpoints repeat the embedding and the head in the MTP layer; some leave them out."""
            return self.take(f"{p}{name}", vocab, d) if f"{p}{name}" in self.checkpoint else shared

        return MtpWeights(
            embed=own_or_shared("embed_tokens.weight", embed),
            enorm=self.take(f"{p}enorm.weight", d),
            hnorm=self.take(f"{p}hnorm.weight", d),
            eh_proj=self.matrix(self.take(f"{p}eh_proj.weight", d, 2 * d)),
            layer=self.layer(c.num_hidden_layers),
            norm=self.take(f"{p}shared_head.norm.weight", d),
            head=self.matrix(own_or_shared("shared_head.head.weight", head)),
        )

    def skip_mtp(self) -> None:
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        if self.config.num_nextn_predict_layers:
            self.checkpoint.skip([name for name in self.checkpoint.left if name.startswith(prefix)])


def load_weights(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    with_mtp: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kernels: Kernels = TORCH,
    progress: Progress = lambda line: None,
) -> Weights:
    """Reads the whole checkpoint directory. Raises CheckpointError on a missing, leftover or misshapen tensor."""
    with Checkpoint(model_dir, progress) as checkpoint:
        return take_weights(config, checkpoint, with_mtp=with_mtp, device=device, dtype=dtype, kernels=kernels)


def take_weights(
    config: ModelConfig,
    tensors: StrictTensors,
    *,
    with_mtp: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kernels: Kernels = TORCH,
) -> Weights:
    """The model's weights from named tensors; every one must have its place. kernels: who multiplies fp8 matrices."""
    load = _Loader(config, tensors, device, dtype, kernels)
    embed = load.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    tied = config.tie_word_embeddings and "lm_head.weight" not in tensors
    head = embed if tied else load.take("lm_head.weight", config.vocab_size, config.hidden_size)
    weights = Weights(
        embed=embed,
        layers=[load.layer(i) for i in range(config.num_hidden_layers)],
        norm=load.take("model.norm.weight", config.hidden_size),
        head=load.matrix(head),
        mtp=load.mtp(embed, head) if with_mtp else None,
    )
    if not with_mtp:
        load.skip_mtp()
    tensors.finish()
    return weights
