"""Weights of one MLA model as plain dataclasses of tensors, filled from a Hugging Face checkpoint.

Names on the right are the checkpoint's; `x_proj` matrices are [out, in] as in torch.nn.Linear. kv_b_proj is also kept
split into W_UK and W_UV, because absorbed decode multiplies by them on either side of attention.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tilert_ref.engine.checkpoint import Checkpoint, Progress
from tilert_ref.engine.config import ModelConfig


@dataclass(frozen=True)
class IndexerWeights:
    """Lightning indexer (DeepSeek-V3.2 report, section 2.1). Hi index heads of width d = 128."""

    wq_b: torch.Tensor  # [Hi * d, q_lora_rank]
    wk: torch.Tensor  # [d, D]
    k_norm: torch.Tensor  # [d] fp32
    k_norm_bias: torch.Tensor  # [d] fp32
    weights_proj: torch.Tensor  # [Hi, D]


@dataclass(frozen=True)
class AttentionWeights:
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1). H heads, L = kv_lora_rank."""

    q_a: torch.Tensor | None  # [q_lora_rank, D]; None: q_b multiplies the hidden state directly
    q_a_norm: torch.Tensor | None  # [q_lora_rank]
    q_b: torch.Tensor  # [H * (nope + rope), q_lora_rank or D]
    kv_a: torch.Tensor  # [L + rope, D]
    kv_a_norm: torch.Tensor  # [L]
    kv_b: torch.Tensor  # [H * (nope + v), L]
    w_uk: torch.Tensor  # [H, nope, L]: absorbs into the query
    w_uv: torch.Tensor  # [H, L, v]: expands the attended latent; stored as [H, v, L], the order vLLM's product reads
    o: torch.Tensor  # [D, H * v]
    indexer: IndexerWeights | None  # None: attends densely


@dataclass(frozen=True)
class MlpWeights:
    gate_up: torch.Tensor  # [2 * I, D]
    down: torch.Tensor  # [D, I]


@dataclass(frozen=True)
class MoeWeights:
    """E routed experts and the shared expert (DeepSeekMoE); the correction bias stays fp32 (case K4)."""

    gate: torch.Tensor  # [E, D]
    bias: torch.Tensor | None  # [E] fp32, e_score_correction_bias
    gate_up: torch.Tensor  # [E, 2 * I, D]
    down: torch.Tensor  # [E, D, I]
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
    eh_proj: torch.Tensor  # [D, 2 * D]
    layer: LayerWeights
    norm: torch.Tensor  # [D], shared_head.norm
    head: torch.Tensor  # [V, D], shared_head.head


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor  # [V, D]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [D]
    head: torch.Tensor  # [V, D]
    mtp: MtpWeights | None


def _inner_last(w: torch.Tensor) -> torch.Tensor:
    """[H, n, L] stored as [H, L, n]: torch's bf16 product over n is 4.6 times faster on an AVX2 machine than over rows.

    For sparse models, whose prompts take this product too. Sums come out in another order, one bf16 result in 20,000
    differs; dense models keep the order that equals vLLM's CPU kernels.
    """
    return w.transpose(1, 2).contiguous().transpose(1, 2)


class _Loader:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype):
        self.config, self.checkpoint, self.device, self.dtype = config, checkpoint, device, dtype

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.take(name, shape, dtype or self.dtype).to(self.device)

    def attention(self, p: str) -> AttentionWeights:
        c = self.config
        heads, latent, d = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
        kv_b = self.take(f"{p}kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
        w_uk, w_uv = kv_b.view(heads, -1, latent).split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        rank = c.q_lora_rank
        return AttentionWeights(
            q_a=self.take(f"{p}q_a_proj.weight", rank, d) if rank else None,
            q_a_norm=self.take(f"{p}q_a_layernorm.weight", rank) if rank else None,
            q_b=self.take(f"{p}{'q_b_proj' if rank else 'q_proj'}.weight", heads * c.qk_head_dim, rank or d),
            kv_a=self.take(f"{p}kv_a_proj_with_mqa.weight", c.cache_width, d),
            kv_a_norm=self.take(f"{p}kv_a_layernorm.weight", latent),
            kv_b=kv_b,
            w_uk=w_uk.contiguous() if c.index_topk is None else _inner_last(w_uk),
            w_uv=w_uv.contiguous().transpose(1, 2),
            o=self.take(f"{p}o_proj.weight", d, heads * c.v_head_dim),
            indexer=None if c.index_topk is None else self.indexer(f"{p}indexer."),
        )

    def indexer(self, p: str) -> IndexerWeights:
        c = self.config
        heads, width = c.index_n_heads, c.index_head_dim
        return IndexerWeights(
            wq_b=self.take(f"{p}wq_b.weight", heads * width, c.q_lora_rank),
            wk=self.take(f"{p}wk.weight", width, c.hidden_size),
            # Published in fp32 or bf16; vLLM computes this norm in fp32 either way.
            k_norm=self.take(f"{p}k_norm.weight", width, dtype=torch.float32),
            k_norm_bias=self.take(f"{p}k_norm.bias", width, dtype=torch.float32),
            weights_proj=self.take(f"{p}weights_proj.weight", heads, c.hidden_size),
        )

    def mlp(self, p: str, inner: int) -> MlpWeights:
        d = self.config.hidden_size
        gate = self.take(f"{p}gate_proj.weight", inner, d)
        up = self.take(f"{p}up_proj.weight", inner, d)
        return MlpWeights(torch.cat((gate, up)), self.take(f"{p}down_proj.weight", d, inner))

    def moe(self, p: str) -> MoeWeights:
        c = self.config
        experts = [self.mlp(f"{p}experts.{e}.", c.moe_intermediate_size) for e in range(c.n_routed_experts)]
        biased = c.topk_method == "noaux_tc"
        bias_name = f"{p}gate.e_score_correction_bias"
        return MoeWeights(
            gate=self.take(f"{p}gate.weight", c.n_routed_experts, c.hidden_size),
            bias=self.take(bias_name, c.n_routed_experts, dtype=torch.float32) if biased else None,
            gate_up=torch.stack([e.gate_up for e in experts]),
            down=torch.stack([e.down for e in experts]),
            shared=self.mlp(f"{p}shared_experts.", c.moe_intermediate_size * c.n_shared_experts)
            if c.n_shared_experts
            else None,
        )

    def layer(self, index: int) -> LayerWeights:
        p, c = f"model.layers.{index}.", self.config
        return LayerWeights(
            input_norm=self.take(f"{p}input_layernorm.weight", c.hidden_size),
            attention=self.attention(f"{p}self_attn."),
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
            eh_proj=self.take(f"{p}eh_proj.weight", d, 2 * d),
            layer=self.layer(c.num_hidden_layers),
            norm=self.take(f"{p}shared_head.norm.weight", d),
            head=own_or_shared("shared_head.head.weight", head),
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
    progress: Progress = lambda line: None,
) -> Weights:
    """Reads the whole checkpoint. Raises CheckpointError on a missing, leftover or misshapen tensor."""
    with Checkpoint(model_dir, progress) as checkpoint:
        load = _Loader(config, checkpoint, device, dtype)
        embed = load.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings and "lm_head.weight" not in checkpoint
        head = embed if tied else load.take("lm_head.weight", config.vocab_size, config.hidden_size)
        weights = Weights(
            embed=embed,
            layers=[load.layer(i) for i in range(config.num_hidden_layers)],
            norm=load.take("model.norm.weight", config.hidden_size),
            head=head,
            mtp=load.mtp(embed, head) if with_mtp else None,
        )
        if not with_mtp:
            load.skip_mtp()
        checkpoint.finish()
    return weights
