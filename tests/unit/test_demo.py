"""The demo's verdicts: identical, tie, diverged, and going on from vLLM's tokens after a difference."""

from pathlib import Path

import pytest

from tilert_ref import demo
from tilert_ref.demo import END, Answer, Comparison, Reference, compare, main
from tilert_ref.stack import StackError
from tilert_ref.tiny import model_dir
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
    with pytest.raises(StackError, match="the stack gave 1 tokens from position 0, vLLM 2"):
        compare([1], Reference([1, 2], [TOP, TOP]), lambda n: [])


def answer(ids: list[int], finish_reason: str) -> Answer:
    return Answer([1], ids, "", "", [], finish_reason, 1.0, 2.0, {})


def test_where_an_answer_ends_is_compared_too() -> None:
    """Ending too late and ending too early are divergences; after the second the comparison goes on."""
    late, early = answer([7, 8, 8], "length"), answer([7], "stop")
    assert compare(late.choices, Reference([7, END], [TOP, TOP]), lambda n: []).count("diverged") == 1
    reference = Reference([7, 7, END], [TOP, TOP, TOP])
    result = compare(early.choices, reference, {2: [END]}.__getitem__)
    assert [(d.position, d.ours, d.verdict) for d in result.differences] == [(1, END, "diverged")]
    assert compare(answer([7, 7], "tool_calls").choices, reference, lambda n: []).differences == []


def test_several_answers_are_counted_together() -> None:
    good = compare([7, 7], Reference([7, 7], [TOP, TOP]), lambda n: [])
    bad = compare([9], Reference([7], [TOP]), lambda n: [])
    assert Comparison.joined([good, bad]).line == "tokens: 2 identical, 0 tie, 1 diverged against vLLM's own decode"


def test_a_model_is_either_trained_or_random(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--arch", "dsv3", "--model", "somewhere"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_mtp_without_an_mtp_layer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--arch", "dsv2", "--num-mtp", "1"])
    assert "dsv2 has no MTP layer" in capsys.readouterr().err


def test_a_sparse_model_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(model_dir("tiny-dsv32"))]) == 2
    assert "attends sparsely (index_topk)" in capsys.readouterr().err


def test_no_tokenizer_is_a_failure_and_no_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["--model", str(tmp_path)]) == 2
    assert "demo failed: " in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "said"), [([], True), (["--logs", "logs"], False)])
def test_where_logs_would_be_kept_is_said_when_they_are_lost(
    flags: list[str], said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise StackError("vLLM ended")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run", fails)
    assert main(flags) == 2
    assert ("--logs DIR keeps them" in capsys.readouterr().err) == said
