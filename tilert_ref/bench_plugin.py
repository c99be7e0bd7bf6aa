"""`tilert-ref bench plugin`: what loading our connector plugin costs vLLM when no request is marked.

Two vLLM processes on the same cores, one with the plugin and one without, prefill the same unmarked prompts in turn, so
that whatever else the machine does hits both. Each is judged by its fastest round: noise only ever adds time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from tilert_ref.stack import connector_config

VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Without the flag vLLM's CPU build rotates wrongly in eager mode where the model has no rope_scaling.
CUSTOM_OPS = {"custom_ops": ["all", "-rotary_embedding"]}


def compare(model_dir: Path, prompt_tokens: int, prompts: int, rounds: int) -> dict[str, float]:
    """Best prefill throughput in tokens/s, {"without", "with", "ratio"}. Raises RuntimeError if a child fails."""
    children = {name: _Child(model_dir, prompt_tokens, prompts, name) for name in ("without", "with")}
    try:
        for child in children.values():
            child.round()  # warm up: the first pass compiles and allocates
        seconds: dict[str, list[float]] = {name: [] for name in children}
        for turn in range(rounds):
            for name in ("without", "with") if turn % 2 else ("with", "without"):
                seconds[name].append(children[name].round())
    finally:
        for child in children.values():
            child.close()
    speed = {name: prompt_tokens * prompts / min(times) for name, times in seconds.items()}
    return speed | {"ratio": speed["with"] / speed["without"]}


class _Child:
    """One vLLM in a process of its own; `round` prefills all prompts once."""

    def __init__(self, model_dir: Path, prompt_tokens: int, prompts: int, name: str):
        self.name = name
        command = [sys.executable, "-m", "tilert_ref.bench_plugin", str(model_dir)]
        command += [str(prompt_tokens), str(prompts), name]
        env = os.environ | VLLM_ENV
        self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()  # "ready"

    def round(self) -> float:
        _pipe(self.process.stdin).write("go\n")
        _pipe(self.process.stdin).flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        """The child's next JSON line; vLLM prints lines of its own to stdout too."""
        for line in _pipe(self.process.stdout):
            if line.startswith('{"bench_plugin"'):
                return json.loads(line)["bench_plugin"]
        raise RuntimeError(f"vLLM {self.name} the plugin ended with status {self.process.wait()}")


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("the child was started without a pipe")
    return stream


def _child_main(model_dir: str, prompt_tokens: str, prompts: str, name: str) -> None:
    from vllm import LLM, SamplingParams

    extra = {"kv_transfer_config": connector_config()} if name == "with" else {}
    llm = LLM(
        model_dir,
        dtype="bfloat16",
        max_model_len=int(prompt_tokens) + 8,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        compilation_config=CUSTOM_OPS,
        **extra,
    )
    requests = [
        {"prompt_token_ids": [(17 * i + 3 + n) % 480 for i in range(int(prompt_tokens))]} for n in range(int(prompts))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    _say({"ready": True})
    for _ in sys.stdin:
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        _say({"seconds": time.perf_counter() - started})


def _say(values: dict[str, Any]) -> None:
    print(json.dumps({"bench_plugin": values}), flush=True)


def add_parser(what: argparse._SubParsersAction) -> None:
    parser = what.add_parser("plugin", help="cost of our plugin for unmarked requests", description=__doc__)
    parser.add_argument("model_dir", type=Path, nargs="?", help="checkpoint; default: a tiny dsv3 one made on the spot")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a round (default 8)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each process, taken in turn (default 20)")


def run(args: argparse.Namespace) -> int:
    print(
        f"prefill of {args.prompts} unmarked prompts x {args.prompt_tokens} tokens, best of {args.rounds} rounds each"
    )
    result = compare(args.model_dir, args.prompt_tokens, args.prompts, args.rounds)
    print(f"vLLM without the plugin {result['without']:10.0f} tok/s")
    print(f"vLLM with the plugin    {result['with']:10.0f} tok/s")
    print(f"ratio with / without: {result['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    _child_main(*sys.argv[1:])
