"""Sparse attention in the whole model: against transformers, against dense attention, injected, and drafting."""

from dataclasses import replace

import pytest
import torch
from sparse_planes import handed_over

from tilert_ref.connector.layout import BF16, BufferLayout, model_profile, plane_views
from tilert_ref.connector.planes import tile_index_pages
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.decode_server.engine_process import Host, warm_up
from tilert_ref.decode_server.messages import Generate
from tilert_ref.engine.api import LayerKV, PromptKV, SamplingParams
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import Model, draft, prefill, step
from tilert_ref.engine.model import forward, logits
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.engine.rope import rope_table
from tilert_ref.engine.weights import Weights, load_weights

ARCHS = ("glm5", "dsv32")  # interleaved and half-split pairing
TOPK = 32
ROOM = 256
# Seed 11 of 60: at every edge of a choice, index_topk-th against next, scores are at least 6e-5 of the largest apart.
# fp32 sums in another order move them by 1e-6, so no choice of an unrounded model hangs on the order.
LONG_PROMPT = torch.randint(480, (200,), generator=torch.Generator().manual_seed(11)).tolist()
PROMPT = LONG_PROMPT[:100]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(params=ARCHS)
def sparse(request, tiny):
    """rms_norm_eps: transformers fixes the one of q_a_layernorm at 1e-6 whatever the config says."""
    return tiny(request.param, index_topk=TOPK, rms_norm_eps=1e-6)


def built(model_dir, dtype: torch.dtype, with_mtp: bool = False, **changes) -> Model:
    config = replace(load_config(model_dir), **changes)
    weights = load_weights(config, model_dir, with_mtp=with_mtp, dtype=dtype)
    return Model(config, weights, rope_table(config, ROOM, dtype), Kernels())


def unrounded_cache(model: Model, layers: int = 3) -> KVCache:
    return KVCache(model.config, layers, ROOM, block_size=16, dtype=torch.float32, index_dtype=torch.float32)


def run(engine: RefEngine, first: int, tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    *steps, _ = engine.decode(first, tokens, sampling)
    return [token.id for tokens_ in steps for token in tokens_]


# transformers


@pytest.mark.parametrize("flipped", [False, True])
def test_logits_equal_transformers_with_the_right_pairing_only(sparse, flipped: bool) -> None:
    """200 tokens, 32 of them seen; unrounded index keys, because transformers has no fp8 there."""
    transformers = pytest.importorskip("transformers", reason="the independent oracle is transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([LONG_PROMPT])).logits[0]
    pairing = load_config(sparse).indexer_rope_interleave
    model = built(sparse, torch.float32, indexer_rope_interleave=pairing != flipped)
    ours = logits(model.weights, prefill(model, unrounded_cache(model), LONG_PROMPT, chunk=128))
    torch.testing.assert_close(ours[:TOPK], expected[:TOPK], rtol=2e-3, atol=2e-3)  # all seen: no pairing matters yet
    wrong = ((ours - expected).abs() > 2e-3 + 2e-3 * expected.abs()).any(-1)
    assert wrong.any() if flipped else not wrong.any()


def test_rounded_index_keys_choose_nearly_the_same(sparse) -> None:
    """e4m3 moves a few choices at the edge: most positions keep the token that the unrounded model likes best."""
    model = built(sparse, torch.float32)
    best = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        cache = KVCache(model.config, 3, ROOM, dtype=torch.float32, index_dtype=dtype)
        best.append(logits(model.weights, prefill(model, cache, PROMPT)).argmax(-1))
    same = (best[0] == best[1]).float().mean()
    assert same > 0.8


# dense


def without_indexer(weights: Weights) -> Weights:
    layers = [replace(layer, attention=replace(layer.attention, indexer=None)) for layer in weights.layers]
    return replace(weights, layers=layers)


@pytest.mark.parametrize("arch", ARCHS)
def test_up_to_index_topk_tokens_every_bit_is_dense_attentions(arch: str, tiny) -> None:
    model = built(tiny(arch, index_topk=TOPK), torch.bfloat16)
    twin = replace(model, config=replace(model.config, index_topk=None), weights=without_indexer(model.weights))
    caches = [KVCache(m.config, 3, ROOM) for m in (model, twin)]
    prompt = PROMPT[: TOPK - 4]
    hidden = prefill(model, caches[0], prompt)
    dense = forward(twin.weights, twin.config, caches[1], twin.batch(0, len(prompt)), twin.ids(prompt))
    assert torch.equal(hidden, dense)
    for first, tokens in ((len(prompt), [5, 6]), (len(prompt) + 2, [7]), (len(prompt) + 3, [8])):
        steps = [step(m, cache, first, tokens)[0] for m, cache in zip((model, twin), caches, strict=True)]
        assert torch.equal(*steps)
    assert torch.equal(*(cache.rows for cache in caches))
    steps = [step(m, cache, TOPK, [9])[0] for m, cache in zip((model, twin), caches, strict=True)]
    assert not torch.equal(*steps), "with one token more than index_topk the two must part"


# handoff


def test_decode_continues_what_prefill_began(sparse) -> None:
    """Token by token equals many at once. Unrounded keys: at an edge of e4m3 the last bit of fp32 turns a choice."""
    model = built(sparse, torch.float32)
    whole = logits(model.weights, prefill(model, unrounded_cache(model), PROMPT))
    cache = unrounded_cache(model)
    prefill(model, cache, PROMPT[:60])
    for position in range(60, 100):
        _, row = step(model, cache, position, PROMPT[position : position + 1])
        torch.testing.assert_close(row[0], whole[position], rtol=1e-3, atol=1e-3)


def test_decode_on_injected_planes_equals_a_longer_prefill_to_the_bit(sparse) -> None:
    """60 tokens prefilled and handed over, 40 decoded: the rows, keys and states of 100 prefilled, one by one."""
    model = built(sparse, torch.bfloat16)
    whole, sender, target = (
        RefEngine(model, KVCache(model.config, 3, ROOM, block_size=b), 0, 200) for b in (64, 64, 16)
    )
    expected = prefill(model, whole.cache, PROMPT, chunk=1)
    prefill(model, sender.cache, PROMPT[:60], chunk=1)
    target.inject(handed_over(sender, PROMPT[:60]))
    for at in range(60, 100):
        hidden, _ = step(model, target.cache, at, PROMPT[at : at + 1])
        assert torch.equal(hidden[0], expected[at])
    for left, right in zip(handed_over(whole, PROMPT).layers, handed_over(target, PROMPT).layers, strict=True):
        assert torch.equal(left.latent, right.latent) and torch.equal(left.index_pages, right.index_pages)


@pytest.mark.parametrize("num_mtp", [0, 2])
@pytest.mark.parametrize("arch", ARCHS)
def test_injected_planes_decode_like_own_prefill(arch: str, num_mtp: int, tiny) -> None:
    model_dir = tiny(arch, index_topk=TOPK)
    source = load_engine(model_dir, max_seq_len=ROOM, num_mtp=num_mtp)
    first = source.prefill(PROMPT, GREEDY)
    kv = handed_over(source, PROMPT)
    target = load_engine(model_dir, max_seq_len=ROOM, num_mtp=num_mtp, block_size=16)
    target.cache.index.fill_(0x55)  # what a longer prompt before this one left behind
    target.inject(kv)
    tokens = run(target, first, 40)
    assert tokens == run(source, first, 40)
    after = handed_over(target, PROMPT)
    for layer, before in enumerate(kv.layers):
        assert torch.equal(after.layers[layer].index_pages[0], before.index_pages[0]), "transferred keys were rewritten"
        assert torch.equal(after.layers[layer].latent, before.latent)


@pytest.mark.parametrize("tiled", [False, True])
def test_the_decode_servers_receive_buffer_feeds_the_engine(tiled: bool, tiny) -> None:
    """Bytes of a handoff, index pages in either order, through the views of the engine process. A warm-up before it
    leaves no trace."""
    model_dir = tiny("glm5", index_topk=TOPK)
    source = load_engine(model_dir, max_seq_len=ROOM)
    first = source.prefill(PROMPT, GREEDY)
    kv = handed_over(source, PROMPT)
    layout = BufferLayout(model_profile(3, has_mtp=False, has_index=True), BF16, ROOM, tiled=tiled)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for index, layer in enumerate(kv.layers):
        latent, rope, pages = plane_views(layout, buffer, index, len(PROMPT))
        latent.copy_(layer.latent.contiguous().view(torch.uint8))
        rope.copy_(layer.rope.contiguous().view(torch.uint8))
        pages.copy_(tile_index_pages(layer.index_pages) if tiled else layer.index_pages)
    target = load_engine(model_dir, max_seq_len=ROOM)
    host = Host(target, layout, buffer[None], engine_layers=3)
    warm_up(host, ScaleRule.POWER_OF_TWO)
    assert target.cache.rows.any(), "it wrote nothing"
    target.inject(host.prompt(Generate("r", len(PROMPT), PROMPT[-1], first, 20, GREEDY)))
    assert run(target, first, 20) == run(source, first, 20)


def test_answer_depends_on_every_layers_index_pages(tiny) -> None:
    model_dir = tiny("glm5", index_topk=TOPK)
    source = load_engine(model_dir, max_seq_len=ROOM)
    first = source.prefill(PROMPT, GREEDY)
    good = run(source, first, 20)
    for layer in range(3):
        kv = handed_over(source, PROMPT)
        kv.layers[layer].index_pages[:, :8192] ^= 0x80  # every key turned round
        target = load_engine(model_dir, max_seq_len=ROOM)
        target.inject(kv)
        assert run(target, first, 20) != good


def spoiled(kv: PromptKV, pages: torch.Tensor | None) -> PromptKV:
    return replace(kv, layers=[*kv.layers[:-1], replace(kv.layers[-1], index_pages=pages)])


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        (None, "layer 2: no index pages for a model with index_topk = 32"),
        (
            torch.zeros(1, 8448, dtype=torch.uint8),
            r"layer 2 index_pages: \[1, 8448\] torch.uint8, expected \[2, 8448\]",
        ),
        (torch.zeros(2, 8448, dtype=torch.int8), r"index_pages: \[2, 8448\] torch.int8, expected .* torch.uint8"),
    ],
)
def test_pages_that_do_not_fit_are_refused_by_name(pages: torch.Tensor | None, named: str, tiny) -> None:
    engine = load_engine(tiny("glm5", index_topk=TOPK), max_seq_len=ROOM)
    engine.prefill(PROMPT)
    with pytest.raises(ValueError, match=named):
        engine.inject(spoiled(handed_over(engine, PROMPT), pages))


def test_pages_for_a_dense_model_are_refused(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=ROOM)
    rows = torch.zeros(10, 576, dtype=torch.bfloat16)
    layer = LayerKV(rows[:, :512], rows[:, 512:], torch.zeros(1, 8448, dtype=torch.uint8))
    with pytest.raises(ValueError, match="layer 0: index pages for a model with index_topk = None"):
        engine.inject(PromptKV("r", 10, 3, [layer] * 3))


# drafting


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, 0.95, 50, True, seed=3)], ids=["greedy", "sampled"])
def test_drafting_changes_speed_not_tokens(arch: str, sampling: SamplingParams, tiny) -> None:
    answers = []
    for num_mtp in range(4):
        engine = load_engine(tiny(arch, index_topk=TOPK), max_seq_len=ROOM, num_mtp=num_mtp)
        answers.append(run(engine, engine.prefill(PROMPT, sampling), 40, sampling))
    assert answers[1:] == answers[:1] * 3
    assert len(set(answers[0])) > 5, "an answer of one token would prove little"


def test_draft_keys_are_those_of_a_full_pass(sparse) -> None:
    """After drafting, the MTP layer's index keys equal the ones computed from the whole text at once."""
    model = built(sparse, torch.float32, with_mtp=True)
    engine, fresh = (RefEngine(model, unrounded_cache(model, 4), 2, 250) for _ in range(2))
    tokens = run(engine, engine.prefill(PROMPT, GREEDY), 30)
    final = len(PROMPT) + 20
    fresh.prefill([*PROMPT, *tokens], GREEDY)
    for layer in (2, 3):
        keys = [e.cache.read_index(layer, final)[0] for e in (engine, fresh)]
        torch.testing.assert_close(*keys, rtol=1e-3, atol=1e-3)


def test_refeeding_leaves_transferred_keys_untouched(tiny) -> None:
    engine = load_engine(tiny("glm5", index_topk=TOPK), max_seq_len=ROOM, num_mtp=1)
    first = engine.prefill(PROMPT)
    engine.cache.index[..., :8192] ^= 0x80  # not what the engine would compute
    before = engine.cache.index.clone()
    hidden, _ = step(engine.model, engine.cache, len(PROMPT) - 1, PROMPT[-1:], keep_rows=True)
    draft(engine.model, engine.cache, len(PROMPT) - 1, [first], hidden, 1, keep_rows=True)
    assert torch.equal(engine.cache.index, before)


def test_block_table_order_does_not_matter(tiny) -> None:
    answers = []
    for shuffled in (False, True):
        engine = load_engine(tiny("dsv32", index_topk=TOPK), max_seq_len=ROOM, num_mtp=1, block_size=16)
        if shuffled:
            order = torch.randperm(len(engine.cache.block_table), generator=torch.Generator().manual_seed(5))
            engine.cache.block_table = order
        answers.append(run(engine, engine.prefill(PROMPT, GREEDY), 20))
    assert answers[0] == answers[1]
