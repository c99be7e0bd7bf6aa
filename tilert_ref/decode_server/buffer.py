"""The receive slots, which the transport writes and the engine process reads: shared memory, or memory of a GPU.

The server owns the memory, so that it outlives an engine crash. Slots begin on pages of their own.
"""

import contextlib
import mmap
import os

import msgspec
import torch

from tilert_ref.connector import huge_pages

PAGE = mmap.PAGESIZE
NO_FD = -1


class SharedBuffer:
    """`count` slots of nbytes in one piece of memfd memory, mapped into this process: slots is uint8 [count, nbytes].

    The engine process maps the inherited descriptor. It has no name in any file system, so nothing is left behind
    however the processes end. Pages are zero until written.
    """

    remote = None

    def __init__(self, fd: int, nbytes: int, count: int = 1) -> None:
        """Maps an existing descriptor. Raises ValueError if the memory behind it has another size."""
        size, needed, stride = os.fstat(fd).st_size, _file_bytes(nbytes, count), _stride(nbytes)
        if size != needed:
            raise ValueError(f"receive buffer has {size} bytes, {count} slots of this layout need {needed}")
        self.fd = fd
        self._memory = huge_pages.mapped(fd)
        self.slots = self._memory[: count * stride].view(count, stride)[:, :nbytes]

    @classmethod
    def create(cls, nbytes: int, count: int = 1) -> "SharedBuffer":
        fd = os.memfd_create("tilert_ref receive buffer")
        os.ftruncate(fd, _file_bytes(nbytes, count))
        buffer = cls(fd, nbytes, count)
        huge_pages.collapse(buffer._memory)
        return buffer

    def pin(self) -> bool:
        """Locks the pages for the GPU, which then reads them itself, one copy from the slot to the cache. Whether it
        worked: without it a copy goes through a buffer of the driver's. Meant for a buffer that lives as long as its
        process: nothing unlocks them, and the driver refuses other memory at these addresses."""
        status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        if int(status) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel's launch to report
            torch.zeros(1, device="cuda").add_(1)
        return False


class RemoteMemory(msgspec.Struct, frozen=True):
    """How another process finds a piece of GPU memory: what torch's storages say of theirs (CUDA IPC)."""

    device: int
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class DeviceBuffer:
    """The same slots in the memory of a GPU: NIXL writes there, and an injection copies nothing through the host.

    remote: for EngineSpec. The engine process maps the same memory with `open`, after a crash the next one does.
    """

    fd = NO_FD

    def __init__(self, memory: torch.Tensor, nbytes: int, count: int, remote: RemoteMemory) -> None:
        """memory: uint8, one piece. Raises ValueError if it has another size than these slots."""
        if memory.nbytes != count * _stride(nbytes):
            need = f"{count} slots of this layout need {count * _stride(nbytes)}"
            raise ValueError(f"receive buffer has {memory.nbytes} bytes, {need}")
        self.remote = remote
        self.slots = memory.view(count, -1)[:, :nbytes]

    @classmethod
    def create(cls, nbytes: int, count: int, device: str) -> "DeviceBuffer":
        memory = torch.zeros(count * _stride(nbytes), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        return cls(memory, nbytes, count, RemoteMemory(*memory.untyped_storage()._share_cuda_()))

    @classmethod
    def open(cls, remote: RemoteMemory, nbytes: int, count: int) -> "DeviceBuffer":
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(remote))
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return cls(memory, nbytes, count, remote)


ReceiveBuffer = SharedBuffer | DeviceBuffer


def _file_bytes(nbytes: int, count: int) -> int:
    """Of the memfd: whole huge pages, so that the last slot lies in them too."""
    return huge_pages.round_up(count * _stride(nbytes))


def _stride(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
