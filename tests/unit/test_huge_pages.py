"""Memory for KV in huge pages: as good as other memory, aligned, and no more of it than asked for."""

import os
from pathlib import Path

import pytest
import torch

from tilert_ref.connector import huge_pages
from tilert_ref.connector.huge_pages import HUGE_PAGE
from tilert_ref.decode_server.buffer import SharedBuffer

SIZES = [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 4097]


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("nbytes", SIZES)
def test_private_memory_is_zero_aligned_and_given_back(nbytes: int) -> None:
    before = mappings()
    memory = huge_pages.private(nbytes)
    assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert not memory.any()
    memory.fill_(7)
    assert memory.sum() == 7 * nbytes
    view = memory[nbytes // 2 :]
    del memory
    assert view.sum() == 7 * len(view)  # a view keeps it
    del view
    assert mappings() <= before


@pytest.mark.parametrize("nbytes", SIZES)
def test_mapped_memory_is_shared_and_keeps_what_is_in_it(nbytes: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    before = mappings()
    first = huge_pages.mapped(fd)
    assert first.shape == (nbytes,) and first.data_ptr() % HUGE_PAGE == 0 and not first.any()
    first.fill_(3)
    first[-1] = 9
    second = huge_pages.mapped(fd)
    assert torch.equal(first, second)
    second[0] = 5
    assert first[0] == 5
    del first, second
    assert mappings() <= before
    assert os.pread(fd, nbytes, 0)[-1] == (9 if nbytes > 1 else 5)
    os.close(fd)


def test_memory_that_would_not_leave_half_is_taken_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HUGE_PAGE)
    memory = huge_pages.mapped(fd)
    assert os.fstat(fd).st_blocks == 0
    memory[0] = 1
    assert 0 < os.fstat(fd).st_blocks * 512 <= HUGE_PAGE
    os.close(fd)


def test_a_descriptor_that_cannot_be_mapped_is_an_error() -> None:
    read, write = os.pipe()
    with pytest.raises((OSError, ValueError)):
        huge_pages.mapped(read)
    os.close(read)
    os.close(write)


def test_slots_of_a_receive_buffer_do_not_touch() -> None:
    buffer = SharedBuffer.create(5000, 3)
    buffer.slots[1].fill_(1)
    assert not buffer.slots[0].any() and not buffer.slots[2].any()
    assert torch.equal(SharedBuffer(buffer.fd, 5000, 3).slots, buffer.slots)
    os.close(buffer.fd)
