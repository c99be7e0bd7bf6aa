"""Temperature, top-k, top-p and seeds."""

import math

import pytest
import torch

from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.sampling import Sampler, distribution

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]))


def probabilities(**params) -> list[float]:
    return distribution(LOGITS, SamplingParams(**params)).tolist()


def test_temperature_one_is_softmax() -> None:
    assert probabilities() == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.0625])


def test_temperature_sharpens() -> None:
    squares = [p * p for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)]
    assert probabilities(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares])


@pytest.mark.parametrize(("k", "kept"), [(0, 5), (-1, 5), (1, 1), (3, 3), (5, 5), (99, 5)])
def test_top_k_keeps_the_most_likely(k: int, kept: int) -> None:
    assert sum(p > 0 for p in probabilities(top_k=k)) == kept


@pytest.mark.parametrize(("p", "kept"), [(1e-9, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.999, 5), (1.0, 5)])
def test_top_p_keeps_the_smallest_sufficient_set(p: float, kept: int) -> None:
    result = probabilities(top_p=p)
    assert sum(x > 0 for x in result) == kept
    assert sum(result) == pytest.approx(1)


def test_top_k_comes_before_top_p() -> None:
    assert probabilities(top_k=2, top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])
    assert probabilities(top_k=2, top_p=0.6) == pytest.approx([1, 0, 0, 0, 0])


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert Sampler(SamplingParams(temperature=0.0))(torch.tensor([1.0, 3.0, 3.0])).id == 1


def test_seed_repeats_and_differs() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler(LOGITS).id for _ in range(50)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_frequencies_follow_the_distribution() -> None:
    sampler = Sampler(SamplingParams(seed=0))
    counts = torch.bincount(torch.tensor([sampler(LOGITS).id for _ in range(4000)]), minlength=5) / 4000
    expected = LOGITS.exp()
    assert ((counts - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_logprobs_are_raw_whatever_the_temperature() -> None:
    token = Sampler(SamplingParams(temperature=0.0), top_logprobs=2)(LOGITS)
    assert token.logprob == pytest.approx(math.log(0.5))
    assert [i for i, _ in token.top] == [0, 1]
    assert Sampler(SamplingParams(temperature=0.0), top_logprobs=0)(LOGITS).top == []
    assert Sampler(SamplingParams(temperature=0.0))(LOGITS).logprob is None
