"""The forward pass of the MLA family, one line per equation.

T tokens, D hidden, H heads, L = kv_lora_rank, S cached tokens. The residual stream is carried beside the branch output
and added inside the next norm, in fp32, as vLLM's fused_add_rms_norm does. Where norms round is a rule (numerics.py).
"""

import torch
import torch.nn.functional as F

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.attention import (
    attend_absorbed,
    attend_by,
    attend_chosen,
    attend_plain,
    attend_selected,
    decode_kernel,
)
from tilert_ref.engine.batch import Batch, Seen
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.indexer import lightning_index
from tilert_ref.engine.linear import heads_product, linear
from tilert_ref.engine.moe import mlp, moe
from tilert_ref.engine.numerics import Pointwise
from tilert_ref.engine.rope import apply_rope
from tilert_ref.engine.weights import AttentionWeights, LayerWeights, MlpWeights, MtpWeights, Weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rule: Pointwise) -> torch.Tensor:
    """w * x / sqrt(mean(x^2) + eps): fp32 inside; NATIVE rounds to the weight's dtype before the product."""
    if rule is Pointwise.FUSED and tensor_cores.there(x):
        return tensor_cores.pointwise().add_rms_norm(x, None, weight, eps)[0]
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x.to(weight.dtype) * weight if rule is Pointwise.NATIVE else (x * weight.float()).to(weight.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rule: Pointwise
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual); without a residual the stream starts at x."""
    if residual is None:
        return rms_norm(x, weight, eps, rule), x
    if rule is Pointwise.FUSED and tensor_cores.there(x):
        return tensor_cores.pointwise().add_rms_norm(x, residual, weight, eps)
    total = x.float() + residual.float()
    stream = total.to(x.dtype)
    return rms_norm(total if rule is Pointwise.NATIVE else stream, weight, eps, rule), stream


def attention(
    w: AttentionWeights, config: ModelConfig, cache: KVCache, layer: int, batch: Batch, x: torch.Tensor, seen: Seen
) -> tuple[torch.Tensor, Seen]:
    """Multi-head latent attention (DeepSeek-V2 paper, eq. 9 to 19), [T, D] -> [T, D], and what the queries attended to.

    With an indexer each query attends to the index_topk tokens that it chooses (DSA: DeepSeek-V3.2 report, eq. 2).
    Without one it attends to `seen`, what the layer below did: every token in a dense model, the choice of the nearest
    lower indexer where layers share one (IndexCache, arXiv 2603.12201).
    """
    c, tokens, rule = config, x.shape[0], batch.kernels.pointwise
    absorbed = batch.absorbed or c.index_topk is not None
    with tensor_cores.beside(x, 1) as join_rows:
        if not batch.keep_rows:
            c_kv, k_rope = linear(x, w.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
            c_kv = rms_norm(c_kv, w.kv_a_norm, c.rms_norm_eps, rule)  # [T, L]
            cache.write(layer, batch.positions, c_kv, apply_rope(k_rope, batch.cos_sin, rule))

    c_q = x if w.q_a is None else rms_norm(linear(x, w.q_a), w.q_a_norm, c.rms_norm_eps, rule)  # [T, q_lora_rank]
    with tensor_cores.beside(x, 2) as join_query:
        q = linear(c_q, w.q_b).view(tokens, c.num_attention_heads, c.qk_head_dim)  # [T, H, nope + rope]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = apply_rope(q_rope, batch.cos_sin, rule)  # [T, H, rope]
        q_latent = heads_product(q_nope, w.w_uk, batch.kernels.order) if absorbed else None  # [T, H, L]

    if w.indexer is not None and batch.chosen is None:
        seen = lightning_index(w.indexer, c, cache, layer, batch, x, c_q)  # index_topk positions a query
    join_rows()
    join_query()
    if absorbed:
        attended = _attend_latent(c, cache, layer, batch, q_latent, q_rope, seen)  # [T, H, L]
        out = heads_product(attended, w.w_uv, batch.kernels.order)  # [T, H, v]
    else:
        out = _plain(w, c, batch, q_nope, q_rope, cache.read(layer, batch.end))
    return linear(out.flatten(1), w.o), seen


def _attend_latent(
    c: ModelConfig,
    cache: KVCache,
    layer: int,
    batch: Batch,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    seen: Seen,
) -> torch.Tensor:
    kernel = decode_kernel(batch.kernels, sparse=c.index_topk is not None, fp8_rows=cache.scale_rule is not None)
    if batch.absorbed and batch.kernels.attention is not None:
        return attend_by(batch.kernels.attention, q_latent, q_rope, cache, layer, seen)
    if batch.captured or batch.kernels.on_tensor_cores(q_latent):
        return attend_selected(q_latent, q_rope, cache, layer, seen, c.softmax_scale, kernel)
    rows = cache.read(layer, batch.end)  # [S, L + rope]
    if batch.absorbed:
        return attend_absorbed(q_latent, q_rope, rows, seen, c.softmax_scale, kernel)
    return attend_chosen(q_latent, q_rope, rows, seen, c.softmax_scale)


def _plain(
    w: AttentionWeights, c: ModelConfig, batch: Batch, q_nope: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    c_kv, k_rope = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    kv = linear(c_kv, w.kv_b).view(len(rows), c.num_attention_heads, -1)  # [S, H, nope + v]
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    return attend_plain(torch.cat((q_nope, q_rope), dim=-1), k_nope, k_rope, v, batch.first, c.softmax_scale)


def decoder_layer(
    w: LayerWeights,
    config: ModelConfig,
    cache: KVCache,
    layer: int,
    batch: Batch,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    seen: Seen,
) -> tuple[torch.Tensor, torch.Tensor, Seen]:
    """(branch output, residual stream, positions attended to) -> the same after this layer; the streams are [T, D]."""
    eps, rule = config.rms_norm_eps, batch.kernels.pointwise
    x, residual = add_rms_norm(x, residual, w.input_norm, eps, rule)
    x, seen = attention(w.attention, config, cache, layer, batch, x, seen)
    x, residual = add_rms_norm(x, residual, w.post_attention_norm, eps, rule)
    x = mlp(w.mlp, x) if isinstance(w.mlp, MlpWeights) else moe(w.mlp, config, x, batch.kernels)
    return x, residual, seen


def forward(w: Weights, config: ModelConfig, cache: KVCache, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids [T] -> hidden states after the final norm [T, D]; writes the tokens' KV rows and index keys."""
    x, residual, seen = F.embedding(token_ids, w.embed), None, batch.seen()
    for index, layer in enumerate(w.layers):
        x, residual, seen = decoder_layer(layer, config, cache, index, batch, x, residual, seen)
    hidden, _ = add_rms_norm(x, residual, w.norm, config.rms_norm_eps, batch.kernels.pointwise)
    return hidden


def logits(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, V] fp32; the product itself is rounded to the model's dtype, as in vLLM."""
    return linear(hidden, w.head).float()


def mtp_forward(
    w: MtpWeights, config: ModelConfig, cache: KVCache, batch: Batch, next_ids: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, Seen]:
    """One multi-token prediction pass (DeepSeek-V3 paper, eq. 21 to 23), [T, D] -> [T, D] after shared_head.norm.

    And what its queries attended to: its own indexer's choice or batch.chosen, never what a main layer has chosen.

    Slot i combines the hidden state of position i with the token at i+1 and predicts the token at i+2. The result is
    both the draft head's input and the hidden state of the next draft: vLLM recycles it after the norm
    (deepseek_mtp.py, DeepSeekMultiTokenPredictorLayer). The embedding at position 0 is masked, also vLLM's rule.
    """
    eps, rule = config.rms_norm_eps, batch.kernels.pointwise
    embedded = torch.where(batch.positions[:, None] == 0, 0, F.embedding(next_ids, w.embed))  # [T, D]
    pair = torch.cat((rms_norm(embedded, w.enorm, eps, rule), rms_norm(hidden, w.hnorm, eps, rule)), -1)  # [T, 2 D]
    layer = config.num_hidden_layers  # the MTP layer's rows follow the main layers' in the cache
    x = linear(pair, w.eh_proj)
    x, residual, seen = decoder_layer(w.layer, config, cache, layer, batch, x, None, batch.seen())
    return rms_norm(residual + x, w.norm, eps, rule), seen


def mtp_logits(w: MtpWeights, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, w.head).float()
