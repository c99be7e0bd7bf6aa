"""GLM-5, GLM-5.2 and DeepSeek-V3.2 as published: configs build the model on the meta device, every tensor has a place.

No weights, no network. published/ holds config.json files recreated from values that others wrote down:

- glm-5-fp8.json: a key-by-key print of GLM-5.1's config.json (same architecture and sizes as GLM-5) beside a list of
  its 59,870 tensors with shapes; quantization_config as the users of GLM-5-FP8 describe it (ROCm/ATOM, pull request
  451), with the "indexers_proj" that names no tensor. Its modules_to_not_convert is not known to be complete.
- glm-5.2-fp8.json: prints of zai-org/GLM-5.2's config.json of June 2026, and of GLM-5.3's, which "differ only in
  quantization metadata and the recorded Transformers version" (NVIDIA-NeMo/Megatron-Bridge, pull request 6117);
  moe_router_dtype came with a later revision. 21 layers are full, 57 shared (ROCm/ATOM, pull request 1260).
  modules_to_not_convert is left out: its text is not known.
- deepseek-v3.2.json: DeepSeek-V3's published keys, with the index_* keys of V3.2-Exp and "scale_fmt": "ue8m0".

All are compared with the defaults of transformers' own classes.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import tilert_ref.engine
from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, profile
from tilert_ref.decode_server.options import resolve_profile
from tilert_ref.engine.block_fp8 import ActivationScale
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.checkpoint import CheckpointError, StrictTensors
from tilert_ref.engine.config import ModelConfig, load_config, parse_config
from tilert_ref.engine.linear import Fp8Matrix
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.weights import MlpWeights, MoeWeights, Weights, take_weights

Table = dict[str, tuple[torch.dtype, tuple[int, ...]]]

GLM_52_FULL = [0, 1, *range(2, 75, 4)]  # 21 of 78; protocol.md 8.5 has the same
PUBLISHED = Path(tilert_ref.engine.__file__).parent / "published"
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def raw(name: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


def bf16(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def tensor_table(c: dict[str, Any]) -> Table:
    """Every tensor of the checkpoint, written down from the published lists and not from the loader."""
    d, heads, rank, latent = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shared = {n for n, kind in enumerate(c.get("indexer_types", [])) if kind == "shared"}
    table: Table = {}

    def plain(name: str, *shape: int, dtype: torch.dtype = BF16) -> None:
        table[name] = (dtype, shape)

    def matrix(name: str, rows: int, columns: int) -> None:
        fp8 = "quantization_config" in c
        plain(name, rows, columns, dtype=FP8 if fp8 else BF16)
        if fp8:
            plain(f"{name}_scale_inv", -(-rows // 128), columns // 128, dtype=FP32)

    def swiglu(prefix: str, inner: int) -> None:
        matrix(f"{prefix}gate_proj.weight", inner, d)
        matrix(f"{prefix}up_proj.weight", inner, d)
        matrix(f"{prefix}down_proj.weight", d, inner)

    def indexer(p: str) -> None:
        matrix(f"{p}wq_b.weight", c["index_n_heads"] * 128, rank)
        matrix(f"{p}wk.weight", 128, d)
        norm = FP32 if c["model_type"] == "deepseek_v32" else BF16
        plain(f"{p}k_norm.weight", 128, dtype=norm)
        plain(f"{p}k_norm.bias", 128, dtype=norm)
        plain(f"{p}weights_proj.weight", c["index_n_heads"], d)

    def layer(n: int) -> None:
        p = f"model.layers.{n}."
        plain(f"{p}input_layernorm.weight", d)
        plain(f"{p}post_attention_layernorm.weight", d)
        matrix(f"{p}self_attn.q_a_proj.weight", rank, d)
        plain(f"{p}self_attn.q_a_layernorm.weight", rank)
        matrix(f"{p}self_attn.q_b_proj.weight", heads * (nope + rope), rank)
        matrix(f"{p}self_attn.kv_a_proj_with_mqa.weight", latent + rope, d)
        plain(f"{p}self_attn.kv_a_layernorm.weight", latent)
        matrix(f"{p}self_attn.kv_b_proj.weight", heads * (nope + v), latent)
        matrix(f"{p}self_attn.o_proj.weight", d, heads * v)
        if n not in shared:
            indexer(f"{p}self_attn.indexer.")
        if n < c["first_k_dense_replace"]:
            return swiglu(f"{p}mlp.", c["intermediate_size"])
        plain(f"{p}mlp.gate.weight", c["n_routed_experts"], d)
        plain(f"{p}mlp.gate.e_score_correction_bias", c["n_routed_experts"], dtype=FP32)
        swiglu(f"{p}mlp.shared_experts.", c["moe_intermediate_size"])
        for expert in range(c["n_routed_experts"]):
            swiglu(f"{p}mlp.experts.{expert}.", c["moe_intermediate_size"])

    plain("model.embed_tokens.weight", c["vocab_size"], d)
    plain("model.norm.weight", d)
    plain("lm_head.weight", c["vocab_size"], d)
    for n in range(c["num_hidden_layers"] + 1):
        layer(n)
    mtp = f"model.layers.{c['num_hidden_layers']}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        plain(f"{mtp}{name}.weight", d)
    plain(f"{mtp}eh_proj.weight", d, 2 * d)
    if c["model_type"] == "deepseek_v32":  # DeepSeek repeats both (README_WEIGHTS.md), GLM doesn't
        plain(f"{mtp}embed_tokens.weight", c["vocab_size"], d)
        plain(f"{mtp}shared_head.head.weight", c["vocab_size"], d)
    return table


def meta(table: Table) -> StrictTensors:
    def read(name: str) -> torch.Tensor:
        dtype, shape = table[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    return StrictTensors("published", table, read)


def build(config: ModelConfig, table: Table, rule: ActivationScale = ActivationScale.UE8M0) -> Weights:
    return take_weights(config, meta(table), with_mtp=True, device="meta", kernels=Kernels(fp8=rule))


def shallow(c: dict[str, Any], layers: int = 4) -> dict[str, Any]:
    """The same model with few layers, the first of them dense, for tests that take it apart."""
    return c | {"num_hidden_layers": layers}


@pytest.mark.parametrize(
    ("name", "quantised", "tensors", "parameters"),
    [
        # Both published for GLM-5.1: 59,870 tensors, 753,864,139,008 parameters.
        ("glm-5-fp8", False, 59_870, 753_864_139_008),
        # GLM-5.2 has 59,585 tensors; 59,044 are stored in fp8 with a scale each (Megatron-Bridge, pull request 6117).
        # GLM-5-FP8 is this with an indexer in every layer.
        ("glm-5.2-fp8", True, 59_585 + 59_044, None),
        # DeepSeek-V3's names (README_WEIGHTS.md) are 91,991; an indexer has 7 in each of 62 layers. No published count.
        ("deepseek-v3.2", True, 91_991 + 62 * 7, None),
    ],
)
def test_every_published_tensor_has_its_place(name: str, quantised: bool, tensors: int, parameters: int | None) -> None:
    config = raw(name) if quantised else bf16(raw(name))
    table = tensor_table(config)
    assert len(table) == tensors
    assert parameters in (None, sum(prod(shape) for _, shape in table.values()))
    weights = build(parse_config(config), table)  # raises on a missing, leftover or misshapen tensor
    indexers = [n for n, layer in enumerate(weights.layers) if layer.attention.indexer is not None]
    assert indexers == (GLM_52_FULL if name == "glm-5.2-fp8" else list(range(config["num_hidden_layers"])))
    kinds = [type(layer.mlp) for layer in weights.layers]
    dense = config["first_k_dense_replace"]
    assert kinds == [MlpWeights] * dense + [MoeWeights] * (config["num_hidden_layers"] - dense)
    last = weights.mtp.layer
    assert isinstance(last.mlp, MoeWeights)
    for w in (last.attention.q_b, last.attention.indexer.wq_b, last.mlp.gate_up, last.mlp.down, last.mlp.shared.down):
        assert isinstance(w, Fp8Matrix) == quantised
    gate_up = last.mlp.gate_up.codes if quantised else last.mlp.gate_up
    assert gate_up.shape == (256, 2 * 2048, config["hidden_size"]) and gate_up.is_meta
    assert last.attention.indexer.wk.dtype is BF16 and weights.mtp.eh_proj.dtype is BF16


THETA = {"glm-5-fp8": 1e6, "glm-5.2-fp8": 8e6, "deepseek-v3.2": 1e4}


@pytest.mark.parametrize("name", THETA)
def test_what_a_published_config_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw(name)))
    config = load_config(tmp_path)
    glm = name.startswith("glm")
    assert config.block_fp8 and config.index_topk == 2048
    assert config.indexer_rope_interleave is glm
    assert (config.n_group, config.topk_group) == ((1, 1) if glm else (8, 4))
    assert config.qk_head_dim == (256 if glm else 192)
    assert (config.rope_scaling is None, config.rope_theta) == (glm, THETA[name])
    assert config.softmax_scale == pytest.approx(1 / 16 if glm else 192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    layers = config.num_hidden_layers + 1
    cache = KVCache(config, layers, 4096, device="meta")
    assert cache.rows.is_meta and len(cache.rows) == layers
    assert len(cache.index) == (22 if name == "glm-5.2-fp8" else layers)


def test_glm_52s_indexers_are_those_of_the_wires_profile() -> None:
    config = parse_config(raw("glm-5.2-fp8"))
    assert [layer for layer in range(79) if config.has_indexer(layer)] == [*GLM_52_FULL, 78]
    assert [config.indexer_of(layer) for layer in (3, 5, 6, 9, 75, 77, 78)] == [2, 2, 6, 6, 74, 74, 78]
    assert resolve_profile("glm-5.2", config, with_mtp=True, no_mtp=False) == profile("glm5_2")
    layout = BufferLayout(profile("glm5_2"), FP8_DS_MLA, 4096)
    assert (layout.layout_version, layout.layer_slots) == (12, 79)
    assert config.index_share_for_mtp_iteration


def test_glm_52s_size() -> None:
    """Its index file's total_size: two bytes a parameter, two more for each of 76 layers' 256 correction biases."""
    sizes = [dtype.itemsize * prod(shape) for dtype, shape in tensor_table(bf16(raw("glm-5.2-fp8"))).values()]
    assert (len(sizes), sum(sizes)) == (59_585, 1_506_659_919_872)


@pytest.mark.parametrize("name", THETA)
def test_the_numbers_agree_with_transformers_own_defaults(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = raw(name)
    try:
        default = transformers.AutoConfig.for_model(config["model_type"]).to_dict()
    except ValueError:
        pytest.skip(f"this transformers has no {config['model_type']}")
    of_the_class = {"eos_token_id", "pad_token_id", "transformers_version", "rope_parameters", "architectures", "dtype"}
    shared = {key for key in config if default.get(key) is not None} - of_the_class
    # Of GLM-5.2: its context, and the class' two own views of head_dim and of a model without a schedule.
    shared -= {"max_position_embeddings", "head_dim", "indexer_types"} if name == "glm-5.2-fp8" else set()
    assert {"hidden_size", "q_lora_rank", "index_n_heads", "n_routed_experts", "vocab_size", "v_head_dim"} <= shared
    assert {key: config[key] for key in shared} == {key: default[key] for key in shared}


NAMES = [
    "self_attn.kv_b_proj.weight_scale_inv",
    "self_attn.indexer.wk.weight_scale_inv",
    "self_attn.indexer.k_norm.bias",
    "mlp.experts.255.down_proj.weight_scale_inv",
    "mlp.shared_experts.up_proj.weight",
    "mlp.gate.e_score_correction_bias",
]


@pytest.mark.parametrize("name", [f"model.layers.4.{n}" for n in [*NAMES, "eh_proj.weight", "shared_head.norm.weight"]])
def test_a_published_tensor_that_is_missing_is_named(name: str) -> None:
    config = shallow(raw("deepseek-v3.2"))
    table = tensor_table(config)
    del table[name]
    with pytest.raises(CheckpointError, match=name.removesuffix("_scale_inv").replace(".", r"\.")):
        build(parse_config(config), table)


@pytest.mark.parametrize("name", ["model.layers.4.eh_proj.weight_scale_inv", "model.layers.5.input_layernorm.weight"])
def test_a_tensor_too_many_is_named(name: str) -> None:
    config = shallow(raw("deepseek-v3.2"))
    table = tensor_table(config) | {name: (FP32, (56, 112))}
    with pytest.raises(CheckpointError, match=rf"1 weight\(s\) that this model has no place for: {name}"):
        build(parse_config(config), table)


def test_scales_without_a_quantization_config_are_refused() -> None:
    config = shallow(raw("glm-5-fp8"))
    with pytest.raises(CheckpointError, match="kv_b_proj.weight is torch.float8_e4m3fn, .* a quantization_config"):
        build(parse_config(bf16(config)), tensor_table(config))
