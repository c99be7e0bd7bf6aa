"""Layers that share an indexer (GLM-5.2): config, weights, cache, handoff and drafts; transformers is the oracle."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparse_planes import handed_over

from tilert_ref.connector.caches import describe_caches
from tilert_ref.engine import model as forward_pass
from tilert_ref.engine.api import PromptKV, SamplingParams
from tilert_ref.engine.batch import Batch, Seen
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.checkpoint import CheckpointError
from tilert_ref.engine.config import ConfigError, ModelConfig, load_config, parse_config
from tilert_ref.engine.decode import Model, draft, prefill, step
from tilert_ref.engine.make_tiny import tiny_config
from tilert_ref.engine.model import logits
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.engine.rope import rope_table
from tilert_ref.engine.weights import load_weights

FULL, SHARED = (0, 1, 4, 6), (2, 3, 5)  # of the tiny glm52; 6 is the MTP layer
TOPK = 32
ROOM = 256
# Seed 26 of 60: scores at the edge of every choice are 6e-5 of the largest apart (see test_engine_sparse.py).
LONG_PROMPT = torch.randint(480, (200,), generator=torch.Generator().manual_seed(26)).tolist()
PROMPT = LONG_PROMPT[:100]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture
def glm52(tiny) -> Path:
    """rms_norm_eps: transformers fixes the one of q_a_layernorm at 1e-6 whatever the config says."""
    return tiny("glm52", index_topk=TOPK, rms_norm_eps=1e-6)


@pytest.fixture
def config(glm52: Path) -> ModelConfig:
    return load_config(glm52)


def run(engine: RefEngine, first: int, tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    *steps, _ = engine.decode(first, tokens, sampling)
    return [token.id for tokens_ in steps for token in tokens_]


# config


@pytest.mark.parametrize(
    "spelling",
    [
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
        {"index_topk_pattern": "FFSSFS"},
        {"index_topk_freq": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 2},
        {"index_topk_pattern": "FFSSFS", "index_topk_freq": 2},  # vLLM and transformers both take the pattern
    ],
)
def test_three_spellings_of_one_schedule(spelling: dict) -> None:
    bare = dict.fromkeys(("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"))
    config = parse_config(tiny_config("glm52", **bare | spelling))
    assert [layer for layer in range(7) if config.has_indexer(layer)] == list(FULL)
    assert [config.indexer_of(layer) for layer in range(7)] == [0, 1, 1, 1, 4, 4, 6]


def test_schedule_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for frequency, offset in product((1, 2, 3, 4), (1, 2, 3, 5)):
        numbers = {"num_hidden_layers": 11, "index_topk_freq": frequency, "index_skip_topk_offset": offset}
        ours = parse_config(tiny_config("glm5", **numbers))
        assert list(ours.indexer_types) == transformers.GlmMoeDsaConfig(**numbers).indexer_types


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"index_topk_freq": 2}, "indexer_types = .* contradicts index_topk_pattern or index_topk_freq"),
        ({"index_topk_pattern": "FFFFFF"}, "indexer_types = .* contradicts"),
        ({"index_topk_pattern": "FFSS"}, "index_topk_pattern = 'FFSS', legal: 6 letters F or S"),
        ({"index_topk_pattern": "FFSSFX"}, "index_topk_pattern = 'FFSSFX'"),
        ({"index_topk_pattern": ["F"] * 6}, "index_topk_pattern = .'F'"),
        ({"indexer_types": ["full"] * 5}, "indexer_types = .* legal: 6 times 'full' or 'shared'"),
        ({"indexer_types": ["full"] * 5 + ["none"]}, "indexer_types"),
        ({"indexer_types": None, "index_skip_topk_offset": 0}, "layer 0 shares an indexer"),
        ({"index_topk_freq": 0}, "index_topk_freq = 0"),
        ({"index_share_for_mtp_iteration": "true"}, "index_share_for_mtp_iteration = 'true', legal: true, false"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16', implemented: .None, 'float32'"),
    ],
)
def test_a_schedule_that_is_not_one_is_refused(override: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(tiny_config("glm52", **override))


@pytest.mark.parametrize(
    ("arch", "override"),
    [("dsv3", {"index_topk_freq": 4}), ("dsv32", {"moe_router_dtype": "float32"})],
)
def test_what_another_family_cannot_mean_is_refused(arch: str, override: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(override))):
        parse_config(tiny_config(arch, **override))


# weights


def test_a_shared_layer_has_no_indexer_weights(glm52: Path, config: ModelConfig) -> None:
    weights = load_weights(config, glm52, with_mtp=True)
    layers = [*weights.layers, weights.mtp.layer]
    assert [i for i, layer in enumerate(layers) if layer.attention.indexer is not None] == list(FULL)


def test_indexer_weights_of_a_shared_layer_are_left_over(glm52: Path, config: ModelConfig, tmp_path: Path) -> None:
    tensors = load_file(glm52 / "model.safetensors")
    name = "model.layers.{}.self_attn.indexer.wk.weight"
    save_file(tensors | {name.format(3): tensors[name.format(1)].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 weight.* no place for: {name.format(3)}"):
        load_weights(config, tmp_path, with_mtp=True)


# transformers


def unrounded(model_dir: Path) -> tuple[Model, KVCache]:
    """Everything in fp32, index keys too: transformers has no fp8 there."""
    config = load_config(model_dir)
    weights = load_weights(config, model_dir, with_mtp=False, dtype=torch.float32)
    cache = KVCache(config, 6, ROOM, block_size=16, dtype=torch.float32, index_dtype=torch.float32)
    return Model(config, weights, rope_table(config, ROOM, torch.float32), Kernels()), cache


@pytest.fixture(scope="module")
def expected(tiny) -> torch.Tensor:
    transformers = pytest.importorskip("transformers", reason="the independent oracle is transformers")
    model_dir = tiny("glm52", index_topk=TOPK, rms_norm_eps=1e-6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        return theirs(torch.tensor([LONG_PROMPT])).logits[0]


def wrong_rows(ours: torch.Tensor, expected: torch.Tensor) -> int:
    return int(((ours - expected).abs() > 2e-3 + 2e-3 * expected.abs()).any(-1).sum())


def test_logits_equal_transformers(glm52: Path, expected: torch.Tensor) -> None:
    model, cache = unrounded(glm52)
    assert wrong_rows(logits(model.weights, prefill(model, cache, LONG_PROMPT, chunk=128)), expected) == 0


def test_decode_equals_transformers(glm52: Path, expected: torch.Tensor) -> None:
    model, cache = unrounded(glm52)
    prefill(model, cache, LONG_PROMPT[:150])
    for first, tokens in ((150, 1), (151, 1), (152, 3), (155, 45)):
        _, rows = step(model, cache, first, LONG_PROMPT[first : first + tokens])
        assert wrong_rows(rows, expected[first : first + tokens]) == 0


@pytest.mark.parametrize("instead", ["all tokens", "the first layer's choice"])
def test_another_source_of_positions_is_seen(
    instead: str, glm52: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, chosen = forward_pass.attention, dict[int, Seen]()

    def wrong(w, config, cache, layer, batch, x, seen):
        if layer in SHARED:
            seen = batch.causal() if instead == "all tokens" else chosen[0]
        out, chosen[layer] = right(w, config, cache, layer, batch, x, seen)
        return out, chosen[layer]

    monkeypatch.setattr(forward_pass, "attention", wrong)
    model, cache = unrounded(glm52)
    ours = logits(model.weights, prefill(model, cache, LONG_PROMPT, chunk=128))
    assert wrong_rows(ours[:TOPK], expected[:TOPK]) == 0  # up to index_topk tokens all are seen by anyone
    assert wrong_rows(ours, expected) > 100


# cache


def test_only_layers_with_an_indexer_have_keys(config: ModelConfig) -> None:
    cache = KVCache(config, 7, 100)
    assert cache.index_layers == list(FULL) and cache.index.shape == (4, 2, 8448)
    assert cache.nbytes == 7 * 128 * 1152 + 4 * 2 * 8448
    for layer in SHARED:
        with pytest.raises(ValueError, match=rf"layer {layer} has no index keys, legal: .*\[0, 1, 4, 6\]"):
            cache.read_index(layer, 1)
    for layer in FULL:
        cache.write_index(layer, torch.tensor([3]), torch.full((1, 128), 2.0**layer))
    assert [float(cache.read_index(layer, 4)[1][3]) * 256 for layer in FULL] == [2.0**layer for layer in FULL]


# handoff


@pytest.fixture(scope="module")
def source(tiny) -> tuple[RefEngine, int]:
    """An engine that has prefilled PROMPT, as the sender of planes; and the first token."""
    engine = load_engine(tiny("glm52", index_topk=TOPK, rms_norm_eps=1e-6), max_seq_len=ROOM, num_mtp=1)
    return engine, engine.prefill(PROMPT)


def without_draft_layer(kv: PromptKV) -> PromptKV:
    return replace(kv, layers=kv.layers[:-1])


@pytest.fixture
def decoder(glm52: Path) -> RefEngine:
    return load_engine(glm52, max_seq_len=ROOM)


@pytest.mark.parametrize(("num_mtp", "block_size", "kv_cache_dtype"), [(0, 64, "bf16"), (2, 16, "fp8")])
def test_injected_planes_decode_like_own_prefill(
    num_mtp: int, block_size: int, kv_cache_dtype: str, glm52: Path
) -> None:
    options = {"max_seq_len": ROOM, "num_mtp": num_mtp, "kv_cache_dtype": kv_cache_dtype}
    sender, target = load_engine(glm52, **options), load_engine(glm52, **options, block_size=block_size)
    first = sender.prefill(PROMPT)
    target.cache.index.fill_(0x55)  # what a longer prompt before this one left behind
    target.inject(handed_over(sender, PROMPT))
    assert run(target, first, 15) == run(sender, first, 15)


def copies(kv: PromptKV, layer: int | None, config: ModelConfig) -> list[int]:
    return [i for i in range(len(kv.layers)) if config.indexer_of(i) == layer]


def test_answer_depends_on_every_full_layers_pages(
    source: tuple[RefEngine, int], decoder: RefEngine, config: ModelConfig
) -> None:
    sender, first = source
    answers = []
    for layer in (None, *FULL[:3]):
        kv = without_draft_layer(handed_over(sender, PROMPT))
        for i in copies(kv, layer, config):
            kv.layers[i].index_pages[:, :8192] ^= 0x80  # every key turned round
        decoder.inject(kv)
        answers.append(run(decoder, first, 12))
    assert answers[0] not in answers[1:]


@pytest.mark.parametrize("byte", [0, 99 % 64 * 128 + 127, 8192, 8192 + 4 * (99 % 64) + 3])
@pytest.mark.parametrize(("layer", "of"), [(2, 1), (3, 1), (5, 4)])
def test_a_shared_layer_with_keys_of_its_own_is_refused(
    layer: int, of: int, byte: int, source: tuple[RefEngine, int], decoder: RefEngine
) -> None:
    """Bytes of the first and the last token of a page; the second page holds tokens 64 to 99."""
    kv = without_draft_layer(handed_over(source[0], PROMPT))
    kv.layers[layer].index_pages[1, byte] ^= 1
    with pytest.raises(ValueError, match=f"layer {layer}: index keys differ from layer {of}'s"):
        decoder.inject(kv)


def test_what_lies_behind_the_last_token_may_differ(source: tuple[RefEngine, int], decoder: RefEngine) -> None:
    """It is whatever a sender's last block holds there, and the planes of layers may be copied at different times."""
    kv = without_draft_layer(handed_over(source[0], PROMPT))
    kv.layers[2].index_pages[1, 36 * 128 : 8192] = 7
    kv.layers[2].index_pages[1, 8192 + 4 * 36 :] = 7
    decoder.inject(kv)
    assert decoder.seq_len == len(PROMPT)


def test_the_connector_sends_the_pages_that_the_engine_expects(config: ModelConfig) -> None:
    """vLLM registers an indexer cache for full layers only."""
    rows = {f"model.layers.{i}.self_attn.attn": torch.zeros(2, 64, 656, dtype=torch.uint8) for i in range(7)}
    keys = {f"model.layers.{i}.self_attn.indexer.k_cache": torch.zeros(2, 64, 132, dtype=torch.uint8) for i in FULL}
    caches = describe_caches(rows | keys, {}, 6, (512, 64))
    assert [caches.index_for(i).layer for i in range(7)] == [config.indexer_of(i) for i in range(7)]


# drafts


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, 0.95, 50, True, seed=3)], ids=["greedy", "sampled"])
def test_drafting_changes_speed_not_tokens(sampling: SamplingParams, glm52: Path) -> None:
    answers = []
    for num_mtp in (0, 3):
        engine = load_engine(glm52, max_seq_len=ROOM, num_mtp=num_mtp)
        answers.append(run(engine, engine.prefill(PROMPT[:60], sampling), 20, sampling))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 5, "an answer of one token would prove little"


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("sharing", [True, False])
def test_later_drafts_attend_to_what_the_first_has_chosen(
    sharing: bool, length: int, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below and above index_topk. With sharing also no index key is left behind the first pass, as in vLLM."""
    model_dir = tiny("glm52", index_topk=TOPK, rms_norm_eps=1e-6, index_share_for_mtp_iteration=sharing)
    engine = load_engine(model_dir, max_seq_len=ROOM, num_mtp=3)
    first = engine.prefill(PROMPT[:length])
    hidden, _ = step(engine.model, engine.cache, length - 1, PROMPT[length - 1 : length], keep_rows=True)
    attended, right = list[Seen](), forward_pass.attend_absorbed

    def spy(q_latent, q_rope, rows, seen, scale, kernels):
        attended.append([set(range(len(rows))[s] if isinstance(s, slice) else s.tolist()) for s in seen])
        return right(q_latent, q_rope, rows, seen, scale, kernels)

    monkeypatch.setattr(forward_pass, "attend_absorbed", spy)
    # Two tokens in the first pass: its last query is the one whose choice is kept.
    more, _ = step(engine.model, engine.cache, length, [first])
    attended.clear()
    draft(engine.model, engine.cache, length - 1, [first, 7], torch.cat((hidden, more)), 3)
    (_, chosen), (second,), (third,) = attended
    assert len(chosen) == min(length + 1, TOPK)
    assert (second == third == chosen) == sharing
    assert length > TOPK or len(third) == length + (1 if sharing else 3), "a fresh choice has the drafts before it"
    keys = engine.cache.index_blocks(6).flatten(1).view(-1)[: 4 * 8448].view(-1, 8448)
    written = [bool(keys[at // 64, 8192 + 4 * (at % 64) :][:4].any()) for at in range(length, length + 3)]
    assert written == [True, not sharing, not sharing]


def test_the_mtp_layer_chooses_for_itself(source: tuple[RefEngine, int], glm52: Path) -> None:
    """Its pages steer its choice, not the tokens; layer 5 below it shares layer 4's choice, and it doesn't."""
    sender, first = source
    target, outcomes = load_engine(glm52, max_seq_len=ROOM, num_mtp=1), []
    for turned in (0x00, 0x80):
        kv = handed_over(sender, PROMPT)
        kv.layers[6].index_pages[:, :8192] ^= turned
        target.inject(kv)
        hidden, _ = step(target.model, target.cache, 99, PROMPT[-1:], keep_rows=True)
        batch: Batch = target.model.batch(99, 1, keep_rows=True)
        with torch.inference_mode():
            args = target.model.config, target.cache, batch, target.model.ids([first]), hidden
            _, seen = forward_pass.mtp_forward(target.model.weights.mtp, *args)
        outcomes.append((seen[0].tolist(), run(target, first, 12)))
    assert outcomes[0][0] != outcomes[1][0] and outcomes[0][1] == outcomes[1][1]


def test_without_drafting_the_draft_layer_is_left_out(source: tuple[RefEngine, int], decoder: RefEngine) -> None:
    assert decoder.cache.index_layers == [0, 1, 4] and len(decoder.cache.rows) == 6
    with pytest.raises(ValueError, match="7 layers of KV for an engine with 6"):
        decoder.inject(handed_over(source[0], PROMPT))
