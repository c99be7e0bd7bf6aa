"""NIXL's own threads: how a write is shared out among them, and where they run."""

import os
import threading
from pathlib import Path

import pytest

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport.copiers import side_by_side
from tilert_ref.connector.transport.nixl import MIN_SHARED_BYTES, _shared_out


def test_each_copier_gets_as_many_descriptors_and_bytes_as_the_next() -> None:
    sizes = [2_162_688, 524_288, 540_672, 5 * 4096 + 17, 3 * 4096]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    batch = [Copy(start, (1 << 40) + start, size, 0, "kv") for start, size in zip(starts, sizes, strict=True)]
    pieces = _shared_out(batch, 2)
    halves = pieces[: len(sizes)], pieces[len(sizes) :]
    assert [len(half) for half in halves] == [len(sizes)] * 2
    nbytes = [sum(size for *_, size in half) for half in halves]
    assert abs(nbytes[0] - nbytes[1]) <= 2 * 4096 * len(sizes)
    assert all(dst - src == 1 << 40 for src, dst, _ in pieces)
    covered = sorted((src, src + size) for src, _, size in pieces)
    assert [covered[0][0], *(end for _, end in covered)] == [*(start for start, _ in covered), sum(sizes)]


@pytest.mark.parametrize(("copiers", "size"), [(0, 4 * MIN_SHARED_BYTES), (2, MIN_SHARED_BYTES - 1), (2, 100)])
def test_a_write_without_copiers_or_too_small_for_them_stays_whole(copiers: int, size: int) -> None:
    assert _shared_out([Copy(4096, 8192, size, 0, "kv")], copiers) == [(4096, 8192, size)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_threads_share_no_processor_and_nobody_elses_are_touched() -> None:
    name, end, mine = Path("/proc/thread-self/comm").read_text(), threading.Event(), os.sched_getaffinity(0)
    threads = [threading.Thread(target=end.wait, args=(60,)) for _ in range(4)]
    threads[0].start()  # before: none of ours
    with side_by_side(2):
        for thread in threads[1:]:
            thread.start()
    try:
        where = [os.sched_getaffinity(thread.native_id) for thread in threads]
        policies = [os.sched_getscheduler(thread.native_id) for thread in threads]
        assert where[:2] == [mine, mine]
        assert not where[2] & where[3] and where[2] | where[3] == mine
        assert policies == [os.SCHED_OTHER] * 2 + [os.SCHED_BATCH] * 2
        assert (os.sched_getaffinity(0), Path("/proc/thread-self/comm").read_text()) == (mine, name)
    finally:
        end.set()
