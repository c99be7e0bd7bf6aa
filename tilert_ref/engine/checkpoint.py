"""Checkpoints as strict mappings, safetensors read lazily: every tensor is taken once or the load fails."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from tilert_ref.model_files import INDEX, CheckpointError, present, read_weight_map

Progress = Callable[[str], None]


class StrictTensors:
    """Named tensors, each of which is taken once or the load fails.

    `take` checks the shape, converts the dtype and marks the tensor as used; `finish` raises on leftovers, because a
    weight that nobody read belongs to a model that this is not. `where` opens every error; `read` returns a tensor by
    name, whatever it comes from: a file, or a test's meta tensors.
    """

    def __init__(self, where: str | Path, names: Iterable[str], read: Callable[[str], torch.Tensor]):
        self.where, self.read = where, read
        self.names = frozenset(names)
        self.left = set(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The named tensor, contiguous in `dtype`. Raises CheckpointError if it is missing or has another shape.

        bf16 becomes fp32 where asked, nothing is rounded; e4m3 is taken by who asks for it, together with a scale.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.where}: weight {name} {list(shape)} is missing")
        tensor = self.read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.where}: weight {name} has shape {list(tensor.shape)}, not {list(shape)}")
        exact = (dtype, torch.bfloat16) if dtype is torch.float32 else (dtype,)
        if tensor.dtype not in exact:
            legal = ", ".join(str(dtype) for dtype in exact)
            needs = f"; fp8 needs a scale {name}_scale_inv and a quantization_config" if tensor.itemsize == 1 else ""
            raise CheckpointError(f"{self.where}: weight {name} is {tensor.dtype}, legal: {legal}{needs}")
        self.left.discard(name)
        return tensor.to(dtype).contiguous()

    def skip(self, names: Iterable[str]) -> None:
        """Declares tensors as known but not wanted (the MTP layer when drafting is off)."""
        self.left.difference_update(names)

    def finish(self) -> None:
        if self.left:
            names = sorted(self.left)
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise CheckpointError(f"{self.where}: {len(names)} weight(s) that this model has no place for: {shown}")


class Checkpoint(StrictTensors):
    """All tensors of DIR/*.safetensors by name, read on demand through mmap."""

    def __init__(self, model_dir: str | Path, progress: Progress = lambda line: None):
        self.directory = Path(model_dir)
        self.progress = progress
        self.weight_map = read_weight_map(self.directory)
        self.files = {path.name: self._open(path) for path in self._paths()}
        self.home = self._locate()
        self.total_bytes = sum((self.directory / file).stat().st_size for file in self.files)
        self.read_bytes, self.reported, self.began = 0, 0, time.perf_counter()
        super().__init__(self.directory, self.home, self._get)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.files.clear()

    def _get(self, name: str) -> torch.Tensor:
        tensor = self.tensor(name)
        self._report(tensor.nbytes)
        return tensor

    def tensor(self, name: str) -> torch.Tensor:
        """As it is in its file, unchecked. Raises CheckpointError if it can't be read."""
        file = self.home[name]
        try:
            return self.files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:  # a dtype that torch has no name for
            raise CheckpointError(f"{self.directory / file}: weight {name} can't be read ({error})") from error

    def _paths(self) -> list[Path]:
        if self.weight_map is not None:
            return [self._indexed(file) for file in sorted(set(self.weight_map.values()))]
        single = self.directory / "model.safetensors"
        if not present(single):
            raise CheckpointError(f"{self.directory}: neither model.safetensors nor {INDEX}")
        return [single]

    def _indexed(self, file: str) -> Path:
        path = self.directory / file
        if not present(path):
            raise CheckpointError(f"{self.directory / INDEX}: weight_map names {file!r}, which is not there")
        return path

    def _locate(self) -> dict[str, str]:
        """Tensor -> file, as found. Raises CheckpointError if a tensor is there twice or not where the index says."""
        found = dict[str, str]()
        for file, handle in self.files.items():
            for name in handle.keys():  # noqa: SIM118
                if name in found:
                    raise CheckpointError(f"{self.directory}: weight {name} is in {found[name]} and in {file}")
                found[name] = file
        for name, file in (self.weight_map or {}).items():
            if found.get(name) != file:
                raise CheckpointError(
                    f"{self.directory}: the index says that {name} is in {file}, found in {found.get(name)}"
                )
        return found

    def _open(self, path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error

    def _report(self, nbytes: int) -> None:
        """One line per tenth of the checkpoint."""
        self.read_bytes += nbytes
        tenth = 10 * self.read_bytes // max(self.total_bytes, 1)
        if tenth > self.reported:
            self.reported = tenth
            seconds = time.perf_counter() - self.began
            size = f"{self.read_bytes / 1e6:,.0f} of {self.total_bytes / 1e6:,.0f} MB"
            self.progress(f"weights: {size}, {seconds:.1f} s, {self.read_bytes / 1e9 / max(seconds, 1e-9):.1f} GB/s")
