"""The decode side of the control plane: sockets and threads around `admission.Admission`.

One thread accepts; each connection has a short-lived thread, which carries one rank's transfer of one request. Every
decision is Admission's, taken under one lock.

    server = ReceiveServer(layout, buffer, transport, host="::", port=5556)
    server.start()
    server.expect(rid)
    try:
        record = server.wait(rid, timeout=120, cancelled=event)   # from here on slot record.slot is ours to read
        ...
    finally:
        server.release(rid)
"""

import contextlib
import itertools
import logging
import socket
import threading
import time
from typing import Any

import torch
from msgspec import structs

from tilert_ref.connector import codec, wire
from tilert_ref.connector.admission import (
    Action,
    Admission,
    Announced,
    Claimed,
    Close,
    Closed,
    Completed,
    Connected,
    DoneReceived,
    Event,
    Evicted,
    Expected,
    GaveUp,
    Offer,
    Record,
    Released,
    Reply,
)
from tilert_ref.connector.allow import LOOPBACK_PEERS, AllowList
from tilert_ref.connector.codec import MAX_REASON, Accept, Done
from tilert_ref.connector.guests import Full, Guests
from tilert_ref.connector.handshake import greet
from tilert_ref.connector.layout import BufferLayout
from tilert_ref.connector.secret import Secret
from tilert_ref.connector.transport import TransferError, Transport, write_tag
from tilert_ref.connector.transport.nixl import nixl_version

MAX_CONNECTIONS = 64
MAX_PER_PEER = 32
"""From one address: four prefill instances on one machine, with eight ranks each."""
ANNOUNCE_TIMEOUT_S = 30.0
"""A sender announces as soon as it has read hello. This bounds what a silent or dripping connection costs."""
REPLY_TIMEOUT_S = 10.0
SETTLE_S = 1.0
"""After an accepted connection of one of our senders broke off: how long bytes that the dead sender's kernel still held
may land. Ours closes it only when its write has ended, or with its process."""
FOREIGN_SETTLE_S = 30.0
"""The same for other senders: TileRT's closes it when it has given up on a write, which then goes on."""
CANCEL_POLL_S = 0.05

logger = logging.getLogger(__name__)


class HandoffError(Exception):
    """The KV of a request cannot be had."""


class HandoffTimeout(HandoffError):
    """It did not arrive in time."""


class HandoffFailed(HandoffError):
    """A rank of the prefill side will not deliver. The text says why, as far as this side knows."""


class HandoffCancelled(HandoffError):
    """The consumer's cancel event was set."""


class ReceiveServer:
    """Takes requests' KV into receive slots, one request per slot.

    Args:
        layout: of each slot.
        buffer: uint8 [layout.total_bytes], one slot, or [slots, layout.total_bytes], in host memory.
        transport: the receiving end; registered and closed by this server.
        host, port: where to listen for control connections; port 0 picks a free one.
        senders: ranks 0 .. senders-1 make a request complete.
        request_timeout: seconds, see Admission; also the patience with an accepted sender if the transport is fenced.
        checkpoint: digest of the decode side's checkpoint, published in hello; None if not known. Senders that name
            another one are refused.
        peers: whose control connections are taken at all.
        secret: if given, only senders that know it get hello's addresses.
    """

    def __init__(
        self,
        layout: BufferLayout,
        buffer: torch.Tensor,
        transport: Transport,
        host: str,
        port: int,
        senders: int = 1,
        request_timeout: float = 120.0,
        checkpoint: str | None = None,
        peers: AllowList = LOOPBACK_PEERS,
        secret: Secret | None = None,
    ) -> None:
        if buffer.dtype != torch.uint8 or buffer.shape[-1:] != (layout.total_bytes,) or buffer.dim() > 2:
            got = f"{buffer.dtype} {list(buffer.shape)}"
            legal = f"torch.uint8 [{layout.total_bytes}] or [slots, {layout.total_bytes}]"
            raise ValueError(f"the receive buffer must be {legal}, got {got}")
        self._layout = layout
        self._buffer = buffer
        self._slots = list(buffer) if buffer.dim() == 2 else [buffer]
        self._transport = transport
        self._host, self._wanted_port = host, port
        self._senders = senders
        self._request_timeout = request_timeout
        self._peers = peers
        self._secret = secret
        self._guests = Guests(MAX_CONNECTIONS, MAX_PER_PEER)
        self._refused = 0  # connections that were closed before hello
        self._geometry = layout.geometry(nixl_version() if transport.name == "nixl" else None, checkpoint)
        ranks = frozenset(range(senders))
        self._admission = Admission(ranks, layout.max_seq_len, request_timeout, layout, len(self._slots), checkpoint)
        self._changed = threading.Condition()
        self._records: dict[str, Record] = {}
        self._admitted: dict[bytes, int] = {}  # what a fenced transport lets through: tag -> address of a slot
        self._connections: dict[int, wire.Connection] = {}
        self._serving: set[threading.Thread] = set()
        self._ids = itertools.count()
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def port(self) -> int:
        if self._listener is None:
            raise RuntimeError("the receive server is not started")
        return self._listener.getsockname()[1]

    def start(self) -> None:
        """Registers the buffer and binds; raises what the transport or the socket raises."""
        for slot in self._slots:
            self._transport.register(slot.data_ptr(), slot.nbytes, slot)
        self._transport.admit({})
        self._listener = wire.listen(self._host, self._wanted_port)
        self._acceptor = threading.Thread(target=self._accept_loop, name="tilert-accept", daemon=True)
        self._acceptor.start()

    def expect(self, rid: str) -> None:
        """A consumer wants rid: its announces are accepted again, also if it was released before."""
        self._apply(Expected(rid))

    def wait(
        self, rid: str, timeout: float, cancelled: threading.Event, announce_timeout: float | None = None
    ) -> Record:
        """Blocks until rid's KV is complete and claims its slot, which then stays as it is until `release(rid)`.

        announce_timeout: give up when rid has not been offered for so long, seconds, while nobody transfers anything to
        this node (a sender may be busy with another request). It finds what no message can tell: a prefill node that
        can't reach this one.

        Raises HandoffTimeout, HandoffCancelled, HandoffFailed, or HandoffError if the server is closed.
        """
        deadline = time.monotonic() + timeout
        seen = time.monotonic()
        with self._changed:
            while True:
                if cancelled.is_set():
                    raise HandoffCancelled(f"cancelled while waiting for the KV of {rid!r}")
                if self._closing.is_set():
                    raise HandoffError("the receive server is closed")
                if rid in self._records:
                    self._admission.handle(Claimed(rid), time.monotonic())
                    return self._records.pop(rid)
                if (reason := self._admission.failure(rid)) is not None:
                    raise HandoffFailed(f"the handoff of {rid!r} failed: {reason}")
                now = time.monotonic()
                if self._admission.announced(rid, now) or self._admission.transferring():
                    seen = now
                if announce_timeout is not None and now - seen >= announce_timeout:
                    text = f"no prefill node offered the KV of {rid!r} within {announce_timeout:g} s"
                    raise HandoffFailed(f"{text}: can it reach this node's control port?")
                remaining = deadline - now
                if remaining <= 0:
                    slots = self._snapshot()["slots"]
                    raise HandoffTimeout(f"no KV for {rid!r} within {timeout:g} s; the slots: {slots}")
                self._changed.wait(min(remaining, CANCEL_POLL_S))

    def release(self, rid: str) -> None:
        """The consumer is through with rid, or no longer wants it. Legal at any time."""
        with self._changed:
            self._records.pop(rid, None)
            self._apply(Released(rid))

    def health(self) -> dict[str, Any]:
        """For health pages: `ok` is False, and `reason` says why, when no KV can come in."""
        with self._changed:
            alive = self._acceptor is not None and self._acceptor.is_alive() and not self._closing.is_set()
            stuck = self._admission.stuck(time.monotonic())
            hangs = f"every slot is held by a transfer that hangs for over {self._request_timeout:g} s"
            return {
                "ok": alive and not stuck,
                "reason": "" if alive and not stuck else hangs if alive else "it takes no connections",
                "transport": self._transport.name,
                "open_connections": len(self._connections),
                "refused_connections": self._refused,
                "records": sorted(self._records),
                "slot": self._snapshot(),
                "slots": self._snapshot()["slots"],
            }

    def close(self) -> None:
        """Ends threads, connections and the transport. Senders see their connection close without an answer."""
        self._closing.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
        with self._changed:
            connections, serving = list(self._connections.values()), list(self._serving)
            self._changed.notify_all()
        for connection in connections:
            connection.interrupt()
        for thread in [self._acceptor, *serving]:
            if thread is not None:
                thread.join(timeout=5)
        self._transport.close()

    def _accept_loop(self) -> None:
        while not self._closing.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():  # out of descriptors, or the peer is gone already
                    logger.error("cannot accept a control connection: %s", error)
                    self._closing.wait(0.1)
                continue
            try:
                self._start_serving(sock, wire.plain_address(address[0]))
            except (OSError, RuntimeError) as error:  # the peer is gone already; no thread can be started
                self._refuse(sock, str(error))

    def _start_serving(self, sock: socket.socket, peer: str) -> None:
        if refused := self._peers.refusal_of_address(peer):
            self._refuse(sock, refused)
            return
        connection = wire.Connection(sock)
        thread = threading.Thread(target=self._serve_thread, args=(connection,), name="tilert-control", daemon=True)
        with self._changed:
            try:
                leaver = self._guests.enter(connection, peer)
            except Full as error:
                self._refuse(sock, str(error))
                return
            self._serving.add(thread)
        if leaver is not None:
            leaver.interrupt()  # it has announced nothing, so nothing of it can be lost
        try:
            thread.start()
        except RuntimeError:
            self._left(connection, thread)
            raise

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        sock.close()
        with self._changed:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, ...: strangers must not fill the log
                logger.error("refused a control connection (number %d): %s", self._refused, reason)

    def _left(self, connection: wire.Connection, thread: threading.Thread) -> None:
        with self._changed:
            self._guests.leave(connection)
            self._serving.discard(thread)

    def _serve_thread(self, connection: wire.Connection) -> None:
        try:
            self._serve(connection)
        except (OSError, codec.ProtocolError, TransferError) as error:
            if not self._closing.is_set():
                logger.warning("control connection ended: %s", error)
        finally:
            self._left(connection, threading.current_thread())

    def _serve(self, connection: wire.Connection) -> None:
        conn = next(self._ids)
        with self._changed:
            self._connections[conn] = connection
            (offer,) = self._apply(Connected(conn))
        finished = accepted = False
        try:
            if self._closing.is_set():  # too late for close() to see this connection
                return
            deadline = time.monotonic() + ANNOUNCE_TIMEOUT_S
            greet(connection, self._hello(connection, offer), self._secret, deadline)
            announce = connection.announce(deadline)
            self._check_announce(connection, announce)
            if (reply := self._reply(conn, announce)) is None:
                return
            accepted = isinstance(reply, Accept)
            connection.send(reply, time.monotonic() + REPLY_TIMEOUT_S)
            if accepted:
                finished = self._take_done(conn, connection, reply)
        finally:
            if accepted and not finished:
                self._lost(conn, connection, announce, reply)
            with self._changed:
                self._connections.pop(conn, None)
                self._apply(Closed(conn))
            connection.close()

    def _take_done(self, conn: int, connection: wire.Connection, accept: Accept) -> bool:
        """Whether the accepted sender is done. What can't be understood fails its request, but says nothing about its
        writes: such a connection goes on to count as one that writes."""
        try:
            done = connection.done(self._done_deadline())
            if (done.rid, done.rank, done.generation) != (accept.rid, accept.rank, accept.generation):
                got = f"{done.rid!r}, rank {done.rank}, generation {done.generation}"
                raise codec.ProtocolError(f"done names {got}; accepted was generation {accept.generation}")
        except codec.ProtocolError as error:
            logger.warning("rank %d of %r: %s", accept.rank, accept.rid, error)
            done = Done(rid=accept.rid, rank=accept.rank, generation=accept.generation, error=str(error)[:MAX_REASON])
        self._apply(DoneReceived(conn, done))
        time.sleep(0)  # what is left to do here takes 0.1 ms: who waits for the record goes first
        return done.done

    def _check_announce(self, connection: wire.Connection, announce: codec.Announce) -> None:
        """Counts the connection as busy. Raises ProtocolError for lengths that admission doesn't look at."""
        with self._changed:
            if not self._guests.announced(connection):
                raise wire.ConnectionLost(f"{connection.peer} announced too late: its place was given away")
        scales, layers = len(announce.kv_scales or ()), self._layout.profile.num_layers
        if scales not in (0, layers):
            raise codec.ProtocolError(f"{scales} kv_scales for {layers} layers")
        if announce.prompt_token_ids and (ids := len(announce.prompt_token_ids)) != announce.seq_len:
            raise codec.ProtocolError(f"{ids} prompt_token_ids for seq_len {announce.seq_len}")

    def _hello(self, connection: wire.Connection, offer: Offer) -> codec.Hello:
        hello = codec.make_hello(
            self._layout,
            self._shards(offer.slot),
            transport=self._transport.name,
            senders=self._senders,
            busy=offer.busy,
            meta=self._transport.local_meta(connection.local_address),
            geometry=self._geometry,
        )
        return structs.replace(hello, takes_failures=True)

    def _shards(self, slot: int) -> list[int]:
        """Addresses of a slot's shards."""
        base = self._slots[slot].data_ptr()
        return [base + shard * self._layout.shard_bytes for shard in range(self._layout.nshards)]

    def _done_deadline(self) -> float | None:
        """Until when an accepted sender must be done.

        A one-sided write goes on as long as its sender lives, and only the end of this connection says that it is
        over. So without a fence there is no deadline: the slot stays taken, health shows it, TCP keepalive finds a
        dead machine.
        """
        return time.monotonic() + self._request_timeout if self._transport.fenced else None

    def _lost(self, conn: int, connection: wire.Connection, announce: codec.Announce, accept: Accept) -> None:
        """An accepted sender will not be done: the consumer learns it at once, the slot waits for late writes."""
        error = "its connection ended before it was done"
        done = codec.Done(rid=accept.rid, rank=accept.rank, generation=accept.generation, error=error)
        self._apply(DoneReceived(conn, done))
        if not self._transport.fenced:
            connection.await_end()  # as long as its sender has it open, its writes may be going on
            self._closing.wait(FOREIGN_SETTLE_S if announce.tilert_ref is None else SETTLE_S)

    def _reply(self, conn: int, announce: codec.Announce) -> Accept | codec.Reject | None:
        """None: it was a notice of a failure, or an announce that gets no answer."""
        reply = next((a for a in self._apply(Announced(conn, announce)) if isinstance(a, Reply)), None)
        if reply is None:
            logger.warning("rank %d of %r will not come: %s", announce.rank, announce.rid, announce.failed)
            return None
        if isinstance(reply.message, codec.Reject):
            logger.warning("refused rank %d of %r: %s", announce.rank, announce.rid, wire.describe(reply.message))
        elif reply.moved_to is not None:
            return codec.name_bases(reply.message, self._layout, self._shards(reply.moved_to))
        return reply.message

    def _apply(self, event: Event) -> list[Action]:
        """Feeds the state machine and does what concerns records and the transport; replies are left to the caller."""
        with self._changed:
            actions = self._admission.handle(event, time.monotonic())
            for action in actions:
                self._note(action)
            if self._transport.fenced:
                self._admit()
            if not all(map(_unremarkable, actions)):
                self._changed.notify_all()
        return actions

    def _note(self, action: Action) -> None:
        match action:
            case Completed(record):
                self._records[record.rid] = record
            case GaveUp(rid, _, reason):
                logger.warning("the handoff of %r failed: %s", rid, reason)
            case Evicted(rid, _):
                self._records.pop(rid, None)
                logger.warning("the KV of %r was not claimed in time and makes room for another request", rid)
            case Offer() | Reply() | Close():
                pass  # Close: every connection thread closes its own when it has nothing left to say
            case _:
                raise TypeError(f"unknown admission action {action!r}")

    def _admit(self) -> None:
        """Tells the transport which transfers may write, each into its own slot only."""
        writable = self._admission.writable().items()
        admitted = {write_tag(*transfer, self._secret): self._slots[slot].data_ptr() for transfer, slot in writable}
        if admitted != self._admitted:
            self._admitted = admitted
            self._transport.admit(admitted)

    def _snapshot(self) -> dict[str, Any]:
        return self._admission.snapshot(time.monotonic())


def _unremarkable(action: Action) -> bool:
    """Nothing for those who wait for a record. Waking them would hold up the sender that waits for its reply."""
    return isinstance(action, Offer) or (isinstance(action, Reply) and isinstance(action.message, Accept))
