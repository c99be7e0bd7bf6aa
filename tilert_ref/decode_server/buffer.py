"""The receive slots: anonymous shared memory that the transport writes and the engine process reads."""

import mmap
import os

import torch

PAGE = mmap.PAGESIZE


class SharedBuffer:
    """`count` slots of nbytes in one piece of memfd memory, mapped into this process: slots is uint8 [count, nbytes].

    Each slot begins on a page of its own.

    The server owns the memory, the engine process maps the inherited descriptor. It has no name in any file system, so
    nothing is left behind however the processes end, and it outlives an engine crash. Pages are zero until written.
    """

    def __init__(self, fd: int, nbytes: int, count: int = 1) -> None:
        """Maps an existing descriptor. Raises ValueError if the memory behind it has another size."""
        size, stride = os.fstat(fd).st_size, _stride(nbytes)
        if size != count * stride:
            raise ValueError(f"receive buffer has {size} bytes, {count} slots of this layout need {count * stride}")
        self.fd = fd
        self.slots = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8).view(count, stride)[:, :nbytes]

    @classmethod
    def create(cls, nbytes: int, count: int = 1) -> "SharedBuffer":
        fd = os.memfd_create("tilert_ref receive buffer")
        os.ftruncate(fd, count * _stride(nbytes))
        return cls(fd, nbytes, count)


def _stride(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
