"""Strict reading of config.json: what is read, what is refused, by name."""

from pathlib import Path

import pytest

from tilert_ref.engine.config import ConfigError, load_config, parse_config
from tilert_ref.engine.make_tiny import ARCHS, make_tiny, tiny_config
from tilert_ref.engine.ref import load_engine

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_family_member_parses(arch: str) -> None:
    raw = tiny_config(arch)
    config = parse_config(raw)
    assert config.architecture == raw["architectures"][0]
    assert config.cache_width == 576
    assert config.qk_head_dim == raw["qk_nope_head_dim"] + 64
    assert (config.index_topk is not None) == (arch in ("dsv32", "glm5", "glm52"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_sink": 4}, "attention_sink"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method = 'gptq', implemented: .'fp8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size = None, implemented: ..128, 128"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "weight_block_size = .64, 64"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, "weight_block_size = .128"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme = 'static'"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt = 'e5m2'"),
        ({"quantization_config": FP8 | {"scale_fmt": "float"}}, "scale_fmt = 'float'"),
        ({"quantization_config": FP8 | {"store_dtype": "mxfp4"}}, "unknown key.s. store_dtype = 'mxfp4'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"scoring_func": "tanh"}, "tanh"),
        ({"topk_method": "hash"}, "hash"),
        ({"n_group": 3}, "n_group"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"qk_head_dim": 100}, "qk_head_dim"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ({"rope_interleave": False}, "rope_interleave"),
        # Said twice, and not the same: loaders differ in which one they believe.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, "rope_parameters .* contradicts"),
        ({"rope_parameters": {"rope_theta": 50000}, "rope_scaling": None}, "rope_parameters .* contradicts"),
        ({"rope_scaling": {"rope_theta": 7.0}}, "rope_scaling: rope_theta = 7.0, legal: .* as beside it"),
        (
            {"rope_parameters": {"rope_theta": 50000}, "rope_theta": None, "rope_scaling": {"rope_theta": 7.0}},
            "rope_scaling: rope_theta = 7.0, legal: 50000.0 as beside it",
        ),
        # Types are checked, not coerced: bool("false") is true.
        ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"eos_token_id": "497"}, "eos_token_id = '497'"),
        ({"eos_token_id": 497.0}, "eos_token_id"),
        ({"hidden_size": 256.9}, "hidden_size = 256.9"),
        ({"hidden_size": "abc"}, "hidden_size = 'abc'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8', legal: an object"),
        ({"torch_dtype": "float16"}, "torch_dtype"),
        # Routing that the experts can't satisfy.
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 4 reachable"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"topk_group": 0}, "topk_group"),
        ({"topk_group": -1}, "topk_group"),
        ({"n_group": 8, "topk_group": 4}, "needs two experts"),
    ],
)
def test_a_key_that_changes_the_maths_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(tiny_config("dsv3", **change))


@pytest.mark.parametrize(
    "key",
    [
        *("routed_scaling_factor", "num_experts_per_tok", "topk_group", "n_group", "norm_topk_prob"),
        *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
        *("q_lora_rank", "rope_theta"),
    ],
)
def test_a_missing_number_is_not_guessed(key: str) -> None:
    """Hugging Face's defaults differ between classes: 2.5 for V3's scaling factor, 1.8 for GLM-4.7's, 1 for V2's."""
    raw = tiny_config("dsv3")
    del raw[key]
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        parse_config(raw)


@pytest.mark.parametrize(("text", "named"), [("{", "not valid JSON"), ("[1]", "holds a JSON list")])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(file: str, text: str, named: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "dsv3")
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=f"{file}: {named}"):
        load_config(tmp_path)


def test_transformers_5_spelling_means_the_same() -> None:
    """transformers 5 nests RoPE under rope_parameters and lists the layers' kinds."""
    old = tiny_config("dsv3")
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta", "first_k_dense_replace")}
    scaling = {k: v for k, v in old["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": old["rope_theta"]}
    new["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    assert parse_config(new) == parse_config(old)


@pytest.mark.parametrize("more", [{}, {"scale_fmt": "ue8m0"}, {"modules_to_not_convert": ["lm_head"]}])
def test_block_fp8_is_read(more: dict) -> None:
    assert parse_config(tiny_config("dsv3", quantization_config=FP8 | more)).block_fp8
    assert not parse_config(tiny_config("dsv3")).block_fp8


def test_stop_ids_join_config_and_generation_config() -> None:
    assert parse_config(tiny_config("dsv3", eos_token_id=5), eos=(7, 5)).eos_token_ids == (5, 7)


@pytest.mark.parametrize("arch", ["dsv32", "glm5"])
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"index_topk": None}, "'index_topk' is missing: .* attends sparsely"),
        ({"index_n_heads": None}, "'index_n_heads' is missing or null; index_topk = 128"),
        ({"index_head_dim": None}, "'index_head_dim' is missing"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing or null"),
        ({"index_head_dim": 64}, "index_head_dim = 64 with qk_rope_head_dim = 64, implemented: 128"),
        ({"qk_rope_head_dim": 192, "qk_head_dim": None}, "index_head_dim = 128 with qk_rope_head_dim = 192"),
    ],
)
def test_an_indexer_that_cannot_be_reproduced_is_refused(arch: str, override: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(tiny_config(arch, **override))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"num_mtp": 4}, "num_mtp = 4"), ({"max_seq_len": 10**9}, "max_position_embeddings"), ({"max_seq_len": 1}, "2")],
)
def test_illegal_engine_options_are_refused(options: dict, named: str, tiny) -> None:
    with pytest.raises(ValueError, match=named):
        load_engine(tiny("dsv3"), **options)


def test_drafting_without_an_mtp_layer_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers = 0"):
        load_engine(tiny("kimi"), num_mtp=1)
