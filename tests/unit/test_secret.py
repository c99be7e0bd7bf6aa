"""The shared secret: who knows it hands off, who doesn't is refused by name before addresses or prompt ids are out."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from handoff_sender import Sender as PlainSender

from tilert_ref.connector import codec, wire
from tilert_ref.connector.codec import Accept, Announce, Auth, Challenge, Done, HandoffRefused, ProtocolError, Reject
from tilert_ref.connector.handshake import greet, read_hello
from tilert_ref.connector.layout import BF16, BufferLayout, model_profile
from tilert_ref.connector.receiver import HandoffError, ReceiveServer
from tilert_ref.connector.secret import ProofError, Secret, Session, new_nonce, read_secret
from tilert_ref.connector.transport import TransferError, make_transport, write_tag

LAYOUT = BufferLayout(model_profile(2, False, False), BF16, max_seq_len=128)
SECRET, OTHER = Secret(b"correct horse battery"), Secret(b"incorrect horse batter")
NEVER = threading.Event()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def server() -> Iterator[ReceiveServer]:
    buffer = torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)
    server = ReceiveServer(LAYOUT, buffer, make_transport("zmq", "127.0.0.1"), "127.0.0.1", 0, secret=SECRET)
    server.start()
    yield server
    server.close()


def connected(server: ReceiveServer) -> wire.Connection:
    return wire.connect("127.0.0.1", server.port, soon())


def announce(rid: str = "r") -> Announce:
    return Announce(rid=rid, rank=0, seq_len=3, tilert_ref=LAYOUT.geometry(), prompt_token_ids=[4, 5, 6])


def hand_off(server: ReceiveServer, rid: str = "r") -> tuple[codec.Hello, Accept]:
    connection = connected(server)
    hello = read_hello(connection, SECRET, soon())
    connection.send(announce(rid), soon())
    accept = connection.reply(soon())
    connection.send(Done(done=True, rid=rid, rank=0, generation=accept.generation), soon())
    with pytest.raises(wire.ConnectionLost):
        connection.receive(soon())
    return hello, accept


def test_with_the_secret_a_request_arrives(server: ReceiveServer) -> None:
    hello, accept = hand_off(server)
    assert hello.kv_base == server._buffer.data_ptr() and hello.zmq_endpoint and not hello.withheld
    assert accept.tilert_auth.proof is not None
    assert server.wait("r", 20, NEVER).prompt_token_ids == [4, 5, 6]


def test_hello_gives_no_address_before_the_proof(server: ReceiveServer) -> None:
    payload = connected(server).receive(soon())
    fields = json.loads(payload)
    assert (fields["kv_base"], fields["pe_base"], fields["ki_base"]) == (0, 0, 0)
    assert set(fields) == {
        *("magic", "protocol_version", "layout_version", "transport", "max_seq_len", "busy", "senders"),
        *("kv_base", "pe_base", "ki_base", "tilert_auth"),
    }
    assert str(server._buffer.data_ptr()).encode() not in payload


def test_a_sender_without_the_secret_is_refused_by_name(server: ReceiveServer) -> None:
    """What TileRT's sender does: its announce comes where the challenge is due."""
    connection = connected(server)
    connection.hello(soon())
    connection.send(announce(), soon())
    reject = connection.reply(soon())
    assert isinstance(reject, Reject) and reject.error == "secret_required" and not reject.transient
    assert "TILERT_REF_SECRET_FILE" in reject.detail
    with pytest.raises(wire.ConnectionLost):
        connection.receive(soon())
    assert server.health()["slot"]["state"] == "FREE"


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (None, SECRET, "the decode node asks for a shared secret; set TILERT_REF_SECRET_FILE for vLLM too"),
        (SECRET, None, "the decode node does not ask for the shared secret; set TILERT_REF_SECRET_FILE there too"),
        (OTHER, SECRET, "refused: wrong_secret"),
    ],
)
def test_ends_that_do_not_share_it_say_so(ours: Secret | None, theirs: Secret | None, text: str) -> None:
    buffer = torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)
    server = ReceiveServer(LAYOUT, buffer, make_transport("zmq", "127.0.0.1"), "127.0.0.1", 0, secret=theirs)
    server.start()
    try:
        with pytest.raises(HandoffRefused, match=text):
            read_hello(connected(server), ours, soon())
    finally:
        server.close()


def pair() -> tuple[wire.Connection, wire.Connection]:
    with wire.listen("127.0.0.1", 0) as listener:
        client = wire.connect("127.0.0.1", listener.getsockname()[1], soon())
        return client, wire.Connection(listener.accept()[0])


def full_hello() -> codec.Hello:
    return codec.make_hello(LAYOUT, [1 << 40], transport="zmq", senders=1)


@pytest.mark.parametrize("knows", [OTHER, None])
def test_a_decode_node_without_the_secret_learns_nothing(knows: Secret | None) -> None:
    """It asks for the secret, and then makes something up, or replays a hello that another node proved."""
    client, node = pair()
    seen: list[bytes] = []

    def rogue() -> None:
        nonce = new_nonce()
        node.send(codec.Hello(**msgspec.structs.asdict(full_hello()) | {"tilert_auth": Auth(nonce=nonce)}), soon())
        challenge = node.challenge(soon())
        replayed = Session(SECRET, new_nonce(), new_nonce())
        node.session = Session(knows, nonce, challenge.tilert_auth.nonce) if knows else replayed
        node.send(full_hello(), soon())
        with pytest.raises(ConnectionError):
            seen.append(node.receive(soon()))

    thread = threading.Thread(target=rogue)
    thread.start()
    with pytest.raises(HandoffRefused, match="does not know the shared secret"):
        read_hello(client, SECRET, soon())
    client.close()
    thread.join(20)
    assert not thread.is_alive() and seen == []


class Recording:
    """A socket that keeps what is sent."""

    def __init__(self, connection: wire.Connection) -> None:
        self._socket = connection._socket
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self._socket.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_a_recorded_handoff_is_refused_when_it_is_played_again(server: ReceiveServer) -> None:
    connection = connected(server)
    tape = connection._socket = Recording(connection)
    read_hello(connection, SECRET, soon())
    connection.send(announce("old"), soon())
    accept = connection.reply(soon())
    connection.send(Done(done=True, rid="old", rank=0, generation=accept.generation), soon())
    server.wait("old", 20, NEVER)
    server.release("old")
    server.expect("old")

    again = connected(server)
    again.hello(soon())
    again._socket.sendall(tape.sent[0])  # the challenge
    assert again.reply(soon()).error == "wrong_secret"

    genuine = connected(server)  # knows the secret, but plays the old announce, then the old done
    read_hello(genuine, SECRET, soon())
    genuine._socket.sendall(tape.sent[1])
    with pytest.raises(ConnectionError):
        genuine.receive(soon())
    genuine = connected(server)
    read_hello(genuine, SECRET, soon())
    genuine.send(announce("old"), soon())
    assert isinstance(genuine.reply(soon()), Accept)
    genuine._socket.sendall(tape.sent[2])
    with pytest.raises(ConnectionError):
        genuine.receive(soon())
    with pytest.raises(HandoffError):
        server.wait("old", 0.1, NEVER)


def test_an_unsigned_done_after_a_signed_announce_completes_nothing(server: ReceiveServer) -> None:
    connection = connected(server)
    read_hello(connection, SECRET, soon())
    connection.send(announce(), soon())
    accept = connection.reply(soon())
    connection.session = None
    connection.send(Done(done=True, rid="r", rank=0, generation=accept.generation), soon())
    with pytest.raises(ConnectionError):
        connection.receive(soon())
    with pytest.raises(HandoffError):
        server.wait("r", 0.1, NEVER)


def test_write_tags_cannot_be_made_without_it(server: ReceiveServer) -> None:
    connection = connected(server)
    hello = read_hello(connection, SECRET, soon())
    connection.send(announce(), soon())
    accept = connection.reply(soon())
    sender = PlainSender(LAYOUT, server.port)
    with pytest.raises(TransferError, match="is not admitted"):
        sender.write(hello, accept, 3)
    assert not server._buffer.any()
    assert write_tag("r", 1, SECRET) != write_tag("r", 1, OTHER) and write_tag("r", 1, SECRET).startswith(b"r:1:")
    sender.close()


# Proofs


NONCES = new_nonce(), new_nonce()
SESSION = Session(SECRET, *NONCES)
MESSAGES = [
    full_hello(),
    Challenge(tilert_auth=Auth(nonce=NONCES[1])),
    announce("0" * 64),  # a rid that looks like the room for the proof
    Accept(rid="r", rank=0, generation=7),
    Reject(error="busy", busy_rid="x"),
    Done(done=True, rid="r", rank=0, generation=7),
]
DECODE = {
    codec.Hello: codec.decode_hello,
    Challenge: codec.decode_challenge,
    Announce: codec.decode_announce,
    Accept: codec.decode_reply,
    Reject: codec.decode_reply,
    Done: codec.decode_done,
}
each_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)


@each_message
def test_any_changed_byte_breaks_the_proof(message: Any) -> None:
    decode, payload = DECODE[type(message)], SESSION.sign(message)[4:]
    SESSION.check(decode(payload), payload)
    for position, flip in itertools.product(range(len(payload)), (1, 2, 16)):
        damaged = bytearray(payload)
        damaged[position] ^= flip
        with pytest.raises(ProtocolError):
            SESSION.check(decode(bytes(damaged)), bytes(damaged))


@each_message
def test_a_proof_is_of_one_secret_one_connection_one_direction(message: Any) -> None:
    decode, payload = DECODE[type(message)], SESSION.sign(message)[4:]
    decoded = decode(payload)
    for session in (
        Session(OTHER, *NONCES),
        Session(SECRET, *reversed(NONCES)),
        Session(SECRET, NONCES[0], new_nonce()),
        Session(SECRET, new_nonce(), NONCES[1]),
    ):
        with pytest.raises(ProofError, match="is wrong: another secret, or not of this connection"):
            session.check(decoded, payload)


def test_a_proof_is_of_one_kind() -> None:
    """An accept and a done have the same fields; the words for them differ, and so do the proofs."""
    done = Done(done=True, rid="r", rank=0, generation=7)
    payload = SESSION.sign(done)[4:]
    relabelled = payload.replace(b'"done"', b'"accepted"')
    with pytest.raises(ProofError):
        SESSION.check(codec.decode_reply(relabelled), relabelled)


def test_a_proof_that_stands_twice_is_refused() -> None:
    payload = SESSION.sign(Done(done=True, rid="r", rank=0, generation=7))[4:]
    proof = json.loads(payload)["tilert_auth"]["proof"]
    twice = payload[:-1] + f',"x":"{proof}"}}'.encode()
    with pytest.raises(ProofError, match="more than once"):
        SESSION.check(codec.decode_done(twice), twice)


# Where it comes from


def test_sources(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"correct horse battery\r\n")
    assert read_secret({}) is None and read_secret({"TILERT_REF_SECRET_FILE": ""}) is None
    same = {read_secret(env).digest(b"x") for env in ({"TILERT_REF_SECRET_FILE": str(file)},)} | {SECRET.digest(b"x")}
    same |= {read_secret({"TILERT_REF_SECRET": "correct horse battery"}).digest(b"x")}
    assert len(same) == 1 and len(same.pop()) == 64
    assert SECRET.digest(b"a", b"bc") != SECRET.digest(b"ab", b"c")


def test_bad_sources_are_named_and_never_quoted(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"too short")
    for env, text in (
        ({"TILERT_REF_SECRET_FILE": str(file)}, "TILERT_REF_SECRET_FILE: a shared secret has 16 to 4096 bytes, got 9"),
        ({"TILERT_REF_SECRET_FILE": str(tmp_path / "none")}, "TILERT_REF_SECRET_FILE: .*No such file"),
        ({"TILERT_REF_SECRET": "sesame"}, "TILERT_REF_SECRET: a shared secret has 16 to 4096 bytes, got 6"),
        ({"TILERT_REF_SECRET": "sesame", "TILERT_REF_SECRET_FILE": "x"}, "both set; legal: one of them"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            read_secret(env)
        assert "sesame" not in str(caught.value) and "too short" not in str(caught.value)
    assert "horse" not in repr(SECRET) + str(SECRET) + repr(SESSION)


def test_greeting_waits_no_longer_than_its_deadline() -> None:
    client, node = pair()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        greet(node, full_hello(), SECRET, soon(0.2))
    assert time.monotonic() - began < 5
    client.close()
    node.close()


def test_a_hello_that_hides_its_addresses_twice_is_refused() -> None:
    client, node = pair()

    def twice() -> None:
        nonce = new_nonce()
        hidden = msgspec.structs.replace(full_hello(), tilert_auth=Auth(nonce=nonce))
        node.send(hidden, soon())
        node.session = Session(SECRET, nonce, node.challenge(soon()).tilert_auth.nonce)
        node.send(hidden, soon())

    threading.Thread(target=twice).start()
    with pytest.raises(HandoffRefused, match="keeps its addresses back"):
        read_hello(client, SECRET, soon())
    client.close()
    node.close()
