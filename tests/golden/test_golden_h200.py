"""Our engine against golden files that vLLM wrote on an H200 (scripts/record_golden.py), on the device that is here.

Every run takes one prompt of each file, the first whose whole KV it holds; TILERT_REF_GOLDEN=full takes all, which is
an hour on two cores. On a CUDA machine all are taken.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilert_ref.engine.make_fp8 import make_fp8
from tilert_ref.golden.recording import Golden, digests, read_golden
from tilert_ref.golden.verify import Report, engine_for, verify
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.golden import EDGE_PROMPTS

MODELS = "tiny-dsv32", "tiny-glm5"
FILES = sorted(Path(__file__).with_name("h200").glob("*.golden"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda" or os.environ.get("TILERT_REF_GOLDEN") == "full"
MOST_BYTES = 8_000_000  # of all files
KINDS = [
    (m, w, kv, mtp) for m in MODELS for w in ("bf16", "fp8") for kv in ("bf16", "fp8_ds_mla") for mtp in (False, True)
]

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
def report(golden: Golden, checkpoints: Callable[[Golden], Path]) -> Report:
    return verify(engine_for(golden, checkpoints(golden), DEVICE), golden, chosen(golden))


def chosen(golden: Golden) -> list[int]:
    """Numbers of the prompts to compare."""
    if FULL:
        return list(range(len(golden.prompts)))
    return whole_ones(golden)[:1]


def whole_ones(golden: Golden) -> list[int]:
    return [number for number, answer in enumerate(golden.answers) if "rows" in answer]


def test_all_kinds_are_there_and_small() -> None:
    kinds = [(g.model, g.weights, g.kv, g.mtp) for g in map(read_golden, FILES)]
    assert sorted(kinds) == sorted(KINDS)
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


def test_what_was_recorded(golden: Golden) -> None:
    """Our connector handed over every prompt, edges among them; what was kept whole is what was recorded."""
    lengths = [len(prompt) for prompt in golden.prompts]
    assert set(EDGE_PROMPTS) <= set(lengths)
    assert golden.facts["handed_over"] == len(lengths)
    assert golden.noise
    assert whole_ones(golden)
    for number in whole_ones(golden):
        answer = golden.answers[number]
        found = digests(answer, lengths[number])
        for what in ("prompt rows", "prompt index"):
            assert found[what] == answer["digests"][what]


def test_tokens(golden: Golden, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{golden.name}, vLLM {golden.facts['vllm']} on {golden.facts['device']}, here on {DEVICE}")
        print(*(f"  {line}" for line in report.lines()), sep="\n")
    assert sum(report.tokens.values()) == len(chosen(golden)) * len(golden.answers[0]["ids"])
    assert report.tokens["diverged"] == 0


def test_planes_come_back_from_the_cache(report: Report) -> None:
    assert report.carried.equal == report.carried.total > 0


def test_rows_of_the_first_layer(report: Report) -> None:
    """They depend on token ids only. Seen: one rotary byte in 2,048 that another order of a bf16 sum moves."""
    first = [share for name, share in report.decoded.items() if name.startswith("layer 0 ")]
    assert len(first) >= 4
    assert all(share.equal >= 0.999 * share.total > 0 for share in first)
