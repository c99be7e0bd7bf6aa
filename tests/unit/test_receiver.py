"""The receive server against a client that speaks the protocol by hand."""

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from transport_peer import needs

from tilert_ref.connector import admission, codec, receiver, wire
from tilert_ref.connector.codec import Accept, Announce, Done, Reject
from tilert_ref.connector.layout import (
    BF16,
    FP8_DS_MLA,
    BufferLayout,
    Copy,
    model_profile,
    plane_views,
    profile,
    write_plan,
)
from tilert_ref.connector.receiver import HandoffCancelled, HandoffError, HandoffFailed, HandoffTimeout, ReceiveServer
from tilert_ref.connector.transport import TRANSPORTS, TransferError, Transport, make_transport, write_tag

LAYOUT = BufferLayout(model_profile(2, False, False), BF16, max_seq_len=128)
NEVER = threading.Event()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def eventually(condition: Any, seconds: float = 20.0) -> None:
    """Waits for something that another thread of the server does, without an event to wait for."""
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        threading.Event().wait(0.005)


@contextmanager
def serving(layout: BufferLayout = LAYOUT, **options: Any) -> Iterator[ReceiveServer]:
    shape = (options.pop("slots"), layout.total_bytes) if "slots" in options else (layout.total_bytes,)
    buffer = torch.zeros(shape, dtype=torch.uint8)
    transport = options.pop("transport", None) or make_transport("zmq", "127.0.0.1")
    server = ReceiveServer(layout, buffer, transport, **({"host": "127.0.0.1", "port": 0} | options))
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[ReceiveServer]:
    with serving() as server:
        yield server


def announce(
    rid: str = "r", rank: int = 0, seq_len: int = 70, layout: BufferLayout = LAYOUT, **fields: Any
) -> Announce:
    values = {"last_prompt_token": 9, "admission_window_s": 3.0, "tilert_ref": layout.geometry()} | fields
    return Announce(rid=rid, rank=rank, seq_len=seq_len, **values)


@dataclass
class Client:
    """One control connection, hello read."""

    connection: wire.Connection
    hello: codec.Hello

    @classmethod
    def of(cls, server: ReceiveServer, host: str = "127.0.0.1") -> "Client":
        connection = wire.connect(host, server.port, soon())
        return cls(connection, codec.decode_hello(connection.receive(soon())))

    def announce(self, message: Announce) -> Accept | Reject:
        self.connection.send(message, soon())
        return codec.decode_reply(self.connection.receive(soon()))

    def done(self, accept: Accept, **changes: Any) -> None:
        fields = {"done": True, "rid": accept.rid, "rank": accept.rank, "generation": accept.generation} | changes
        self.connection.send(Done(**fields), soon())

    def closed(self) -> bool:
        """Waits until the server closes."""
        with pytest.raises(ConnectionError):
            self.connection.receive(soon())
        return True


def hand_off(server: ReceiveServer, message: Announce) -> Accept:
    client = Client.of(server)
    reply = client.announce(message)
    assert isinstance(reply, Accept), reply
    client.done(reply)
    client.closed()
    return reply


def test_hello_describes_the_buffer(server: ReceiveServer) -> None:
    hello = Client.of(server).hello
    base = server._buffer.data_ptr()
    assert (hello.magic, hello.protocol_version, hello.layout_version) == ("tilert-pd", 2, 2040)
    assert (hello.kv_base, hello.pe_base, hello.ki_base) == (base, base + 2 * 128 * 1024, base + 2 * 128 * 1152)
    assert (hello.transport, hello.max_seq_len, hello.senders, hello.busy) == ("zmq", 128, 1, False)
    assert hello.zmq_endpoint.startswith("tcp://127.0.0.1:") and hello.tilert_ref == LAYOUT.geometry()


def test_hello_of_shards_has_lists() -> None:
    layout = replace(LAYOUT, nshards=2)
    with serving(layout, senders=2, checkpoint="digest") as server:
        hello, base = Client.of(server).hello, server._buffer.data_ptr()
        assert (hello.nshards, hello.senders) == (2, 2)
        assert hello.kv_base == [base, base + layout.shard_bytes]
        assert hello.tilert_ref.checkpoint == "digest"


def test_transfer_before_the_consumer_comes(server: ReceiveServer) -> None:
    accept = hand_off(server, announce(seq_len=2, sampling={"temperature": 0.5}, prompt_token_ids=[1, 2]))
    record = server.wait("r", 20, NEVER)
    assert (record.rid, record.generation, record.seq_len) == ("r", accept.generation, 2)
    assert (record.last_prompt_token, record.sampling, record.prompt_token_ids) == (9, {"temperature": 0.5}, [1, 2])
    assert server.health()["slot"]["claimed"] is True


def test_transfer_while_the_consumer_waits(server: ReceiveServer) -> None:
    threading.Timer(0.1, hand_off, (server, announce())).start()
    server.expect("r")
    assert server.wait("r", 20, NEVER).seq_len == 70


@pytest.mark.parametrize("name", TRANSPORTS)
def test_bytes_land_and_two_ranks_complete_one_request(name: str) -> None:
    needs(name)
    with serving(senders=2, transport=make_transport(name, "127.0.0.1")) as server:
        sender = make_transport(name, "", receiver=False)
        source = torch.arange(64, dtype=torch.uint8)
        sender.register(source.data_ptr(), 64, source)
        for rank in (1, 0):
            client = Client.of(server)
            accept = client.announce(announce(rank=rank))
            target = Copy(source.data_ptr() + 32 * rank, server._buffer.data_ptr() + 100 * rank, 32, 0, "kv")
            sender.write(client.hello.meta(), [target], write_tag(accept.rid, accept.generation), soon())
            client.done(accept)
        server.wait("r", 20, NEVER)
        assert server._buffer[:32].tolist() == list(range(32))
        assert server._buffer[100:132].tolist() == list(range(32, 64))
        sender.close()


def test_records_of_other_requests_are_kept_while_waiting(server: ReceiveServer) -> None:
    hand_off(server, announce("early"))
    with pytest.raises(HandoffTimeout, match=r"no KV for 'late' within 0.2 s; the slots: .*'rid': 'early'"):
        server.wait("late", 0.2, NEVER)
    assert server.health()["records"] == ["early"]
    assert server.wait("early", 20, NEVER).rid == "early"


def test_cancel_ends_a_wait_at_once(server: ReceiveServer) -> None:
    cancelled = threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(HandoffCancelled, match="'r'"):
        server.wait("r", 60, cancelled)
    assert time.monotonic() - began < 10


def test_claimed_buffer_is_nobody_elses_until_released(server: ReceiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNCLAIMED_GRACE_S", 0.0)
    hand_off(server, announce("a"))
    server.wait("a", 20, NEVER)
    reject = Client.of(server).announce(announce("b"))
    assert (reject.error, reject.busy_rid, reject.busy_state) == ("busy", "a", "COMPLETE")
    assert Client.of(server).hello.busy is True
    server.release("a")
    assert hand_off(server, announce("b")).generation == 2


def test_unclaimed_record_makes_room_and_is_forgotten(server: ReceiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_off(server, announce("a"))
    assert Client.of(server).announce(announce("b")).error == "busy"  # still within its grace
    monkeypatch.setattr(admission, "UNCLAIMED_GRACE_S", 0.0)
    hand_off(server, announce("b"))
    assert server.health()["records"] == ["b"]
    with pytest.raises(HandoffTimeout):
        server.wait("a", 0.1, NEVER)


def test_released_rid_is_refused_until_it_is_expected_again(server: ReceiveServer) -> None:
    server.release("r")
    reject = Client.of(server).announce(announce())
    assert (reject.error, reject.detail) == ("cancelling", "no_consumer") and reject.transient
    server.expect("r")
    assert isinstance(Client.of(server).announce(announce()), Accept)


def test_release_during_a_transfer_stops_its_writes_and_keeps_the_slot(server: ReceiveServer) -> None:
    client = Client.of(server)
    accept = client.announce(announce("a"))
    server.release("a")
    sender = make_transport("zmq", "", receiver=False)
    source = torch.ones(8, dtype=torch.uint8)
    sender.register(source.data_ptr(), 8, source)
    copy = Copy(source.data_ptr(), server._buffer.data_ptr(), 8, 0, "kv")
    with pytest.raises(TransferError, match="not admitted"):
        sender.write(client.hello.meta(), [copy], write_tag("a", accept.generation), soon())
    assert not server._buffer[:8].any()
    reject = Client.of(server).announce(announce("b"))
    assert (reject.error, reject.busy_state) == ("busy", "CANCELLING")
    client.connection.close()
    eventually(lambda: server.health()["slot"]["state"] == "FREE")
    hand_off(server, announce("b"))
    sender.close()


@pytest.mark.parametrize(
    "change", [{"rid": "other"}, {"rank": 1}, {"generation": 99}], ids=lambda change: next(iter(change))
)
def test_done_that_does_not_repeat_the_accept_completes_nothing(server: ReceiveServer, change: dict[str, Any]) -> None:
    client = Client.of(server)
    client.done(client.announce(announce()), **change)
    assert client.closed()
    with pytest.raises(HandoffFailed, match="rank 0: done names"):
        server.wait("r", 20, NEVER)
    hand_off(server, announce())  # the rank may come again
    assert server.wait("r", 20, NEVER).rid == "r"


def test_sender_that_gives_up_fails_the_consumer_at_once(server: ReceiveServer) -> None:
    client = Client.of(server)
    accept = client.announce(announce())
    client.done(accept, done=False, error="the write failed")
    with pytest.raises(HandoffFailed, match="handoff of 'r' failed: rank 0: the write failed"):
        server.wait("r", 60, NEVER)
    assert client.closed()
    hand_off(server, announce())  # unless somebody tries again
    assert server.wait("r", 20, NEVER).generation == accept.generation


def test_give_up_of_an_earlier_connection_does_not_fail_a_complete_record(server: ReceiveServer) -> None:
    earlier = Client.of(server)
    accept = earlier.announce(announce())
    hand_off(server, announce())
    earlier.done(accept, done=False)
    assert earlier.closed()
    assert server.wait("r", 20, NEVER).generation == accept.generation


def test_given_up_transfer_makes_room_and_stays_failed(server: ReceiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client.of(server)
    client.done(client.announce(announce("a")), done=False)
    assert client.closed()
    assert Client.of(server).announce(announce("b")).error == "busy"  # still within its grace
    monkeypatch.setattr(admission, "UNCLAIMED_GRACE_S", 0.0)
    hand_off(server, announce("b"))
    with pytest.raises(HandoffFailed, match="handoff of 'a' failed"):
        server.wait("a", 20, NEVER)
    assert server.wait("b", 20, NEVER).rid == "b"


@pytest.mark.parametrize(
    ("message", "error", "detail"),
    [
        (announce(seq_len=129), "seq_len exceeds max_seq_len", None),
        (announce(seq_len=0), "invalid_seq_len", "seq_len is 0"),
        (announce(rank=1), "unknown_rank", r"senders are \[0\]"),
        (announce(tilert_ref=None), "geometry_mismatch", "sent no tilert_ref"),
        (
            announce(tilert_ref=replace(LAYOUT, profile=model_profile(3, False, False)).geometry()),
            "geometry_mismatch",
            "num_layers 3, we have 2",
        ),
    ],
)
def test_announces_that_do_not_fit_are_refused_by_name(
    server: ReceiveServer, message: Announce, error: str, detail: str | None
) -> None:
    client = Client.of(server)
    reject = client.announce(message)
    assert reject.error == error and not reject.transient
    assert detail is None or re.search(detail, reject.detail)
    assert client.closed()
    assert server.health()["slot"]["state"] == "FREE"


def test_published_profiles_need_no_geometry() -> None:
    layout = BufferLayout(profile("dsv32"), FP8_DS_MLA, max_seq_len=64)
    with serving(layout) as server:
        hello = Client.of(server).hello
        assert hello.layout_version == 11
        hand_off(server, announce(seq_len=64, tilert_ref=None))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", 5) + b"{]{]{",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", codec.MAX_FRAME + 1),
        struct.pack("!I", 100) + b"short",
        msgspec.json.encode({"rid": "r"}),
        b"",
    ],
)
def test_garbage_closes_the_connection_and_nothing_else(server: ReceiveServer, data: bytes) -> None:
    client = Client.of(server)
    client.connection._socket.sendall(data)
    client.connection._socket.shutdown(socket.SHUT_WR)
    assert client.closed()
    hand_off(server, announce())


def test_silent_and_dripping_connections_are_closed(server: ReceiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "ANNOUNCE_TIMEOUT_S", 0.3)
    silent, dripping = Client.of(server), Client.of(server)
    stop = threading.Event()

    def drip() -> None:
        with pytest.raises(OSError):
            while not stop.wait(0.05):
                dripping.connection._socket.sendall(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    eventually(lambda: server.health()["open_connections"] == 0, 10)
    assert time.monotonic() - began < 10 and silent.closed()
    thread.join(10)
    stop.set()
    assert not thread.is_alive()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_wildcard_listens_on_both_families(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(host="::", transport=make_transport("zmq", "::")) as server:
        hello = Client.of(server, address).hello
        assert hello.zmq_endpoint.rpartition(":")[0] == ("tcp://[::1]" if ":" in address else "tcp://127.0.0.1")


class Unfenced:
    """A transport whose writes cannot be refused, like NIXL's."""

    fenced = False

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_broken_one_sided_transfer_keeps_the_slot_a_moment_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "SETTLE_S", 0.5)
    with serving(transport=Unfenced(make_transport("zmq", "127.0.0.1"))) as server:
        client = Client.of(server)
        assert isinstance(client.announce(announce("a")), Accept)
        server.release("a")
        client.connection.close()
        began = time.monotonic()
        eventually(lambda: server.health()["slot"]["state"] == "FREE")
        assert 0.3 < time.monotonic() - began < 10


def test_a_foreign_sender_may_still_write_when_its_connection_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileRT's closes it when it gives up on a write, which goes on. Its request fails at once, its slot waits."""
    monkeypatch.setattr(receiver, "SETTLE_S", 0.0)
    monkeypatch.setattr(receiver, "FOREIGN_SETTLE_S", 1.0)
    layout = BufferLayout(profile("dsv32"), FP8_DS_MLA, max_seq_len=64)
    with serving(layout, transport=Unfenced(make_transport("zmq", "127.0.0.1"))) as server:
        client = Client.of(server)
        client.announce(announce("a", seq_len=64, tilert_ref=None))
        began = time.monotonic()
        client.connection.close()
        with pytest.raises(HandoffFailed, match="its connection ended before it was done"):
            server.wait("a", 60, NEVER)
        assert time.monotonic() - began < 1.0
        server.release("a")
        assert server.health()["slot"]["state"] == "CANCELLING"
        eventually(lambda: server.health()["slot"]["state"] == "FREE")
        assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("frame", [b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"\x00\x00\x00\x04\xff\xff\xff\xff"])
def test_a_sender_that_is_not_understood_keeps_its_slot_while_it_is_connected(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be writing: only the end of its connection says that it is not."""
    monkeypatch.setattr(receiver, "SETTLE_S", 0.05)
    with serving(transport=Unfenced(make_transport("zmq", "127.0.0.1"))) as server:
        client = Client.of(server)
        assert isinstance(client.announce(announce("a")), Accept)
        client.connection._socket.sendall(frame)
        with pytest.raises(HandoffFailed, match="rank 0"):
            server.wait("a", 5, NEVER)
        server.release("a")
        time.sleep(0.3)
        assert server.health()["slot"]["state"] == "CANCELLING"
        client.connection.close()
        eventually(lambda: server.health()["slot"]["state"] == "FREE")


def test_accepted_sender_has_a_deadline_only_where_late_writes_are_refused() -> None:
    fenced, unfenced = make_transport("zmq", "127.0.0.1"), Unfenced(make_transport("zmq", "127.0.0.1"))
    for transport, state in ((fenced, 0), (unfenced, 1)):
        with serving(transport=transport, request_timeout=0.3) as server:
            client = Client.of(server)
            client.announce(announce())
            if transport is fenced:
                assert client.closed()
            else:
                with pytest.raises(TimeoutError):
                    client.connection.receive(soon(1.0))
            eventually(lambda server=server, state=state: server.health()["slot"].get("writers") == state)


def test_health_is_bad_while_every_slot_hangs() -> None:
    """A stopped sender: its writes may go on, so the slot can't be given away, and nothing else comes in."""
    with serving(transport=Unfenced(make_transport("zmq", "127.0.0.1")), request_timeout=0.3) as server:
        client = Client.of(server)
        client.announce(announce())
        assert server.health()["ok"] is True
        eventually(lambda: not server.health()["ok"])
        assert "hangs for over 0.3 s" in server.health()["reason"]
        client.connection.close()
        eventually(lambda: server.health()["ok"])


def test_close_ends_waits_connections_and_threads() -> None:
    before = set(threading.enumerate())
    with serving() as server:
        client = Client.of(server)
        client.announce(announce())
        errors: list[Exception] = []

        def wait() -> None:
            try:
                server.wait("r", 60, NEVER)
            except HandoffError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert server.health()["ok"] is True
        server.close()
        waiter.join(20)
        assert "closed" in str(errors[0]) and client.closed()
        assert server.health()["ok"] is False
    eventually(lambda: set(threading.enumerate()) <= before)


# Several slots


class Source:
    """A sender's memory, full of one value, on a transport of its own."""

    def __init__(self, transport: str, value: int) -> None:
        self.transport = make_transport(transport, "", receiver=False)
        self.memory = torch.full((LAYOUT.total_bytes,), value, dtype=torch.uint8)
        self.transport.register(self.memory.data_ptr(), self.memory.nbytes, self.memory)

    def write(self, client: Client, accept: Accept) -> None:
        """The whole prompt, to where hello or accept said."""
        hello = codec.destination(client.hello, accept)
        copies = write_plan(LAYOUT, [self.memory.data_ptr()], LAYOUT, hello.plane_bases(), 70, range(2))
        self.transport.write(hello.meta(), copies, write_tag(accept.rid, accept.generation), soon())


@pytest.mark.parametrize("transport", ["zmq", "nixl"])
def test_the_next_request_arrives_while_the_current_one_is_written_and_read(transport: str) -> None:
    """For real: three requests through two slots, each byte where it belongs."""
    with serving(slots=2, transport=make_transport(transport, "127.0.0.1")) as server:
        sources = [Source(transport, value) for value in (1, 2, 3)]
        planes = [[p for i in range(2) for p in plane_views(LAYOUT, slot, i, 70)[:2]] for slot in server._buffer]

        def holds(slot: int, value: int) -> bool:
            return all((plane == value).all() for plane in planes[slot])

        a, b = Client.of(server), Client.of(server)
        accepts = [a.announce(announce("a")), b.announce(announce("b"))]
        for source, client, accept in zip(sources, (b, a), reversed(accepts), strict=False):
            source.write(client, accept)
            client.done(accept)
            assert client.closed()
        first = server.wait("a", 20, NEVER)
        assert (first.slot, server.wait("b", 20, NEVER).slot) == (0, 1)
        assert holds(0, 2) and holds(1, 1)
        reject = Client.of(server).announce(announce("c"))
        assert (reject.error, reject.transient) == ("busy", True), "both are being read"
        server.release("b")
        c = Client.of(server)
        accept = c.announce(announce("c"))
        sources[2].write(c, accept)
        c.done(accept)
        assert server.wait("c", 20, NEVER).slot == 1
        assert holds(0, 2) and holds(1, 3)
        for source in sources:
            source.transport.close()


def test_our_sender_is_told_the_slot_of_its_request() -> None:
    with serving(slots=2, senders=2) as server:
        base = [slot.data_ptr() for slot in server._buffer]
        a0, b0 = Client.of(server), Client.of(server)
        assert a0.hello.kv_base == b0.hello.kv_base == base[0], "two ranks come together, of one request mostly"
        assert a0.announce(announce("a", any_slot=True)).kv_base is None
        moved = b0.announce(announce("b", any_slot=True))
        assert moved.kv_base == base[1] and moved.pe_base - moved.kv_base == b0.hello.pe_base - b0.hello.kv_base
        b1 = Client.of(server)
        assert b1.hello.kv_base == base[0], "the oldest transfer misses a rank"
        reject = b1.announce(announce("b", rank=1))
        assert (reject.error, reject.busy_rid) == ("busy", "a") and reject.transient
        time.sleep(0.21)
        b1 = Client.of(server)
        assert b1.hello.kv_base == base[1] and b1.announce(announce("b", rank=1)).kv_base is None


def test_a_write_into_the_other_slot_is_refused() -> None:
    with serving(slots=2) as server:
        a, b = Client.of(server), Client.of(server)
        a.announce(announce("a"))
        accept = b.announce(announce("b"))
        source = Source("zmq", 1)
        with pytest.raises(TransferError, match="not in the slot of transfer b'b:2'"):
            source.write(a, accept)
        assert not server._buffer.any()
        source.transport.close()


# Failures that the prefill side reports


def test_a_reported_failure_ends_the_wait_at_once(server: ReceiveServer) -> None:
    client = Client.of(server)
    assert client.hello.takes_failures is True
    client.connection.send(Announce(rid="r", rank=0, failed="all staging memory is in use"), soon())
    assert client.closed()
    with pytest.raises(HandoffFailed, match="'r' failed: rank 0: all staging memory is in use"):
        server.wait("r", 60, NEVER)
    assert server.health()["slot"]["state"] == "FREE"


def test_an_announce_that_is_refused_for_good_ends_the_wait_at_once(server: ReceiveServer) -> None:
    Client.of(server).announce(announce(tilert_ref=None))
    with pytest.raises(HandoffFailed, match=r"rank 0: refused: geometry_mismatch \(layout 2040 is model-defined"):
        server.wait("r", 60, NEVER)


def test_port_in_use_is_an_error_at_start(server: ReceiveServer) -> None:
    with pytest.raises(OSError, match="in use"), serving(port=server.port):
        pass


def test_buffer_must_fit_the_layout() -> None:
    transport = make_transport("zmq", "127.0.0.1")
    for buffer in (torch.zeros(7, dtype=torch.uint8), torch.zeros(LAYOUT.total_bytes, dtype=torch.int8)):
        with pytest.raises(ValueError, match=rf"\[slots, {LAYOUT.total_bytes}\], got {buffer.dtype} "):
            ReceiveServer(LAYOUT, buffer, transport, "127.0.0.1", 0)
    transport.close()
