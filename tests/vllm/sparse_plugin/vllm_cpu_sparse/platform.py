"""vLLM's CPU platform, which also takes sparse models."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

BLOCK_TOKENS = 64  # what the CUDA back ends use (FLASHMLA_SPARSE, DEEPSEEK_V32_INDEXER)


class SparseCpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return "vllm_cpu_sparse.attention.SparseBackend"
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Keeps block size, chunked prefill and prefix caching as they were asked for, if the model is sparse."""
        cache, scheduler, model = vllm_config.cache_config, vllm_config.scheduler_config, vllm_config.model_config
        block = cache.block_size if cache.user_specified_block_size else BLOCK_TOKENS
        asked = cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        if model is not None and hasattr(model.hf_text_config, "index_topk"):
            cache.block_size = block
            cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
