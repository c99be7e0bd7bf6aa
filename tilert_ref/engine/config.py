"""Model configuration, read strictly from a Hugging Face config.json.

One dataclass covers the family: DeepSeek-V2/V3/V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5 differ in about ten numbers
and switches. Every key of config.json is either read, required to hold a value that this engine implements, or known
not to change the maths; anything else is an error, because an ignored key is a wrong model that looks right.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilert_ref.model_files import ConfigError, present, read_config, read_json, shown

ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)

SPARSE_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
INDEX_HEAD_DIM = 128  # the width of an index key in vLLM's cache and on the wire
MAX_LAYERS = 1024  # ten times the deepest of the family: what is written down for each layer stays small
MAX_INTEGER = 2**31 - 1  # nothing here counts further; beyond 64 bits torch has errors that name no key

# What the published config.json files of an architecture leave out, because its reference code fixes it.
_V3_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_V2_ROUTING = {"scoring_func": "softmax", "topk_method": "greedy"}
ROUTING_DEFAULTS: dict[str, dict[str, str]] = dict.fromkeys(ARCHITECTURES, _V3_ROUTING) | {
    "DeepseekV2ForCausalLM": _V2_ROUTING
}

# Keys that say nothing about the maths of a forward pass.
IGNORED_KEYS = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "auto_map", "_name_or_path"),
        *("use_cache", "initializer_range", "bos_token_id", "pad_token_id", "head_dim", "num_key_value_heads"),
        *("attention_dropout", "aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"),
        *("ep_size", "pretraining_tp", "max_window_layers", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
    )
)

# Keys that would change the maths, with the values that leave it as implemented here.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "torch_dtype": ("bfloat16", None),
    "dtype": ("bfloat16", None),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True, None),
    "partial_rotary_factor": (1, 1.0, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "llama_4_scaling": (None,),
}

# quantization_config: the keys and values of block fp8.
BLOCK_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", None),
    "scale_fmt": ("ue8m0", None),
}


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
    # Per main layer: "full" has an indexer, "shared" attends to what the nearest lower full layer has chosen
    indexer_types: tuple[str, ...] | None
    index_share_for_mtp_iteration: bool  # drafts after the first attend to what the first has chosen
    # Block-fp8 weights: matrices with a scale NAME_scale_inv are e4m3 codes, the others are bf16
    block_fp8: bool

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

    def indexer_of(self, layer: int) -> int:
        """The layer whose indexer chooses for this layer of a sparse model: its own (MTP always), or a lower one's."""
        while layer < self.num_hidden_layers and self.indexer_types[layer] == "shared":
            layer -= 1
        return layer

    def has_indexer(self, layer: int) -> bool:
        return self.index_topk is not None and self.indexer_of(layer) == layer


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_REQUIRED = object()


class _Keys:
    """Hands out a mapping's values with their JSON types checked, and knows which keys were never asked for.

    A key without a default must be there: Hugging Face's own defaults differ between architectures and versions, so a
    missing number is not guessed. null counts as absent where there is a default.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where, self.read = values, where, set[str]()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise ConfigError(f"{self.where}: key {key!r} is missing")
        return default if value is None else value

    def integer(self, key: str, default: Any = _REQUIRED, at_least: int = 0, at_most: int = MAX_INTEGER) -> Any:
        value = self.get(key, default)
        if value is not default and (type(value) is not int or not at_least <= value <= at_most):
            legal = f"an integer from {at_least} to {at_most}"
            raise ConfigError(f"{self.where}: {key} = {shown(value)}, legal: {legal}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, above: float | None = None) -> float:
        """above: what it has to be greater than; None: 0 is legal."""
        value = self.get(key, default)
        low = 0 if above is None else above
        if type(value) not in (int, float) or not low <= value <= sys.float_info.max or value == above:
            legal = "of at least 0" if above is None else f"above {above}"
            raise ConfigError(f"{self.where}: {key} = {shown(value)}, legal: a finite number {legal}")
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where}: {key} = {shown(value)}, legal: true, false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} = {shown(value)}, legal: an object")
        return value

    def refuse_leftovers(self, ignored: frozenset[str] = frozenset()) -> None:
        for key, legal in NEUTRAL_VALUES.items():
            if key in self.values and key not in self.read and self.values[key] not in legal:
                raise ConfigError(f"{self.where}: {key} = {shown(self.values[key])}, implemented: {list(legal)}")
        unknown = sorted(set(self.values) - self.read - ignored - set(NEUTRAL_VALUES))
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            said = ", ".join(f"{_name(k)} = {shown(self.values[k])}" for k in unknown[:8])
            raise ConfigError(f"{self.where}: unknown key(s) {said}{more}. Each may change the model's maths.")


def _name(key: str) -> str:
    """A key of the file as an error shows it: any text can be one."""
    return key if key.isidentifier() and len(key) <= 80 else shown(key)


def parse_config(raw: Mapping[str, Any], where: str = "config.json", eos: tuple[int, ...] = ()) -> ModelConfig:
    """Raw config.json values -> ModelConfig. Raises ConfigError. `eos` adds generation_config.json's stop ids."""
    keys = _Keys(raw, where)
    layers = keys.integer("num_hidden_layers", at_least=1, at_most=MAX_LAYERS)
    config = ModelConfig(
        architecture=_architecture(keys),
        vocab_size=keys.integer("vocab_size", at_least=1),
        hidden_size=keys.integer("hidden_size", at_least=1),
        num_hidden_layers=layers,
        num_nextn_predict_layers=keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 0)),
        max_position_embeddings=keys.integer("max_position_embeddings", at_least=1),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(dict.fromkeys((*token_ids(keys.get("eos_token_id", None), where), *eos))),
        num_attention_heads=keys.integer("num_attention_heads", at_least=1),
        q_lora_rank=_nullable(keys, "q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank", at_least=1),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim", at_least=1),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim", at_least=2),
        v_head_dim=keys.integer("v_head_dim", at_least=1),
        **_rope(keys),
        intermediate_size=keys.integer("intermediate_size", at_least=1),
        **_experts(keys, layers),
        **_indexer(keys, layers),
        block_fp8=_block_fp8(keys),
    )
    if (qk := keys.integer("qk_head_dim", config.qk_head_dim)) != config.qk_head_dim:
        raise ConfigError(
            f"{where}: qk_head_dim = {qk}, but qk_nope_head_dim + qk_rope_head_dim = {config.qk_head_dim}"
        )
    keys.refuse_leftovers(IGNORED_KEYS)
    _check(config, where)
    return config


def load_config(model_dir: str | Path) -> ModelConfig:
    """Reads DIR/config.json and the stop ids of DIR/generation_config.json. Raises ConfigError, FileNotFoundError."""
    directory = Path(model_dir)
    raw, generation = read_config(directory), directory / "generation_config.json"
    eos = token_ids(read_json(generation).get("eos_token_id"), str(generation)) if present(generation) else ()
    return parse_config(raw, str(directory / "config.json"), eos)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """eos_token_id: absent, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{where}: eos_token_id = {shown(value)}, legal: a token id or a list of them")
    return tuple(ids)


def _architecture(keys: _Keys) -> str:
    got = keys.get("architectures")
    if not isinstance(got, list) or len(got) != 1 or got[0] not in ARCHITECTURES:
        raise ConfigError(f"{keys.where}: architectures = {shown(got)}, implemented: one of {', '.join(ARCHITECTURES)}")
    return got[0]


def _nullable(keys: _Keys, key: str) -> int | None:
    """A number whose null means something, so that leaving it out is not the same."""
    if key not in keys.values:
        raise ConfigError(f"{keys.where}: key {key!r} is missing; null is legal")
    return keys.integer(key, None, at_least=1)


def _experts(keys: _Keys, layers: int) -> dict[str, Any]:
    """The keys of the feed-forward part. Routing numbers have no defaults: each changes every token."""
    defaults = ROUTING_DEFAULTS[_architecture(keys)]
    experts = _nullable(keys, "n_routed_experts") or 0
    method = str(keys.get("topk_method", defaults["topk_method"]))
    ungrouped = 1 if method == "greedy" or not experts else _REQUIRED
    needed = _REQUIRED if experts else 0
    _check_router_dtype(keys)
    return {
        "moe_intermediate_size": keys.integer("moe_intermediate_size", needed),
        "first_k_dense_replace": _dense_layers(keys, layers) if experts else layers,
        "n_routed_experts": experts,
        "n_shared_experts": (_nullable(keys, "n_shared_experts") or 0)
        if experts
        else keys.integer("n_shared_experts", 0),
        "num_experts_per_tok": keys.integer("num_experts_per_tok", needed, at_least=1),
        "n_group": keys.integer("n_group", ungrouped, at_least=1),
        "topk_group": keys.integer("topk_group", ungrouped, at_least=1),
        "scoring_func": str(keys.get("scoring_func", defaults["scoring_func"])),
        "topk_method": method,
        "norm_topk_prob": keys.flag("norm_topk_prob", *(() if experts else (False,))),
        "routed_scaling_factor": keys.number("routed_scaling_factor", *(() if experts else (1.0,))),
    }


def _check_router_dtype(keys: _Keys) -> None:
    """moe_router_dtype: the GLM models route in fp32 whether their config says so or not, the others never do."""
    legal = (None, "float32") if _architecture(keys).startswith("Glm") else (None,)
    if (dtype := keys.get("moe_router_dtype", None)) not in legal:
        raise ConfigError(f"{keys.where}: moe_router_dtype = {shown(dtype)}, implemented: {list(legal)}")


def _indexer(keys: _Keys, layers: int) -> dict[str, Any]:
    topk = keys.integer("index_topk", None, at_least=1)
    return {
        "index_topk": topk,
        "index_n_heads": keys.integer("index_n_heads", None, at_least=1),
        "index_head_dim": keys.integer("index_head_dim", None, at_least=1),
        "indexer_rope_interleave": keys.flag("indexer_rope_interleave", False),
        "indexer_types": None if topk is None else _indexer_types(keys, layers),
        "index_share_for_mtp_iteration": topk is not None and keys.flag("index_share_for_mtp_iteration", False),
    }


def _indexer_types(keys: _Keys, layers: int) -> tuple[str, ...]:
    """Which layers have an indexer (IndexCache, arXiv 2603.12201), from the three spellings that there are.

    vLLM reads index_topk_pattern, else index_topk_freq and index_skip_topk_offset; transformers reads indexer_types
    first. A file that says it both ways must say the same.
    """
    frequency = keys.integer("index_topk_freq", 1, at_least=1)
    offset = keys.integer("index_skip_topk_offset", 2)
    pattern, listed = keys.get("index_topk_pattern", None), keys.get("indexer_types", None)
    schedule = tuple("shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(layers))
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set("FS"):
            raise ConfigError(f"{keys.where}: index_topk_pattern = {shown(pattern)}, legal: {layers} letters F or S")
        schedule = tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers or set(map(str, listed)) - {"full", "shared"}:
            raise ConfigError(
                f"{keys.where}: indexer_types = {shown(listed)}, legal: {layers} times 'full' or 'shared'"
            )
        vllms = pattern is not None or keys.get("index_topk_freq", None) is not None
        if vllms and schedule != tuple(listed):
            said = "index_topk_pattern or index_topk_freq and index_skip_topk_offset"
            raise ConfigError(f"{keys.where}: indexer_types = {listed} contradicts {said}: {list(schedule)}")
        schedule = tuple(listed)
    if schedule[0] != "full":
        raise ConfigError(f"{keys.where}: layer 0 shares an indexer and there is none below it; legal: layer 0 is full")
    return schedule


def _dense_layers(keys: _Keys, layers: int) -> int:
    """first_k_dense_replace, or the same fact spelled as a per-layer list (transformers 5: mlp_layer_types)."""
    kinds = keys.get("mlp_layer_types", None)
    if kinds is None:
        return keys.integer("first_k_dense_replace")
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        legal = f"a list of {layers}, 'dense' layers followed by 'sparse' ones"
        raise ConfigError(f"{keys.where}: mlp_layer_types = {shown(kinds)}, legal: {legal}")
    if keys.integer("first_k_dense_replace", dense) != dense:
        raise ConfigError(f"{keys.where}: first_k_dense_replace contradicts mlp_layer_types ({dense} dense layers)")
    return dense


def _rope(keys: _Keys) -> dict[str, Any]:
    """RoPE base and scaling; transformers 5 nests both under rope_parameters, older files keep them apart.

    A file that says it both ways must say the same: loaders differ in which one they believe.
    """
    nested, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    flat = _REQUIRED if keys.get("rope_theta", None) is None else keys.number("rope_theta", above=1)
    within = _Keys(nested, f"{keys.where}: rope_parameters") if nested else keys
    theta = within.number("rope_theta", flat, above=1)
    if (inner := scaling.get("rope_theta")) not in (None, theta):  # vLLM would rotate by that one
        raise ConfigError(f"{keys.where}: rope_scaling: rope_theta = {shown(inner)}, legal: {theta} as beside it")
    if not nested:
        return {"rope_theta": theta, "rope_scaling": _yarn(scaling, keys.where)}
    yarn = _yarn(nested, keys.where)
    if flat not in (_REQUIRED, theta) or (scaling and _yarn(scaling, keys.where) != yarn):
        raise ConfigError(
            f"{keys.where}: rope_parameters = {shown(nested)} contradicts rope_theta or rope_scaling beside it"
        )
    return {"rope_theta": theta, "rope_scaling": yarn}


def _yarn(scaling: Mapping[str, Any], where: str) -> YarnScaling | None:
    keys = _Keys(scaling, f"{where}: rope_scaling")
    keys.read.update({"rope_theta", "type"})
    kind = keys.get("rope_type", scaling.get("type") or "default")
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{keys.where}: type {shown(kind)}, implemented: 'yarn', 'default'")
    yarn = None
    if kind == "yarn":
        yarn = YarnScaling(
            factor=keys.number("factor", above=0),
            original_max_position_embeddings=keys.integer("original_max_position_embeddings", at_least=1),
            beta_fast=keys.number("beta_fast", 32, above=0),
            beta_slow=keys.number("beta_slow", 1, above=0),
            mscale=keys.number("mscale", 1.0),
            mscale_all_dim=keys.number("mscale_all_dim", 0.0),
        )
    keys.refuse_leftovers()
    return yarn


def _block_fp8(keys: _Keys) -> bool:
    """quantization_config: absent, or 128x128 block fp8 as DeepSeek and GLM publish it.

    scale_fmt and modules_to_not_convert change nothing here: scales are taken as fp32 values, and which modules are
    fp8 follows from the tensors (GLM-5-FP8 lists a name that no tensor has).
    """
    entry = keys.mapping("quantization_config")
    if not entry:
        return False
    where = f"{keys.where}: quantization_config"
    quantised = _Keys(entry, where)
    quantised.get("modules_to_not_convert", None)
    for key, legal in BLOCK_FP8.items():
        if (value := quantised.get(key, None)) not in legal:
            raise ConfigError(f"{where}: {key} = {shown(value)}, implemented: {list(legal)}")
    quantised.refuse_leftovers()
    return True


def _check(config: ModelConfig, where: str) -> None:
    def legal(key: str, *values: Any) -> None:
        if getattr(config, key) not in values:
            raise ConfigError(f"{where}: {key} = {shown(getattr(config, key))}, implemented: {list(values)}")

    legal("scoring_func", "sigmoid", "softmax")
    legal("topk_method", "noaux_tc", "greedy", "group_limited_greedy")
    legal("num_nextn_predict_layers", 0, 1)
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"{where}: qk_rope_head_dim = {config.qk_rope_head_dim}, rotary pairs need an even number")
    if config.n_routed_experts:
        _check_routing(config, where)
    _check_indexer(config, where)


def _check_indexer(config: ModelConfig, where: str) -> None:
    if config.index_topk is None:
        if config.architecture in SPARSE_ARCHITECTURES:
            raise ConfigError(f"{where}: key 'index_topk' is missing: {config.architecture} attends sparsely")
        return
    for key in ("index_n_heads", "index_head_dim", "q_lora_rank"):
        if getattr(config, key) is None:
            raise ConfigError(f"{where}: key {key!r} is missing or null; index_topk = {config.index_topk} needs it")
    if config.index_head_dim != INDEX_HEAD_DIM or config.qk_rope_head_dim > INDEX_HEAD_DIM:
        said = f"index_head_dim = {config.index_head_dim} with qk_rope_head_dim = {config.qk_rope_head_dim}"
        raise ConfigError(f"{where}: {said}, implemented: {INDEX_HEAD_DIM} and at most that")


def _check_routing(config: ModelConfig, where: str) -> None:
    experts, groups, chosen = config.n_routed_experts, config.n_group, config.topk_group
    said = f"{where}: n_routed_experts {experts}, n_group {groups}, topk_group {chosen}"
    if experts % groups or chosen > groups:
        raise ConfigError(f"{said}: groups must divide the experts, and topk_group must not exceed n_group")
    if groups > 1 and config.topk_method == "noaux_tc" and experts // groups < 2:
        raise ConfigError(f"{said}: a group's score is the sum of its two best, so it needs two experts")
    reachable = experts if config.topk_method == "greedy" else experts // groups * chosen
    if config.num_experts_per_tok > reachable:
        raise ConfigError(f"{said}: num_experts_per_tok {config.num_experts_per_tok} exceeds the {reachable} reachable")
