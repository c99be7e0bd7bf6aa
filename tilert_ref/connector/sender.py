"""Worker half of the plugin, in the background: handshake with a decode node and write a job's planes.

At most one thread per destination, so a slow or dead node holds up nobody else's handoffs; it ends when it has had
nothing to do for a while. Jobs to one destination go one after the other, but a job that a node refused for now waits
aside.

    connect, read hello, check it, announce; what takes time before a write is done where the node has to be waited for
        accept              write the parts as the forward pass delivers them, then done
        busy, cancelling    once more after 0.2, 0.4, 0.8, 1.6 s
        anything else       the job fails: named in the log, and decode is told, so that its request fails at once

Telling decode: a done that is false if it had accepted; else a notice (codec, `failed`) where hello says that those are
taken, on a connection of its own if need be. A node that can't be reached is not told.

The write that missed its deadline may go on (see transport). Then the control connection stays open and the slot stays
ours until it has ended: an open connection is what keeps the receiver from giving its buffer to another request.

Source: protocol.md 3 and 6.3.
"""

import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilert_ref.connector import codec, wire
from tilert_ref.connector.allow import LOOPBACK_HOSTS, AllowList, endpoint_host
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.codec import MAX_REASON, Accept, Announce, Done, HandoffRefused, Hello, ProtocolError
from tilert_ref.connector.extract import Job, Part
from tilert_ref.connector.handshake import read_hello
from tilert_ref.connector.layout import BufferLayout, Copy, Geometry, LayoutError, Source, aimed, read_plan
from tilert_ref.connector.secret import Secret
from tilert_ref.connector.staging import Slot
from tilert_ref.connector.transport import TransferError, TransferTimeout, Transport, write_tag

RETRY_STEP_S = 0.2
HANDSHAKE_TIMEOUT_S = 10.0
PART_TIMEOUT_S = 110.0  # TileRT's server gives up on a silent sender after 120 s
IDLE_S = 30.0
MAX_DESTINATIONS = 256
"""Threads. Whoever reaches vLLM's API can name any port of an allowed host, each one a destination of its own."""

logger = logging.getLogger(__name__)

Destination = tuple[str, int]


@dataclass(frozen=True)
class SenderConfig:
    """What all handoffs of one rank have in common.

    layout: of a staging buffer; hello is checked against it. geometry: goes into announce. senders, rank: number of
    sender ranks, and which one this is. attempts: handshakes per job. write_timeout_s: for the parts that were ready
    together. allowed: hosts that may get KV. secret: if given, only nodes that know it do.
    """

    layout: BufferLayout
    geometry: Geometry
    senders: int = 1
    rank: int = 0
    attempts: int = 5
    write_timeout_s: float = 60.0
    allowed: AllowList = LOOPBACK_HOSTS
    secret: Secret | None = None

    @property
    def admission_window_s(self) -> float:
        """How long a job is retried: the pauses between its attempts, added up."""
        return RETRY_STEP_S * (2 ** (self.attempts - 1) - 1)


class Sender:
    """Takes jobs from the forward pass. The transport is made by `make_transport` when the first job comes."""

    def __init__(self, config: SenderConfig, make_transport: Callable[[], Transport]) -> None:
        self._config = config
        self._make_transport = make_transport
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._queues: dict[Destination, _Queue] = {}
        self._closed = False

    def submit(self, job: Job) -> None:
        """Returns at once."""
        destination = job.claim.host, job.claim.port
        with self._lock:
            waiting = None if self._closed else self._queues.get(destination)
            if waiting is not None:
                waiting.put(_Try(job))
                return
            if not self._closed and len(self._queues) < MAX_DESTINATIONS:
                self._start_thread(destination, job)
                return
            reason = "the sender is closed" if self._closed else f"{len(self._queues)} other destinations are in use"
        if not self._closed:
            logger.error("request %s is not handed off: %s", job.claim.request_id, reason)
        job.fail(reason)
        job.sender_through()

    def report(self, claim: Claim, reason: str) -> None:
        """Tells the decode node that this rank's handoff of claim will not come. Returns at once."""
        with self._lock:
            if self._closed:
                return
        arguments = (claim, self._config, reason)
        threading.Thread(target=_report, args=arguments, name="tilert-send-report", daemon=True).start()

    def start_transport(self) -> None:
        """Starts the transport before the first job needs it. Errors are logged; each job will meet them again."""
        threading.Thread(target=self._warm_up, name="tilert-send-start", daemon=True).start()

    def forget(self, slot: Slot) -> None:
        """The slot's memory is about to be dropped. Returns at once; the transport keeps it as long as it needs it."""
        if slot.registered and self._transport is not None:
            self._transport.unregister(slot.memory.data_ptr())

    def close(self) -> None:
        """Refuses new jobs, gives waiting ones up and ends the transport, with it the writes that are going on."""
        with self._lock:
            self._closed = True
            queues, transport = list(self._queues.values()), self._transport
        for waiting in queues:
            waiting.close()
        if transport is not None:
            transport.close()

    def _start_thread(self, destination: Destination, job: Job) -> None:
        waiting = self._queues[destination] = _Queue()
        waiting.put(_Try(job))
        name = f"tilert-send-{destination[0]}:{destination[1]}"
        threading.Thread(target=self._run, args=(destination, waiting), name=name, daemon=True).start()

    def _run(self, destination: Destination, waiting: "_Queue") -> None:
        while (current := self._next(destination, waiting)) is not None:
            if (refusal := _Attempt(self._config, self._started, current.job).run()) is not None:
                self._retry(replace(current, refusal=refusal), waiting)

    def _next(self, destination: Destination, waiting: "_Queue") -> "_Try | None":
        """The destination's next due job; None, and the thread's end, after IDLE_S without one."""
        while (current := waiting.get(IDLE_S)) is None:
            with self._lock:  # submit holds it too: no job slips in between
                if waiting.empty:
                    del self._queues[destination]
                    return None
        return current

    def _retry(self, current: "_Try", waiting: "_Queue") -> None:
        if current.number < self._config.attempts:
            waiting.put(_Try(current.job, current.number + 1), delay=RETRY_STEP_S * 2 ** (current.number - 1))
            return
        claim, reason = current.job.claim, f"refused {current.number} times, last: {current.refusal}"
        logger.error("handoff of request %s failed: %s", claim.request_id, reason)
        current.job.fail(reason)
        current.job.sender_through()
        self.report(claim, reason)

    def _started(self) -> Transport:
        with self._lock:
            if self._closed:
                raise TransferError("the sender is closed")
            if self._transport is None:
                self._transport = self._make_transport()
            return self._transport

    def _warm_up(self) -> None:
        try:
            self._started().start()
        except TransferError as error:
            logger.error("the transport does not start: %s", error)


@dataclass(frozen=True)
class _Try:
    """The number-th attempt at a job, from 1, and how it was refused."""

    job: Job
    number: int = 1
    refusal: str = ""


class _Queue:
    """What one destination has to do, by the time at which it is due."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tries: list[tuple[float, int, _Try]] = []
        self._order = itertools.count()
        self._closed = False

    @property
    def empty(self) -> bool:
        return not self._tries

    def put(self, item: _Try, delay: float = 0.0) -> None:
        with self._changed:
            if not self._closed:
                heapq.heappush(self._tries, (time.monotonic() + delay, next(self._order), item))
                self._changed.notify()
                return
        self._give_up(item)

    def get(self, patience: float) -> _Try | None:
        """The next due item; None if there is none for `patience` s, or the queue is closed."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (now := time.monotonic()) < deadline and not self._closed:
                if self._tries and self._tries[0][0] <= now:
                    return heapq.heappop(self._tries)[2]
                due = self._tries[0][0] if self._tries else deadline
                self._changed.wait(min(due, deadline) - now)
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._tries = self._tries, []
            self._changed.notify()
        for _, _, item in left:
            self._give_up(item)

    def _give_up(self, item: _Try) -> None:
        item.job.fail("the sender is closed")
        item.job.sender_through()


class _TryLater(Exception):
    """The node refused for now."""


class _Attempt:
    """One handshake and, if the node accepts, the transfer."""

    def __init__(self, config: SenderConfig, transport: Callable[[], Transport], job: Job) -> None:
        self._config = config
        self._transport = transport
        self._job = job
        self._claim = job.claim
        self._connection: wire.Connection | None = None
        self._hello: Hello | None = None
        self._called = self._announced = False  # called: a connection was tried
        self._accept: Accept | None = None

    def run(self) -> str | None:
        """None if the job is over, sent or failed; if the node refused for now, what it said."""
        try:
            self._hand_off()
        except _TryLater as refusal:
            logger.info("request %s: refused for now: %s", self._claim.request_id, refusal)
            self._disconnect()
            return str(refusal)
        except TransferTimeout as error:
            self._failed(error)
            # Not on this connection: its end, or a done, would say that the write has ended.
            _report(self._claim, self._config, self._job.failure)
            error.settled.add_done_callback(lambda _: self._over())
            return None
        except (OSError, ProtocolError, HandoffRefused, LayoutError, TransferError) as error:
            self._failed(error)
        except Exception as error:  # a bug: it must not end the thread, or the destination would never be served again
            logger.exception("unexpected error")
            self._failed(error)
        self._over()
        return None

    def _hand_off(self) -> None:
        self._check_alive()
        transport = self._transport()
        self._register(transport)
        sources = self._sources()
        with contextlib.ExitStack() as stack:
            deadline = _deadline(HANDSHAKE_TIMEOUT_S)
            self._called = True
            self._connection = _connected(self._claim, self._config, deadline)
            staged = stack.enter_context(transport.staged([(s.src, s.nbytes) for s in sources]))  # while hello comes
            self._hello = read_hello(self._connection, self._config.secret, deadline)
            self._check_hello(transport)
            self._announce()
            # While the node decides; its answer seldom names another slot.
            meta, copies = stack.enter_context(self._aimed(transport, sources, staged, self._hello))
            self._accept = self._answer()
            hello = codec.destination(self._hello, self._accept)
            if hello is not self._hello:
                codec.check_destination(hello, self._config.layout)
                meta, copies = stack.enter_context(self._aimed(transport, sources, staged, hello))
            while parts := self._job.take(PART_TIMEOUT_S):
                self._check_alive()
                self._connection.check_open()  # else the receiver takes our writes for ended, and soon reuses the slot
                self._write(transport, meta, copies, parts)
            self._check_alive()
            self._send_done(True)

    def _check_hello(self, transport: Transport) -> None:
        hello, config, seq_len = self._hello, self._config, self._claim.seq_len
        checkpoint = config.geometry.checkpoint
        codec.check_hello(hello, config.layout, config.senders, transport.name, seq_len, checkpoint)
        _check_data_address(hello, config.allowed, self._connection.peer_address)

    def _announce(self) -> None:
        claim, config = self._claim, self._config
        announce = Announce(
            rid=claim.rid,
            rank=config.rank,
            seq_len=claim.seq_len,
            last_prompt_token=claim.last_prompt_token,
            sampling=claim.sampling,
            admission_window_s=config.admission_window_s,
            prompt_token_ids=claim.prompt_token_ids if claim.prompt_token_ids and config.rank == 0 else None,
            tilert_ref=config.geometry,
            any_slot=True,
        )
        self._announced = True
        self._connection.send(announce, _deadline(HANDSHAKE_TIMEOUT_S))

    def _answer(self) -> Accept:
        claim, config = self._claim, self._config
        reply = self._connection.reply(_deadline(HANDSHAKE_TIMEOUT_S))
        if not isinstance(reply, Accept):
            said = wire.describe(reply)
            raise _TryLater(said) if reply.transient else HandoffRefused(f"refused: {said}")
        if (reply.rid, reply.rank) != (claim.rid, config.rank):
            raise HandoffRefused(f"the node accepted {reply.rid!r} rank {reply.rank}, not {claim.rid!r} {config.rank}")
        return reply

    def _register(self, transport: Transport) -> None:
        slot = self._job.slot
        if not slot.registered:
            transport.register(slot.memory.data_ptr(), slot.memory.nbytes, slot.memory)
            slot.registered = True

    def _write(self, transport: Transport, meta: dict[str, Any], copies: list[Copy], parts: list[Part]) -> None:
        for part in parts:
            if part.ready is not None:
                part.ready.synchronize()
        there = {(layer, plane) for part in parts for layer in part.layers for plane in part.planes}
        if strange := {layer for layer, _ in there} - {copy.layer for copy in copies}:
            raise LayoutError(f"layers {sorted(strange)} are not rank {self._config.rank}'s to send")
        copies = [copy for copy in copies if (copy.layer, copy.plane) in there]
        tag = write_tag(self._accept.rid, self._accept.generation, self._config.secret)
        try:
            transport.write(meta, copies, tag, _deadline(self._config.write_timeout_s))
        except TransferTimeout:
            raise
        except TransferError as error:
            raise TransferError(f"{error}{self._version_note()}") from error

    def _sources(self) -> list[Source]:
        """Everything that this rank may write, by layer."""
        slot = self._job.slot
        owned = range(slot.rank, slot.layout.profile.num_layers, slot.layout.nshards)
        return read_plan(slot.layout, slot.bases, self._claim.seq_len, owned)

    @contextlib.contextmanager
    def _aimed(
        self, transport: Transport, sources: list[Source], staged: Any, hello: Hello
    ) -> Iterator[tuple[dict[str, Any], list[Copy]]]:
        """Gets ready for writes into hello's slot: hello's meta, as the transport prepared it, and the copies."""
        target = _resized(self._job.slot.layout, hello.max_seq_len, hello.shard_count)
        copies = aimed(sources, target, hello.plane_bases())
        with transport.prepared(hello.meta(), copies, staged) as meta:
            yield meta, copies

    def _send_done(self, done: bool, error: str | None = None) -> None:
        """done False tells a receiver of ours that nothing more comes; to TileRT's it is as good as closing."""
        accept = self._accept
        message = Done(done=done, rid=accept.rid, rank=accept.rank, generation=accept.generation, error=error)
        self._connection.send(message, _deadline(HANDSHAKE_TIMEOUT_S))

    def _version_note(self) -> str:
        """Different NIXL versions may not talk to each other, and their own error does not say so."""
        hello = self._hello
        ours, theirs = self._config.geometry.nixl_version, hello.tilert_ref and hello.tilert_ref.nixl_version
        return f" (NIXL {theirs} at decode, {ours} here)" if ours and theirs and ours != theirs else ""

    def _check_alive(self) -> None:
        if self._job.failure is not None:
            raise HandoffRefused(self._job.failure)

    def _failed(self, error: Exception) -> None:
        claim = self._claim
        reason = f"{type(error).__name__}: {error}"
        logger.error("handoff of request %s to %s:%d failed: %s", claim.request_id, claim.host, claim.port, reason)
        self._job.fail(reason)

    def _over(self) -> None:
        try:
            if self._job.failure is not None:
                with contextlib.suppress(OSError):  # a peer that is gone needs no telling
                    self._tell(self._job.failure[:MAX_REASON])
        finally:
            self._disconnect()
            self._job.sender_through()

    def _tell(self, reason: str) -> None:
        if self._accept is not None:
            self._send_done(False, reason)
        elif not self._called:
            _report(self._claim, self._config, reason)
        elif self._hello is not None and not self._announced:  # else the node refused it, and knows
            _notify(self._connection, self._hello, self._claim, self._config.rank, reason)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


@functools.lru_cache(64)  # the node's is the same for each of its requests
def _resized(layout: BufferLayout, max_seq_len: int, nshards: int) -> BufferLayout:
    return replace(layout, max_seq_len=max_seq_len, nshards=nshards)


def _check_data_address(hello: Hello, allowed: AllowList, peer: str) -> None:
    """The data goes to the node that we talk to, or to another allowed one: hello must not send us anywhere else.

    NIXL's metadata is a closed format: what is in it can't be checked here.
    """
    for name, scheme in (("zmq_endpoint", "tcp://"), ("session_id", "")):
        endpoint = getattr(hello, name)
        if endpoint is None:
            continue
        host = endpoint_host(endpoint, scheme)
        if host is None:
            raise HandoffRefused(f"decode's {name} is {endpoint[:256]!r}; legal: {scheme}ADDRESS:PORT")
        if host != peer and (refused := allowed.refusal_of_address(host)):
            raise HandoffRefused(f"decode's {name} names another host than {peer}: {refused}")


def _report(claim: Claim, config: SenderConfig, reason: str) -> None:
    deadline = _deadline(HANDSHAKE_TIMEOUT_S)
    try:
        with contextlib.closing(_connected(claim, config, deadline)) as connection:
            hello = read_hello(connection, config.secret, deadline)
            with contextlib.suppress(OSError):
                _notify(connection, hello, claim, config.rank, reason)
    except (OSError, ProtocolError, HandoffRefused) as error:
        logger.warning("%s:%d can't be told that request %s failed: %s", claim.host, claim.port, claim.rid, error)


def _connected(claim: Claim, config: SenderConfig, deadline: float) -> wire.Connection:
    return wire.connect(claim.host, claim.port, deadline, config.allowed)


def _notify(connection: wire.Connection, hello: Hello, claim: Claim, rank: int, reason: str) -> None:
    if hello.takes_failures:
        notice = Announce(rid=claim.rid, rank=rank, failed=reason[:MAX_REASON])
        connection.send(notice, _deadline(HANDSHAKE_TIMEOUT_S))


def _deadline(seconds: float) -> float:
    return time.monotonic() + seconds
