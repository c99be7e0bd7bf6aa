"""NIXL's own threads: how a write is shared out among them, and where they run."""

import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import descriptors
from tilert_ref.connector.transport.copiers import side_by_side
from tilert_ref.connector.transport.descriptors import (
    MIN_SHARED_BYTES,
    Prepared,
    Staged,
    in_batches,
    ranges_of,
    sources_of,
)


class Ready(Prepared):
    """For writes of these copies. pieces: (source, destination, bytes) of each descriptor."""

    def __init__(self, copies: list[Copy], copiers: int) -> None:
        super().__init__({"nixl_meta": ""}, copies, Staged(sources_of(copies), copiers))
        self.pieces = [
            (src, dst, nbytes) for (src, nbytes), (dst, _, _) in zip(self.staged.pieces, self.targets, strict=True)
        ]
        assert [nbytes for _, nbytes in self.staged.pieces] == [nbytes for _, nbytes, _ in self.targets]


def pieces(copies: list[Copy], copiers: int) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) of each descriptor of a write of these copies, in order."""
    prepared = Ready(copies, copiers)
    (batch,) = in_batches(ranges_of(copies))
    return [prepared.pieces[number] for number in prepared.chosen(batch, copiers)]


def test_each_copier_gets_as_many_descriptors_and_bytes_as_the_next() -> None:
    sizes = [2_162_688, 524_288, 540_672, 5 * 4096 + 17, 3 * 4096]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    batch = [Copy(start, (1 << 40) + start, size, 0, "kv") for start, size in zip(starts, sizes, strict=True)]
    shared = pieces(batch, 2)
    halves = shared[: len(sizes)], shared[len(sizes) :]
    assert [len(half) for half in halves] == [len(sizes)] * 2
    nbytes = [sum(size for *_, size in half) for half in halves]
    assert abs(nbytes[0] - nbytes[1]) <= 2 * 4096 * len(sizes)
    assert all(dst - src == 1 << 40 for src, dst, _ in shared)
    covered = sorted((src, src + size) for src, _, size in shared)
    assert [covered[0][0], *(end for _, end in covered)] == [*(start for start, _ in covered), sum(sizes)]


@pytest.mark.parametrize(("copiers", "size"), [(0, 4 * MIN_SHARED_BYTES), (2, MIN_SHARED_BYTES - 1), (2, 100)])
def test_a_write_without_copiers_or_too_small_for_them_stays_whole(copiers: int, size: int) -> None:
    """NIXL puts descriptors that adjoin together."""
    made = pieces([Copy(4096, 8192, size, 0, "kv")], copiers)
    ends = [src + nbytes for src, _, nbytes in made]
    assert [src for src, *_ in made] == [4096, *ends[:-1]] and ends[-1] == 4096 + size
    assert all(dst - src == 4096 for src, dst, _ in made)


@given(
    sizes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6),
    limit=st.integers(1, 1 << 18),
    copiers=st.integers(0, 3),
    data=st.data(),
)
def test_any_part_of_what_was_prepared_is_every_byte_of_it_once(
    sizes: list[int], limit: int, copiers: int, data: st.DataObject
) -> None:
    limit = max(limit, max(sizes) // 8)
    starts = [sum(sizes[:number]) + 4096 * number for number in range(len(sizes))]
    copies = [Copy(start, start + (1 << 40), size, 0, "kv") for start, size in zip(starts, sizes, strict=True)]
    part = data.draw(st.lists(st.sampled_from(copies), unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "BATCH_BYTES", limit)
        prepared = Ready(copies, copiers)
        assert prepared.covers(ranges_of(part))
        assert not prepared.covers([(1 << 39, 1 << 41, 5)])
        batches = list(in_batches(ranges_of(part)))
    moved: list[tuple[int, int]] = []
    for batch in batches:
        chosen = [prepared.pieces[number] for number in prepared.chosen(batch, copiers)]
        assert sum(nbytes for *_, nbytes in chosen) <= limit
        assert all(nbytes > 0 and dst - src == 1 << 40 for src, dst, nbytes in chosen)
        moved += [(src, src + nbytes) for src, _, nbytes in chosen]
    moved.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(moved))
    assert sum(end - start for start, end in moved) == sum(copy.nbytes for copy in part)
    assert all(any(c.src <= start and end <= c.src + c.nbytes for c in part) for start, end in moved)


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
