"""What the step log says: which prompts shared a batch, and whether a connector was told of a foreign request."""

import json
from pathlib import Path
from typing import Any

import pytest

from tilert_ref.demo import main
from tilert_ref.native_pool import Step, read_steps, strays

OURS, THEIRS = "TileRTConnector", "NixlPullConnector"


def entry(pool: str | None, tokens: int, computed: int = 0, prompt: int = 100) -> dict[str, Any]:
    return {"tokens": tokens, "computed": computed, "prompt": prompt, "pool": pool}


def step(requests: dict[str, Any], ours: list[str], theirs: list[str], held: dict[str, str] | None = None) -> Step:
    return Step(1, requests, {OURS: ours, THEIRS: theirs}, held or {})


def test_prompt_tokens_of_a_batch() -> None:
    """A decoding request computes none, and drafts after the end of a prompt are none either."""
    batch = step({"a": entry("tilert", 60), "b": entry("native", 3, 99), "c": entry("native", 1, 100)}, ["a"], ["b"])
    assert batch.prefilled("tilert") == {"a": 60}
    assert batch.prefilled("native") == {"b": 1}
    assert batch.prefilled(None) == {}


@pytest.mark.parametrize(
    ("requests", "both"),
    [
        ({"a": entry("tilert", 60), "b": entry("native", 100)}, True),
        ({"a": entry("tilert", 60), "b": entry("native", 1, 100)}, False),  # one prompt and an answer's token
        ({"a": entry("tilert", 60), "b": entry(None, 100)}, False),
        ({"b": entry("native", 100)}, False),
    ],
)
def test_a_batch_feeds_both_only_with_prompt_tokens_for_both(requests: dict[str, Any], both: bool) -> None:
    assert step(requests, [], []).feeds_both == both


def test_strays() -> None:
    both = {"a": entry("tilert", 60), "b": entry("native", 100), "c": entry(None, 5)}
    assert strays([step(both, ["a"], ["b"])]) == []
    assert strays([step(both, ["a", "b"], ["b"])]) == [f"{OURS} was told of b, marked native"]
    assert strays([step(both, ["a"], ["b", "c"])]) == [f"{THEIRS} was told of c, marked None"]
    assert strays([step(both, [], ["b"])]) == [f"{OURS} was not told of a"]


def test_a_request_is_told_in_another_step_than_it_is_computed_in() -> None:
    """Ours in the step that ends the prompt, vLLM's once more when the request has ended."""
    chunks = [step({"a": entry("tilert", 60)}, [], []), step({"a": entry("tilert", 40, 60)}, ["a"], [])]
    assert strays([*chunks, step({"b": entry("native", 100)}, [], ["b"]), step({}, [], ["b"])]) == []


def test_a_held_request_whose_client_left_may_be_told_of() -> None:
    assert strays([step({}, [], [], {"b": "native"}), step({}, [], ["b"])]) == []
    assert strays([step({}, [], [], {"b": "native"}), step({}, ["b"], [])]) == [f"{OURS} was told of b, marked native"]


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    assert read_steps(log) == []
    line = json.dumps({"step": 7, "requests": {}, "told": {OURS: [], THEIRS: []}, "held": {"a": "tilert"}})
    log.write_text(line + "\n" + line[:30])
    assert [(found.step, found.held) for found in read_steps(log)] == [(7, {"a": "tilert"})]


def test_drafting_beside_a_native_pool_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--with-native-pool", "--num-mtp", "1"])
    assert "--num-mtp 1 with --with-native-pool: legal is 0" in capsys.readouterr().err
