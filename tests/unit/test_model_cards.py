"""The committed models' papers: cards and plots are what the script makes of the measurements, digests hold."""

import hashlib
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tilert_ref.tiny import MODELS, NAMES
from tilert_ref.tiny.scorecard import FULL, complaints, scores_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("write_model_cards")


def test_pages_are_what_the_script_writes(cards: ModuleType) -> None:
    for path, text in cards.pages().items():
        assert path.read_text("utf-8") == text, f"{path.name} is old: run scripts/write_model_cards.py"


@pytest.mark.parametrize("name", ["tiny-glm5", "tiny-dsv32"])
def test_committed_scorecard_is_a_full_one_that_passes(name: str) -> None:
    card = json.loads((MODELS / name / "scorecard.json").read_text("utf-8"))
    assert card["part"] == FULL.name
    assert card["scores"] == scores_of(card)
    assert card["complaints"] == complaints(card["scores"]) == []


def test_plot_is_small_and_draws_every_measured_loss(cards: ModuleType) -> None:
    for name in cards.FAMILIES:
        path = MODELS / name / "training.svg"
        assert path.stat().st_size < 60_000
        losses = json.loads((MODELS / name / "training_log.json").read_text())["losses"]
        points = sum(row[curve] > 0 for row in losses for curve in ("main", "mtp", "kl"))
        drawn = re.findall(r'<polyline points="([^"]*)"', path.read_text())
        assert sum(len(line.split()) for line in drawn) == points


def test_plot_puts_steps_and_losses_where_they_belong(cards: ModuleType) -> None:
    plot = cards.plot_training
    frame = plot.Frame(1000, [0.01, 10.0])
    assert (frame.x(0), frame.x(1000)) == (plot.LEFT, plot.WIDTH - plot.RIGHT)
    assert (frame.y(0.01), frame.y(10.0)) == (plot.HEIGHT - plot.BOTTOM, plot.TOP)
    assert frame.y(0.1) - frame.y(1.0) == pytest.approx(frame.y(0.01) - frame.y(0.1))


def listed() -> dict[str, str]:
    """path -> digest, as SHA256SUMS says."""
    lines = (MODELS / "SHA256SUMS").read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


def test_every_file_has_its_digest() -> None:
    files = {path for name in NAMES for path in (MODELS / name).rglob("*") if path.is_file() and not path.is_symlink()}
    assert set(listed()) == {str(path.relative_to(MODELS)) for path in files}
    for path, digest in listed().items():
        assert hashlib.sha256((MODELS / path).read_bytes()).hexdigest() == digest, f"{path} has changed"


def test_links_lead_to_listed_files() -> None:
    links = [path for name in NAMES for path in (MODELS / name).iterdir() if path.is_symlink()]
    assert links
    for link in links:
        assert str(link.resolve().relative_to(MODELS.resolve())) in listed()
