"""Sender and receiver in one machine over zmq: what arrives is what vLLM's caches held, byte for byte."""

import threading
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilert_ref.connector.caches import Group, ModelCaches, describe_caches
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Extractor
from tilert_ref.connector.layout import BufferLayout, Plane
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import StagingPool
from tilert_ref.connector.transport import make_transport

DEADLINE_S = 30


@dataclass(frozen=True)
class Model:
    """A made-up model as vLLM would register it. index_layers: layers with an indexer of their own."""

    main_layers: int
    mtp: bool
    fp8: bool
    index_layers: tuple[int, ...]
    row_block: int
    index_block: int
    manager_blocks: int  # cache blocks per block id of vLLM's manager

    @property
    def num_layers(self) -> int:
        return self.main_layers + self.mtp


@st.composite
def models(draw: st.DrawFn) -> Model:
    main, mtp = draw(st.integers(1, 4)), draw(st.booleans())
    sparse = draw(st.booleans())
    others = draw(st.sets(st.integers(1, main + mtp - 1), max_size=3)) if main + mtp > 1 else set()
    return Model(
        main_layers=main,
        mtp=mtp,
        fp8=draw(st.booleans()),
        index_layers=tuple(sorted({0} | others)) if sparse else (),
        row_block=draw(st.sampled_from([1, 16, 32, 64, 128])),
        index_block=draw(st.sampled_from([16, 64, 96])),
        manager_blocks=draw(st.integers(1, 2)),
    )


def make_caches(model: Model, seed: int, num_blocks: int) -> ModelCaches:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, Group] = {}
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}.self_attn.attn"
        if model.fp8:
            tensors[name] = random(num_blocks, model.row_block, 656)
        else:
            tensors[name] = random(num_blocks, 1, model.row_block, 1152).view(torch.bfloat16)
        groups[name] = Group(0, model.row_block * model.manager_blocks)
    for layer in model.index_layers:
        name = f"model.layers.{layer}.self_attn.indexer.k_cache"
        tensors[name] = random(num_blocks, model.index_block, 132)
        groups[name] = Group(1, model.index_block)
    return describe_caches(tensors, groups, model.main_layers, (512, 64))


def expected_rows(model: Model, caches: ModelCaches, layer: int, claim: Claim) -> torch.Tensor:
    """uint8 [seq_len, row bytes], token by token."""
    cache = caches.rows[layer].cache.contiguous().view(torch.uint8)
    rows = []
    for token in range(claim.seq_len):
        manager_block, within = divmod(token, model.row_block * model.manager_blocks)
        block = claim.block_ids[0][manager_block] * model.manager_blocks + within // model.row_block
        rows.append(cache[block, within % model.row_block])
    return torch.stack(rows)


def expected_keys(model: Model, caches: ModelCaches, layer: int, claim: Claim) -> torch.Tensor:
    """uint8 [seq_len, 132]: codes and scale of each token."""
    source = max(index for index in model.index_layers if index <= layer)
    cache = next(entry.cache for entry in caches.index if entry.layer == source).flatten(1)
    keys = []
    for token in range(claim.seq_len):
        block, within = claim.block_ids[1][token // model.index_block], token % model.index_block
        scale = model.index_block * 128 + within * 4
        keys.append(torch.cat([cache[block, within * 128 : within * 128 + 128], cache[block, scale : scale + 4]]))
    return torch.stack(keys)


def expected_planes(
    model: Model, caches: ModelCaches, claim: Claim
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Per layer: rows and index keys, taken while the caches still hold them."""
    return {
        layer: (
            expected_rows(model, caches, layer, claim),
            expected_keys(model, caches, layer, claim) if model.index_layers else None,
        )
        for layer in range(model.num_layers)
    }


class Arrived:
    """What one request left in a receive buffer that was full of `FILLER`."""

    FILLER = 0xA5

    def __init__(self, layout: BufferLayout, buffer: torch.Tensor, seq_len: int) -> None:
        self._layout = layout
        self._buffer = buffer
        self._seq_len = seq_len
        self._untouched = torch.ones_like(buffer, dtype=torch.bool)

    def plane(self, plane: Plane, layer: int) -> torch.Tensor:
        shard, start = self._layout.offset(plane, layer)
        start += shard * self._layout.shard_bytes
        part = slice(start, start + self._layout.layer_bytes(plane, self._seq_len))
        self._untouched[part] = False
        return self._buffer[part].view(-1, self._layout.unit_bytes(plane))

    def assert_equals(self, expected: dict[int, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        for layer, (rows, keys) in expected.items():
            assert torch.equal(torch.cat([self.plane("kv", layer), self.plane("pe", layer)], dim=1), rows)
            if keys is not None:
                pages = self.plane("ki", layer)
                codes, scales = pages[:, :8192].reshape(-1, 128), pages[:, 8192:].reshape(-1, 4)
                assert torch.equal(torch.cat([codes, scales], dim=1)[: self._seq_len], keys)
        assert (self._buffer[self._untouched] == self.FILLER).all()


@st.composite
def batches(draw: st.DrawFn, model: Model, num_blocks: int) -> list[tuple[int, list[list[int]]]]:
    """(seq_len, block ids per group) of one or two requests of one step."""
    manager_blocks = num_blocks // model.manager_blocks
    room = min(manager_blocks * model.manager_blocks * model.row_block, num_blocks * model.index_block, 200)
    return [
        (
            draw(st.integers(1, room)),
            [draw(st.permutations(range(manager_blocks))), draw(st.permutations(range(num_blocks)))],
        )
        for _ in range(draw(st.integers(1, 2)))
    ]


class Ranks:
    """The worker halves of `senders` tensor parallel ranks."""

    def __init__(self, caches: ModelCaches, stage: BufferLayout, layerwise: bool) -> None:
        self._senders: list[Sender] = []
        self._extractors: list[Extractor] = []
        for rank in range(stage.nshards):
            # Patient: a busy machine may need longer for the request before than the 3 s that five attempts take.
            config = SenderConfig(stage, stage.geometry(), senders=stage.nshards, rank=rank, attempts=8)
            sender = Sender(config, lambda: make_transport("zmq", "", receiver=False))
            pool = StagingPool(stage, rank, torch.device("cpu"), None, sender.forget)
            owned = range(rank, stage.profile.num_layers, stage.nshards)
            self._senders.append(sender)
            self._extractors.append(Extractor(caches, pool, owned, sender.submit, layerwise=layerwise))

    def step(self, claims: list[Claim], fired: list[str]) -> None:
        """One step of vLLM in which the hooks of the layers `fired` run."""
        for extractor in self._extractors:
            extractor.begin(claims)
            for name in fired:
                extractor.layer(name)
            extractor.finish()

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_received_bytes_equal_the_caches(data: st.DataObject) -> None:
    model = data.draw(models())
    num_blocks = data.draw(st.integers(2, 12))
    caches = make_caches(model, data.draw(st.integers(0, 2**31)), num_blocks)
    batch = data.draw(batches(model, num_blocks))
    longest = max(seq_len for seq_len, _ in batch)

    def layout(nshards: int) -> BufferLayout:
        room = longest + data.draw(st.integers(0, 70))
        return BufferLayout(caches.profile, caches.row_format, room, nshards=nshards)

    target, stage = layout(data.draw(st.integers(1, 3))), layout(data.draw(st.integers(1, min(3, model.num_layers))))
    buffer = torch.empty(data.draw(st.integers(1, 2)), target.total_bytes, dtype=torch.uint8)
    server = ReceiveServer(target, buffer, make_transport("zmq", "127.0.0.1"), "127.0.0.1", 0, senders=stage.nshards)
    server.start()
    ranks = Ranks(caches, stage, layerwise=data.draw(st.booleans()))
    claims = [
        Claim(f"request-{i}", f"rid-{i}", seq_len, 7 + i, blocks, "127.0.0.1", server.port)
        for i, (seq_len, blocks) in enumerate(batch)
    ]
    expected = [expected_planes(model, caches, claim) for claim in claims]
    buffer.fill_(Arrived.FILLER)
    try:
        ranks.step(claims, data.draw(st.lists(st.sampled_from([entry.name for entry in caches.rows]))))
        for entry in caches.rows + caches.index:
            entry.cache.view(torch.uint8).zero_()  # the step is over: its blocks may be overwritten
        for claim, planes in zip(claims, expected, strict=True):
            record = server.wait(claim.rid, DEADLINE_S, threading.Event())
            assert (record.seq_len, record.last_prompt_token) == (claim.seq_len, claim.last_prompt_token)
            Arrived(target, buffer[record.slot], claim.seq_len).assert_equals(planes)
            buffer[record.slot].fill_(Arrived.FILLER)
            server.release(claim.rid)
    finally:
        ranks.close()
        server.close()
