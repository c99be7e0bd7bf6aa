"""Extraction from caches on a GPU: the copies are ordered on the stream, and the events say when staging holds them."""

import threading
import time

import pytest
import torch

from tilert_ref.connector.caches import ModelCaches, describe_caches
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Extractor, Job
from tilert_ref.connector.layout import BufferLayout, plane_views
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import StagingPool
from tilert_ref.connector.transport import make_transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCKS = [7, 3, 90, 12, 55]
SEQ_LEN = 270
LAYERS = 3


def make_caches(fp8: bool) -> ModelCaches:
    generator = torch.Generator(device="cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)

    tensors = {}
    for layer in range(LAYERS):
        row = random(100, 64, 656) if fp8 else random(100, 64, 1152).view(torch.bfloat16)
        tensors[f"model.layers.{layer}.self_attn.attn"] = row
        tensors[f"model.layers.{layer}.self_attn.indexer.k_cache"] = random(100, 64, 132)
    return describe_caches(tensors, {}, LAYERS, (512, 64))


def expected(caches: ModelCaches, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [SEQ_LEN, row bytes] and pages [5, 8448], on the host."""
    rows = caches.rows[layer].cache.view(torch.uint8)[BLOCKS].flatten(0, 1)[:SEQ_LEN].cpu()
    return rows, caches.index[layer].cache[BLOCKS].flatten(1).cpu()


def claim(port: int = 1) -> Claim:
    return Claim("r", "r", SEQ_LEN, 1, [BLOCKS], "127.0.0.1", port)


def step(extractor: Extractor, caches: ModelCaches, wanted: Claim, cycles: int = 2_000_000_000) -> None:
    """A step whose kernels are slow (about a second), followed by one that overwrites the caches."""
    torch.cuda._sleep(cycles)
    extractor.begin([wanted])
    for entry in caches.rows[:-1]:
        extractor.layer(entry.name)
    extractor.finish()
    for entry in caches.rows + caches.index:
        entry.cache.zero_()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_staging_holds_the_rows_when_the_events_have_happened(fp8: bool, device: str) -> None:
    caches, jobs = make_caches(fp8), []
    wanted = [expected(caches, layer) for layer in range(LAYERS)]
    layout = BufferLayout(caches.profile, caches.row_format, max_seq_len=512)
    pool = StagingPool(layout, 0, torch.device(device), None, lambda slot: None, pinned=device == "cpu")
    extractor = Extractor(caches, pool, range(LAYERS), jobs.append)
    step(extractor, make_caches(fp8), claim(), cycles=1)  # loading kernels and pinning memory wait for the device
    torch.cuda.synchronize()
    jobs.pop().sender_through()
    began = time.monotonic()
    step(extractor, caches, claim())
    took = time.monotonic() - began
    job: Job = jobs[0]
    parts = job.take(1)
    assert job.failure is None and not parts[-1].ready.query() and took < 0.5  # nothing waited for the device
    for part in parts:
        part.ready.synchronize()
    for layer, (rows, pages) in enumerate(wanted):
        kv, pe, ki = job.slot.planes(layer, SEQ_LEN)
        assert torch.equal(torch.cat([kv, pe], dim=1).cpu(), rows)
        assert torch.equal(ki.cpu(), pages)


def test_pinned_staging_reaches_a_host_buffer() -> None:
    caches = make_caches(fp8=True)
    wanted = [expected(caches, layer) for layer in range(LAYERS)]
    layout = BufferLayout(caches.profile, caches.row_format, max_seq_len=300)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    server = ReceiveServer(layout, buffer, make_transport("zmq", "127.0.0.1"), "127.0.0.1", 0)
    server.start()
    sender = Sender(SenderConfig(layout, layout.geometry()), lambda: make_transport("zmq", "", receiver=False))
    pool = StagingPool(layout, 0, torch.device("cpu"), None, sender.forget, pinned=True)
    try:
        step(Extractor(caches, pool, range(LAYERS), sender.submit), caches, claim(server.port))
        server.wait("r", 30, threading.Event())
        for layer, (rows, pages) in enumerate(wanted):
            kv, pe, ki = plane_views(layout, buffer, layer, SEQ_LEN)
            assert torch.equal(torch.cat([kv, pe], dim=1), rows)
            assert torch.equal(ki, pages)
    finally:
        sender.close()
        server.close()
