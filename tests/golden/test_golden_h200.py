"""Our engine against golden files that vLLM wrote on an H200 (scripts/record_golden.py), on the device that is here.

Every run takes the prompts whose whole KV the files hold, and the shortest others; TILERT_REF_GOLDEN=full takes all,
which is an hour on two cores. On a CUDA machine all are taken.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tilert_ref.engine.make_fp8 import make_fp8
from tilert_ref.golden.recording import Golden, checkpoint_digest, read_golden
from tilert_ref.golden.verify import Report, engine_for, verify
from tilert_ref.tiny import model_dir

FILES = sorted(Path(__file__).with_name("h200").glob("*.golden"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda" or os.environ.get("TILERT_REF_GOLDEN") == "full"
MOST_BYTES = 8_000_000

pytestmark = [pytest.mark.golden, pytest.mark.timeout(3600)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Golden], Path]:
    """The checkpoint that a file was recorded with; block-fp8 ones are made from the committed model."""
    made = dict[str, Path]()

    def find(golden: Golden) -> Path:
        if golden.weights == "bf16":
            return model_dir(golden.model)
        if golden.model not in made:
            made[golden.model] = tmp_path_factory.mktemp(golden.model) / "fp8"
            make_fp8(model_dir(golden.model), made[golden.model])
        return made[golden.model]

    return find


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.param)


@pytest.fixture(scope="module")
def report(golden: Golden, checkpoints: Callable[[Golden], Path]) -> Iterator[Report]:
    directory = checkpoints(golden)
    assert checkpoint_digest(directory) == golden.checkpoint, "not the checkpoint that was recorded"
    yield verify(engine_for(golden, directory, DEVICE), golden, chosen(golden))


def chosen(golden: Golden) -> list[int]:
    """Numbers of the prompts to compare."""
    if FULL:
        return list(range(len(golden.prompts)))
    return [number for number, answer in enumerate(golden.answers) if "rows" in answer][:1]


def test_tokens(golden: Golden, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{golden.name}, vLLM {golden.facts['vllm']} on {golden.facts['device']}, here on {DEVICE}")
        print(*(f"  {line}" for line in report.lines()), sep="\n")
    assert sum(report.tokens.values()) == len(chosen(golden)) * len(golden.answers[0]["ids"])
    assert report.tokens["diverged"] == 0
