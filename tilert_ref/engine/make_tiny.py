"""Tiny HF checkpoints of the real architectures: real kernel widths, a few million seeded weights, every file complete.

The widths that kernels and the wire depend on are the published ones (latent 512, rope 64, index head 128); hidden
size, layer and expert counts are small. Every tensor draws from its own stream, seeded by (seed, tensor name), so
changing one configuration key leaves the bytes of all other tensors as they were.
"""

import argparse
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tilert_ref.engine.config import parse_config
from tilert_ref.model_files import InputError

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]

VOCAB_SIZE = 512
SPECIAL_SLOTS = 16
FIRST_SPECIAL = VOCAB_SIZE - SPECIAL_SLOTS

# Ids follow the order here, from FIRST_SPECIAL on. Spellings are the published ones.
DEEPSEEK_SPECIALS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
GLM_SPECIALS = [
    "<|endoftext|>",
    "<|user|>",
    "<|observation|>",
    "<|assistant|>",
    "<|system|>",
    "[gMASK]",
    "<sop>",
    "<think>",
    "</think>",
    "/nothink",
]

DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + (m['content'] or '') + eos_token }}"
    "{% else %}{{ '<｜User｜>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<|assistant|></think>' + (m['content'] or '') }}"
    "{% elif m['role'] == 'tool' %}{{ '<|observation|>' + m['content'] }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}"
)

_DEEPSEEK_IDS = {"bos_token_id": FIRST_SPECIAL, "eos_token_id": FIRST_SPECIAL + 1}
_GLM_IDS = {"eos_token_id": [FIRST_SPECIAL, FIRST_SPECIAL + 1, FIRST_SPECIAL + 2], "pad_token_id": FIRST_SPECIAL}

# The keys of DeepSeek-V3's published config.json without the fp8 `quantization_config` and the remote-code `auto_map`.
_DSV3 = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    attention_bias=False,
    attention_dropout=0.0,
    **_DEEPSEEK_IDS,
    ep_size=1,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=256,
    initializer_range=0.02,
    intermediate_size=512,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=128,
    moe_layer_freq=1,
    n_group=4,
    n_routed_experts=8,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=4,
    num_experts_per_tok=2,
    num_hidden_layers=3,
    num_key_value_heads=4,
    num_nextn_predict_layers=1,
    q_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_scaling={
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    tie_word_embeddings=False,
    topk_group=2,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    use_cache=True,
    v_head_dim=128,
    vocab_size=VOCAB_SIZE,
)
_WITHOUT = object()  # marks a key that the variant's family does not have

# index_topk is far below the test contexts: a wrong indexer is invisible while every token is selected.
_INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 128}
_GLM = dict(
    **_GLM_IDS,
    bos_token_id=_WITHOUT,
    max_position_embeddings=202752,
    n_group=1,
    topk_group=1,
    qk_nope_head_dim=192,
    v_head_dim=256,
    rms_norm_eps=1e-5,
    rope_scaling=_WITHOUT,
)

_VARIANTS: dict[str, Config] = {
    "dsv3": {},
    "dsv32": dict(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", **_INDEXER),
    "glm5": _GLM
    | _INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "head_dim": 64,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "pretraining_tp": 1,
        "qk_head_dim": 256,
        "rope_interleave": True,
        "rope_theta": _WITHOUT,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    # GLM-5.2: GLM-5 with index sharing (published: every 4 layers from the third on, 78 layers) and another rope base.
    "glm52": _GLM
    | _INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "head_dim": 192,
        "index_n_heads": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 2,
        "index_topk_freq": 3,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "moe_router_dtype": "float32",
        "pretraining_tp": 1,
        "qk_head_dim": 256,
        "rope_interleave": True,
        "rope_theta": _WITHOUT,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
    # DeepSeek-V2-Lite: no query compression, softmax scoring, no correction bias, no MTP layer.
    "dsv2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": _WITHOUT,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
    },
    # GLM-4.7-Flash: GLM-5's attention widths without the indexer.
    "glm47": _GLM
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "partial_rotary_factor": 1.0,
        "routed_scaling_factor": 1.8,
        "rope_theta": 1000000,
        "scoring_func": _WITHOUT,
    },
    "kimi": {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": _DSV3["rope_scaling"] | {"factor": 32, "beta_fast": 1.0},
    },
}
ARCHS = tuple(_VARIANTS)


def tiny_config(arch: str, **overrides: Any) -> Config:
    """config.json of a tiny model of `arch` (one of ARCHS); overrides replace or add top-level keys.

    Raises ValueError on an unknown arch.
    """
    if arch not in _VARIANTS:
        raise InputError(f"unknown arch {arch!r}; legal: {', '.join(ARCHS)}")
    merged = _DSV3 | _VARIANTS[arch] | overrides
    return json.loads(json.dumps({k: v for k, v in merged.items() if v is not _WITHOUT}))


class _Draw:
    """Seeded tensors under one name prefix. numpy's bit streams do not depend on the CPU's vector width; torch's do.

    gain scales what the layer adds to the residual stream. like: prefix of another layer; the tensors become noisy
    copies of its tensors.
    """

    def __init__(self, seed: int, prefix: str = "", gain: float = 1.0, like: str | None = None) -> None:
        self.seed, self.prefix, self.gain, self.like = seed, prefix, gain, like
        self.out: Weights = {}

    def sub(self, prefix: str, gain: float | None = None, like: str | None = None) -> "_Draw":
        like = like if self.like is None else self.like + prefix
        child = _Draw(self.seed, self.prefix + prefix, self.gain if gain is None else gain, like)
        child.out = self.out
        return child

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """Standard normal, fp32."""
        own = self._stream(self.prefix + name, shape)
        if self.like is not None:
            own = (self._stream(self.like + name, shape) + 0.1 * own) / np.sqrt(1.01)
        return torch.from_numpy(own.astype(np.float32))

    def _stream(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(shape)

    def put(self, name: str, value: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.out[self.prefix + name] = value.to(dtype).contiguous()

    def linear(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        self.put(f"{name}.weight", self.normal(f"{name}.weight", n_out, n_in) * (gain / n_in**0.5))

    def norm(self, name: str, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.put(f"{name}.weight", 1 + 0.1 * self.normal(f"{name}.weight", width), dtype)


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Checkpoint tensors for any config of the family, HF names and order; bf16 except the fp32 router bias and k_norm.

    MTP layers (`num_nextn_predict_layers`) follow the main layers and carry their own copies of embedding and head, as
    the published checkpoints do.
    """
    draw, hidden, vocab = _Draw(seed), config["hidden_size"], config["vocab_size"]
    draw.put("model.embed_tokens.weight", draw.normal("model.embed_tokens.weight", vocab, hidden))
    draw.norm("model.norm", hidden)
    _head(draw, vocab, hidden)
    # The last layer speaks loudest and the MTP layer resembles it: one draft in four is right, measured on dsv3. With
    # independent layers it is one in twenty, and the accepting path is hardly ever taken.
    last = config["num_hidden_layers"] - 1
    for i in range(last + 1):
        _layer(draw.sub(f"model.layers.{i}.", gain=0.7 if i == last else 0.5), config, i)
    for i in range(last + 1, last + 1 + (config.get("num_nextn_predict_layers") or 0)):
        _layer(draw.sub(f"model.layers.{i}.", gain=0.7, like=f"model.layers.{last}."), config, i)
        _mtp(draw.sub(f"model.layers.{i}."), hidden)
    return draw.out


def _head(draw: _Draw, vocab: int, hidden: int) -> None:
    # Rows of unequal length spread the logits: with equal rows one position in twenty has its top two tied in bf16.
    # Taking away some of the embedding keeps a token from following itself, else most answers end in one token.
    gain = torch.exp(0.5 * draw.normal("lm_head.gain", vocab, 1))
    rows = gain * draw.normal("lm_head.weight", vocab, hidden) / hidden**0.5
    draw.put("lm_head.weight", rows - 0.02 * draw.normal("model.embed_tokens.weight", vocab, hidden))


def _mtp(draw: _Draw, hidden: int) -> None:
    draw.norm("enorm", hidden)
    draw.norm("hnorm", hidden)
    # Mostly the identity on the next token's embedding.
    mix = 0.1 * draw.normal("eh_proj.weight", hidden, 2 * hidden) / (2 * hidden) ** 0.5
    mix[:, :hidden] += torch.eye(hidden)
    draw.put("eh_proj.weight", mix)
    draw.norm("shared_head.norm", hidden)
    draw.out[draw.prefix + "embed_tokens.weight"] = draw.out["model.embed_tokens.weight"].clone()
    draw.out[draw.prefix + "shared_head.head.weight"] = draw.out["lm_head.weight"].clone()


def _layer(draw: _Draw, config: Mapping[str, Any], index: int) -> None:
    hidden = config["hidden_size"]
    draw.norm("input_layernorm", hidden)
    draw.norm("post_attention_layernorm", hidden)
    _attention(draw.sub("self_attn."), config)
    if config.get("index_topk") and parse_config(config).has_indexer(index):
        _indexer(draw.sub("self_attn.indexer."), config)
    if index < config["first_k_dense_replace"]:
        _mlp(draw.sub("mlp."), hidden, config["intermediate_size"])
    else:
        _moe(draw.sub("mlp."), config)


def _attention(draw: _Draw, config: Mapping[str, Any]) -> None:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    # Gain 2 makes the attention scores uneven; at 1 it averages all tokens and long prompts hardly matter.
    if (q_rank := config.get("q_lora_rank")) is None:
        draw.linear("q_proj", heads * (nope + rope), hidden, gain=2.0)
    else:
        draw.linear("q_a_proj", q_rank, hidden)
        draw.norm("q_a_layernorm", q_rank)
        draw.linear("q_b_proj", heads * (nope + rope), q_rank, gain=2.0)
    draw.linear("kv_a_proj_with_mqa", rank + rope, hidden)
    draw.norm("kv_a_layernorm", rank)
    draw.linear("kv_b_proj", heads * (nope + value), rank)
    draw.linear("o_proj", hidden, heads * value, draw.gain)


def _indexer(draw: _Draw, config: Mapping[str, Any]) -> None:
    heads, width, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    draw.linear("wq_b", heads * width, config["q_lora_rank"])
    draw.linear("wk", width, hidden)
    draw.norm("k_norm", width, torch.float32)
    draw.put("k_norm.bias", 0.1 * draw.normal("k_norm.bias", width), torch.float32)
    draw.linear("weights_proj", heads, hidden)


def _mlp(draw: _Draw, hidden: int, inner: int) -> None:
    draw.linear("gate_proj", inner, hidden)
    draw.linear("up_proj", inner, hidden)
    draw.linear("down_proj", hidden, inner, 0.5 * draw.gain)


def _moe(draw: _Draw, config: Mapping[str, Any]) -> None:
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    draw.linear("gate", experts, hidden)
    if config.get("topk_method", "noaux_tc") == "noaux_tc":
        name = "gate.e_score_correction_bias"
        draw.put(name, 0.1 * draw.normal(name, experts), torch.float32)
    for e in range(experts):
        _mlp(draw.sub(f"experts.{e}."), hidden, inner)
    if shared := config.get("n_shared_experts"):
        _mlp(draw.sub("shared_experts."), hidden, inner * shared)


def tiny_tokenizer(specials: list[str]) -> Tokenizer:
    """Byte-level BPE with 512 entries: id = byte value below 256, then 240 letter pairs, then 16 special tokens."""
    vocab = {char: i for i, char in enumerate(_byte_chars())}
    merges = list(_letter_pairs())
    specials = specials + [f"<|reserved_{i}|>" for i in range(SPECIAL_SLOTS - len(specials))]
    for piece in ["".join(m) for m in merges] + specials:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return tokenizer


def _byte_chars() -> list[str]:
    """The printable stand-in for each byte value, GPT-2's table (tokenizers' ByteLevel uses it too)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def _letter_pairs() -> Iterator[tuple[str, str]]:
    letters = "etaoinshrdlucmfw"
    return ((a, b) for a in letters for b in letters[:-1])


def _is_glm(config: Mapping[str, Any]) -> bool:
    return config["model_type"].startswith("glm")


def _tokenizer_config(config: Mapping[str, Any]) -> Config:
    glm = _is_glm(config)
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    if not glm:
        bos, eos, pad, *_ = DEEPSEEK_SPECIALS
        names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=GLM_TEMPLATE if glm else DEEPSEEK_TEMPLATE,
        **names,
    )


def _generation_config(config: Mapping[str, Any]) -> Config:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {k: config[k] for k in keys if config.get(k) is not None}
    return ids | {"do_sample": True, "temperature": 1.0, "top_p": 0.95}


def make_tiny(out: Path, arch: str, seed: int = 0, overrides: Mapping[str, Any] | None = None) -> None:
    """Writes a complete HF checkpoint of `arch` into directory `out`; same arguments, same bytes.

    Files: config.json, generation_config.json, model.safetensors, model.safetensors.index.json, tokenizer.json,
    tokenizer_config.json. Raises ValueError on an unknown arch or a vocabulary smaller than the tokenizer.
    """
    config = tiny_config(arch, **(overrides or {}))
    if config["vocab_size"] < VOCAB_SIZE:
        raise InputError(f"vocab_size {config['vocab_size']} is below the tokenizer's {VOCAB_SIZE} entries")
    out.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config, seed)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "model.safetensors.index.json", _index(weights))
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(config))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(config))
    specials = GLM_SPECIALS if _is_glm(config) else DEEPSEEK_SPECIALS
    (out / "tokenizer.json").write_text(tiny_tokenizer(specials).to_str(pretty=True), encoding="utf-8")


SLICES = {"glm5": "glm-5-fp8.json", "glm52": "glm-5.2-fp8.json", "dsv32": "deepseek-v3.2.json"}
"""Published models of which a few layers can be measured: name -> config.json as published (engine/published)."""


def make_slice(out: Path, name: str, layers: int) -> None:
    """Writes config.json of the first `layers` layers of a published model, in its real widths, into directory `out`.

    No weights: the engine makes them on the device (load_format dummy), and so does vLLM. Raises ValueError.
    """
    if name not in SLICES:
        raise InputError(f"no slice {name!r}; legal: {', '.join(SLICES)}")
    config = json.loads((Path(__file__).parent / "published" / SLICES[name]).read_text())
    if not 1 <= layers <= config["num_hidden_layers"]:
        raise InputError(f"{layers} layers of {name}; legal: 1 to {config['num_hidden_layers']}")
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config | {"num_hidden_layers": layers} | _cut_lists(config, layers))


def _cut_lists(config: Config, layers: int) -> Config:
    """Lists with an entry for each layer, as of the kinds of indexer."""
    whole = config["num_hidden_layers"]
    return {key: value[:layers] for key, value in config.items() if isinstance(value, list) and len(value) == whole}


def _index(weights: Weights) -> Config:
    total = sum(w.nbytes for w in weights.values())
    return {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(weights), "model.safetensors")}


def _write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _key_value(text: str) -> tuple[str, Any]:
    key, sep, value = text.partition("=")
    if not sep:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected KEY=JSON, for example index_topk=2048")
    return key, json.loads(value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilert-ref make-tiny", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write, created if missing")
    parser.add_argument("--arch", choices=ARCHS, default="dsv3", help="model family (default: %(default)s)")
    parser.add_argument(
        "--slice",
        choices=SLICES,
        help="instead: some layers of a published model in real widths, no weights",
    )
    parser.add_argument("--layers", type=int, default=4, help="with --slice (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: %(default)s)")
    parser.add_argument(
        "--set", type=_key_value, action="append", default=[], metavar="KEY=JSON", help="change a key of config.json"
    )
    args = parser.parse_args(argv)
    if args.slice:
        make_slice(args.out, args.slice, args.layers)
        print(f"{args.out}: {args.layers} layers of {args.slice}, to be loaded with dummy weights")
        return 0
    parse_config(tiny_config(args.arch, **dict(args.set)), "--set")  # numpy names no key
    make_tiny(args.out, args.arch, args.seed, dict(args.set))
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{args.out}: {args.arch}, {size / 2e6:.1f} million weights, seed {args.seed}")
    return 0
