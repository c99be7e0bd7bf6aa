"""The receive buffer: anonymous shared memory that the transport writes and the engine process reads."""

import mmap
import os

import torch


class SharedBuffer:
    """nbytes of memfd memory, mapped into this process as a uint8 tensor.

    The server owns the memory, the engine process maps the inherited descriptor. It has no name in any file system, so
    nothing is left behind however the processes end, and it outlives an engine crash. Pages are zero until written.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps an existing descriptor. Raises ValueError if the memory behind it has another size."""
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise ValueError(f"receive buffer has {size} bytes, the layout needs {nbytes}")
        self.fd = fd
        self.tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "SharedBuffer":
        fd = os.memfd_create("tilert_ref receive buffer")
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)
