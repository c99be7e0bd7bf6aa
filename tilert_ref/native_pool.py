"""Two decode pools behind one prefill: tilert_ref through our router, a native vLLM through a P/D proxy's two steps.

`tilert-ref demo --with-native-pool` runs `run`. One vLLM feeds both pools, in one forward batch where `in_one_batch`
asks for it; that it was one batch is read from the step log (step_log.py), not guessed from times.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tilert_ref import demo
from tilert_ref.demo import REQUEST_TIMEOUT_S, Answer, Comparison, Reference, Report, complete
from tilert_ref.stack import Process, Stack, StackError

POOLS = {"tilert": "TileRTConnector", "native": "NixlPullConnector"}
"""Pool -> the connector that feeds it; vLLM's NixlConnector is another name of NixlPullConnector."""
NAMES = {"tilert": "tilert_ref", "native": "native vLLM"}
THOUGHT = "</think>"  # ends the thoughts of the models whose answers think; the native vLLM has no parser for it
QUESTIONS = ("What is prefill?", "What is decode?")
HOLD_TIMEOUT_S = 60.0

A, B = TypeVar("A"), TypeVar("B")


# The step log


@dataclass(frozen=True)
class Step:
    """One forward batch of the prefill instance, as step_log.py writes it."""

    step: int
    requests: Mapping[str, Mapping[str, Any]]
    told: Mapping[str, Sequence[str]]
    held: Mapping[str, str]

    def prefilled(self, pool: str | None) -> dict[str, int]:
        """Prompt tokens computed in this batch, by the requests whose KV is for that pool."""
        return {
            name: min(r["tokens"], r["prompt"] - r["computed"])
            for name, r in self.requests.items()
            if r["pool"] == pool and r["computed"] < r["prompt"]
        }

    @property
    def feeds_both(self) -> bool:
        return all(self.prefilled(pool) for pool in POOLS)


def read_steps(path: Path) -> list[Step]:
    """All whole lines so far; [] before the first."""
    if not path.exists():
        return []
    return [Step(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]


def strays(steps: Sequence[Step]) -> list[str]:
    """What a connector was told although it was none of its business, and marked requests that it never heard of."""
    computed = {name: r["pool"] for step in steps for name, r in step.requests.items()}
    pools = computed | {name: pool for step in steps for name, pool in step.held.items()}
    found = []
    for pool, connector in POOLS.items():
        told = {name for step in steps for name in step.told[connector]}
        found += [f"{connector} was told of {n}, marked {pools.get(n)}" for n in sorted(told) if pools.get(n) != pool]
        meant = {name for name, of in computed.items() if of == pool}
        found += [f"{connector} was not told of {name}" for name in sorted(meant - told)]
    return found


# The two pools


def native_of(stack: Stack) -> Process:
    """The native vLLM; raises StackError if the stack was made without."""
    if stack.native is None:
        raise StackError("this stack has no native pool; legal: Stack(native_pool=True)")
    return stack.native


def prefill_natively(stack: Stack, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A proxy's first step: the prefill instance computes the prompt and keeps its KV until the native vLLM got it.

    Returns the kv_transfer_params that tell the native vLLM where it lies.
    """
    ask = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    reply = httpx.post(f"{stack.vllm.url}/v1/{endpoint}", json=ask, timeout=REQUEST_TIMEOUT_S)
    if reply.status_code != 200:
        raise StackError(f"prefill for the native pool answered {reply.status_code}: {reply.text[:500]}")
    if not (params := reply.json().get("kv_transfer_params")):
        raise StackError("the prefill instance gave no kv_transfer_params: does it run NixlConnector?")
    return params


def native_complete(stack: Stack, prompt_ids: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """Both steps of the proxy for a completion, as demo.complete for the router."""
    body = {"prompt": prompt_ids, "temperature": 0} | extra
    params = prefill_natively(stack, "completions", body)
    return complete(native_of(stack).url, prompt_ids, max_tokens, kv_transfer_params=params, **extra)


def native_chat(stack: Stack, messages: Sequence[dict], max_tokens: int, *, ignore_eos: bool) -> Answer:
    """Both steps of the proxy for a chat, as demo.stream_chat for the router."""
    params = prefill_natively(stack, "chat/completions", {"messages": list(messages), "temperature": 0})
    url, extra = native_of(stack).url, {"ignore_eos": ignore_eos, "kv_transfer_params": params}
    answer = demo.stream_chat(url, messages, max_tokens, mute, **extra)
    # What the router makes of vLLM's tokens: the stop token is none of the ids, the thoughts are none of the content.
    ids = answer.ids[:-1] if answer.finish_reason == "stop" else answer.ids
    reasoning, _, text = answer.text.rpartition(THOUGHT)
    return replace(answer, ids=ids, reasoning=reasoning, text=text)


def mute(kind: str, piece: str) -> None:
    """Two answers that come at once are shown afterwards."""


# One batch


def in_one_batch(stack: Stack, tilert: Callable[[], A], native: Callable[[], B]) -> tuple[A, B, list[Step]]:
    """Runs both, each of which asks its pool, so that the prefill instance begins both prompts in one forward batch.

    Returns the results and the steps that computed prompt tokens for both. Raises StackError if there is none, or what
    tilert and native raise.
    """
    seen = len(read_steps(stack.steps))
    with ThreadPoolExecutor(2) as both:
        with gate_shut(stack):
            asked = both.submit(tilert), both.submit(native)
            await_held(stack, seen, asked)
        results = asked[0].result(), asked[1].result()
    shared = [step for step in read_steps(stack.steps)[seen:] if step.feeds_both]
    if not shared:
        raise StackError("the prefill instance computed the two prompts in different batches")
    return *results, shared


@contextlib.contextmanager
def gate_shut(stack: Stack) -> Iterator[None]:
    """Within it the prefill instance begins no request that is meant for a pool (step_log.py)."""
    gate = Path(f"{stack.steps}.gate")
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def await_held(stack: Stack, seen: int, asked: Sequence[Future[Any]] = ()) -> None:
    """Waits until a request of each pool is held; seen: steps before. Returns too if one of `asked` has ended."""
    deadline = time.monotonic() + HOLD_TIMEOUT_S
    while not any(future.done() for future in asked):
        if {pool for step in read_steps(stack.steps)[seen:] for pool in step.held.values()} >= POOLS.keys():
            return
        if time.monotonic() > deadline:
            raise StackError(f"the two requests did not reach the prefill instance within {HOLD_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


# The demo


@dataclass(frozen=True)
class Judged:
    """One answer of one pool beside vLLM's own."""

    pool: str
    answer: Answer
    reference: Reference
    result: Comparison


class Pairs:
    """Asks both pools at once, shows both answers, and compares each with vLLM's own."""

    def __init__(self, args: argparse.Namespace, stack: Stack, report: Report) -> None:
        self._stack, self._report = stack, report
        self._max_tokens, self._ignore_eos = args.max_tokens, args.arch is not None

    def ask(self, tilert: str, native: str) -> list[tuple[str, Answer]]:
        self._report.step(f"two users at once: {tilert}  {native}")
        to_router = partial(demo.stream_chat, self._stack.router.url, show=mute)
        to_native = partial(native_chat, self._stack)
        asked = [
            partial(send, messages=_user(text), max_tokens=self._max_tokens, ignore_eos=self._ignore_eos)
            for send, text in ((to_router, tilert), (to_native, native))
        ]
        *answers, steps = in_one_batch(self._stack, *asked)
        for pool, answer in zip(POOLS, answers, strict=True):
            self._show(pool, answer)
        for step in steps:
            counts = [f"{sum(step.prefilled(pool).values())} for {NAMES[pool]}" for pool in POOLS]
            self._report.step(f"one forward batch, step {step.step}, computed prompt tokens: {', '.join(counts)}")
        return list(zip(POOLS, answers, strict=True))

    def _show(self, pool: str, answer: Answer) -> None:
        self._report.line(f"\n  {NAMES[pool]}, {len(answer.ids)} answer tokens:")
        for kind, text in (("reasoning", answer.reasoning), ("content", answer.text)):
            if text:
                self._report.piece(kind, text)
        self._report.end()

    def judge(self, pool: str, answer: Answer) -> Judged:
        tokens = len(answer.ids) if self._ignore_eos else self._max_tokens
        reference = demo.vllm_decode(self._stack.vllm.url, answer.prompt_ids, tokens, ignore_eos=self._ignore_eos)
        result = demo.compare(answer.choices, reference, lambda n: self._again(pool, answer, reference, n))
        for difference in result.differences:
            self._report.line(f"  {NAMES[pool]}: {difference}")
        return Judged(pool, answer, reference, result)

    def _again(self, pool: str, answer: Answer, reference: Reference, position: int) -> list[int]:
        prompt, left = answer.prompt_ids + reference.ids[:position], len(reference.ids) - position
        return choices(self._stack, pool, prompt, left, ignore_eos=self._ignore_eos)


def choices(stack: Stack, pool: str, prompt_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> list[int]:
    """What a pool chooses after a prompt, with demo.END where it stops by itself."""
    if pool == "native":
        choice = native_complete(stack, prompt_ids, max_tokens, ignore_eos=ignore_eos)
    else:
        choice = complete(stack.router.url, prompt_ids, max_tokens, ignore_eos=ignore_eos)
    if choice["finish_reason"] != "stop":
        return choice["token_ids"]
    ids = choice["token_ids"][:-1] if pool == "native" else choice["token_ids"]
    return [*ids, demo.END]


def _user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def run(args: argparse.Namespace, report: Report) -> Comparison:
    """The demo with both pools. Raises StackError if a program fails, or if a connector heard of a foreign request."""
    with contextlib.ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        scratch = Path(enter(tempfile.TemporaryDirectory(prefix="tilert-ref-demo-")))
        model = demo.checkpoint(args, scratch, report)
        settings = {"engine": args.engine, "transport": args.transport, "logs": args.logs or scratch}
        stack = enter(Stack(model, native_pool=True, **settings, progress=report.step))
        try:
            judged = ask_and_judge(args, stack, report)
        except StackError as error:
            # What the client is told names the program that failed, seldom the cause; the logs go with the scratch.
            raise StackError(f"{error}\nthe end of {stack.vllm.name}'s log:\n{stack.vllm.tail()}") from error
        report.step("stopping")
    for pool, name in NAMES.items():
        report.line(f"{name:<11} {joined(judged, pool).line}")
    return joined(judged)


def ask_and_judge(args: argparse.Namespace, stack: Stack, report: Report) -> list[Judged]:
    """The demo on a stack that runs."""
    report.step("warming up: the first transfers start NIXL at all ends")
    complete(stack.router.url, [1, 2, 3], 8)
    native_complete(stack, [1, 2, 3], 8)
    pairs = Pairs(args, stack, report)
    questions = [args.prompt, *QUESTIONS]
    asked = [pairs.ask(*both) for both in zip(questions, questions[1:] + questions[:1], strict=True)]
    report.step("the prefill instance decodes the same prompts by itself")
    judged = [pairs.judge(pool, answer) for both in asked for pool, answer in both]
    check_strict(stack, report)
    if args.json:
        print(json.dumps(as_json(judged)))
    return judged


def check_strict(stack: Stack, report: Report) -> None:
    """Raises StackError if one of the two connectors had to do with a request that is not its own."""
    steps = read_steps(stack.steps)
    if wrong := strays(steps):
        raise StackError("; ".join(wrong))
    for pool, connector in POOLS.items():
        told = {name for step in steps for name in step.told[connector]}
        report.step(f"{connector} was told of {len(told)} requests, all of them for {NAMES[pool]}")


def joined(judged: Sequence[Judged], pool: str | None = None) -> Comparison:
    """The comparisons of one pool, or all of them, as one."""
    return Comparison.joined([j.result for j in judged if pool in (None, j.pool)])


def as_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """ids with -1 for the end of an answer; counts of all answers, and of each pool's."""
    answers = [
        {"pool": j.pool, "prompt_ids": j.answer.prompt_ids, "ids": j.answer.choices, "vllm_ids": j.reference.ids}
        for j in judged
    ]
    return {"answers": answers, "pools": {pool: joined(judged, pool).counts for pool in POOLS}, **joined(judged).counts}
