"""The digest that tells one checkpoint from another, and the refusal that follows from it."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilert_ref.connector.fingerprint import checkpoint_fingerprint, known_fingerprint, what_counts
from tilert_ref.engine import config
from tilert_ref.engine.make_tiny import tiny_config

CONFIG = {"architectures": ["X"], "indexer_rope_interleave": True, "transformers_version": "5.1.0"}


def save(directory: Path, seed: int = 0, rows: int = 3000, **config: object) -> Path:
    """A checkpoint of two files of 0.7 MB, which blocks of 4 kB sample with gaps."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    generator = torch.Generator().manual_seed(seed)
    weights = {f"model.layers.{n}.w": torch.randn(rows, 64, generator=generator) for n in range(2)}
    for number, (name, weight) in enumerate(weights.items()):
        save_file({name: weight}, directory / f"model-{number}.safetensors")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(weights)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


def test_same_files_have_the_same_digest_wherever_they_are(tmp_path: Path) -> None:
    here = save(tmp_path / "here")
    there = Path(shutil.copytree(here, tmp_path / "there"))
    (there / "consolidated.safetensors").write_bytes(b"the index does not name it")
    (there / "config.json").write_text(
        json.dumps(CONFIG | {"transformers_version": "4", "_name_or_path": "y"}, indent=2)
    )
    assert checkpoint_fingerprint(here) == checkpoint_fingerprint(there)


def test_the_digest_is_what_the_docstring_says(tmp_path: Path) -> None:
    """So that nodes of different releases agree: a small file is one block. Another digest needs another VERSION."""
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"\1\2\3\4")
    for text, digest in ((PUBLISHED.read_text(), LITERAL), ('{"b": [1], "_name_or_path": "x", "a": true}', UNKNOWN)):
        (tmp_path / "config.json").write_text(text)
        assert checkpoint_fingerprint(tmp_path) == digest


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
PUBLISHED = Path(config.__file__).parent / "published" / "glm-5-fp8.json"
LITERAL = "v2:99c328797db22fb327ce30b56b9f48134f2f28b6ab62bbdb3f11ab5b6050782e"
UNKNOWN = "v2:c37cfc6dff58936924071b1e4a9efd78abf7dc8c4257bc37fcfd9ed2bf4a6132"


def spelled(**changes: object) -> dict[str, object]:
    """config.json of a model that our engine knows, in transformers 4's spelling. ...: without that key."""
    return {key: value for key, value in (tiny_config("glm5") | changes).items() if value is not ...}


FLAT = spelled(rope_parameters=..., rope_theta=10000, rope_scaling=None, dtype=..., torch_dtype="bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": ..., "dtype": "bfloat16"},
        {"transformers_version": "9", "_name_or_path": "elsewhere"},
        {"use_cache": False, "initializer_range": 0.01},
        {"eos_token_id": [1, 2, 3], "pad_token_id": 4, "bos_token_id": None},
        {"rope_theta": 10000.0},
        {"rope_scaling": ..., "quantization_config": None},
    ],
    ids=["dtype", "names", "training", "stop ids", "numbers", "nulls"],
)
def test_another_spelling_of_the_same_model_counts_for_nothing(change: dict[str, object]) -> None:
    other = {key: value for key, value in (FLAT | change).items() if value is not ...}
    assert json.dumps(other) != json.dumps(FLAT)
    assert json.dumps(what_counts(other), sort_keys=True) == json.dumps(what_counts(FLAT), sort_keys=True)


@pytest.mark.parametrize(
    "change",
    [
        {"indexer_rope_interleave": not FLAT["indexer_rope_interleave"]},
        {"rope_theta": 10001},
        {"rms_norm_eps": 1e-4},
        {"index_topk": 7},
        {"routed_scaling_factor": 2.25},
        {"architectures": ["DeepseekV32ForCausalLM"]},
        {"quantization_config": FP8},
        {"rope_interleave": False},
        {"a_key_of_next_year": 1},
        {"torch_dtype": "float16"},
        {"model_type": "deepseek_v32"},
        {"rope_scaling": {"rope_theta": 1e6}},
        {"indexer_types": ["full"]},
        {"scoring_func": ...},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_what_changes_kv_counts(change: dict[str, object]) -> None:
    """Some our engine refuses or reads otherwise than vLLM: they are no silent match."""
    other = {key: value for key, value in (FLAT | change).items() if value is not ...}
    assert what_counts(other) != what_counts(FLAT)


def test_of_a_quantised_model_vllms_keys_count_too() -> None:
    ue8m0 = FLAT | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}
    assert what_counts(FLAT | {"quantization_config": FP8}) != what_counts(ue8m0)
    nulled = FLAT | {"quantization_config": FP8 | {"modules_to_not_convert": None}}
    assert what_counts(FLAT | {"quantization_config": FP8}) == what_counts(nulled)


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: save(directory, indexer_rope_interleave=False),
        lambda directory: save(directory, seed=1),
        lambda directory: save(directory, rows=3001),
        lambda directory: tune(directory / "model-1.safetensors"),
    ],
    ids=["rope pairing", "other weights", "other shape", "one file tuned"],
)
def test_other_checkpoints_have_other_digests(change: Callable[[Path], object], tmp_path: Path) -> None:
    before = checkpoint_fingerprint(save(tmp_path))
    change(tmp_path)
    assert checkpoint_fingerprint(tmp_path) != before


def tune(path: Path) -> None:
    save_file({name: weight + 1e-3 for name, weight in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", "[]", "config.json: holds a JSON list, legal: a JSON object"),
        ("config.json", "{", "Expecting"),
        ("model-0.safetensors", "\xff" * 16, "is no safetensors file: its header would end at"),
        ("model-0.safetensors", "", "is no safetensors file: its header would end at 8"),
        (
            "model.safetensors.index.json",
            '{"weight_map": 3}',
            "weight_map = 3, legal: an object of tensor and",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"w": "../a"}}',
            "'../a', legal: the name of a file",
        ),
    ],
)
def test_what_is_no_checkpoint_has_no_digest_and_the_log_says_why(
    file: str, content: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (save(tmp_path) / file).write_text(content, encoding="latin-1")
    with caplog.at_level(logging.INFO):
        assert known_fingerprint(tmp_path) is None
    assert text in caplog.text


def test_names_and_reasons_give_no_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert known_fingerprint("zai-org/GLM-5") is None
        assert known_fingerprint(save(tmp_path), "because") is None
        assert known_fingerprint("x" * 300) is None  # no name that a file can have
    assert "'zai-org/GLM-5' is no directory" in caplog.text and "because" in caplog.text
    assert known_fingerprint(tmp_path) == checkpoint_fingerprint(tmp_path)
