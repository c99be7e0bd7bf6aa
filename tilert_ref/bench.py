"""`tilert-ref bench`: decode speed side by side with vLLM; a handoff against memcpy; what our plugin costs prefill.

decode: both peers run in one call, one after the other, each in its own process on the same cores. Speed is the slope
between a short and a long answer, so prefill and start-up cancel out. On a CPU only the ratio means anything: steps of
both are compiled there (ours with AVX2 and without AVX512 only), vLLM's best too (--vllm-eager starts sooner); on a GPU
it runs with its graphs. A few layers of a published model in real widths: `tilert-ref make-tiny DIR --slice glm5`, then
`tilert-ref bench decode DIR --load-format dummy --kv-cache-dtype fp8 --device cuda --against vllm`.

plugin: two vLLM processes, one with the plugin loaded and one without, prefill the same unmarked prompts in turn.

handoff: a prompt's KV over NIXL against memcpy, and what taking it out of vLLM adds to prefill.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tilert_ref import bench_handoff, bench_plugin, bench_roof
from tilert_ref.model_files import InputError, read_config
from tilert_ref.stack import Command, Process, end_on_signals

SHORT = 8  # tokens of the short answer that is subtracted
ANSWER = "measured: "  # begins the line in which vLLM's half says it: its processes may print behind that
QUIET = ("_KEY", "_TOKEN", "_HOST", "_IP", "_PORT", "_PATH", "_ROOT", "_DIR", "_LOGGING_LEVEL", "_USAGE_STATS")
"""Settings of vLLM's whose names end so don't change its speed, and some are secret."""


@dataclass(frozen=True)
class Measured:
    """facts: for --json, what a plot needs."""

    name: str
    tokens_per_s: float
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def row(self) -> str:
        return f"{self.name:44s} {self.tokens_per_s:9.1f} tok/s {1e6 / self.tokens_per_s:9.0f} us/token  {self.note}"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        args.model_dir = args.model_dir or _tiny(Path(scratch))
        read_config(args.model_dir)  # vLLM would say what is wrong with it at the end of a traceback
        if args.what == "handoff":
            return bench_handoff.run(args)
        if args.what == "plugin":
            return bench_plugin.run(args)
        if args.peer_json:  # the vLLM half, started by the other half in its own process
            # One write: other processes have the same log.
            print(f"\n{ANSWER}{json.dumps(_measure_vllm(args))}\n", end="", flush=True)
            return 0
        return _bench(args)


def decode_speed(generate: Callable[[int], int], tokens: int, repeats: int) -> float:
    """Tokens per second: (tokens - SHORT) / (time of the long answer - time of the short one), each the fastest of
    `repeats`. Not the fastest of their differences: what delays a short answer would pass for speed.

    generate(n) makes n tokens and returns how many it made.
    """
    short, long = (
        min(each) for each in zip(*(_seconds(generate, (SHORT, tokens)) for _ in range(repeats)), strict=True)
    )
    return (tokens - SHORT) / (long - short)


def _seconds(generate: Callable[[int], int], counts: Sequence[int]) -> list[float]:
    """How long answers of so many tokens take."""
    marks, made = [time.perf_counter()], []
    for count in counts:
        made.append(generate(count))
        marks.append(time.perf_counter())
    if made != list(counts):
        raise RuntimeError(f"asked for {list(counts)} tokens, got {made}: stop tokens must be ignored in a benchmark")
    return [end - start for start, end in pairwise(marks)]


def _bench(args: argparse.Namespace) -> int:
    from tilert_ref.engine.ref import check_device

    check_device(args.device)
    if args.tokens <= SHORT:
        raise InputError(f"--tokens {args.tokens}, legal: more than the {SHORT} of the short answer that is subtracted")
    print(f"decode at batch 1, greedy, {args.tokens} tokens, best of {args.repeats}, on {args.device}")
    bandwidth = bench_roof.copy_bandwidth(args.device)
    print(f"a copy of 1 GiB reads and writes {bandwidth / 1e9:,.0f} GB/s here")
    measured, first = list[Measured](), list[Measured]()
    for context in args.context:
        ours = [_measure_ours(args, num_mtp, context, bandwidth) for num_mtp in args.num_mtp]
        measured += ours
        first.append(ours[0])
        _write_json(args, bandwidth, measured)
    if args.against == "vllm":
        if args.device != "cpu":  # vLLM takes nearly all of a GPU when it starts
            gc.collect()
            torch.cuda.empty_cache()
        theirs = _vllm_in_own_process(args)
        _write_json(args, bandwidth, measured + theirs)
        for ours, vllm in zip(first, theirs, strict=True):
            print(vllm.row())
            print(f"ratio against vLLM: {ours.tokens_per_s / vllm.tokens_per_s:.2f}", flush=True)
    return 0


def _write_json(args: argparse.Namespace, bandwidth: float, measured: list[Measured]) -> None:
    """All that is measured so far: a later context may fail."""
    if args.json is None:
        return
    gpu = torch.cuda.get_device_name(args.device) if args.device != "cpu" else None
    where = {"device": args.device, "gpu": gpu, "torch": torch.__version__, "copy_gb_s": round(bandwidth / 1e9, 1)}
    what = {"model": args.model_dir.name, "kv_cache_dtype": args.kv_cache_dtype, "load_format": args.load_format}
    lines = [line | line.pop("facts") for line in map(asdict, measured)]
    args.json.write_text(json.dumps(where | what | {"measured": lines}, indent=1) + "\n")


def _measure_ours(args: argparse.Namespace, num_mtp: int, context: int, bandwidth: float) -> Measured:
    from tilert_ref.engine.api import SamplingParams
    from tilert_ref.engine.ref import load_engine

    options = {"kv_cache_dtype": args.kv_cache_dtype, "load_format": args.load_format}
    options |= {"capture": not args.eager, "compile": not args.eager and args.device == "cpu", "progress": _progress}
    room = context + args.tokens + 2
    engine = load_engine(args.model_dir, device=args.device, max_seq_len=room, num_mtp=num_mtp, **options)
    sampling, stats = SamplingParams(temperature=0.0, ignore_eos=True), {}
    if args.load_format == "dummy":  # nothing depends on what the rows hold
        bench_roof.fill_cache(engine, context)
        first = 1
    else:
        first = engine.prefill(_prompt(context, engine.model.config.vocab_size), sampling)

    def generate(count: int) -> int:
        *steps, finished = engine.decode(first, count, sampling)
        stats.update(finished.stats)
        return sum(len(step) for step in steps)

    generate(SHORT)  # warm up
    speed = decode_speed(generate, args.tokens, args.repeats)
    moved = bench_roof.step_bytes(engine, context)
    per_step = stats.get("mtp_accept_mean", 1.0)
    share = moved * speed / per_step / bandwidth
    note = (
        f"{moved / 1e6:,.1f} MB a step without drafts, {100 * share:.0f}% of the copy"
        if not num_mtp
        else (f"acceptance length {per_step}")
    )
    how = "captured" if engine.captured is not None else "compiled" if engine.model.pieces is not None else "eager"
    name = f"tilert_ref {how}, {num_mtp} draft(s), {context} tokens"
    facts = {"who": "ours", "context": context, "num_mtp": num_mtp, "step_us": 1e6 * per_step / speed, **stats}
    facts |= {"bytes_without_drafts": moved, "share_of_copy": None if num_mtp else share}
    measured = Measured(name, speed, note, facts)
    print(measured.row(), flush=True)
    if args.phases or engine.captured is not None:
        from tilert_ref.bench_phases import split_step

        split = split_step(engine, context)
        print(*split.rows(), sep="\n", flush=True)
        facts |= {"phases_us": split.us, "captured_step_us": split.step_us, "marks_us": split.marks_us}
    return measured


def _progress(line: str) -> None:
    if line.startswith("decode steps"):  # not what is read from where
        print(line, flush=True)


def _measure_vllm(args: argparse.Namespace) -> list[float]:
    """Tokens per second at each context, by one vLLM: with graphs and real widths it takes minutes to start."""
    from vllm import LLM, SamplingParams

    from tilert_ref.engine.config import load_config

    cuda = args.device != "cpu"
    llm = LLM(
        str(args.model_dir),
        dtype="bfloat16",
        max_model_len=max(args.context) + args.tokens + 2,
        max_num_seqs=1,
        enforce_eager=args.vllm_eager,  # otherwise at its best: compiled, and with graphs on a GPU
        enable_prefix_caching=False,
        load_format=args.load_format,
        skip_tokenizer_init=args.load_format == "dummy",
        **{"kv_cache_dtype": _vllm_cache_dtype(args)} if cuda else {"compilation_config": bench_plugin.CUSTOM_OPS},
    )
    vocab_size = load_config(args.model_dir).vocab_size

    def speed(context: int) -> float:
        prompt = {"prompt_token_ids": _prompt(context, vocab_size)}

        def generate(count: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            return len(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

        generate(SHORT)  # warm up
        return decode_speed(generate, args.tokens, args.repeats)

    return [speed(context) for context in args.context]


def _vllm_cache_dtype(args: argparse.Namespace) -> str:
    return "bfloat16" if args.kv_cache_dtype == "bf16" else "fp8_ds_mla"


def _vllm_in_own_process(args: argparse.Namespace) -> list[Measured]:
    mode = "eager" if args.vllm_eager else "compiled"
    print(f"starting vLLM ({mode}) on the same checkpoint ...", flush=True)
    command = [sys.executable, "-m", "tilert_ref.bench", "decode", str(args.model_dir), "--peer-json"]
    command += ["--device", args.device, "--kv-cache-dtype", args.kv_cache_dtype, "--load-format", args.load_format]
    command += ["--tokens", str(args.tokens), "--repeats", str(args.repeats)]
    command += ["--context", *map(str, args.context)]
    command += ["--vllm-eager"] if args.vllm_eager else []
    ours = bench_plugin.VLLM_ENV if args.device == "cpu" else {}
    if settings := vllm_settings(os.environ.keys() - ours.keys(), os.environ):
        print("not vLLM's defaults, and it may be slower with them:", *settings, flush=True)
    speeds = _run_peer(command, ours, args.timeout)
    measured = list[Measured]()
    for context, speed in zip(args.context, speeds, strict=True):
        facts = {"who": "vLLM", "context": context, "num_mtp": 0, "step_us": 1e6 / speed, "settings": settings}
        measured.append(Measured(f"vLLM {mode}, {context} tokens", speed, facts=facts))
    return measured


def vllm_settings(names: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """NAME=value of those that change something in vLLM: a ratio is against the vLLM that ran."""
    named = [name for name in sorted(names) if name.startswith("VLLM_") and not name.endswith(QUIET)]
    return [f"{name}={env[name]}" for name in named]


def _run_peer(command: list[str], env: dict[str, str], seconds: float) -> list[float]:
    """What vLLM's half measured; env: added to this process's. Raises RuntimeError with the end of its log if it failed
    or took longer. vLLM decodes in a process of its own, which ends with the half."""
    with tempfile.TemporaryDirectory() as scratch, end_on_signals():
        half = Process(Command("vLLM's half", command, "", env), Path(scratch) / "log").start()
        try:
            ended, status = half.ended_within(seconds), half.status()
        finally:
            half.stop()
        text = half.log.read_text(errors="replace")
    answers = [line.removeprefix(ANSWER) for line in text.splitlines() if line.startswith(ANSWER)]
    if not ended:
        failure = f"had not ended after {seconds:.0f} s (--timeout; in real widths it starts in minutes)"
    else:
        failure = f"failed with status {status}" if status else "" if answers else "ended without an answer"
    if failure:
        raise RuntimeError(f"vLLM's half {failure}; its log ends:\n{text[-4000:]}")
    return json.loads(answers[-1])


def _prompt(length: int, vocab_size: int) -> list[int]:
    """The same arbitrary ids on both sides: a linear congruence over the vocabulary."""
    return [(17 * i + 3) % vocab_size for i in range(length)]


def _tiny(scratch: Path) -> Path:
    from tilert_ref.engine.make_tiny import make_tiny

    make_tiny(scratch / "tiny", "dsv3")
    return scratch / "tiny"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilert-ref bench", description=__doc__.split("\n\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    bench_plugin.add_parser(what)
    bench_handoff.add_parser(what)
    decode = what.add_parser("decode", help="batch-1 decode speed", description=__doc__.split("\n\n")[1])
    decode.add_argument("model_dir", type=Path, nargs="?", help="checkpoint; default: a tiny dsv3 one made on the spot")
    decode.add_argument("--against", choices=["vllm"], help="also run vLLM and print the ratio as the last line")
    decode.add_argument(
        "--context", type=int, nargs="+", default=[128], help="tokens before the answer, one or more (default 128)"
    )
    decode.add_argument("--tokens", type=int, default=128, help="tokens of the long answer (default 128)")
    decode.add_argument("--repeats", type=int, default=5, help="takes the fastest (default 5)")
    decode.add_argument(
        "--num-mtp", type=int, nargs="+", default=[0], help="draft counts to measure; first gives the ratio"
    )
    decode.add_argument(
        "--vllm-eager", action="store_true", help="vLLM without torch.compile and graphs: starts sooner, steps slower"
    )
    decode.add_argument("--device", default="cpu", help="cpu (default) or cuda, for both")
    decode.add_argument("--kv-cache-dtype", choices=["bf16", "fp8"], default="bf16", help="of both (default bf16)")
    decode.add_argument(
        "--load-format",
        choices=["auto", "dummy"],
        default="auto",
        help="dummy: random weights, for a slice",
    )
    decode.add_argument("--eager", action="store_true", help="plain torch on our side: no CUDA graph, nothing compiled")
    decode.add_argument("--phases", action="store_true", help="split a step by phase (default for captured steps)")
    decode.add_argument("--json", type=Path, metavar="FILE", help="what was measured; scripts/plot_bench.py draws it")
    decode.add_argument("--timeout", type=float, default=900, help="seconds for vLLM's half")
    decode.add_argument("--peer-json", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
