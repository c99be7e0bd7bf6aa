"""The GPU kernels' logic where there is no GPU: Triton's interpreter runs them.

Its bf16 is cut instead of rounded, so only kernels of whole numbers, of fp8 and of fp32 are held against torch here;
tests/gpu has all, bit for bit.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with vLLM here")
def test_kernels_in_the_interpreter() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_kernels.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
