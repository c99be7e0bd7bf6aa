"""The forward pass of the MLA family, one line per equation.

T tokens, D hidden, H heads, L = kv_lora_rank, S cached tokens. The residual stream is carried beside the branch output
and added inside the next norm, in fp32, as vLLM's fused_add_rms_norm does. Where norms round is a rule (numerics.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilert_ref.engine import tensor_cores, vllm_hopper
from tilert_ref.engine.attention import (
    attend_absorbed,
    attend_by,
    attend_chosen,
    attend_plain,
    attend_selected,
    decode_kernel,
)
from tilert_ref.engine.batch import Batch, Pieces, Seen
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.indexer import lightning_index
from tilert_ref.engine.linear import heads_product, linear
from tilert_ref.engine.moe import mlp, moe
from tilert_ref.engine.numerics import Kernels, Pointwise
from tilert_ref.engine.rope import apply_rope
from tilert_ref.engine.weights import AttentionWeights, LayerWeights, MlpWeights, MtpWeights, Weights


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rule: Pointwise, *, added: bool = False
) -> torch.Tensor:
    """w * x / sqrt(mean(x^2) + eps), x [T, D]: fp32 inside; NATIVE rounds to the weight's dtype before the product.
    added: x is a sum with the residual, which FUSED kernels square in another order."""
    if rule is Pointwise.FUSED and tensor_cores.there(x):
        return tensor_cores.pointwise().add_rms_norm(x, None, weight, eps, added=added)[0]
    x = x.float()
    total = x.pow(2).sum(-1, keepdim=True) if rule is Pointwise.NATIVE else vllm_hopper.sum_of_squares(x, added)
    x = x * torch.rsqrt(total / x.shape[-1] + eps)
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
    return rms_norm(total if rule is Pointwise.NATIVE else stream, weight, eps, rule, added=True), stream


class Projected(NamedTuple):
    """What one layer makes of its tokens before any of them looks at another."""

    x: torch.Tensor  # [T, D], after the input norm
    c_q: torch.Tensor  # [T, q_lora_rank], or x where queries are not compressed
    q: torch.Tensor  # [T, H, nope], or folded into the latent space: [T, H, L]
    q_rope: torch.Tensor  # [T, H, rope]
    c_kv: torch.Tensor  # [T, L]
    k_rope: torch.Tensor  # [T, rope]


def before_attention(
    w: LayerWeights,
    config: ModelConfig,
    kernels: Kernels,
    absorbed: bool,
    cos_sin: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[Projected, torch.Tensor]:
    """(branch output, residual stream), both [T, D] -> queries and rows of a layer (DeepSeek-V2 paper, eq. 9 to 15),
    and the stream. absorbed: queries are folded by W_UK. Pure: it may be compiled (compiled.py). While a step is
    captured, queries and rows are there after tensor_cores.join(x, 1, 2)."""
    c, a, rule = config, w.attention, kernels.pointwise
    x, residual = add_rms_norm(x, residual, w.input_norm, c.rms_norm_eps, rule)
    with tensor_cores.beside(x, 1):
        c_kv, k_rope = linear(x, a.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        c_kv, k_rope = rms_norm(c_kv, a.kv_a_norm, c.rms_norm_eps, rule), apply_rope(k_rope, cos_sin, rule)
    c_q = x if a.q_a is None else rms_norm(linear(x, a.q_a), a.q_a_norm, c.rms_norm_eps, rule)  # [T, q_lora_rank]
    with tensor_cores.beside(x, 2):
        q = linear(c_q, a.q_b).view(len(x), c.num_attention_heads, c.qk_head_dim)  # [T, H, nope + rope]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = apply_rope(q_rope, cos_sin, rule)  # [T, H, rope]
        q_nope = heads_product(q_nope, a.w_uk, kernels.order) if absorbed else q_nope
    return Projected(x, c_q, q_nope, q_rope, c_kv, k_rope), residual


def after_attention(
    w: LayerWeights,
    config: ModelConfig,
    kernels: Kernels,
    absorbed: bool,
    attended: torch.Tensor,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the heads attended to, [T, H, v] or absorbed [T, H, L], and the residual stream -> the layer's (branch
    output, residual stream), both [T, D]. A pure function: it may be compiled (compiled.py)."""
    a = w.attention
    values = heads_product(attended, a.w_uv, kernels.order) if absorbed else attended  # [T, H, v]
    x = linear(values.flatten(1), a.o)
    x, residual = add_rms_norm(x, residual, w.post_attention_norm, config.rms_norm_eps, kernels.pointwise)
    return mlp(w.mlp, x) if isinstance(w.mlp, MlpWeights) else moe(w.mlp, config, x, kernels), residual


PLAIN = Pieces(before_attention, after_attention)


def attention(
    w: AttentionWeights, config: ModelConfig, cache: KVCache, layer: int, batch: Batch, p: Projected, seen: Seen
) -> tuple[torch.Tensor, Seen]:
    """Multi-head latent attention (DeepSeek-V2 paper, eq. 16 to 19) -> [T, H, v], or absorbed [T, H, L], and what the
    queries attended to.

    With an indexer each query attends to the index_topk tokens that it chooses (DSA: DeepSeek-V3.2 report, eq. 2).
    Without one it attends to `seen`, what the layer below did: every token in a dense model, the choice of the nearest
    lower indexer where layers share one (IndexCache, arXiv 2603.12201).
    """
    if not batch.keep_rows:
        with tensor_cores.beside(p.x, 1):
            cache.write(layer, batch.positions, p.c_kv, p.k_rope)
    if choosing := w.indexer is not None and batch.chosen is None:
        seen = lightning_index(w.indexer, config, cache, layer, batch, p.x, p.c_q)  # index_topk positions a query
    tensor_cores.join(p.x, 1, 2)
    if folds(config, batch):
        attended = _absorbed(config, cache, layer, batch, p, seen)
    else:
        attended = _plain(w, config, batch, p, cache.read(layer, batch.end))
    if choosing:  # the index keys, which only a query that leaves tokens out waits for
        tensor_cores.join(p.x, 3)
    return attended, seen


def folds(config: ModelConfig, batch: Batch) -> bool:
    """Whether queries are folded into the latent space: in decode, and in a sparse model always."""
    return batch.absorbed or config.index_topk is not None


def _absorbed(c: ModelConfig, cache: KVCache, layer: int, batch: Batch, p: Projected, seen: Seen) -> torch.Tensor:
    kernel = decode_kernel(batch.kernels, sparse=c.index_topk is not None, fp8_rows=cache.scale_rule is not None)
    if batch.absorbed and batch.kernels.attention is not None:
        return attend_by(batch.kernels.attention, p.q, p.q_rope, cache, layer, seen)  # [T, H, L]
    if batch.captured or batch.kernels.on_tensor_cores(p.q):
        return attend_selected(p.q, p.q_rope, cache, layer, seen, c.softmax_scale, kernel)  # [T, H, L]
    if batch.absorbed and batch.pieces is not None and batch.pieces.attend is not None:
        return batch.pieces.attend(p.q, p.q_rope, cache, layer, batch.first)  # [T, H, L]
    rows = cache.read(layer, batch.end)  # [S, L + rope]
    if batch.absorbed:
        return attend_absorbed(p.q, p.q_rope, rows, seen, c.softmax_scale, kernel)  # [T, H, L]
    return attend_chosen(p.q, p.q_rope, rows, seen, c.softmax_scale)  # [T, H, L]


def _plain(w: AttentionWeights, c: ModelConfig, batch: Batch, p: Projected, rows: torch.Tensor) -> torch.Tensor:
    c_kv, k_rope = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    kv = linear(c_kv, w.kv_b).view(len(rows), c.num_attention_heads, -1)  # [S, H, nope + v]
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    return attend_plain(torch.cat((p.q, p.q_rope), dim=-1), k_nope, k_rope, v, batch.first, c.softmax_scale)


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
    fold = folds(config, batch)
    pieces = batch.pieces or PLAIN
    stream = () if residual is None else (residual,)
    projected, residual = pieces.before(w, config, batch.kernels, fold, batch.cos_sin, x, *stream)
    attended, seen = attention(w.attention, config, cache, layer, batch, projected, seen)
    x, residual = pieces.after(w, config, batch.kernels, fold, attended, residual)
    return x, residual, seen


def forward(w: Weights, config: ModelConfig, cache: KVCache, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids [T] -> hidden states after the final norm [T, D]; writes the tokens' KV rows and index keys."""
    x, residual, seen = F.embedding(token_ids, w.embed), None, batch.seen()
    for index, layer in enumerate(w.layers):
        x, residual, seen = decoder_layer(layer, config, cache, index, batch, x, residual, seen)
    hidden, _ = add_rms_norm(x, residual, w.norm, config.rms_norm_eps, batch.kernels.pointwise)
    return hidden


def head(w: Weights | MtpWeights, hidden: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, V], rounded to the model's dtype, as in vLLM."""
    return linear(hidden, w.head)


def logits(w: Weights | MtpWeights, hidden: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, V] fp32, of the rounded products."""
    return head(w, hidden).float()


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
