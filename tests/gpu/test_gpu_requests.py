"""Requests on a Hopper GPU: greedy and sampled ones are the eager loop's token by token, one prompt has one answer.

TILERT_REF_REPEATS says how often that prompt is asked (default 1000).
"""

import os
import time

import pytest
import torch

from tilert_ref.bench_phases import MTP, PHASES, REST, split_step
from tilert_ref.engine.api import Finished, SamplingParams, Token
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
REPEATS = int(os.environ.get("TILERT_REF_REPEATS", "1000"))
SAMPLINGS = [
    (GREEDY, None),
    (GREEDY, 3),
    (SamplingParams(temperature=0.7, top_p=0.95, ignore_eos=True, seed=1), None),
    (SamplingParams(temperature=1.0, top_k=40, ignore_eos=True, seed=2), 0),
    (SamplingParams(temperature=1.5, top_p=0.9, top_k=100, ignore_eos=True, seed=3), 5),
    (SamplingParams(temperature=3.0, ignore_eos=True, seed=4), None),
]


def engine(model: str, num_mtp: int, kv: str, capture: bool = True) -> RefEngine:
    return load_engine(
        model_dir(model), device="cuda", max_seq_len=1024, num_mtp=num_mtp, kv_cache_dtype=kv, capture=capture
    )


def timed(
    served: RefEngine, first: int, sampling: SamplingParams, top: int | None, tokens: int = 128
) -> tuple[list[list[Token] | Finished], float]:
    """(events, us a step)"""
    start = time.perf_counter()
    events = list(served.decode(first, tokens, sampling, top))
    return events, 1e6 * (time.perf_counter() - start) / (len(events) - 2)


@pytest.mark.parametrize("length", [200, 300])
@pytest.mark.parametrize("num_mtp", [0, 3])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("model", ["tiny-glm5", "tiny-dsv32"])
def test_captured_steps_are_the_eager_ones_seed_by_seed(model: str, kv: str, num_mtp: int, length: int) -> None:
    """Beyond index_topk, 256, and from below it on. Rows and index keys that the steps wrote are equal too."""
    captured, eager = engine(model, num_mtp, kv), engine(model, num_mtp, kv, capture=False)
    assert captured.sampled is not None and eager.sampled is None
    prompt = [(7 * i + 3) % 480 for i in range(length)]
    first = captured.prefill(prompt, GREEDY)
    assert eager.prefill(prompt, GREEDY) == first
    for sampling, top in SAMPLINGS:
        timed(captured, first, sampling, top, 8)
        ours, step = timed(captured, first, sampling, top)
        theirs, eager_step = timed(eager, first, sampling, top)
        assert ours == theirs
        print(
            f"{model} {kv} {num_mtp} drafts, {length} tokens, {sampling}, logprobs {top}: "
            f"{step:.0f} us a step, eager {eager_step:.0f}"
        )
        end = len(prompt) + 126 - num_mtp  # where the last step may have begun
        for layer in range(len(captured.cache.rows)):
            assert captured.cache.read_rows(layer, end).equal(eager.cache.read_rows(layer, end))
            assert captured.cache.index_bytes(layer, end).equal(eager.cache.index_bytes(layer, end))


@pytest.mark.parametrize("num_mtp", [0, 3])
@pytest.mark.parametrize("model", ["tiny-glm5", "tiny-dsv32"])
def test_repeats_of_one_prompt_give_one_answer(model: str, num_mtp: int) -> None:
    """Prefill and 64 greedy tokens each time; every tenth time another prompt comes in between."""
    served = engine(model, num_mtp, "fp8")
    prompt, other = [(11 * i + 5) % 480 for i in range(48)], [(13 * i + 1) % 480 for i in range(301)]
    answers = dict[tuple[int, ...], int]()
    for number in range(REPEATS):
        if number % 10 == 9:
            timed(served, served.prefill(other, GREEDY), GREEDY, None, 8)
        first = served.prefill(prompt, GREEDY)
        *steps, finished = served.decode(first, 64, GREEDY)
        answer = tuple(token.id for step in steps for token in step)
        assert len(answer) == 64 and finished.reason == "length"
        answers[answer] = answers.get(answer, 0) + 1
    print(f"{model}, {num_mtp} drafts: {REPEATS} repeats, {len(answers)} answer(s): {sorted(answers.values())}")
    assert len(answers) == 1


@pytest.mark.parametrize("num_mtp", [0, 3])
def test_the_phases_of_a_captured_step_add_up_to_it(num_mtp: int) -> None:
    """Marks cost a tiny step much, a real one little: only that they change nothing else is tested here."""
    served = engine("tiny-glm5", num_mtp, "fp8")
    prompt = [(7 * i + 3) % 480 for i in range(300)]
    first = served.prefill(prompt, GREEDY)
    before = [token.id for step in list(served.decode(first, 64, GREEDY))[:-1] for token in step]
    split = split_step(served, 300)
    print(f"{num_mtp} drafts", *split.rows(), sep="\n")
    assert sum(split.us.values()) == pytest.approx(split.step_us)
    assert {phase for *_, phase in PHASES if num_mtp or phase != MTP} | {REST} == set(split.us)
    assert all(us > 0 for us in split.us.values())
    assert served.prefill(prompt, GREEDY) == first
    assert [token.id for step in list(served.decode(first, 64, GREEDY))[:-1] for token in step] == before
