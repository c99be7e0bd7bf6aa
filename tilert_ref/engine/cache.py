"""Paged KV cache of one sequence: the compressed latent and the rotary key of every token, in vLLM's row format.

A row is 512 latent values and 64 rotary ones, as in vLLM's MLA cache, so a row that prefill wrote is copied in
unchanged (KV is not recomputed). A sparse model may keep rows as the 656 bytes of fp8_ds_mla instead: codes, scales and
rotary values. Bytes that came over the wire stay as they are; rows that the engine writes are quantised by vLLM's rule.
Blocks are addressed through a block table with vLLM's arithmetic:
slot = block_table[position // block_size] * block_size + position % block_size.

A sparse model has a second pool beside the rows: the indexer's keys, in vLLM's bytes. A block holds the codes of all
its tokens, then their scales: with 64 tokens 8,192 + 256 bytes, which is a page of the wire (case K2). Layers that
share a lower layer's indexer have no keys, as in vLLM; the wire carries copies of that layer's pages for them.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from tilert_ref.connector.layout import FP8_DS_MLA, INDEX_HEAD_DIM, PAGE_TOKENS
from tilert_ref.connector.planes import scatter_index_pages
from tilert_ref.connector.rounding import (
    INDEX_KEY_FLOOR,
    SMALLEST_POWER_OF_TWO_RATIO,
    ScaleRead,
    ScaleRule,
    dequantize_fp8_ds_mla,
    quantize_fp8_ds_mla,
    quantize_index,
)
from tilert_ref.engine import tensor_cores
from tilert_ref.engine.batch import Selected
from tilert_ref.engine.config import ModelConfig
from tilert_ref.model_files import InputError

SCALE_BYTES = 4
SCALE_READ = ScaleRead.BF16
"""fp8_ds_mla rows are read as the peer's decode kernel on Hopper reads them."""


class KVCache:
    """rows: [layers, num_blocks, block_size, kv_lora_rank + rope] in the model's dtype, or uint8 [..., 656].

    scale_rule: rows are fp8_ds_mla, and this rule quantises those that the engine writes; None for rows in `dtype`.

    index: uint8 [layers that have an indexer, num_blocks, block_size * 132]; None for a dense model. index_dtype says
    what a code is: e4m3, vLLM's, or float32, which leaves index keys and queries unrounded (512 + 4 bytes a token, all
    scales 1) for comparison with implementations that have no fp8 in the indexer.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_layers: int,
        max_seq_len: int,
        *,
        block_size: int = 64,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        index_dtype: torch.dtype = torch.float8_e4m3fn,
        scale_rule: ScaleRule | None = None,
    ):
        if max_seq_len < 2:
            raise ValueError(f"max_seq_len = {max_seq_len}, a prompt and one generated token need at least 2")
        if index_dtype not in (torch.float8_e4m3fn, torch.float32):
            raise ValueError(f"index_dtype = {index_dtype}, legal: torch.float8_e4m3fn, torch.float32")
        width = config.cache_width
        if scale_rule is not None:
            check_fp8_rows(config)
            width, dtype = FP8_DS_MLA.nbytes, torch.uint8
        blocks = -(-max_seq_len // block_size)
        self.block_size, self.index_dtype, self.scale_rule = block_size, index_dtype, scale_rule
        self.rows = torch.zeros(num_layers, blocks, block_size, width, dtype=dtype, device=device)
        self.block_table = torch.arange(blocks, device=device)
        self.index, self.index_layers = None, [layer for layer in range(num_layers) if config.has_indexer(layer)]
        if self.index_layers:
            block_bytes = block_size * (self._code_bytes + SCALE_BYTES)
            shape = len(self.index_layers), blocks, block_bytes
            self.index = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.index is None else self.index.nbytes)

    @property
    def facts(self) -> dict[str, str]:
        """What a record of this cache's bytes has to say about them."""
        if self.scale_rule is None:
            return {"kv_cache_dtype": str(self.rows.dtype).removeprefix("torch.")}
        return {
            "kv_cache_dtype": FP8_DS_MLA.name,
            "kv_scale_rule": self.scale_rule.value,
            "kv_scale_read": SCALE_READ.value,
        }

    @property
    def block_table(self) -> torch.Tensor:
        """The block of every 64 positions (block_size), int64 [blocks]."""
        return self._block_table

    @block_table.setter
    def block_table(self, table: torch.Tensor) -> None:
        within = torch.arange(self.block_size, device=table.device)
        self._block_table, self._slots = table, (table[:, None] * self.block_size + within).flatten()
        self._slots_for_kernels = self._slots.int()

    @property
    def all_slots(self) -> torch.Tensor:
        """The row of every position in the flattened pool, int64."""
        return self._slots

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions p [T] -> rows of the flattened pool: block_table[p // block_size] * block_size + p % block_size."""
        return self._slots.index_select(0, positions)

    def everything(self, positions: torch.Tensor, most: int | None) -> Selected:
        """For a captured step whose queries choose nothing: the slots in order, of which query t sees positions[t] + 1,
        which are never more than `most` (None: all slots)."""
        counts = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
        slots = self._slots_for_kernels[:most].expand(len(positions), -1).contiguous()
        return Selected(slots, torch.add(positions, 1, out=counts))

    def write(self, layer: int, positions: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Stores latent [T, L] and rope [T, R] of the given positions, quantised if the rows are fp8_ds_mla."""
        if tensor_cores.there(latent) and latent.dtype == torch.bfloat16:
            rule = self.scale_rule is ScaleRule.PLAIN, SMALLEST_POWER_OF_TWO_RATIO
            at = self.layer_rows(layer), self.block_table, self.block_size, positions
            return tensor_cores.pointwise().write_rows(*at, latent, rope, *rule)
        if self.scale_rule is None:
            rows = torch.cat((latent, rope), dim=-1)
        else:
            rows = quantize_fp8_ds_mla(latent, rope, self.scale_rule)
        self.layer_rows(layer).index_copy_(0, self.slots(positions), rows)

    def read(self, layer: int, length: int) -> torch.Tensor:
        """Values of positions 0 .. length-1 in order, [length, L + R]: what attention sees, this step's tokens too."""
        rows = self.read_rows(layer, length)
        return rows if self.scale_rule is None else torch.cat(dequantize_fp8_ds_mla(rows, SCALE_READ), dim=-1)

    def read_slots(self, layer: int) -> torch.Tensor:
        """Values of all slots, [slots, L + R]."""
        rows = self.layer_rows(layer)
        return rows if self.scale_rule is None else torch.cat(dequantize_fp8_ds_mla(rows, SCALE_READ), dim=-1)

    def read_rows(self, layer: int, end: int, first: int = 0) -> torch.Tensor:
        """Rows of positions first .. end-1 as they are stored, [n, L + R] or uint8 [n, 656]."""
        return self.layer_rows(layer).index_select(0, self._slots[first:end])

    def inject(self, first: int, latents: Sequence[torch.Tensor], ropes: Sequence[torch.Tensor], tokens: int) -> None:
        """Stores both planes (the two forms of api.LayerKV) of layers first, first + 1, ... at positions 0 .. tokens-1,
        as they came.

        Words of 8 bytes, all layers at once: a kernel a layer costs a GPU more time than the bytes, bytes one by one
        cost a CPU ten times as much. On a GPU nothing waits for the copies: planes in pinned memory must stay as they
        are until the stream is through.
        """
        device = self.rows.device
        slots = self.slots(torch.arange(tokens, device=device))
        planes = [_together(planes, device) for planes in (latents, ropes)]
        rows, latent, rope = _words(self.rows.flatten(1, 2)[first : first + len(latents)], *planes)
        for part, plane in zip(rows.split([latent.shape[2], rope.shape[2]], dim=2), (latent, rope), strict=True):
            part.index_copy_(1, slots, plane)

    def overwrite(self, layer: int, position: int, row: torch.Tensor, index_key: torch.Tensor | None) -> None:
        """Puts stored bytes, uint8 [row bytes] and [132], in the place of what the engine wrote at a position."""
        at = torch.tensor([position], device=self.rows.device)
        self.layer_rows(layer)[self.slots(at)] = row.to(self.rows.device).view(self.rows.dtype)
        if index_key is not None:
            for part, values in zip(
                self._index_parts(layer), index_key.split([self._code_bytes, SCALE_BYTES]), strict=True
            ):
                part[self._blocks(at)] = values.to(self.rows.device)

    def write_index(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Rounds and stores index keys [T, 128] of the given positions."""
        if tensor_cores.there(keys) and self.index_dtype is torch.float8_e4m3fn:
            at = self.index_pool(layer), self.block_table, self.block_size, positions
            return tensor_cores.pointwise().write_index(*at, keys, INDEX_KEY_FLOOR)
        self.put_index(layer, positions, *round_index(keys, self.index_dtype, INDEX_KEY_FLOOR))

    def put_index(self, layer: int, positions: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Stores rounded index keys: codes [T, 128] and scales [T]."""
        at = self._blocks(positions)
        for part, values in zip(self._index_parts(layer), (codes, scales[:, None]), strict=True):
            part[at] = values.contiguous().view(torch.uint8)

    def read_index(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [length, 128] as fp32 and scales [length] of positions 0 .. length-1; a key is code * scale."""
        at = self._blocks(torch.arange(length, device=self.rows.device))
        codes, scales = (part[at] for part in self._index_parts(layer))
        return codes.view(self.index_dtype).float(), scales.view(torch.float32)[:, 0]

    def index_bytes(self, layer: int, end: int, first: int = 0) -> torch.Tensor:
        """Index keys of positions first .. end-1 as they are stored, uint8 [n, code + scale bytes]."""
        at = self._blocks(torch.arange(first, end, device=self.rows.device))
        return torch.cat([part[at] for part in self._index_parts(layer)], dim=1)

    def inject_index(self, layers: Sequence[int], pages: Sequence[torch.Tensor], length: int) -> None:
        """Stores the first `length` tokens of each layer's wire pages, uint8 [ceil(length / 64), 8448], as they came.

        layers: some that have index keys, no such layer between them left out. With blocks of 64 tokens a page is a
        block and is copied whole; what stands behind `length` in the last one is written before anything reads it.
        """
        blocks = self.block_table[: -(-length // self.block_size)]
        if self.block_size == PAGE_TOKENS:
            first = self.index_layers.index(layers[0])
            pools, came = _words(self.index[first : first + len(layers)], _together(pages, self.rows.device))
            pools.index_copy_(1, blocks, came)
            return
        for layer, each in zip(layers, pages, strict=True):
            scatter_index_pages(each.to(self.rows.device), self.index_blocks(layer), blocks, length)

    def index_blocks(self, layer: int) -> torch.Tensor:
        """The layer's pool in the shape of vLLM's indexer cache, uint8 [num_blocks, block_size, 132]: a view.

        As in vLLM the last two dimensions are one run of bytes, not tokens: codes first, then scales.
        """
        return self.index_pool(layer).unflatten(1, (self.block_size, -1))

    def index_pool(self, layer: int) -> torch.Tensor:
        """Index keys of a layer, uint8 [num_blocks, block_size * 132]."""
        if layer not in self.index_layers:
            raise ValueError(f"layer {layer} has no index keys, legal: layers with an indexer, {self.index_layers}")
        return self.index[self.index_layers.index(layer)]

    def layer_rows(self, layer: int) -> torch.Tensor:
        """All rows of a layer by slot, [slots, row]: a view."""
        return self.rows[layer].view(-1, self.rows.shape[-1])

    @property
    def _code_bytes(self) -> int:
        return INDEX_HEAD_DIM * self.index_dtype.itemsize

    def _blocks(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [T] -> (block, token within it), each [T]."""
        return self.block_table[positions // self.block_size], positions % self.block_size

    def _index_parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: code bytes [num_blocks, block_size, 128 * itemsize] and scale bytes [num_blocks, block_size, 4]."""
        split = self.block_size * self._code_bytes
        codes, scales = self.index_pool(layer).tensor_split([split], dim=1)
        return codes.unflatten(1, (self.block_size, -1)), scales.unflatten(1, (self.block_size, -1))


def _together(planes: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Planes of one shape as one tensor on `device`: a view where they lie there at equal distances, as in a receive
    buffer, else a copy."""
    planes = [plane.to(device, non_blocking=True) for plane in planes]
    one = planes[0]
    starts = [plane.data_ptr() for plane in planes]
    gaps = {after - before for before, after in pairwise(starts)} or {0}
    home = one.untyped_storage().data_ptr()
    alike = all(p.untyped_storage().data_ptr() == home and p.stride() == one.stride() for p in planes)
    if alike and len(gaps) == 1 and min(gaps) >= 0:
        return one.as_strided((len(planes), *one.shape), (min(gaps) // one.itemsize, *one.stride()))
    return torch.stack(planes)


def _words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same bytes as words of 8, if every row of every one is made of such and begins at one."""

    def fits(x: torch.Tensor) -> bool:
        steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
        return x.stride(-1) == 1 and all(step * x.itemsize % 8 == 0 for step in steps)

    return [x.view(torch.int64) for x in tensors] if all(map(fits, tensors)) else tensors


def check_fp8_rows(config: ModelConfig) -> None:
    """Raises ValueError if vLLM has no fp8_ds_mla cache for such a model."""
    if config.index_topk is None:
        raise InputError("kv cache dtype fp8_ds_mla is for sparse models; this one has no index_topk, legal: bf16")
    widths, legal = (
        (config.kv_lora_rank, config.qk_rope_head_dim),
        (FP8_DS_MLA["latent"].count, FP8_DS_MLA["rope"].count),
    )
    if widths != legal:
        raise InputError(
            f"kv_lora_rank and qk_rope_head_dim {widths}: fp8_ds_mla rows are for {legal}, legal here: bf16"
        )


def round_index(x: torch.Tensor, dtype: torch.dtype, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> codes in `dtype` and fp32 scales [...]: vLLM's rounding for e4m3, none for float32."""
    if dtype is torch.float32:
        return x.float(), torch.ones(x.shape[:-1], device=x.device)
    if tensor_cores.there(x) and x.dtype == torch.bfloat16:
        codes, scales = tensor_cores.pointwise().quantize(x.view(len(x), -1), floor, True, False)
        return codes.view(x.shape), scales.view(x.shape[:-1])
    return quantize_index(x, floor)
