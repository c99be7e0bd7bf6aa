"""A checkpoint's digest for hello and announce: do both ends have the same weights, and read them the same way?

Cheap, and the same on every machine with the same files: a node with 700 GB of weights reads 60 MB of them. It is
sha256, "v2:" and 64 hex digits, over

- what config.json says, as canonical JSON, but for what no KV depends on (`what_counts`): it decides how the weights
  are read, and with it the pairing of the indexer's rope;
- per weights file, by name: name, size, header (which tensors, their dtypes and shapes), and SAMPLES blocks of
  SAMPLE_BYTES, at even distances from the first byte after the header to the last of the file. A fine-tune changes all
  tensors or those of one kind in each layer; blocks that hit none of them are the one case that goes unnoticed.

The weights files are those that model.safetensors.index.json names, else every *.safetensors.

Version history: v1, of the first months of 0.1.0, left out `_name_or_path` and `transformers_version` only, so that
another `eos_token_id` or a `dtype` for a `torch_dtype` was another checkpoint. Ends of different versions refuse each
other, as those with different weights do: a digest says nothing about what another rule would have made of the files.
A change of what counts needs a new version here.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, BinaryIO

from tilert_ref.model_files import InputError, read_config, read_weight_map

SAMPLES = 96
SAMPLE_BYTES = 4096
MAX_HEADER = 100_000_000  # as safetensors itself
VERSION = "v2"
NO_KV = (
    "_name_or_path", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    "eos_token_id", "bos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of config.json that change no row of a prompt: names, training, and what ends or pads a text."""

logger = logging.getLogger(__name__)


def checkpoint_fingerprint(directory: str | Path) -> str:
    """Raises OSError or ValueError if the directory has no config.json or no weights that can be read."""
    directory = Path(directory)
    digest = hashlib.sha256()
    counts = what_counts(read_config(directory))
    _add(digest, json.dumps(counts, sort_keys=True, separators=(",", ":")).encode())
    for name in _weights(directory):
        path = directory / name
        _add(digest, name.encode())
        with path.open("rb") as file:
            _add_weights(digest, path, file)
    return f"{VERSION}:{digest.hexdigest()}"


def what_counts(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says that KV may depend on: everything but NO_KV, as it stands there.

    Not what our engine makes of it: vLLM and we may read one file differently, and a digest must not call two files one
    that some reader tells apart. Only spelling is evened out: null is absent, 1.0 is 1, and `torch_dtype` alone is
    `dtype`. So a config.json that another release of transformers has saved may be refused.
    """
    counts = {key: value for key, value in _even(config).items() if key not in NO_KV}
    if "torch_dtype" in counts and "dtype" not in counts:
        counts["dtype"] = counts.pop("torch_dtype")
    return counts


def _even(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _even(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_even(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def known_fingerprint(model: str | Path, reason: str = "") -> str | None:
    """The digest, or None and a line in the log that says why there is none: `reason` if given, else what it met."""
    try:
        if not reason and Path(model).is_dir():
            return checkpoint_fingerprint(model)
        reason = reason or f"{str(model)!r} is no directory"
    except Exception as error:  # mostly no file, no JSON, no weights; and nothing here may end the vLLM that asks
        reason = f"{type(error).__name__}: {error}"
    logger.info("the other end cannot compare checkpoints: %s", reason)
    return None


def _weights(directory: Path) -> list[str]:
    if (files := read_weight_map(directory)) is not None:
        return sorted(set(files.values()))
    if not (names := sorted(path.name for path in directory.glob("*.safetensors"))):
        raise InputError(f"{directory} has no *.safetensors")
    return names


def _add_weights(digest: "hashlib._Hash", path: Path, file: BinaryIO) -> None:
    size = path.stat().st_size
    start = int.from_bytes(file.read(8), "little") + 8
    if not 8 <= start <= min(size, MAX_HEADER):
        raise InputError(f"{path} of {size} bytes is no safetensors file: its header would end at {start}")
    _add(digest, str(size).encode())
    _add(digest, file.read(start - 8))
    last = max(start, size - SAMPLE_BYTES)
    for offset in sorted({start + (last - start) * number // (SAMPLES - 1) for number in range(SAMPLES)}):
        file.seek(offset)
        _add(digest, file.read(SAMPLE_BYTES))


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """With its length, so that nothing moves from one entry to the next unnoticed."""
    digest.update(len(data).to_bytes(8, "little") + data)
