"""The plugin in vLLM on a GPU. What it proved on the H200 is kept in docs/measurements/gpu-handoff.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEPT = ROOT / "docs" / "measurements" / "gpu-handoff.json"
SCENARIOS = (
    "glm5 fp8_ds_mla, chunked, device buffers",
    "dsv32 fp8_ds_mla, whole prompts",
    "dense bf16, chunked, host buffers",
    "dense bf16, chunked, device buffers",
    "glm5 bf16, chunked, zmq",
    "dense bf16, compiled with CUDA graphs",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; the last run is kept in " + KEPT.name)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_handoff_equals_vllms_caches(scenario: str, tmp_path: Path) -> None:
    out = Path(os.environ.get("TILERT_GPU_OUT", tmp_path)) / f"{SCENARIOS.index(scenario)}.json"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "handoff_cuda.py"), scenario, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    facts = json.loads(out.read_text())
    assert all(request["bytes_equal"] > 0 for request in facts["requests"])
    if "chunked" in scenario:
        assert max(request["steps"] for request in facts["requests"]) >= 1500 // 256
        assert any(request["prefix_hit"] >= 896 for request in facts["requests"])
