#!/usr/bin/env python3
"""Records golden files: real vLLM on a GPU answers the golden prompts of the trained tiny models, our engine is held
against every byte of it, and a small file of each recording is kept.

    python scripts/record_golden.py OUT [--only NAME ...] [--raw DIR]

Needs vLLM with sparse attention (0.26.0 on Hopper was recorded), NIXL and a CUDA build of torch. Every recording is a
process of its own; they run side by side on all GPUs that are there, since a tiny model leaves a GPU idle. OUT gets
NAME.golden (recording.py says what is kept), NAME.json (the comparison in full) and the logs. The exit status is 1 if
a recording or a comparison is missing at the end.
"""

import argparse
import functools
import importlib.util
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine.make_fp8 import make_fp8
from tilert_ref.golden.recording import (
    Answer,
    Golden,
    Keep,
    Noise,
    checkpoint_digest,
    load_whole,
    recording_name,
    save_whole,
    write_golden,
)
from tilert_ref.golden.replay import noise
from tilert_ref.golden.verify import WHOLE, Report
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.families import CONTEXT, FAMILIES
from tilert_ref.tiny.golden import GOLDEN_PROMPTS, GOLDEN_TOKENS, edge_prompts, golden_prompts

MODELS = ("tiny-glm5", "tiny-dsv32")
SCALE_RULE = ScaleRule.PLAIN
"""vLLM 0.26.0's; a recording of another vLLM is refused by the engine until this says so."""
EDGES = range(GOLDEN_PROMPTS, GOLDEN_PROMPTS + 6)
SOME = [*range(3, GOLDEN_PROMPTS, 5), *EDGES]  # all kinds, 10 to 4,097 tokens
FEW = [*range(0, GOLDEN_PROMPTS, 7), *EDGES]
AGAIN = list(range(5, GOLDEN_PROMPTS, 6))
KV_BYTES = 2 << 30  # of vLLM's caches: a fixed size, because several vLLMs share a GPU
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}
CHUNKS = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 256}
DEEP_GEMM = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}  # the block-fp8 products that the engine follows (HOPPER)
MOST_SECONDS = 1500  # of one process
TRACED = 5  # passes of the first prompts, prefill first, operator by operator
LONGEST_WHOLE = 40  # tokens of a prompt whose whole KV is kept: 200 kB in bf16 rows
VERIFIERS = 6  # processes that compare one recording
FOLLOWED = 3  # every third prompt is compared in vLLM's own order of chosen positions too


@dataclass(frozen=True)
class Scenario:
    """One golden file. floor: vLLM against itself too, the prompts again and in batches; others: by other processes,
    compiled and in chunks."""

    model: str
    weights: str
    kv: str
    mtp: bool
    numbers: tuple[int, ...]
    others: bool = False
    floor: bool = True

    @property
    def name(self) -> str:
        return recording_name(self.model, self.weights, self.kv, self.mtp)


def scenarios() -> list[Scenario]:
    """The longest first. fp8_ds_mla rows get all prompts, with weights of both kinds."""
    everything = tuple(range(GOLDEN_PROMPTS + len(EDGES)))
    made = []
    for model in MODELS:
        for weights in ("fp8", "bf16"):
            made.append(Scenario(model, weights, "fp8_ds_mla", False, everything, others=weights == "fp8"))
            made.append(Scenario(model, weights, "bf16", False, tuple(SOME)))
            made += [Scenario(model, weights, kv, True, tuple(FEW)) for kv in ("fp8_ds_mla", "bf16")]
    return sorted(made, key=lambda s: (-len(s.numbers), s.mtp))


class Lab:
    """Where it happens: checkpoints, lanes on GPUs, and the directories of one run."""

    def __init__(self, out: Path, raw: Path, lanes: int, *, verify: bool, hands: int = 1) -> None:
        self.out, self.raw, self.verify, self.hands = out, raw, verify, hands
        out.mkdir(parents=True, exist_ok=True)
        raw.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        gpus = range(max(1, torch.cuda.device_count()))
        self.lanes = queue.SimpleQueue[int]()
        for _ in range(lanes):
            for gpu in gpus:
                self.lanes.put(gpu)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    @functools.cache  # noqa: B019
    def prompts(self, model: str) -> list[list[int]]:
        tokenizer = Tokenizer.from_file(str(model_dir(model) / "tokenizer.json"))
        dialect = FAMILIES[model].dialect
        return [g.prompt for g in (*golden_prompts(dialect, tokenizer), *edge_prompts(dialect, tokenizer))]

    def checkpoint(self, model: str, weights: str) -> Path:
        if weights == "bf16":
            return model_dir(model)
        directory = self.raw / f"{model}-fp8"
        if not (directory / "config.json").exists():
            make_fp8(model_dir(model), directory)
        return directory

    def run(self, what: str, command: list[str]) -> bool:
        """A child on the next free lane; its log goes to OUT. False if it failed."""
        gpu = self.lanes.get()
        began = time.monotonic()
        root = str(Path(__file__).resolve().parents[1])
        env = DEEP_GEMM | os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        try:
            with (self.out / f"{what}.log").open("w") as log:
                output = {"stdout": log, "stderr": subprocess.STDOUT}
                subprocess.run([sys.executable, *command], env=env, check=True, timeout=MOST_SECONDS, **output)
            good = True
        except subprocess.SubprocessError:  # a status other than 0, or no end in time
            good = False
        finally:
            self.lanes.put(gpu)
        seconds = time.monotonic() - began
        self.say(f"{what}: {'done' if good else 'FAILED, see its log'} in {seconds:.0f} s")
        return good


def plans(scenario: Scenario, prompts: list[list[int]], checkpoint: Path) -> dict[str, dict[str, Any]]:
    """vLLM processes of one scenario by name: the main one, and other arrangements for the noise floor."""
    engine: dict[str, Any] = {
        "model": str(checkpoint),
        "max_model_len": CONTEXT,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.05,  # not used then, but vLLM wants that much to be free
        "kv_cache_dtype": "fp8_ds_mla" if scenario.kv == "fp8_ds_mla" else "auto",
    }
    if scenario.mtp:
        engine["speculative_config"] = SPECULATIVE
    chosen = [prompts[number] for number in scenario.numbers]
    again = [prompts[number] for number in AGAIN if number in scenario.numbers]
    some = [prompts[number] for number in SOME if number in scenario.numbers]
    whole, repeated = {"prompts": chosen, "rounds": ["alone", "batch"]}, {"prompts": again, "rounds": ["repeat"]}
    base = {"engine": engine, "tokens": GOLDEN_TOKENS, "logprobs": 20}
    parts = {"main": whole, "again": repeated} if scenario.floor else {"main": whole | {"rounds": ["alone"]}}
    main = {"parts": parts, "handoff": "nixl"}
    if not scenario.mtp:
        main |= {"choices": True, "traced": TRACED}
    made = {"main": base | main}
    if scenario.others:
        compiled = {"engine": engine | {"enforce_eager": False}, "parts": {"main": whole | {"rounds": ["batch"]}}}
        chunked = {"engine": engine | CHUNKS, "parts": {"some": {"prompts": some, "rounds": ["alone", "repeat"]}}}
        made |= {"compiled": base | compiled, "chunked": base | chunked}
    return made


def record(lab: Lab, scenario: Scenario) -> bool:
    """All of one scenario: record, keep, compare. False if something of it is missing."""
    checkpoint = lab.checkpoint(scenario.model, scenario.weights)
    todo = plans(scenario, lab.prompts(scenario.model), checkpoint)
    with ThreadPoolExecutor(len(todo)) as threads:
        good = dict(
            zip(todo, threads.map(lambda kind: record_plan(lab, scenario, kind, todo[kind]), todo), strict=True)
        )
    if not good["main"]:
        return False
    golden = collect(lab, scenario, checkpoint, [kind for kind, fine in good.items() if fine])
    save_whole(lab.raw / f"{scenario.name}{WHOLE}", golden)
    write_golden(lab.out / f"{scenario.name}.golden", golden, kept(scenario, golden))
    size = (lab.out / f"{scenario.name}.golden").stat().st_size
    lab.say("\n    ".join([f"{scenario.name}: {size:,} bytes kept", *map(str, golden.noise)]))
    return all(good.values()) and (not lab.verify or judge(lab, scenario, golden, checkpoint))


def verify_again(lab: Lab, scenario: Scenario) -> bool:
    if not (whole := lab.raw / f"{scenario.name}{WHOLE}").exists():
        lab.say(f"{scenario.name}: no recording {whole}")
        return False
    return judge(lab, scenario, load_whole(whole), lab.checkpoint(scenario.model, scenario.weights))


def judge(lab: Lab, scenario: Scenario, golden: Golden, checkpoint: Path) -> bool:
    if (report := compare(lab, scenario, golden, checkpoint)) is None:
        return False
    lab.say("\n    ".join([scenario.name, *report.lines()]))
    return True


def compare(lab: Lab, scenario: Scenario, golden: Golden, checkpoint: Path) -> Report | None:
    """Our engine against all of the recording, prompts dealt out to several processes by length. None if one failed."""
    order = sorted(range(len(golden.prompts)), key=lambda number: -len(golden.prompts[number]))
    hands = [hand for first in range(VERIFIERS) if (hand := order[first::VERIFIERS])]

    def part(number: int) -> Report | None:
        name = f"{scenario.name}.verify{number}"
        out = lab.raw / f"{name}.json"
        out.unlink(missing_ok=True)  # an earlier run's
        command = ["-m", "tilert_ref.golden.verify", str(lab.raw / f"{scenario.name}{WHOLE}")]
        command += ["--model-dir", str(checkpoint), "--prompts", ",".join(map(str, hands[number]))]
        command += ["--follow", str(FOLLOWED)]
        lab.run(name, [*command, "--json", str(out)])  # fails too where tokens diverged, and then there is a report
        return msgspec.json.decode(out.read_bytes(), type=Report) if out.exists() else None

    whole = Report()
    with ThreadPoolExecutor(VERIFIERS) as threads:
        reports = list(threads.map(part, range(len(hands))))
    if None in reports:
        return None
    for report in reports:
        whole.merge(report)
    (lab.out / f"{scenario.name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
    return whole


def record_plan(lab: Lab, scenario: Scenario, kind: str, plan: dict[str, Any]) -> bool:
    """One plan, in as many processes as the lab deals its prompts to. False if one of them failed."""
    where = lab.raw / f"{scenario.name}.{kind}"
    Path(f"{where}.json").write_text(json.dumps(plan))
    if not (hands := deal(plan, lab.hands)):
        return lab.run(f"{scenario.name}.{kind}", ["-m", "tilert_ref.golden.record", f"{where}.json", f"{where}.pt"])

    def play(number: int) -> bool:
        hand = f"{where}.{number}"
        Path(f"{hand}.json").write_text(json.dumps(hand_of(plan, hands[number], traces=number == 0)))
        command = ["-m", "tilert_ref.golden.record", f"{hand}.json", f"{hand}.pt"]
        return lab.run(f"{scenario.name}.{kind}.{number}", command)

    with ThreadPoolExecutor(len(hands)) as threads:
        good = all(list(threads.map(play, range(len(hands)))))
    if good:
        outs = [torch.load(f"{where}.{number}.pt", weights_only=True) for number in range(len(hands))]
        torch.save(gathered(plan, hands, outs), f"{where}.pt")
    return good


def deal(plan: dict[str, Any], hands: int) -> list[list[int]]:
    """Which prompts of a plan with one part each process gets, by length. Empty for a plan that stays whole: its
    batches, in rounds other than "alone", are of all prompts."""
    parts = list(plan["parts"].values())
    if hands == 1 or [part["rounds"] for part in parts] != [["alone"]]:
        return []
    order = sorted(range(len(parts[0]["prompts"])), key=lambda number: -len(parts[0]["prompts"][number]))
    return [order[first::hands] for first in range(min(hands, len(order)))]


def hand_of(plan: dict[str, Any], numbers: list[int], *, traces: bool) -> dict[str, Any]:
    """The plan of one process: these prompts. traces: it records operators too, if the plan says so."""
    ((name, part),) = plan["parts"].items()
    dealt = plan | {"parts": {name: part | {"prompts": [part["prompts"][number] for number in numbers]}}}
    return dealt if traces else {key: value for key, value in dealt.items() if key != "traced"}


def gathered(plan: dict[str, Any], hands: list[list[int]], outs: list[dict[str, Any]]) -> dict[str, Any]:
    """What one process would have written: the answers in the order of the plan, the facts of the first hand."""
    ((name, part),) = plan["parts"].items()
    answers: list[Any] = [None] * len(part["prompts"])
    for numbers, out in zip(hands, outs, strict=True):
        for number, made in zip(numbers, out["parts"][name]["alone"], strict=True):
            answers[number] = made
    return {"parts": {name: {"alone": answers}}, "facts": outs[0]["facts"] | {"processes": len(outs)}}


def collect(lab: Lab, scenario: Scenario, checkpoint: Path, kinds: list[str]) -> Golden:
    """The recording as a whole, vLLM's own noise floor with it."""
    out = {kind: torch.load(lab.raw / f"{scenario.name}.{kind}.pt", weights_only=True) for kind in kinds}
    plan = json.loads((lab.raw / f"{scenario.name}.main.json").read_text())
    prompts, parts = plan["parts"]["main"]["prompts"], out["main"]["parts"]
    alone = parts["main"]["alone"]

    def floor(what: str, theirs: list[Answer], which: list[list[int]] = prompts) -> Noise:
        return noise(what, [alone[prompts.index(prompt)] for prompt in which], theirs)

    found = list[Noise]()
    if scenario.floor:
        found += [
            floor("alone again", parts["again"]["repeat"], plan["parts"]["again"]["prompts"]),
            floor("all prompts at once, 8 at a time", parts["main"]["batch"]),
        ]
    if "compiled" in out:
        found.append(floor("compiled, CUDA graphs, 8 at a time", out["compiled"]["parts"]["main"]["batch"]))
    if "chunked" in out:
        chunked = json.loads((lab.raw / f"{scenario.name}.chunked.json").read_text())["parts"]["some"]["prompts"]
        for temperature, round_ in (("cold", "alone"), ("warm", "repeat")):
            what = f"chunks of 256, prefix cache {temperature}"
            found.append(floor(what, out["chunked"]["parts"]["some"][round_], chunked))
    return Golden(
        model=scenario.model,
        weights=scenario.weights,
        kv=scenario.kv,
        mtp=scenario.mtp,
        scale_rule=SCALE_RULE.value if scenario.kv == "fp8_ds_mla" else None,
        checkpoint=checkpoint_digest(checkpoint),
        facts=out["main"]["facts"],
        noise=found,
        prompts=prompts,
        answers=alone,
    )


def kept(scenario: Scenario, golden: Golden) -> Keep:
    """Whole KV of short prompts and, in the main files, of one that is longer than index_topk."""
    order = sorted(range(len(golden.prompts)), key=lambda number: len(golden.prompts[number]))
    whole = [number for number in order[:4] if len(golden.prompts[number]) <= LONGEST_WHOLE]
    if scenario.others:
        whole += [number for number in order if len(golden.prompts[number]) > 300][:1]
    return Keep(whole=whole, sampled=order[::5])


def named(only: list[str]) -> set[str]:
    """Names of scenarios: those in `only`, and for what is no name all that begin with it. Raises ValueError."""
    names, found = [scenario.name for scenario in scenarios()], set[str]()
    for start in only:
        fitting = {start} & set(names) or {name for name in names if name.startswith(start)}
        if not fitting:
            raise ValueError(f"no scenario begins with {start!r}; legal: {', '.join(names)}")
        found |= fitting
    return found


def missing_here() -> list[str]:
    """What a recording needs and this machine doesn't have."""
    there = {
        "vLLM": importlib.util.find_spec("vllm") is not None,
        "NIXL": importlib.util.find_spec("nixl") is not None,
        "a CUDA device": torch.cuda.is_available(),
    }
    return [what for what, here in there.items() if not here]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for golden files, comparisons and logs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios by name, or by how names begin")
    parser.add_argument("--no-floor", action="store_true", help="without vLLM against itself: to compare once more")
    parser.add_argument("--raw", type=Path, help="where whole recordings go, some GB (default: OUT/raw)")
    parser.add_argument(
        "--hands", type=int, default=1, help="with --no-floor: processes that share a scenario's prompts (default 1)"
    )
    parser.add_argument("--lanes", type=int, default=8, help="processes on each GPU at once (default: %(default)s)")
    parser.add_argument("--record-only", action="store_true", help="leave the comparison to a later --verify-only")
    parser.add_argument("--verify-only", action="store_true", help="compare the whole recordings that are in --raw")
    parser.add_argument("--prompts", type=int, help="only so many prompts of each scenario, for a try")
    args = parser.parse_args()
    try:
        chosen = [s for s in scenarios() if not args.only or s.name in named(args.only)]
    except ValueError as error:
        parser.error(str(error))
    if args.hands < 1 or (args.hands > 1 and not args.no_floor):
        parser.error(f"--hands {args.hands}; legal: 1, and with --no-floor more")
    if not args.verify_only and (missing := missing_here()):
        parser.error(f"recording needs {' and '.join(missing)}")
    if args.no_floor:
        chosen = [replace(s, others=False, floor=False) for s in chosen]
    if args.prompts:  # from both ends: the last ones are the longest
        first, last = args.prompts - args.prompts // 3, args.prompts // 3
        chosen = [replace(s, numbers=s.numbers[:first] + s.numbers[len(s.numbers) - last :]) for s in chosen]
    lab = Lab(
        args.out.resolve(),
        (args.raw or args.out / "raw").resolve(),
        args.lanes,
        verify=not args.record_only,
        hands=args.hands,
    )
    for model, weights in sorted({(s.model, s.weights) for s in chosen}):
        lab.checkpoint(model, weights)
        if not args.verify_only:  # a recording has its prompts
            lab.prompts(model)
    lab.say(f"{len(chosen)} scenarios, {args.lanes} processes a GPU")
    work = verify_again if args.verify_only else record
    with ThreadPoolExecutor(len(chosen)) as threads:
        good = list(threads.map(lambda scenario: work(lab, scenario), chosen))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
