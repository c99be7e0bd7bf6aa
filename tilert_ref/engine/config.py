"""Model configuration, read strictly from a Hugging Face config.json.

One dataclass covers the family: DeepSeek-V2/V3/V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5 differ in about ten numbers
and switches. Every key of config.json is either read, required to hold a value that this engine implements, or known
not to change the maths; anything else is an error, because an ignored key is a wrong model that looks right.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)

# Architecture -> what its config.json may leave out (Hugging Face configuration classes' defaults that matter).
_V3_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_V2_ROUTING = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
ROUTING_DEFAULTS: dict[str, dict[str, Any]] = dict.fromkeys(ARCHITECTURES, _V3_ROUTING) | {
    "DeepseekV2ForCausalLM": _V2_ROUTING
}

# Keys that say nothing about the maths of a forward pass.
IGNORED_KEYS = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "_name_or_path"),
        *("use_cache", "initializer_range", "bos_token_id", "pad_token_id", "head_dim", "num_key_value_heads"),
        *("attention_dropout", "aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"),
        *("ep_size", "pretraining_tp", "max_window_layers", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
    )
)

# Keys that would change the maths, with the values that leave it as implemented here.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True, None),
    "partial_rotary_factor": (1, 1.0, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "moe_router_dtype": (None,),
    "llama_4_scaling": (None,),
    "index_topk_freq": (1, None),
    "index_skip_topk_offset": (2, None),
    "index_topk_pattern": (None,),
}


class ConfigError(ValueError):
    """A config.json that this engine can't reproduce; the text names the key, what was got and what is legal."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek uses it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one MLA model, under their Hugging Face names."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    # Multi-head latent attention
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_scaling: YarnScaling | None
    # Feed-forward: dense layers first, then mixture of experts
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    # DeepSeek sparse attention (lightning indexer); None: the model attends densely
    index_topk: int | None
    index_n_heads: int | None
    index_head_dim: int | None
    indexer_rope_interleave: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values a token leaves in the KV cache per layer: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(d), times YaRN's temperature squared (vLLM deepseek_v2.py, DeepseekV2MLAAttention)."""
        scale = self.qk_head_dim**-0.5
        yarn = self.rope_scaling
        return scale if yarn is None else scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2

    def is_moe(self, layer: int) -> bool:
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class _Keys:
    """Hands out a mapping's keys once and knows which were never asked for."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where, self.read = values, where, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str, kind: Callable[[Any], Any] = int) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.where}: key {key!r} is missing")
        return kind(value)

    def refuse_leftovers(self, ignored: frozenset[str] = frozenset()) -> None:
        for key, legal in NEUTRAL_VALUES.items():
            if key in self.values and key not in self.read and self.values[key] not in legal:
                raise ConfigError(f"{self.where}: {key} = {self.values[key]!r}, implemented: {list(legal)}")
        unknown = sorted(set(self.values) - self.read - ignored - set(NEUTRAL_VALUES))
        if unknown:
            shown = ", ".join(f"{k} = {self.values[k]!r}" for k in unknown)
            raise ConfigError(f"{self.where}: unknown key(s) {shown}. Each may change the model's maths.")


def parse_config(raw: Mapping[str, Any], where: str = "config.json", eos: tuple[int, ...] = ()) -> ModelConfig:
    """Raw config.json values -> ModelConfig. Raises ConfigError. `eos` adds generation_config.json's stop ids."""
    keys = _Keys(raw, where)
    arch = _architecture(keys)
    routing = ROUTING_DEFAULTS[arch]
    layers = keys.need("num_hidden_layers")
    config = ModelConfig(
        architecture=arch,
        vocab_size=keys.need("vocab_size"),
        hidden_size=keys.need("hidden_size"),
        num_hidden_layers=layers,
        num_nextn_predict_layers=int(keys.get("num_nextn_predict_layers", keys.get("num_mtp_layers", 0))),
        max_position_embeddings=keys.need("max_position_embeddings"),
        rms_norm_eps=keys.need("rms_norm_eps", float),
        tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys((*_ids(keys.get("eos_token_id")), *eos))),
        num_attention_heads=keys.need("num_attention_heads"),
        q_lora_rank=keys.get("q_lora_rank"),
        kv_lora_rank=keys.need("kv_lora_rank"),
        qk_nope_head_dim=keys.need("qk_nope_head_dim"),
        qk_rope_head_dim=keys.need("qk_rope_head_dim"),
        v_head_dim=keys.need("v_head_dim"),
        **_rope(keys),
        intermediate_size=keys.need("intermediate_size"),
        moe_intermediate_size=int(keys.get("moe_intermediate_size", 0)),
        first_k_dense_replace=_dense_layers(keys, layers),
        n_routed_experts=int(keys.get("n_routed_experts", 0)),
        n_shared_experts=int(keys.get("n_shared_experts", 0)),
        num_experts_per_tok=int(keys.get("num_experts_per_tok", 0)),
        n_group=int(keys.get("n_group", 1)),
        topk_group=int(keys.get("topk_group", 1)),
        scoring_func=str(keys.get("scoring_func", routing["scoring_func"])),
        topk_method=str(keys.get("topk_method", routing["topk_method"])),
        norm_topk_prob=bool(keys.get("norm_topk_prob", routing["norm_topk_prob"])),
        routed_scaling_factor=float(keys.get("routed_scaling_factor", 1.0)),
        index_topk=keys.get("index_topk"),
        index_n_heads=keys.get("index_n_heads"),
        index_head_dim=keys.get("index_head_dim"),
        indexer_rope_interleave=bool(keys.get("indexer_rope_interleave", False)),
    )
    if (qk := keys.get("qk_head_dim", config.qk_head_dim)) != config.qk_head_dim:
        raise ConfigError(
            f"{where}: qk_head_dim = {qk}, but qk_nope_head_dim + qk_rope_head_dim = {config.qk_head_dim}"
        )
    _refuse_quantised(keys)
    keys.refuse_leftovers(IGNORED_KEYS)
    _check(config, where)
    return config


def load_config(model_dir: str | Path) -> ModelConfig:
    """Reads DIR/config.json and the stop ids of DIR/generation_config.json. Raises ConfigError, FileNotFoundError."""
    directory = Path(model_dir)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: a Hugging Face checkpoint directory is expected")
    generation = directory / "generation_config.json"
    eos = _ids(json.loads(generation.read_text()).get("eos_token_id")) if generation.is_file() else ()
    return parse_config(json.loads(path.read_text()), str(path), eos)


def _architecture(keys: _Keys) -> str:
    got = list(keys.get("architectures", []))
    if len(got) != 1 or got[0] not in ARCHITECTURES:
        raise ConfigError(f"{keys.where}: architectures = {got}, implemented: one of {', '.join(ARCHITECTURES)}")
    return got[0]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _dense_layers(keys: _Keys, layers: int) -> int:
    """first_k_dense_replace, or the same fact spelled as a per-layer list (transformers 5: mlp_layer_types)."""
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return int(keys.get("first_k_dense_replace", 0))
    dense = kinds.count("dense")
    if list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(f"{keys.where}: mlp_layer_types must be dense layers followed by sparse ones, got {kinds}")
    if keys.get("first_k_dense_replace", dense) != dense:
        raise ConfigError(f"{keys.where}: first_k_dense_replace contradicts mlp_layer_types ({dense} dense layers)")
    return dense


def _rope(keys: _Keys) -> dict[str, Any]:
    """RoPE base and scaling; transformers 5 nests both under rope_parameters, older files keep them apart."""
    nested = keys.get("rope_parameters") or {}
    scaling = nested if nested else keys.get("rope_scaling")
    keys.read.update({"rope_scaling", "rope_theta"})
    theta = nested.get("rope_theta", keys.get("rope_theta", 10000.0))
    return {"rope_theta": float(theta), "rope_scaling": _yarn(scaling, keys.where) if scaling else None}


def _yarn(scaling: Mapping[str, Any], where: str) -> YarnScaling | None:
    keys = _Keys(scaling, f"{where}: rope_scaling")
    keys.read.update({"rope_theta", "type"})
    kind = keys.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        keys.refuse_leftovers()
        return None
    if kind != "yarn":
        raise ConfigError(f"{keys.where}: type {kind!r}, implemented: 'yarn', 'default'")
    yarn = YarnScaling(
        factor=keys.need("factor", float),
        original_max_position_embeddings=keys.need("original_max_position_embeddings"),
        beta_fast=float(keys.get("beta_fast", 32)),
        beta_slow=float(keys.get("beta_slow", 1)),
        mscale=float(keys.get("mscale", 1.0)),
        mscale_all_dim=float(keys.get("mscale_all_dim", 0.0)),
    )
    keys.refuse_leftovers()
    return yarn


def _refuse_quantised(keys: _Keys) -> None:
    quantised = keys.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", quantised)
        raise ConfigError(f"{keys.where}: quantization_config {method!r}: quantised weights come with the fp8 engine")


def _check(config: ModelConfig, where: str) -> None:
    def legal(key: str, *values: Any) -> None:
        if getattr(config, key) not in values:
            raise ConfigError(f"{where}: {key} = {getattr(config, key)!r}, implemented: {list(values)}")

    legal("scoring_func", "sigmoid", "softmax")
    legal("topk_method", "noaux_tc", "greedy", "group_limited_greedy")
    legal("num_nextn_predict_layers", 0, 1)
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"{where}: qk_rope_head_dim = {config.qk_rope_head_dim}, rotary pairs need an even number")
    if config.n_routed_experts % max(config.n_group, 1) or config.topk_group > config.n_group:
        raise ConfigError(
            f"{where}: n_routed_experts {config.n_routed_experts}, n_group {config.n_group}, topk_group "
            f"{config.topk_group}: groups must divide the experts and topk_group must not exceed n_group"
        )
