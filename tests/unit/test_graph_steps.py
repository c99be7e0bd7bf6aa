"""The step that a GPU captures, run as plain torch: the same tokens, rows and acceptance as the eager decode loop."""

from pathlib import Path

import pytest
import torch

from tilert_ref.engine.api import Finished, SamplingParams
from tilert_ref.engine.batch import Batch
from tilert_ref.engine.graph import GreedySteps, SampledSteps
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def engines(directory: Path, num_mtp: int, kv: str = "bf16") -> tuple[RefEngine, RefEngine]:
    eager = load_engine(directory, max_seq_len=512, num_mtp=num_mtp, kv_cache_dtype=kv)
    captured = load_engine(directory, max_seq_len=512, num_mtp=num_mtp, kv_cache_dtype=kv)
    captured.captured = GreedySteps(captured.model, captured.cache, num_mtp, capture=lambda run: run)
    captured.sampled = SampledSteps(captured.captured, capture=lambda run: run)
    return eager, captured


def answer(engine: RefEngine, prompt: list[int], tokens: int) -> tuple[list[list[int]], Finished]:
    first = engine.prefill(prompt, GREEDY)
    *steps, finished = engine.decode(first, tokens, GREEDY)
    return [[token.id for token in step] for step in steps], finished


@pytest.mark.parametrize("num_mtp", [0, 1, 3])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_steps_of_a_sparse_model_are_those_of_the_eager_loop(num_mtp: int, kv: str) -> None:
    """A prompt beyond index_topk, 256: layers choose, and later drafts attend to rows that drafts wrote."""
    eager, captured = engines(model_dir("tiny-glm5"), num_mtp, kv)
    prompt = [(7 * i + 3) % 480 for i in range(270)]
    theirs, ours = answer(eager, prompt, 21), answer(captured, prompt, 21)
    assert ours == theirs
    end = len(prompt) + 20 - num_mtp
    for layer in range(len(eager.cache.rows)):
        assert captured.cache.read_rows(layer, end).equal(eager.cache.read_rows(layer, end))
        assert captured.cache.index_bytes(layer, end).equal(eager.cache.index_bytes(layer, end))


@pytest.mark.parametrize("num_mtp", [0, 1, 3])
@pytest.mark.parametrize("length", [225, 238, 247, 252, 255, 256])
def test_steps_that_rank_nothing_end_where_a_query_has_more_than_index_topk_tokens(length: int, num_mtp: int) -> None:
    """Some of 24 steps are before that, some behind: all leave what the eager loop leaves."""
    eager, captured = engines(model_dir("tiny-glm5"), num_mtp)
    prompt = [(7 * i + 3) % 480 for i in range(length)]
    theirs, ours = answer(eager, prompt, 25), answer(captured, prompt, 25)
    assert ours == theirs
    end = length + 23 - num_mtp  # where the last step may have begun: the eager loop makes no drafts after it
    for layer in range(len(eager.cache.rows)):
        assert captured.cache.read_rows(layer, end).equal(eager.cache.read_rows(layer, end))
        assert captured.cache.index_bytes(layer, end).equal(eager.cache.index_bytes(layer, end))


@pytest.mark.parametrize("num_mtp", [0, 1, 3])
def test_steps_that_are_started_ahead_are_taken_for_as_far_as_drafts_may_carry_them(num_mtp: int) -> None:
    """16 are started before the first token is read: every draft of theirs may hold, and each step's last draft sees
    its window and the drafts before it."""
    _, captured = engines(model_dir("tiny-glm5"), num_mtp)
    steps, ends, primed = captured.captured, list[int](), list[int]()
    step, prime = steps._step, getattr(steps, "_prime", None)
    steps._step = lambda end: (ends.append(end), step(end))
    steps._prime = lambda end: (primed.append(end), prime(end))
    first = captured.prefill([(7 * i + 3) % 480 for i in range(100)], GREEDY)
    next(captured.captured.run(100, 3, first))
    reach = 1 + max(num_mtp, 2 * num_mtp - 1)
    needed = [100 + number * (1 + num_mtp) + reach for number in range(16)]
    assert len(ends) == 16
    assert all(need <= end <= need + 1 for end, need in zip(ends, needed, strict=True))
    assert all(100 + num_mtp <= end <= needed[0] + 1 for end in primed) and len(primed) == bool(num_mtp)


@pytest.mark.parametrize("num_mtp", [0, 1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_first_step_that_ranks(sampled: bool, num_mtp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No captured step before it asks how many tokens there are. Its last draft may see one more than index_topk, 256;
    greedy steps are started 16 at a time, before it is known how many tokens they emit."""
    _, captured = engines(model_dir("tiny-glm5"), num_mtp)
    asked = list[int]()
    lengths = Batch.lengths

    def counted(batch: Batch) -> list[int]:
        found = lengths(batch)
        asked.append(found[-1])
        return found

    def emitted_until_it_ranks() -> int:
        begun = captured.prefill([(7 * i + 3) % 480 for i in range(100)], GREEDY)
        sampling = SamplingParams(temperature=1.0, seed=1, ignore_eos=True) if sampled else GREEDY
        monkeypatch.setattr(Batch, "lengths", counted)
        asked.clear()
        tokens = 0
        for event in captured.decode(begun, 400, sampling):
            if asked or isinstance(event, Finished):
                return tokens
            tokens += len(event)
        return tokens

    tokens = emitted_until_it_ranks()
    window, end = 1 + num_mtp, 256 - 2 * num_mtp
    late = 16 * window if not sampled else window
    assert end - 100 - late <= tokens <= end - 100 + window
    assert asked, "no step ranked at all"


@pytest.mark.parametrize("num_mtp", [0, 2])
@pytest.mark.parametrize("arch", ["dsv3", "glm52"])
def test_steps_of_other_models(arch: str, num_mtp: int, tiny) -> None:
    """Dense attention over everything, and indexers that layers and drafts share."""
    eager, captured = engines(tiny(arch), num_mtp)
    prompt = [(5 * i + 1) % 480 for i in range(75)]
    assert answer(captured, prompt, 30) == answer(eager, prompt, 30)


@pytest.mark.parametrize("num_mtp", [1, 3])
def test_a_second_request_starts_afresh_and_the_room_ends_the_answer(num_mtp: int) -> None:
    """Steps that were started ahead run on behind the end of the room, their drafts too."""
    eager, captured = engines(model_dir("tiny-glm5"), num_mtp)
    for length in (280, 12, 490):
        prompt = [(11 * i + length) % 480 for i in range(length)]
        steps, finished = answer(captured, prompt, 40)
        assert (steps, finished) == answer(eager, prompt, 40)
        assert sum(map(len, steps)) == min(40, 512 - length - 1)


@pytest.mark.parametrize(("num_mtp", "top_logprobs"), [(0, None), (3, 2)])
def test_sampled_steps_are_those_of_the_eager_loop(num_mtp: int, top_logprobs: int | None) -> None:
    """Seed by seed, and in one engine after another kind of request; some drafts hold and some don't."""
    eager, captured = engines(model_dir("tiny-glm5"), num_mtp)
    prompt = [(7 * i + 3) % 480 for i in range(270)]
    first = eager.prefill(prompt, GREEDY)
    assert captured.prefill(prompt, GREEDY) == first
    for sampling in (GREEDY, SamplingParams(1.0, 0.9, 20, True, seed=1), SamplingParams(2.0, 1.0, 0, True, seed=2)):
        theirs, ours = (list(engine.decode(first, 10, sampling, top_logprobs)) for engine in (eager, captured))
        assert ours == theirs and sum(map(len, ours[:-1])) == 10


def test_a_sampled_request_takes_no_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = engines(model_dir("tiny-glm5"), 0)
    first = captured.prefill([5, 6, 7], GREEDY)
    monkeypatch.setattr(RefEngine, "_steps", lambda *_: pytest.fail("an eager step"))
    assert len(list(captured.decode(first, 3, SamplingParams(temperature=0.7, seed=1)))) >= 2
    assert len(list(captured.decode(first, 3, GREEDY, top_logprobs=2))) >= 2


def test_the_host_is_asked_for_nothing_but_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position of a captured step lives on the device; a look at it from the host would freeze it in the graph."""
    _, captured = engines(model_dir("tiny-glm5"), 0)
    batch = captured.model.captured_batch(torch.tensor([3]), 0, 1, captured.cache)
    with pytest.raises(TypeError):
        _ = batch.end
