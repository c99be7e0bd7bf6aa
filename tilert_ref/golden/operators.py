"""Our operators beside vLLM's, one by one, on a trace of a sparse model's decode on CUDA (vllm_spy.trace).

Every operator gets what vLLM's had as input, so that no difference is carried on to the next one.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tilert_ref.connector.layout import FP8_DS_MLA
from tilert_ref.connector.planes import CODE_BYTES, SCALE_BYTES
from tilert_ref.connector.rounding import (
    INDEX_KEY_FLOOR,
    INDEX_QUERY_FLOOR,
    ScaleRule,
    dequantize_fp8_ds_mla,
    quantize_fp8_ds_mla,
    quantize_index,
)
from tilert_ref.engine import indexer as dsa
from tilert_ref.engine.attention import attend_absorbed, decode_kernel
from tilert_ref.engine.cache import SCALE_READ
from tilert_ref.engine.decode import Model
from tilert_ref.engine.linear import heads_product, linear
from tilert_ref.engine.model import add_rms_norm, logits
from tilert_ref.engine.moe import experts, route, router_logits
from tilert_ref.engine.rope import apply_rope
from tilert_ref.engine.weights import AttentionWeights, IndexerWeights, MlpWeights, MoeWeights
from tilert_ref.golden.recording import Answer

Compared = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""Operator, our values, vLLM's; of one shape and dtype."""

SCALE_RULE = ScaleRule.PLAIN
"""vLLM 0.26.0's, for the rows that it writes."""


class Token:
    """One token that vLLM decoded: token(NAME) is what a module returned, or got (NAME:in); and the KV up to it."""

    def __init__(self, model: Model, answer: Answer, seen: dict[str, list[torch.Tensor]]) -> None:
        self.model, self.seen = model, seen
        self.batch = model.batch(int(seen["model.layers.0.self_attn.mla_attn:in"][0]), 1)
        self.rows, self.index = (answer[kind][:, : self.batch.end].to(model.rope.device) for kind in ("rows", "index"))

    def __call__(self, name: str, part: int = 0) -> torch.Tensor:
        return self.seen[name][part].to(self.model.rope.device)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, self.model.config.rms_norm_eps, self.batch.kernels.pointwise)[0]

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        return apply_rope(x, self.batch.cos_sin, self.batch.kernels.pointwise)


def operators(t: Token) -> Compared:
    """All of the model, in the order of a forward pass."""
    w, x, residual = t.model.weights, t("model.embed_tokens"), None
    own = [number for number, layer in enumerate(w.layers) if layer.attention.indexer is not None]
    for number, layer in enumerate(w.layers):
        p = f"model.layers.{number}"
        yield "input_layernorm", t.norm(x, layer.input_norm, residual), t(f"{p}.input_layernorm")
        yield from projections(t, layer.attention, f"{p}.self_attn.")
        if number in own:  # the others share a lower layer's
            yield from indexer(t, layer.attention.indexer, t.index[own.index(number)], f"{p}.self_attn.")
        yield from attention(t, layer.attention, number, f"{p}.self_attn.")
        stream = x if residual is None else t(f"{p}.input_layernorm", 1)
        normed = t.norm(t(f"{p}.self_attn"), layer.post_attention_norm, stream)
        yield "post_attention_layernorm", normed, t(f"{p}.post_attention_layernorm")
        x = t(f"{p}.post_attention_layernorm")
        yield from mlp(layer.mlp, t, x, f"{p}.mlp") if isinstance(layer.mlp, MlpWeights) else moe(layer.mlp, t, x, p)
        x, residual = t(p), t(p, 1)
    yield "norm", t.norm(x, w.norm, residual), t("model.norm")
    yield "logits", logits(w, t("model.norm")), t("logits_processor").float()


def projections(t: Token, w: AttentionWeights, p: str) -> Compared:
    """From the hidden state to query, latent and rotary key, as they go into attention and cache."""
    c, x, qkv, c_q = t.model.config, t(p + "mla_attn:in", 1), t(p + "fused_qkv_a_proj"), t(p + "q_a_layernorm")
    yield "fused_qkv_a_proj", torch.cat((linear(x, w.q_a), linear(x, w.kv_a)), dim=-1), qkv
    q_latent, latent, k_rope = qkv.split([c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    yield "q_a_layernorm", t.norm(q_latent, w.q_a_norm), c_q
    yield "kv_a_layernorm", t.norm(latent, w.kv_a_norm), t(p + "kv_a_layernorm")
    yield "q_b_proj", linear(c_q, w.q_b), t(p + "q_b_proj")
    q = t(p + "q_b_proj").view(1, c.num_attention_heads, c.qk_head_dim)
    yield "rope q", t.rope(q[..., c.qk_nope_head_dim :]), t(p + "mla_attn.mla_attn:in")[..., c.qk_nope_head_dim :]
    yield "rope k", t.rope(k_rope[:, None]), t(p + "mla_attn.mla_attn:in", 2)


def indexer(t: Token, w: IndexerWeights, cached: torch.Tensor, p: str) -> Compared:
    """From hidden state and query latent to index keys as they are cached, and to the choice beyond index_topk.

    cached: vLLM's index keys, uint8 [S, 132].
    """
    c, op, c_q = t.model.config, p + "indexer.indexer_op", t(p + "q_a_layernorm")
    x, codes, key, weights = (t(op + ":in", part) for part in range(4))
    k_and_w, normed = t(p + "indexer.wk_weights_proj"), t(p + "indexer.k_norm")
    yield "indexer wq_b", linear(c_q, w.wq_b), t(p + "indexer.wq_b")
    yield "indexer wk_weights_proj", torch.cat((linear(x, w.wk), linear(x, w.weights_proj)), dim=-1), k_and_w
    k = k_and_w[:, : c.index_head_dim].float()
    k_norm = F.layer_norm(k, k.shape[-1:], w.k_norm, w.k_norm_bias, dsa.K_NORM_EPS).to(x.dtype)
    yield "indexer k_norm", k_norm, normed
    yield "indexer key (from hidden state)", dsa.index_keys(w, c, t.batch, x), key
    query = dsa.rotate(c, t.batch.cos_sin, dsa.project_queries(w, c, c_q), t.batch.kernels.pointwise)
    our_codes, scale = quantize_index(query, INDEX_QUERY_FLOOR)
    yield "indexer query codes (from query latent)", our_codes, codes
    yield "indexer weights", dsa.index_weights(c, linear(x, w.weights_proj), scale), weights
    key_codes, key_scale = (part.contiguous().view(torch.uint8) for part in quantize_index(key, INDEX_KEY_FLOOR))
    yield "index key bytes", torch.cat((key_codes, key_scale[None]), dim=-1), cached[t.batch.first :]
    if t.batch.end > c.index_topk:
        yield "indexer choice", *choices(t, cached, codes[0], weights[0], t(op)[0])


def choices(
    t: Token, cached: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor, theirs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which cached tokens our scores and vLLM's choose, bool [S] each: a token chosen for another is two values off."""
    keys, scales = cached.split([CODE_BYTES, SCALE_BYTES], dim=1)
    keys, scales = keys.contiguous().view(codes.dtype).float(), scales.contiguous().view(torch.float32)[:, 0]
    order = t.batch.kernels.order
    scores = dsa.index_scores_apart(codes[None].float(), weights[None], keys, scales, t.batch.lengths(), order)
    masks = torch.zeros(2, t.batch.end, dtype=torch.bool, device=keys.device)
    for mask, chosen in zip(masks, (dsa.top_positions(scores, t.model.config.index_topk)[0], theirs), strict=True):
        mask[chosen[chosen >= 0].long()] = True
    return masks[0], masks[1]


def attention(t: Token, w: AttentionWeights, layer: int, p: str) -> Compared:
    """Over vLLM's own rows, in the order in which its indexer gives them."""
    c, stored = t.model.config, t.rows[layer]
    fp8 = stored.shape[1] == FP8_DS_MLA.row_bytes
    query, latent, k_rope = (t(p + "mla_attn.mla_attn:in", part) for part in range(3))
    k_rope = k_rope[:, 0]
    if fp8:
        row, rows = (
            quantize_fp8_ds_mla(latent, k_rope, SCALE_RULE),
            torch.cat(dequantize_fp8_ds_mla(stored, SCALE_READ), 1),
        )
    else:
        row, rows = torch.cat((latent, k_rope), dim=1).view(torch.uint8), stored.contiguous().view(latent.dtype)
    yield "row bytes", row, stored[t.batch.first :]
    chosen = t(f"model.layers.{c.indexer_of(layer)}.self_attn.indexer.indexer_op")[0]
    q_nope, q_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    q_latent = heads_product(q_nope, w.w_uk, t.batch.kernels.order)  # [1, H, L]
    kernel = decode_kernel(t.batch.kernels, sparse=True, fp8_rows=fp8)
    seen = [chosen[chosen >= 0].long()]
    attended = attend_absorbed(q_latent, q_rope, rows, seen, c.softmax_scale, kernel)
    out = heads_product(attended, w.w_uv, t.batch.kernels.order).flatten(1)  # [1, H * v]
    yield "attention with W_UK and W_UV", out, t(p + "mla_attn.mla_attn")
    yield "o_proj", linear(t(p + "mla_attn.mla_attn"), w.o), t(p + "o_proj")


def mlp(w: MlpWeights, t: Token, x: torch.Tensor, p: str) -> Compared:
    gate, up = t(p + ".gate_up_proj").chunk(2, dim=-1)
    kind = "shared expert" if p.endswith("shared_experts") else "mlp"
    yield f"{kind} gate_up_proj", linear(x, w.gate_up), t(p + ".gate_up_proj")
    yield f"{kind} act_fn", F.silu(gate) * up, t(p + ".act_fn")
    yield f"{kind} down_proj", linear(t(p + ".act_fn"), w.down), t(p + ".down_proj")


def moe(w: MoeWeights, t: Token, x: torch.Tensor, p: str) -> Compared:
    """The experts get vLLM's router logits."""
    c, gate, shared = t.model.config, t(p + ".mlp.gate"), t(p + ".mlp.shared_experts")
    yield "router gate", router_logits(c, x, w.gate), gate
    yield from mlp(w.shared, t, x, p + ".mlp.shared_experts")
    routed = experts(w, x, *route(c, gate, w.bias), t.batch.kernels) * c.routed_scaling_factor
    yield "routing and experts", routed + shared, t(p + ".mlp")
