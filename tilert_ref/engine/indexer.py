"""The lightning indexer of DeepSeek sparse attention: which cached tokens a query attends to.

DeepSeek-V3.2 report, section 2.1. Hi index heads of width d = 128, one key a token. Query t scores token s by

    I(t, s) = sum_j w_tj * ReLU(q_tj . k_s)                                                      (eq. 1)

and attends to the index_topk tokens with the highest scores. Keys and queries are rounded to e4m3 with a power-of-two
scale each, as in vLLM (sparse_attn_indexer.py): the cache holds the rounded keys. The scale of q is folded into w, the
scale of k multiplies the sum; both are positive, so ReLU doesn't mind. Products and sums are fp32.

vLLM has no Hadamard transform here (DeepSeek's own code has): it changes neither side's scores but for the rounding.
"""

import torch
import torch.nn.functional as F

from tilert_ref.connector.rounding import INDEX_QUERY_FLOOR
from tilert_ref.engine import tensor_cores, vllm_hopper
from tilert_ref.engine.attention import selected
from tilert_ref.engine.batch import Batch, Seen, Selected
from tilert_ref.engine.cache import KVCache, round_index
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.linear import linear
from tilert_ref.engine.numerics import Pointwise, SumOrder
from tilert_ref.engine.rope import apply_rope, rotate_on_device
from tilert_ref.engine.weights import IndexerWeights

K_NORM_EPS = 1e-6  # fixed by the reference code, not in config.json
QUERIES = 64  # ranked together; bounds the scores in memory to [64, S]
HEAD_SCORES = 2**20  # of the queries of a prompt that are multiplied together, before the sum over heads: 4 MB


def lightning_index(
    w: IndexerWeights,
    config: ModelConfig,
    cache: KVCache,
    layer: int,
    batch: Batch,
    x: torch.Tensor,
    c_q: torch.Tensor,
) -> Seen:
    """x [T, D], c_q [T, q_lora_rank] (the query latent after its norm) -> the positions that each query attends to.

    Writes the tokens' index keys first: in a captured step they are there after tensor_cores.join(x, 3). A query that
    has no more than index_topk tokens before it sees them all.
    """
    with tensor_cores.beside(x, 3):
        if not batch.keep_rows:
            cache.write_index(layer, batch.positions, index_keys(w, config, batch, x))
    if batch.everything is not None:
        return batch.everything
    lengths = batch.lengths()
    if lengths is None:  # a captured step on a GPU
        q, weights = rounded_queries(w, config, cache, batch, x, c_q, batch.cos_sin)
        tensor_cores.join(x, 3)
        return choose_on_device(config, cache, layer, batch, q, weights)
    seen: Seen = [slice(0, length) for length in lengths if length <= config.index_topk]
    if len(seen) < len(x):
        later = [t[len(seen) :] for t in (x, c_q, batch.cos_sin, batch.positions)]
        seen += rank(w, config, cache, layer, batch, *later, lengths[len(seen) :])
    return selected(seen, cache.block_table, cache.block_size) if batch.captured else seen


def rank(
    w: IndexerWeights,
    config: ModelConfig,
    cache: KVCache,
    layer: int,
    batch: Batch,
    x: torch.Tensor,
    c_q: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    lengths: list[int],
) -> list[torch.Tensor]:
    """The index_topk best of the first lengths[t] tokens for each query, which has more than that before it."""
    q, weights = rounded_queries(w, config, cache, batch, x, c_q, cos_sin)
    end = lengths[-1]
    if batch.kernels.on_tensor_cores(q):
        scores = scores_on_device(cache, layer, q, weights, positions)
        later = torch.arange(end, device=q.device) > positions[:, None]  # [T, S]
        return list(top_positions(scores[:, :end].masked_fill(later, float("-inf")), config.index_topk))
    k, k_scale = cache.read_index(layer, end)  # [S, d], [S]
    order = batch.kernels.order if cache.index_dtype is torch.float8_e4m3fn else SumOrder.TORCH
    best = list[torch.Tensor]()
    for start in range(0, len(x), QUERIES):
        part = slice(start, start + QUERIES)
        if batch.absorbed:
            scores = index_scores_apart(q[part].float(), weights[part], k, k_scale, lengths[part], order)
        else:
            scores = index_scores(q[part].float(), weights[part], k, k_scale, lengths[part])
        best += top_positions(scores, config.index_topk).unbind()
    return best


def choose_on_device(
    config: ModelConfig, cache: KVCache, layer: int, batch: Batch, q: torch.Tensor, weights: torch.Tensor
) -> Selected:
    """The same choice where the host knows neither the positions nor how many tokens are cached."""
    scores = scores_on_device(cache, layer, q, weights, batch.positions)
    return Selected(*tensor_cores.attention().choose(scores, cache.block_table, batch.positions, config.index_topk))


def rounded_queries(
    w: IndexerWeights,
    config: ModelConfig,
    cache: KVCache,
    batch: Batch,
    x: torch.Tensor,
    c_q: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the queries, [T, Hi, d], and the weights of their heads, index_weights, fp32 [T, Hi]."""
    with tensor_cores.beside(x, 4):
        heads = linear(x, w.weights_proj)  # [T, Hi]
    q = project_queries(w, config, c_q)
    tensor_cores.join(x, 4)
    if batch.kernels.on_tensor_cores(q) and cache.index_dtype is torch.float8_e4m3fn:
        rotation = cos_sin, config.indexer_rope_interleave
        return tensor_cores.pointwise().index_queries(q, heads, *rotation, INDEX_QUERY_FLOOR, weight_factors(config))
    q, q_scale = round_index(rotate(config, cos_sin, q, batch.kernels.pointwise), cache.index_dtype, INDEX_QUERY_FLOOR)
    return q, index_weights(config, heads, q_scale)


def scores_on_device(
    cache: KVCache, layer: int, q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Eq. 1 by the tensor cores, fp32 [T, capacity of the cache]; behind a query's position it is undefined."""
    pool = cache.index_pool(layer)
    return tensor_cores.attention().index_scores(q, weights, pool, cache.block_table, positions)


def project_queries(w: IndexerWeights, config: ModelConfig, c_q: torch.Tensor) -> torch.Tensor:
    """c_q [T, q_lora_rank] -> q [T, Hi, d], before RoPE."""
    return linear(c_q, w.wq_b).view(len(c_q), config.index_n_heads, config.index_head_dim)


def index_keys(w: IndexerWeights, config: ModelConfig, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """x [T, D] -> k [T, d]. LayerNorm with a bias, in fp32, rounded once."""
    k = linear(x, w.wk)  # [T, d]
    if batch.kernels.on_tensor_cores(k):
        k = tensor_cores.pointwise().layer_norm(k, w.k_norm, w.k_norm_bias, K_NORM_EPS)
    else:
        k = F.layer_norm(k.float(), k.shape[-1:], w.k_norm, w.k_norm_bias, K_NORM_EPS).to(x.dtype)
    return rotate(config, batch.cos_sin, k, batch.kernels.pointwise)


def index_weights(config: ModelConfig, heads: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
    """heads = weights_proj x, q_scale [T, Hi] -> w_tj with the scale of q_tj and both 1/sqrt factors, [T, Hi] fp32."""
    width, number = weight_factors(config)
    return heads.float() * q_scale * width * number


def weight_factors(config: ModelConfig) -> tuple[float, float]:
    return config.index_head_dim**-0.5, config.index_n_heads**-0.5


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Eq. 1: q [T, Hi, d], weights [T, Hi], k [S, d], k_scale [S] -> I [T, S] fp32, -inf from lengths[t] on."""
    heads, tokens = q.shape[1], lengths[-1]
    size = max(1, HEAD_SCORES // (heads * tokens))  # G
    scores = torch.full((len(q), tokens), float("-inf"), device=q.device)
    for start in range(0, len(q), size):
        q_g, w_g, seen = q[start : start + size], weights[start : start + size], lengths[start : start + size]
        last = seen[-1]
        dots = (q_g.flatten(0, 1) @ k[:last].T).relu_().view(len(q_g), heads, last)  # [G, Hi, last]
        sums = (w_g[:, None] @ dots)[:, 0] * k_scale[:last]  # [G, last]
        for row, values, length in zip(scores[start:], sums, seen, strict=False):
            row[:length] = values[:length]
    return scores


def index_scores_apart(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    lengths: list[int],
    order: SumOrder,
) -> torch.Tensor:
    """index_scores of decode: queries are taken one by one, as in attention.attend_absorbed and for the same reason:
    the choice of a query must not depend on how many others are fed beside it. order: of the products of codes."""
    scores = torch.full((len(q), lengths[-1]), float("-inf"), device=q.device)
    for row, q_t, w_t, length in zip(scores, q, weights, lengths, strict=True):
        dots = _dots(q_t, k[:length], order)  # [Hi, length]
        row[:length] = w_t @ dots.relu_() * k_scale[:length]
    return scores


def _dots(q: torch.Tensor, k: torch.Tensor, order: SumOrder) -> torch.Tensor:
    if order is SumOrder.VLLM_HOPPER:
        return vllm_hopper.fp8_dot(vllm_hopper.operand(q), vllm_hopper.operand(k))
    return q @ k.T


def top_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of each row of scores [T, S], as ascending positions [T, count].

    Tie rule "lowest position first": of equal scores at the edge, the earlier tokens are chosen. (vLLM's kernels leave
    it open; torch.topk too.) Raises FloatingPointError if a row has NaN, which has no rank.
    """
    highest = scores.topk(count, sorted=True).values  # [T, count], NaN first
    if highest[:, 0].isnan().any():
        raise FloatingPointError("the indexer's scores contain NaN: the index keys or the hidden states are broken")
    edge = highest[:, -1:]  # [T, 1], the lowest score that is chosen
    above, equal = scores > edge, scores == edge
    room = count - above.sum(-1, keepdim=True)  # [T, 1], at least 1
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(len(scores), count)  # row after row, ascending within each


def rotate(config: ModelConfig, cos_sin: torch.Tensor, x: torch.Tensor, rule: Pointwise) -> torch.Tensor:
    """RoPE on the first qk_rope_head_dim values of x [T, ..., d]. The pairing is the indexer's own (case K3)."""
    if rule is Pointwise.FUSED and tensor_cores.there(x):
        return rotate_on_device(x, cos_sin, config.indexer_rope_interleave)
    rope, rest = x[..., : config.qk_rope_head_dim], x[..., config.qk_rope_head_dim :]
    return torch.cat((apply_rope(rope, cos_sin, rule, interleaved=config.indexer_rope_interleave), rest), dim=-1)
