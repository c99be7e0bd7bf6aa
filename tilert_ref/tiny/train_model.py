"""The differentiable twin of engine/model.py: the same equations over a batch of whole sequences, for training only.

Parameters carry Hugging Face's names and stay fp32; every product rounds them to bf16 first, so what is exported
as bf16 is what was trained. Attention is dense (fused), or sparse by the lightning indexer (DeepSeek-V3.2 report,
section 2.1). B sequences, T tokens, D hidden, H heads, J index heads.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.moe import route
from tilert_ref.engine.rope import apply_rope, rope_table

QUERY_CHUNK = 512  # queries of one sparse attention block; its [B, J, chunk, T] scores are the largest tensors


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [B, T, ..., d]; engine's rotation wants tokens first."""
    return apply_rope(x.transpose(0, 1), cos_sin, interleaved=interleaved).transpose(0, 1)


def _matrix(n_out: int, n_in: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(n_out, n_in) * gain * n_in**-0.5)


class Linear(nn.Module):
    def __init__(self, n_out: int, n_in: int, gain: float = 1.0):
        super().__init__()
        self.weight = _matrix(n_out, n_in, gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Keys(NamedTuple):
    """What a token leaves in the cache of a layer, already expanded for training."""

    k: torch.Tensor  # [B, H, T, nope + rope]
    v: torch.Tensor  # [B, H, T, v]
    index: torch.Tensor  # [B, T, 128]


class Queries(NamedTuple):
    """What asks: main attention's queries, and the indexer's with their head weights."""

    q: torch.Tensor  # [B, H, n, nope + rope]
    index: torch.Tensor  # [B, n, J, 128]
    weights: torch.Tensor  # [B, n, J]


@dataclass
class Mode:
    """How attention runs, and what it collects.

    sparse: select index_topk rows. kl_rows: query positions [n] at which the indexer is compared with dense attention
    (None: not at all; in sparse mode every query is compared, over the selected rows). divergences: one a layer or
    block.
    """

    sparse: bool = False
    kl_rows: torch.Tensor | None = None
    divergences: list[torch.Tensor] = field(default_factory=list)

    def add(self, divergence: torch.Tensor) -> None:
        self.divergences.append(divergence)

    def kl(self) -> torch.Tensor:
        """Their mean; zero if nothing was compared."""
        return torch.stack(self.divergences).mean() if self.divergences else torch.zeros(())


class Indexer(nn.Module):
    """Its input is detached: the indexer learns from attention, not from the language loss (report, section 2.1)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.wq_b = Linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.wk = Linear(c.index_head_dim, c.hidden_size)
        self.k_norm = nn.LayerNorm(c.index_head_dim, eps=1e-6)
        self.weights_proj = Linear(c.index_n_heads, c.hidden_size)

    def keys(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        k = self.k_norm(self.wk(x.detach()).float()).to(x.dtype)
        return self._rotate(k, cos_sin)

    def queries(self, x: torch.Tensor, q_latent: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [B, T, J, 128] and head weights [B, T, J]."""
        q = self.wq_b(q_latent.detach()).unflatten(-1, (self.c.index_n_heads, -1))
        scale = self.c.index_n_heads**-0.5 * self.c.index_head_dim**-0.5
        return self._rotate(q, cos_sin), self.weights_proj(x.detach()) * scale

    def _rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        rope, rest = x.split([self.c.qk_rope_head_dim, self.c.index_head_dim - self.c.qk_rope_head_dim], dim=-1)
        return torch.cat((rotate(rope, cos_sin, self.c.indexer_rope_interleave), rest), dim=-1)


def index_scores(queries: Queries, keys: torch.Tensor) -> torch.Tensor:
    """I(t, s) = sum_j w(t, j) ReLU(q(t, j) . k(s)), keys [B, S, 128] -> [B, n, S] fp32."""
    scores = torch.einsum("bnjd,bsd->bnjs", queries.index, keys).relu()  # [B, n, J, S]
    return torch.einsum("bnjs,bnj->bns", scores, queries.weights).float()


def divergence(probs: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """KL(attention summed over heads and normalised || softmax of the index scores), mean over queries.

    probs [B, H, n, S] of the main attention; scores [B, n, S] with -inf where a key isn't seen.
    """
    target = probs.detach().float().mean(dim=1)  # rows of probs sum to one, so the mean over heads does too
    log_index = scores.log_softmax(-1).clamp_min(-1e4)
    return (torch.xlogy(target, target) - target * log_index).sum(-1).mean()


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, depth: int):
        super().__init__()
        self.c = c
        heads, latent = c.num_attention_heads, c.kv_lora_rank
        self.q_a_proj = Linear(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Linear(heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(c.cache_width, c.hidden_size)
        self.kv_a_layernorm = Norm(latent, c.rms_norm_eps)
        self.kv_b_proj = Linear(heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
        self.o_proj = Linear(c.hidden_size, heads * c.v_head_dim, (2 * depth) ** -0.5)
        self.indexer = Indexer(c)

    def keys(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Keys:
        c, heads = self.c, self.c.num_attention_heads
        latent, rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        rope = rotate(rope, cos_sin, True)[:, :, None].expand(-1, -1, heads, -1)
        k = torch.cat((k_nope, rope), dim=-1)
        return Keys(k.transpose(1, 2), v.transpose(1, 2), self.indexer.keys(x, cos_sin))

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, mode: Mode, keys: Keys) -> torch.Tensor:
        """x [B, T, D], normed; keys may come from elsewhere (TrainModel.drafts). -> [B, T, D]."""
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (self.c.num_attention_heads, -1))
        q_nope, q_rope = q.split([self.c.qk_nope_head_dim, self.c.qk_rope_head_dim], dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, cos_sin, True)), dim=-1).transpose(1, 2)  # [B, H, T, nope + rope]
        if mode.sparse:
            out = self._sparse(Queries(q, *self.indexer.queries(x, q_latent, cos_sin)), keys, mode)
        else:
            out = self._dense(q, keys)
        if not mode.sparse and mode.kl_rows is not None:
            at = mode.kl_rows
            index = self.indexer.queries(x[:, at], q_latent[:, at], cos_sin[at])
            mode.add(self._dense_divergence(at, Queries(q[:, :, at], *index), keys))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _dense(self, q: torch.Tensor, keys: Keys) -> torch.Tensor:
        v = F.pad(keys.v, (0, q.shape[-1] - self.c.v_head_dim))  # the fused kernel wants equal widths
        out = F.scaled_dot_product_attention(q, keys.k, v, is_causal=True, scale=self.c.softmax_scale)
        return out[..., : self.c.v_head_dim]

    def _dense_divergence(self, at: torch.Tensor, queries: Queries, keys: Keys) -> torch.Tensor:
        """Indexer against dense attention for the queries at positions `at` [n] (the report's warm-up stage)."""
        future = torch.arange(keys.k.shape[2], device=at.device) > at[:, None]  # [n, T]
        with torch.no_grad():
            scores = queries.q @ keys.k.transpose(-2, -1) * self.c.softmax_scale
            probs = scores.float().masked_fill(future, float("-inf")).softmax(-1)
        return divergence(probs, index_scores(queries, keys.index).masked_fill(future, float("-inf")))

    def _sparse(self, queries: Queries, keys: Keys, mode: Mode) -> torch.Tensor:
        """Block by block, each computed again for the backward pass: its scores would fill the memory."""
        outs = []
        for first in range(0, keys.k.shape[2], QUERY_CHUNK):
            end = first + QUERY_CHUNK
            block = Queries(queries.q[:, :, first:end], queries.index[:, first:end], queries.weights[:, first:end])
            seen = Keys(keys.k[:, :, :end], keys.v[:, :, :end], keys.index[:, :end])
            out, kl = checkpoint(self._sparse_block, block, seen, first, use_reentrant=False)
            outs.append(out)
            mode.add(kl)
        return torch.cat(outs, dim=2)

    def _sparse_block(self, queries: Queries, keys: Keys, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries first .. first + n - 1 over the rows that the indexer selects: ([B, H, n, v], KL over those rows)."""
        n, seen = queries.q.shape[2], keys.k.shape[2]
        future = torch.ones(n, seen, dtype=torch.bool, device=keys.k.device).triu(first + 1)
        index = index_scores(queries, keys.index).masked_fill(future, float("-inf"))  # [B, n, S]
        chosen = index.detach().topk(min(self.c.index_topk, seen), dim=-1).indices
        hidden = torch.ones_like(index, dtype=torch.bool).scatter_(2, chosen, False) | future
        scores = (queries.q @ keys.k.transpose(-2, -1)).float() * self.c.softmax_scale
        probs = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return probs.to(keys.v.dtype) @ keys.v, divergence(probs, index.masked_fill(hidden, float("-inf")))


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int, depth: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(inner, hidden), Linear(inner, hidden)
        self.down_proj = Linear(hidden, inner, (2 * depth) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """All experts run on all tokens and the router's zeros drop out: at this size one large product is the fastest."""

    def __init__(self, c: ModelConfig, depth: int):
        super().__init__()
        self.c, inner = c, c.moe_intermediate_size
        self.gate = Linear(c.n_routed_experts, c.hidden_size)
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts))
        self.gate_up = nn.Parameter(torch.randn(c.n_routed_experts, 2 * inner, c.hidden_size) * c.hidden_size**-0.5)
        gain = inner**-0.5 * (2 * depth) ** -0.5 / c.routed_scaling_factor
        self.down = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size, inner) * gain)
        self.shared_experts = Mlp(c.hidden_size, inner * c.n_shared_experts, depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, flat = self.c, x.flatten(0, 1)  # [N, D]
        gate = self.gate.weight.to(x.dtype)
        fp32 = c.architecture.startswith("Glm")  # as engine/moe.py, router_logits
        logits = F.linear(flat.float(), gate.float()) if fp32 else F.linear(flat, gate)
        weights, ids = route(c, logits, self.bias)
        with torch.no_grad():
            self.load += torch.bincount(ids.flatten(), minlength=c.n_routed_experts)
        spread = torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, weights)  # [N, E]
        g, u = linear(flat, self.gate_up.flatten(0, 1)).unflatten(-1, (c.n_routed_experts, 2, -1)).unbind(2)
        inner = F.silu(g) * u * (spread * c.routed_scaling_factor).to(x.dtype)[..., None]  # [N, E, I]
        routed = linear(inner.flatten(1), self.down.transpose(0, 1).flatten(1))
        return routed.view_as(x) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balancing (arXiv 2408.15664): busy experts lose bias, idle ones gain it."""
        self.bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, index: int):
        super().__init__()
        depth = c.num_hidden_layers
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, depth)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Moe(c, depth) if c.is_moe(index) else Mlp(c.hidden_size, c.intermediate_size, depth)

    def keys(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Keys:
        return self.self_attn.keys(self.input_layernorm(x), cos_sin)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, mode: Mode, keys: Keys | None = None) -> torch.Tensor:
        normed = self.input_layernorm(x)
        keys = self.self_attn.keys(normed, cos_sin) if keys is None else keys
        x = x + self.self_attn(normed, cos_sin, mode, keys)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    """DeepSeek-V3 paper, eq. 21 to 23; embedding and head are the main model's."""

    def __init__(self, c: ModelConfig):
        super().__init__(c, c.num_hidden_layers)
        self.enorm, self.hnorm = Norm(c.hidden_size, c.rms_norm_eps), Norm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = Linear(c.hidden_size, 2 * c.hidden_size)
        self.shared_head = nn.Module()
        self.shared_head.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def combine(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))


class TrainModel(nn.Module):
    """Main model and MTP layer. max_length: longest sequence that will be trained.

    dtype: what products are computed in. bf16 is the real thing; a CPU without bf16 arithmetic needs fp32 to get on.
    """

    def __init__(self, c: ModelConfig, max_length: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=1.0)
        main = [Layer(c, i) for i in range(c.num_hidden_layers)]
        self.model.layers = nn.ModuleList([*main, MtpLayer(c)])
        self.model.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.vocab_size, c.hidden_size, 0.5)
        self.register_buffer("rope", rope_table(c, max_length, torch.bfloat16).to(dtype), persistent=False)

    def hidden(self, ids: torch.Tensor, mode: Mode) -> torch.Tensor:
        """Token ids [B, T] -> hidden states after the final norm [B, T, D] bf16."""
        cos_sin = self.rope[: ids.shape[1]]
        x = self.embed(ids)
        for layer in self.model.layers[:-1]:
            x = layer(x, cos_sin, mode)
        return self.model.norm(x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.model.embed_tokens.weight.to(self.dtype))

    def drafts(self, ids: torch.Tensor, hidden: torch.Tensor, mode: Mode, passes: int) -> list[torch.Tensor]:
        """Hidden states [B, T-1, D] of `passes` MTP passes; slot i of each predicts token i+2.

        Pass 1 sees the main model's hidden states. Pass p sees pass p-1's output of the slot before, as when drafting
        goes on (engine/decode.py, draft), but attends to pass 1's keys: while drafting all rows but the last few are
        those.
        """
        mtp: MtpLayer = self.model.layers[-1]
        cos_sin = self.rope[: ids.shape[1] - 1]
        embedded = self.embed(ids[:, 1:])
        embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)  # position 0 is masked
        previous, keys, outs = hidden[:, :-1], None, []
        for _ in range(passes):
            x = mtp.combine(embedded, previous)
            keys = mtp.keys(x, cos_sin) if keys is None else keys
            outs.append(mtp.shared_head.norm(mtp(x, cos_sin, mode, keys)))
            previous = torch.cat((hidden[:, :1], outs[-1][:, :-1]), dim=1)
        return outs

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden).float()
