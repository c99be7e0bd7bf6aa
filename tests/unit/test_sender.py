"""The background sender and the staging it reads: retries, isolation of destinations, ownership of memory."""

import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from transport_peer import needs

from tilert_ref.connector import sender as sender_module
from tilert_ref.connector import wire
from tilert_ref.connector.allow import AllowList
from tilert_ref.connector.caches import ModelCaches, describe_caches
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.codec import (
    Accept,
    ProtocolError,
    decode_reply,
    destination,
    encode,
    make_hello,
    name_bases,
)
from tilert_ref.connector.extract import Extractor, Job, Part
from tilert_ref.connector.layout import BufferLayout, Copy
from tilert_ref.connector.receiver import HandoffFailed, HandoffTimeout, ReceiveServer
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import Slot, StagingExhausted, StagingPool
from tilert_ref.connector.transport import TRANSPORTS, TransferError, TransferTimeout, make_transport
from tilert_ref.connector.transport.zmq import ZmqTransport

NEVER = threading.Event()
BLOCK = 16


def model(layers: int = 2, draft: int = 0, block: int = BLOCK) -> ModelCaches:
    generator = torch.Generator().manual_seed(layers)
    tensors = {
        f"model.layers.{layer}.self_attn.attn": torch.randint(
            0, 256, (12, 1, block, 1152), dtype=torch.uint8, generator=generator
        ).view(torch.bfloat16)
        for layer in range(layers + draft)
    }
    return describe_caches(tensors, {}, layers, (512, 64))


CACHES = model()
LAYOUT = BufferLayout(CACHES.profile, CACHES.row_format, max_seq_len=160)


class Node:
    """A decode node."""

    def __init__(self, layout: BufferLayout = LAYOUT, transport: str = "zmq", checkpoint: str | None = None) -> None:
        self.buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        self.server = ReceiveServer(
            layout, self.buffer, make_transport(transport, "127.0.0.1"), "127.0.0.1", 0, checkpoint=checkpoint
        )
        self.server.start()

    def claim(self, rid: str, seq_len: int = 40, blocks: list[int] | None = None) -> Claim:
        return claim(rid, self.server.port, seq_len, blocks)

    def receive(self, rid: str) -> torch.Tensor:
        """Waits for rid and returns the kv bytes of layer 1, [seq_len, 1024]; releases the node."""
        seq_len = self.server.wait(rid, 20, NEVER).seq_len
        _, start = LAYOUT.offset("kv", 1)
        rows = self.buffer[start : start + 1024 * seq_len].view(seq_len, 1024).clone()
        self.server.release(rid)
        return rows


def claim(rid: str, port: int, seq_len: int = 40, blocks: list[int] | None = None) -> Claim:
    return Claim(rid, rid, seq_len, 3, [[5, 2, 9, 7, 1] if blocks is None else blocks], "127.0.0.1", port)


def rows_of(seq_len: int, blocks: list[int] | None = None) -> torch.Tensor:
    used = [5, 2, 9, 7, 1] if blocks is None else blocks
    return CACHES.rows[1].cache[used].flatten(0, 1)[:seq_len, :512].contiguous().view(torch.uint8)


class Prefill:
    """Pool, sender and extractor of one worker."""

    def __init__(
        self,
        make: Callable[[], Any] | None = None,
        max_bytes: int | None = None,
        transport: str = "zmq",
        checkpoint: str | None = None,
        **config: Any,
    ) -> None:
        made = make or (lambda: make_transport(transport, "", receiver=False))
        self.sender = Sender(SenderConfig(LAYOUT, LAYOUT.geometry(checkpoint=checkpoint), **config), made)
        self.pool = StagingPool(LAYOUT, 0, torch.device("cpu"), max_bytes, self.sender.forget)
        self.jobs: list[Job] = []
        self.extractor = Extractor(CACHES, self.pool, range(2), self._submit, refuse=self.sender.report)

    def step(self, *claims: Claim) -> None:
        self.extractor.begin(claims)
        self.extractor.layer(CACHES.rows[0].name)
        self.extractor.finish()

    @property
    def idle(self) -> bool:
        """No staging slot is in use."""
        return sum(slot.layout.shard_bytes for slot in self.pool._free) == self.pool.total_bytes > 0

    def _submit(self, job: Job) -> None:
        self.jobs.append(job)
        self.sender.submit(job)


def eventually(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        threading.Event().wait(0.005)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """zmq, but for the tests that move bytes in ways worth repeating over every transport."""
    name = getattr(request, "param", "zmq")
    needs(name)
    return name


every_transport = pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)


@pytest.fixture
def node(transport: str) -> Iterator[Node]:
    node = Node(transport=transport)
    yield node
    node.server.close()


@pytest.fixture
def prefill(transport: str) -> Iterator[Prefill]:
    prefill = Prefill(transport=transport)
    yield prefill
    prefill.sender.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """Port of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@every_transport
def test_several_claims_of_one_step_to_one_node(node: Node, prefill: Prefill) -> None:
    other = [4, 3, 2]
    prefill.step(node.claim("a"), node.claim("b", 33, other))
    assert torch.equal(node.receive("a"), rows_of(40))
    assert torch.equal(node.receive("b"), rows_of(33, other))
    eventually(lambda: prefill.idle)
    assert [job.failure for job in prefill.jobs] == [None, None]


def test_slots_are_used_again(node: Node, prefill: Prefill) -> None:
    for index in range(3):
        prefill.step(node.claim(f"r{index}"))
        node.receive(f"r{index}")
        eventually(lambda: prefill.idle)
    assert prefill.pool.total_bytes == LAYOUT.shard_bytes


def test_sources_are_made_ready_before_hello_and_destinations_before_the_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Watched(ZmqTransport):
        @contextlib.contextmanager
        def staged(self, sources: Sequence[tuple[int, int]]) -> Iterator[Any]:
            log.append("staged")
            yield sources
            log.append("sources let go")

        @contextlib.contextmanager
        def prepared(
            self, meta: dict[str, Any], copies: Sequence[Copy], staged: Any = None
        ) -> Iterator[dict[str, Any]]:
            assert [(copy.src, copy.nbytes) for copy in copies] == staged
            log.append("prepared")
            yield meta
            log.append("destinations let go")

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            log.append(name)
            return method(*arguments)

        return call

    for name in ("hello", "reply"):
        monkeypatch.setattr(wire.Connection, name, noted(name, getattr(wire.Connection, name)))
    prefill = Prefill(lambda: Watched(None))
    prefill.step(node.claim("a"))
    assert node.receive("a").equal(rows_of(40))
    eventually(lambda: prefill.idle)
    assert log == ["staged", "hello", "prepared", "reply", "destinations let go", "sources let go"]
    prefill.sender.close()


@every_transport
def test_busy_node_is_retried_and_gets_everything_late(node: Node, prefill: Prefill) -> None:
    prefill.step(node.claim("a"))
    node.server.wait("a", 20, NEVER)
    prefill.step(node.claim("b"))
    eventually(lambda: prefill.sender._queues and not next(iter(prefill.sender._queues.values())).empty)
    node.server.release("a")
    assert torch.equal(node.receive("b"), rows_of(40))


def test_pauses_between_attempts_double(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.server.release("gone")  # tombstoned: refused with `cancelling`
    prefill, attempts = Prefill(attempts=3), []
    connect = wire.connect
    monkeypatch.setattr(wire, "connect", lambda *args: (attempts.append(time.monotonic()), connect(*args))[1])
    monkeypatch.setattr(sender_module, "RETRY_STEP_S", 0.1)
    prefill.step(node.claim("gone"))
    eventually(lambda: prefill.idle)
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts[:3])]  # the fourth tells of the failure
    assert len(pauses) == 2 and pauses[0] >= 0.1 and pauses[1] >= 0.2
    assert prefill.jobs[0].failure == "refused 3 times, last: cancelling (rid 'gone', detail 'no_consumer')"
    assert prefill.jobs[0].failure in caplog.text
    prefill.sender.close()


def test_a_node_that_stays_busy_is_told_why_the_request_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "RETRY_STEP_S", 0.01)
    prefill = Prefill(attempts=3)
    prefill.step(node.claim("a"))
    node.server.wait("a", 20, NEVER)
    prefill.step(node.claim("b"))
    with pytest.raises(HandoffFailed, match="rank 0: refused 3 times, last: busy .*busy_rid 'a'"):
        node.server.wait("b", 20, NEVER)
    prefill.sender.close()


def test_a_server_that_takes_no_notices_gets_none(prefill: Prefill) -> None:
    """To TileRT's an announce with `failed` would be an offer."""
    spoken: list[bytes] = []
    hello = make_hello(replace(LAYOUT, tiled=True), [4096], transport="zmq", senders=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = wire.Connection(listener.accept()[0])
            connection.send(hello, time.monotonic() + 20)
            with contextlib.suppress(OSError):
                spoken.append(connection.receive(time.monotonic() + 20))

        server = threading.Thread(target=serve)
        server.start()
        prefill.step(claim("a", listener.getsockname()[1]))
        server.join(20)
    assert not server.is_alive() and spoken == []
    assert "layout_version" in prefill.jobs[0].failure


@pytest.mark.parametrize(
    "bases",
    [
        {"kv_base": 4096},
        {"kv_base": 0, "pe_base": 4096, "ki_base": 4096},
        {"kv_base": 2**64, "pe_base": 4096, "ki_base": 4096},
        {"kv_base": [1, 2], "pe_base": [1, 2], "ki_base": [1, 2]},
    ],
)
def test_addresses_that_an_accept_names_must_be_of_hellos_form(bases: dict[str, Any]) -> None:
    hello = make_hello(LAYOUT, [4096], transport="zmq", senders=1)
    with pytest.raises(ProtocolError, match="not a legal accept"):
        destination(hello, Accept(rid="a", rank=0, generation=1, **bases))


def test_addresses_of_an_accept_replace_hellos() -> None:
    layout = replace(LAYOUT, nshards=2)
    hello = make_hello(layout, [4096, 8192], transport="zmq", senders=2)
    accept = name_bases(Accept(rid="a", rank=0, generation=1), layout, [1 << 40, 2 << 40])
    got = decode_reply(encode(accept)[4:])
    assert destination(hello, got) == make_hello(layout, [1 << 40, 2 << 40], transport="zmq", senders=2)
    assert destination(hello, Accept(rid="a", rank=0, generation=1)) is hello


@pytest.mark.parametrize(("attempts", "window"), [(5, 3.0), (1, 0.0), (2, 0.2)])
def test_admission_window(attempts: int, window: float) -> None:
    config = SenderConfig(LAYOUT, LAYOUT.geometry(), attempts=attempts)
    assert config.admission_window_s == pytest.approx(window)


def test_waiting_for_one_request_does_not_hold_up_the_next(node: Node, prefill: Prefill) -> None:
    node.server.release("gone")
    prefill.step(node.claim("gone"), node.claim("wanted"))
    assert torch.equal(node.receive("wanted"), rows_of(40))
    assert prefill.jobs[0].failure is None  # still between its attempts


def test_destinations_are_limited(prefill: Prefill, silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MAX_DESTINATIONS", 1)
    prefill.step(claim("a", silent), claim("b", silent + 1 if silent < 65535 else 1))
    assert prefill.jobs[1].failure == "1 other destinations are in use"
    assert prefill.jobs[0].failure is None


def test_permanent_refusals_are_not_retried(node: Node, prefill: Prefill, caplog: pytest.LogCaptureFixture) -> None:
    prefill.step(node.claim("a"))
    node.server.wait("a", 20, NEVER)
    prefill.step(node.claim("a"))  # its rank is done already
    eventually(lambda: prefill.jobs[1].failure)
    assert prefill.jobs[1].failure == "HandoffRefused: refused: duplicate_rank (rid 'a', rank 0)"
    assert prefill.jobs[1].failure in caplog.text
    eventually(lambda: prefill.idle)


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (replace(LAYOUT, max_seq_len=39), "seq_len 40 exceeds decode's max_seq_len 39"),
        (replace(LAYOUT, profile=model(3).profile), "the peer has num_layers 3, we have 2"),
        (replace(LAYOUT, profile=model(1, draft=1).profile), "the peer has has_mtp True, we have False"),
        (replace(LAYOUT, tiled=True), "decode has layout_version 2140, prefill has 2040"),
    ],
)
def test_mismatches_are_named(prefill: Prefill, theirs: BufferLayout, text: str) -> None:
    node = Node(theirs)
    prefill.step(node.claim("a"))
    eventually(lambda: prefill.jobs[0].failure)
    assert text in prefill.jobs[0].failure
    with pytest.raises(HandoffFailed, match=re.escape(text)):
        node.server.wait("a", 20, NEVER)
    node.server.close()


@pytest.mark.parametrize(("rule", "releases_differ"), [("v2", False), ("v1", True)])
def test_a_prefill_node_with_other_weights_fails_and_names_both_digests(rule: str, releases_differ: bool) -> None:
    """A decode node of an older release makes its digest by another rule, and refuses as it did."""
    node, prefill = Node(checkpoint=f"{rule}:aaaa"), Prefill(checkpoint="v2:bbbb")
    prefill.step(node.claim("a"))
    text = f"the peer has checkpoint '{rule}:aaaa', we have 'v2:bbbb'"
    with pytest.raises(HandoffFailed, match=text):
        node.server.wait("a", 20, NEVER)
    assert text in prefill.jobs[0].failure
    assert ("legal is one release at both ends" in prefill.jobs[0].failure) == releases_differ
    prefill.sender.close()
    node.server.close()


@pytest.mark.parametrize(("decode", "prefills"), [("v1:aaaa", "v1:aaaa"), ("v1:aaaa", None), (None, "v1:bbbb")])
def test_equal_and_unknown_checkpoints_go_together(decode: str | None, prefills: str | None) -> None:
    node, prefill = Node(checkpoint=decode), Prefill(checkpoint=prefills)
    prefill.step(node.claim("a"))
    assert torch.equal(node.receive("a"), rows_of(40))
    prefill.sender.close()
    node.server.close()


def test_sender_counts_must_agree(node: Node) -> None:
    prefill = Prefill(senders=2)
    prefill.step(node.claim("a"))
    eventually(lambda: prefill.jobs[0].failure)
    assert "decode has senders 1, prefill has 2" in prefill.jobs[0].failure
    with pytest.raises(HandoffFailed, match="decode has senders 1, prefill has 2"):
        node.server.wait("a", 20, NEVER)
    prefill.sender.close()


def test_unreachable_node_fails_by_name_and_frees_its_slot(prefill: Prefill, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    prefill.step(claim("a", port))
    eventually(lambda: prefill.idle)
    assert f"handoff of request a to 127.0.0.1:{port} failed: ConnectionRefusedError" in caplog.text
    assert "can't be told" not in caplog.text  # that was not tried


@pytest.mark.parametrize("registers", [True, False])
def test_a_name_that_cannot_be_looked_up_fails_its_request_only(node: Node, registers: bool) -> None:
    """Whoever reaches vLLM's API may choose it where every host is allowed; telling the node looks it up again."""

    class Unregistered(Stuck):
        def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
            raise TransferError("no memory")

    transport = (Stuck if registers else Unregistered)(lambda _: TransferError("broken"))
    prefill = Prefill(lambda: transport, allowed=AllowList.parse("hosts", ["*"]))
    for host, failure in (("a" * 70, "is no host name"), ("127.0.0.1", "broken")):
        prefill.step(replace(node.claim("a"), host=host))
        eventually(lambda: prefill.idle)
        assert (failure if registers else "no memory") in prefill.jobs[-1].failure
    prefill.sender.close()


def test_a_layer_that_is_not_this_ranks_is_never_left_out_in_silence(node: Node, prefill: Prefill) -> None:
    slot = prefill.pool.acquire(40)
    job = Job(node.claim("a"), slot, prefill.pool.release)
    job.put(Part((0, 7), ("kv", "pe")))
    job.end()
    prefill.sender.submit(job)
    with pytest.raises(HandoffFailed, match=r"layers \[7\] are not rank 0's"):
        node.server.wait("a", 20, NEVER)


def test_hung_node_delays_neither_the_step_nor_other_nodes(node: Node, prefill: Prefill, silent: int) -> None:
    began = time.monotonic()
    prefill.step(claim("hung", silent), node.claim("a"))
    assert time.monotonic() - began < 5.0 < sender_module.HANDSHAKE_TIMEOUT_S
    assert torch.equal(node.receive("a"), rows_of(40))
    assert time.monotonic() - began < sender_module.HANDSHAKE_TIMEOUT_S
    assert prefill.jobs[0].failure is None


def test_hung_node_fails_at_its_deadline(prefill: Prefill, silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    prefill.step(claim("hung", silent))
    eventually(lambda: prefill.idle, 5)
    assert "TimeoutError" in prefill.jobs[0].failure


def test_one_thread_per_destination_that_ends_when_idle(
    node: Node, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads() -> int:
        return sum(thread.name == f"tilert-send-127.0.0.1:{node.server.port}" for thread in threading.enumerate())

    monkeypatch.setattr(sender_module, "IDLE_S", 0.5)
    prefill.step(node.claim("a"), node.claim("b"))
    assert threads() == 1
    node.receive("a")
    node.receive("b")
    eventually(lambda: threads() == 0)
    prefill.step(node.claim("c"))
    node.receive("c")


def test_failed_extraction_fails_its_request_only(
    node: Node, prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.step(node.claim("short of blocks", 40, [5, 2]), node.claim("a"))
    with pytest.raises(HandoffFailed, match="'short of blocks' failed: rank 0: .*40 tokens need 3 blocks of 16"):
        node.server.wait("short of blocks", 20, NEVER)
    node.server.release("short of blocks")
    assert torch.equal(node.receive("a"), rows_of(40))
    assert "40 tokens need 3 blocks of 16, got 2" in prefill.jobs[0].failure
    assert "extraction for request short of blocks failed" in caplog.text
    eventually(lambda: prefill.idle)


def test_forward_pass_that_never_ends_the_job(node: Node, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "PART_TIMEOUT_S", 0.2)
    prefill.extractor.begin([node.claim("a")])
    eventually(lambda: prefill.jobs[0].failure)
    assert "delivered nothing for 0.2 s" in prefill.jobs[0].failure
    assert not prefill.idle  # the forward pass may still write there
    prefill.extractor.finish()
    eventually(lambda: prefill.idle)  # the sender's thread may still be on its way out


class Stuck:
    """A transport whose writes miss their deadline and end when the test says so."""

    name = "zmq"
    fenced = False

    def __init__(self, error: Callable[["Future[None]"], TransferError]) -> None:
        self.settled: Future[None] = Future()
        self._error = error

    def register(self, ptr: int, nbytes: int, tensor: torch.Tensor) -> None:
        pass

    def staged(self, sources: object) -> "contextlib.nullcontext[None]":
        return contextlib.nullcontext()

    def prepared(self, meta: dict[str, Any], *_: object) -> "contextlib.nullcontext[dict[str, Any]]":
        return contextlib.nullcontext(meta)

    def write(self, *_: Any) -> None:
        raise self._error(self.settled)

    def close(self) -> None:
        pass


def test_overdue_write_keeps_slot_and_connection_until_it_has_ended(node: Node) -> None:
    stuck = Stuck(lambda settled: TransferTimeout("overdue", settled))
    prefill = Prefill(lambda: stuck)
    prefill.step(node.claim("a"))
    with pytest.raises(HandoffFailed, match="rank 0: TransferTimeout: overdue"):
        node.server.wait("a", 20, NEVER)
    node.server.release("a")
    with pytest.raises(HandoffTimeout, match="'state': 'CANCELLING'.*'writers': 1"):
        node.server.wait("b", 0.3, NEVER)
    assert not prefill.idle
    stuck.settled.set_result(None)
    eventually(lambda: prefill.idle)
    eventually(lambda: node.server.health()["slot"]["state"] == "FREE")
    prefill.sender.close()


def test_a_node_that_has_closed_gets_no_further_write(node: Node, prefill: Prefill) -> None:
    """It takes the end of the connection for the end of the writes."""
    prefill.extractor.begin([node.claim("a")])
    prefill.extractor.layer(CACHES.rows[0].name)
    eventually(lambda: node.server.health()["slot"].get("writers") == 1)
    (connection,) = node.server._connections.values()
    connection.interrupt()
    prefill.extractor.finish()
    eventually(lambda: prefill.idle)
    assert "closed the connection" in prefill.jobs[0].failure


def test_failed_write_is_told_to_the_consumer(node: Node) -> None:
    prefill = Prefill(lambda: Stuck(lambda _: TransferError("broken")))
    prefill.step(node.claim("a"))
    eventually(lambda: prefill.idle)
    assert prefill.jobs[0].failure == "TransferError: broken"
    with pytest.raises(HandoffFailed, match="rank 0: TransferError: broken"):
        node.server.wait("a", 20, NEVER)
    node.server.release("a")
    with pytest.raises(HandoffTimeout):
        node.server.wait("a", 0.1, NEVER)
    prefill.sender.close()


def test_transport_that_does_not_start_fails_every_job(node: Node) -> None:
    def make() -> Any:
        raise TransferError("no such device")

    prefill = Prefill(make)
    prefill.step(node.claim("a"), node.claim("b"))
    eventually(lambda: prefill.idle)
    assert [job.failure for job in prefill.jobs] == ["TransferError: no such device"] * 2
    for rid in ("a", "b"):
        with pytest.raises(HandoffFailed, match="rank 0: TransferError: no such device"):
            node.server.wait(rid, 20, NEVER)
    prefill.sender.close()


def test_close_gives_up_waiting_jobs_and_refuses_new_ones(node: Node, prefill: Prefill) -> None:
    node.server.release("gone")
    prefill.step(node.claim("gone"))
    eventually(lambda: prefill.sender._queues and not next(iter(prefill.sender._queues.values())).empty)
    prefill.sender.close()
    prefill.step(node.claim("late"))
    eventually(lambda: prefill.idle)
    assert [job.failure for job in prefill.jobs] == ["the sender is closed"] * 2


def test_exhausted_staging_refuses_by_name_and_recovers(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill(max_bytes=LAYOUT.shard_bytes)
    prefill.step(node.claim("a"), node.claim("b"))
    assert "request b is not handed off: 40 tokens need" in caplog.text and "tilert_max_staging_bytes" in caplog.text
    with pytest.raises(HandoffFailed, match="rank 0: 40 tokens need .* bytes of staging"):
        node.server.wait("b", 20, NEVER)
    node.receive("a")
    eventually(lambda: prefill.idle)
    prefill.step(node.claim("c"))
    assert torch.equal(node.receive("c"), rows_of(40))
    prefill.sender.close()


class TestPool:
    LAYOUT = replace(LAYOUT, max_seq_len=3000)

    def pool(self, max_bytes: int, dropped: list[Slot]) -> StagingPool:
        return StagingPool(self.LAYOUT, 0, torch.device("cpu"), max_bytes, dropped.append)

    def nbytes(self, tokens: int) -> int:
        return replace(self.LAYOUT, max_seq_len=tokens).shard_bytes

    @pytest.mark.parametrize(("seq_len", "tokens"), [(1, 256), (256, 256), (257, 512), (1500, 2048), (2500, 3000)])
    def test_capacity(self, seq_len: int, tokens: int) -> None:
        assert self.pool(1 << 30, []).acquire(seq_len).layout.max_seq_len == tokens

    def test_smallest_free_slot_that_fits(self) -> None:
        pool = self.pool(1 << 30, [])
        slots = [pool.acquire(tokens) for tokens in (2000, 300, 1000)]
        for slot in slots:
            pool.release(slot)
        assert pool.acquire(400) is slots[1]
        assert pool.acquire(400) is slots[2]

    def test_idle_small_slots_make_room(self) -> None:
        dropped: list[Slot] = []
        pool = self.pool(self.nbytes(1024), dropped)
        small = [pool.acquire(100), pool.acquire(100)]
        for slot in small:
            pool.release(slot)
        pool.acquire(1000)
        assert dropped == small and pool.total_bytes == self.nbytes(1024)

    def test_slots_in_use_do_not(self) -> None:
        dropped: list[Slot] = []
        pool = self.pool(self.nbytes(1024), dropped)
        pool.acquire(100)
        with pytest.raises(StagingExhausted, match=f"1000 tokens need {self.nbytes(1024)} bytes of staging"):
            pool.acquire(1000)
        assert dropped == []


def test_draft_layer_is_left_to_finish() -> None:
    caches, jobs = model(2, draft=1), []
    layout = BufferLayout(caches.profile, caches.row_format, max_seq_len=64)
    pool = StagingPool(layout, 0, torch.device("cpu"), None, lambda slot: None)
    extractor = Extractor(caches, pool, range(3), jobs.append)
    extractor.begin([claim("a", 1)])
    for entry in [caches.rows[2], caches.rows[1], caches.rows[1]]:
        extractor.layer(entry.name)
    extractor.layer("model.layers.7.unknown")
    assert [part.layers for part in jobs[0].take(1)] == [(1,)]
    extractor.finish()
    assert [part.layers for part in jobs[0].take(1)] == [(0, 2)]
    assert jobs[0].take(1) == []
