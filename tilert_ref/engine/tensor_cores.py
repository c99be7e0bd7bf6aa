"""Where the Triton kernels of a Hopper GPU are used, and the only place that imports them.

An engine that follows vLLM on Hopper (numerics.HOPPER) runs them there; on any other device the same arithmetic is
emulated in torch (vllm_hopper.py).
"""

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HOPPER_CAPABILITY = 9
BRANCHES = 4
FEW_TOKENS = 64
"""Up to so many tokens experts are looked up on the device; a prompt goes through its experts one by one."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER_CAPABILITY


def there(x: torch.Tensor) -> bool:
    """Whether x is on a Hopper GPU."""
    return x.is_cuda and is_hopper(x.device)


def beside(x: torch.Tensor, branch: int) -> AbstractContextManager[Any]:
    """What is launched in this context may run beside what follows it, up to the join of that branch.

    Only while a step is captured; elsewhere one comes after the other. A matrix with few rows keeps a few
    multiprocessors busy for as long as a large one keeps all of them. branch: 1 to BRANCHES.
    """
    if not _captures(x):
        return nullcontext()
    stream = _branches(x.device)[branch - 1]
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def join(x: torch.Tensor, *branches: int) -> None:
    """What follows comes after everything that was launched into these branches."""
    if _captures(x):
        for branch in branches:
            torch.cuda.current_stream().wait_stream(_branches(x.device)[branch - 1])


def _captures(x: torch.Tensor) -> bool:
    return there(x) and torch.cuda.is_current_stream_capturing()


def current_branch(device: torch.device) -> int:
    """Which branch is launched into, 0 for the trunk: branches may not share what they write."""
    if device.type != "cuda":
        return 0
    current = torch.cuda.current_stream(device)
    return next((number for number, stream in enumerate(_branches(device), 1) if stream == current), 0)


@functools.cache
def _branches(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(BRANCHES))


@functools.cache
def products() -> ModuleType:
    from tilert_ref.engine import triton_products

    return triton_products


@functools.cache
def attention() -> ModuleType:
    from tilert_ref.engine import triton_attention

    return triton_attention


@functools.cache
def pointwise() -> ModuleType:
    from tilert_ref.engine import triton_pointwise

    return triton_pointwise


@functools.cache
def steps() -> ModuleType:
    from tilert_ref.engine import triton_steps

    return triton_steps


def kernel_cache() -> Path:
    """Where Triton keeps compiled kernels, so that the next start needs no compiler."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def kept_kernels() -> int:
    """How many entries it has: a compiled kernel has one or two."""
    try:
        return sum(1 for _ in kernel_cache().iterdir())
    except OSError:  # nothing was compiled yet, or the directory can't be read
        return 0
