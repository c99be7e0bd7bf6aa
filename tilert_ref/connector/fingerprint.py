"""A checkpoint's digest for hello and announce: do both ends have the same weights, and read them the same way?

Cheap, and the same on every machine with the same files: a node with 700 GB of weights reads 60 MB of them. It is
sha256, "v1:" and 64 hex digits, over

- config.json as canonical JSON without `_name_or_path` and `transformers_version`: what decides how the weights are
  read, and with it the pairing of the indexer's rope;
- per weights file, by name: name, size, header (which tensors, their dtypes and shapes), and SAMPLES blocks of
  SAMPLE_BYTES, at even distances from the first byte after the header to the last of the file. A fine-tune changes all
  tensors or those of one kind in each layer; blocks that hit none of them are the one case that goes unnoticed.

The weights files are those that model.safetensors.index.json names, else every *.safetensors.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import BinaryIO

SAMPLES = 96
SAMPLE_BYTES = 4096
MAX_HEADER = 100_000_000  # as safetensors itself
VOLATILE = ("_name_or_path", "transformers_version")

logger = logging.getLogger(__name__)


def checkpoint_fingerprint(directory: str | Path) -> str:
    """Raises OSError or ValueError if the directory has no config.json or no weights that can be read."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{directory / 'config.json'} is no JSON object")
    digest = hashlib.sha256()
    for name in VOLATILE:
        config.pop(name, None)
    _add(digest, json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for name in _weights(directory):
        path = directory / name
        _add(digest, name.encode())
        with path.open("rb") as file:
            _add_weights(digest, path, file)
    return f"v1:{digest.hexdigest()}"


def known_fingerprint(model: str | Path, reason: str = "") -> str | None:
    """The digest, or None and a line in the log that says why there is none: `reason` if given, else what it met."""
    if not reason and not Path(model).is_dir():
        reason = f"{str(model)!r} is no directory"
    if not reason:
        try:
            return checkpoint_fingerprint(model)
        except (OSError, ValueError, RecursionError) as error:  # no file, no JSON, JSON without end
            reason = str(error)
    logger.info("the other end cannot compare checkpoints: %s", reason)
    return None


def _weights(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        table = json.loads(index.read_text())
        names = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{index} has no weight_map of file names")
        return sorted(set(names.values()))
    if not (names := sorted(path.name for path in directory.glob("*.safetensors"))):
        raise ValueError(f"{directory} has no *.safetensors")
    return names


def _add_weights(digest: "hashlib._Hash", path: Path, file: BinaryIO) -> None:
    size = path.stat().st_size
    start = int.from_bytes(file.read(8), "little") + 8
    if not 8 <= start <= min(size, MAX_HEADER):
        raise ValueError(f"{path} of {size} bytes is no safetensors file: its header would end at {start}")
    _add(digest, str(size).encode())
    _add(digest, file.read(start - 8))
    last = max(start, size - SAMPLE_BYTES)
    for offset in sorted({start + (last - start) * number // (SAMPLES - 1) for number in range(SAMPLES)}):
        file.seek(offset)
        _add(digest, file.read(SAMPLE_BYTES))


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """With its length, so that nothing moves from one entry to the next unnoticed."""
    digest.update(len(data).to_bytes(8, "little") + data)
