"""Runs a sparse model in vLLM with both plugins (sparse_plugin and ours), in a process of its own, and records it.

    python run_vllm_sparse.py PLAN.json OUT.pt      a line on stdin ends it, so that handoffs can finish

PLAN: {"engine": arguments of vllm.LLM, "tokens": n, "batches": [[{"prompt": [ids], "params": kv_transfer_params}]]}
OUT: {"answers": [answer in order], "facts": {...}}, an answer being
    "ids", "top": the tokens and the five best (id, logprob) at each of them
    "rows": {layer: uint8 [prompt tokens, 1152]}, "index": {layer: uint8 [prompt tokens, 132]}: vLLM's caches
    "chosen": {layer: {position: the positions that its query attended to, ascending}}, from index_topk on; of a batch
        with one request only
"""

import json
import sys
from pathlib import Path
from typing import Any

import run_vllm  # sets vLLM's environment, so it comes before vLLM
import torch
from run_vllm import CUSTOM_OPS, Spy, layer_of
from vllm import LLM, SamplingParams
from vllm_cpu_sparse.attention import Request
from vllm_cpu_sparse.indexer import TorchSparseIndexer

from tilert_ref.golden.vllm_spy import index_tokens


class CacheSpy(Spy):
    """A request's rows and index keys, read through the blocks that the scheduler gave out."""

    def take_rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[str, dict[int, torch.Tensor]]]:
        """Without the check that no block is used twice: a warm prefix cache shares them between requests."""
        rows = self._rows(caches)
        self.clear()
        return rows

    def _rows(self, caches: dict[str, torch.Tensor]) -> dict[str, dict[str, dict[int, torch.Tensor]]]:
        read: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
        for rid in self.blocks:
            read[rid] = {"rows": {}, "index": {}}
            for name, cache in caches.items():
                kind, take = ("index", self._keys) if "indexer" in name else ("rows", self._read)
                read[rid][kind][layer_of(name)] = take(rid, cache)
        return read

    def _keys(self, request_id: str, cache: torch.Tensor) -> torch.Tensor:
        return index_tokens(cache, self.blocks[request_id][0], self.prompts[request_id])


class ChoiceSpy:
    """What the indexers chose since the last `clear`. A position that is run again counts with its last run."""

    def __init__(self) -> None:
        self.chosen: dict[int, dict[int, torch.Tensor]] = {}

    def clear(self) -> None:
        self.chosen = {}

    def install(self) -> None:
        choose = TorchSparseIndexer.choose

        def spied(op: TorchSparseIndexer, request: Request, *inputs: torch.Tensor) -> torch.Tensor:
            rows = choose(op, request, *inputs)
            layer = self.chosen.setdefault(layer_of(op.k_cache.prefix), {})
            for position, row in zip(range(request.first, request.length), rows.short(), strict=True):
                if position >= op.topk_tokens:
                    layer[position] = row.clone()
            return rows

        TorchSparseIndexer.choose = spied


def main(plan_path: str, out_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    caches, cache_spy, choice_spy = run_vllm.remember_caches(), CacheSpy(), ChoiceSpy()
    cache_spy.install()
    choice_spy.install()
    fixed = {"dtype": "bfloat16", "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    llm = LLM(compilation_config=CUSTOM_OPS, **fixed, **plan["engine"])
    answers = []
    for batch in plan["batches"]:
        choice_spy.clear()
        answers += run(llm, batch, plan["tokens"], cache_spy, caches)
        if len(batch) == 1:
            answers[-1]["chosen"] = choice_spy.chosen
    torch.save({"answers": answers, "facts": facts(llm)}, out_path)
    print("saved", flush=True)
    sys.stdin.readline()


def run(
    llm: LLM, batch: list[dict[str, Any]], tokens: int, spy: CacheSpy, caches: dict[str, torch.Tensor]
) -> list[Any]:
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": request["params"]},
        )
        for request in batch
    ]
    outputs = llm.generate([{"prompt_token_ids": request["prompt"]} for request in batch], params, use_tqdm=False)
    read = {int(name.split("-")[0]): kept for name, kept in spy.take_rows(caches).items()}  # "3-1f0c..." is the fourth
    return [answer(output) | kept for output, (_, kept) in zip(outputs, sorted(read.items()), strict=True)]


def answer(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    top = [sorted(((i, lp.logprob) for i, lp in at.items()), key=lambda pair: -pair[1]) for at in best.logprobs]
    return {"ids": list(best.token_ids), "top": top, "cached": output.num_cached_tokens}


def facts(llm: LLM) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "chunked": bool(config.scheduler_config.enable_chunked_prefill),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "block_size": config.cache_config.block_size,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
