"""Our two ends without vLLM: a prefill node of several ranks over given caches, and a decode node."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from wire_case import BLOCKS, Caches, Case

from tilert_ref.connector import codec, wire
from tilert_ref.connector.admission import Record
from tilert_ref.connector.caches import ModelCaches, describe_caches
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Extractor
from tilert_ref.connector.layout import BufferLayout, profile, row_format
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import StagingPool
from tilert_ref.connector.transport import make_transport

LIMIT_S = 60.0
NEVER = threading.Event()


def layout_of(case: Case) -> BufferLayout:
    """Of the receive buffer."""
    return BufferLayout(
        profile(case.profile), row_format(case.kv_cache_dtype), case.max_seq_len, case.shards, tiled=case.tiled
    )


def model_caches(case: Case, caches: Caches) -> ModelCaches:
    named = "glm5" if case.profile == "glm5_no_mtp" else case.profile
    return describe_caches(caches, {}, case.layers - case.has_mtp, (512, 64), model=named)


class Rank:
    """Staging, extractor and sender of one tensor-parallel rank."""

    def __init__(self, case: Case, caches: ModelCaches, rank: int, transport: str = "nixl") -> None:
        layout = BufferLayout(caches.profile, caches.row_format, case.stage_max, nshards=case.senders, tiled=case.tiled)
        config = SenderConfig(layout, layout.geometry(), senders=case.senders, rank=rank)
        self._caches = caches
        self._sender = Sender(config, lambda: make_transport(transport, "", receiver=False))
        pool = StagingPool(layout, rank, caches.device, None, self._sender.forget)
        owned = range(rank, case.layers, case.senders)
        self._extractor = Extractor(caches, pool, owned, self._sender.submit, tiled=case.tiled)

    def prefill(self, claim: Claim) -> None:
        """The step that finishes the claim's prompt."""
        self._extractor.begin([claim])
        for entry in self._caches.rows:
            self._extractor.layer(entry.name)
        self._extractor.finish()

    def close(self) -> None:
        self._sender.close()


@contextmanager
def prefill_node(case: Case, caches: Caches, transport: str = "nixl") -> Iterator[list[Rank]]:
    described = model_caches(case, caches)
    ranks = [Rank(case, described, rank, transport) for rank in range(case.senders)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def claim(case: Case, port: int, rid: str | None = None, last_prompt_token: int = 4711) -> Claim:
    request_id = f"chatcmpl-{rid or case.rid}"
    return Claim(request_id, rid or case.rid, case.seq_len, last_prompt_token, [BLOCKS], "127.0.0.1", port)


def give_up(case: Case, claim: Claim) -> None:
    """What a sender of ours does whose handoff fails after the node has accepted it."""
    deadline = time.monotonic() + LIMIT_S
    while not _give_up_once(case, claim, deadline):
        time.sleep(0.1)  # the node is busy with an earlier request


def _give_up_once(case: Case, claim: Claim, deadline: float) -> bool:
    connection = wire.connect(claim.host, claim.port, deadline)
    try:
        codec.decode_hello(connection.receive(deadline))
        geometry = layout_of(case).geometry()
        announce = codec.Announce(rid=claim.rid, rank=0, seq_len=claim.seq_len, tilert_ref=geometry)
        connection.send(announce, deadline)
        reply = codec.decode_reply(connection.receive(deadline))
        if isinstance(reply, codec.Accept):
            connection.send(codec.Done(done=False, rid=claim.rid, rank=0, generation=reply.generation), deadline)
        return isinstance(reply, codec.Accept)
    finally:
        connection.close()


@dataclass
class DecodeNode:
    """Our receive server and its buffer, zero at first."""

    case: Case
    transport: str = "nixl"
    device: str = "cpu"
    slots: int = 1

    def __post_init__(self) -> None:
        layout = layout_of(self.case)
        shape = (layout.total_bytes,) if self.slots == 1 else (self.slots, layout.total_bytes)
        self.buffer = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        transport = make_transport(self.transport, "127.0.0.1")
        self.server = ReceiveServer(
            layout, self.buffer, transport, "127.0.0.1", 0, senders=self.case.senders, request_timeout=LIMIT_S
        )
        self.server.start()

    def __enter__(self) -> "DecodeNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def slot_of(self, record: Record) -> torch.Tensor:
        """The part of the buffer that a request's KV is in."""
        return self.buffer if self.slots == 1 else self.buffer[record.slot]
