"""scripts/record_golden.py where nothing can be recorded: it says what is missing, and that something failed."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_golden.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_golden", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["record_golden.py", *arguments])
    return script.main()


def test_names_and_beginnings_of_names(script: ModuleType) -> None:
    glm = "tiny-glm5.fp8-weights.bf16-kv"
    assert script.named([glm]) == {glm}, "a whole name is not a beginning of its .mtp"
    assert script.named([glm + ".", "tiny-dsv32.bf16-weights.bf16"]) == {
        glm + ".mtp",
        "tiny-dsv32.bf16-weights.bf16-kv",
        "tiny-dsv32.bf16-weights.bf16-kv.mtp",
    }
    with pytest.raises(ValueError, match=r"begins with 'glm'; legal: tiny-glm5\.fp8-weights\.fp8_ds_mla-kv, "):
        script.named(["tiny-glm5", "glm"])


def test_a_machine_that_cannot_record(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        run(script, monkeypatch, str(tmp_path / "out"))
    assert stopped.value.code == 2
    assert "a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_to_verify(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "tiny-glm5.bf16-weights.bf16-kv"
    assert run(script, monkeypatch, str(tmp_path), "--verify-only", "--only", name) == 1
    assert f"{name}: no recording {tmp_path / 'raw' / name}.whole.pt" in capsys.readouterr().out


def test_children_that_fail_or_never_end(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = script.Lab(tmp_path / "out", tmp_path / "raw", lanes=1, verify=False)
    assert lab.run("good", ["-c", "import tilert_ref; print('made')"])
    assert (tmp_path / "out" / "good.log").read_text() == "made\n"
    assert not lab.run("bad", ["-c", "raise SystemExit(3)"])
    monkeypatch.setattr(script, "MOST_SECONDS", 0.5)
    assert not lab.run("endless", ["-c", "import time; time.sleep(60)"])
    assert lab.lanes.qsize() == max(1, torch.cuda.device_count())
    said = capsys.readouterr().out
    assert "good: done in" in said
    assert "bad: FAILED, see its log" in said
    assert "endless: FAILED, see its log" in said


def test_prompts_dealt_out_come_back_in_order(script: ModuleType) -> None:
    prompts = [[7] * length for length in (5, 300, 1, 42, 41, 5)]
    plan = {"tokens": 2, "traced": 5, "parts": {"main": {"prompts": prompts, "rounds": ["alone"]}}}
    hands = script.deal(plan, 2)
    plans = [script.hand_of(plan, numbers, traces=numbers is hands[0]) for numbers in hands]
    assert [[len(p) for p in hand["parts"]["main"]["prompts"]] for hand in plans] == [[300, 41, 5], [42, 5, 1]]
    assert [hand.get("traced") for hand in plans] == [5, None]
    outs = [{"parts": {"main": {"alone": numbers}}, "facts": {"hand": n}} for n, numbers in enumerate(hands)]
    whole = script.gathered(plan, hands, outs)
    assert whole == {"parts": {"main": {"alone": [0, 1, 2, 3, 4, 5]}}, "facts": {"hand": 0, "processes": 2}}


def test_more_hands_than_prompts_and_plans_that_stay_whole(script: ModuleType) -> None:
    alone = {"parts": {"main": {"prompts": [[1]], "rounds": ["alone"]}}}
    assert script.deal(alone, 8) == [[0]]
    assert script.deal(alone, 1) == []
    assert script.deal({"parts": {"main": {"prompts": [[1], [2]], "rounds": ["alone", "batch"]}}}, 8) == []


def test_hands_without_no_floor_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, str(tmp_path / "out"), "--hands", "2", "--verify-only")
    assert "--hands 2; legal: 1, and with --no-floor more" in capsys.readouterr().err
