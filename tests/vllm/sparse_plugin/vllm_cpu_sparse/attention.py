"""The attention back end: paged rows of 576 bf16 values, absorbed attention over the rows that the indexer chose."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

QUERIES = 8  # attended together: 256 rows of each are 5 MB, which stays in the processor's cache


@dataclass(frozen=True)
class Request:
    """One request's share of a batch: its tokens stand at positions first .. length - 1 of its sequence."""

    tokens: slice  # of the batch
    first: int
    length: int
    blocks: torch.Tensor  # int64, those of all positions

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """[num_blocks, block, width] -> [length, width]."""
        return cache[self.blocks].flatten(0, 1)[: self.length]


@dataclass
class SparseMetadata(AttentionMetadata):
    """Every token counts as a decode: MLAAttention.forward_impl then calls forward_mqa with all of them."""

    requests: list[Request]
    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int = field(init=False)
    num_decode_tokens: int = field(init=False)
    num_prefills: int = 0
    prefill: None = None
    decode: None = None

    def __post_init__(self) -> None:
        self.num_decodes, self.num_decode_tokens = self.num_reqs, self.num_actual_tokens


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        batch, block = common_attn_metadata, self.kv_cache_spec.block_size
        starts, requests = batch.query_start_loc_cpu.tolist(), []
        for index, length in enumerate(batch.seq_lens[: batch.num_reqs].tolist()):
            tokens = slice(starts[index], starts[index + 1])
            blocks = batch.block_table_tensor[index, : -(-length // block)].long()
            requests.append(Request(tokens, length - (tokens.stop - tokens.start), length, blocks))
        return SparseMetadata(
            requests=requests,
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
        )


class SparseImpl(MLAAttentionImpl[SparseMetadata], SharedTopkIndicesBuffer):
    is_sparse = True
    supports_dense_mha_prefill = False
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *_: Any,
        kv_lora_rank: int,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        kv_cache_dtype: str = "auto",
        **__: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.kv_lora_rank = num_heads, head_size, scale, kv_lora_rank
        self.kv_cache_dtype = kv_cache_dtype
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Called by MultiHeadLatentAttentionWrapper.forward for layers that share physical indices; none do here."""

    def do_kv_cache_update(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, dtype: str, _: Any
    ) -> None:
        """Latent [T, 512] and rotary key [T, 1, 64] to their slots, as they are; padding has slot -1.

        vLLM: csrc/libtorch_stable/cache_kernels.cu, concat_and_cache_mla_kernel with kv_cache_dtype "auto".
        """
        if cache.numel() == 0:  # vLLM only measures memory
            return
        if dtype not in SparseBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"kv_cache_dtype {dtype!r}, legal: {SparseBackend.supported_kv_cache_dtypes}")
        slots, block = slots.flatten(), cache.shape[1]
        written = (slots >= 0).nonzero()[:, 0]
        rows = torch.cat([kv_c[written], k_pe[written, 0]], dim=-1)
        cache[slots[written] // block, slots[written] % block] = rows

    def forward_mqa(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cache: torch.Tensor, metadata: SparseMetadata, _: Any
    ) -> tuple[torch.Tensor, None]:
        """q [T, H, 576], or its latent and rotary parts -> [T, H, 512]."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        for request in metadata.requests:
            rows = request.gather(cache)
            chosen = self.topk_indices_buffer[request.tokens].long()
            out[request.tokens] = self._attend(query[request.tokens], rows, chosen)
        return out, None

    def _attend(self, query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """query [T, H, 576], rows [S, 576], chosen [T, k] with -1 for none -> [T, H, 512]. fp32, rounded once."""
        dtype, rows, parts = query.dtype, rows.float(), []
        for q, at in zip(query.float().split(QUERIES), chosen.split(QUERIES), strict=True):
            keys = rows.index_select(0, at.clamp_min(0).flatten()).view(*at.shape, -1)  # [t, k, 576]
            scores = q @ keys.transpose(1, 2) * self.scale  # [t, H, k]
            probs = scores.masked_fill_(at[:, None] < 0, float("-inf")).softmax(dim=-1)
            parts.append((probs @ keys[..., : self.kv_lora_rank]).to(dtype))
        return torch.cat(parts)


class SparseBackend(AttentionBackend):
    supported_dtypes = [torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the only free name in AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


register_backend(AttentionBackendEnum.CUSTOM, "vllm_cpu_sparse.attention.SparseBackend")
