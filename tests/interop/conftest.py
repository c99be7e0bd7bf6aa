"""The published package as a fixture, and the log that a run of this suite writes."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import VERSION, Part, Reference, find_python

LOG_VARIABLE = "TILERT_REF_INTEROP_LOG"
DEVICE_VARIABLE = "TILERT_REF_INTEROP_DEVICE"
_LOG: dict[str, Any] = {"cases": []}
if os.environ.get(DEVICE_VARIABLE) != "cuda":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")  # before NIXL is loaded: its UCX would listen on every interface


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    python, reason = find_python()
    if not python:
        pytest.skip(reason)
    running = Reference(python, tmp_path_factory.mktemp("interop") / "reference.log")
    yield running
    running.close()


@pytest.fixture(scope="session")
def device() -> str:
    """Where both ends' buffers are: "cpu", or "cuda" if the variable says so."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Callable[..., None]:
    """log(name=value, ...) adds a row to the run's log."""

    def add(part: Part | None = None, **values: Any) -> None:
        if part is not None:
            _LOG["reference"] = part.facts.get("tilert"), part.facts.get("python"), part.facts.get("torch")
        _LOG["cases"].append({"test": request.node.nodeid.split("interop/")[-1]} | values)

    return add


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get(LOG_VARIABLE)
    if path and _LOG["cases"]:
        worker = os.environ.get("PYTEST_XDIST_WORKER")  # each has its own part of the cases
        Path(f"{path}.{worker}" if worker else path).write_text(json.dumps(_summary(), indent=1) + "\n")


def _summary() -> dict[str, Any]:
    cases = _LOG["cases"]
    return {
        "what": f"this project against the published tilert {VERSION}; one row per comparison that held",
        "reference": _LOG.get("reference"),
        "here": [platform.python_version(), torch.__version__, platform.machine(), _gpu()],
        "date": time.strftime("%Y-%m-%d"),
        "comparisons": len(cases),
        "bytes_compared": sum(case.get("bytes_compared", 0) for case in cases),
        "cases": cases,
    }


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
