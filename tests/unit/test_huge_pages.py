"""Memory for KV in huge pages: as good as other memory, aligned, and no more of it than asked for."""

import os
import re
from pathlib import Path

import pytest
import torch

from tilert_ref.connector import huge_pages
from tilert_ref.connector.huge_pages import HUGE_PAGE
from tilert_ref.decode_server.buffer import SharedBuffer

SIZES = [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 4097]


def is_mapped(address: int) -> bool:
    bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in bounds)


@pytest.mark.parametrize("nbytes", SIZES)
def test_private_memory_is_zero_aligned_and_given_back(nbytes: int) -> None:
    memory = huge_pages.private(nbytes)
    place = memory.data_ptr()
    assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert not memory.any()
    memory.fill_(7)
    assert memory.sum() == 7 * nbytes
    view = memory[nbytes // 2 :]
    del memory
    assert view.sum() == 7 * len(view)  # a view keeps it
    assert is_mapped(place)
    del view
    assert not is_mapped(place)


@pytest.mark.parametrize("nbytes", SIZES)
def test_mapped_memory_is_shared_and_keeps_what_is_in_it(nbytes: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    first = huge_pages.mapped(fd)
    assert first.shape == (nbytes,) and first.data_ptr() % HUGE_PAGE == 0 and not first.any()
    first.fill_(3)
    first[-1] = 9
    second = huge_pages.mapped(fd)
    assert torch.equal(first, second)
    second[0] = 5
    assert first[0] == 5
    places = first.data_ptr(), second.data_ptr()
    assert all(map(is_mapped, places))
    del first, second
    assert not any(map(is_mapped, places))
    assert os.pread(fd, nbytes, 0)[-1] == (9 if nbytes > 1 else 5)
    os.close(fd)


def huge_kilobytes(memory: torch.Tensor, kind: str) -> int:
    """Of the mapping that memory begins in, as the kernel says: AnonHugePages or ShmemPmdMapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= memory.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith(f"{kind}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {kind} in smaps")


def huge_pages_are_off() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[never]" in setting.read_text()


@pytest.mark.skipif(huge_pages_are_off(), reason="needs a Linux with transparent huge pages")
def test_private_memory_lies_in_huge_pages() -> None:
    memory = huge_pages.private(4 * HUGE_PAGE)
    memory.fill_(1)
    assert huge_kilobytes(memory, "AnonHugePages") >= 2048  # all of it where that much is free in one piece


@pytest.mark.skipif(huge_pages_are_off(), reason="needs a Linux with transparent huge pages")
def test_shared_memory_lies_in_huge_pages_for_all_who_map_it() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4 * HUGE_PAGE)
    memory = huge_pages.mapped(fd)
    if huge_pages._LIBC.madvise(memory.data_ptr(), 0, huge_pages._MADV_COLLAPSE):
        pytest.skip("needs Linux 6.1: MADV_COLLAPSE")
    assert huge_kilobytes(memory, "ShmemPmdMapped") == 0
    memory[5] = 7
    huge_pages.collapse(memory)
    assert huge_kilobytes(memory, "ShmemPmdMapped") >= 2048
    assert memory[5] == 7 and memory.sum() == 7
    again = huge_pages.mapped(fd)
    assert again[HUGE_PAGE] == 0 and huge_kilobytes(again, "ShmemPmdMapped") >= 2048
    os.close(fd)


def test_memory_that_would_not_leave_half_is_taken_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: 4 * HUGE_PAGE - 1)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HUGE_PAGE)
    memory = huge_pages.mapped(fd)
    huge_pages.collapse(memory)
    assert os.fstat(fd).st_blocks == 0
    memory[0] = 1
    assert 0 < os.fstat(fd).st_blocks * 512 <= HUGE_PAGE
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: 4 * HUGE_PAGE)
    huge_pages.collapse(memory)
    assert os.fstat(fd).st_blocks * 512 == 2 * HUGE_PAGE
    os.close(fd)


@pytest.mark.parametrize(("limit", "expected"), [("2000000", 1_500_000), ("max", None), (None, None)])
def test_a_container_has_its_own_limit(
    limit: str | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("500000\n")
    found = huge_pages.available_bytes()
    assert found == expected if expected else found > 10_000_000


def test_a_descriptor_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * 4096)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="cannot map 4096 bytes"):
        huge_pages.mapped(fd)
    os.close(fd)


def test_slots_of_a_receive_buffer_do_not_touch() -> None:
    buffer = SharedBuffer.create(5000, 3)
    buffer.slots[1].fill_(1)
    assert not buffer.slots[0].any() and not buffer.slots[2].any()
    assert torch.equal(SharedBuffer(buffer.fd, 5000, 3).slots, buffer.slots)
    os.close(buffer.fd)
