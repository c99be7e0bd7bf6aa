"""One handoff scenario on a real GPU: real vLLM with our plugin, real NIXL, and a byte comparison with vLLM's caches.

    python handoff_cuda.py SCENARIO OUT.json

Prints and writes what ran (versions, GPU, cache shapes) and how many bytes were compared. Any difference is an error.
"""

import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
from vllm import LLM, SamplingParams
from vllm.version import __version__

from tilert_ref.connector.layout import BF16, FP8_DS_MLA, BufferLayout, model_profile, plane_views
from tilert_ref.connector.prefill_connector import TileRTConnector
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.transport import make_transport
from tilert_ref.engine.make_tiny import make_tiny
from tilert_ref.golden.recording import index_of_pages
from tilert_ref.golden.vllm_spy import BlockSpy, index_tokens, token_rows

MAX_SEQ_LEN, LAYERS = 2048, 3
MODULE = "tilert_ref.connector.prefill_connector"
CHUNKED = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, "enable_prefix_caching": True}


@dataclass(frozen=True)
class Scenario:
    arch: str
    row_format: Any
    engine: dict[str, Any]
    mtp: bool = True
    buffer_device: str = "cpu"  # of staging and of the receive buffer
    transport: str = "nixl"
    options: dict[str, Any] = field(default_factory=dict)


EAGER = CHUNKED | {"enforce_eager": True}
SCENARIOS = {
    "dense bf16, chunked, host buffers": Scenario("dsv3", BF16, EAGER),
    "dense bf16, chunked, device buffers": Scenario("dsv3", BF16, EAGER, buffer_device="cuda"),
    "glm5 fp8_ds_mla, chunked, device buffers": Scenario(
        "glm5", FP8_DS_MLA, EAGER | {"kv_cache_dtype": "fp8_ds_mla"}, buffer_device="cuda"
    ),
    "glm5 bf16, chunked, zmq": Scenario("glm5", BF16, EAGER, transport="zmq"),
    "dsv32 fp8_ds_mla, whole prompts": Scenario(
        "dsv32", FP8_DS_MLA, {"kv_cache_dtype": "fp8_ds_mla", "enforce_eager": True}, mtp=False
    ),
    "dense bf16, compiled with CUDA graphs": Scenario("dsv3", BF16, CHUNKED),
}


class Spy(BlockSpy):
    """Block ids per request from the scheduler, caches from the plugin's own registration call."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = dict[str, torch.Tensor]()

    def install(self) -> None:
        super().install()
        register = TileRTConnector.register_kv_caches

        def remember(connector: TileRTConnector, kv_caches: dict[str, torch.Tensor]) -> None:
            self.caches.update(kv_caches)
            register(connector, kv_caches)

        TileRTConnector.register_kv_caches = remember


def main(name: str, out: str) -> None:
    scenario, spy = SCENARIOS[name], Spy()
    spy.install()
    index = scenario.arch != "dsv3"
    layout = BufferLayout(model_profile(LAYERS + scenario.mtp, scenario.mtp, index), scenario.row_format, MAX_SEQ_LEN)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=scenario.buffer_device)
    server = ReceiveServer(layout, buffer, make_transport(scenario.transport, "127.0.0.1"), "127.0.0.1", 0)
    server.start()
    with tempfile.TemporaryDirectory() as scratch:
        make_tiny(Path(scratch), scenario.arch)
        llm = start(Path(scratch), scenario)
        facts = run(llm, scenario, spy, layout, buffer, server)
    facts |= {"scenario": name, "vllm": __version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    facts["caches"] = {n: f"{list(t.shape)} {t.dtype}" for n, t in spy.caches.items()}
    Path(out).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # vLLM's and NIXL's threads have nothing left to do


def start(model_dir: Path, scenario: Scenario) -> LLM:
    extra = {"tilert_transport": scenario.transport, "tilert_pd_buffer_device": scenario.buffer_device}
    config = {"kv_connector": "TileRTConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_producer"}
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    return LLM(
        str(model_dir),
        dtype="bfloat16",
        max_model_len=MAX_SEQ_LEN,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        seed=0,
        kv_transfer_config=config | {"kv_connector_extra_config": extra},
        **({"speculative_config": speculative} if scenario.mtp else {}),
        **scenario.engine,
    )


def run(
    llm: LLM, scenario: Scenario, spy: Spy, layout: BufferLayout, buffer: torch.Tensor, server: ReceiveServer
) -> dict[str, Any]:
    """Batches with one marked request each (there is one receive buffer) among unmarked ones."""
    draw = torch.Generator().manual_seed(3)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 480, (length,), generator=draw).tolist()

    long = prompt(1500)
    marked = [prompt(1), prompt(64), prompt(65), long, long[:1000] + prompt(77), prompt(700)]
    params = {"tilert_host": "127.0.0.1", "tilert_ctrl_port": server.port}
    results = []
    for ids in marked:
        batch = [(prompt(40), None), (ids, {"kv_transfer_params": params}), (prompt(300), None)]
        sampling = [SamplingParams(temperature=0, max_tokens=4, extra_args=extra) for _, extra in batch]
        before = set(spy.blocks)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p, _ in batch], sampling, use_tqdm=False)
        (name,) = [n for n in spy.blocks if n not in before and spy.prompts[n] == len(ids)]
        rid = name.split("-")[0]
        record = server.wait(rid, 60, threading.Event())
        seconds = time.perf_counter() - started
        compared = compare(spy, name, layout, buffer, record.seq_len, len(ids))
        server.release(rid)
        results.append(
            {"tokens": len(ids), "steps": spy.steps[name], "prefix_hit": spy.hits[name], "bytes_equal": compared}
            | {"seconds": round(seconds, 3)}
        )
    return {"requests": results}


def compare(spy: Spy, name: str, layout: BufferLayout, buffer: torch.Tensor, seq_len: int, expected: int) -> int:
    """Bytes that were compared; raises AssertionError on the first layer that differs."""
    assert seq_len == expected, f"{seq_len} tokens announced, {expected} in the prompt"
    torch.cuda.synchronize()
    compared, blocks = 0, spy.blocks[name][0]  # all layers share group 0's blocks in these models
    for cache_name, cache in spy.caches.items():
        layer = int(cache_name.split("layers.")[1].split(".")[0])
        kv, pe, pages = (view if view is None else view.cpu() for view in plane_views(layout, buffer, layer, seq_len))
        if "indexer" in cache_name:
            got, theirs = index_of_pages(pages, seq_len), index_tokens(cache, blocks, seq_len).cpu()
        else:
            got, theirs = torch.cat((kv, pe), dim=1), token_rows(cache, blocks, seq_len).cpu()
        assert theirs.any(), f"{cache_name} of {name} is all zero"
        assert torch.equal(got, theirs), f"{cache_name} of {name}: {int((got != theirs).sum())} bytes differ"
        compared += got.numel()
    return compared


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
