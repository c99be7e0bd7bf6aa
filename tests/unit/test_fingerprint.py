"""The digest that tells one checkpoint from another, and the refusal that follows from it."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilert_ref.connector.fingerprint import checkpoint_fingerprint, known_fingerprint

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
    """So that nodes of different releases agree: a small file is one block."""
    (tmp_path / "config.json").write_text('{"b": [1], "_name_or_path": "here", "a": true}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"\1\2\3\4")
    assert checkpoint_fingerprint(tmp_path) == LITERAL


LITERAL = "v1:c37cfc6dff58936924071b1e4a9efd78abf7dc8c4257bc37fcfd9ed2bf4a6132"


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
        ("config.json", "[]", "config.json is no JSON object"),
        ("config.json", "{", "Expecting"),
        ("model-0.safetensors", "\xff" * 16, "is no safetensors file: its header would end at"),
        ("model-0.safetensors", "", "is no safetensors file: its header would end at 8"),
        ("model.safetensors.index.json", '{"weight_map": 3}', "has no weight_map of file names"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors"),
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
    assert "'zai-org/GLM-5' is no directory" in caplog.text and "because" in caplog.text
    assert known_fingerprint(tmp_path) == checkpoint_fingerprint(tmp_path)
