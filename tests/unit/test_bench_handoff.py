"""`tilert-ref bench handoff`: its arithmetic, and a small real run."""

import json
import random
from pathlib import Path

import pytest

from tilert_ref import bench, bench_extract
from tilert_ref.bench_handoff import STAGES, Marks, spread, summary

MS = 1e-3


def marks(*milliseconds: float) -> Marks:
    return Marks(*(MS * at for at in milliseconds))


def test_stages_add_up_to_the_handoff() -> None:
    entry = marks(0, 10, 11, 13, 16, 20, 25, 31, 38)
    assert entry.handoff == pytest.approx(28 * MS)
    assert list(entry.stages()) == list(STAGES)
    assert list(entry.stages().values()) == pytest.approx([MS * n for n in (1, 2, 3, 4, 5, 6, 7)])


def test_ratio_is_of_medians_and_minima_stand_beside_it() -> None:
    taken = [marks(0, 1, 2, 3, 4, 5, 6, 7, 1 + total) for total in (30, 12, 20)]
    result = summary(taken, [10 * MS, 4 * MS, 30 * MS], [15 * MS] * 3, nbytes=20_000_000, ranges=12)
    assert (result["ratio"], result["ratio_of_minima"]) == pytest.approx((2.0, 3.0))
    assert result["process_vm_writev_ratio"] == pytest.approx(1.5)
    assert (result["handoff_gb_per_s"], result["memcpy_gb_per_s"]) == pytest.approx((1.0, 2.0))
    assert result["connect_and_hello_ms"]["median"] == pytest.approx(1.0)


def test_spread_is_in_milliseconds() -> None:
    assert spread([0.005, 0.001, 0.003]) == {"min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "max": 5.0}


def test_added_time_is_of_pairs() -> None:
    unmarked = [bench_extract.Round(*seconds) for seconds in ((1.0, 1.0), (2.0, 1.0), (4.0, 1.0))]
    marked = [bench_extract.Round(*seconds) for seconds in ((1.1, 1.02, 0.01), (2.1, 1.02, 0.02), (4.0, 1.02, 0.03))]
    result = bench_extract.summary(unmarked, marked)
    wall, processor = result["added_percent"], result["added_processor_percent"]
    assert (wall["q1"], wall["median"], wall["q3"]) == pytest.approx((2.5, 5.0, 7.5))
    assert (processor["median"], processor["interval"]) == (pytest.approx(2.0), pytest.approx([2.0, 2.0]))
    assert (result["hook_ms"], result["hook_percent"]) == pytest.approx((20.0, 1.0))


def test_the_interval_holds_the_true_median_and_narrows_with_more_pairs() -> None:
    rng, widths = random.Random(3), []
    for count in (30, 480):
        pairs = [(base, base * (1.01 + rng.gauss(0, 0.04))) for base in (rng.uniform(0.5, 2) for _ in range(count))]
        low, high = bench_extract.added(pairs)["interval"]
        assert low < 1.0 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2 < 3


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that arrive wrong, a handoff that fails, or a stage that is not met in order raise or show."""
    arguments = ["--no-extraction", "--prompt-tokens", "130", "--repeats", "3", "--formats", "fp8_ds_mla"]
    assert bench.main(["handoff", *arguments, "--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ratio against memcpy: ")
    written = json.loads((tmp_path / "out.json").read_text())
    assert 0 <= written["machine"]["others_share_of_processors"] <= 1
    result = written["handoff"]["fp8_ds_mla"]
    assert result["bytes"] == 4 * (130 * 656 + 3 * 8448)
    assert all(stage["min"] >= 0 for stage in result["stages_ms"].values())
