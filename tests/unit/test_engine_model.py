"""The forward pass against an independent one: Hugging Face transformers, in fp32, for every dense family."""

import pytest
import torch

from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import Model, prefill, step
from tilert_ref.engine.model import logits
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import load_engine
from tilert_ref.engine.rope import rope_table
from tilert_ref.engine.weights import load_weights

DENSE = {
    "dsv3": {},
    "dsv2": {},
    "dsv2 grouped": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "glm47": {},
    "kimi": {"model_type": "deepseek_v3"},  # transformers knows Kimi-K2's architecture under this name only
    "dsv3 without query compression": {"q_lora_rank": None},
    "dsv3 without YaRN": {"rope_scaling": None},
}


def fp32_model(model_dir) -> Model:
    config = load_config(model_dir)
    weights = load_weights(config, model_dir, with_mtp=False, dtype=torch.float32)
    return Model(config, weights, rope_table(config, 128, torch.float32), Kernels())


def fp32_cache(model: Model) -> KVCache:
    return KVCache(model.config, model.config.num_hidden_layers, 128, block_size=16, dtype=torch.float32)


@pytest.fixture(params=DENSE)
def family(request, tiny):
    arch = request.param.split()[0]
    return tiny(arch, **DENSE[request.param])


def test_logits_equal_transformers(family) -> None:
    transformers = pytest.importorskip("transformers", reason="the independent oracle is transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)
    prompt = [(37 * i + 11) % 480 for i in range(70)]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    model = fp32_model(family)
    ours = logits(model.weights, prefill(model, fp32_cache(model), prompt, chunk=32))
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


def test_decode_continues_what_prefill_began(family) -> None:
    """Absorbed, token by token, equals plain, all at once: the two forms of attention and the cache agree."""
    model = fp32_model(family)
    prompt = [(37 * i + 11) % 480 for i in range(40)]
    whole = logits(model.weights, prefill(model, fp32_cache(model), prompt))
    cache = fp32_cache(model)
    prefill(model, cache, prompt[:25])
    for position in range(25, 40):
        _, row = step(model, cache, position, prompt[position : position + 1])
        torch.testing.assert_close(row[0], whole[position], rtol=1e-3, atol=1e-3)


def test_block_table_order_does_not_matter(tiny) -> None:
    """The cache is paged for real: shuffled physical blocks give the same bits."""
    prompt = [(7 * i + 3) % 480 for i in range(150)]
    rows = []
    for shuffled in (False, True):
        engine = load_engine(tiny("dsv3"), max_seq_len=300, block_size=16)
        if shuffled:
            order = torch.randperm(len(engine.cache.block_table), generator=torch.Generator().manual_seed(5))
            engine.cache.block_table = order
        first = engine.prefill(prompt)
        rows.append((first, engine.cache.read(2, 150)))
    assert rows[0][0] == rows[1][0]
    assert rows[0][1].equal(rows[1][1])
