"""Our side of a golden comparison: the engine fed with the KV rows and the tokens that vLLM recorded."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from tilert_ref.connector.layout import FP8_DS_MLA
from tilert_ref.engine import indexer as engine_indexer
from tilert_ref.engine import model as engine_model
from tilert_ref.engine.api import LayerKV, PromptKV
from tilert_ref.engine.batch import Seen
from tilert_ref.engine.decode import prefill, prefill_mtp, step
from tilert_ref.engine.model import logits, mtp_forward
from tilert_ref.engine.numerics import SumOrder
from tilert_ref.engine.ref import RefEngine
from tilert_ref.golden.recording import Answer, Noise, pages_of_index, recorded_rows
from tilert_ref.verdict import Verdict, judge


def prompt_kv(prompt: list[int], answer: Answer) -> PromptKV:
    """vLLM's rows and index keys of the prompt's positions as the wire would deliver them."""
    tokens, index = len(prompt), answer.get("index")
    layers = []
    for layer, rows in enumerate(answer["rows"][:, :tokens]):
        pages = None if index is None else pages_of_index(index[layer, :tokens])
        layers.append(layer_kv(rows, pages))
    return PromptKV("golden", tokens, prompt[-1], layers)


def layer_kv(rows: torch.Tensor, pages: torch.Tensor | None) -> LayerKV:
    """rows: uint8 [tokens, 656] of fp8_ds_mla, or the bytes of bf16 rows, [tokens, 1152]."""
    rows = rows.contiguous()
    if rows.shape[1] == FP8_DS_MLA.row_bytes:
        split = FP8_DS_MLA.kv_bytes
        return LayerKV(rows[:, :split], rows[:, split:].contiguous().view(torch.bfloat16), pages)
    bf16 = rows.view(torch.bfloat16)
    return LayerKV(bf16[:, :512], bf16[:, 512:], pages)


@dataclass(frozen=True)
class Choice:
    """What the indexer chose for one query of S tokens: ascending positions, and every token's score.

    scores is None where all tokens were taken without ranking them.
    """

    positions: torch.Tensor  # int64 [<= index_topk]
    scores: torch.Tensor | None  # fp32 [S]


@dataclass(frozen=True)
class Replay:
    """One prompt of T tokens: logits that predict each of vLLM's n tokens, and what our decode wrote and chose.

    Rows and index keys are bytes, as in a recording. prefilled: from a prefill of our own; None where there was none.
    """

    logits: torch.Tensor  # [n, V] fp32, row i predicts token i
    prefilled: torch.Tensor | None  # uint8 [layers, T, row bytes]
    decoded: torch.Tensor  # uint8 [layers, n - 1, row bytes], from decode over the prompt's rows
    decoded_index: torch.Tensor | None  # uint8 [layers, n - 1, 132]
    choices: list[list[Choice]]  # [main layers][n - 1]; empty for a dense model

    @cached_property
    def ids(self) -> list[int]:
        return self.logits.argmax(-1).tolist()

    @cached_property
    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def logprob_difference(self, answer: Answer) -> float:
        """The largest over the tokens whose logprobs were recorded, at all positions."""
        pairs = [(i, t, lp) for i, top in enumerate(answer["top"]) for t, lp in top]
        rows, ids, theirs = (torch.tensor(column) for column in zip(*pairs, strict=True))
        return (self.logprobs[rows, ids] - theirs).abs().max().item()


def replay(engine: RefEngine, prompt: list[int], answer: Answer) -> Replay:
    """Token after token, as decode does it; the first token from a prefill of our own."""
    hidden = own_prefill(engine, prompt, answer)
    first = logits(engine.model.weights, hidden[-1:])
    prefilled = rows_of(engine, 0, len(prompt))
    if "rows" in answer:
        engine.inject(_fitting(engine, prompt_kv(prompt, answer)))
    return _decode(engine, prompt, answer, first, prefilled, window=1)


def replay_followed(engine: RefEngine, prompt: list[int], answer: Answer) -> Replay:
    """Token after token, attending to the positions that vLLM's indexer chose, in its order, instead of our own choice.

    vLLM's top-k kernel leaves the order to a race between threads, and its attention rounds in blocks of that order.
    Where rows that vLLM's decode wrote are there, each takes the place of ours as soon as ours is noted: every step is
    then a comparison of its own.
    """
    return replay_in_windows(engine, prompt, answer, 1, follow=answer["choices"])


def replay_in_windows(
    engine: RefEngine, prompt: list[int], answer: Answer, window: int, follow: torch.Tensor | None = None
) -> Replay:
    """`window` tokens in one pass, as drafts are verified; the first token from the last prompt token, fed again."""
    engine.inject(_fitting(engine, prompt_kv(prompt, answer)))
    first = step(engine.model, engine.cache, len(prompt) - 1, prompt[-1:], keep_rows=True)[1]
    return _decode(engine, prompt, answer, first, None, window, follow)


def replay_captured(engine: RefEngine, prompt: list[int], answer: Answer) -> list[int]:
    """All tokens as captured steps emit them over the prompt's rows that stand in the cache; drafts included.

    The first is vLLM's. After a token that isn't vLLM's the steps start again behind vLLM's own.
    """
    ids, start = answer["ids"], 0
    ours = [ids[0]]
    while len(ours) < len(ids):
        before = ids[start - 1] if start else prompt[-1]
        steps = engine.captured.run(len(prompt) + start, before, ids[start])
        for token in itertools.chain.from_iterable(steps):
            ours.append(token)
            if len(ours) == len(ids) or token != ids[len(ours) - 1]:
                break
        start = len(ours) - 1
    return ours


def own_prefill(engine: RefEngine, prompt: list[int], answer: Answer) -> torch.Tensor:
    """Fills all layers' caches with our own KV; hidden states of the prompt, [T, D]."""
    hidden = prefill(engine.model, engine.cache, prompt)
    if engine.num_mtp:
        prefill_mtp(engine.model, engine.cache, [*prompt[1:], answer["ids"][0]], hidden)
    return hidden


@torch.inference_mode()
def _decode(
    engine: RefEngine,
    prompt: list[int],
    answer: Answer,
    first: torch.Tensor,
    prefilled: torch.Tensor | None,
    window: int,
    follow: torch.Tensor | None = None,
) -> Replay:
    rows, start, ids, written = [first], len(prompt), answer["ids"], Written(engine)
    anchors = {} if follow is None else recorded_rows(answer, start)
    with watch_choices(follow) as chosen:
        for at in range(0, len(ids) - 1, window):
            fed = ids[at : min(at + window, len(ids) - 1)]
            hidden, predicted = step(engine.model, engine.cache, start + at, fed)
            rows.append(predicted)
            if engine.num_mtp:
                _draft_rows(engine, start + at, ids[at + 1 : at + 1 + len(fed)], hidden)
            written.note(start + at, len(fed))
            if start + at in anchors:
                _anchor(engine, start + at, *anchors[start + at])
    layers = engine.model.config.num_hidden_layers
    choices = [chosen.get(layer, []) for layer in range(layers)]
    return Replay(torch.cat(rows).cpu(), prefilled, *written.all(), choices)


class Written:
    """What decode wrote, noted step by step."""

    def __init__(self, engine: RefEngine):
        self.engine, self.rows, self.index = engine, list[torch.Tensor](), list[torch.Tensor]()

    def note(self, first: int, count: int) -> None:
        self.rows.append(rows_of(self.engine, first, first + count))
        if (index := index_of(self.engine, first, first + count)) is not None:
            self.index.append(index)

    def all(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.cat(self.rows, dim=1), torch.cat(self.index, dim=1) if self.index else None


def _anchor(engine: RefEngine, position: int, rows: torch.Tensor, index: torch.Tensor | None) -> None:
    for layer in range(len(engine.cache.rows)):
        engine.cache.overwrite(layer, position, rows[layer], None if index is None else index[layer])


def _draft_rows(engine: RefEngine, first: int, next_ids: list[int], hidden: torch.Tensor) -> None:
    """The MTP layer's rows of these positions; one slot a pass, as vLLM's drafts come out where all are accepted."""
    model = engine.model
    for i, token in enumerate(next_ids):
        batch = model.batch(first + i, 1)
        mtp_forward(model.weights.mtp, model.config, engine.cache, batch, model.ids([token]), hidden[i : i + 1])


@contextmanager
def watch_choices(follow: torch.Tensor | None = None) -> Iterator[dict[int, list[Choice]]]:
    """While open: per layer what the indexer chose for each query, on the CPU.

    follow: int16 [main layers, queries, index_topk]; queries, fed one at a time, attend to these positions instead.
    """
    kept, ranked = dict[int, list[Choice]](), list[torch.Tensor]()
    choose, rank = engine_model.lightning_index, engine_indexer.top_positions

    def watched_rank(scores: torch.Tensor, count: int) -> torch.Tensor:
        ranked.extend(scores.cpu())
        return rank(scores, count)

    def watched(w, config, cache, layer, batch, *rest) -> Seen:
        ranked.clear()
        seen = choose(w, config, cache, layer, batch, *rest)
        whole = [Choice(torch.arange(s.stop), None) for s in seen if isinstance(s, slice)]
        picked = [s.cpu() for s in seen if not isinstance(s, slice)]
        done = kept.setdefault(layer, [])
        done += whole + [Choice(*pair) for pair in zip(picked, ranked, strict=True)]
        if follow is None or layer >= len(follow):
            return seen
        order = follow[layer, len(done) - 1].long()
        return [order[order >= 0].to(batch.positions.device)]

    engine_model.lightning_index, engine_indexer.top_positions = watched, watched_rank
    try:
        yield kept
    finally:
        engine_model.lightning_index, engine_indexer.top_positions = choose, rank


def _fitting(engine: RefEngine, kv: PromptKV) -> PromptKV:
    """Without drafts an engine has no place for the MTP layer's KV."""
    return PromptKV(kv.rid, kv.seq_len, kv.last_prompt_token, kv.layers[: len(engine.cache.rows)])


def rows_of(engine: RefEngine, first: int, end: int) -> torch.Tensor:
    """Bytes of the engine's rows at positions first .. end-1, uint8 [layers, tokens, row bytes]."""
    layers = range(len(engine.cache.rows))
    rows = [engine.cache.read_rows(layer, end, first).contiguous().view(torch.uint8) for layer in layers]
    return torch.stack(rows).cpu()


def index_of(engine: RefEngine, first: int, end: int) -> torch.Tensor | None:
    """Bytes of the engine's index keys at positions first .. end-1, uint8 [layers with an indexer, tokens, 132]."""
    if engine.cache.index is None:
        return None
    return torch.stack([engine.cache.index_bytes(layer, end, first) for layer in engine.cache.index_layers]).cpu()


def reproducible(order: SumOrder) -> bool:
    """Whether vLLM's kernels on this machine are the ones whose order of summation is known (numerics.py)."""
    return order is SumOrder.VLLM_AVX2


def gap(answer: Answer, position: int) -> float:
    """How far vLLM's best token is ahead of its second, in logprob."""
    (_, best), (_, second), *_ = answer["top"][position]
    return best - second


def smallest_gap(answers: Sequence[Answer]) -> float:
    return min(gap(answer, position) for answer in answers for position in range(len(answer["ids"])))


def noise(arrangement: str, reference: Sequence[Answer], other: Sequence[Answer]) -> Noise:
    """vLLM against vLLM, up to each prompt's first flip."""
    compared, flips, largest = 0, 0, 0.0
    for a, b in zip(reference, other, strict=True):
        for i in range(len(b["ids"])):
            compared += 1
            now, then = dict(b["top"][i]), dict(a["top"][i])
            largest = max([largest, *(abs(now[t] - then[t]) for t in now.keys() & then.keys())])
            if a["ids"][i] != b["ids"][i]:
                flips += 1
                break
    return Noise(arrangement, compared, flips, largest)


def verdicts(ids: Sequence[list[int]], alone: Sequence[Answer], others: Sequence[Answer]) -> Counter[Verdict]:
    """ids, predicted from the tokens of `alone`, against another run of vLLM, up to its first token that differs."""
    counts = Counter[Verdict]()
    for ours, anchor, other in zip(ids, alone, others, strict=True):
        for position, theirs in enumerate(other["ids"]):
            counts[judge(ours[position], theirs, other["top"][position])] += 1
            if theirs != anchor["ids"][position]:
                break
    return counts


def equal_shares(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[float]:
    """Share of equal bytes a layer, over all prompts; uint8 [layers, tokens, bytes] each."""
    pairs = list(zip(ours, theirs, strict=True))
    equal = torch.stack([(a == b).sum(dim=(1, 2)) for a, b in pairs])
    total = sum(b[0].numel() for _, b in pairs)
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
