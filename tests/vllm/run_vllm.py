"""Runs vLLM once, in a process of its own, with the plugin loaded, and saves what its caches hold.

    python run_vllm.py PLAN.json OUT.pt      a line on stdin ends it, so that handoffs can finish

PLAN: {"engine": arguments of vllm.LLM, "batches": [[{"prompt": [ids], "params": kv_transfer_params or null}]]}
OUT: {"rows": {request id: {layer: uint8 [prompt tokens, row bytes]}}, "chunked": bool,
      "replies": [each request's kv_transfer_params, as vLLM would answer them], "facts": [at start, after each batch]}

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

from tilert_ref.connector.prefill_connector import TileRTConnector
from tilert_ref.golden.vllm_spy import BlockSpy, token_rows

CUSTOM_OPS = {"custom_ops": ["all", "-rotary_embedding"]}  # without it eager RoPE is wrong on a CPU


class Spy(BlockSpy):
    """The rows of every request's prompt, read through the blocks that the scheduler gives out."""

    def take_rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
        """Rows of the requests since the last call, whose blocks nobody else may have got meanwhile."""
        used = [block for groups in self.blocks.values() for block in set(groups[0])]
        if len(set(used)) < len(used):
            raise RuntimeError("a block was given out twice within one batch")
        rows = self._rows(caches)
        self.clear()
        return rows

    def _rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
        return {rid: {layer_of(name): self._read(rid, cache) for name, cache in caches.items()} for rid in self.blocks}

    def _read(self, request_id: str, cache: torch.Tensor) -> torch.Tensor:
        return token_rows(cache, self.blocks[request_id][0], self.prompts[request_id])


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
    seen, rows, replies = [facts()], {}, []
    for batch in plan["batches"]:
        sampling = [
            SamplingParams(temperature=0, max_tokens=1, extra_args=_extra_args(request["params"])) for request in batch
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in batch]
        replies += [output.kv_transfer_params for output in llm.generate(prompts, sampling, use_tqdm=False)]
        seen.append(facts())
        rows |= spy.take_rows(caches)
    chunked = llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
    torch.save({"rows": rows, "replies": replies, "facts": seen, "chunked": chunked}, out_path)
    print("saved", flush=True)
    sys.stdin.readline()


def _extra_args(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if params is None else {"kv_transfer_params": params}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
