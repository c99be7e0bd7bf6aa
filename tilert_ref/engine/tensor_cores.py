"""Where the Triton kernels of a Hopper GPU are used, and the only place that imports them.

An engine that follows vLLM on Hopper (numerics.HOPPER) runs them there; on any other device the same arithmetic is
emulated in torch (vllm_hopper.py). Nothing else asks what kind of device it has.
"""

import functools
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
