"""Our side of a golden comparison: the engine fed with the KV rows and the tokens that vLLM recorded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tilert_ref.engine.api import LayerKV, PromptKV
from tilert_ref.engine.decode import prefill, step
from tilert_ref.engine.model import logits
from tilert_ref.engine.numerics import SumOrder
from tilert_ref.engine.ref import RefEngine
from tilert_ref.verdict import Verdict, judge

Answer = dict  # record_vllm.py's: {"ids", "top", "rows"}
Noise = tuple[int, int, float]  # positions compared, flips, largest change of a logprob


def prompt_kv(prompt: list[int], rows: torch.Tensor) -> PromptKV:
    """vLLM's rows of the prompt's positions as the wire would deliver them. rows: uint8 [layers, tokens, 1152]."""
    bf16 = rows[:, : len(prompt)].contiguous().view(torch.bfloat16)
    return PromptKV("golden", len(prompt), prompt[-1], [LayerKV(layer[:, :512], layer[:, 512:]) for layer in bf16])


@dataclass(frozen=True)
class Replay:
    """One prompt: logits that predict each of vLLM's n tokens, and the KV rows that we wrote."""

    logits: torch.Tensor  # [n, V], row i predicts token i
    prefilled: torch.Tensor | None  # [layers, prompt, 576], from our own prefill; None where there was none
    decoded: torch.Tensor  # [layers, n - 1, 576], from decode over vLLM's prompt rows

    @cached_property
    def ids(self) -> list[int]:
        return self.logits.argmax(-1).tolist()

    @cached_property
    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def logprob_difference(self, answer: Answer) -> float:
        """The largest over vLLM's top five at all positions."""
        pairs = [(i, t, lp) for i, top in enumerate(answer["top"]) for t, lp in top]
        return max(abs(float(self.logprobs[i, t]) - lp) for i, t, lp in pairs)


def replay(engine: RefEngine, prompt: list[int], answer: Answer) -> Replay:
    """Token after token, as decode does it; the first token from a prefill of our own."""
    hidden = prefill(engine.model, engine.cache, prompt)
    rows = [logits(engine.model.weights, hidden[-1:])]
    prefilled = _rows(engine, 0, len(prompt))
    engine.inject(prompt_kv(prompt, answer["rows"]))
    for i, token in enumerate(answer["ids"][:-1]):
        rows.append(step(engine.model, engine.cache, len(prompt) + i, [token])[1])
    return Replay(torch.cat(rows), prefilled, _decoded(engine, prompt, answer))


def replay_in_windows(engine: RefEngine, prompt: list[int], answer: Answer, window: int) -> Replay:
    """`window` tokens in one pass, as drafts are verified; the first token from the last prompt token, fed again."""
    engine.inject(prompt_kv(prompt, answer["rows"]))
    first, fed = len(prompt), answer["ids"][:-1]
    rows = [step(engine.model, engine.cache, first - 1, prompt[-1:], keep_rows=True)[1]]
    for at in range(0, len(fed), window):
        rows.append(step(engine.model, engine.cache, first + at, fed[at : at + window])[1])
    return Replay(torch.cat(rows), None, _decoded(engine, prompt, answer))


def _decoded(engine: RefEngine, prompt: list[int], answer: Answer) -> torch.Tensor:
    return _rows(engine, len(prompt), len(prompt) + len(answer["ids"]) - 1)


def _rows(engine: RefEngine, first: int, end: int) -> torch.Tensor:
    return torch.stack([engine.cache.read(layer, end)[first:] for layer in range(len(engine.cache.rows))])


def reproducible(order: SumOrder) -> bool:
    """Whether vLLM's kernels on this machine are the ones whose order of summation is known (numerics.py)."""
    return order is SumOrder.VLLM_AVX2


def gap(answer: Answer, position: int) -> float:
    """How far vLLM's best token is ahead of its second, in logprob."""
    (_, best), (_, second), *_ = answer["top"][position]
    return best - second


def smallest_gap(answers: Sequence[Answer]) -> float:
    return min(gap(answer, position) for answer in answers for position in range(len(answer["ids"])))


def noise(reference: Sequence[Answer], other: Sequence[Answer]) -> Noise:
    """vLLM against vLLM, up to each prompt's first flip."""
    compared, flips, largest = 0, 0, 0.0
    for a, b in zip(reference, other, strict=True):
        for i in range(len(a["ids"])):
            compared += 1
            now, then = dict(b["top"][i]), dict(a["top"][i])
            largest = max([largest, *(abs(now[t] - then[t]) for t in now.keys() & then.keys())])
            if a["ids"][i] != b["ids"][i]:
                flips += 1
                break
    return compared, flips, largest


def verdicts(ids: Sequence[list[int]], alone: Sequence[Answer], others: Sequence[Answer]) -> Counter[Verdict]:
    """ids, predicted from the tokens of `alone`, against another run of vLLM, up to its first token that differs."""
    counts = Counter[Verdict]()
    for ours, anchor, other in zip(ids, alone, others, strict=True):
        for position, theirs in enumerate(other["ids"]):
            counts[judge(ours[position], theirs, other["top"][position])] += 1
            if theirs != anchor["ids"][position]:
                break
    return counts


def equal_shares(rows: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    """Share of equal bytes a layer, over all prompts."""
    equal = torch.stack(
        [(a.contiguous().view(torch.uint8) == b).sum(dim=(1, 2)) for a, b in zip(rows, theirs, strict=True)]
    )
    total = sum(b[0].numel() for b in theirs)
    return (equal.sum(0) / total).tolist()


def kv_shares(
    replays: Sequence[Replay], answers: Sequence[Answer], lengths: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Shares of equal bytes a layer: prompt rows of our own prefill, and rows of our decode."""
    theirs = list(zip(answers, lengths, strict=True))
    prompt = equal_shares([r.prefilled for r in replays], [a["rows"][:, :n] for a, n in theirs])
    answer = equal_shares([r.decoded for r in replays], [a["rows"][:, n:] for a, n in theirs])
    return prompt, answer


def percent(shares: Sequence[float]) -> str:
    return ", ".join(f"{100 * share:.4f}%" for share in shares)
