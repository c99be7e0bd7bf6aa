"""The lightning indexer: e4m3 keys in vLLM's pages, scores of all tokens before a query, the best index_topk."""

from collections.abc import Iterator

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2

from vllm_cpu_sparse.attention import Request, SparseBackend, SparseMetadata

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
KEY_FLOOR, QUERY_FLOOR = 1e-4, 1e-10
SCALE_BYTES = 4
QUERIES = 16  # scored together: the products of 32 heads with 1,500 tokens are 3 MB


def power_of_two_codes(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> e4m3 codes and fp32 scales [..., 1], scale = 2^ceil(log2(max(amax, floor) / 448)).

    vLLM: csrc/libtorch_stable/cache_kernels.cu, indexer_k_quant_and_cache_kernel, for keys;
    model_executor/layers/quantization/utils/fp8_utils.py, per_token_group_quant_fp8, for queries.
    """
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True).clamp_min(floor)
    scale = torch.exp2(torch.ceil(torch.log2(amax / E4M3_MAX)))
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


class KeyPages:
    """An indexer cache, uint8 [num_blocks, block, 132]: a block has the codes of all its tokens, then all scales.

    vLLM: indexer_k_quant_and_cache_kernel and cp_gather_indexer_k_quant_cache_kernel.
    """

    def __init__(self, cache: torch.Tensor, width: int) -> None:
        blocks, block, _ = cache.shape
        codes, scales = cache.view(blocks, -1).split([block * width, block * SCALE_BYTES], dim=1)
        self.codes, self.scales = codes.unflatten(1, (block, width)), scales.unflatten(1, (block, SCALE_BYTES))
        self.block = block

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """keys [T, 128] to slots [T]; padding has slot -1."""
        codes, scales = power_of_two_codes(keys[slots >= 0], KEY_FLOOR)
        slots = slots[slots >= 0]
        at = slots // self.block, slots % self.block
        self.codes[at], self.scales[at] = codes.view(torch.uint8), scales.view(torch.uint8)

    def read(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes as fp32 [S, 128] and scales [S] of a whole sequence."""
        codes = request.gather(self.codes).view(torch.float8_e4m3fn)
        return codes.float(), request.gather(self.scales).contiguous().view(torch.float32)[:, 0]


@SparseAttnIndexer.register_oot
class TorchSparseIndexer(SparseAttnIndexer):
    """Writes the keys of all tokens, then the chosen positions of each into the buffer that all layers share."""

    def forward_cpu(
        self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """q e4m3 [T, Hi, 128]; k [T, 128]; weights fp32 [T, Hi] with q's scale and both 1/sqrt factors in them."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):  # else vLLM only measures memory
            self._run(metadata[self.k_cache.prefix], q, k, weights)
        return self.topk_indices_buffer

    def _run(self, batch: SparseMetadata, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        pages = KeyPages(self.k_cache.kv_cache, self.head_dim)
        tokens = batch.num_actual_tokens
        pages.write(batch.slot_mapping[:tokens], k[:tokens])
        self.topk_indices_buffer[:tokens] = -1
        for request in batch.requests:
            codes, scales = pages.read(request)
            chosen = self.choose(request, q[request.tokens], weights[request.tokens], codes, scales)
            self.topk_indices_buffer[request.tokens, : chosen.shape[1]] = chosen

    def choose(
        self, request: Request, q: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """-> int32 [T, min(index_topk, S)]: ascending positions, then -1. Of equal scores torch.topk takes whichever.

        vLLM: sparse_attn_indexer.py, sparse_attn_indexer. Its kernels leave the order open too.
        """
        best = [s.topk(min(self.topk_tokens, len(codes))).indices for s in scores(request, q, weights, codes, scales)]
        best = torch.cat(best)
        position = torch.arange(request.first, request.length)[:, None]
        beyond = len(codes)
        ordered = best.masked_fill(best > position, beyond).sort(dim=-1).values
        return ordered.masked_fill(ordered == beyond, -1).int()


def scores(
    request: Request, q: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> Iterator[torch.Tensor]:
    """[t, S] fp32 for some queries at a time: sum over heads of weight * ReLU(q . k), times k's scale; the future -inf.

    vLLM: utils/deep_gemm.py, fp8_fp4_mqa_logits and fp8_fp4_paged_mqa_logits. DeepGEMM multiplies by k's scale last.
    """
    position = torch.arange(request.first, request.length)[:, None]
    for queries, heads, at in zip(q.split(QUERIES), weights.split(QUERIES), position.split(QUERIES), strict=True):
        products = (queries.float() @ codes.T).relu_()  # [t, Hi, S]
        logits = (heads[:, None] @ products)[:, 0] * scales
        yield logits.masked_fill_(torch.arange(len(codes)) > at, float("-inf"))


def per_token_group_quant_fp8(
    x: torch.Tensor, group_size: int, *, column_major_scales: bool, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries: the one call in deepseek_v2.py (Indexer.forward), [N, 128] in groups of 128."""
    if (x.shape[-1], column_major_scales, use_ue8m0) != (group_size, False, True):
        raise NotImplementedError(
            f"groups of {group_size} in {list(x.shape)}; legal: one group a row, power-of-two scales"
        )
    return power_of_two_codes(x, QUERY_FLOOR)


deepseek_v2.per_token_group_quant_fp8 = per_token_group_quant_fp8
deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda self: SparseBackend
