"""Where the Triton kernels of a Hopper GPU are used, and the only place that imports them.

An engine that follows vLLM on Hopper (numerics.HOPPER) runs them there; on any other device the same arithmetic is
emulated in torch (vllm_hopper.py). Nothing else asks what kind of device it has.
"""

import functools
import os
from pathlib import Path
from types import ModuleType

import torch

HOPPER_CAPABILITY = 9
FEW_TOKENS = 64
"""Up to so many tokens experts are looked up on the device; a prompt goes through its experts one by one."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER_CAPABILITY


def there(x: torch.Tensor) -> bool:
    """Whether x is on a Hopper GPU."""
    return x.is_cuda and is_hopper(x.device)


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
