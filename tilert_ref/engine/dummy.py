"""Random weights in place of a checkpoint, made on the device: to measure the speed of a model that fits no disk.

vLLM has the same as --load-format dummy. Which tensors are block fp8 follows from the config alone, as in the published
checkpoints.
"""

import fnmatch
import re
from collections.abc import Sequence

import torch

from tilert_ref.engine.checkpoint import CheckpointError
from tilert_ref.engine.config import ModelConfig

BF16_MATRICES = (
    "model.embed_tokens.*",
    "lm_head.*",
    "*.eh_proj.*",
    "*.mlp.gate.*",
    "*.weights_proj.*",
    "*norm*",
    "*.wk.*",
)
"""What a block-fp8 checkpoint of the family keeps in bf16 (GLM-5-FP8 and DeepSeek-V3.2, their weight maps)."""
ROOM = "can't allocate|out of memory|overflowed"  # what torch says where there is none; other errors aren't of room
SPREAD = 0.02  # of the weights, as in every config's initializer_range


class DummyTensors:
    """Stands for checkpoint.StrictTensors: has every tensor that is asked for, in the shape that is asked for."""

    where = "dummy weights"
    left: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, device: str, seed: int = 0):
        self._block_fp8 = config.block_fp8
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def __contains__(self, name: str) -> bool:
        if not name.endswith("_scale_inv"):
            return True
        return self._block_fp8 and not any(fnmatch.fnmatch(name, pattern) for pattern in BF16_MATRICES)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises CheckpointError if there is no room for it: no file's shapes bound those that config.json asks for."""
        try:
            return self._made(name, shape, dtype)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not re.search(ROOM, str(error)):
                raise
            first = str(error).splitlines()[0] if str(error) else repr(error)
            raise CheckpointError(
                f"{self.where}: no room for {name} {list(shape)} on {self._device} ({first})"
            ) from error

    def _made(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith("_scale_inv"):
            return torch.full(tuple(shape), 2.0**-10, dtype=dtype, device=self._device)
        if "norm" in name and name.endswith("weight"):
            return torch.ones(tuple(shape), dtype=dtype, device=self._device)
        values = torch.randn(tuple(shape), generator=self._generator, device=self._device, dtype=torch.float32)
        spread = SPREAD / 2.0**-10 if dtype == torch.float8_e4m3fn else SPREAD
        return (values * spread).to(dtype)

    def skip(self, names: Sequence[str]) -> None:
        pass

    def finish(self) -> None:
        pass
