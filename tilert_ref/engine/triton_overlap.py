"""Kernels that start before the one in front of them has ended (programmatic dependent launch, Hopper and later).

A step is some two hundred short kernels, and between two of them a GPU is idle for as long as a short kernel takes. So
a kernel lets the next one start when its own programs run (a product: when they have read their weights; earlier, the
next one's programs would crowd on the multiprocessors that this one leaves free), and the next one waits where it first
reads or writes memory that others use. What precedes that wait are addresses and weights: nobody writes those. A kernel
that returns has waited, so whatever ran earlier has ended too. (Asking for a product's weights before the wait, as far
as the L2 cache, made a step slower.)

`OVERLAPPED` goes into each launch, `begin()` or its two halves stand in each kernel.
"""

from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ON_A_GPU = tl.constexpr(not knobs.runtime.interpret)
OVERLAPPED: dict[str, Any] = {"launch_pdl": True} if ON_A_GPU.value else {}


@triton.jit
def let_next_start():
    if ON_A_GPU:
        gdc_launch_dependents()


@triton.jit
def wait_for_last():
    if ON_A_GPU:
        gdc_wait()


@triton.jit
def begin():
    wait_for_last()
    let_next_start()
