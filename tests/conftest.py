"""Shared fixtures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilert_ref.engine.make_tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """tiny(arch, **config overrides) -> directory of a tiny checkpoint, made once a session."""
    made = dict[str, Path]()

    def build(arch: str, **overrides: Any) -> Path:
        key = json.dumps([arch, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(arch)
            make_tiny(made[key], arch, overrides=overrides)
        return made[key]

    return build


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line past pytest's capture."""

    def line(text: str) -> None:
        with capsys.disabled():
            print("\n" + text, end="")

    return line
