"""Peers that mean harm, on bare sockets: what they send is refused, and nobody else is held up by it."""

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tilert_ref.connector import codec, receiver, wire
from tilert_ref.connector.allow import EVERYBODY, AllowList, peers
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.codec import Accept, Announce, Done
from tilert_ref.connector.extract import Job, Part
from tilert_ref.connector.guests import Full, Guests
from tilert_ref.connector.handshake import read_hello
from tilert_ref.connector.layout import BF16, PLANES, BufferLayout, bf16_row, model_profile
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import Slot
from tilert_ref.connector.transport import make_transport, write_tag

LAYOUT = BufferLayout(model_profile(2, False, False), BF16, max_seq_len=128)
STRANGERS = peers(["10.0.0.0/8"])  # a list that this machine is not on
LIMIT_S = 20.0


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def eventually(condition: Any) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        threading.Event().wait(0.005)


@contextmanager
def serving(**options: Any) -> Iterator[ReceiveServer]:
    buffer = torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)
    transport = make_transport("zmq", "127.0.0.1", peers=options.get("peers", peers(None)))
    server = ReceiveServer(LAYOUT, buffer, transport, **({"host": "127.0.0.1", "port": 0} | options))
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[ReceiveServer]:
    with serving() as server:
        yield server


def frame(payload: Any) -> bytes:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return struct.pack("!I", len(data)) + data


def raw(server: ReceiveServer, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), LIMIT_S, source_address=(source, 0))


def read_frame(sock: socket.socket) -> dict[str, Any]:
    connection = sock.makefile("rb")
    (length,) = struct.unpack("!I", connection.read(4))
    return json.loads(connection.read(length))


def ended(sock: socket.socket) -> bool:
    """Waits until the server has closed, whatever it said before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def announce(rid: str = "r", **fields: Any) -> dict[str, Any]:
    geometry = {"num_layers": 2, "has_mtp": False, "has_index": False, "kv_bytes": 1024, "pe_bytes": 128}
    return {"rid": rid, "rank": 0, "seq_len": 7, "tilert_ref": geometry} | fields


def hand_off(server: ReceiveServer, rid: str = "honest") -> None:
    """An honest sender's whole handoff."""
    connection = wire.connect("127.0.0.1", server.port, soon())
    connection.hello(soon())
    message = Announce(rid=rid, rank=0, seq_len=7, tilert_ref=LAYOUT.geometry())
    connection.send(message, soon())
    accept = connection.reply(soon())
    assert isinstance(accept, Accept), accept
    connection.send(Done(done=True, rid=rid, rank=0, generation=accept.generation), soon())
    assert server.wait(rid, LIMIT_S, threading.Event()).seq_len == 7
    server.release(rid)
    connection.close()


# The control port


def test_a_peer_that_is_not_listed_gets_no_hello() -> None:
    with serving(peers=STRANGERS) as server:
        for _ in range(5):
            assert raw(server).recv(1) == b""
        eventually(lambda: server.health()["refused_connections"] == 5)
        assert server.health()["open_connections"] == 0


def test_ipv4_behind_a_dual_stack_socket_is_ipv4() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(host="::", peers=peers(["127.0.0.2"])) as server:
        assert read_frame(raw(server, "127.0.0.2"))["magic"] == "tilert-pd"
        assert raw(server).recv(1) == b""  # 127.0.0.1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seq_len": 2**62}, "seq_len exceeds max_seq_len"),
        ({"seq_len": -(2**63)}, "invalid_seq_len"),
        ({"rank": 2**31 - 1}, "unknown_rank"),
        ({"kv_scales": [2.0, 1.0]}, "unsupported_kv_scales"),
        ({"tilert_ref": announce()["tilert_ref"] | {"kv_bytes": 10**300}}, None),
        ({"seq_len": 2**63}, None),
        ({"seq_len": 1e30}, None),
        ({"rank": 2**31}, None),
        ({"kv_scales": [1.0]}, None),
        ({"kv_scales": [1.0] * 5000}, None),
        ({"prompt_token_ids": [1] * 8}, None),
        ({"prompt_token_ids": [2**31] * 7}, None),
        ({"prompt_token_ids": [-1] * 7}, None),
        ({"admission_window_s": 1e300}, None),
        ({"sampling": {"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}}, None),
        ({"tilert_ref": announce()["tilert_ref"] | {"nixl_version": "1" * 257}}, None),
    ],
    ids=str,
)
def test_announces_with_wild_numbers_and_lengths(
    server: ReceiveServer, fields: dict[str, Any], reason: str | None
) -> None:
    """reason None: not a legal message, so it gets no answer (protocol.md 3.2)."""
    sock = raw(server)
    read_frame(sock)
    sock.sendall(frame(announce(**fields)))
    if reason:
        assert read_frame(sock)["error"] == reason
    assert ended(sock) if reason else sock.recv(1) == b""
    assert server.health()["slot"]["state"] == "FREE"
    hand_off(server)


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"1e999", b"-1", b'"3"'])
def test_an_admission_window_that_is_no_number_of_seconds(server: ReceiveServer, literal: bytes) -> None:
    sock = raw(server)
    read_frame(sock)
    sock.sendall(frame(json.dumps(announce()).encode()[:-1] + b',"admission_window_s":' + literal + b"}"))
    assert sock.recv(1) == b""
    hand_off(server)


def test_each_phase_has_its_own_frame_limit(server: ReceiveServer) -> None:
    too_long = struct.pack("!I", codec.MAX_SMALL + 1)
    sock = raw(server)
    read_frame(sock)
    sock.sendall(frame(announce()))
    assert read_frame(sock)["accepted"] is True
    sock.sendall(too_long)  # a header alone is enough
    assert sock.recv(1) == b""
    together = raw(server)
    read_frame(together)
    done = {"done": True, "rid": "s", "rank": 0, "generation": 2, "pad": "x" * codec.MAX_SMALL}
    together.sendall(frame(announce("s")) + frame(done))  # the second frame arrives under the first one's limit
    ended(together)
    assert server.health()["records"] == []
    server.release("r")
    server.release("s")
    hand_off(server)


@pytest.mark.parametrize("sources", [["127.0.0.1"], ["127.0.0.2", "127.0.0.3", "127.0.0.4"]])
def test_idle_connections_delay_nobody(server: ReceiveServer, sources: list[str]) -> None:
    """From one address or from several, more than there is room for: the oldest go."""
    count = receiver.MAX_CONNECTIONS + 8
    idle = [raw(server, source) for source in itertools.islice(itertools.cycle(sources), count)]
    eventually(lambda: server.health()["open_connections"] <= receiver.MAX_CONNECTIONS)
    began = time.monotonic()
    hand_off(server)
    assert time.monotonic() - began < 5.0  # their announce deadline is 30 s
    read_frame(idle[0])
    assert ended(idle[0]) and server.health()["open_connections"] <= receiver.MAX_CONNECTIONS
    for sock in idle:
        sock.close()


def test_one_peer_cannot_take_every_place(server: ReceiveServer) -> None:
    """Connections that have announced are not closed for others, but a peer has its share of them only."""
    busy = []
    for _ in range(receiver.MAX_PER_PEER):
        sock = raw(server, "127.0.0.2")
        read_frame(sock)
        sock.sendall(frame(announce()))
        busy.append((sock, read_frame(sock)["accepted"]))
    assert all(accepted for _, accepted in busy)
    assert raw(server, "127.0.0.2").recv(1) == b""
    assert read_frame(raw(server, "127.0.0.3"))["magic"] == "tilert-pd"
    eventually(lambda: server.health()["refused_connections"] == 1)
    for sock, _ in busy:
        sock.close()


def test_an_announce_after_the_place_is_gone_is_not_admitted(
    server: ReceiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._guests, "per_peer", 1)
    late = raw(server)
    read_frame(late)
    read_frame(raw(server))
    with pytest.raises(OSError):  # the server has closed: at the latest the second write fails
        late.sendall(frame(announce()))
        assert ended(late)
        late.sendall(b"x")
        raise OSError
    assert server.health()["slot"]["state"] == "FREE"


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "announce"]), st.integers(0, 7), st.sampled_from("ab"))))
def test_guests_keep_their_limits(moves: list[tuple[str, int, str]]) -> None:
    guests, model = Guests(total=5, per_peer=3), {}  # guest -> [peer, idle]
    for what, guest, peer in moves:
        if what == "leave":
            guests.leave(guest)
            model.pop(guest, None)
        elif what == "announce":
            assert guests.announced(guest) == (guest in model)
            if guest in model:
                model[guest][1] = False
        elif guest not in model:
            mine = [entry for entry in model.values() if entry[0] == peer]
            try:
                leaver = guests.enter(guest, peer)
            except Full:
                crowd = mine if len(mine) >= 3 else model.values()
                assert not any(idle for _, idle in crowd)
                continue
            if leaver is not None:
                gone = model.pop(leaver)
                assert gone[1] and (len(mine) >= 3) <= (gone[0] == peer)
            model[guest] = [peer, True]
        assert len(guests) == len(model) <= 5
        assert all(sum(entry[0] == p for entry in model.values()) <= 3 for p in "ab")


# The data port of zmq


@contextmanager
def dealer(server: ReceiveServer) -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    """A bare ZeroMQ socket at the data port, and the monitor of its connection."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    monitor = sock.get_monitor_socket()
    sock.connect(server._transport.local_meta("127.0.0.1")["zmq_endpoint"])
    try:
        yield sock, monitor
    finally:
        sock.disable_monitor()
        monitor.close(0)
        sock.close()
        context.term()


def events_until(monitor: zmq.Socket, wanted: int) -> bool:
    deadline = soon()
    while monitor.poll(int(1000 * max(0.0, deadline - time.monotonic()))):
        if struct.unpack("=hi", monitor.recv_multipart()[0])[0] == wanted:
            return True
    return False


def test_zmq_takes_no_connection_of_a_peer_that_is_not_listed() -> None:
    with serving(peers=STRANGERS) as server:
        server._transport.admit({write_tag("r", 1): server._buffer.data_ptr()})
        with dealer(server) as (sock, monitor):
            sock.send_multipart([b"r:1", struct.pack("!QQ", 0, server._buffer.data_ptr()), b"evil"])
            assert events_until(monitor, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            assert not sock.poll(200)
        assert not server._buffer.any()


def test_zmq_drops_frames_that_are_too_long_and_messages_that_are_none(server: ReceiveServer) -> None:
    server._transport.admit({write_tag("r", 1): server._buffer.data_ptr()})
    base = server._buffer.data_ptr()
    with dealer(server) as (sock, monitor):
        for junk in ([b""], [b"r:1", b"short", b""], [b"r:1", struct.pack("!QQ", 0, base)], [b"x"] * 5):
            sock.send_multipart(junk)
        sock.send_multipart([b"r:1", struct.pack("!QQ", 0, base), bytes(3 << 20)])
        assert events_until(monitor, zmq.EVENT_DISCONNECTED)
    with dealer(server) as (sock, _):
        for number, (address, data) in enumerate(
            [(0, b"x"), (2**64 - 1, b"xx"), (base - 1, b"xx"), (base + LAYOUT.total_bytes, b"x")]
        ):
            sock.send_multipart([b"r:1", struct.pack("!QQ", number, address), data])
            assert sock.poll(1000 * LIMIT_S)
            got, error = sock.recv_multipart()
            assert got == struct.pack("!Q", number) and b"not in registered memory" in error
        sock.send_multipart([b"t" * 100_000, struct.pack("!QQ", 9, base), b"x"])
        assert sock.poll(1000 * LIMIT_S) and len(sock.recv_multipart()[1]) < 1000  # it is not echoed at full length
    assert not server._buffer.any()
    hand_off(server)


# The prefill side, against a decode node that lies


HELLO = {
    "magic": "tilert-pd",
    "protocol_version": 2,
    "layout_version": 2040,
    "transport": "zmq",
    "max_seq_len": 128,
    "kv_base": 1 << 40,
    "pe_base": 1 << 41,
    "ki_base": 1 << 42,
    "tilert_ref": announce()["tilert_ref"],
    "zmq_endpoint": "tcp://127.0.0.1:9",
}
KV_BYTES = 2 * 128 * 1024
ACCEPT = {"accepted": True, "rid": "r", "rank": 0, "generation": 1}


def outcome(*frames: bytes, allowed: AllowList | None = None, seconds: float = LIMIT_S) -> tuple[str, list[bytes]]:
    """Why the handoff to a node that says `frames` failed, and what the node was sent."""
    heard: list[bytes] = []

    def node() -> None:
        sock, _ = listener.accept()
        sock.settimeout(LIMIT_S)
        with sock, pytest.MonkeyPatch.context():
            for said in frames:
                sock.sendall(said)
                heard.append(sock.recv(1 << 16))

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=node)
        thread.start()
        config = SenderConfig(
            LAYOUT, LAYOUT.geometry(), write_timeout_s=seconds, **({"allowed": allowed} if allowed else {})
        )
        sender = Sender(config, lambda: make_transport("zmq", "", receiver=False))
        slot = Slot(LAYOUT, 0, torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8))
        job = Job(Claim("r", "r", 7, 3, [[1]], "127.0.0.1", listener.getsockname()[1]), slot, lambda _: over.set())
        job.put(Part((0, 1), PLANES, None))
        job.end()
        sender.submit(job)
        assert over.wait(LIMIT_S)
        sender.close()
        thread.join(LIMIT_S)
    return job.failure, heard


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_base": 0}, "kv_base holds 0, which is not a 64-bit address"),
        ({"kv_base": -1}, "kv_base holds -1"),
        ({"pe_base": 2**64}, "pe_base holds 18446744073709551616"),
        ({"kv_base": [1 << 40]}, None),
        ({"kv_base": [1 << 40] * 2}, "kv_base has 2 addresses for 1 shards"),
        ({"nshards": 2}, "kv_base has 1 addresses for 2 shards"),
        ({"nshards": 1025} | dict.fromkeys(("kv_base", "pe_base", "ki_base"), [5] * 1025), "nshards"),
        ({"pe_base": (1 << 40) + KV_BYTES - 1}, "decode's kv plane ends at 0x10000040000, its pe plane begins at"),
        ({"pe_base": 1 << 40}, "plane ends at 0x10000"),
        ({"kv_base": 2**64 - KV_BYTES + 1}, "decode's kv plane ends at 0x10000000000000001, beyond 64 bits"),
        ({"max_seq_len": 2**31 - 1}, "plane begins at"),
        ({"max_seq_len": 2**31}, "max_seq_len"),
        ({"max_seq_len": 6}, "seq_len 7 exceeds decode's max_seq_len 6"),
        ({"zmq_endpoint": "tcp://10.0.0.7:9"}, "zmq_endpoint names another host than 127.0.0.1: '10.0.0.7' is not in"),
        ({"zmq_endpoint": "ipc:///tmp/x"}, "zmq_endpoint is 'ipc:///tmp/x'; legal: tcp://ADDRESS:PORT"),
        ({"zmq_endpoint": "tcp://evil.example:9"}, "legal: tcp://ADDRESS:PORT"),
        ({"session_id": "203.0.113.9:12345"}, "session_id names another host than 127.0.0.1"),
        ({"tilert_ref": HELLO["tilert_ref"] | {"num_layers": 10**30}}, "not a legal hello"),
    ],
    ids=str,
)
def test_hellos_that_lie_about_memory_are_refused_before_an_announce(
    changes: dict[str, Any], reason: str | None
) -> None:
    failure, heard = outcome(frame(HELLO | changes), *([frame(ACCEPT)] if reason is None else []), seconds=0.2)
    if reason is None:  # a list of one is legal
        assert "did not take or answer" in failure and b"announce" not in heard[0] and b'"rid":"r"' in heard[0]
    else:
        assert reason in failure and heard == [b""]


@given(st.lists(st.integers(1, 9), min_size=9, max_size=9), st.sampled_from([1, 3]), st.integers(0, 6))
def test_planes_are_told_apart(starts: list[int], nshards: int, top: int) -> None:
    """Against every byte of a small buffer; `top` moves it to the end of the address space."""
    layout = BufferLayout(model_profile(nshards, False, False), bf16_row(1, 1), max_seq_len=1, nshards=nshards)
    shift = 2**64 - 1 - top if top else 1 << 20
    kv, pe, ki = ([shift - 5 + start for start in starts[i::3]][:nshards] for i in range(3))
    bases = {"kv_base": kv, "pe_base": pe, "ki_base": ki}  # there is no index, so ki takes no bytes
    geometry, nothing = layout.geometry(), {"magic": "", "layout_version": 1, "transport": "", "max_seq_len": 1}
    covered = [base + byte for base in kv + pe for byte in range(2)]
    legal = len(set(covered)) == len(covered) and max(covered) < 2**64
    try:
        hello = codec.Hello(**nothing, **bases, nshards=nshards, tilert_ref=geometry)
        codec.check_destination(hello, layout)
    except (ValueError, codec.HandoffRefused):
        assert not legal or max(ki) >= 2**64
    else:
        assert legal


def test_data_may_go_to_another_host_of_the_list() -> None:
    elsewhere = frame(HELLO | {"zmq_endpoint": "tcp://127.0.0.9:9"})
    failure, heard = outcome(elsewhere, frame(ACCEPT), seconds=0.2)
    assert "tcp://127.0.0.9:9 did not take" in failure and len(heard) == 2
    failure, _ = outcome(elsewhere, allowed=AllowList.parse("tilert_allowed_hosts", ["127.0.0.1"]))
    assert "'127.0.0.9' is not in tilert_allowed_hosts" in failure
    failure, _ = outcome(
        frame(HELLO | {"zmq_endpoint": "tcp://10.9.9.9:9"}), frame(ACCEPT), allowed=EVERYBODY, seconds=0.2
    )
    assert "tcp://10.9.9.9:9 did not take" in failure


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ACCEPT | {"rid": "other"}, "accepted 'other' rank 0, not 'r' 0"),
        (ACCEPT | {"rank": 1}, "accepted 'r' rank 1"),
        (ACCEPT | {"generation": 2**63}, "not a legal accept"),
        (ACCEPT | {"generation": None}, "not a legal accept"),
        (ACCEPT | {"kv_base": 1 << 40}, "not a legal accept"),
        (ACCEPT | dict.fromkeys(("kv_base", "pe_base", "ki_base"), 1 << 40), "plane ends at 0x10000"),
        (ACCEPT | {"kv_base": 0, "pe_base": 1 << 40, "ki_base": 1}, "kv_base holds 0"),
        ({"accepted": False, "error": "a\nFAKE LOG LINE"}, r"refused: 'a\nFAKE LOG LINE'"),
        (struct.pack("!I", codec.MAX_SMALL + 1), "a frame of 65537 bytes; at most 65536 are legal"),
    ],
    ids=str,
)
def test_replies_that_lie_are_refused_before_a_write(reply: Any, reason: str) -> None:
    failure, heard = outcome(frame(HELLO), reply if isinstance(reply, bytes) else frame(reply))
    assert reason in failure and b'"done":true' not in heard[1]


def test_refusals_that_talk_too_much_are_cut() -> None:
    failure, _ = outcome(frame(HELLO), frame({"accepted": False, "error": "x" * 60_000}))
    assert len(failure) < 1200


def test_a_node_that_closes_at_once_says_where_to_look() -> None:
    with serving(peers=STRANGERS) as server, pytest.raises(wire.ConnectionLost, match=r"on the node's --allow-peers\?"):
        read_hello(wire.connect("127.0.0.1", server.port, soon()), None, soon())


def test_a_hello_without_end_is_cut_off() -> None:
    failure, _ = outcome(struct.pack("!I", codec.MAX_HELLO + 1))
    assert failure == "ProtocolError: a frame of 1048577 bytes; at most 1048576 are legal"
