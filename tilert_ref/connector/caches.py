"""What vLLM registers as KV caches, in the wire's terms: which layer each is, its rows, its blocks. Pure torch.

Source: protocol.md 8.5 and 10; vLLM v1/worker/gpu_model_runner.py (register_kv_caches), v1/kv_cache_interface.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilert_ref.connector.layout import (
    Profile,
    RowFormat,
    bf16_row,
    model_profile,
    profile,
    row_format_of_width,
)
from tilert_ref.connector.planes import INDEX_TOKEN_BYTES

_INDEX_NAME = re.compile(r"indexer|index_k", re.IGNORECASE)
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class CacheError(ValueError):
    """vLLM's caches are not those of a model that can be handed off. The text names the layer."""


@dataclass(frozen=True)
class Group:
    """A KV cache group of vLLM: its place in the block id lists, and the tokens that one block id stands for."""

    index: int
    block_tokens: int


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache. cache: [num_blocks, block, width], a view of vLLM's tensor."""

    name: str
    layer: int
    cache: torch.Tensor
    group: Group

    def blocks(self, block_ids: Sequence[Sequence[int]]) -> Sequence[int]:
        """The prompt's blocks in the cache's own count, from the block ids of all groups.

        vLLM's manager may hand out blocks of 128 tokens where the attention kernel wants 64: then id b stands for the
        cache's blocks 2b and 2b + 1 (vLLM v1/worker/block_table.py).
        """
        ids = block_ids[self.group.index]
        ratio = self.group.block_tokens // self.cache.shape[1]
        return ids if ratio == 1 else [block * ratio + part for block in ids for part in range(ratio)]


@dataclass(frozen=True)
class ModelCaches:
    """A model's caches. rows: one per wire layer, ascending. index: the layers that have an indexer, ascending.

    draft_names: MLA layers behind the main model's (MTP).
    """

    rows: tuple[LayerCache, ...]
    index: tuple[LayerCache, ...]
    row_format: RowFormat
    profile: Profile
    draft_names: frozenset[str]

    @property
    def device(self) -> torch.device:
        return self.rows[0].cache.device

    def index_for(self, layer: int) -> LayerCache:
        """The indexer whose pages layer `layer` uses: its own, else the nearest lower one's (protocol.md 8.5)."""
        return max((entry for entry in self.index if entry.layer <= layer), key=lambda entry: entry.layer)


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Mapping[str, Group],
    num_main_layers: int,
    latent_rope: tuple[int, int] | None,
    *,
    model: str | None = None,
    no_mtp: bool = False,
) -> ModelCaches:
    """Sorts vLLM's caches into wire layers. Raises CacheError, or LayoutError for a row width or profile.

    Args:
        kv_caches: what `register_kv_caches` got.
        groups: KV cache group of each cache's layer name; a layer that is missing belongs to group 0.
        num_main_layers: num_hidden_layers of the model; layers from there on are draft layers.
        latent_rope: kv_lora_rank and qk_rope_head_dim, None if the model has none.
        model: profile name; None derives it.
        no_mtp: leave the draft layers out.
    """
    entries = [_entry(name, tensor, groups.get(name), num_main_layers) for name, tensor in kv_caches.items()]
    if no_mtp:
        entries = [entry for entry in entries if entry.layer < num_main_layers]
    index = _sorted(entry for entry in entries if _INDEX_NAME.search(entry.name))
    rows = _sorted(entry for entry in entries if not _INDEX_NAME.search(entry.name))
    if [entry.layer for entry in rows] != list(range(len(rows))) or len(rows) < num_main_layers:
        raise CacheError(f"need one MLA cache for each of {num_main_layers} layers, got {[e.name for e in rows]}")
    _check_index(index)
    derived = model_profile(len(rows), len(rows) > num_main_layers, bool(index))
    return ModelCaches(
        rows=rows,
        index=index,
        row_format=_row_format(rows, latent_rope),
        profile=derived if model is None else _named_profile(model, derived),
        draft_names=frozenset(entry.name for entry in rows if entry.layer >= num_main_layers),
    )


def _entry(name: str, tensor: torch.Tensor, group: Group | None, num_main_layers: int) -> LayerCache:
    if not isinstance(tensor, torch.Tensor):
        raise CacheError(f"the cache of {name} is a {type(tensor).__name__}, a tensor is legal (an MLA model)")
    cache = _three_dimensional(name, tensor)
    block = cache.shape[1]
    group = group or Group(0, block)
    if group.block_tokens % block:
        raise CacheError(f"{name}: blocks of {group.block_tokens} tokens are not whole cache blocks of {block}")
    return LayerCache(name, _layer_number(name, num_main_layers), cache, group)


def _three_dimensional(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block, width] of [num_blocks, 1, block, width] (one latent head) or of itself."""
    if tensor.ndim == 4 and tensor.shape[1] == 1:
        return tensor.squeeze(1)
    if tensor.ndim == 3:
        return tensor
    raise CacheError(f"{name}: shape {list(tensor.shape)} is no MLA cache; legal: [blocks, block, width], one head")


def _layer_number(name: str, num_main_layers: int) -> int:
    if name.startswith("mtp."):
        return num_main_layers
    if (match := _LAYER_NUMBER.search(name)) is None:
        raise CacheError(f"cannot tell the layer number of cache {name!r}")
    return int(match.group(1))


def _sorted(entries: Iterable[LayerCache]) -> tuple[LayerCache, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.layer))


def _check_index(index: Sequence[LayerCache]) -> None:
    if index and index[0].layer != 0:
        raise CacheError(f"the first indexer cache is {index[0].name}; layer 0 must have one")
    for entry in index:
        if entry.cache.dtype != torch.uint8 or entry.cache.shape[2] != INDEX_TOKEN_BYTES:
            got = f"{entry.cache.dtype} {list(entry.cache.shape)}"
            raise CacheError(f"{entry.name}: an indexer cache is torch.uint8 [.., .., {INDEX_TOKEN_BYTES}], got {got}")


def _row_format(rows: Sequence[LayerCache], latent_rope: tuple[int, int] | None) -> RowFormat:
    kinds = {(entry.cache.dtype, entry.cache.shape[2]) for entry in rows}
    if len(kinds) != 1:
        raise CacheError(f"the layers' caches differ in dtype or width: {sorted(map(str, kinds))}")
    ((dtype, width),) = kinds
    if dtype == torch.bfloat16 and latent_rope is not None and sum(latent_rope) == width:
        return bf16_row(*latent_rope)
    if dtype.itemsize == 1:
        return row_format_of_width(width)
    raise CacheError(f"cache rows of {width} {dtype}; legal: bfloat16 [kv_lora_rank + qk_rope_head_dim], or fp8_ds_mla")


def _named_profile(name: str, derived: Profile) -> Profile:
    wanted = profile(name)
    numbers = [(p.num_layers, p.has_mtp, p.has_index) for p in (wanted, derived)]
    if wanted.name == "glm5" and numbers[1] == (78, False, True):
        return derived  # glm5 without its MTP layer
    if numbers[0] != numbers[1]:
        raise CacheError(f"tilert_model {name!r} has (layers, mtp, indexer) {numbers[0]}, the model has {numbers[1]}")
    return wanted
