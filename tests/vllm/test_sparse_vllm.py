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
from tilert_ref.engine.attention import attend_chosen
from tilert_ref.engine.batch import Seen
from tilert_ref.engine.decode import step
from tilert_ref.engine.numerics import SumOrder
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
PLAIN_TOKENS = 48
DRAFTED_PROMPTS = (2, 1)
DRAFTED_TOKENS = 32
DRAFTS = 2
CODE_BYTES, SCALE_BYTES = 128, 4
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
    nodes = [Node(layout, transport="zmq") for _ in range(max(map(len, scenario.batches)))]
    golden = prompts_of(scenario.family)
    prompts = [[golden[number] for number in batch] for batch in scenario.batches]
    batches = [
        [{"prompt": prompt, "params": node.params} for prompt, node in zip(batch, nodes, strict=False)]
        for batch in prompts
    ]
    engine = {"model": str(model_dir(scenario.family)), "max_model_len": MAX_SEQ_LEN, "kv_transfer_config": ZMQ_CHILD}
    plan = {"engine": engine | scenario.engine, "tokens": scenario.tokens, "batches": batches}
    env = preload_openmp() | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # the process is the worker
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


def index_keys(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Wire pages uint8 [n, 8448] -> code and scale bytes, token after token: [tokens, 132]."""
    codes, scales = pages.split([PAGE_TOKENS * CODE_BYTES, PAGE_TOKENS * SCALE_BYTES], dim=1)
    return torch.cat([codes.reshape(-1, CODE_BYTES)[:tokens], scales.reshape(-1, SCALE_BYTES)[:tokens]], dim=1)


@dataclass
class Choices:
    """Our engine's choices beside vLLM's recorded ones, compared while the engine runs.

    A difference is a tie if every position that only one side has scores exactly as our lowest chosen one.
    """

    recorded: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict, repr=False)
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
class Prefill:
    """The engine's own prefill: its choices, and its index key bytes beside vLLM's."""

    choices: Choices = field(default_factory=Choices)
    equal: list[int] = field(default_factory=lambda: [0] * LAYERS)
    total: int = 0

    def run(self, engine: RefEngine, prompt: list[int], answer: dict[str, Any], attend: Callable[..., Any]) -> None:
        self.choices.recorded = answer["chosen"]
        with pytest.MonkeyPatch.context() as patch:
            self.choices.watch(patch)
            patch.setattr(model, "attend_chosen", attend)
            engine.prefill(prompt)
        self.total += len(prompt) * (CODE_BYTES + SCALE_BYTES)
        for layer in range(LAYERS):
            keys = index_keys(engine.cache.index[layer], len(prompt))
            self.equal[layer] += int((keys == answer["index"][layer]).sum())

    @property
    def shares(self) -> list[float]:
        return [equal / self.total for equal in self.equal]


@dataclass
class Ours:
    """This engine on one family's plain prompts. exact: the order in which vLLM sums experts here is known."""

    exact: bool
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    decode: Choices = field(default_factory=Choices)  # over vLLM's rows and keys, fed vLLM's tokens
    prefill: Prefill = field(default_factory=Prefill)  # as it is
    padded: Prefill = field(default_factory=Prefill)  # attention summed as the plugin sums it

    def run(self, engine: RefEngine, prompt: list[int], answer: dict[str, Any], received: Received) -> None:
        self.decode.recorded = answer["chosen"]
        self.prefill.run(engine, prompt, answer, attend_chosen)
        self.padded.run(engine, prompt, answer, attend_padded)
        with pytest.MonkeyPatch.context() as patch:
            self.decode.watch(patch)
            rows = decode(engine, received, answer["ids"])
        for ours, theirs, top in zip(rows.argmax(-1).tolist(), answer["ids"], answer["top"], strict=True):
            self.verdicts[judge(ours, theirs, top)] += 1


def attend_padded(
    q_latent: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    """attention.attend_chosen, every query over index_topk rows: those that see fewer are filled up and masked.

    So does the plugin, and vLLM's kernels. A longer fp32 sum is cut into other vectors, though zeros are added.
    """
    everything = torch.arange(len(rows))
    width = min(TOPK, len(rows))
    at = [everything[chosen] for chosen in seen]  # slices too
    at = torch.stack([torch.nn.functional.pad(chosen, (0, width - len(chosen)), value=-1) for chosen in at])  # [T, k]
    query, rows, out = torch.cat((q_latent, q_rope), dim=-1).float(), rows.float(), torch.empty_like(q_latent)
    for start in range(0, len(at), 8):
        part = slice(start, start + 8)
        keys = rows[at[part].clamp_min(0)]  # [t, k, L + R]
        scores = (query[part] @ keys.transpose(1, 2) * scale).masked_fill(at[part, None] < 0, float("-inf"))
        out[part] = torch.softmax(scores, dim=-1) @ keys[..., : q_latent.shape[-1]]
    return out


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
            plain, engine = served(family, False), load_engine(model_dir(family), max_seq_len=MAX_SEQ_LEN)
            made[family] = Ours(engine.model.kernels.order is SumOrder.VLLM_AVX2)
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
    kinds = {"decode": run.decode, "own prefill, padded sums": run.padded.choices, "own prefill": run.prefill.choices}
    for what, choices in kinds.items():
        counts = f"{len(choices.ties)} differ by exact ties, {len(choices.differences)} otherwise"
        say(f"  {family}, {what}: {choices.compared} choices of {TOPK} positions compared, {counts}")
        for line in choices.ties if what == "own prefill" else choices.ties + choices.differences:
            say(f"    {line}")
        beyond = PLAIN_TOKENS * 4 if choices is run.decode else 1000  # four prompts start beyond index_topk
        assert choices.compared > LAYERS * beyond
    if run.exact:
        assert not run.decode.differences and not run.padded.choices.differences
    assert len(run.prefill.choices.differences) < 0.15 * run.prefill.choices.compared


@pytest.mark.parametrize("family", FAMILIES)
def test_index_key_bytes(family: str, ours: Callable[[str], Ours], say: Callable[[str], None]) -> None:
    """Of our own prefill. What differs begins with the order in which a prompt's sparse attention is summed."""
    run = ours(family)
    for what, prefill in (("padded sums", run.padded), ("as it is", run.prefill)):
        shares = ", ".join(f"{100 * share:.4f}%" for share in prefill.shares)
        say(f"  {family}: equal index key bytes a layer, own prefill, {what}: {shares} of {prefill.total}")
        assert prefill.shares[0] == 1.0, "layer 0 depends on the token ids only"
    if run.exact:  # seen: all, and all but 2 bytes
        assert min(run.padded.shares) > 0.9999
    assert min(run.prefill.shares) > 0.98


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
