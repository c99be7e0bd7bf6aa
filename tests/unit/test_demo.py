"""The demo's verdicts: identical, tie, diverged, and going on from vLLM's tokens after a difference."""

import pytest

from tilert_ref.demo import Reference, compare, main
from tilert_ref.verdict import judge

TOP = [(7, -1.0), (8, -2.0)]
TIED = [(7, -1.5), (8, -1.5)]


def test_equal_tokens_are_identical() -> None:
    verdict = compare([7, 7], Reference([7, 7], [TOP, TIED]), lambda n: pytest.fail("nothing to anchor"))
    assert verdict.line == "tokens: 2 identical, 0 tie, 0 diverged against vLLM's own decode"


@pytest.mark.parametrize(
    ("ours", "top", "verdict"),
    [
        (8, TIED, "tie"),
        (9, TIED, "diverged"),  # a tie, but not between these
        (8, TOP, "diverged"),
        (8, [(7, -1.5), (8, -1.5000001)], "diverged"),  # equal means to the last bit
        (8, [(7, -1.5)], "diverged"),
    ],
)
def test_verdict_on_a_difference(ours: int, top: list[tuple[int, float]], verdict: str) -> None:
    assert judge(ours, 7, top) == verdict


def test_goes_on_from_vllms_tokens() -> None:
    reference = Reference([1, 2, 3, 4, 5], [TOP, TIED, TOP, TOP, TOP])
    again = {2: [3, 9, 9], 4: [5]}
    asked: list[int] = []

    def stack(n: int) -> list[int]:
        asked.append(n)
        return again[n]

    verdict = compare([1, 8, 0, 0, 0], Reference(reference.ids, [TOP, [(2, -1.0), (8, -1.0)], TOP, TOP, TOP]), stack)
    assert asked == [2, 4] and verdict.anchors == 2
    assert [(d.position, d.verdict) for d in verdict.differences] == [(1, "tie"), (3, "diverged")]
    assert verdict.line == "tokens: 3 identical, 1 tie, 1 diverged against vLLM's own decode"


def test_difference_at_the_end_needs_no_anchor() -> None:
    verdict = compare([1, 9], Reference([1, 2], [TOP, TOP]), lambda n: pytest.fail("nothing left to compare"))
    assert verdict.count("diverged") == 1


def test_missing_tokens_are_an_error_not_a_verdict() -> None:
    with pytest.raises(ValueError, match="the stack gave 1 tokens from position 0, vLLM 2"):
        compare([1], Reference([1, 2], [TOP, TOP]), lambda n: [])


def test_mtp_without_an_mtp_layer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--arch", "dsv2", "--num-mtp", "1"])
    assert "dsv2 has no MTP layer" in capsys.readouterr().err
