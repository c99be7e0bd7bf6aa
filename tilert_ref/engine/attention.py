"""Multi-head latent attention over cached rows: two exact forms of the same sum, in plain torch.

DeepSeek-V2 paper, section 2.1. With c the latent and r the rotary key of a token, head h scores a query as

    q_nope . (W_UK c) + q_rope . r   =   (W_UK^T q_nope) . c + q_rope . r
    \\_____ plain: keys expanded _/       \\____ absorbed: query folded ___/

Plain costs one expansion per cached token and is what prefill uses; absorbed reads each row once and is what decode
uses. Scores, softmax and the weighted sum are fp32 in both; results are rounded once to the query's dtype (the
absorbed form by the rule of the peer's decode kernel, whose order of summation it can take too: numerics.py).

Sparse attention (DSA) is the absorbed form over the rows that the indexer has chosen, for prompts too (indexer.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilert_ref.engine import tensor_cores, vllm_avx2, vllm_hopper
from tilert_ref.engine.batch import Seen, Selected
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.numerics import DecodeAttention, KernelRounding, Kernels, SumOrder, round_kernel

NEAREST = KernelRounding.NEAREST
GATHERED_VALUES = 2**20  # row values that a group of sparse queries gathers at a time: 4 MB in fp32


Attend = Callable[[torch.Tensor, torch.Tensor, int, float], torch.Tensor]
"""(query [H, W] fp32, rows [n, W] fp32, width V of values, softmax scale) -> [H, V] fp32."""


@dataclass(frozen=True)
class DecodeKernel:
    """How one query attends to rows, and how the result becomes bf16."""

    attend: Attend
    rounding: KernelRounding


def attend(query: torch.Tensor, rows: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """softmax(q k^T) v in fp32, in torch's order. [H, W], [n, W] -> [H, V]."""
    probs = torch.softmax(query @ rows.T * scale, dim=-1)  # [H, n]
    return probs @ rows[:, :value_width]


def decode_kernel(kernels: Kernels, *, sparse: bool, fp8_rows: bool) -> DecodeKernel:
    """The peer's kernel, where its arithmetic is known: dense on a CPU with AVX2, sparse on Hopper."""
    if kernels.order is SumOrder.VLLM_AVX2 and not sparse:
        return DecodeKernel(vllm_avx2.attend, kernels.rounding)
    if kernels.order is SumOrder.VLLM_HOPPER and sparse:
        return DecodeKernel(vllm_hopper.attend_fp8_rows if fp8_rows else vllm_hopper.attend_bf16_rows, NEAREST)
    return DecodeKernel(attend, NEAREST if sparse else kernels.rounding)


def attend_absorbed(
    q_latent: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, seen: Seen, scale: float, kernel: DecodeKernel
) -> torch.Tensor:
    """q_latent [T, H, L], q_rope [T, H, R], rows [S, L + R]; query t sees rows[seen[t]]. -> [T, H, L].

    Queries are taken one by one: the result of a row must not depend on how many drafts are verified beside it
    (MTP is lossless only then), and a batched matmul may sum in another order.
    """
    query = torch.cat((q_latent, q_rope), dim=-1).float()  # [T, H, L + R]
    keys, width = rows.float(), q_latent.shape[-1]
    attended = []
    for q, chosen in zip(query, seen, strict=True):
        k = keys[chosen] if isinstance(chosen, slice) else keys.index_select(0, chosen)  # [n, L + R]
        attended.append(kernel.attend(q, k, width, scale))  # [H, L]
    return round_kernel(torch.stack(attended), q_latent.dtype, kernel.rounding)


def attend_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: KVCache,
    layer: int,
    seen: Seen,
    scale: float,
    kernel: DecodeKernel,
) -> torch.Tensor:
    """attend_absorbed over slots of the cache: on a Hopper GPU by its own tensor cores, straight from the stored rows
    (triton_attention.py)."""
    if not tensor_cores.there(q_latent):
        chosen = [slots[:count] for slots, count in zip(seen.slots, seen.counts.tolist(), strict=True)]
        return attend_absorbed(q_latent, q_rope, cache.read_slots(layer), chosen, scale, kernel)
    chosen = selected(seen, cache.block_table, cache.block_size)
    backwards = kernel.attend is vllm_hopper.attend_bf16_rows
    arguments = cache.layer_rows(layer), chosen.slots, chosen.counts, scale, backwards
    return tensor_cores.attention().attend(q_latent, q_rope, *arguments)


def attend_by(
    backend: DecodeAttention, q_latent: torch.Tensor, q_rope: torch.Tensor, cache: KVCache, layer: int, seen: Seen
) -> torch.Tensor:
    """attend_selected by a back end of the operator's choice. Where the host knows the counts, it says so."""
    chosen = selected(seen, cache.block_table, cache.block_size)
    counts = chosen.counts if isinstance(seen, Selected) else [s.stop if isinstance(s, slice) else len(s) for s in seen]
    return backend(q_latent, q_rope, cache.layer_rows(layer), chosen.slots, counts)


def selected(seen: Seen, block_table: torch.Tensor, block_size: int) -> Selected:
    """What eager code has chosen as positions, for the kernels."""
    if isinstance(seen, Selected):
        return seen
    device = block_table.device
    positions = [torch.arange(s.stop, device=device) if isinstance(s, slice) else s for s in seen]
    counts = torch.tensor([len(p) for p in positions], dtype=torch.int32, device=device)
    padded = torch.nn.utils.rnn.pad_sequence(positions, batch_first=True)  # [T, n]
    slots = block_table[padded // block_size] * block_size + padded % block_size
    return Selected(slots.int(), counts)


def attend_chosen(
    q_latent: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    """attend_absorbed for the many queries of a sparse prompt, in groups of equal length (those seen as positions).

    One by one a prompt of 4,096 tokens is some ten thousand tiny products a layer, which two threads spend waiting for
    each other as soon as anything else runs on the machine.
    """
    whole = sum(isinstance(chosen, slice) for chosen in seen)  # the first queries see all before them
    query = torch.cat((q_latent, q_rope), dim=-1).float()  # [T, H, L + R]
    width, out = q_latent.shape[-1], torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if whole:
        q = q_latent[:whole], q_rope[:whole]
        out[:whole] = attend_absorbed(*q, rows, seen[:whole], scale, DecodeKernel(attend, NEAREST))
    if whole < len(seen):
        size = max(1, GATHERED_VALUES // (len(seen[-1]) * rows.shape[-1]))  # G
        for start in range(whole, len(seen), size):
            chosen = torch.stack(seen[start : start + size])  # [G, n]
            k = rows.index_select(0, chosen.flatten()).view(*chosen.shape, -1).float()  # [G, n, L + R]
            probs = torch.softmax(query[start : start + size] @ k.transpose(1, 2) * scale, dim=-1)  # [G, H, n]
            out[start : start + size] = probs @ k[..., :width]  # [G, H, L]
    return out


def attend_plain(
    q: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor, first: int, scale: float
) -> torch.Tensor:
    """q [T, H, nope + rope] at positions first .. first+T-1, k_nope [S, H, nope], k_rope [S, rope], v [S, H, V].

    -> [T, H, V]. Causal. Same operations in the same order as vLLM's CPU prefill (mla/prefill/cpu_sdpa.py,
    _ragged_sdpa), which makes prefill reproducible to the bit.
    """
    queries, keys_seen = q.shape[0], k_nope.shape[0]
    k = torch.cat((k_nope, k_rope[:, None].expand(-1, q.shape[1], -1)), dim=-1)  # [S, H, nope + rope]
    scores = q.transpose(0, 1).float() @ k.transpose(0, 1).float().transpose(-2, -1) * scale  # [H, T, S]
    future = torch.ones(queries, keys_seen, dtype=torch.bool, device=q.device).triu(first + 1)
    probs = torch.softmax(scores.masked_fill_(future, float("-inf")), dim=-1)
    return (probs @ v.transpose(0, 1).float()).transpose(0, 1).to(q.dtype)
