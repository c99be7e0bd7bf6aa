"""The transports for real: a receiver in another process, faults included."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transport_peer import Peer, needs

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import (
    TRANSPORTS,
    TransferError,
    TransferTimeout,
    Transport,
    descriptors,
    make_transport,
    mooncake,
    nixl,
    write_tag,
    zmq,
)

NBYTES = 3 << 20
TAG = write_tag("rid", 1)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


class Source:
    """Registered memory with random bytes."""

    def __init__(self, transport: Transport, nbytes: int = NBYTES) -> None:
        self.memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        transport.register(self.address, nbytes, self.memory)

    def bytes(self, start: int, nbytes: int) -> bytes:
        return self.memory[start : start + nbytes].numpy().tobytes()


def copy(source: Source, peer: Peer, src: int, dst: int, nbytes: int) -> Copy:
    return Copy(source.address + src, peer.address + dst, nbytes, layer=0, plane="kv")


@pytest.fixture(params=TRANSPORTS)
def sender(request: pytest.FixtureRequest) -> Iterator[Transport]:
    needs(request.param)
    transport = make_transport(request.param, "", receiver=False)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def shared_peers() -> Iterator[dict[str, Peer]]:
    peers: dict[str, Peer] = {}
    yield peers
    for peer in peers.values():
        peer.kill()


@pytest.fixture
def peer(sender: Transport, shared_peers: dict[str, Peer]) -> Peer:
    """A receiver that other tests use too, with a buffer of zeros."""
    if sender.name not in shared_peers:
        shared_peers[sender.name] = Peer(sender.name, NBYTES)
    shared_peers[sender.name].clear(TAG)
    return shared_peers[sender.name]


@pytest.fixture
def own_peer(sender: Transport) -> Iterator[Peer]:
    """A receiver that the test may harm."""
    peer = Peer(sender.name, NBYTES)
    peer.clear(TAG)
    yield peer
    peer.kill()


def test_scattered_copies_arrive_and_nothing_else_changes(sender: Transport, peer: Peer) -> None:
    source, rng, unit = Source(sender), random.Random(5), NBYTES // 24
    wanted = bytearray(NBYTES)
    for _ in range(2):  # the second write meets a connection that exists
        copies = []
        for src, dst in zip(rng.sample(range(24), 6), rng.sample(range(24), 6), strict=True):
            offset, nbytes = rng.randrange(unit // 2), rng.randrange(1, unit // 2)
            copies.append(copy(source, peer, src * unit, dst * unit + offset, nbytes))
            wanted[dst * unit + offset : dst * unit + offset + nbytes] = source.bytes(src * unit, nbytes)
        sender.write(peer.meta, copies, TAG, soon())
        assert peer.read() == wanted


@pytest.mark.parametrize("stages", [None, 4, 3, 0])
def test_what_was_prepared_is_written_in_parts_and_nothing_before(
    sender: Transport, peer: Peer, stages: int | None
) -> None:
    """stages: of how many of the copies the sources were staged before; all of them, or it is of no use."""
    source, unit = Source(sender), NBYTES // 4
    copies = [copy(source, peer, at * unit, (3 - at) * unit, unit - at) for at in range(4)]
    with contextlib.ExitStack() as stack:
        staged = None
        if stages is not None:
            staged = stack.enter_context(sender.staged([(c.src, c.nbytes) for c in copies[:stages]]))
        meta = stack.enter_context(sender.prepared(peer.meta, copies, staged))
        assert peer.read() == bytes(NBYTES)
        sender.write(meta, copies[2:], TAG, soon())
        assert peer.read()[2 * unit :] == bytes(NBYTES - 2 * unit)
        sender.write(meta, copies[:1], TAG, soon())
        sender.write(meta, [copy(source, peer, 5, 2 * unit, 7)], TAG, soon())  # not one of them: legal too
    got = peer.read()
    assert got[3 * unit :] == source.bytes(0, unit)
    assert got[2 * unit : 2 * unit + 8] == source.bytes(5, 7) + b"\0"
    assert got[unit : 2 * unit - 2] == source.bytes(2 * unit, unit - 2)
    assert got[: unit - 3] == source.bytes(3 * unit, unit - 3)


def test_what_cannot_be_prepared_is_an_error_of_the_write(sender: Transport, peer: Peer) -> None:
    source = Source(sender)
    wrong = [copy(source, peer, NBYTES - 8, 0, 9)]
    with (
        sender.staged([(copy.src, copy.nbytes) for copy in wrong]) as staged,
        sender.prepared(peer.meta, wrong, staged) as meta,
        pytest.raises(TransferError, match="not in registered memory"),
    ):
        sender.write(meta, wrong, TAG, soon())
    with sender.prepared(peer.meta, wrong) as meta, pytest.raises(TransferError, match="not in registered memory"):
        sender.write(meta, wrong, TAG, soon())
    with sender.prepared({}, wrong) as meta, pytest.raises(TransferError):
        sender.write(meta, [copy(source, peer, 0, 0, 8)], TAG, soon())
    assert peer.read() == bytes(NBYTES)


def test_a_copy_bigger_than_batch_and_chunk(sender: Transport, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "BATCH_BYTES", 70_001)
    monkeypatch.setattr(mooncake, "CHUNK_BYTES", 70_001)
    monkeypatch.setattr(zmq, "CHUNK_BYTES", 70_001)
    source = Source(sender)
    sender.write(peer.meta, [copy(source, peer, 0, 0, 1_000_003), copy(source, peer, 5, 2 << 20, 77)], TAG, soon())
    got = peer.read()
    assert got[:1_000_003] == source.bytes(0, 1_000_003)
    assert got[2 << 20 : (2 << 20) + 77] == source.bytes(5, 77)


def test_source_outside_registered_memory_is_refused(sender: Transport, peer: Peer) -> None:
    source = Source(sender)
    with pytest.raises(TransferError, match="not in registered memory"):
        sender.write(peer.meta, [copy(source, peer, NBYTES - 8, 0, 9)], TAG, soon())
    sender.unregister(source.address)
    with pytest.raises(TransferError, match="not in registered memory"):
        sender.write(peer.meta, [copy(source, peer, 0, 0, 8)], TAG, soon())
    assert peer.read() == bytes(NBYTES)


def test_destination_outside_registered_memory_is_refused(sender: Transport, peer: Peer) -> None:
    source = Source(sender)
    with pytest.raises(TransferError):
        sender.write(peer.meta, [copy(source, peer, 0, NBYTES - 8, 9)], TAG, soon())
    assert peer.read() == bytes(NBYTES)
    sender.write(peer.meta, [copy(source, peer, 0, 0, 9)], TAG, soon())  # an error is not for ever
    assert peer.read()[:9] == source.bytes(0, 9)


def test_a_nixl_buffer_in_the_other_kind_of_memory_is_named(
    sender: Transport, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NIXL says of a buffer on a GPU that is looked for in host memory: here one in host memory, on a GPU."""
    if not isinstance(sender, nixl.NixlTransport):
        pytest.skip("the others write to host memory only")
    source, make = Source(sender), sender._new_list
    looked_for = {"NIXL_INIT_AGENT": "DRAM"}
    monkeypatch.setattr(sender, "_new_list", lambda who, at, _: make(who, at, looked_for.get(who, "VRAM")))
    with pytest.raises(TransferError, match="no DRAM of device 0 with all of 0x.* --pd-buffer-device"):
        sender.write(peer.meta, [copy(source, peer, 0, 0, 9)], TAG, soon())
    monkeypatch.undo()
    sender.write(peer.meta, [copy(source, peer, 0, 0, 9)], TAG, soon())
    assert peer.read()[:9] == source.bytes(0, 9)


def test_dead_receiver_is_an_error_and_its_successor_works(sender: Transport, own_peer: Peer) -> None:
    source = Source(sender)
    one = [copy(source, own_peer, 0, 0, NBYTES)]
    sender.write(own_peer.meta, one, TAG, soon())
    own_peer.kill()
    with pytest.raises(TransferError):
        sender.write(own_peer.meta, one, TAG, soon(3.0))
    successor = Peer(sender.name, NBYTES)
    try:
        successor.clear(TAG)
        sender.write(successor.meta, [copy(source, successor, 0, 0, NBYTES)], TAG, soon())
        assert successor.read() == source.bytes(0, NBYTES)
    finally:
        successor.kill()


def test_stopped_receiver_times_out_and_the_write_settles_later(sender: Transport, own_peer: Peer) -> None:
    source = Source(sender)
    own_peer.stop()
    began = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        sender.write(own_peer.meta, [copy(source, own_peer, 0, 0, NBYTES)], TAG, soon(1.0))
    assert 1.0 <= time.monotonic() - began < 10.0
    assert caught.value.settled.done() is sender.fenced
    own_peer.resume()
    caught.value.settled.result(timeout=60)
    sender.write(own_peer.meta, [copy(source, own_peer, 0, 0, NBYTES)], TAG, soon())
    assert own_peer.read() == source.bytes(0, NBYTES)


@pytest.mark.parametrize("sender", ["nixl", "mooncake"], indirect=True)
def test_overdue_one_sided_write_starts_no_further_batch(
    sender: Transport, own_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(mooncake, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(mooncake, "WINDOW", 1)
    source = Source(sender)
    own_peer.stop()
    with pytest.raises(TransferTimeout) as caught:
        sender.write(own_peer.meta, [copy(source, own_peer, 0, 0, NBYTES)], TAG, soon(0.5))
    own_peer.resume()
    caught.value.settled.result(timeout=60)
    assert own_peer.read()[1 << 20 :] == bytes(NBYTES - (1 << 20))


def test_close_ends_a_write_that_is_going_on(sender: Transport, own_peer: Peer) -> None:
    source = Source(sender)
    own_peer.stop()
    errors: list[Exception] = []

    def write() -> None:
        try:
            sender.write(own_peer.meta, [copy(source, own_peer, 0, 0, NBYTES)], TAG, soon(120.0))
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.5)  # it has been posted, where the transport has that
    sender.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    (error,) = errors
    if getattr(sender, "_copiers", 0):  # threads of NIXL's can't be called off: the caller has to keep both ends
        assert isinstance(error, TransferTimeout) and not error.settled.done()
    else:
        assert not isinstance(error, TransferTimeout)
    with pytest.raises(TransferError, match="closed"):
        sender.write(own_peer.meta, [copy(source, own_peer, 0, 0, 1)], TAG, soon())


def test_two_writers_at_once(sender: Transport, peer: Peer) -> None:
    source, half = Source(sender), NBYTES // 2
    threads = [
        threading.Thread(
            target=sender.write, args=(peer.meta, [copy(source, peer, at, at, half)], TAG, soon()), daemon=True
        )
        for at in (0, half)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert peer.read() == source.bytes(0, NBYTES)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"nixl_meta": "not base64!", "nixl_dev": 0},
        {"nixl_meta": "aGVsbG8="},
        {"session_id": "127.0.0.1"},
        {"session_id": "127.0.0.1:1"},
    ],
)
def test_unusable_meta_is_an_error(sender: Transport, meta: dict[str, object]) -> None:
    source = Source(sender, 64)
    with pytest.raises(TransferError):
        sender.write(meta, [Copy(source.address, 4096, 1, layer=0, plane="kv")], TAG, soon())


@pytest.mark.parametrize("admitted", [[], [write_tag("rid", 2)]])
def test_zmq_receiver_refuses_a_tag_that_is_not_admitted(admitted: list[bytes]) -> None:
    receiver, sender = make_transport("zmq", "127.0.0.1"), make_transport("zmq", "", receiver=False)
    try:
        target, source = Source(receiver, 4096), Source(sender, 4096)
        before = target.bytes(0, 4096)
        receiver.admit(dict.fromkeys(admitted, target.address))
        with pytest.raises(TransferError, match="not admitted"):
            sender.write(receiver.local_meta(""), [Copy(source.address, target.address, 64, 0, "kv")], TAG, soon())
        assert target.bytes(0, 4096) == before
        receiver.admit({TAG: target.address})
        sender.write(receiver.local_meta(""), [Copy(source.address, target.address, 64, 0, "kv")], TAG, soon())
        assert target.bytes(0, 64) == source.bytes(0, 64)
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize(
    ("host", "reached_at", "start"),
    [
        ("127.0.0.1", "10.0.0.9", "tcp://127.0.0.1:"),
        ("::", "10.0.0.9", "tcp://10.0.0.9:"),
        ("", "fe80::1", "tcp://[fe80::1]:"),
        ("0.0.0.0", "10.0.0.9", "tcp://10.0.0.9:"),
    ],
)
def test_zmq_endpoint_is_an_address_that_the_sender_can_reach(host: str, reached_at: str, start: str) -> None:
    receiver = make_transport("zmq", host)
    try:
        assert receiver.local_meta(reached_at)["zmq_endpoint"].startswith(start)
    finally:
        receiver.close()


def test_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown transport 'tcp'; legal: nixl, mooncake, zmq"):
        make_transport("tcp", "")


def test_an_unused_transport_starts_nothing() -> None:
    before = set(threading.enumerate())
    for name in TRANSPORTS:
        transport = make_transport(name, "", receiver=False)
        transport.unregister(4096)
        transport.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_idle_receiver_rests(name: str) -> None:
    """It waits for what arrives; a progress thread that spins would take a core from who decodes."""
    needs(name)
    receiver = make_transport(name, "127.0.0.1")
    receiver.start()
    used, began = time.process_time(), time.monotonic()
    time.sleep(1.5)
    used, passed = time.process_time() - used, time.monotonic() - began
    receiver.close()
    assert used < 0.05 * passed, f"{used:.2f} s of processor time in {passed:.2f} s"


def test_zmq_receiver_keeps_a_transfer_in_its_own_slot() -> None:
    receiver, sender = make_transport("zmq", "127.0.0.1"), make_transport("zmq", "", receiver=False)
    try:
        mine, other, source = Source(receiver, 64), Source(receiver, 64), Source(sender, 64)
        before = other.bytes(0, 64)
        receiver.admit({TAG: mine.address, write_tag("other", 1): other.address})
        with pytest.raises(TransferError, match="not in the slot of transfer"):
            sender.write(receiver.local_meta(""), [Copy(source.address, other.address, 64, 0, "kv")], TAG, soon())
        assert other.bytes(0, 64) == before
    finally:
        sender.close()
        receiver.close()
