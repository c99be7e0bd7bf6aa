"""`tilert-ref scorecard`: the cheap part passes on a committed model and fails on a damaged one; counts are right."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilert_ref.cli import main as tilert_ref
from tilert_ref.router.parser import Call, Content, Reasoning, Rejected
from tilert_ref.tiny import model_dir, scorecard, skills
from tilert_ref.tiny.margins import EDGES, Margin, WatchingSampler, bars, bf16_ulp, histogram
from tilert_ref.tiny.scorecard import BOUNDS, DISTANCES, QUICK, Plan, bucket, bucket_name, codes_over, complaints, fits
from tilert_ref.tiny.scoring import Drafted, Run, Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load(model_dir("tiny-glm5-dense"), "cpu", lambda line: None)


# The command


def cut(monkeypatch: pytest.MonkeyPatch, **less: int) -> Plan:
    """The quick part, which takes a minute, with one of each and fewer tokens."""
    plan = replace(QUICK, **{"questions": 1, "tasks": 1, "calls": 1, "refusals": 1} | less)
    monkeypatch.setattr(scorecard, "QUICK", plan)
    return plan


def test_quick_part_passes_on_the_committed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every score, recall over the whole context, golden prompts of every kind."""
    out, plan = tmp_path / "card.json", cut(monkeypatch, tokens=12)
    assert tilert_ref(["scorecard", "tiny-glm5-dense", "--quick", "--json", str(out)]) == 0
    *_, part, last = capsys.readouterr().out.splitlines()
    assert last == "scorecard: pass"
    assert part == f"part: quick (only {QUICK.only})"
    card = json.loads(out.read_text())
    assert list(card["recall"]["buckets"]) == [bucket_name(i) for i in range(len(DISTANCES))]
    assert card["margins"]["positions"] == plan.golden * plan.tokens == sum(card["margins"]["histogram"].values())
    assert {bound.score for bound in BOUNDS} <= set(card["scores"])


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick part, cut down to one of each and to a quarter of the context."""
    cut(monkeypatch, golden=1, tokens=32)
    monkeypatch.setattr(scorecard, "RECALL_ROOM", 3456)


@pytest.mark.usefixtures("little")
def test_damaged_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One tensor's rows in another order: the value projection of one layer, as a layout mistake would leave it."""
    shutil.copytree(model_dir("tiny-glm5-dense"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.self_attn.kv_b_proj.weight"
    weights[key] = weights[key][torch.randperm(len(weights[key]), generator=torch.Generator().manual_seed(0))]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert tilert_ref(["scorecard", str(tmp_path), "--quick"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("scorecard: fail (recall 0 < 0.99; ")


@pytest.mark.usefixtures("little")
def test_the_other_dialect_is_scored_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert tilert_ref(["scorecard", "tiny-dsv32-dense", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "scorecard: pass"


def test_what_can_not_be_scored(tmp_path: Path, tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tilert_ref(["scorecard", str(tmp_path)]) == 2
    assert "tokenizer.json doesn't exist: text is made with" in capsys.readouterr().err
    assert tilert_ref(["scorecard", str(tiny("dsv3"))]) == 2
    assert "has the tokens of none of these answer formats: glm47, dsv32" in capsys.readouterr().err


# Bounds


def test_each_bound_can_fail_alone() -> None:
    good = {bound.score: bound.limit for bound in BOUNDS}
    assert complaints(good) == []
    for bound in BOUNDS:
        off = bound.limit + (0.0001 if bound.at_most else -0.0001)
        (said,) = complaints(good | {bound.score: off})
        assert said.startswith(f"{bound.score} ") and said.endswith(f"{bound.limit:g}")


def test_issues_bounds() -> None:
    limits = {bound.score: (bound.limit, bound.at_most) for bound in BOUNDS}
    assert limits["recall"] == (0.99, False) and limits["first draft"] == (0.8, False)
    assert limits["near ties"] == (0.001, True)


def test_last_line() -> None:
    assert scorecard.verdict({"complaints": []}) == "scorecard: pass"
    said = complaints({bound.score: bound.limit for bound in BOUNDS} | {"recall": 0.97, "near ties": 0.002})
    assert scorecard.verdict({"complaints": said}) == "scorecard: fail (recall 0.97 < 0.99; near ties 0.002 > 0.001)"


# Recall


def test_buckets() -> None:
    assert [bucket(d) for d in (0, 255, 256, 1023, 1024, 4095, 4096, 10**6)] == [0, 0, 1, 1, 2, 4, 5, 5]
    assert (bucket_name(0), bucket_name(5)) == ("0-255", "4096-on")
    with pytest.raises(ValueError, match="a distance of -1 tokens"):
        bucket(-1)


@pytest.mark.parametrize("filler", [0, 8])
def test_codes_fill_the_context_and_are_where_they_are_said_to_be(subject: Subject, filler: int) -> None:
    codes = codes_over(subject, "test", 4500, filler)
    assert 4500 - 40 <= len(codes.ids) <= 4500
    assert set(codes.starts) == set(codes.memory.codes)
    for key, start in codes.starts.items():
        entry = subject.text(codes.ids[start : start + 16])
        assert key[1:] in entry and entry.lstrip("; .\n").startswith(key), (key, entry)
    seen = [0] * len(DISTANCES)
    for where, question in scorecard.questions(subject, codes, random.Random(0), 3):
        seen[where] += 1
        assert question.prompt[: len(codes.ids)] == codes.ids
        assert len(question.prompt) + len(question.answer) + 2 < subject.engine.max_seq_len
    assert seen == [3] * len(DISTANCES)


def test_going_on_from_a_prefilled_prompt_changes_nothing(subject: Subject) -> None:
    """The same answer, and nearly the same margins, as with the whole prompt run at once and drafts."""
    codes = codes_over(subject, "test", 700, 0)
    _, question = next(scorecard.questions(subject, codes, random.Random(0), 1))
    whole = subject.run("recall", question.prompt, 8)
    subject.prefill(codes.ids)
    after = subject.run_after(len(codes.ids), question.prompt, 8)
    assert after.ids == whole.ids and after.reason == whole.reason
    for a, b in zip(after.margins, whole.margins, strict=True):
        assert abs(a.best - b.best) < 1


# Right and wrong


def test_an_answer_is_right_only_whole() -> None:
    assert Run([1, 2], "stop", []).is_exactly([1, 2])
    assert not Run([1, 2], "length", []).is_exactly([1, 2])
    assert not Run([1], "stop", []).is_exactly([1, 2])
    assert not Run([1, 3], "stop", []).is_exactly([1, 2])


def test_what_fits_a_tool_request() -> None:
    wanted = skills.Task("tool", "?", "", "done", skills.Call("convert", {"amount": 12}, "ok"))
    right = Call("convert", '{"amount": 12}')
    assert fits(wanted, [Reasoning("I call it"), right])
    assert not fits(wanted, [])
    assert not fits(wanted, [right, right])
    assert not fits(wanted, [Rejected("convert")])
    assert not fits(wanted, [Call("other", right.arguments)])
    assert not fits(wanted, [Call("convert", '{"amount": "12"}')])
    assert not fits(wanted, [Call("convert", '{"amount": 1')])
    refused = skills.Task("tool", "?", "", skills.NO_TOOL)
    assert fits(refused, [Reasoning("hm"), Content("I have no tool "), Content("for that.")])
    assert not fits(refused, [Content(skills.NO_TOOL), right])
    assert not fits(refused, [Content("No.")])
    assert not fits(refused, [Content(skills.NO_TOOL), Rejected("x")])


def test_tool_tasks_are_of_the_kind_asked_for() -> None:
    calls = list(scorecard.tool_tasks("test", 30, refusal=False))
    assert len(calls) == 30 and all(task.call is not None for task in calls)
    assert any(task.call.name not in skills.KNOWN_TOOLS for task in calls), "new tools are among them"
    refusals = list(scorecard.tool_tasks("test", 5, refusal=True))
    assert len(refusals) == 5 and all(task.call is None for task in refusals)


def test_long_sums_have_three_digits() -> None:
    for number in range(20):
        task = scorecard.long_sum(random.Random(number), number)
        assert all(len(term) == 3 for term in task.user.strip("?.").split(" ")[-1].split("+"))


# Drafts


def test_drafts_that_held() -> None:
    """Three windows of three drafts: all hold, the second fails, a stop token comes second."""
    tally = Drafted()
    tally.add([5, 6, 7, 8], frozenset({9}))
    tally.add([5, 6], frozenset({9}))
    tally.add([5, 9, 1], frozenset({9}))
    assert tally.asked == [3, 3, 2] and tally.held == [3, 2, 1]
    assert tally.rates == [1.0, 2 / 3, 1 / 2] and tally.mean_length == pytest.approx(1 + 1 + 2 / 3 + 1 / 2)
    other = Drafted()
    other.merge(tally)
    other.merge(tally)
    assert other.asked == [6, 6, 4] and other.rates == tally.rates


def test_no_draft_no_rate() -> None:
    assert Drafted().rates == [0.0, 0.0, 0.0]


# Margins


def test_bf16_ulp() -> None:
    assert bf16_ulp(1.0) == 2**-7
    assert bf16_ulp(-35.0) == 0.25
    assert bf16_ulp(31.9) == 0.125
    for x in (1.0, 3.25, 33.0, 1e-3, -7.5, 255.0, 2.0**-130, 0.0):
        bits = torch.tensor(abs(x), dtype=torch.bfloat16).view(torch.int16)
        here, following = (b.view(torch.bfloat16).double().item() for b in (bits, bits + 1))
        assert bf16_ulp(x) == following - here


def test_near_tie_is_below_two_ulp() -> None:
    assert Margin(35.0, 34.75).ulps == 1.0 and Margin(35.0, 34.75).near_tie
    assert not Margin(35.0, 34.5).near_tie
    assert Margin(35.0, 35.0).near_tie


def test_histogram_counts_each_gap_once() -> None:
    gaps = (0.0, 0.99, 1.0, 2.0, 255.9, 256.0, 4000.0)
    counts = histogram(Margin(1.0, 1.0 - gap * 2**-7) for gap in gaps)
    assert dict(zip(EDGES, counts, strict=True)) == dict.fromkeys(EDGES, 0) | {0: 2, 1: 1, 2: 1, 128: 1, 256: 2}


def test_bars_show_what_is_rare() -> None:
    drawn = bars([1, 0, 99_999, *[0] * 7], width=10)
    assert [line.count("#") for line in drawn] == [1, 0, 10, *[0] * 7]
    assert drawn[2].split() == ["2", "to", "4", "ulp", "99999", "#" * 10]
    assert all(line == line.rstrip() for line in drawn)


def test_sampler_keeps_the_margins_of_what_it_gives() -> None:
    sampler = WatchingSampler()
    assert [sampler(torch.tensor(row)).id for row in ([1.0, 3.0, 2.5], [4.0, -1.0, 4.0])] == [1, 0]
    assert sampler.margins == [Margin(3.0, 2.5), Margin(4.0, 4.0)]


def test_full_plan_asks_enough() -> None:
    """At least 100 questions for recall, and every golden prompt to its end."""
    plan: Plan = scorecard.FULL
    assert plan.conversations * plan.questions * len(DISTANCES) >= 100
    assert (plan.golden, plan.tokens, plan.only) == (64, 256, "")
