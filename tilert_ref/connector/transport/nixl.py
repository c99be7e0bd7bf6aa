"""NIXL over UCX: one-sided writes into a receiver's registered memory.

One thread owns the agent; everybody else hands it commands. What platform.md section 1 measured shapes the rest:

- A write whose deadline has passed goes on, also after its handle was released. So its handle stays here and is polled
  until it ends; `TransferTimeout.settled` says when. Whoever gave up must keep the source, and the control connection,
  until then.
- Over shared memory (CMA) whoever posts a write copies it, and `transfer` keeps Python's lock meanwhile: vLLM's forward
  pass stands still. So a sender of host memory posts to UCX's own threads, `COPIERS` of them: together they copy twice
  as fast as one. Without them `transfer` blocks for the whole copy.
- Writes are posted in batches of `BATCH_BYTES`, so that one big write neither holds up the others nor overruns its
  deadline by much.
- A dead receiver shows as an exception, and its exceptions have no common base class.
- The receiver's notifications are not used: TileRT's receiver never reads them, they would pile up in its memory.
"""

import base64
import contextlib
import ctypes
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TransferError, TransferTimeout
from tilert_ref.connector.transport.copiers import side_by_side, wake_on_time
from tilert_ref.connector.transport.regions import Region, Regions

BATCH_BYTES = 64 << 20
MAX_REMOTES = 32
COMMAND_TIMEOUT_S = 60.0  # starting UCX takes 0.5 to 2 s, more on a loaded machine
POLL_MIN_S, POLL_MAX_S = 2e-5, 2e-3
LAST_COPIES_S = 1.0  # for what copiers are at when the transport is closed
POLL_GROWTH = 1.25
EARLY = 0.85
"""Part of the time that the last writes took for as many bytes, after which a write is looked at for the first time. A
look costs 0.05 ms of a processor that the copiers could use."""
COPIERS = 2
MIN_SHARED_BYTES = 1 << 20  # a smaller batch is not cut for the copiers
PROGRESS_PAUSE_US = 10_000  # longest sleep of UCX's progress thread; what arrives wakes it

_PAGE = 4096
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
    """One `write` call as the owner thread sees it."""

    waiting: deque[list[Copy]]  # batches
    meta: bytes
    device: int
    settled: "Future[None]" = field(default_factory=Future)  # done when no byte moves any more; raises if it failed
    abandoned: bool = False
    handle: Any = None
    posted: float = 0.0  # time.monotonic() of the batch that moves
    nbytes: int = 0  # of that batch


class NixlTransport:
    """Both ends. The agent and its thread start at first use.

    receiver: True starts UCX's own progress thread, without which nothing arrives over TCP while nobody calls NIXL.
    copiers: threads that write for a sender; 0 for none, then `transfer` does it itself.
    """

    name = "nixl"
    fenced = False

    def __init__(self, *, receiver: bool = True, copiers: int = COPIERS) -> None:
        self._receiver = receiver
        self._copiers = 0 if receiver else copiers
        self._regions = Regions()
        # Not SimpleQueue: its get with a short timeout can wait for ever (seen with CPython 3.11, once in thousands of
        # puts), and a write would rest until the next command.
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._agent: Any = None  # from here on: owner thread only
        self._registrations: dict[int, Any] = {}
        self._remotes: dict[bytes, str] = {}  # agent metadata -> name, oldest first
        self._writes: list[_Write] = []
        self._s_per_byte = 0.0  # as the last writes took

    def start(self) -> None:
        self._call(self._started)

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        self._call(lambda: self._register(ptr, nbytes, tensor))

    def unregister(self, ptr: int) -> None:
        with contextlib.suppress(TransferError):  # closed: the agent is gone, and its registrations with it
            self._submit(lambda: self._unregister(ptr))

    def local_meta(self, address: str) -> dict[str, Any]:
        return self._call(self._local_meta)

    def admit(self, tags: Mapping[bytes, int]) -> None:
        """One-sided writes cannot be refused."""

    def write(self, hello_meta: dict[str, Any], copies: Sequence[Copy], tag: bytes, deadline: float) -> None:
        write = _Write(deque(_batches(copies)), *_remote_meta(hello_meta))
        self._submit(lambda: self._writes.append(write))
        try:
            write.settled.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            write.abandoned = True
            raise TransferTimeout("the write missed its deadline and may still be going on", _quiet(write)) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._commands.put(None)
            thread.join(timeout=10)

    # Callers' side of the command queue.

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise TransferError("the NIXL transport is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tilert-nixl", daemon=True)
                self._thread.start()
            self._commands.put(command)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Runs function on the owner thread and returns what it returned. Its errors come back as TransferError."""
        result: Future[Any] = Future()

        def command() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # NIXL's exceptions have no base class
                result.set_exception(_transfer_error(error))

        self._submit(command)
        try:
            return result.result(timeout=COMMAND_TIMEOUT_S)
        except TimeoutError:
            raise TransferError(f"NIXL did not answer within {COMMAND_TIMEOUT_S:.0f} s") from None

    # Owner thread.

    def _run(self) -> None:
        wake_on_time()
        pause = POLL_MIN_S
        while True:
            try:
                command = self._commands.get(timeout=max(pause, self._rest()) if self._writes else None)
            except queue.Empty:
                pause = POLL_MIN_S if self._poll_writes() else min(POLL_GROWTH * pause, POLL_MAX_S)
                continue
            if command is None:
                break
            command()
            self._poll_writes()  # a new write starts now, not after the pause
            pause = POLL_MIN_S
        self._shut_down()

    def _rest(self) -> float:
        """Seconds until the first of the batches that move may have ended."""
        due = (write.posted + EARLY * write.nbytes * self._s_per_byte for write in self._writes)
        return min(min(due) - time.monotonic(), POLL_MAX_S)

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

    def _register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        region = Region(ptr, nbytes, tensor)
        descriptor = [(ptr, nbytes, _device(region), "")]
        self._registrations[ptr] = self._started().register_memory(descriptor, _memory_type(region))
        self._regions.add(ptr, nbytes, tensor)

    def _unregister(self, ptr: int) -> None:
        self._regions.remove(ptr)
        if (registration := self._registrations.pop(ptr, None)) is not None:
            try:
                self._agent.deregister_memory(registration)
            except Exception:  # as in _call; the memory is merely pinned for longer
                logger.exception("NIXL could not deregister the memory at %#x", ptr)

    def _local_meta(self) -> dict[str, Any]:
        regions = [self._regions.find(ptr, 1) for ptr in self._registrations]
        if len({_device(region) for region in regions}) != 1:
            raise TransferError("NIXL needs the receive buffer on exactly one device: hello names only one")
        encoded = base64.b64encode(self._started().get_agent_metadata()).decode()
        return {"nixl_meta": encoded, "nixl_dev": _device(regions[0])}

    def _poll_writes(self) -> bool:
        """Looks at every write once. True if one of them moved on."""
        moved = [self._advance(write) for write in list(self._writes)]
        return any(moved)

    def _advance(self, write: _Write) -> bool:
        """Takes the write as far as it goes without waiting. A write that was posted and is over at once (CMA) leaves
        its next batch to the next call, so that it does not hold up the others, and settles if there is none."""
        try:
            if write.handle is not None:
                state = self._agent.check_xfer_state(write.handle)
                if state == "PROC":
                    return False
                self._finish_batch(write, state)
            if not write.abandoned and write.waiting:
                self._post(write, write.waiting.popleft())
            if write.handle is None and (write.abandoned or not write.waiting):
                self._settle(write, None)
        except Exception as error:  # as in _call
            self._release(write)
            if not self._in_use(write.meta):
                self._forget_remote(write.meta)
            self._settle(write, _transfer_error(error))
        return True

    def _post(self, write: _Write, batch: list[Copy]) -> None:
        agent = self._started()
        device, kind = self._source(batch)
        pieces = _shared_out(batch, self._copiers)
        source = [(src, nbytes, device) for src, _, nbytes in pieces]
        target = [(dst, nbytes, write.device) for _, dst, nbytes in pieces]
        # The receiver's memory type is not on the wire. As TileRT does, it is taken to be ours.
        descriptors = agent.get_xfer_descs(source, kind), agent.get_xfer_descs(target, kind)
        write.handle = agent.initialize_xfer("WRITE", *descriptors, self._remote(write.meta))
        write.posted, write.nbytes = time.monotonic(), sum(copy.nbytes for copy in batch)
        state = agent.transfer(write.handle)
        if state != "PROC":
            self._finish_batch(write, state)

    def _source(self, batch: list[Copy]) -> tuple[int, str]:
        """(device, memory type) that the batch lies on."""
        regions = {self._regions.find(copy.src, copy.nbytes) for copy in batch}
        places = {(_device(region), _memory_type(region)) for region in regions}
        if len(places) != 1:
            raise TransferError(f"one write cannot mix memory of {sorted(places)}")
        return places.pop()

    def _finish_batch(self, write: _Write, state: str) -> None:
        self._release(write)
        if state != "DONE":
            raise TransferError(f"NIXL ended the write with {state}")
        took = (time.monotonic() - write.posted) / write.nbytes
        self._s_per_byte += (took - self._s_per_byte) / 4

    def _release(self, write: _Write) -> None:
        handle, write.handle = write.handle, None
        if handle is not None:
            with contextlib.suppress(Exception):  # a failed handle may refuse; NIXL frees it with the agent
                self._agent.release_xfer_handle(handle)

    def _settle(self, write: _Write, error: TransferError | None) -> None:
        self._writes.remove(write)
        if error is None:
            write.settled.set_result(None)
        else:
            write.settled.set_exception(error)

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
        except Exception:  # as in _call: a restarted receiver may come back under a name that we know
            for known in [meta for meta in self._remotes if not self._in_use(meta)]:
                self._forget_remote(known)
            return _text(self._agent.add_remote_agent(meta))

    def _drop_oldest_remotes(self) -> None:
        idle = [meta for meta in self._remotes if not self._in_use(meta)]
        for meta in idle[: max(0, len(self._remotes) - MAX_REMOTES + 1)]:
            self._forget_remote(meta)

    def _in_use(self, meta: bytes) -> bool:
        return any(write.meta == meta and write.handle is not None for write in self._writes)

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


def _batches(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Cuts the copies into lists of at most BATCH_BYTES; a bigger copy is cut itself."""
    batch: list[Copy] = []
    room = BATCH_BYTES
    for copy in copies:
        if copy.nbytes <= room:
            batch.append(copy)
            room -= copy.nbytes
            continue
        for offset in range(0, copy.nbytes, BATCH_BYTES):
            nbytes = min(BATCH_BYTES, copy.nbytes - offset)
            if nbytes > room:
                yield batch
                batch, room = [], BATCH_BYTES
            batch.append(Copy(copy.src + offset, copy.dst + offset, nbytes, copy.layer, copy.plane))
            room -= nbytes
    if batch:
        yield batch


def _shared_out(batch: Sequence[Copy], copiers: int) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) for each descriptor.

    NIXL gives each copier as many descriptors as the next, one after the other. So if the batch is worth it, each copy
    is cut into a piece for every one of them, and all get as many bytes.
    """
    if not copiers or sum(copy.nbytes for copy in batch) < MIN_SHARED_BYTES:
        return [(copy.src, copy.dst, copy.nbytes) for copy in batch]
    pieces = []
    for number in range(copiers):
        for copy in batch:
            cut = copy.nbytes // copiers // _PAGE * _PAGE
            start, nbytes = number * cut, cut if number < copiers - 1 else copy.nbytes - number * cut
            if nbytes:
                pieces.append((copy.src + start, copy.dst + start, nbytes))
    return pieces


def _quiet(write: _Write) -> "Future[None]":
    """A future that is done when the write is, without its error: the caller has its own already."""
    ended: Future[None] = Future()
    write.settled.add_done_callback(lambda _: ended.set_result(None))
    return ended


def _remote_meta(hello_meta: dict[str, Any]) -> tuple[bytes, int]:
    try:
        return base64.b64decode(hello_meta["nixl_meta"], validate=True), int(hello_meta.get("nixl_dev") or 0)
    except (KeyError, ValueError) as error:
        raise TransferError(f"the receiver's hello has no usable nixl_meta: {error!r}") from error


def _transfer_error(error: Exception) -> TransferError:
    return error if isinstance(error, TransferError) else TransferError(f"NIXL: {type(error).__name__}: {error}")


def _memory_type(region: Region) -> str:
    return "VRAM" if region.tensor.is_cuda else "DRAM"


def _device(region: Region) -> int:
    return region.tensor.get_device() if region.tensor.is_cuda else 0


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
