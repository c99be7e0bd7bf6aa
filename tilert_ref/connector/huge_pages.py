"""Host memory for KV, in pages of 2 MiB where Linux has them.

Who writes into another process's memory (CMA) looks up and pins every page of it, and an RDMA registration has an entry
for every page. Two threads that wrote 13 MB took 1.2 to 1.4 ms with pages of 4 KiB and 0.8 to 0.9 with these; memcpy
hardly cares. Linux mostly leaves huge pages to those who ask, so this asks. Without them the memory is only slower.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import torch

HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # Linux 6.1: makes huge pages now, also of shared memory, whatever the system's default for it
CGROUP = Path("/sys/fs/cgroup")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


def private(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], zeros: memory of this process alone. It takes no room before it is written."""
    reserved, start = _reserve(nbytes)
    _advise(reserved, getattr(mmap, "MADV_HUGEPAGE", None), start, round_up(nbytes))
    return torch.frombuffer(reserved, dtype=torch.uint8, offset=start, count=nbytes)


def mapped(fd: int) -> torch.Tensor:
    """uint8, all of a memfd, shared with whoever else maps it. Raises OSError if it can't be mapped."""
    nbytes = os.fstat(fd).st_size
    reserved, start = _reserve(nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(reserved, start))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _LIBC.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes of a memfd")
    return torch.frombuffer(reserved, dtype=torch.uint8, offset=start, count=nbytes)


def collapse(memory: torch.Tensor) -> None:
    """Makes huge pages of shared memory that `mapped` returned, for all who map it.

    It takes all its room now, as it would by registering it with a network card, unless that is over half of what is
    available.
    """
    if 2 * memory.nbytes <= available_bytes():
        memory[::HUGE_PAGE].sum()  # only a range that has a page already can be collapsed
        _LIBC.madvise(memory.data_ptr(), memory.nbytes // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)


def available_bytes() -> int:
    """What this process may still take: the machine's, or its container's (cgroup v2) where that is less."""
    with open("/proc/meminfo") as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    limits = [1024 * kilobytes]
    with contextlib.suppress(OSError, ValueError):  # no such files, or "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(limit - used)
    return min(limits)


def _reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """Fresh memory, and where in it nbytes may lie in huge pages. It is unmapped together with what replaced it."""
    reserved = mmap.mmap(-1, round_up(nbytes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return reserved, -ctypes.addressof(ctypes.c_char.from_buffer(reserved)) % HUGE_PAGE


def round_up(nbytes: int) -> int:
    return -(-nbytes // HUGE_PAGE) * HUGE_PAGE


def _advise(memory: mmap.mmap, advice: int | None, start: int, nbytes: int) -> None:
    if advice is not None and nbytes:
        with contextlib.suppress(OSError):
            memory.madvise(advice, start, nbytes)
