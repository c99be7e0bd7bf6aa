"""Two decode nodes behind the router: requests one by one and all at once, every answer checked token by token."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nixl", reason="the transport under test is NIXL")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fault_injector import load

SEQUENTIAL, CONCURRENT = (1000, 32) if os.environ.get("TILERT_REF_SOAK") == "1" else (40, 8)


def test_every_answer_of_two_nodes_is_right(say: Callable[[str], None]) -> None:
    figures = load(SEQUENTIAL, CONCURRENT)
    say(f"{SEQUENTIAL} + {CONCURRENT} requests: {figures['sequential_s']} s + {figures['concurrent_s']} s")
    assert not figures["wrong"] and min(figures["per_node"]) > 0
