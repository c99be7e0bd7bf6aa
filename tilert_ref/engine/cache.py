"""Paged KV cache of one sequence: the compressed latent and the rotary key of every token, in vLLM's row format.

A row is 512 latent values and 64 rotary ones, as in vLLM's MLA cache, so a row that prefill wrote is copied in
unchanged (KV is not recomputed). Blocks are addressed through a block table with vLLM's arithmetic:
slot = block_table[position // block_size] * block_size + position % block_size.

fp8_ds_mla rows (656 bytes) and the indexer's key pages get their own pools beside `rows` when sparse attention comes.
"""

import torch

from tilert_ref.engine.config import ModelConfig


class KVCache:
    """rows: [layers, num_blocks, block_size, kv_lora_rank + rope] in the model's dtype."""

    def __init__(
        self,
        config: ModelConfig,
        num_layers: int,
        max_seq_len: int,
        *,
        block_size: int = 64,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ):
        if max_seq_len < 2:
            raise ValueError(f"max_seq_len = {max_seq_len}, a prompt and one generated token need at least 2")
        blocks = -(-max_seq_len // block_size)
        self.block_size = block_size
        self.rows = torch.zeros(num_layers, blocks, block_size, config.cache_width, dtype=dtype, device=device)
        self.block_table = torch.arange(blocks, device=device)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T] -> rows of the flattened pool [T]."""
        return self.block_table[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Stores latent [T, L] and rope [T, R] of the given positions."""
        self._flat(layer)[self.slots(positions)] = torch.cat((latent, rope), dim=-1)

    def read(self, layer: int, length: int) -> torch.Tensor:
        """Rows of positions 0 .. length-1 in order, [length, L + R]."""
        positions = torch.arange(length, device=self.rows.device)
        return self._flat(layer)[self.slots(positions)]

    def _flat(self, layer: int) -> torch.Tensor:
        return self.rows[layer].view(-1, self.rows.shape[-1])
