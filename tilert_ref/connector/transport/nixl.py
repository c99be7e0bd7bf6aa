"""NIXL over UCX: one-sided writes into a receiver's registered memory.

One thread at a time uses the agent, the one that holds the lock. A writer posts and watches its write itself: handing
it to another thread and back took 0.15 ms. What a write is made of is in descriptors.py. What platform.md section 1
measured shapes the rest:

- A write whose deadline has passed goes on, also after its handle was released. So its handle stays here, and a thread
  polls it until it ends; `TransferTimeout.settled` says when. Whoever gave up must keep the source, and the control
  connection, until then.
- Making descriptors takes longer than choosing some of those that are there. So they are made for every copy that may
  come, while the sender has to wait anyway: the sources' before hello, the destinations' before accept.
- Over shared memory (CMA) whoever posts a write copies it, and `transfer` keeps Python's lock meanwhile: vLLM's forward
  pass stands still. So a sender of host memory posts to UCX's own threads, `COPIERS` of them: together they copy twice
  as fast as one. Without them `transfer` blocks for the whole copy.
- A dead receiver shows as an exception, and its exceptions have no common base class.
- The receiver's notifications are not used: TileRT's receiver never reads them, they would pile up in its memory.
"""

import base64
import contextlib
import ctypes
import itertools
import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TransferError, TransferTimeout
from tilert_ref.connector.transport.copiers import side_by_side, wake_on_time
from tilert_ref.connector.transport.descriptors import Prepared, Range, Staged, in_batches, ranges_of, sources_of
from tilert_ref.connector.transport.regions import Region, Regions

MAX_REMOTES = 32
PATIENCE_S = 60.0  # with other threads' use of the agent. Starting UCX takes 0.5 to 2 s, more on a loaded machine
STAGING_PATIENCE_S = 1.0  # the same, while a receiver waits for an announce
CLOSE_PATIENCE_S = 10.0
POLL_MIN_S, POLL_MAX_S = 2e-5, 2e-3
LAST_COPIES_S = 1.0  # for what copiers are at when the transport is closed
POLL_GROWTH = 1.25
EARLY = 0.9
"""Part of the time that the last writes took for as many bytes, after which a write is looked at for the first time. A
look may cost the copiers 0.1 ms, if they have no processor to spare."""
COPIERS = 2
PROGRESS_PAUSE_US = 10_000  # longest sleep of UCX's progress thread; what arrives wakes it

_MAKING_AGENT = threading.Lock()

logger = logging.getLogger(__name__)


def nixl_version() -> str | None:
    """Version of the installed NIXL, None without one. Ends with different versions may fail to connect."""
    for package in ("nixl", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


@dataclass(eq=False)
class _Write:
    """One `write` call."""

    waiting: deque[list[Range]]  # batches
    prepared: Prepared
    settled: "Future[None]" = field(default_factory=Future)  # done when no byte moves any more; raises if it failed
    abandoned: bool = False
    handle: Any = None
    posted: float = 0.0  # time.monotonic() of the batch that moves
    nbytes: int = 0  # of that batch
    seen_moving: bool = False  # that batch, by a look after it was posted


class NixlTransport:
    """Both ends. The agent starts at first use.

    receiver: True starts UCX's own progress thread, without which nothing arrives over TCP while nobody calls NIXL.
    copiers: threads that write for a sender; 0 for none, then `transfer` does it itself.
    """

    name = "nixl"
    fenced = False

    def __init__(self, *, receiver: bool = True, copiers: int = COPIERS) -> None:
        self._receiver = receiver
        self._copiers = 0 if receiver else copiers
        self._regions = Regions()
        self._closed = False
        self._lock = threading.Lock()
        self._agent: Any = None  # from here on: for whoever holds the lock
        self._registrations: dict[int, Any] = {}
        self._remotes: dict[bytes, str] = {}  # agent metadata -> name, oldest first
        self._lists: list[Any] = []  # NIXL's, of descriptors
        self._prepared: dict[int, Prepared] = {}  # by id
        self._retired: list[Staged | Prepared] = []  # to be let go; may grow without the lock
        self._writes: list[_Write] = []
        self._ended: list[tuple[_Write, TransferError | None]] = []  # not told yet
        self._s_per_byte = 0.0  # as the last writes took

    def start(self) -> None:
        with self._turn():
            self._started()

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        region = Region(ptr, nbytes, tensor)
        descriptor = [(ptr, nbytes, _device(region), "")]
        with self._turn():
            self._registrations[ptr] = self._started().register_memory(descriptor, _memory_type(region))
            self._regions.add(ptr, nbytes, tensor)

    def unregister(self, ptr: int) -> None:
        region = self._regions.remove(ptr)
        if region is not None:  # not on this thread: NIXL may be busy
            arguments = (ptr, region)
            threading.Thread(target=self._deregister, args=arguments, name="tilert-nixl-forget", daemon=True).start()

    def local_meta(self, address: str) -> dict[str, Any]:
        with self._turn():
            known = [self._regions.holding(ptr, 1) for ptr in self._registrations]
            regions = [region for region in known if region is not None]  # one may be about to go
            if len({_device(region) for region in regions}) != 1:
                raise TransferError("NIXL needs the receive buffer on exactly one device: hello names only one")
            encoded = base64.b64encode(self._started().get_agent_metadata()).decode()
            return {"nixl_meta": encoded, "nixl_dev": _device(regions[0])}

    def admit(self, tags: Mapping[bytes, int]) -> None:
        """One-sided writes cannot be refused."""

    @contextlib.contextmanager
    def staged(self, sources: Sequence[tuple[int, int]]) -> Iterator[Staged | None]:
        with contextlib.ExitStack() as stack:
            staged = None
            with contextlib.suppress(TransferError):  # the write will meet it again
                staged = stack.enter_context(self._staging(sources, time.monotonic() + STAGING_PATIENCE_S))
            yield staged

    @contextlib.contextmanager
    def prepared(
        self, hello_meta: dict[str, Any], copies: Sequence[Copy], staged: Staged | None = None
    ) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            meta = hello_meta
            with contextlib.suppress(TransferError):  # as above
                deadline = time.monotonic() + PATIENCE_S
                meta = stack.enter_context(self._preparing(hello_meta, copies, staged, deadline))
            yield meta

    def write(self, hello_meta: dict[str, Any], copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        if not copies:
            return
        ranges = ranges_of(copies)
        if isinstance(hello_meta, Prepared) and hello_meta.covers(ranges):
            self._write(hello_meta, ranges, deadline)
            return
        with self._preparing(hello_meta, copies, None, deadline) as prepared:
            self._write(prepared, ranges, deadline)

    def close(self) -> None:
        self._closed = True
        closing = threading.Thread(target=self._close, name="tilert-nixl-close", daemon=True)
        closing.start()  # NIXL may be busy for longer than anybody wants to wait
        closing.join(timeout=CLOSE_PATIENCE_S)

    def _close(self) -> None:
        self._lock.acquire()
        try:
            self._shut_down()
        finally:
            self._unlock()

    @contextlib.contextmanager
    def _turn(self, patience: float = PATIENCE_S) -> Iterator[None]:
        """This thread's turn with the agent. What NIXL raises comes out as TransferError."""
        if not self._lock.acquire(timeout=max(0.0, patience)):
            raise TransferError(f"NIXL did not answer within {patience:.1f} s")
        try:
            if self._closed:
                raise TransferError("the NIXL transport is closed")
            self._tidy()
            yield
        except TransferError:
            raise
        except Exception as error:  # NIXL's exceptions have no base class
            raise _transfer_error(error) from error
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """And only then says which writes have ended: whoever hears it may take long, or want a turn himself."""
        ended, self._ended = self._ended, []
        self._lock.release()
        for write, error in ended:
            if error is None:
                write.settled.set_result(None)
            else:
                write.settled.set_exception(error)

    @contextlib.contextmanager
    def _staging(self, sources: Sequence[tuple[int, int]], deadline: float) -> Iterator[Staged]:
        wake_on_time()  # this thread, when it watches the write
        staged = Staged(sources, self._copiers)
        device, staged.kind = self._source(sources)
        pieces = [(address, nbytes, device) for address, nbytes in staged.pieces]
        with self._turn(deadline - time.monotonic()):
            staged.list = self._new_list("NIXL_INIT_AGENT", pieces, staged.kind)
        try:
            yield staged
        finally:
            self._let_go(staged)

    @contextlib.contextmanager
    def _preparing(
        self, hello_meta: Mapping[str, Any], copies: Sequence[Copy], staged: Staged | None, deadline: float
    ) -> Iterator[Prepared]:
        """What has been posted when it ends goes on: NIXL has copied the descriptors."""
        with contextlib.ExitStack() as stack:
            if staged is None or not staged.holds(copies):
                staged = stack.enter_context(self._staging(sources_of(copies), deadline))
            prepared = Prepared(hello_meta, copies, staged)
            with self._turn(deadline - time.monotonic()):
                try:
                    prepared.list = self._remote_list(self._remote(prepared.meta), prepared.targets, staged.kind)
                except Exception:
                    self._forget_remote_if_idle(prepared.meta)
                    raise
                self._prepared[id(prepared)] = prepared
            try:
                yield prepared
            finally:
                self._let_go(prepared)

    def _let_go(self, made: Staged | Prepared) -> None:
        """Now if NIXL is not busy, else with the next turn."""
        self._retired.append(made)
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._unlock()

    def _write(self, prepared: Prepared, ranges: Sequence[Range], deadline: float) -> None:
        write = _Write(deque(in_batches(ranges)), prepared)
        with self._turn(deadline - time.monotonic()):
            if deadline <= time.monotonic():
                raise TransferError("the write's deadline passed before it could begin")
            self._writes.append(write)
            self._advance(write)
        self._watch(write, deadline)
        if not write.settled.done():
            write.abandoned = True
            threading.Thread(target=self._see_out, args=(write,), name="tilert-nixl-late", daemon=True).start()
            raise TransferTimeout("the write missed its deadline and may still be going on", _quiet(write))
        write.settled.result()

    def _watch(self, write: _Write, deadline: float) -> None:
        """Returns when the write has ended or the deadline has passed."""
        pause = POLL_MIN_S
        while not write.settled.done() and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(max(pause, self._rest(write)), remaining))
            pause = POLL_MIN_S if self._look(write, remaining) else min(POLL_GROWTH * pause, POLL_MAX_S)

    def _rest(self, write: _Write) -> float:
        """Seconds until the batch that moves may have ended."""
        if write.handle is None:
            return 0.0
        return min(write.posted + EARLY * write.nbytes * self._s_per_byte - time.monotonic(), POLL_MAX_S)

    def _look(self, write: _Write, patience: float) -> bool:
        """True if the write has moved on."""
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            return write not in self._writes or self._advance(write)
        finally:
            self._unlock()

    def _see_out(self, write: _Write) -> None:
        while not write.settled.done():
            time.sleep(POLL_MAX_S)
            self._look(write, PATIENCE_S)

    def _deregister(self, ptr: int, region: Region) -> None:
        """region: kept until NIXL has let go of it."""
        while not self._closed:  # then the registrations go with the agent
            with contextlib.suppress(TransferError), self._turn():
                try:
                    self._agent.deregister_memory(self._registrations.pop(ptr))
                except Exception:  # the memory is merely pinned for longer
                    logger.exception("NIXL could not deregister the memory at %#x", region.start)
                return

    # From here on with the lock.

    def _shut_down(self) -> None:
        """Ends the writes that are going on.

        The end of the agent does. But with copiers, the end of an agent that still writes now and then aborts the
        process (an assertion in UCX's `arbiter.c`). So they get time to end. One that doesn't is left as it is, with
        what it reads, and its write counts as one that may go on.
        """
        deadline = time.monotonic() + LAST_COPIES_S
        while (moving := self._moving()) and time.monotonic() < deadline:
            time.sleep(POLL_MAX_S)
        if moving:
            _keep_for_ever((self._agent, [write.handle for write in moving], self._regions))
        else:
            for write in self._writes:
                self._release(write)
        for handle in list(self._lists):
            self._release_list(handle)
        self._prepared.clear()
        self._registrations.clear()
        self._agent = None
        for write in list(self._writes):
            reason = "the NIXL transport was closed"
            goes_on = any(write is other for other in moving)
            self._settle(write, TransferTimeout(reason, Future()) if goes_on else TransferError(reason))

    def _moving(self) -> list[_Write]:
        """Writes whose bytes threads of NIXL's are copying now."""
        return [write for write in self._writes if self._copiers and write.handle is not None and self._goes_on(write)]

    def _goes_on(self, write: _Write) -> bool:
        try:
            return self._agent.check_xfer_state(write.handle) == "PROC"
        except Exception:  # it failed: that is an end too
            return False

    def _started(self) -> Any:
        if self._agent is None:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(enable_prog_thread=self._receiver, backends=[])
            # A name that no restarted process repeats: a known name with new metadata is refused by the other end.
            with _resting_progress_thread(nixl_agent):
                agent = nixl_agent(f"tilert-{os.getpid()}-{uuid.uuid4().hex[:8]}", config)
            if "UCX" in agent.get_plugin_list():
                with side_by_side(self._copiers):
                    agent.create_backend("UCX", self._ucx_options())
            if "UCX" not in agent.backends:  # NIXL 0.6 to 0.9 only warn
                raise TransferError(f"NIXL {nixl_version()} has no UCX backend, only {sorted(agent.backends)}")
            self._agent = agent
        return self._agent

    def _ucx_options(self) -> dict[str, str]:
        """Batches of two copies and more go to the copiers. NIXL without them takes the options and ignores them."""
        return {"num_threads": str(self._copiers), "split_batch_size": "2"} if self._copiers else {}

    def _advance(self, write: _Write) -> bool:
        """Takes the write as far as it goes without waiting. A write that was posted and is over at once (CMA) leaves
        its next batch to the next call, so that it does not hold up the others, and settles if there is none."""
        try:
            if write.handle is not None:
                state = self._agent.check_xfer_state(write.handle)
                if state == "PROC":
                    write.seen_moving = True
                    return False
                self._finish_batch(write, state)
            if not write.abandoned and write.waiting:
                self._post(write, write.waiting.popleft())
            if write.handle is None and (write.abandoned or not write.waiting):
                self._settle(write, None)
        except Exception as error:  # as in _turn
            self._release(write)
            write.prepared.failed = True
            self._forget_remote_if_idle(write.prepared.meta)
            self._settle(write, _transfer_error(error))
        return True

    def _post(self, write: _Write, batch: list[Range]) -> None:
        chosen = write.prepared.chosen(batch, self._copiers)
        source, target = write.prepared.staged.list, write.prepared.list
        write.handle = self._agent.make_prepped_xfer("WRITE", source, chosen, target, chosen)
        write.posted, write.nbytes, write.seen_moving = time.monotonic(), sum(nbytes for *_, nbytes in batch), False
        state = self._agent.transfer(write.handle)
        if state != "PROC":
            self._finish_batch(write, state)

    def _source(self, sources: Sequence[tuple[int, int]]) -> tuple[int, str]:
        """(device, memory type) of the memory that they are in."""
        if not sources:
            raise TransferError("there is nothing to write")
        start, end = min(sources)[0], max(address + nbytes for address, nbytes in sources)
        region = self._regions.holding(start, end - start)
        regions = [region] if region else [self._regions.find(*source) for source in sources]
        places = {(_device(region), _memory_type(region)) for region in regions}
        if len(places) != 1:
            raise TransferError(f"one write cannot mix memory of {sorted(places)}")
        return places.pop()

    def _finish_batch(self, write: _Write, state: str) -> None:
        self._release(write)
        if state != "DONE":
            raise TransferError(f"NIXL ended the write with {state}")
        took = (time.monotonic() - write.posted) / write.nbytes
        if write.seen_moving:
            self._s_per_byte += (took - self._s_per_byte) / 4
        else:  # it was over before that: the first write of all, which connects, must not delay looks for long
            self._s_per_byte = EARLY * took

    def _release(self, write: _Write) -> None:
        handle, write.handle = write.handle, None
        if handle is not None:
            with contextlib.suppress(Exception):  # a failed handle may refuse; NIXL frees it with the agent
                self._agent.release_xfer_handle(handle)

    def _new_list(self, agent: str, pieces: list[tuple[int, int, int]], kind: str) -> Any:
        """pieces: address, bytes and device. agent: whose memory, by the name that NIXL knows."""
        handle = self._started().prep_xfer_dlist(agent, pieces, kind)
        self._lists.append(handle)
        return handle

    def _remote_list(self, agent: str, targets: list[tuple[int, int, int]], kind: str) -> Any:
        """The receiver's memory type is not on the wire. As TileRT does, it is taken to be ours."""
        try:
            return self._new_list(agent, targets, kind)
        except Exception as error:
            if type(error).__name__ != "nixlNotFoundError":
                raise
            first, last = min(targets)[0], max(address + nbytes for address, nbytes, _ in targets)
            raise TransferError(
                f"NIXL: {error}: the receiver has registered no {kind} of device {targets[0][2]} with all of "
                f"{first:#x} to {last:#x}. If its buffer is of the other kind of memory than the {kind} that planes "
                f"are staged in: decode's --pd-buffer-device and tilert_pd_buffer_device have to say the same"
            ) from error

    def _tidy(self) -> None:
        while self._retired:
            made = self._retired.pop()
            if made.list in self._lists:  # else it went with the agent
                self._release_list(made.list)
            if (prepared := self._prepared.pop(id(made), None)) is not None and prepared.failed:
                self._forget_remote_if_idle(prepared.meta)

    def _release_list(self, handle: Any) -> None:
        self._lists.remove(handle)
        with contextlib.suppress(Exception):  # as in _release
            self._agent.release_dlist_handle(handle)

    def _settle(self, write: _Write, error: TransferError | None) -> None:
        self._writes.remove(write)
        self._ended.append((write, error))

    def _remote(self, meta: bytes) -> str:
        name = self._remotes.pop(meta, None)
        if name is None:
            self._drop_oldest_remotes()
            name = self._add_remote(meta)
        self._remotes[meta] = name
        return name

    def _add_remote(self, meta: bytes) -> str:
        try:
            return _text(self._agent.add_remote_agent(meta))
        except Exception:  # as in _turn: a restarted receiver may come back under a name that we know
            for known in [meta for meta in self._remotes if not self._in_use(meta)]:
                self._forget_remote(known)
            return _text(self._agent.add_remote_agent(meta))

    def _drop_oldest_remotes(self) -> None:
        idle = [meta for meta in self._remotes if not self._in_use(meta)]
        for meta in idle[: max(0, len(self._remotes) - MAX_REMOTES + 1)]:
            self._forget_remote(meta)

    def _in_use(self, meta: bytes) -> bool:
        moving = (write.prepared for write in self._writes if write.handle is not None)
        return any(prepared.meta == meta for prepared in itertools.chain(self._prepared.values(), moving))

    def _forget_remote_if_idle(self, meta: bytes) -> None:
        if not self._in_use(meta):
            self._forget_remote(meta)

    def _forget_remote(self, meta: bytes) -> None:
        name = self._remotes.pop(meta, None)
        if name is not None:
            with contextlib.suppress(Exception):  # a dead receiver: there is nothing to remove
                self._agent.remove_remote_agent(name)


def _keep_for_ever(objects: object) -> None:
    """Not even the end of the interpreter takes them apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


@contextlib.contextmanager
def _resting_progress_thread(agent_class: type) -> Iterator[None]:
    """Agents made meanwhile have a progress thread that sleeps until something arrives.

    NIXL's Python API always asks for a pause of 0, and with that an idle receiver spins on a whole core. The C++ API
    that it calls has the pause (`pthrDelay`, in us); without such an attribute nothing changes.
    """
    bindings = getattr(sys.modules[agent_class.__module__], "nixlBind", None)
    original = getattr(bindings, "nixlAgentConfig", None)
    if not hasattr(original, "pthrDelay"):
        yield
        return

    class Resting(original):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_PAUSE_US if name == "pthrDelay" else value)

    with _MAKING_AGENT:
        bindings.nixlAgentConfig = Resting
        try:
            yield
        finally:
            bindings.nixlAgentConfig = original


def _quiet(write: _Write) -> "Future[None]":
    """A future that is done when the write is, without its error: the caller has its own already."""
    ended: Future[None] = Future()

    def told(settled: "Future[None]") -> None:
        if not isinstance(settled.exception(), TransferTimeout):  # it goes on, and nobody will know when it ends
            ended.set_result(None)

    write.settled.add_done_callback(told)
    return ended


def _transfer_error(error: Exception) -> TransferError:
    return error if isinstance(error, TransferError) else TransferError(f"NIXL: {type(error).__name__}: {error}")


def _memory_type(region: Region) -> str:
    return "VRAM" if region.tensor.is_cuda else "DRAM"


def _device(region: Region) -> int:
    return region.tensor.get_device() if region.tensor.is_cuda else 0


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
