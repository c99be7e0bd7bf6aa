"""Staging memory: where a prompt's planes lie between vLLM's caches and the wire, and who owns them.

A slot belongs to one job from `acquire` to `release`, so nothing overwrites bytes that are still being sent. Slots are
kept for the next job, because fresh memory costs page faults and a registration. The pool grows to `max_bytes`; then
idle slots that are too small make room; then `acquire` refuses by name. It never waits: it is called inside vLLM's
forward pass.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tilert_ref.connector import huge_pages
from tilert_ref.connector.layout import BufferLayout, plane_views

MIN_SLOT_TOKENS = 256
MIN_POOL_BYTES = 1 << 30


class StagingExhausted(Exception):
    """All staging memory is in use. The request is not handed off; its decode node is told."""


@dataclass(eq=False)
class Slot:
    """One piece of staging memory: uint8 [layout.shard_bytes], the shard `rank` of a buffer of `layout`."""

    layout: BufferLayout
    rank: int
    memory: torch.Tensor
    registered: bool = False  # with the transport; belongs to the sender's threads

    @property
    def bases(self) -> list[int]:
        """Address of each shard; this rank owns one, 0 stands for the others."""
        return [self.memory.data_ptr() if shard == self.rank else 0 for shard in range(self.layout.nshards)]

    def planes(self, layer: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Views for one layer, see `layout.plane_views`."""
        return plane_views(self.layout, self.memory, layer, seq_len)


class StagingPool:
    """Slots of one rank.

    Args:
        layout: of a staging buffer for the greatest prompt; nshards is the number of sender ranks.
        rank: this rank, owner of shard `rank`.
        device: where the slots lie. Host memory is pinned if `pinned`.
        max_bytes: limit of all slots together; None: two slots for the greatest prompt, at least 1 GiB.
        on_drop: called with a slot that makes room for another one, so that the transport can forget its memory.
    """

    def __init__(
        self,
        layout: BufferLayout,
        rank: int,
        device: torch.device,
        max_bytes: int | None,
        on_drop: Callable[[Slot], None],
        pinned: bool = False,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._device = device
        self._pinned = pinned
        self._max_bytes = max(2 * layout.shard_bytes, MIN_POOL_BYTES) if max_bytes is None else max_bytes
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Allocated at this moment, in use or not."""
        return self._total_bytes

    def acquire(self, seq_len: int) -> Slot:
        """A slot for seq_len tokens: the smallest free one that fits, else a new one. StagingExhausted if neither."""
        with self._lock:
            fitting = [slot for slot in self._free if slot.layout.max_seq_len >= seq_len]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.layout.max_seq_len)
                self._free.remove(slot)
                return slot
            return self._allocate(seq_len)

    def release(self, slot: Slot) -> None:
        """The last byte of the slot has been read and nothing writes to it any more."""
        with self._lock:
            self._free.append(slot)

    def _allocate(self, seq_len: int) -> Slot:
        layout = replace(self._layout, max_seq_len=self._capacity(seq_len))
        self._make_room(layout.shard_bytes)
        if self._total_bytes + layout.shard_bytes > self._max_bytes:
            raise StagingExhausted(
                f"{seq_len} tokens need {layout.shard_bytes} bytes of staging; {self._total_bytes} of "
                f"{self._max_bytes} (tilert_max_staging_bytes) are in use"
            )
        memory = self._memory(layout.shard_bytes)
        self._total_bytes += layout.shard_bytes
        return Slot(layout, self._rank, memory)

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._device.type == "cpu" and not self._pinned:
            return huge_pages.private(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)

    def _capacity(self, seq_len: int) -> int:
        """Tokens of a new slot: a power of two, so that prompts of similar length share slots."""
        return min(max(MIN_SLOT_TOKENS, 1 << (seq_len - 1).bit_length()), self._layout.max_seq_len)

    def _make_room(self, nbytes: int) -> None:
        while self._free and self._total_bytes + nbytes > self._max_bytes:
            slot = self._free.pop(0)
            self._total_bytes -= slot.layout.shard_bytes
            self._on_drop(slot)
