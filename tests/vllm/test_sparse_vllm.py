"""Sparse models behind a real vLLM: its CPU build with sparse_plugin, our connector, our engine on what it hands over.

Both trained models on golden prompts, a process of vLLM for each scenario, two at a time. Plain: one request at a time,
with a record of what the indexers chose. Drafting: MTP, prompts in chunks, a warm prefix cache, other block sizes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import CHILD, HERE, MTP, START_TIMEOUT_S, Node, Received, Run
from tokenizers import Tokenizer

from tilert_ref.connector.layout import BF16, PAGE_TOKENS, BufferLayout, model_profile
from tilert_ref.engine import indexer, model
from tilert_ref.engine.api import Finished, SamplingParams
from tilert_ref.engine.decode import step
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.stack import preload_openmp
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.chat import DEEPSEEK, GLM
from tilert_ref.tiny.golden import golden_prompts
from tilert_ref.verdict import Verdict, judge

pytestmark = pytest.mark.vllm

DIALECTS = {"tiny-glm5": GLM, "tiny-dsv32": DEEPSEEK}
FAMILIES = list(DIALECTS)
LAYERS, TOPK = 3, 256
MAX_SEQ_LEN = 1792
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PLAIN_PROMPTS = (0, 4, 6, 2, 1, 11)  # recite, add, sort, copy, recall, recall: 14, 234, 329, 376, 450, 1,506 tokens
PLAIN_TOKENS = 64
DRAFTED_PROMPTS = (2, 1)
DRAFTED_TOKENS = 48
DRAFTS = 2
CODE_BYTES = 128
# Waiting nodes cost nothing over zmq; over NIXL each keeps a thread busy, which the two vLLMs need.
ZMQ_CHILD = CHILD | {"kv_connector_extra_config": {"tilert_transport": "zmq"}}


@dataclass(frozen=True)
class Scenario:
    """batches: golden prompts by number. A batch has a decode node for each of its requests."""

    family: str
    drafting: bool
    batches: Sequence[Sequence[int]]
    tokens: int
    engine: dict[str, Any]


def scenarios() -> dict[tuple[str, bool], Scenario]:
    whole = {"enable_prefix_caching": False}
    chunks = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 256}
    repeated = [DRAFTED_PROMPTS, DRAFTED_PROMPTS[1:]]
    made = [Scenario(family, False, [[n] for n in PLAIN_PROMPTS], PLAIN_TOKENS, whole) for family in FAMILIES]
    for family, block in (("tiny-glm5", 16), ("tiny-dsv32", 128)):
        engine = chunks | {"speculative_config": MTP, "block_size": block}
        made.append(Scenario(family, True, repeated, DRAFTED_TOKENS, engine))
    return {(scenario.family, scenario.drafting): scenario for scenario in made}


@dataclass(frozen=True)
class Served:
    """What vLLM did (run_vllm_sparse.py) and what arrived, request by request."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]]
    received: list[Received]
    facts: dict[str, Any]


def prompts_of(family: str) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir(family) / "tokenizer.json"))
    return [golden.prompt for golden in golden_prompts(DIALECTS[family], tokenizer, max(PLAIN_PROMPTS) + 1)]


def serve(scenario: Scenario, scratch: Path) -> Served:
    drafting = scenario.drafting
    layout = BufferLayout(model_profile(LAYERS + drafting, drafting, True), BF16, MAX_SEQ_LEN)
    nodes = [Node(layout, "zmq") for _ in range(max(map(len, scenario.batches)))]
    golden = prompts_of(scenario.family)
    prompts = [[golden[number] for number in batch] for batch in scenario.batches]
    batches = [
        [{"prompt": prompt, "params": node.params} for prompt, node in zip(batch, nodes, strict=False)]
        for batch in prompts
    ]
    engine = {"model": str(model_dir(scenario.family)), "max_model_len": MAX_SEQ_LEN, "kv_transfer_config": ZMQ_CHILD}
    plan = {"engine": engine | scenario.engine, "tokens": scenario.tokens, "batches": batches}
    env = preload_openmp() | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    try:
        with Run(scratch, "run_vllm_sparse.py", plan, [HERE / "sparse_plugin"], **env) as run:
            order = [node for batch in batches for _, node in zip(batch, nodes, strict=False)]
            with ThreadPoolExecutor(1) as background:
                arriving = background.submit(receive, order)
                results = run.results()
                received = arriving.result()
    finally:
        for node in nodes:
            node.server.close()
    return Served([prompt for batch in prompts for prompt in batch], results["answers"], received, results["facts"])


def receive(order: list[Node]) -> list[Received]:
    """vLLM numbers its requests; a node is free for the next one as soon as it has been read."""
    return [node.receive(str(index), START_TIMEOUT_S) for index, node in enumerate(order)]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, bool], Served]]:
    """served(family, drafting). All scenarios of the chosen tests' families are begun at once, two at a time."""
    chosen = {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as lanes:
        futures: dict[tuple[str, bool], Future[Served]] = {
            key: lanes.submit(serve, scenario, tmp_path_factory.mktemp("sparse"))
            for key, scenario in scenarios().items()
            if scenario.family in chosen
        }
        yield lambda family, drafting: futures[family, drafting].result()
        lanes.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def line(text: str) -> None:
        with capsys.disabled():
            print("\n" + text, end="")

    return line


def index_keys(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Wire pages uint8 [n, 8448] -> code and scale bytes, token after token: [tokens, 132]."""
    codes, scales = pages.split([PAGE_TOKENS * CODE_BYTES, PAGE_TOKENS * 4], dim=1)
    return torch.cat([codes.reshape(-1, CODE_BYTES)[:tokens], scales.reshape(-1, 4)[:tokens]], dim=1)


@dataclass
class Choices:
    """Our engine's choices beside vLLM's recorded ones, compared while the engine runs.

    A difference is a tie if every position that only one side has scores exactly as our lowest chosen one.
    """

    recorded: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    compared: int = 0
    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    at: tuple[int, int] = (0, 0)  # layer, position

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        lightning_index, top_positions = indexer.lightning_index, indexer.top_positions

        def indexed(w: Any, config: Any, cache: Any, layer: int, batch: Any, *rest: Any) -> Any:
            self.at = layer, max(batch.first, config.index_topk)
            return lightning_index(w, config, cache, layer, batch, *rest)

        def chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
            positions = top_positions(scores, count)
            for row, ours in zip(scores, positions, strict=True):
                self.compare(row, ours)
            return positions

        patch.setattr(model, "lightning_index", indexed)
        patch.setattr(indexer, "top_positions", chosen)

    def compare(self, scores: torch.Tensor, ours: torch.Tensor) -> None:
        layer, position = self.at
        self.at = layer, position + 1
        theirs = self.recorded[layer][position].long()
        self.compared += 1
        if torch.equal(ours, theirs):
            return
        only = torch.cat([ours[~torch.isin(ours, theirs)], theirs[~torch.isin(theirs, ours)]])
        edge = scores[ours].min()
        far = ((scores[only] - edge) / edge).abs().max().item()
        line = f"layer {layer}, position {position}: {sorted(only.tolist())}, off the edge by {far:.1e} of it"
        (self.differences if far else self.ties).append(line)


@dataclass
class Ours:
    """This engine on one family's plain prompts."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    decode: Choices = field(default_factory=Choices)  # over vLLM's rows and keys, fed vLLM's tokens
    prefill: Choices = field(default_factory=Choices)  # of our own
    equal: list[int] = field(default_factory=lambda: [0] * LAYERS)  # bytes of our own index keys
    total: int = 0

    def run(self, engine: RefEngine, prompt: list[int], answer: dict[str, Any], received: Received) -> None:
        self.decode.recorded = self.prefill.recorded = answer["chosen"]
        with pytest.MonkeyPatch.context() as patch:
            self.prefill.watch(patch)
            engine.prefill(prompt)
        self.total += len(prompt) * (CODE_BYTES + 4)
        for layer in range(LAYERS):
            keys = index_keys(engine.cache.index[layer], len(prompt))
            self.equal[layer] += int((keys == answer["index"][layer]).sum())
        with pytest.MonkeyPatch.context() as patch:
            self.decode.watch(patch)
            rows = decode(engine, received, answer["ids"])
        for ours, theirs, top in zip(rows.argmax(-1).tolist(), answer["ids"], answer["top"], strict=True):
            self.verdicts[judge(ours, theirs, top)] += 1


def decode(engine: RefEngine, received: Received, ids: list[int]) -> torch.Tensor:
    """Logits that predict each of vLLM's tokens, from vLLM's planes and, token after token, vLLM's own tokens."""
    engine.inject(received)
    first = received.seq_len
    rows = [step(engine.model, engine.cache, first - 1, [received.last_prompt_token], keep_rows=True)[1]]
    rows += [step(engine.model, engine.cache, first + i, [token])[1] for i, token in enumerate(ids[:-1])]
    return torch.cat(rows)


@pytest.fixture(scope="module")
def ours(served: Callable[[str, bool], Served]) -> Callable[[str], Ours]:
    made = dict[str, Ours]()

    def run(family: str) -> Ours:
        if family not in made:
            plain, made[family] = served(family, False), Ours()
            engine = load_engine(model_dir(family), max_seq_len=MAX_SEQ_LEN)
            for prompt, answer, received in zip(plain.prompts, plain.answers, plain.received, strict=True):
                made[family].run(engine, prompt, answer, received)
        return made[family]

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family: str, ours: Callable[[str], Ours], say: Callable[[str], None]) -> None:
    counts = ours(family).verdicts
    words = f"{counts['identical']} identical, {counts['tie']} tie, {counts['diverged']} diverged"
    say(f"{family} behind vLLM-CPU, {len(PLAIN_PROMPTS)} prompts x {PLAIN_TOKENS} tokens: {words}")
    assert counts.total() == len(PLAIN_PROMPTS) * PLAIN_TOKENS
    assert counts["diverged"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_choices(family: str, ours: Callable[[str], Ours], say: Callable[[str], None]) -> None:
    """Beyond index_topk both choose the same positions, but for exact ties at the edge."""
    run = ours(family)
    for what, choices in (("decode", run.decode), ("own prefill", run.prefill)):
        counts = f"{len(choices.ties)} differ by ties, {len(choices.differences)} otherwise"
        say(f"  {family}, {what}: {choices.compared} choices of {TOPK} positions compared, {counts}")
        for line in choices.ties + choices.differences:
            say(f"    {line}")
    assert not run.decode.differences


@pytest.mark.parametrize("family", FAMILIES)
def test_index_key_bytes(family: str, ours: Callable[[str], Ours], say: Callable[[str], None]) -> None:
    run = ours(family)
    shares = [equal / run.total for equal in run.equal]
    say(f"  {family}: index key bytes of our own prefill equal to vLLM's, a layer: {[f'{s:.6%}' for s in shares]}")
    assert shares[0] == 1.0, "layer 0 depends on the token ids only"
    assert min(shares) > 0.999


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_planes(family: str, drafting: bool, served: Callable[[str, bool], Served]) -> None:
    """Rows and index pages arrive as vLLM's caches have them, the draft layer's too."""
    run = served(family, drafting)
    for prompt, answer, received in zip(run.prompts, run.answers, run.received, strict=True):
        assert (received.seq_len, received.last_prompt_token) == (len(prompt), prompt[-1])
        assert sorted(answer["rows"]) == sorted(answer["index"]) == list(range(LAYERS + drafting))
        for layer, rows in answer["rows"].items():
            keys = answer["index"][layer]
            assert rows.any(dim=1).all() and keys.any(dim=1).all()
            assert torch.equal(received.rows(layer), rows)
            assert torch.equal(index_keys(received.layers[layer].index_pages, len(prompt)), keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_vllm(family: str, served: Callable[[str, bool], Served], say: Callable[[str], None]) -> None:
    """From a drafting vLLM's planes, of chunks and of a prefix hit, we decode its tokens, with drafts and without."""
    drafting, plain = served(family, True), served(family, False)
    assert drafting.facts["chunked"] and drafting.facts["prefix_caching"]
    assert drafting.answers[-1]["cached"] >= TOPK
    for drafts in (0, DRAFTS):
        engine, lengths = load_engine(model_dir(family), max_seq_len=MAX_SEQ_LEN, num_mtp=drafts), []
        for prompt, answer, received in zip(drafting.prompts, drafting.answers, drafting.received, strict=True):
            layers = received.layers[: LAYERS + (drafts > 0)]
            engine.inject(Received("", received.seq_len, received.last_prompt_token, layers))
            *steps, finished = engine.decode(answer["ids"][0], DRAFTED_TOKENS, GREEDY)
            assert isinstance(finished, Finished)
            alone = plain.answers[plain.prompts.index(prompt)]["ids"][:DRAFTED_TOKENS]
            assert [token.id for tokens in steps for token in tokens] == answer["ids"] == alone
            lengths.append(finished.stats.get("mtp_accept_mean", 1.0))
        say(f"  {family}, {drafts} drafts: equal; tokens per step {', '.join(f'{n:.2f}' for n in lengths)}")
        assert min(lengths) >= 1 + drafts / 2
