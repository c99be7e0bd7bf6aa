"""vLLM's caches in the wire's terms, for every shape that vLLM registers, and what is refused."""

import re

import pytest
import torch

from tilert_ref.connector.caches import CacheError, Group, ModelCaches, describe_caches
from tilert_ref.connector.layout import BF16, FP8_DS_MLA, LayoutError, bf16_row


def mla(
    layer: int, shape: tuple[int, ...] = (3, 1, 16, 576), dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.self_attn.attn": torch.zeros(shape, dtype=dtype)}


def indexer(layer: int, width: int = 132) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.self_attn.indexer.k_cache": torch.zeros(3, 64, width, dtype=torch.uint8)}


def joined(*parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def describe(
    *parts: dict[str, torch.Tensor], main: int = 2, dims: tuple[int, int] | None = (512, 64), **options: object
) -> ModelCaches:
    return describe_caches(joined(*parts), {}, main, dims, **options)


def test_dense_bf16_model_on_a_cpu() -> None:
    caches = describe(mla(1), mla(0))
    assert [entry.layer for entry in caches.rows] == [0, 1] and caches.rows[0].cache.shape == (3, 16, 576)
    assert caches.row_format == BF16
    assert (caches.profile.name, caches.profile.num_layers, caches.draft_names) == ("model", 2, frozenset())


def test_views_share_vllms_memory() -> None:
    tensors = mla(0)
    caches = describe(tensors, main=1)
    next(iter(tensors.values())).fill_(1)
    assert (caches.rows[0].cache == 1).all()


def test_sparse_fp8_model_with_mtp() -> None:
    fp8 = [mla(layer, (3, 64, 656), torch.uint8) for layer in range(3)]
    caches = describe(*fp8, indexer(0), indexer(2))
    assert caches.row_format is FP8_DS_MLA and caches.profile.has_mtp and caches.profile.has_index
    assert caches.draft_names == {"model.layers.2.self_attn.attn"}
    assert [caches.index_for(layer).layer for layer in range(3)] == [0, 0, 2]


def test_draft_layer_named_mtp_and_left_out_on_request() -> None:
    draft = {"mtp.attn": torch.zeros(3, 1, 16, 576, dtype=torch.bfloat16)}
    assert describe(mla(0), mla(1), draft).rows[2].name == "mtp.attn"
    caches = describe(mla(0), mla(1), draft, no_mtp=True)
    assert len(caches.rows) == 2 and not caches.profile.has_mtp


def test_other_head_sizes_follow_the_model() -> None:
    caches = describe(mla(0, (3, 1, 16, 320)), main=1, dims=(256, 64))
    assert caches.row_format == bf16_row(256, 64)


@pytest.mark.parametrize("layers,mtp,name", [(79, True, "glm5"), (78, False, "glm5_no_mtp"), (61, False, "dsv32")])
def test_published_profiles_are_recognised(layers: int, mtp: bool, name: str) -> None:
    parts = [part for layer in range(layers) for part in (mla(layer), indexer(layer))]
    assert describe(*parts, main=layers - mtp).profile.name == name
    wanted = "glm5" if name == "glm5_no_mtp" else name
    assert describe(*parts, main=layers - mtp, model=wanted).profile.name == name


def test_profile_that_contradicts_the_model() -> None:
    text = re.escape(
        "tilert_model 'dsv32' has (layers, mtp, indexer) (61, False, True), the model has (2, False, False)"
    )
    with pytest.raises(CacheError, match=text):
        describe(mla(0), mla(1), model="dsv32")
    with pytest.raises(LayoutError, match="unknown profile 'gpt'"):
        describe(mla(0), mla(1), model="gpt")


def test_groups_and_managers_blocks() -> None:
    tensors = joined(mla(0), indexer(0))
    groups = {name: Group(index, block) for index, (name, block) in enumerate(zip(tensors, (48, 64), strict=True))}
    caches = describe_caches(tensors, groups, 1, (512, 64))
    ids = [[4, 1], [9, 8]]
    assert caches.rows[0].blocks(ids) == [12, 13, 14, 3, 4, 5]
    assert caches.index[0].blocks(ids) == [9, 8]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([mla(0)], r"one MLA cache for each of 2 layers, got \['model.layers.0"),
        ([mla(0), mla(2)], "one MLA cache for each of 2 layers"),
        ([mla(0), mla(1, (3, 2, 16, 576))], r"model.layers.1.self_attn.attn: shape \[3, 2, 16, 576\] is no MLA cache"),
        ([mla(0), mla(1, (3, 1, 16, 320))], "differ in dtype or width"),
        (
            [mla(0, dtype=torch.float16), mla(1, dtype=torch.float16)],
            "cache rows of 576 torch.float16; legal: bfloat16",
        ),
        ([mla(0), mla(1), indexer(1)], "layer 0 must have one"),
        ([mla(0), mla(1), indexer(0, 128)], r"an indexer cache is torch.uint8 \[.., .., 132\]"),
        ([mla(0), {"attn": torch.zeros(3, 16, 576, dtype=torch.bfloat16)}], "layer number of cache 'attn'"),
        ([mla(0), {"model.layers.1.mamba": [torch.zeros(1)]}], "model.layers.1.mamba is a list"),
    ],
)
def test_refusals_name_the_cache(parts: list[dict[str, torch.Tensor]], text: str) -> None:
    with pytest.raises(CacheError, match=text):
        describe(*parts)


@pytest.mark.parametrize("width", [576, 700])
def test_unknown_byte_rows(width: int) -> None:
    with pytest.raises(LayoutError, match=f"cache rows of {width} bytes"):
        describe(mla(0, (3, 64, width), torch.uint8), main=1)


def test_bf16_rows_need_the_models_head_sizes() -> None:
    for dims in (None, (512, 32)):
        with pytest.raises(CacheError, match="legal: bfloat16"):
            describe(mla(0), main=1, dims=dims)


def test_manager_blocks_must_be_whole_cache_blocks() -> None:
    tensors = mla(0)
    with pytest.raises(CacheError, match="blocks of 24 tokens are not whole cache blocks of 16"):
        describe_caches(tensors, {name: Group(0, 24) for name in tensors}, 1, (512, 64))
