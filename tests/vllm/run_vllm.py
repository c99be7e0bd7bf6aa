"""Runs vLLM once, in a process of its own, with the plugin loaded, and saves what its caches hold.

    python run_vllm.py PLAN.json OUT.pt      a line on stdin ends it, so that handoffs can finish

PLAN: {"engine": arguments of vllm.LLM, "batches": [[{"prompt": [ids], "params": kv_transfer_params or null}]]}
OUT: {"rows": {request id: {layer: uint8 [prompt tokens, row bytes]}}, "chunked": bool,
      "facts": [at start, after each batch]}

The rows are read through block ids taken from the scheduler itself and after the batch has run, so they depend on
nothing that the plugin does or when it does it.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and this script share one process
}

import psutil
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler

from tilert_ref.connector.prefill_connector import TileRTConnector

CUSTOM_OPS = {"custom_ops": ["all", "-rotary_embedding"]}  # without it eager RoPE is wrong on a CPU


class Spy:
    """Block ids of every request, as the scheduler gives them out."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}

    def install(self) -> None:
        original = Scheduler.schedule

        def schedule(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            output = original(scheduler, *args, **kwargs)
            self.look(output)
            return output

        Scheduler.schedule = schedule

    def look(self, output: Any) -> None:
        for request in output.scheduled_new_reqs:
            self.blocks[request.req_id] = list(request.block_ids[0])
            self.prompts[request.req_id] = len(request.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.blocks[request_id] += added[0] if added else []

    def take_rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
        """Rows of the requests since the last call, whose blocks nobody else may have got meanwhile."""
        used = [block for blocks in self.blocks.values() for block in set(blocks)]
        if len(set(used)) < len(used):
            raise RuntimeError("a block was given out twice within one batch")
        rows = self._rows(caches)
        self.blocks.clear()
        return rows

    def _rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
        return {rid: {layer_of(name): self._read(rid, cache) for name, cache in caches.items()} for rid in self.blocks}

    def _read(self, request_id: str, cache: torch.Tensor) -> torch.Tensor:
        cache = cache.squeeze(1)
        block = cache.shape[1]
        tokens = range(self.prompts[request_id])
        return torch.stack([cache[self.blocks[request_id][t // block], t % block] for t in tokens]).view(torch.uint8)


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


def remember_caches() -> dict[str, torch.Tensor]:
    """Is filled with vLLM's caches by layer name when the plugin gets them."""
    caches: dict[str, torch.Tensor] = {}
    register = TileRTConnector.register_kv_caches

    def remember(connector: TileRTConnector, kv_caches: dict[str, torch.Tensor]) -> None:
        caches.update(kv_caches)
        register(connector, kv_caches)

    TileRTConnector.register_kv_caches = remember
    return caches


def plugin() -> TileRTConnector:
    """The worker's instance, alone or inside MultiConnector."""
    group = get_kv_transfer_group()
    return next(c for c in getattr(group, "sub_connectors", [group]) if isinstance(c, TileRTConnector))


def facts() -> dict[str, Any]:
    """Traces that a handoff leaves in this process."""
    worker = plugin()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tilert")),
        "connections": len(psutil.Process().net_connections(kind="tcp")),
        "staging_bytes": worker._extractor._pool.total_bytes,
        "transport": worker._sender._transport is not None,
        "nixl_imported": "nixl" in sys.modules,
        "second_child": getattr(sys.modules.get("second_child"), "CALLS", None),
    }


def main(plan_path: str, out_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    caches = remember_caches()
    spy = Spy()
    spy.install()
    llm = LLM(
        dtype="bfloat16", max_num_seqs=8, enforce_eager=True, compilation_config=CUSTOM_OPS, seed=0, **plan["engine"]
    )
    seen, rows = [facts()], {}
    for batch in plan["batches"]:
        sampling = [
            SamplingParams(temperature=0, max_tokens=1, extra_args=_extra_args(request["params"])) for request in batch
        ]
        llm.generate([{"prompt_token_ids": request["prompt"]} for request in batch], sampling, use_tqdm=False)
        seen.append(facts())
        rows |= spy.take_rows(caches)
    chunked = llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
    torch.save({"rows": rows, "facts": seen, "chunked": chunked}, out_path)
    print("saved", flush=True)
    sys.stdin.readline()


def _extra_args(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if params is None else {"kv_transfer_params": params}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
