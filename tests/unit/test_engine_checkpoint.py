"""Strict loading: a missing, leftover or misshapen weight is an error that names it."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.checkpoint import CheckpointError
from tilert_ref.engine.config import load_config
from tilert_ref.engine.make_tiny import make_tiny
from tilert_ref.engine.weights import MoeWeights, load_weights


@pytest.fixture
def edited(tmp_path: Path):
    """A checkpoint with its tensors passed through `edit`, in one unindexed file."""

    def build(edit, arch: str = "dsv3") -> Path:
        make_tiny(tmp_path, arch)
        tensors = load_file(tmp_path / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors.index.json").unlink()
        return tmp_path

    return build


def load(model_dir: Path, with_mtp: bool = True):
    return load_weights(load_config(model_dir), model_dir, with_mtp=with_mtp)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.experts.7.up_proj.weight", "lm_head.weight"])
def test_missing_weight_is_named(edited, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        load(edited(lambda tensors: tensors.pop(name)))


def test_leftover_weight_is_named(edited) -> None:
    with pytest.raises(CheckpointError, match="model.layers.1.self_attn.indexer.wk.weight"):
        load(edited(lambda tensors: tensors.update({"model.layers.1.self_attn.indexer.wk.weight": torch.ones(1)})))


def test_misshapen_weight_is_named_with_both_shapes(edited) -> None:
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[3\], not \[256\]"):
        load(edited(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})))


def test_quantised_weight_is_refused(edited) -> None:
    fp8 = torch.ones(256).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        load(edited(lambda tensors: tensors.update({"model.norm.weight": fp8})))


def test_truncated_file_is_a_clean_error(tiny, tmp_path: Path) -> None:
    make_tiny(tmp_path, "dsv3")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_weight_that_would_be_rounded_is_refused(edited, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"lm_head.weight is {dtype}"):
        load(edited(lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(dtype)})))


def sharded(model_dir: Path, second: dict[str, torch.Tensor], index: dict[str, str]) -> Path:
    """A second shard beside the first, and an index that says what the test wants."""
    make_tiny(model_dir, "dsv3")
    save_file(second, model_dir / "second.safetensors")
    path = model_dir / "model.safetensors.index.json"
    table = json.loads(path.read_text())["weight_map"] | index
    path.write_text(json.dumps({"weight_map": table}))
    return model_dir


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    twice = {"lm_head.weight": torch.zeros(512, 256, dtype=torch.bfloat16), "x": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"lm_head.weight is in model.safetensors and in second.safetensors"):
        load(sharded(tmp_path, twice, {"x": "second.safetensors"}))


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says that lm_head.weight is in second.safetensors, found in model"):
        load(sharded(tmp_path, {"x": torch.zeros(1)}, {"lm_head.weight": "second.safetensors"}))


@pytest.mark.parametrize("text", ['{"x": 1}', '{"weight_map": null}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_a_clean_error(tmp_path: Path, text: str) -> None:
    make_tiny(tmp_path, "dsv3")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


def test_mtp_copies_may_be_absent_and_then_are_shared(edited) -> None:
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    weights = load(edited(lambda tensors: [tensors.pop(name) for name in copies]))
    assert weights.mtp.embed is weights.embed
    assert weights.mtp.head is weights.head


def test_without_mtp_its_tensors_are_neither_loaded_nor_leftovers(tiny) -> None:
    assert load(tiny("dsv3"), with_mtp=False).mtp is None


def test_correction_bias_stays_fp32(tiny) -> None:
    """Case K4 (a): four biases that bf16 would merge into two."""
    moe = load(tiny("dsv3")).layers[1].mlp
    assert isinstance(moe, MoeWeights)
    assert moe.bias.dtype is torch.float32
    assert len(torch.tensor([6.96, 6.97, 6.98, 6.99]).unique()) == 4
    assert len(torch.tensor([6.96, 6.97, 6.98, 6.99]).bfloat16().unique()) < 4


INDEXERS = [f"model.layers.{layer}.self_attn.indexer." for layer in range(4)]  # the last one is the MTP layer's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_key_norm_may_be_fp32_or_bf16_and_is_fp32_here(edited, dtype: torch.dtype) -> None:
    names = [f"{p}k_norm.{part}" for p in INDEXERS for part in ("weight", "bias")]
    model_dir = edited(lambda tensors: tensors.update({n: tensors[n].to(dtype) for n in names}), "glm5")
    tensors, weights = load_file(model_dir / "model.safetensors"), load(model_dir)
    for p, layer in zip(INDEXERS, [*weights.layers, weights.mtp.layer], strict=True):
        indexer = layer.attention.indexer
        assert indexer.k_norm.dtype is indexer.k_norm_bias.dtype is torch.float32
        assert torch.equal(indexer.k_norm, tensors[f"{p}k_norm.weight"].float())
        assert torch.equal(indexer.k_norm_bias, tensors[f"{p}k_norm.bias"].float())


@pytest.mark.parametrize("name", [f"{INDEXERS[1]}wq_b.weight", f"{INDEXERS[3]}k_norm.bias"])
def test_missing_indexer_weight_is_named(edited, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        load(edited(lambda tensors: tensors.pop(name), "dsv32"))


def test_unknown_indexer_weight_is_named(edited) -> None:
    with pytest.raises(CheckpointError, match=f"{INDEXERS[0]}wk.weight_scale_inv"):
        load(edited(lambda tensors: tensors.update({f"{INDEXERS[0]}wk.weight_scale_inv": torch.ones(1)}), "dsv32"))


def test_progress_is_reported(tiny) -> None:
    lines = list[str]()
    load_weights(load_config(tiny("dsv3")), tiny("dsv3"), with_mtp=True, progress=lines.append)
    assert len(lines) >= 5
    assert re.fullmatch(r"weights: [\d,.]+ of [\d,.]+ MB, [\d.]+ s, [\d.]+ GB/s", lines[-1])


def test_kept_kernels_are_counted_where_triton_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert tensor_cores.kernel_cache() == tmp_path / ".triton" / "cache" and tensor_cores.kept_kernels() == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "a kernel").mkdir()
    assert tensor_cores.kept_kernels() == 1
