"""What is Mooncake's own: engines per receiver, parts that end one by one, RDMA, and what a stranger can reach."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_doubles import plane_token
from decode_node import CONFIG, DOUBLE, DOUBLE_LAYOUT, Server
from transport_peer import Peer, needs

from tilert_ref.connector.codec import Accept
from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import MooncakeNetwork, TransferError, TransferTimeout, make_transport, mooncake
from tilert_ref.connector.transport.mooncake import MooncakeTransport

SEQ_LEN = 70
RDMA = MooncakeNetwork("rdma")


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def sender() -> Iterator[MooncakeTransport]:
    needs("mooncake")
    sender = make_transport("mooncake", "", receiver=False)
    yield sender
    sender.close()


@pytest.fixture
def source(sender: MooncakeTransport) -> torch.Tensor:
    memory = torch.randint(1, 256, (1 << 20,), dtype=torch.uint8)
    sender.register(memory.data_ptr(), memory.nbytes, memory)
    return memory


@pytest.fixture
def receiver() -> Iterator[MooncakeTransport]:
    needs("mooncake")
    receiver = make_transport("mooncake", "127.0.0.1")
    yield receiver
    receiver.close()


def copy(source: torch.Tensor, target: int, nbytes: int = 64) -> Copy:
    return Copy(source.data_ptr(), target, nbytes, layer=0, plane="kv")


class Scripted:
    """An engine whose parts end as the test says. A handle is asked for only while it is under way."""

    protocol = "tcp"

    def __init__(self, *states: list[int]) -> None:
        """states: per part, what it answers, the last of them 1 (done) or -1 (failed)."""
        self._states = list(states)
        self.submitted: list[tuple[int, int, int]] = []

    def submit(self, session: str, *part: int) -> int | None:
        self.submitted.append(part)
        return len(self.submitted)

    def state(self, handle: int) -> int:
        return self._states[handle - 1].pop(0)  # IndexError: asked after its end

    @property
    def ended(self) -> bool:
        return not any(self._states[: len(self.submitted)])


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "CHUNK_BYTES", 10)
    monkeypatch.setattr(mooncake, "WINDOW", 3)


def run(engine: Scripted, nbytes: int) -> mooncake._Write:
    write = mooncake._Write("d:1", [Copy(1000, 2000, nbytes, 0, "kv")])
    write.run(engine, threading.Event())
    return write


def test_a_window_of_parts_is_under_way(one_by_one: None) -> None:
    engine = Scripted([0, 1], [1], [0, 0, 1], [1], [0, 1])
    assert run(engine, 45).failure is None and engine.ended
    assert engine.submitted == [(1000 + at, 2000 + at, min(10, 45 - at)) for at in range(0, 45, 10)]


def test_a_failed_write_ends_when_its_other_parts_have(one_by_one: None) -> None:
    """Mooncake's own batch call answers at the first failure, while the rest still lands."""
    engine = Scripted([-1], [0, 0, 0, 1], [0, 1], [1], [1])
    assert "died, or refused" in run(engine, 45).failure
    assert engine.ended and len(engine.submitted) == 3


def test_a_part_that_the_engine_calls_overdue_is_still_under_way(one_by_one: None) -> None:
    engine = Scripted([-2, -2, 1])
    assert run(engine, 10).failure is None and engine.ended


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    needs("mooncake")
    pair = Peer("mooncake", 4096), Peer("mooncake", 4096)
    yield pair
    for peer in pair:
        peer.kill()


def test_a_stopped_receiver_holds_up_no_other(
    sender: MooncakeTransport, source: torch.Tensor, peers: tuple[Peer, Peer]
) -> None:
    """Connecting to it blocks its engine, and the write that was given up ends once it runs again."""
    stopped, well = peers
    stopped.stop()
    caught: list[TransferTimeout] = []

    def write() -> None:
        try:
            sender.write(stopped.meta, [copy(source, stopped.address)], b"", soon(2.0))
        except TransferTimeout as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    sender.write(well.meta, [copy(source, well.address)], b"", soon())
    assert well.read()[:64] == source[:64].numpy().tobytes()
    assert thread.is_alive()
    thread.join(30)
    assert not caught[0].settled.done()
    stopped.resume()
    caught[0].settled.result(30)


def test_an_engine_is_replaced_after_a_failure_and_kept_without_one(
    sender: MooncakeTransport, source: torch.Tensor, receiver: MooncakeTransport
) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    receiver.register(buffer.data_ptr(), buffer.nbytes, buffer)
    meta, engines = receiver.local_meta("127.0.0.1"), []
    for target in (buffer.data_ptr(), buffer.data_ptr(), buffer.data_ptr() + 4090):
        engines += sender._links.values()
        if target == buffer.data_ptr():
            sender.write(meta, [copy(source, target)], b"", soon())
        else:
            with pytest.raises(TransferError, match="127.0.0.1:[0-9]+ died, or refused the write .over tcp"):
                sender.write(meta, [copy(source, target)], b"", soon())
    assert engines[0] is engines[1] and sender._links == {} and sender._retired == [engines[0]]
    receiver.unregister(buffer.data_ptr())
    with pytest.raises(TransferError, match="refused"):
        sender.write(meta, [copy(source, buffer.data_ptr())], b"", soon())


def test_a_plain_engine_as_the_other_end(
    sender: MooncakeTransport, source: torch.Tensor, receiver: MooncakeTransport
) -> None:
    """With the very calls of TileRT (protocol.md 7); it asks for RDMA, and has TCP without a device."""
    sent, got = torch.arange(100, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    engine = mooncake._engine_class()()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
    assert engine.batch_register_memory([sent.data_ptr(), got.data_ptr()], [sent.nbytes, got.nbytes]) == 0
    buffer = torch.zeros(4096, dtype=torch.uint8)
    receiver.register(buffer.data_ptr(), buffer.nbytes, buffer)
    session = receiver.local_meta("127.0.0.1")["session_id"]
    targets = [buffer.data_ptr() + 7, buffer.data_ptr() + 1000]
    assert engine.batch_transfer_sync_write(session, [sent.data_ptr()] * 2, targets, [100, 50]) == 0
    assert torch.equal(buffer[7:107], sent) and torch.equal(buffer[1000:1050], sent[:50])
    meta = {"session_id": f"127.0.0.1:{engine.get_rpc_port()}"}
    sender.write(meta, [copy(source, got.data_ptr() + 5, 4000)], b"", soon())
    assert torch.equal(got[5:4005], source[:4000])


def test_nobody_can_write_to_a_sender(
    sender: MooncakeTransport, source: torch.Tensor, receiver: MooncakeTransport
) -> None:
    """Its engine listens too, on every interface; over TCP there is nothing behind it."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    receiver.register(buffer.data_ptr(), buffer.nbytes, buffer)
    sender.write(receiver.local_meta("127.0.0.1"), [copy(source, buffer.data_ptr())], b"", soon())
    (engine,) = sender._links.values()
    before = source.clone()
    stranger = make_transport("mooncake", "", receiver=False)
    stranger.register(buffer.data_ptr(), buffer.nbytes, buffer)
    with pytest.raises(TransferError):
        meta = {"session_id": f"127.0.0.1:{engine.rpc_port}"}
        stranger.write(meta, [Copy(buffer.data_ptr(), source.data_ptr() + 64, 64, 0, "kv")], b"", soon())
    assert torch.equal(source, before)
    stranger.close()


def test_session_id_is_an_ipv4_address_that_the_sender_can_reach(receiver: MooncakeTransport) -> None:
    wildcard = make_transport("mooncake", "::")
    assert wildcard.local_meta("10.0.0.9")["session_id"].startswith("10.0.0.9:")
    with pytest.raises(TransferError, match="IPv4 only; fe80::1"):
        wildcard.local_meta("fe80::1")
    wildcard.close()
    assert receiver.local_meta("10.0.0.9")["session_id"].startswith("127.0.0.1:")
    with pytest.raises(TransferError, match="IPv4 only; ::1"):
        make_transport("mooncake", "::1").start()


@pytest.mark.parametrize("receiver", [True, False])
def test_rdma_without_a_device_is_an_error_at_start(
    receiver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake itself would answer 0 and take TCP."""
    needs("mooncake")
    monkeypatch.setattr(mooncake, "RDMA_DEVICES", tmp_path / "infiniband")
    with pytest.raises(TransferError, match="no RDMA device on this machine.*over tcp needs none"):
        make_transport("mooncake", "10.0.0.9", receiver=receiver, network=RDMA).start()


def test_rdma_settings_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mooncake")
    monkeypatch.setattr(mooncake, "RDMA_DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    with pytest.raises(TransferError, match="no RDMA device mlx5_7; this machine has mlx5_0"):
        make_transport("mooncake", "", receiver=False, network=MooncakeNetwork("rdma", ("mlx5_0", "mlx5_7"))).start()
    with pytest.raises(TransferError, match="needs the address at which senders reach this host, not '::'"):
        make_transport("mooncake", "::", network=RDMA).start()
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(TransferError, match="MC_FORCE_TCP is set"):
        make_transport("mooncake", "", receiver=False, network=RDMA).start()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match="not usable here.*pip install mooncake-transfer-engine-non-cuda"):
        make_transport("mooncake", "", receiver=False).start()


def test_device_memory_needs_another_build() -> None:
    on_device: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    with pytest.raises(
        TransferError, match="host memory only, got a tensor on cuda:0; .*mooncake-transfer-engine-cuda13"
    ):
        make_transport("mooncake", "", receiver=False).register(4096, 64, on_device)


def test_decode_server_reads_what_came_over_mooncake(tmp_path: Path) -> None:
    needs("mooncake")
    (tmp_path / "config.json").write_text(CONFIG)
    server = Server(*DOUBLE, "--transport", "mooncake", "--model-weights-dir", str(tmp_path))
    try:
        server.start(DOUBLE_LAYOUT, transport="mooncake")
        for rid in ("first", "second"):
            assert isinstance(server.sender.offer(rid, SEQ_LEN), Accept)
            expected = [42, *map(plane_token, server.sender.planes(SEQ_LEN, layers=3))]
            assert server.decode(rid)[1]["token_ids"] == expected
        server.sender.close()
    finally:
        server.stop()
