"""Holds our engine against golden files, on whatever device is there.

    tilert-ref verify FILE.golden ... --model-dir DIR [--device cuda]

The engine gets vLLM's prompt KV (or, where the file has only samples of it, makes its own) and is fed vLLM's tokens, so
every position is a comparison of its own. Compared are tokens, logprobs, the bytes of the planes on their way through
our cache and back, the rows and index keys that decode writes, and the positions that the indexer chooses. The exit
status is 1 if a token diverged or a byte was lost on its way through our cache, 2 if a file or an argument is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import msgspec
import torch

from tilert_ref.connector.layout import FP8_DS_MLA, RowFormat, row_format_of_width
from tilert_ref.connector.planes import CODE_BYTES
from tilert_ref.engine.numerics import HOPPER, vllm_kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.golden.recording import (
    Answer,
    Golden,
    beginning,
    checkpoint_digest,
    load_whole,
    read_golden,
    recorded_rows,
)
from tilert_ref.golden.replay import (
    Choice,
    Replay,
    gap,
    index_of,
    prompt_kv,
    replay,
    replay_captured,
    replay_followed,
    rows_of,
)
from tilert_ref.model_files import InputError, says_bad_input
from tilert_ref.verdict import Verdict, judge

WHOLE = ".whole.pt"
FOLLOW = "in vLLM's order too: every Nth prompt, and those that differ (default: all)"
STEPS = {
    "tokens": "tokens",
    "captured": "tokens of captured steps",
    "followed_tokens": "tokens in vLLM's order over vLLM's rows",
}
"""Counts of a Report, and what it calls them."""


@dataclass
class Share:
    """Equal ones of all."""

    equal: int = 0
    total: int = 0

    def add(self, same: torch.Tensor) -> None:
        self.equal, self.total = self.equal + int(same.sum()), self.total + same.numel()

    def merge(self, other: "Share") -> None:
        self.equal, self.total = self.equal + other.equal, self.total + other.total

    def __str__(self) -> str:
        return f"{100 * self.equal / self.total:.4f}% of {self.total:,}" if self.total else "none"


@dataclass(frozen=True)
class Difference:
    """A token that isn't vLLM's. steps: the name of the counts that it is in; gap: how far vLLM's best logprob is ahead
    of its second."""

    steps: str
    prompt: int
    position: int
    verdict: Verdict
    ours: int
    theirs: int
    gap: float


@dataclass
class Report:
    """What the comparison with one golden file came to.

    captured: tokens of the decode graph, where the engine has one, from the second on. followed_tokens: tokens from the
    second on where decode attends to vLLM's own choices, in vLLM's order, over vLLM's rows. carried: bytes of planes
    that are the same after inject and reading back. decoded: per "layer field" the bytes that decode wrote; followed:
    the same of that other decode. choices: sets of positions, beyond index_topk. off_edge: for each set that differs,
    how far the worst of the differing tokens' scores is from our edge, as a share of it: 0 is an exact tie.
    """

    tokens: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(get_args(Verdict), 0))
    captured: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(get_args(Verdict), 0))
    followed_tokens: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(get_args(Verdict), 0))
    differences: list[Difference] = field(default_factory=list)
    largest_logprob_difference: float = 0.0
    smallest_gap: float = float("inf")
    carried: Share = field(default_factory=Share)
    prefilled: dict[str, Share] = field(default_factory=dict)
    decoded: dict[str, Share] = field(default_factory=dict)
    followed: dict[str, Share] = field(default_factory=dict)
    choices: dict[str, Share] = field(default_factory=dict)
    followed_choices: dict[str, Share] = field(default_factory=dict)
    off_edge: list[float] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(getattr(self, steps)["diverged"] for steps in STEPS) or self.carried.equal < self.carried.total

    def merge(self, other: "Report") -> None:
        """Adds the comparison of other prompts of the same recording."""
        for steps in STEPS:
            for verdict, count in getattr(other, steps).items():
                getattr(self, steps)[verdict] += count
        self.differences += other.differences
        self.off_edge += other.off_edge
        self.largest_logprob_difference = max(self.largest_logprob_difference, other.largest_logprob_difference)
        self.smallest_gap = min(self.smallest_gap, other.smallest_gap)
        self.carried.merge(other.carried)
        for mine, theirs in (
            (self.prefilled, other.prefilled),
            (self.decoded, other.decoded),
            (self.followed, other.followed),
            (self.choices, other.choices),
            (self.followed_choices, other.followed_choices),
        ):
            for name, share in theirs.items():
                mine.setdefault(name, Share()).merge(share)

    def lines(self) -> Iterable[str]:
        for steps, what in STEPS.items():
            t = getattr(self, steps)
            if any(t.values()):
                yield f"{what}: {t['identical']} identical, {t['tie']} tie, {t['diverged']} diverged"
        yield f"logprobs: largest difference {self.largest_logprob_difference:.4f}"
        yield f"vLLM's smallest gap between its two best: {self.smallest_gap:.4f}"
        yield f"planes to cache and back: {self.carried} bytes"
        for what, shares in (
            ("own prefill writes vLLM's bytes", self.prefilled),
            ("decode writes vLLM's bytes", self.decoded),
            ("decode in vLLM's order over vLLM's rows", self.followed),
            ("chosen sets equal", self.choices),
            ("chosen sets equal, in vLLM's order over vLLM's rows", self.followed_choices),
        ):
            if shares:
                yield f"{what}: {', '.join(_by_layer(shares))}"
        if off := self.off_edge:
            yield f"{len(off)} sets differ, {off.count(0.0)} in exact ties, furthest off the edge {max(off):.1e}"
        for d in self.differences[:20]:
            where = f"{d.steps}: prompt {d.prompt} position {d.position}"
            yield f"  {where}: {d.verdict}, {d.ours} for {d.theirs}, gap {d.gap:.4f}"


def _by_layer(shares: dict[str, Share]) -> Iterable[str]:
    """The fields of a layer taken together."""
    layers = dict[str, Share]()
    for name, share in sorted(shares.items()):
        layers.setdefault(" ".join(name.split()[:2]), Share()).merge(share)
    return (f"{layer} {share}" for layer, share in layers.items())


def verify(
    engine: RefEngine,
    golden: Golden,
    numbers: Sequence[int],
    progress: Callable[[str], None] = lambda line: None,
    follow: int = 1,
    tokens: int | None = None,
) -> Report:
    """Compares the prompts with these numbers, the whole answers or their first `tokens`; every `follow`th prompt, and
    each one with a token that isn't vLLM's, in vLLM's order too, where that was recorded."""
    report, started = Report(), time.monotonic()
    for done, number in enumerate(numbers):
        prompt, answer = golden.prompts[number], golden.answers[number]
        if tokens is not None:
            answer = beginning(answer, len(prompt), tokens)
        before = len(report.differences)
        compare(report, engine, number, prompt, answer)
        if "choices" in answer and (done % follow == 0 or len(report.differences) > before):
            followed = replay_followed(engine, prompt, answer)
            compare_tokens(report, "followed_tokens", number, followed.ids, answer)
            past = compare_decoded(report.followed, followed, len(prompt), answer, leading=True)
            compare_choices(report.followed_choices, [], followed, range(past + 1), answer["choices"])
        seconds = time.monotonic() - started
        progress(f"{golden.name}: prompt {done + 1} of {len(numbers)}, {len(prompt)} tokens, {seconds:.0f} s")
    return report


def compare(report: Report, engine: RefEngine, number: int, prompt: list[int], answer: Answer) -> None:
    if "rows" in answer:
        compare_planes(report, engine, prompt, answer)
    ours = replay(engine, prompt, answer)
    compare_tokens(report, "tokens", number, ours.ids, answer, first=0)
    report.smallest_gap = min(report.smallest_gap, *(gap(answer, position) for position in range(len(answer["ids"]))))
    worst = max(report.largest_logprob_difference, ours.logprob_difference(answer))
    report.largest_logprob_difference = worst
    compare_kv(report, ours, len(prompt), answer)
    if engine.captured is not None:
        compare_tokens(report, "captured", number, replay_captured(engine, prompt, answer), answer)


def compare_tokens(
    report: Report, steps: str, number: int, ours: Sequence[int], answer: Answer, *, first: int = 1
) -> None:
    """Into report's counts of that name, from token `first` on: the first of all may be the prompt's."""
    counts = getattr(report, steps)
    for position in range(first, len(answer["ids"])):
        theirs = answer["ids"][position]
        verdict = judge(ours[position], theirs, answer["top"][position])
        counts[verdict] += 1
        if verdict != "identical":
            found = Difference(steps, number, position, verdict, ours[position], theirs, gap(answer, position))
            report.differences.append(found)


def compare_planes(report: Report, engine: RefEngine, prompt: list[int], answer: Answer) -> None:
    """Recorded planes -> our cache -> bytes, of all layers that the engine has."""
    kv, tokens = prompt_kv(prompt, answer), len(prompt)
    layers = len(engine.cache.rows)
    engine.inject(type(kv)(kv.rid, kv.seq_len, kv.last_prompt_token, kv.layers[:layers]))
    report.carried.add(rows_of(engine, 0, tokens) == answer["rows"][:layers, :tokens])
    if (index := answer.get("index")) is not None:
        report.carried.add(index_of(engine, 0, tokens) == index[:layers, :tokens])


def compare_kv(report: Report, ours: Replay, tokens: int, answer: Answer) -> None:
    """Rows of our own prefill; rows and index keys that decode wrote, and what it chose, where they were recorded."""
    if (theirs := answer.get("rows")) is not None and ours.prefilled is not None:
        _by_field(report.prefilled, ours.prefilled, theirs[: len(ours.prefilled), :tokens])
    compare_decoded(report.decoded, ours, tokens, answer)
    if (choices := answer.get("choices")) is not None:
        compare_choices(report.choices, report.off_edge, ours, range(choices.shape[1]), choices)
    elif (samples := answer.get("samples")) and samples["choices"] is not None:
        at = [position - tokens for position in samples["positions"]]
        compare_choices(report.choices, report.off_edge, ours, at, samples["choices"])


def compare_decoded(
    shares: dict[str, Share], ours: Replay, tokens: int, answer: Answer, *, leading: bool = False
) -> int:
    """Adds what decode wrote to `shares`, where vLLM's rows were recorded; returns how many they were.

    leading: only places before which every row was recorded, so that a followed replay had vLLM's whole past.
    """
    recorded = recorded_rows(answer, tokens)
    at = [position - tokens for position in recorded]
    if leading:
        at = [place for i, place in enumerate(at) if place == i]
    if not at:
        return 0
    known, layers = [recorded[tokens + place] for place in at], len(ours.decoded)
    _by_field(shares, ours.decoded[:, at], torch.stack([rows for rows, _ in known], dim=1)[:layers])
    if ours.decoded_index is not None:
        _by_field(shares, ours.decoded_index[:, at], torch.stack([key for _, key in known], dim=1)[:layers])
    return len(at)


def _by_field(shares: dict[str, Share], ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Adds equal bytes a layer and field; both uint8 [layers, tokens, bytes of a row or of an index key]."""
    for layer, same in enumerate(ours == theirs):
        for name, part in _fields(same):
            shares.setdefault(f"layer {layer} {name}", Share()).add(part)


def _fields(same: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    width = same.shape[-1]
    if width == CODE_BYTES + 4:
        yield from (("index codes", same[:, :CODE_BYTES]), ("index scales", same[:, CODE_BYTES:]))
        return
    row: RowFormat = row_format_of_width(width)
    names = ("latent", "latent_scale", "rope") if row is FP8_DS_MLA else ("latent", "rope")
    for name in names:
        yield name, same[:, row[name].offset : row[name].end]


def compare_choices(
    shares: dict[str, Share], off_edge: list[float], ours: Replay, at: Sequence[int], theirs: torch.Tensor
) -> None:
    """theirs: int16 [layers, places, index_topk], -1 for none; `at` says which of our decode steps the places are, the
    first ones. Where all tokens are taken there is nothing to compare."""
    for layer, sets in enumerate(theirs):
        for place, chosen in zip(at, sets, strict=False):
            choice = ours.choices[layer][place]
            if choice.scores is None:
                continue
            mine, others = set(choice.positions.tolist()), set(chosen[chosen >= 0].tolist())
            shares.setdefault(f"layer {layer}", Share()).add(torch.tensor(mine == others))
            if mine != others:
                off_edge.append(_off_edge(choice, sorted(mine ^ others)))


def _off_edge(choice: Choice, moved: list[int]) -> float:
    edge = choice.scores[choice.positions].min()
    return ((choice.scores[moved] - edge).abs().max() / edge.abs().clamp_min(1e-30)).item()


def engine_for(golden: Golden, model_dir: str | Path, device: str) -> RefEngine:
    """The engine that this recording is for: cache format, scale rule and drafting as recorded.

    Raises ValueError if model_dir is another checkpoint than the one that was recorded.
    """
    if (digest := checkpoint_digest(model_dir)) != golden.checkpoint:
        which = f"{golden.model} with {golden.weights} weights"
        raise InputError(f"{model_dir}: checkpoint {digest}, recorded was {golden.checkpoint} ({which})")
    room = max(map(len, golden.prompts)) + len(golden.answers[0]["ids"]) + 1
    rule = {} if golden.scale_rule is None else {"kv_scale_rule": golden.scale_rule}
    kernels = HOPPER if golden.facts["cuda"] else vllm_kernels("cpu")
    return load_engine(
        model_dir,
        device=device,
        max_seq_len=room,
        num_mtp=int(golden.mtp),
        kv_cache_dtype=golden.kv,
        kernels=kernels,
        **rule,
    )


@says_bad_input
def main(argv: list[str] | None = None) -> int:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("tilert-ref verify", description=__doc__, formatter_class=form)
    parser.add_argument("files", nargs="+", help="golden files (scripts/record_golden.py writes them)")
    parser.add_argument("--model-dir", required=True, help="the checkpoint that was recorded; the file has its digest")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="where the engine runs (default: %(default)s)")
    parser.add_argument("--prompts", type=_numbers, help="numbers of prompts, as 0,3,5 (default: all)")
    parser.add_argument("--tokens", type=int, help="only the first tokens of each answer")
    parser.add_argument("--follow", type=int, default=1, help=FOLLOW)
    parser.add_argument("--json", type=Path, help="write the comparison of the last file here too")
    options = parser.parse_args(argv)
    if options.follow < 1 or (options.tokens is not None and options.tokens < 2):
        parser.error(f"--follow {options.follow} --tokens {options.tokens}, legal: from 1 and from 2 on")
    reports = [_verify_file(file, options) for file in options.files]
    if options.json:
        options.json.write_bytes(msgspec.json.encode(reports[-1]))
    return int(any(report.failed for report in reports))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _verify_file(file: str, options: argparse.Namespace) -> Report:
    golden = load_whole(file) if file.endswith(WHOLE) else read_golden(file)
    numbers = options.prompts or range(len(golden.prompts))
    if wrong := [number for number in numbers if not 0 <= number < len(golden.prompts)]:
        raise InputError(f"{file}: no prompts {wrong}, legal: 0 to {len(golden.prompts) - 1}")
    engine = engine_for(golden, options.model_dir, options.device)
    report = verify(engine, golden, numbers, _say, options.follow, options.tokens)
    how = ", ".join(f"{name} {value}" for name, value in engine.facts.items())
    facts = golden.facts
    print(f"vLLM {facts['vllm']} on {facts['device']}, {golden.name}, against itself alone:", *golden.noise, sep="\n  ")
    print(f"this engine on {options.device} ({how}) against it:", *report.lines(), sep="\n  ")
    return report


if __name__ == "__main__":
    sys.exit(main())
