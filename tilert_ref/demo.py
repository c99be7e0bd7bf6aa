"""`tilert-ref demo`: the whole path on one machine, compared with vLLM token by token.

A trained tiny model, vLLM with our connector, a decode server and the router, all as real processes on the loopback
interface. The openai client gets a streamed chat answer, then a tool call, and the answer to the tool's result. vLLM
decodes the same prompts by itself, and every token gets a verdict.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai

from tilert_ref.connector.transport import TRANSPORTS
from tilert_ref.engine.checkpoint import Checkpoint
from tilert_ref.engine.config import load_config
from tilert_ref.engine.make_tiny import make_tiny
from tilert_ref.engine.numerics import vllm_kernels
from tilert_ref.golden.replay import reproducible
from tilert_ref.model_files import InputError, is_bad_input
from tilert_ref.router.request import sampling_defaults
from tilert_ref.stack import Process, Stack, StackError, answer_grammar, end_on_signals, free_port, vllm_server
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.skills import KNOWN_TOOLS
from tilert_ref.verdict import Verdict, judge

# Dense models only: vLLM has no sparse attention on a CPU ("Sparse Attention is not supported").
ARCHS = ("dsv3", "dsv2", "glm47", "kimi")
WITHOUT_MTP = ("dsv2", "kimi")
TRAINED = "tiny-glm5-dense"
TOOL_QUESTION = "What is the weather in Paris?"
TOOL_RESULT = "21 degrees and sun"
END = -1  # stands for the stop token at the end of an answer: it is a choice of the model's too, and is compared
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times in ms; first_token and total are the client's clock, timing is the router's report.

    ids without the stop token; finish_reason as the router says it. calls: the tool calls as OpenAI has them.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    reasoning: str
    calls: list[dict[str, Any]]
    finish_reason: str
    first_token_ms: float
    total_ms: float
    timing: dict[str, Any]

    @property
    def per_token_ms(self) -> float | None:
        return (self.total_ms - self.first_token_ms) / (len(self.ids) - 1) if len(self.ids) > 1 else None

    @property
    def choices(self) -> list[int]:
        """What the model chose at each position: ids, and END where it stopped by itself."""
        return self.ids if self.finish_reason == "length" else [*self.ids, END]


@dataclass(frozen=True)
class Reference:
    """vLLM's own greedy decode: ids[i], and top[i], its best two as (id, logprob), best first. END: the stop token."""

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

    @classmethod
    def joined(cls, parts: "Sequence[Comparison]") -> "Comparison":
        """Several answers as one."""
        differences = itertools.chain.from_iterable(part.differences for part in parts)
        return cls(sum(part.tokens for part in parts), list(differences), sum(part.anchors for part in parts))

    @property
    def counts(self) -> dict[str, int]:
        tie, diverged = self.count("tie"), self.count("diverged")
        return {"identical": self.tokens - tie - diverged, "tie": tie, "diverged": diverged}

    @property
    def line(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        return f"tokens: {counts} against vLLM's own decode"


def compare(ours: list[int], reference: Reference, again: Callable[[int], list[int]]) -> Comparison:
    """Judges every position. After a difference it goes on from vLLM's tokens, so that one flip hides nothing.

    again(n): the stack's tokens for positions n and later, given the prompt and vLLM's first n tokens.
    """
    result, start = Comparison(len(reference.ids)), 0
    for position, (theirs, top) in enumerate(zip(reference.ids, reference.top, strict=True)):
        if position - start >= len(ours):
            # No END of ours, and vLLM goes on: the stack lost tokens.
            raise StackError(
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

Show = Callable[[str, str], None]
"""Gets a piece of an answer as it arrives: what it is ("reasoning", "content"), and the text."""


def stream_chat(
    router_url: str, messages: Sequence[dict], max_tokens: int, show: Show, *, ignore_eos: bool = True, **extra: Any
) -> Answer:
    """One greedy chat answer through the real openai client. extra: further fields (tools, chat_template_kwargs)."""
    client = openai.OpenAI(base_url=f"{router_url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0)
    model = client.models.list().data[0].id
    body = {"ignore_eos": ignore_eos, "return_token_ids": True} | extra
    heard = _Heard(show)
    with client.chat.completions.create(
        model=model, messages=list(messages), max_tokens=max_tokens, temperature=0, stream=True, extra_body=body
    ) as stream:
        for chunk in stream:
            heard.hear(chunk)
    return heard.answer()


class _Heard:
    """Collects the chunks of one streamed answer."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._started = self._first = time.monotonic()
        self._prompt_ids, self._ids, self._calls, self._timing = [], [], [], {}
        self._text = {"reasoning": "", "content": ""}
        self._finish = ""

    def hear(self, chunk: Any) -> None:
        extra = chunk.model_extra or {}
        self._prompt_ids = extra.get("prompt_token_ids") or self._prompt_ids
        self._timing = extra.get("pd_timing_ms") or self._timing
        for choice in chunk.choices:
            new = (choice.model_extra or {}).get("token_ids") or []
            if new and not self._ids:
                self._first = time.monotonic()
            self._ids += new
            self._finish = choice.finish_reason or self._finish
            self._calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or []]
            self._say("reasoning", (choice.delta.model_extra or {}).get("reasoning_content") or "")
            self._say("content", choice.delta.content or "")

    def _say(self, kind: str, piece: str) -> None:
        self._text[kind] += piece
        if piece:
            self._show(kind, piece)

    def answer(self) -> Answer:
        times = ((at - self._started) * 1e3 for at in (self._first, time.monotonic()))
        said = self._text["content"], self._text["reasoning"]
        return Answer(self._prompt_ids, self._ids, *said, self._calls, self._finish, *times, self._timing)


def complete(url: str, prompt_ids: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """The first choice of a blocking greedy completion of token ids. Raises StackError for anything but a 200."""
    body = {"prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | extra
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    if reply.status_code != 200:
        raise StackError(f"{url} answered {reply.status_code}: {reply.text[:500]}")
    return reply.json()["choices"][0]


def vllm_decode(vllm_url: str, prompt_ids: list[int], max_tokens: int, *, ignore_eos: bool = True) -> Reference:
    """vLLM's own greedy decode; the request is unmarked, so the connector leaves it alone."""
    choice = complete(vllm_url, prompt_ids, max_tokens, logprobs=2, ignore_eos=ignore_eos)
    ids, top = choice["token_ids"], [_best_two(top) for top in choice["logprobs"]["top_logprobs"]]
    if choice["finish_reason"] == "stop":  # vLLM's ids end with the stop token
        top[-1] = [(END if token == ids[-1] else token, logprob) for token, logprob in top[-1]]
        ids = [*ids[:-1], END]
    return Reference(ids, top)


def _best_two(top: dict[str, float]) -> list[tuple[int, float]]:
    pairs = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in top.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:2]


# The program


class Report:
    """Prints progress with the elapsed time. With --json the lines go to stderr, stdout gets one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self._out = sys.stderr if as_json else sys.stdout
        self._started = time.monotonic()
        self._kind = ""

    def step(self, text: str) -> None:
        self.line(f"[{time.monotonic() - self._started:6.1f} s] {text}")

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def piece(self, kind: str, text: str) -> None:
        """Part of an answer. A random model writes control characters too; they would garble a terminal."""
        if kind != self._kind:
            print("\n  (thinks) " if kind == "reasoning" else "\n  ", end="", file=self._out)
            self._kind = kind
        print("".join(c if c.isprintable() else "·" for c in text), end="", file=self._out, flush=True)

    def end(self) -> None:
        """The end of an answer's pieces."""
        self._kind = ""
        self.line("\n")


def checkpoint(args: argparse.Namespace, scratch: Path, report: Report) -> Path:
    """The trained model, --model, or with --arch a random one made for the occasion."""
    if args.arch is None:
        model = args.model or model_dir(TRAINED)
        config = load_config(model)
        with Checkpoint(model):  # what is wrong with its files is said here, not at the end of vLLM's log
            sampling_defaults(str(model), "auto", {})
        if config.index_topk is not None:
            raise InputError(
                f"{model} attends sparsely (index_topk); the demo's vLLM, a CPU's, serves dense models only"
            )
        return model
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
    if args.with_native_pool:
        from tilert_ref import native_pool  # it is made of the parts of this module

        return native_pool.run(args, report)
    with contextlib.ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tilert-ref-demo-")))
        model = checkpoint(args, scratch, report)
        tools = args.arch is None and answer_grammar(model) is not None
        router_url, vllm_url = held.enter_context(programs(args, model, args.logs or scratch, report))
        report.step("warming up: the first transfer starts NIXL")
        for url in {router_url, vllm_url}:
            complete(url, [1, 2, 3], 8)
        client = Client(args, router_url, report)
        answers = [client.ask([{"role": "user", "content": args.prompt}])]
        answers += use_a_tool(client, report) if tools else []
        report.step(f"vLLM decodes the same {'prompts' if len(answers) > 1 else 'prompt'} by itself")
        compared = [client.compare(answer, vllm_url) for answer in answers]
        if args.json:
            print(json.dumps(as_json(args, answers, compared)))
    return Comparison.joined([result for _, result in compared])


class Client:
    """Asks the stack, shows the answers and where their time went, and compares them with vLLM's."""

    def __init__(self, args: argparse.Namespace, router_url: str, report: Report) -> None:
        self._args, self._url, self._report = args, router_url, report
        self._ignore_eos = args.arch is not None  # a random model ends at random

    def ask(self, messages: Sequence[dict], **extra: Any) -> Answer:
        self._report.step(f"{messages[-1]['role']}: {messages[-1]['content']}")
        answer = stream_chat(
            self._url, messages, self._args.max_tokens, self._report.piece, ignore_eos=self._ignore_eos, **extra
        )
        for call in answer.calls:
            self._report.piece("call", f"(calls) {call['function']['name']} {call['function']['arguments']}")
        self._report.end()
        self._report.step(f"{len(answer.prompt_ids)} prompt tokens, {len(answer.ids)} answer tokens")
        for line in time_split(answer):
            self._report.line(line)
        return answer

    def compare(self, answer: Answer, vllm_url: str) -> tuple[Reference, Comparison]:
        """Against as many tokens as vLLM takes for its own answer."""
        tokens = len(answer.ids) if self._ignore_eos else self._args.max_tokens
        reference = vllm_decode(vllm_url, answer.prompt_ids, tokens, ignore_eos=self._ignore_eos)
        result = compare(answer.choices, reference, lambda n: self._again(answer, reference, n))
        for difference in result.differences:
            self._report.line(f"  {difference}")
        return reference, result

    def _again(self, answer: Answer, reference: Reference, position: int) -> list[int]:
        prompt, left = answer.prompt_ids + reference.ids[:position], len(reference.ids) - position
        choice = complete(self._url, prompt, left, ignore_eos=self._ignore_eos)
        return choice["token_ids"] + ([END] if choice["finish_reason"] == "stop" else [])


def use_a_tool(client: Client, report: Report) -> list[Answer]:
    """Offers get_weather and asks for the weather; if the model calls it, the result goes back for a last answer."""
    tools, messages = [KNOWN_TOOLS["get_weather"]], [{"role": "user", "content": TOOL_QUESTION}]
    report.line()
    report.step("the client offers a tool: get_weather(city)")
    call = client.ask(messages, tools=tools)
    if not call.calls:
        report.step("the model made no call")
        return [call]
    messages += [{"role": "assistant", "content": call.text, "tool_calls": call.calls}]
    messages += [{"role": "tool", "tool_call_id": made["id"], "content": TOOL_RESULT} for made in call.calls]
    return [call, client.ask(messages, tools=tools, chat_template_kwargs={"enable_thinking": False})]


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


def as_json(
    args: argparse.Namespace, answers: Sequence[Answer], compared: Sequence[tuple[Reference, Comparison]]
) -> dict[str, Any]:
    """vllm_ids and differences are lists with one entry an answer; -1 among ids is the end of an answer."""
    result = Comparison.joined([result for _, result in compared])
    return {
        "num_mtp": args.num_mtp,
        "answers": [asdict(answer) | {"per_token_ms": answer.per_token_ms} for answer in answers],
        "vllm_ids": [reference.ids for reference, _ in compared],
        "differences": [[asdict(d) for d in result.differences] for _, result in compared],
        **result.counts,
    }


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 no token diverged, 1 some did, 2 a program failed, 130 Ctrl-C, 143 SIGTERM."""
    args = parse(argv)
    report = Report(args.json)
    try:
        with end_on_signals():
            result = run(args, report)
    except (StackError, InputError, OSError, openai.OpenAIError, httpx.HTTPError) as error:
        if isinstance(error, OSError) and not is_bad_input(error):
            raise
        print(f"demo failed: {error}", file=sys.stderr)
        if isinstance(error, StackError) and args.logs is None:
            print("the programs' logs are gone; --logs DIR keeps them", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        report.line("\ninterrupted; everything is stopped")
        return 130
    report.line(result.line)
    if result.count("diverged") and not reproducible(vllm_kernels("cpu").order):
        report.line(
            "the last bits of vLLM's kernels on this processor are not followed: near ties may flip (numerics.md)"
        )
    return 1 if result.count("diverged") else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tilert-ref demo", description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help=f"a checkpoint (bf16, dense; default {TRAINED})")
    model.add_argument("--arch", choices=ARCHS, help="a random tiny model of this architecture; its answer is noise")
    parser.add_argument(
        "--num-mtp", type=int, choices=range(4), default=0, help="MTP drafts per step (default 0: none)"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of an answer (default 256; with --arch 64, all used)"
    )
    parser.add_argument("--prompt", default="Why is the sky blue?", help="default: %(default)s")
    parser.add_argument("--transport", choices=TRANSPORTS, default="nixl", help="default: %(default)s")
    parser.add_argument("--engine", default="ref", help="engine of the decode server (default ref; stub: no model)")
    parser.add_argument(
        "--with-native-pool",
        action="store_true",
        help="a second vLLM decodes too, fed by NixlConnector beside our connector in one MultiConnector: pairs of "
        "questions, one for each pool, their prompts computed in one forward batch, each answer compared",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the programs' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, progress on stderr")
    args = parser.parse_args(argv)
    args.max_tokens = args.max_tokens or (256 if args.arch is None else 64)
    if args.num_mtp and args.arch in WITHOUT_MTP:
        parser.error(f"--num-mtp {args.num_mtp}: {args.arch} has no MTP layer")
    if args.num_mtp and args.with_native_pool:
        parser.error(
            f"--num-mtp {args.num_mtp} with --with-native-pool: legal is 0; a vLLM that drafts differs from itself"
        )
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
