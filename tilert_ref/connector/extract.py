"""Worker half of the plugin, inside vLLM's step: copy a claimed prompt's rows out of the caches into staging.

A job is one claim on its way. The forward pass puts layers into the job's slot and says which; the sender's thread
takes them from there. The slot returns to the pool when both are through with it.

In a step with claims, `save_kv_layer` of each main layer copies that layer's rows. `finish` (vLLM's wait_for_save)
copies the rest: the draft layer, whose rows are complete only after the draft model has run, layers whose hook did not
fire (full CUDA graphs), and the index pages.

On a GPU the copies are enqueued on the current stream, behind the kernels that wrote the rows and before any that could
overwrite them, and an event tells the sender when they are done. Nothing here waits for the device or the network.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from tilert_ref.connector.caches import LayerCache, ModelCaches
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.layout import Plane
from tilert_ref.connector.planes import block_index, gather_index_pages, gather_rows, tile_index_pages
from tilert_ref.connector.staging import Slot, StagingExhausted, StagingPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Planes of some layers that lie in staging as soon as `ready` (None: now) has happened."""

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    ready: torch.cuda.Event | None = None


class Job:
    """One claim, its slot, and the parts of it that lie there. Shared by the forward pass and one sender thread."""

    def __init__(self, claim: Claim, slot: Slot, release: Callable[[Slot], None]) -> None:
        self.claim = claim
        self.slot = slot
        self.failure: str | None = None
        self._release = release
        self._changed = threading.Condition()
        self._parts: list[Part] = []
        self._ended = False
        self._owners = 2

    def put(self, part: Part) -> None:
        with self._changed:
            self._parts.append(part)
            self._changed.notify()

    def end(self) -> None:
        """The forward pass is through with the slot. To be called once, also after a failure."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._drop_owner()

    def take(self, timeout: float) -> list[Part]:
        """The parts that came since the last call; empty at the end. TimeoutError if nothing comes for `timeout` s."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._parts or self._ended, timeout):
                raise TimeoutError(f"the forward pass delivered nothing for {timeout:g} s")
            parts, self._parts = self._parts, []
            return parts

    def fail(self, reason: str) -> None:
        """Gives the job up, from either side. The other side notices; the first reason stays."""
        with self._changed:
            self.failure = self.failure or reason

    def sender_through(self) -> None:
        """The sender, and the network, read the slot no more. To be called once."""
        self._drop_owner()

    def _drop_owner(self) -> None:
        with self._changed:
            self._owners -= 1
            last = self._owners == 0
        if last:
            self._release(self.slot)


@dataclass
class _Active:
    """A job whose rows this step copies."""

    job: Job
    done: set[int] = field(default_factory=set)  # layers whose rows are in staging
    block_ids: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by group and block size

    def blocks(self, entry: LayerCache) -> torch.Tensor:
        key = entry.group.index, entry.cache.shape[1]
        if key not in self.block_ids:
            self.block_ids[key] = _block_index(entry, self.job.claim)
        return self.block_ids[key]


class Extractor:
    """Copies the rows of one step's claims. Not thread-safe: vLLM's forward thread calls it.

    Args:
        layers: the wire layers that this rank sends.
        layerwise: copy rows in `layer`, as they are written; False leaves all of it to `finish`.
        tiled: store index pages in the tiled order.
        submit: takes over the sender's side of a new job; must not block.
        refuse: is told of a claim that gets no job, and why; must not block.
    """

    def __init__(
        self,
        caches: ModelCaches,
        pool: StagingPool,
        layers: Collection[int],
        submit: Callable[[Job], None],
        *,
        refuse: Callable[[Claim, str], None] = lambda claim, reason: None,
        layerwise: bool = True,
        tiled: bool = False,
    ) -> None:
        self._rows = tuple(caches.rows[layer] for layer in sorted(layers))
        self._index = tuple((e.layer, caches.index_for(e.layer)) for e in self._rows) if caches.index else ()
        main = (entry for entry in self._rows if entry.name not in caches.draft_names)
        self._by_name = {entry.name: entry for entry in main} if layerwise else {}
        self._pool = pool
        self._submit = submit
        self._refuse = refuse
        self._tiled = tiled
        self._active: list[_Active] = []

    def begin(self, claims: Sequence[Claim]) -> None:
        """Before the forward pass of a step with claims."""
        for claim in claims:
            try:
                slot = self._pool.acquire(claim.seq_len)
            except StagingExhausted as error:
                logger.error("request %s is not handed off: %s", claim.request_id, error)
                self._refuse(claim, str(error))
                continue
            job = Job(claim, slot, self._pool.release)
            self._active.append(_Active(job))
            self._submit(job)

    def layer(self, name: str) -> None:
        """The main model has written layer `name` for this step. Repeated and unknown names have no effect."""
        entry = self._by_name.get(name)
        if entry is not None:
            for active in self._active:
                if entry.layer not in active.done:
                    self._guarded(active, lambda active=active: self._copy_rows(active, [entry]))

    def finish(self) -> None:
        """After the forward pass, draft model included: copies what is missing and ends the step's jobs."""
        active_jobs, self._active = self._active, []
        for active in active_jobs:
            self._guarded(active, lambda active=active: self._copy_rest(active))
            active.job.end()

    def _guarded(self, active: _Active, copy: Callable[[], None]) -> None:
        """An error of one handoff must not end the engine, which serves other requests: it fails this job only."""
        if active.job.failure is not None:
            return
        try:
            copy()
        except Exception as error:
            logger.exception("extraction for request %s failed", active.job.claim.request_id)
            active.job.fail(f"extraction failed: {error}")

    def _copy_rest(self, active: _Active) -> None:
        missing = [entry for entry in self._rows if entry.layer not in active.done]
        if missing:
            self._copy_rows(active, missing)
        if self._index:
            self._copy_index(active)

    def _copy_rows(self, active: _Active, entries: Sequence[LayerCache]) -> None:
        seq_len = active.job.claim.seq_len
        for entry in entries:
            kv, pe, _ = active.job.slot.planes(entry.layer, seq_len)
            with _Outputs(entry.cache, kv, pe) as (out_kv, out_pe):
                gather_rows(entry.cache, active.blocks(entry), seq_len, out_kv, out_pe)
            active.done.add(entry.layer)
        layers = tuple(entry.layer for entry in entries)
        active.job.put(Part(layers, ("kv", "pe"), _event(entries[0].cache)))

    def _copy_index(self, active: _Active) -> None:
        seq_len = active.job.claim.seq_len
        for layer, source in self._index:
            _, _, pages = active.job.slot.planes(layer, seq_len)
            with _Outputs(source.cache, pages) as (out,):
                gather_index_pages(source.cache, active.blocks(source), seq_len, out)
                if self._tiled:
                    out.copy_(tile_index_pages(out))
        layers = tuple(layer for layer, _ in self._index)
        active.job.put(Part(layers, ("ki",), _event(self._index[0][1].cache)))


class _Outputs:
    """Where a gather may write: the planes themselves, or, if the cache is on another device than staging, tensors
    beside the cache that are copied into the (pinned) planes without waiting."""

    def __init__(self, cache: torch.Tensor, *planes: torch.Tensor) -> None:
        self._planes = planes
        self._targets = [p if p.device == cache.device else torch.empty_like(p, device=cache.device) for p in planes]

    def __enter__(self) -> list[torch.Tensor]:
        return self._targets

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for plane, target in zip(self._planes, self._targets, strict=True):
            if kind is None and plane is not target:
                plane.copy_(target, non_blocking=True)


def _block_index(entry: LayerCache, claim: Claim) -> torch.Tensor:
    """The prompt's blocks on the cache's device, without waiting for what the device is doing."""
    cache = entry.cache
    shape = cache if not cache.is_cuda else torch.empty(()).expand(cache.shape[:2])
    ids = block_index(entry.blocks(claim.block_ids), claim.seq_len, shape)
    return ids.pin_memory().to(cache.device, non_blocking=True) if cache.is_cuda else ids


def _event(cache: torch.Tensor) -> torch.cuda.Event | None:
    if not cache.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(cache.device))
    return event
