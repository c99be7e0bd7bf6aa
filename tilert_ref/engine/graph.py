"""Greedy decoding as one CUDA graph: embedding to next token, drafts and their verification, cache writes.

A step is a plain function of what stands on the device, `greedy_step`; this file captures it from outside.
Captured once, it runs at any position: the host starts steps and reads tokens later, and no step waits for it. A sparse
model's is captured a second time for up to index_topk tokens, where every query sees all of them and nothing is ranked.

    steps = GreedySteps(model, cache, num_drafts)                             captures; seconds
    for ids in steps.run(seq_len, last_prompt_token, first_token): ...       lists of ids, one a step

Where the host has to choose the tokens (temperature, logprobs), the same step is two graphs with the sampler between
them: SampledSteps.

Every kernel takes its sums in one order whatever stands around it, so eager and captured steps write the same bytes;
tests/gpu holds them against each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilert_ref.engine import tensor_cores
from tilert_ref.engine.api import Token
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.decode import Model, verify
from tilert_ref.engine.model import forward, head, logits, mtp_forward
from tilert_ref.engine.sampling import Sampler

STEPS_AHEAD = 8
"""Steps that are started together; the tokens of the ones before are read meanwhile (TileRT's GLM5_AR_N)."""


@dataclass(frozen=True)
class DecodeState:
    """Where a sequence stands, on the device. d drafts a step; room for S tokens.

    tokens: the last emitted token and the drafts after it, at positions `position` .. `position` + d.
    emitted: every id that the steps emitted, one after the other; accepted: how many each step did.
    """

    tokens: torch.Tensor  # int64 [1 + d]
    position: torch.Tensor  # int64 [1]
    emitted: torch.Tensor  # int64 [S + d]
    accepted: torch.Tensor  # int64 [S]
    total: torch.Tensor  # int64 [1], ids in emitted
    steps: torch.Tensor  # int64 [1]

    @classmethod
    def empty(cls, room: int, num_drafts: int, device: torch.device) -> "DecodeState":
        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        return cls(zeros(1 + num_drafts), zeros(1), zeros(room + num_drafts), zeros(room), zeros(1), zeros(1))

    def start(self, position: int, token: int) -> None:
        """token: the last emitted one, at `position`; drafts don't matter yet."""
        self.tokens.fill_(token)
        self.position.fill_(position)
        self.total.zero_()
        self.steps.zero_()


def greedy_step(model: Model, cache: KVCache, state: DecodeState) -> None:
    """One step of decode.decode_plain or decode_mtp, greedy, without a look from the host."""
    hidden = window_hidden(model, cache, state)  # [1 + d, D]
    ids = best(head(model.weights, hidden))  # [1 + d]
    count = accept(state, ids)
    advance(model, cache, state, hidden, ids, count)


def best(rows: torch.Tensor) -> torch.Tensor:
    """The greedy choice of each row [T, V], of equal logits the first, int64 [T]. (A broken row has some id: on a GPU
    NaN counts as infinite.)"""
    return tensor_cores.steps().best(rows) if tensor_cores.there(rows) else rows.argmax(-1)


def accept(state: DecodeState, ids: torch.Tensor) -> torch.Tensor:
    """Emits what the model says, ids [1 + d], as far as the drafts are the same, and the id after it; -> how many, [1].

    Ids behind those are overwritten by the next step's."""
    results = state.emitted, state.accepted, state.total, state.steps
    if tensor_cores.there(ids):
        return tensor_cores.steps().accept(ids, state.tokens, *results)
    count = (ids[:-1] == state.tokens[1:]).cumprod(0).sum(0, keepdim=True) + 1  # [1]
    places = state.total + torch.arange(len(ids), device=ids.device)
    state.emitted.index_copy_(0, places.clamp_max(len(state.emitted) - 1), ids)
    state.accepted.index_copy_(0, state.steps.clamp_max(len(state.accepted) - 1), count)
    state.total.add_(count)
    state.steps.add_(1)
    return count


def window_hidden(model: Model, cache: KVCache, state: DecodeState) -> torch.Tensor:
    """Hidden states of the last token and its drafts, [1 + d, D]; their rows are written."""
    batch = model.captured_batch(state.position, 0, len(state.tokens), cache)
    return forward(model.weights, model.config, cache, batch, state.tokens)


def advance(
    model: Model, cache: KVCache, state: DecodeState, hidden: torch.Tensor, ids: torch.Tensor, count: torch.Tensor
) -> None:
    """The next window after the first `count` [1] of ids [1 + d] were emitted: the last of them and drafts after it."""
    drafts, num_drafts = None, len(state.tokens) - 1
    if num_drafts:
        drafts = torch.cat(draft_on_device(model, cache, state.position, ids, hidden, count, num_drafts))
    # Steps that run on behind the end of the room write the same last positions again; nobody reads them.
    next_window(state, ids, drafts, count, len(model.rope) - 1 - num_drafts)


def next_window(
    state: DecodeState, ids: torch.Tensor, drafts: torch.Tensor | None, count: torch.Tensor, last: int
) -> None:
    """The window that begins with the last of the first `count` [1] of ids [1 + d], drafts [d] after it, at most at
    position `last`."""
    if tensor_cores.there(ids):
        tensor_cores.steps().next_window(ids, drafts, count, state.tokens, state.position, last)
        return
    state.tokens[:1] = ids.index_select(0, count - 1)
    if drafts is not None:
        state.tokens[1:] = drafts
    state.position.copy_((state.position + count).clamp_max(last))


def prime(model: Model, cache: KVCache, state: DecodeState, last_prompt_token: torch.Tensor) -> None:
    """The first drafts: what decode.decode_mtp does before its loop. state: the first token stands at `position`.

    last_prompt_token: int64 [1]; its rows stay as they came over the wire.
    """
    first, position = state.tokens[:1].clone(), state.position - 1
    batch = model.captured_batch(position, 0, 1, cache, keep_rows=True)
    hidden = forward(model.weights, model.config, cache, batch, last_prompt_token)  # [1, D]
    one = torch.ones_like(position)
    drafts = draft_on_device(model, cache, position, first, hidden, one, len(state.tokens) - 1, keep_rows=True)
    state.tokens.copy_(torch.cat([first, *drafts]))


def draft_on_device(
    model: Model,
    cache: KVCache,
    position: torch.Tensor,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    count: torch.Tensor,
    num_drafts: int,
    *,
    keep_rows: bool = False,
) -> list[torch.Tensor]:
    """decode.draft after the first `count` [1] of the ids [n] were accepted; -> the drafts, int64 [1] each.

    The slots of all ids get rows, also those behind the accepted ones: the next step writes those again before anything
    attends to them.
    """
    mtp, last = model.weights.mtp, count - 1
    batch = model.captured_batch(position, 0, len(ids), cache, keep_rows=keep_rows)
    hidden, seen = mtp_forward(mtp, model.config, cache, batch, ids, hidden)
    hidden = hidden.index_select(0, last)
    chosen = seen[last] if model.config.index_share_for_mtp_iteration else None
    drafts = [best(head(mtp, hidden))]
    for offset in range(1, num_drafts):
        batch = model.captured_batch(position + last, offset, 1, cache, chosen=chosen)
        hidden, _ = mtp_forward(mtp, model.config, cache, batch, drafts[-1], hidden)
        drafts.append(best(head(mtp, hidden)))
    return drafts


@torch.inference_mode()
def cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """-> what launches all that `run` does on the GPU. It runs twice beside the graph first: kernels are compiled and
    memory is found then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""cuda_graph, or what stands for it in a test."""


WARM_UP = 64
"""More positions than the steps before a capture walk over, whatever form they have."""


def up_to(model: Model, end: int) -> Model:
    """The model for captured steps whose queries have at most `end` tokens before them, themselves included. The bits
    are the same; where nothing is left out nothing is ranked. Another back end's attention has one number of rows."""
    topk = model.config.index_topk
    return replace(model, chooses=topk is None or max(end, WARM_UP) > topk or model.kernels.attention is not None)


def step_end(position: int, num_drafts: int) -> int:
    """How many tokens the last query of a step has before it, itself included, whose last emitted token stands at
    `position`: after the window come later drafts, which are made of the last one that holds."""
    return position + 1 + 2 * num_drafts


class ByLength:
    """What `run` does with a model, captured for any length, and where there are two forms of the model (up_to) for
    both."""

    def __init__(self, model: Model, run: Callable[[Model], None], capture: Capture):
        self._model = model
        forms = {form.chooses: form for form in (up_to(model, 0), model)}
        self._forms = {chooses: capture(partial(run, form)) for chooses, form in forms.items()}

    def __call__(self, end: int) -> None:
        """end: as in up_to; more than there are is right too."""
        self._forms[up_to(self._model, end).chooses]()


class GreedySteps:
    """Captured greedy steps over one model and cache, for one sequence at a time.

    The cache is written at position 0 while they are captured: capture before a prompt is injected.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        num_drafts: int,
        progress: Callable[[str], None] = lambda line: None,
        capture: Capture = cuda_graph,
    ):
        self.model, self.cache, self.num_drafts = model, cache, num_drafts
        device = model.rope.device
        self.state = DecodeState.empty(len(model.rope), num_drafts, device)
        self._last_prompt_token = torch.zeros(1, dtype=torch.int64, device=device)
        progress("decode step: kernels and capture")
        self._step = ByLength(model, lambda form: greedy_step(form, cache, self.state), capture)
        if num_drafts:
            progress("first drafts: kernels and capture")
            self._prime = ByLength(model, lambda form: prime(form, cache, self.state, self._last_prompt_token), capture)
        results = self.state.emitted, self.state.accepted
        self._host = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in results]

    @torch.inference_mode()
    def run(self, seq_len: int, last_prompt_token: int, first_token: int) -> Iterator[list[int]]:
        """Endless ids after first_token at seq_len, those of one step after those of another."""
        self.begin(seq_len, last_prompt_token, first_token)
        emitted, accepted = self._host
        done, begin = 0, 0
        most = STEPS_AHEAD * (1 + self.num_drafts)  # ids of the steps that are under way
        self._launch(seq_len)
        while True:
            ready = self._read(done, begin)
            self._launch(seq_len + begin + most)  # so that the GPU has work while these are read
            if ready is not None:
                ready.synchronize()
            for count in accepted[done : done + STEPS_AHEAD].tolist():
                yield emitted[begin : begin + count].tolist()
                begin += count
            done += STEPS_AHEAD

    def begin(self, seq_len: int, last_prompt_token: int, first_token: int) -> None:
        """The state in which a sequence's first step finds it, first drafts included.

        Raises ValueError where a back end's captured steps don't hold for seq_len.
        """
        if (attention := self.model.kernels.attention) is not None and not attention.replays(seq_len):
            raise ValueError(f"captured steps of {attention.name} at {seq_len} tokens; legal: eager steps there")
        self.state.start(seq_len, first_token)
        if self.num_drafts:
            self._last_prompt_token.fill_(last_prompt_token)
            self._prime(step_end(seq_len, self.num_drafts))

    def _launch(self, position: int) -> None:
        """position: where the last emitted token stands at most."""
        for number in range(STEPS_AHEAD):
            self._step(step_end(position + number * (1 + self.num_drafts), self.num_drafts))

    def _read(self, done: int, begin: int) -> torch.cuda.Event | None:
        """Starts to copy what the launched steps emitted; the event says when it is there, None at once."""
        ends = begin + STEPS_AHEAD * (1 + self.num_drafts), done + STEPS_AHEAD
        results = self.state.emitted, self.state.accepted
        for host, device, start, end in zip(self._host, results, (begin, done), ends, strict=True):
            host[start:end].copy_(device[start:end], non_blocking=True)
        if not self.state.emitted.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


class SampledSteps:
    """Steps whose tokens the host chooses from the logits: one graph before its choice and one after it.

    They share the greedy steps' model, cache, state and first drafts; capture is as there.
    """

    def __init__(self, greedy: GreedySteps, capture: Capture = cuda_graph):
        self.greedy, self.state = greedy, greedy.state
        model, cache, window = greedy.model, greedy.cache, len(greedy.state.tokens)
        device, c = model.rope.device, model.config
        self._hidden = torch.zeros(window, c.hidden_size, dtype=model.weights.embed.dtype, device=device)
        self._logits = torch.zeros(window, c.vocab_size, device=device)
        self._choice = torch.ones(window + 1, dtype=torch.int64, device=device)  # the ids, then how many count
        self._host = torch.ones_like(self._choice, device="cpu", pin_memory=self._choice.is_cuda)

        def look(form: Model) -> None:
            self._hidden.copy_(window_hidden(form, cache, self.state))
            self._logits.copy_(logits(form.weights, self._hidden))

        self._look = ByLength(model, look, capture)
        ids, count = self._choice.split([window, 1])
        self._advance = ByLength(
            model, lambda form: advance(form, cache, self.state, self._hidden, ids, count), capture
        )

    @torch.inference_mode()
    def run(self, seq_len: int, last_prompt_token: int, first_token: int, sampler: Sampler) -> Iterator[list[Token]]:
        """Endless tokens after first_token at seq_len, chosen as in decode.decode_plain and decode_mtp."""
        self.greedy.begin(seq_len, last_prompt_token, first_token)
        position = seq_len
        while True:
            end = step_end(position, self.greedy.num_drafts)
            self._look(end)
            emitted = verify(sampler, self._logits, self.state.tokens[1:].tolist())
            yield emitted
            self._choose([token.id for token in emitted])
            self._advance(end)
            position += len(emitted)

    def _choose(self, ids: list[int]) -> None:
        """Ids behind those that were emitted don't matter, but are looked up in the embedding: the last ones stay."""
        self._host[: len(ids)] = torch.tensor(ids)
        self._host[-1] = len(ids)
        self._choice.copy_(self._host, non_blocking=True)
