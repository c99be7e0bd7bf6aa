"""Whether the vLLM that is here still is the one that the golden files are of. Needs an H200 with vLLM and NIXL.

Beyond index_topk vLLM's bytes differ from run to run (docs/numerics.md, "Its noise"), so digests are compared for
prompts up to there, tokens for all.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilert_ref.golden.recording import read_golden

ROOT = Path(__file__).parents[2]
NAMES = ("tiny-glm5.fp8-weights.fp8_ds_mla-kv", "tiny-dsv32.bf16-weights.bf16-kv")
INDEX_TOPK = 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the GPU that the golden files were recorded on")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("name", NAMES)
def test_recorded_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    kept = read_golden(ROOT / "tests" / "golden" / "h200" / f"{name}.golden")
    if torch.cuda.get_device_name() != kept.facts["device"]:
        pytest.skip(f"recorded on {kept.facts['device']}, here is {torch.cuda.get_device_name()}")
    command = [sys.executable, str(ROOT / "scripts" / "record_golden.py"), str(tmp_path), "--only", name]
    command += ["--prompts", "4", "--no-floor", "--record-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    again = read_golden(tmp_path / f"{name}.golden")
    assert again.checkpoint == kept.checkpoint
    short = 0
    for prompt, answer in zip(again.prompts, again.answers, strict=True):
        before = kept.answers[kept.prompts.index(prompt)]
        assert answer["ids"] == before["ids"]
        if len(prompt) <= INDEX_TOPK:
            short += 1
            assert answer["digests"]["prompt rows"] == before["digests"]["prompt rows"]
            assert answer["digests"]["prompt index"] == before["digests"]["prompt index"]
    assert short > 0
