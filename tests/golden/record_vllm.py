"""Runs real vLLM in this process and records what it decodes: tokens, logprobs, and the KV rows that it wrote.

    python record_vllm.py PLAN.json OUT.pt

PLAN: {"engine": arguments of vllm.LLM, "tokens": n, "parts": {name: {"prompts": [[ids]], "rounds": [round, ...]}}}
A round is "alone" (one request at a time, rows recorded), "repeat" (the same again) or "batch" (all at once).
OUT: {"parts": {name: {round: [answer, ...]}}, "facts": {...}}, an answer being
     {"ids", "top": [[(id, logprob) x 5]], "rows": uint8 [layers, tokens, row bytes] or None}

Rows are read through the block ids that the scheduler gave out, right after the request and before any other runs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and this script share one process
}

import torch
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.version import __version__


class BlockSpy:
    """Block ids of the requests since the last `clear`, in the order in which the scheduler gave them out."""

    def __init__(self) -> None:
        self.blocks = dict[str, list[int]]()

    def install(self) -> None:
        schedule = Scheduler.schedule

        def spied(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            output = schedule(scheduler, *args, **kwargs)
            for request in output.scheduled_new_reqs:
                self.blocks[request.req_id] = list(request.block_ids[0])
            cached = output.scheduled_cached_reqs
            for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
                self.blocks[name] += added[0] if added else []
            return output

        Scheduler.schedule = spied


def main(plan_path: str, out_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    spy = BlockSpy()
    spy.install()
    fixed = {"dtype": "bfloat16", "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    operators = {"custom_ops": ["all", "-rotary_embedding"]}  # else eager RoPE is wrong on a CPU
    llm = LLM(**fixed | {"compilation_config": operators} | plan["engine"])
    params = SamplingParams(temperature=0, max_tokens=plan["tokens"], ignore_eos=True, logprobs=5)
    recorded, seconds = {}, {"start": time.process_time()}
    for name, part in plan["parts"].items():
        recorded[name] = {}
        for round_ in part["rounds"]:
            started = time.process_time()
            recorded[name][round_] = record(llm, part["prompts"], params, round_, spy)
            seconds[f"{name} {round_}"] = time.process_time() - started
    torch.save({"parts": recorded, "facts": facts(llm) | {"cpu_seconds": seconds}}, out_path)


def record(llm: LLM, prompts: list[list[int]], params: SamplingParams, round_: str, spy: BlockSpy) -> list[dict]:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    if round_ == "batch":
        return [answer(output) for output in llm.generate(requests, params, use_tqdm=False)]
    answers = []
    for request in requests:
        spy.blocks.clear()
        answers.append(answer(llm.generate([request], params, use_tqdm=False)[0]))
        if round_ == "alone":
            (blocks,) = spy.blocks.values()
            tokens = len(request["prompt_token_ids"]) + params.max_tokens - 1  # the last token's row is never written
            answers[-1]["rows"] = read_rows(llm, blocks, tokens)
    return answers


def answer(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    top = [sorted(((i, lp.logprob) for i, lp in at.items()), key=lambda pair: -pair[1]) for at in best.logprobs]
    return {"ids": list(best.token_ids), "top": top, "rows": None}


def read_rows(llm: LLM, blocks: list[int], tokens: int) -> torch.Tensor:
    caches = layer_caches(llm)
    block = caches[0].shape[-2]
    slots = torch.tensor([blocks[t // block] * block + t % block for t in range(tokens)])
    return torch.stack([c.reshape(-1, c.shape[-1])[slots].view(torch.uint8) for c in caches])


def layer_caches(llm: LLM) -> list[torch.Tensor]:
    """The caches of all attention layers by layer index, the MTP layer's last."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    by_index = sorted(caches, key=lambda name: int(name.split("layers.")[1].split(".")[0]))
    return [caches[name][0] if isinstance(caches[name], list) else caches[name] for name in by_index]


def facts(llm: LLM) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "vllm": __version__,
        "torch": torch.__version__,
        "chunked": bool(config.scheduler_config.enable_chunked_prefill),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "block_size": config.cache_config.block_size,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
