"""`tilert-ref demo`: the whole path on one machine, compared with vLLM token by token.

A tiny checkpoint, vLLM with our connector, a decode server and the router, all as real processes on the loopback
interface; one chat answer streamed to the openai client; then vLLM decodes the same prompt by itself, and every token
gets a verdict.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai

from tilert_ref.engine.make_tiny import make_tiny
from tilert_ref.stack import Process, Stack, StackError, end_on_signals, free_port, vllm_server
from tilert_ref.verdict import Verdict, judge

# Dense models only: vLLM has no sparse attention on a CPU ("Sparse Attention is not supported").
ARCHS = ("dsv3", "dsv2", "glm47", "kimi")
WITHOUT_MTP = ("dsv2", "kimi")
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times in ms; first_token and total are the client's clock, timing is the router's report."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    first_token_ms: float
    total_ms: float
    timing: dict[str, Any]

    @property
    def per_token_ms(self) -> float | None:
        return (self.total_ms - self.first_token_ms) / (len(self.ids) - 1) if len(self.ids) > 1 else None


@dataclass(frozen=True)
class Reference:
    """vLLM's own greedy decode: ids[i], and top[i], its best two as (id, logprob), best first."""

    ids: list[int]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Difference:
    """A position where the stack's token is not vLLM's."""

    position: int
    verdict: Verdict
    ours: int
    vllm: int
    top: list[tuple[int, float]]

    def __str__(self) -> str:
        best = ", ".join(f"{token}: {logprob:.6f}" for token, logprob in self.top)
        return f"position {self.position}: {self.verdict}, ours {self.ours}, vLLM {self.vllm} (its top two {best})"


@dataclass
class Comparison:
    """What became of every position. anchors: how often the stack went on from vLLM's tokens after a difference."""

    tokens: int
    differences: list[Difference] = field(default_factory=list)
    anchors: int = 0

    def count(self, verdict: Verdict) -> int:
        return sum(d.verdict == verdict for d in self.differences)

    @property
    def line(self) -> str:
        tie, diverged = self.count("tie"), self.count("diverged")
        identical = self.tokens - tie - diverged
        return f"tokens: {identical} identical, {tie} tie, {diverged} diverged against vLLM's own decode"


def compare(ours: list[int], reference: Reference, again: Callable[[int], list[int]]) -> Comparison:
    """Judges every position. After a difference it goes on from vLLM's tokens, so that one flip hides nothing.

    again(n): the stack's tokens for positions n and later, given the prompt and vLLM's first n tokens.
    """
    result, start = Comparison(len(reference.ids)), 0
    for position, (theirs, top) in enumerate(zip(reference.ids, reference.top, strict=True)):
        if position - start >= len(ours):
            raise ValueError(
                f"the stack gave {len(ours)} tokens from position {start}, vLLM {len(reference.ids)} in all"
            )
        token = ours[position - start]
        if (verdict := judge(token, theirs, top)) == "identical":
            continue
        result.differences.append(Difference(position, verdict, token, theirs, top))
        if position + 1 < len(reference.ids):
            result.anchors += 1
            start = position + 1
            ours = again(start)
    return result


# Talking to the stack


def stream_chat(router_url: str, prompt: str, max_tokens: int, show: Callable[[str], None]) -> Answer:
    """One greedy chat answer through the real openai client; show gets the text as it arrives."""
    client = openai.OpenAI(base_url=f"{router_url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0)
    model = client.models.list().data[0].id
    started = first = time.monotonic()
    prompt_ids, ids, text, timing = [], [], "", {}
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ) as stream:
        for chunk in stream:
            extra = chunk.model_extra or {}
            prompt_ids = extra.get("prompt_token_ids") or prompt_ids
            timing = extra.get("pd_timing_ms") or timing
            for choice in chunk.choices:
                new = (choice.model_extra or {}).get("token_ids") or []
                if new and not ids:
                    first = time.monotonic()
                ids += new
                text += choice.delta.content or ""
                show(choice.delta.content or "")
    now = time.monotonic()
    return Answer(prompt_ids, ids, text, (first - started) * 1e3, (now - started) * 1e3, timing)


def complete(url: str, prompt_ids: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """The first choice of a blocking greedy completion of token ids. Raises StackError for anything but a 200."""
    body = {"prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | extra
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    if reply.status_code != 200:
        raise StackError(f"{url} answered {reply.status_code}: {reply.text[:500]}")
    return reply.json()["choices"][0]


def vllm_decode(vllm_url: str, prompt_ids: list[int], max_tokens: int) -> Reference:
    """vLLM's own greedy decode; the request is unmarked, so the connector leaves it alone."""
    choice = complete(vllm_url, prompt_ids, max_tokens, logprobs=2)
    return Reference(choice["token_ids"], [_best_two(top) for top in choice["logprobs"]["top_logprobs"]])


def _best_two(top: dict[str, float]) -> list[tuple[int, float]]:
    pairs = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in top.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:2]


# The program


class Report:
    """Prints progress with the elapsed time. With --json the lines go to stderr, stdout gets one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self._out = sys.stderr if as_json else sys.stdout
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        self.line(f"[{time.monotonic() - self._started:6.1f} s] {text}")

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def piece(self, text: str) -> None:
        """Part of an answer. A random model writes control characters too; they would garble a terminal."""
        print("".join(c if c.isprintable() or c == " " else "·" for c in text), end="", file=self._out, flush=True)


def checkpoint(args: argparse.Namespace, scratch: Path, report: Report) -> Path:
    """--model, or a tiny one made for the occasion."""
    if args.model is not None:
        return args.model
    make_tiny(scratch / f"tiny-{args.arch}", args.arch)
    report.step(f"made a tiny checkpoint of {args.arch}: real kernel widths, random weights")
    return scratch / f"tiny-{args.arch}"


@contextlib.contextmanager
def programs(args: argparse.Namespace, model: Path, logs: Path, report: Report) -> Iterator[tuple[str, str]]:
    """Starts everything; yields the router's URL and that of the vLLM to compare with.

    Without MTP that is the same vLLM. With MTP vLLM verifies drafts, two rows in one pass, and its kernels give such
    rows other last bits than one row alone: 2 of 64 tokens of its own decode changed. So a second vLLM that does not
    speculate is the reference.
    """
    settings = {"num_mtp": args.num_mtp, "engine": args.engine, "transport": args.transport}
    with contextlib.ExitStack() as running:
        plain = None
        if args.num_mtp:
            report.step("with MTP a second vLLM starts, one that does not speculate, to compare with")
            plain = Process(replace(vllm_server(model, free_port()), name="second vLLM"), logs / "vllm-plain.log")
            running.callback(plain.stop)
            plain.start()
        stack = running.enter_context(Stack(model, **settings, logs=logs, progress=report.step))
        if plain is not None:
            plain.wait_ready(progress=report.step)
        yield stack.router.url, (plain or stack.vllm).url
        report.step("stopping")


def run(args: argparse.Namespace, report: Report) -> Comparison:
    """The demo proper. Raises StackError if a program fails."""
    with contextlib.ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tilert-ref-demo-")))
        model = checkpoint(args, scratch, report)
        router_url, vllm_url = held.enter_context(programs(args, model, args.logs or scratch, report))
        report.step("warming up: the first transfer starts NIXL")
        for url in {router_url, vllm_url}:
            complete(url, [1, 2, 3], 8)
        answer = ask(args, router_url, report)
        report.step("vLLM decodes the same prompt by itself")
        reference = vllm_decode(vllm_url, answer.prompt_ids, len(answer.ids))
        result = compare(answer.ids, reference, lambda n: _again(router_url, answer, reference, n))
        for difference in result.differences:
            report.line(f"  {difference}")
        if args.json:
            print(json.dumps(as_json(args, answer, reference, result)))
    return result


def ask(args: argparse.Namespace, router_url: str, report: Report) -> Answer:
    """The streamed answer, and where its time went."""
    report.step(f"asking for {args.max_tokens} tokens through the openai client: {args.prompt!r}")
    report.line()
    answer = stream_chat(router_url, args.prompt, args.max_tokens, report.piece)
    report.line("\n")
    report.step(f"{len(answer.prompt_ids)} prompt tokens, {len(answer.ids)} answer tokens")
    for line in time_split(answer):
        report.line(line)
    return answer


def _again(router_url: str, answer: Answer, reference: Reference, position: int) -> list[int]:
    prompt = answer.prompt_ids + reference.ids[:position]
    return complete(router_url, prompt, len(reference.ids) - position)["token_ids"]


def time_split(answer: Answer) -> list[str]:
    """Where the time went, from the router's and the decode server's clocks and the client's."""
    t = answer.timing
    handoff = sum(t.get(k, 0.0) for k in ("wire_wait", "convert", "inject"))
    rows = [
        ("prefill", t.get("prefill"), "vLLM: the prompt, and the first token"),
        ("handoff", handoff, "after prefill, until our engine has the KV"),
        ("first token", answer.first_token_ms, "at the client, since it asked"),
        ("per token", answer.per_token_ms, "at the client, after the first"),
    ]
    lines = [f"  {name:<12}{value:9.1f} ms  {note}" for name, value, note in rows if value is not None]
    if "mtp_accept_mean" in t:
        lines.append(f"  {'MTP':<12}{t['mtp_accept_mean']:9.2f}     tokens per step of our engine")
    return lines


def as_json(args: argparse.Namespace, answer: Answer, reference: Reference, result: Comparison) -> dict[str, Any]:
    return {
        "num_mtp": args.num_mtp,
        "answer": asdict(answer) | {"per_token_ms": answer.per_token_ms},
        "vllm_ids": reference.ids,
        "differences": [asdict(d) for d in result.differences],
        "identical": result.tokens - len(result.differences),
        "tie": result.count("tie"),
        "diverged": result.count("diverged"),
    }


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 no token diverged, 1 some did, 2 a program failed, 130 Ctrl-C, 143 SIGTERM."""
    args = parse(argv)
    report = Report(args.json)
    try:
        with end_on_signals():
            result = run(args, report)
    except (StackError, openai.OpenAIError, httpx.HTTPError) as error:
        report.line(f"\ndemo failed: {error}")
        return 2
    except KeyboardInterrupt:
        report.line("\ninterrupted; everything is stopped")
        return 130
    report.line(result.line)
    return 1 if result.count("diverged") else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tilert-ref demo", description=__doc__)
    parser.add_argument(
        "--arch", choices=ARCHS, default="dsv3", help="architecture of the tiny model (default %(default)s)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint of your own instead (bf16, dense)")
    parser.add_argument(
        "--num-mtp", type=int, choices=range(4), default=0, help="MTP drafts per step (default 0: none)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the answer (default %(default)s)")
    parser.add_argument("--prompt", default="Why is the sky blue?", help="default: %(default)s")
    parser.add_argument("--transport", choices=("nixl", "zmq"), default="nixl", help="default: %(default)s")
    parser.add_argument("--engine", default="ref", help="engine of the decode server (default ref; stub: no model)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the programs' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, progress on stderr")
    args = parser.parse_args(argv)
    if args.num_mtp and args.model is None and args.arch in WITHOUT_MTP:
        parser.error(f"--num-mtp {args.num_mtp}: {args.arch} has no MTP layer")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; expected a Hugging Face checkpoint directory")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
