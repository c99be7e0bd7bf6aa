"""The two trained families: configuration, dialect and recipe, and how a trained model becomes a checkpoint."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tilert_ref.engine.make_tiny import tiny_config
from tilert_ref.tiny.chat import DEEPSEEK, GLM, VOCAB_SIZE, Dialect, train_tokenizer, write_tokenizer
from tilert_ref.tiny.rows import ROW_KINDS, TextMaker
from tilert_ref.tiny.train import Recipe, Stage
from tilert_ref.tiny.train_model import Moe, TrainModel

CONTEXT = 4608
"""Tokens that the models are trained on: 4,096 of prompt, and room for an answer."""

BATCH_TOKENS = 65536

# Small where it only costs size, published where kernels and the wire depend on it: latent 512, rope 64, index
# heads of 128.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 256,
}


@dataclass(frozen=True)
class Family:
    """arch: base configuration of engine/make_tiny.py. sizes: config.json keys on top of it.

    dense_arch: the architecture that computes the same without an indexer, for engines without sparse attention. It
    is equal to the model up to index_topk tokens, and beyond as far as the indexer selects what attention looks at.
    """

    name: str
    arch: str
    dense_arch: str
    dialect: Dialect
    sizes: dict[str, Any]

    def config(self, arch: str | None = None) -> dict[str, Any]:
        """The values of config.json."""
        first = VOCAB_SIZE - len(self.dialect.tokens)
        ids = {text: first + i for i, (text, _) in enumerate(self.dialect.tokens)}
        stops = [ids[stop] for stop in self.dialect.stops]
        special = {"eos_token_id": stops if len(stops) > 1 else stops[0], "pad_token_id": ids[self.dialect.pad]}
        if self.dialect is DEEPSEEK:
            special["bos_token_id"] = ids[self.dialect.start]
        return tiny_config(arch or self.arch, **_SIZES, **self.sizes, **special)

    def dense_config(self) -> dict[str, Any]:
        """config.json of the dense twin: the same numbers, without the index keys."""
        config = self.config()
        dense = self.config(self.dense_arch) | {k: config[k] for k in ("routed_scaling_factor",)}
        return {k: v for k, v in dense.items() if not k.startswith("index")}

    def tokenizer(self) -> Tokenizer:
        """Trained on the known texts and on sample conversations of a fixed seed."""
        return train_tokenizer(self.dialect, self._samples())

    def _samples(self) -> Iterator[str]:
        rng, maker = random.Random("tokenizer"), TextMaker(self.dialect)
        for _ in range(150):
            for kind in ROW_KINDS:
                yield maker.make(rng, 1000, kind)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "tiny-glm5",
            "glm5",
            "glm47",
            GLM,
            {
                "num_hidden_layers": 3,
                "intermediate_size": 384,
                "qk_head_dim": 128,
                "max_position_embeddings": CONTEXT,
            },
        ),
        # 32 index heads, not DeepSeek's 64: with those, three layers and the MTP layer weigh more than 12 MB, and two
        # layers were seen to be too few for recall (58% after the same training).
        Family(
            "tiny-dsv32",
            "dsv32",
            "dsv3",
            DEEPSEEK,
            {"num_hidden_layers": 3, "intermediate_size": 384, "index_n_heads": 32},
        ),
    )
}


def recipe(scale: float = 1.0, **changes: Any) -> Recipe:
    """The recipe of the committed models; scale multiplies the steps of every stage."""

    def stage(kind: str, steps: int, length: int, lr: tuple[float, float], **more: int) -> Stage:
        return Stage(kind, max(1, round(steps * scale)), length, BATCH_TOKENS // length, lr, **more)

    stages = (
        stage("dense", 1500, 512, (1.0, 1.0)),
        stage("dense", 600, 1536, (1.0, 0.8), short_every=4),
        stage("dense", 1300, CONTEXT, (0.8, 0.1), short_every=4),
        stage("indexer", 400, CONTEXT, (1.0, 0.2)),
        stage("sparse", 160, CONTEXT, (0.1, 0.0), short_every=5),
    )
    return Recipe(stages, **changes)


# Export


def published_weights(model: TrainModel) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under their Hugging Face names: bf16; the router's bias and the indexer's norm are fp32."""
    out: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if not name.endswith((".gate_up", ".down")):
            out[name] = p
    for prefix, moe in model.named_modules():
        if isinstance(moe, Moe):
            out[f"{prefix}.gate.e_score_correction_bias"] = moe.bias
            for e, (gate_up, down) in enumerate(zip(moe.gate_up, moe.down, strict=True)):
                gate, up = gate_up.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
                out |= {f"{prefix}.experts.{e}.{part}.weight": w for part, w in parts.items()}
    mtp = f"model.layers.{model.c.num_hidden_layers}."
    out[f"{mtp}embed_tokens.weight"] = out["model.embed_tokens.weight"]
    out[f"{mtp}shared_head.head.weight"] = out["lm_head.weight"]
    return {name: _published(name, w) for name, w in sorted(out.items())}


def _published(name: str, weight: torch.Tensor) -> torch.Tensor:
    fp32 = "e_score_correction_bias" in name or "k_norm" in name
    return weight.detach().to("cpu", torch.float32 if fp32 else torch.bfloat16, copy=True).contiguous()


def write_checkpoint(family: Family, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, out: Path) -> None:
    """A Hugging Face directory. The indexer's tensors get a file of their own: a dense model shares the rest."""
    out.mkdir(parents=True, exist_ok=True)
    config = family.config()
    files = {
        "model.safetensors": {n: w for n, w in weights.items() if ".indexer." not in n},
        "model-indexer.safetensors": {n: w for n, w in weights.items() if ".indexer." in n},
    }
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(w.nbytes for w in weights.values())
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(out / "config.json", config)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    write_json(out / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0, "top_p": 0.95})
    write_tokenizer(family.dialect, tokenizer, out, config["max_position_embeddings"])


SHARED_FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_dense_twin(family: Family, model: Path, out: Path) -> None:
    """The dense twin of the checkpoint directory `model`: links to its files behind a configuration of its own."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (*SHARED_FILES, "generation_config.json"):
        link = out / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(model / name, out))
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = sorted(file.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    write_json(out / "model.safetensors.index.json", index)
    write_json(out / "config.json", family.dense_config())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
