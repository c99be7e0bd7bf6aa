"""What a NIXL write is made of. Nothing here calls NIXL.

    copy         what the sender asks for, see layout.py
    range        a copy, or a part of it where it is longer than `BATCH_BYTES`
    piece        a copier's share of a range
    descriptor   what NIXL knows of a piece at one end: address, bytes, device
    batch        ranges that are posted together, of at most `BATCH_BYTES`

Descriptors are made before a write, in one list for each end; a write chooses some of them by their numbers. A piece
has the same number in both lists, so what is chosen of one is chosen of the other. A descriptor can't be divided any
more: that is why the cuts are made before it is known which copies a write will name.

Batches keep one big write from holding up the others, and from overrunning its deadline by much: what has been posted
can't be called off.
"""

import base64
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TransferError

BATCH_BYTES = 64 << 20
MIN_SHARED_BYTES = 1 << 20  # a smaller batch is not cut for the copiers

_PAGE = 4096

Range = tuple[int, int, int]
"""Source, destination, bytes."""


class Staged:
    """Sources of copies that may come: each cut for the copiers, and NIXL's list, one descriptor for each piece."""

    def __init__(self, sources: Sequence[tuple[int, int]], copiers: int) -> None:
        self.sources = list(sources)
        self.pieces: list[tuple[int, int]] = []  # address, bytes
        self.numbers: list[range] = []  # the pieces of each range
        self.kind = ""  # of memory
        self.list: Any = None  # NIXL's, once it is made
        for address, _, nbytes in _short((address, 0, nbytes) for address, nbytes in sources):
            first = len(self.pieces)
            self.pieces += _cut(address, nbytes, copiers)
            self.numbers.append(range(first, len(self.pieces)))

    def holds(self, copies: Sequence[Copy]) -> bool:
        return self.sources == sources_of(copies)


class Prepared(dict[str, Any]):
    """A receiver's hello meta, and descriptors of what may be written there."""

    def __init__(self, hello_meta: Mapping[str, Any], copies: Sequence[Copy], staged: Staged) -> None:
        super().__init__(hello_meta)
        self.meta, device = _remote_meta(hello_meta)
        self.staged = staged
        self.targets: list[tuple[int, int, int]] = []  # address, bytes and device of each piece
        self.list: Any = None  # NIXL's, once it is made
        self.failed = False  # a write there
        self._numbers: dict[Range, range] = {}
        for whole, numbers in zip(ranges_of(copies), staged.numbers, strict=True):
            self._numbers[whole] = numbers
            shift = whole[1] - whole[0]
            for address, nbytes in staged.pieces[numbers.start : numbers.stop]:
                self.targets.append((address + shift, nbytes, device))

    def covers(self, ranges: Sequence[Range]) -> bool:
        return all(map(self._numbers.__contains__, ranges))

    def chosen(self, batch: Sequence[Range], copiers: int) -> list[int]:
        """Numbers of the batch's descriptors.

        NIXL gives each copier as many descriptors as the next, one after the other. So if the batch is worth it, the
        first pieces of all ranges come first, and all copiers get as many bytes. In the order of the ranges otherwise:
        NIXL puts pieces that adjoin together again.
        """
        numbers = [self._numbers[whole] for whole in batch]
        if not copiers or sum(nbytes for *_, nbytes in batch) < MIN_SHARED_BYTES:
            return list(itertools.chain.from_iterable(numbers))
        return [of_range[turn] for turn in range(copiers) for of_range in numbers if turn < len(of_range)]


def sources_of(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    return [(src, nbytes) for src, _, nbytes, _, _ in copies]


def ranges_of(copies: Sequence[Copy]) -> list[Range]:
    return list(_short(copy[:3] for copy in copies))


def _short(ranges: Iterable[Range]) -> Iterator[Range]:
    """The ranges, cut where one is longer than BATCH_BYTES."""
    for src, dst, nbytes in ranges:
        while nbytes > BATCH_BYTES:
            yield src, dst, BATCH_BYTES
            src, dst, nbytes = src + BATCH_BYTES, dst + BATCH_BYTES, nbytes - BATCH_BYTES
        yield src, dst, nbytes


def in_batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Lists of at most BATCH_BYTES."""
    batch: list[Range] = []
    room = BATCH_BYTES
    for whole in ranges:
        if whole[2] > room:
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(whole)
        room -= whole[2]
    if batch:
        yield batch


def _cut(address: int, nbytes: int, copiers: int) -> list[tuple[int, int]]:
    """A piece for each of the copiers, of whole pages but for the last. A range too small for that stays whole."""
    step = nbytes // copiers // _PAGE * _PAGE if copiers else 0
    if not step:
        return [(address, nbytes)]
    last = (copiers - 1) * step
    return [*((address + start, step) for start in range(0, last, step)), (address + last, nbytes - last)]


def _remote_meta(hello_meta: Mapping[str, Any]) -> tuple[bytes, int]:
    try:
        return base64.b64decode(hello_meta["nixl_meta"], validate=True), int(hello_meta.get("nixl_dev") or 0)
    except (KeyError, ValueError) as error:
        raise TransferError(f"the receiver's hello has no usable nixl_meta: {error!r}") from error
