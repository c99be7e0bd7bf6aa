"""What the wire would deliver: a sparse engine's cache as the planes of a handoff."""

from collections.abc import Sequence

import torch

from tilert_ref.connector.layout import FP8_DS_MLA, INDEX_PAGE_BYTES, BufferLayout, page_count, plane_views
from tilert_ref.connector.planes import gather_index_pages
from tilert_ref.engine.api import LayerKV, PromptKV
from tilert_ref.engine.ref import RefEngine


def handed_over(engine: RefEngine, prompt: Sequence[int]) -> PromptKV:
    """Rows (bf16 or fp8_ds_mla) and pages of a prompt that `engine` has prefilled, copied out of its cache."""
    layers, cache = [], engine.cache
    for layer in range(len(cache.rows)):
        rows = cache.read_rows(layer, len(prompt))
        split = 512 if cache.scale_rule is None else FP8_DS_MLA.kv_bytes
        pages = torch.zeros(page_count(len(prompt)), INDEX_PAGE_BYTES, dtype=torch.uint8)
        source = engine.model.config.indexer_of(layer)
        gather_index_pages(cache.index_blocks(source), cache.block_table.tolist(), len(prompt), pages)
        rope = rows[:, split:]
        layers.append(LayerKV(rows[:, :split], rope.view(torch.bfloat16) if rows.dtype == torch.uint8 else rope, pages))
    return PromptKV("r", len(prompt), prompt[-1], layers)


def stage(kv: PromptKV, layout: BufferLayout, buffer: torch.Tensor) -> None:
    """Writes a prompt's planes where a handoff of `layout` has them."""
    for index, layer in enumerate(kv.layers):
        planes = (layer.latent, layer.rope, layer.index_pages)
        for view, plane in zip(plane_views(layout, buffer, index, kv.seq_len), planes, strict=True):
            view.copy_(plane.contiguous().view(torch.uint8))
