"""The decode loop: prefill, step, draft, verify as free functions over a model and a cache.

Positions: a prompt of seq_len tokens fills positions 0 .. seq_len-1, the first generated token stands at seq_len.
Slot i of the MTP layer's cache belongs to position i and is made of hidden state i and token i+1.

Drafting is lossless by construction: every emitted token is sampled from the main model's logits at its own position,
a draft only decides how many positions one pass may cover. Greedy or not, the tokens are those of plain decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.api import FinishReason, Token
from tilert_ref.engine.batch import Batch, Pieces, Seen, Selected
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.model import forward, head, logits, mtp_forward
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.sampling import Sampler
from tilert_ref.engine.weights import MtpWeights, Weights


@dataclass(frozen=True)
class Model:
    """Everything that doesn't change between steps. rope: [positions, 2, rope / 2] (rope.rope_table). pieces: compiled
    forms of the layers' functions, for the eager steps of a CPU. chooses: False in captured steps of a sparse model at
    up to index_topk tokens, where there is nothing to choose (graph.up_to)."""

    config: ModelConfig
    weights: Weights
    rope: torch.Tensor
    kernels: Kernels
    pieces: Pieces | None = None
    chooses: bool = True

    def batch(
        self, first: int, tokens: int, *, absorbed: bool = True, keep_rows: bool = False, chosen: Seen | None = None
    ) -> Batch:
        positions = torch.arange(first, first + tokens, device=self.rope.device)
        rope = self.rope[positions]
        return Batch(first, positions, rope, absorbed, self.kernels, keep_rows, chosen, pieces=self.pieces)

    def captured_batch(
        self,
        start: torch.Tensor,
        offset: int,
        tokens: int,
        cache: KVCache,
        *,
        keep_rows: bool = False,
        chosen: Selected | None = None,
    ) -> Batch:
        """For `tokens` tokens from position start [1] + offset on, which only the device knows (graph.py)."""
        positions, rope = place(start, offset, tokens, self.rope)
        most = self.config.index_topk
        everything = None if most is not None and self.chooses else cache.everything(positions, most)
        return Batch(None, positions, rope, True, self.kernels, keep_rows, chosen, everything)

    def ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.rope.device)


def place(start: torch.Tensor, offset: int, tokens: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions start + offset, ... of `tokens` tokens, int64 [T], none behind the table's end, and its rows there.

    Captured steps run on behind the end of the room; what they make there is thrown away."""
    if tensor_cores.there(start):
        return tensor_cores.steps().place(start, offset, tokens, table)
    positions = (start + offset + torch.arange(tokens, device=start.device)).clamp_max(len(table) - 1)
    return positions, table[positions]


@dataclass
class DraftStats:
    """Verify passes and what they emitted; mean = emitted / calls is the acceptance length."""

    calls: int = 0
    emitted: int = 0


@torch.inference_mode()
def prefill(model: Model, cache: KVCache, prompt: Sequence[int], chunk: int = 2048, *, cached: int = 0) -> torch.Tensor:
    """Runs a prompt and fills the main layers' rows; returns the hidden states [T - cached, D].

    cached: the rows of that many first tokens are in the cache, from an earlier call; only the rest is run.

    A single token takes decode's form of attention, as in vLLM (its MLA back ends count one-token queries as decodes).
    A sparse model takes it for every token, on the rows as the cache holds them. So does vLLM with the exception that
    docs/numerics.md names ("Sparse models").
    """
    hidden = []
    for first in range(cached, len(prompt), chunk):
        tokens = prompt[first : first + chunk]
        batch = model.batch(first, len(tokens), absorbed=len(tokens) == 1)
        hidden.append(forward(model.weights, model.config, cache, batch, model.ids(tokens)))
    return torch.cat(hidden)


@torch.inference_mode()
def prefill_mtp(model: Model, cache: KVCache, next_ids: Sequence[int], hidden: torch.Tensor) -> None:
    """Fills the MTP layer's slots 0 .. T-1; next_ids[i] is the token at i+1, so the last one is the first sampled."""
    batch = model.batch(0, len(next_ids), absorbed=len(next_ids) == 1)
    mtp_forward(_mtp(model), model.config, cache, batch, model.ids(next_ids), hidden)


@torch.inference_mode()
def step(
    model: Model, cache: KVCache, first: int, tokens: Sequence[int], *, keep_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feeds tokens at positions first, first+1, ...; returns (hidden [T, D], logits [T, V])."""
    batch = model.batch(first, len(tokens), keep_rows=keep_rows)
    hidden = forward(model.weights, model.config, cache, batch, model.ids(tokens))
    return hidden, logits(model.weights, hidden)


@torch.inference_mode()
def draft(
    model: Model,
    cache: KVCache,
    first: int,
    next_ids: Sequence[int],
    hidden: torch.Tensor,
    num_drafts: int,
    *,
    keep_rows: bool = False,
) -> list[int]:
    """Greedy drafts for the positions after next_ids.

    First the slots first .. first+n-1 get their rows from the main model's hidden states [n, D] (keep_rows: they came
    over the wire), then the module runs on its own output, one slot further each time. Those later rows are
    provisional: the next call overwrites them with rows from true hidden states.

    With index_share_for_mtp_iteration the later drafts attend to what the first draft's query has chosen, which is
    nothing behind it, and leave no index keys (vLLM v1/spec_decode/llm_base_proposer.py, set_skip_topk).
    """
    mtp, drafts, slot, chosen = _mtp(model), list[int](), first, None
    tokens = list(next_ids)
    for _ in range(num_drafts):
        batch = model.batch(slot, len(tokens), keep_rows=keep_rows, chosen=chosen)
        hidden, seen = mtp_forward(mtp, model.config, cache, batch, model.ids(tokens), hidden)
        hidden, chosen = hidden[-1:], seen[-1:] if model.config.index_share_for_mtp_iteration else None
        drafts.append(int(head(mtp, hidden)[0].argmax()))
        slot, tokens, keep_rows = slot + len(tokens), drafts[-1:], False
    return drafts


def verify(sampler: Sampler, rows: torch.Tensor, drafts: Sequence[int]) -> list[Token]:
    """Samples each position of logits rows [1 + drafts, V] while the drafts hold; at least one token.

    Sampling from the target and comparing is speculative sampling (arXiv 2302.01318) for a draft that is a single
    token: it is accepted with its target probability, and a rejected one is replaced by a sample of the rest.
    """
    emitted = list[Token]()
    for row, guess in zip(rows, [*drafts, None], strict=True):
        emitted.append(sampler(row))
        if emitted[-1].id != guess:
            break
    return emitted


def decode_plain(
    model: Model, cache: KVCache, seq_len: int, first_token: int, sampler: Sampler
) -> Iterator[list[Token]]:
    """Endless tokens after first_token, one a step."""
    position, token = seq_len, first_token
    while True:
        _, rows = step(model, cache, position, [token])
        emitted = sampler(rows[0])
        position, token = position + 1, emitted.id
        yield [emitted]


def decode_mtp(
    model: Model,
    cache: KVCache,
    seq_len: int,
    last_prompt_token: int,
    first_token: int,
    sampler: Sampler,
    num_drafts: int,
    stats: DraftStats,
) -> Iterator[list[Token]]:
    """Endless tokens after first_token, one verified window a step.

    No hidden state comes over the wire, so the last prompt token is fed again for it; its rows stay as they came.
    """
    hidden, _ = step(model, cache, seq_len - 1, [last_prompt_token], keep_rows=True)
    drafts = draft(model, cache, seq_len - 1, [first_token], hidden, num_drafts, keep_rows=True)
    position, token = seq_len, first_token
    while True:
        hidden, rows = step(model, cache, position, [token, *drafts])
        emitted = verify(sampler, rows, drafts)
        stats.calls, stats.emitted = stats.calls + 1, stats.emitted + len(emitted)
        yield emitted
        ids = [t.id for t in emitted]
        drafts = draft(model, cache, position, ids, hidden[: len(ids)], num_drafts)
        position, token = position + len(ids), ids[-1]


def until_stop(
    steps: Iterator[list[Token]], first_token: int, budget: int, stop_ids: frozenset[int]
) -> Iterator[list[Token] | FinishReason]:
    """Cuts a token stream at the first stop token (not emitted) or after `budget` tokens, then yields the reason.

    The first token counts and is yielded alone; a stop token that would be the budget's next token is not looked at
    (finish "length"), as in TileRT's CUDA engines.
    """
    if first_token in stop_ids:
        yield "stop"
        return
    yield [Token(first_token)]
    left = budget - 1
    while left > 0:
        tokens = next(steps)[:left]
        stop = next((i for i, token in enumerate(tokens) if token.id in stop_ids), None)
        if tokens[:stop]:
            yield tokens[:stop]
        if stop is not None:
            yield "stop"
            return
        left -= len(tokens)
    yield "length"


def _mtp(model: Model) -> MtpWeights:
    if model.weights.mtp is None:
        raise ValueError("drafting needs the MTP layer's weights: load the model with_mtp")
    return model.weights.mtp
