"""The second half of `tilert-ref bench handoff`: what extraction adds to the time of vLLM's prefill.

One vLLM-CPU with the plugin prefills prompts in turn unmarked and marked. Marked ones are handed off over NIXL to a
receiver in another process; the clock stops with vLLM's answer, and the next round begins when everything has arrived.
The time inside the plugin's hooks, on vLLM's own thread, is measured beside the difference: on a machine that does
other things too, the difference of two prefills is mostly those. vLLM computes with one thread, so that on two cores
the copy to the receiver, which on CMA is the sender's work and on RDMA the network card's, has the other one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tilert_ref.bench_plugin import CUSTOM_OPS, VLLM_ENV
from tilert_ref.stack import connector_config, preload_openmp

HOOKS = ("begin", "layer", "finish")


def measure(model_dir: Path, prompt_tokens: int, prompts: int, rounds: int, timeout_s: float = 900) -> dict[str, Any]:
    """See `summary`. model_dir: a dsv3 model of make_tiny. Raises RuntimeError if vLLM's process fails."""
    command = [sys.executable, "-m", "tilert_ref.bench_extract", str(model_dir)]
    command += [str(prompt_tokens), str(prompts), str(rounds)]
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = os.environ | VLLM_ENV | preload_openmp() | threads
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"bench_extract"')]
    if done.returncode or not lines:
        raise RuntimeError(f"vLLM's process failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])["bench_extract"]


def summary(unmarked: Sequence[float], marked: Sequence[float], hooks: Sequence[float]) -> dict[str, Any]:
    """Of paired rounds, seconds. added_percent: by the medians of each kind, by the least of each, and of the pairs.

    hooks: of each marked round, what the plugin's hooks took; hook_percent is its median share of the unmarked median.
    """
    base = statistics.median(unmarked)
    pairs = [100 * (with_ / without - 1) for without, with_ in zip(unmarked, marked, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    return {
        "rounds": len(pairs),
        "unmarked_ms": {"median": 1e3 * base, "min": 1e3 * min(unmarked)},
        "marked_ms": {"median": 1e3 * statistics.median(marked), "min": 1e3 * min(marked)},
        "added_percent": {
            "of_medians": 100 * (statistics.median(marked) / base - 1),
            "of_minima": 100 * (min(marked) / min(unmarked) - 1),
            "pairs": {"q1": low, "median": middle, "q3": high},
        },
        "hook_ms": 1e3 * statistics.median(hooks),
        "hook_percent": 100 * statistics.median(hooks) / base,
    }


def report(result: dict[str, Any]) -> list[str]:
    """Lines for people."""
    added, pairs = result["added_percent"], result["added_percent"]["pairs"]
    what = f"vLLM's prefill of {result['prompts']} x {result['prompt_tokens']} tokens, {result['rounds']} pairs"
    return [
        f"{what}, median (least)",
        *(
            f"  {kind:10s} {result[kind + '_ms']['median']:8.2f} ms ({result[kind + '_ms']['min']:.2f})"
            for kind in ("unmarked", "marked")
        ),
        f"  extraction adds {added['of_medians']:.2f} % of medians, {added['of_minima']:.2f} % of the least, "
        f"pairs {pairs['median']:.2f} % (quartiles {pairs['q1']:.2f} .. {pairs['q3']:.2f})",
        f"  in the plugin's hooks: {result['hook_ms']:.3f} ms a round, {result['hook_percent']:.2f} %",
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    result = measure(args.model_dir, args.extraction_tokens, args.prompts, args.rounds)
    print("\n".join(report(result)), flush=True)
    return result


class _Hooks:
    """Adds up the time inside the extractor's methods."""

    def __init__(self) -> None:
        from tilert_ref.connector.extract import Extractor

        self.seconds = 0.0
        for name in HOOKS:
            setattr(Extractor, name, self._timed(getattr(Extractor, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            method(*arguments)
            self.seconds += time.perf_counter() - began

        return timed


class _Rounds:
    """vLLM and its receiver. The n-th request's rid is n: vLLM's offline interface numbers them."""

    def __init__(self, llm: Any, receiver: Any, prompt_tokens: int, prompts: int) -> None:
        self._llm, self._receiver = llm, receiver
        self._hooks = _Hooks()
        self._count = 0
        self._prompts = [
            {"prompt_token_ids": [(17 * i + 3 + n) % 480 for i in range(prompt_tokens)]} for n in range(prompts)
        ]

    def round(self, marked: bool) -> tuple[float, float]:
        """Seconds of the prefills, and in the hooks."""
        from vllm import SamplingParams

        rids = [str(self._count + n) for n in range(len(self._prompts))]
        self._count += len(rids)
        extra = {"kv_transfer_params": {"tilert_host": "127.0.0.1", "tilert_ctrl_port": self._receiver.port}}
        params = SamplingParams(temperature=0.0, max_tokens=1, extra_args=extra if marked else None)
        if marked:
            self._receiver.expect(rids)
        self._hooks.seconds = 0.0
        began = time.perf_counter()
        self._llm.generate(self._prompts, params, use_tqdm=False)
        passed = time.perf_counter() - began
        if marked:
            self._receiver.times()  # the handoffs have ended: they take nothing from the next round
        return passed, self._hooks.seconds


def _main(model_dir: str, prompt_tokens: str, prompts: str, rounds: str) -> None:
    from vllm import LLM

    from tilert_ref.bench_receiver import Receiver

    tokens, count = int(prompt_tokens), int(prompts)
    llm = LLM(
        model_dir,
        dtype="bfloat16",
        max_model_len=tokens + 8,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        compilation_config=CUSTOM_OPS,
        kv_transfer_config=connector_config(),
    )
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with closing(Receiver("tiny-dsv3", "bf16", tokens + 8, slots=count)) as receiver:
        bench = _Rounds(llm, receiver, tokens, count)
        for marked in (False, True, True):
            bench.round(marked)  # warm up: first use compiles, allocates, starts NIXL
        for turn in range(int(rounds)):
            for marked in (False, True) if turn % 2 else (True, False):
                times[marked].append(bench.round(marked))
    result = summary(*([seconds for seconds, _ in times[m]] for m in (False, True)), [hook for _, hook in times[True]])
    print(json.dumps({"bench_extract": result | {"prompts": count, "prompt_tokens": tokens}}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
