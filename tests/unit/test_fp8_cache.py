"""The engine on an fp8_ds_mla cache: bytes, handoff, drafting, and whether the trained models still answer."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from sparse_planes import handed_over, stage
from tokenizers import Tokenizer

from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, model_profile
from tilert_ref.connector.rounding import (
    ScaleRead,
    ScaleRule,
    dequantize_latent,
    e4m3_values,
    quantize_fp8_ds_mla,
)
from tilert_ref.decode_server.engine_process import Host, warm_up
from tilert_ref.decode_server.messages import Generate
from tilert_ref.engine.api import PromptKV, SamplingParams
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import draft, prefill, step
from tilert_ref.engine.numerics import HOPPER
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir, skills
from tilert_ref.tiny.chat import DEEPSEEK, GLM, Dialect
from tilert_ref.tiny.golden import Golden, Speaker

ARCHS = ("glm5", "dsv32")
TOPK = 32
ROOM = 256
PROMPT = torch.randint(480, (100,), generator=torch.Generator().manual_seed(11)).tolist()
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
POWER_OF_TWO, PLAIN = ScaleRule.POWER_OF_TWO, ScaleRule.PLAIN


def fp8_engine(directory, rule: ScaleRule = POWER_OF_TWO, **options) -> RefEngine:
    return load_engine(directory, **({"max_seq_len": ROOM} | options), kv_cache_dtype="fp8", kv_scale_rule=rule)


def run(engine: RefEngine, first: int, tokens: int) -> list[int]:
    *steps, _ = engine.decode(first, tokens, GREEDY)
    return [token.id for tokens_ in steps for token in tokens_]


# bytes


@pytest.mark.parametrize(
    ("rule", "scale_bytes", "codes"),
    [(POWER_OF_TWO, "0000803b", [0x78, 0x6A]), (PLAIN, "2549123b", [0x7E, 0x70])],
)
def test_k1_literal_through_the_cache(rule: ScaleRule, scale_bytes: str, codes: list[int], tiny) -> None:
    cache = KVCache(load_config(tiny("glm5")), 1, 64, scale_rule=rule)
    latent, rope = torch.zeros(1, 512, dtype=torch.bfloat16), torch.arange(64.0).bfloat16()[None]
    latent[0, :2] = torch.tensor([1.0, 0.3])
    cache.write(0, torch.tensor([5]), latent, rope)
    assert cache.rows.shape == (1, 1, 64, 656)
    row = cache.rows[0, 0, 5]
    assert row[:2].tolist() == codes and not row[2:512].any()
    assert bytes(row[512:516].tolist()).hex() == scale_bytes
    second = {POWER_OF_TWO: 0.3125, PLAIN: 0.28515625}[rule]  # 0.285714 in bf16
    assert cache.read(0, 6)[5, :2].tolist() == [1.0, second]
    assert torch.equal(cache.read(0, 6)[5, 512:], rope[0])


def test_every_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 3)[:, :512].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_values(codes).nan_to_num(7e7), codes.float().nan_to_num(7e7))


def test_the_two_readers_part_on_plain_scales_only() -> None:
    """The peer's kernel on Hopper rounds the scale to bf16 first: 1 / 448 = 0x3b124925 becomes 0x3b12."""
    latent = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    shares = {}
    for rule in ScaleRule:
        fields = FP8_DS_MLA.unpack(quantize_fp8_ds_mla(latent, torch.zeros(64, 64, dtype=torch.bfloat16), rule))
        codes, scales = fields["latent"], fields["latent_scale"]
        fp32, bf16 = (dequantize_latent(codes, scales, read) for read in (ScaleRead.FP32, ScaleRead.BF16))
        shares[rule] = (fp32 != bf16).float().mean().item()
        assert torch.equal(bf16, codes.bfloat16() * scales.bfloat16().repeat_interleave(128, dim=1))
    assert shares[POWER_OF_TWO] == 0 and shares[PLAIN] > 0.2


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_are_the_quantised_values_and_attention_sees_them(arch: str, tiny) -> None:
    """Layer 0's rows come from the same hidden states in every engine; deeper ones from what layer 0 attended to."""
    directory = tiny(arch, index_topk=TOPK)
    bf16, *fp8 = (load_engine(directory, max_seq_len=ROOM), fp8_engine(directory), fp8_engine(directory, PLAIN))
    for engine in (bf16, *fp8):
        engine.prefill(PROMPT, GREEDY)
    values = bf16.cache.read(0, len(PROMPT))
    for engine in fp8:
        rule = engine.cache.scale_rule
        assert torch.equal(engine.cache.read_rows(0, 100), quantize_fp8_ds_mla(values[:, :512], values[:, 512:], rule))
        deeper = bf16.cache.read(1, 100)
        ours = engine.cache.read_rows(1, 100)
        assert not torch.equal(ours, quantize_fp8_ds_mla(deeper[:, :512], deeper[:, 512:], rule))
    assert not torch.equal(fp8[0].cache.read_rows(0, 100), fp8[1].cache.read_rows(0, 100)), "the rule changes bytes"


def test_facts_say_how_the_bytes_were_made(tiny) -> None:
    said = list[str]()
    engine = fp8_engine(tiny("glm5", index_topk=TOPK), PLAIN, progress=said.append)
    expected = {"kv_cache_dtype": "fp8_ds_mla", "kv_scale_rule": "plain", "kv_scale_read": "bf16"}
    assert engine.facts.items() >= expected.items()
    assert "kv_cache_dtype fp8_ds_mla, kv_scale_rule plain, kv_scale_read bf16" in said[-1]
    dense = load_engine(tiny("dsv3"), max_seq_len=ROOM, kernels=HOPPER).facts
    assert (dense["kv_cache_dtype"], dense["sum_order"], dense["pointwise"]) == ("bfloat16", "vllm_hopper", "fused")
    assert dense["fp8_activations"] == "none"


# handoff


@pytest.mark.parametrize("num_mtp", [0, 2])
@pytest.mark.parametrize(("arch", "rule"), list(zip(ARCHS, ScaleRule, strict=True)))
def test_injected_planes_decode_like_own_prefill(arch: str, num_mtp: int, rule: ScaleRule, tiny) -> None:
    directory = tiny(arch, index_topk=TOPK)
    source = fp8_engine(directory, rule, num_mtp=num_mtp)
    first = source.prefill(PROMPT, GREEDY)
    kv = handed_over(source, PROMPT)
    target = fp8_engine(directory, rule, num_mtp=num_mtp, block_size=16)
    target.cache.rows.fill_(0x55)  # what a longer prompt before this one left behind
    target.inject(kv)
    assert run(target, first, 25) == run(source, first, 25)
    for before, after in zip(kv.layers, handed_over(target, PROMPT).layers, strict=True):
        assert torch.equal(after.latent, before.latent) and torch.equal(after.rope, before.rope)
    for layer in range(3 if num_mtp == 0 else 4):  # the rows that decode wrote; drafts beyond them are provisional
        assert torch.equal(target.cache.read_rows(layer, 120), source.cache.read_rows(layer, 120))


def test_decode_on_injected_rows_equals_a_longer_prefill_to_the_bit(tiny) -> None:
    directory = tiny("glm5", index_topk=TOPK)
    whole, sender, target = (fp8_engine(directory, block_size=b) for b in (64, 64, 16))
    expected = prefill(whole.model, whole.cache, PROMPT, chunk=1)
    prefill(sender.model, sender.cache, PROMPT[:60], chunk=1)
    target.inject(handed_over(sender, PROMPT[:60]))
    for at in range(60, 100):
        hidden, _ = step(target.model, target.cache, at, PROMPT[at : at + 1])
        assert torch.equal(hidden[0], expected[at])
    for layer in range(3):
        assert torch.equal(whole.cache.read_rows(layer, 100), target.cache.read_rows(layer, 100))


def test_answer_depends_on_every_layers_codes_and_scales(tiny) -> None:
    directory = tiny("glm5", index_topk=TOPK)
    source = fp8_engine(directory)
    first = source.prefill(PROMPT, GREEDY)
    good = run(source, first, 20)
    for layer in range(3):
        for part in (slice(0, 512), slice(515, 528, 4)):  # sign bits of the codes; of the scales: the values turn round
            kv = handed_over(source, PROMPT)
            target = fp8_engine(directory)
            target.inject(kv)
            flat = target.cache.rows[layer].view(-1, 656)
            flat[:100, part] ^= 0x80
            assert run(target, first, 20) != good


def test_refeeding_leaves_transferred_rows_untouched(tiny) -> None:
    engine = fp8_engine(tiny("glm5", index_topk=TOPK), num_mtp=1)
    first = engine.prefill(PROMPT)
    engine.cache.rows[..., :512] ^= 0x80  # not what the engine would compute
    before = engine.cache.rows.clone()
    hidden, _ = step(engine.model, engine.cache, len(PROMPT) - 1, PROMPT[-1:], keep_rows=True)
    draft(engine.model, engine.cache, len(PROMPT) - 1, [first], hidden, 1, keep_rows=True)
    assert torch.equal(engine.cache.rows, before)


def test_the_decode_servers_receive_buffer_feeds_the_engine(tiny) -> None:
    directory = tiny("dsv32", index_topk=TOPK)
    source = fp8_engine(directory)
    first = source.prefill(PROMPT, GREEDY)
    layout = BufferLayout(model_profile(3, has_mtp=False, has_index=True), FP8_DS_MLA, ROOM)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    stage(handed_over(source, PROMPT), layout, buffer)
    target = fp8_engine(directory)
    host = Host(target, layout, buffer[None], engine_layers=3)
    warm_up(host, target.cache.scale_rule)
    assert target.cache.rows.any(), "the warm-up wrote nothing"
    prompt = host.prompt(Generate("r", len(PROMPT), PROMPT[-1], first, 20, GREEDY))
    assert prompt.layers[0].latent.data_ptr() == buffer.data_ptr(), "views, not copies"
    target.inject(prompt)
    assert run(target, first, 20) == run(source, first, 20)


# what is refused


def test_planes_of_the_other_dtype_are_refused_by_name(tiny) -> None:
    directory = tiny("glm5", index_topk=TOPK)
    bf16, fp8 = load_engine(directory, max_seq_len=ROOM), fp8_engine(directory)
    for engine in (bf16, fp8):
        engine.prefill(PROMPT)
    to_fp8 = r"layer 0: latent plane \[100, 512\] torch.bfloat16 for a cache of fp8_ds_mla rows; legal: .* 528 bytes"
    with pytest.raises(ValueError, match=to_fp8):
        fp8.inject(handed_over(bf16, PROMPT))
    to_bf16 = r"layer 0: latent plane \[100, 528\] torch.uint8 for a cache of bf16 rows; legal: .* 1024 bytes"
    with pytest.raises(ValueError, match=to_bf16):
        bf16.inject(handed_over(fp8, PROMPT))


def spoiled(kv: PromptKV, **planes: torch.Tensor) -> PromptKV:
    return replace(kv, layers=[*kv.layers[:-1], replace(kv.layers[-1], **planes)])


def test_planes_of_the_wrong_size_are_refused_by_name(tiny) -> None:
    engine = fp8_engine(tiny("glm5", index_topk=TOPK))
    engine.prefill(PROMPT)
    kv = handed_over(engine, PROMPT)
    with pytest.raises(ValueError, match=r"layer 2 latent: \[100, 512\] torch.uint8, expected \[100, 528\]"):
        engine.inject(spoiled(kv, latent=kv.layers[2].latent[:, :512]))
    with pytest.raises(ValueError, match=r"layer 2 rope: \[100, 64\] torch.float32, expected \[100, 64\] torch.bf"):
        engine.inject(spoiled(kv, rope=kv.layers[2].rope.float()))


@pytest.mark.parametrize("rule", ScaleRule)
def test_rows_of_the_other_scale_rule_are_refused_by_name(rule: ScaleRule, tiny) -> None:
    directory = tiny("glm5", index_topk=TOPK)
    source = fp8_engine(directory, rule)
    source.prefill(PROMPT)
    other = next(r for r in ScaleRule if r is not rule)
    with pytest.raises(ValueError, match=f"not of scale rule '{other.value}'; legal: .* scale rule '{rule.value}'"):
        fp8_engine(directory, other).inject(handed_over(source, PROMPT))


def test_a_dense_model_has_no_fp8_rows(tiny) -> None:
    with pytest.raises(ValueError, match="fp8_ds_mla is for sparse models; .* legal: bf16"):
        load_engine(tiny("dsv3"), kv_cache_dtype="fp8")


def test_unknown_names(tiny) -> None:
    with pytest.raises(ValueError, match="'int4'; legal: .*'fp8_ds_mla'"):
        load_engine(tiny("glm5"), kv_cache_dtype="int4")
    for dtype in ("fp8", "bf16"):
        with pytest.raises(ValueError, match="kv_scale_rule = 'rounded', legal: power_of_two, plain"):
            load_engine(tiny("glm5"), kv_cache_dtype=dtype, kv_scale_rule="rounded")


# the trained models


def questions(speaker: Speaker, recalls: int) -> Iterator[Golden]:
    """`recalls` questions about a conversation of some 600 tokens, and one answer known by heart."""
    rng, memory = random.Random("fp8 kv"), skills.Memory()
    told = skills.remember(rng, memory, 75)
    for _ in range(recalls):
        yield speaker.ask([told], skills.recall(rng, memory), thinking=False)
    yield speaker.ask([], skills.answer(rng), thinking=False)


@pytest.mark.parametrize(
    ("name", "dialect", "rule"), [("tiny-glm5", GLM, POWER_OF_TWO), ("tiny-dsv32", DEEPSEEK, PLAIN)]
)
def test_the_trained_models_still_answer(name: str, dialect: Dialect, rule: ScaleRule) -> None:
    """Contexts beyond index_topk; drafting on its own prefill, and without drafts on the planes of that."""
    directory = model_dir(name)
    drafting, plain = (fp8_engine(directory, rule, max_seq_len=1024, num_mtp=n) for n in (2, 0))
    speaker = Speaker(dialect, Tokenizer.from_file(str(directory / "tokenizer.json")))
    asked = list(questions(speaker, 2))
    assert [len(golden.prompt) > 500 for golden in asked] == [True, True, False]
    for golden in asked:
        first = drafting.prefill(golden.prompt, GREEDY)
        kv = handed_over(drafting, golden.prompt)
        plain.inject(replace(kv, layers=kv.layers[:3]))
        for engine in (drafting, plain):
            assert run(engine, first, len(golden.answer)) == golden.answer
