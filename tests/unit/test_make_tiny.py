"""The tiny checkpoints: deterministic bytes, complete files, weights that HF transformers finds complete."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tilert_ref.engine.make_tiny import ARCHS, make_tiny, tiny_config, tiny_weights

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.mark.parametrize("arch", ["dsv3", "dsv32", "glm5"])
def test_same_seed_same_bytes(tmp_path: Path, arch: str) -> None:
    for name, seed in [("a", 3), ("b", 3), ("c", 4)]:
        make_tiny(tmp_path / name, arch, seed)
    first = digests(tmp_path / "a")
    assert set(first) == FILES
    assert digests(tmp_path / "b") == first
    assert digests(tmp_path / "c")["model.safetensors"] != first["model.safetensors"]


def test_streams_do_not_depend_on_the_machine() -> None:
    weights = tiny_weights(tiny_config("dsv3"))
    head = weights["model.layers.3.self_attn.o_proj.weight"]
    assert hashlib.sha256(head.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == "abdb6d2b0dfd7cd5"


def test_one_key_changes_only_the_tensors_it_shapes() -> None:
    base, changed = (tiny_weights(c) for c in (tiny_config("dsv3"), tiny_config("dsv3", v_head_dim=256)))
    differing = {n.split(".")[-2] for n in base if not torch.equal(base[n], changed[n])}
    assert differing == {"kv_b_proj", "o_proj"}


def test_unknown_arch_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown arch 'dsv9'; legal: dsv3"):
        tiny_config("dsv9")


def test_vocabulary_below_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size 256"):
        make_tiny(tmp_path, "dsv3", overrides={"vocab_size": 256})


@pytest.mark.parametrize("arch", ["dsv3", "glm5"])
def test_tokenizer_round_trip_and_special_ids(tmp_path: Path, arch: str) -> None:
    make_tiny(tmp_path, arch)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    text = "the heart of it: naïve ☕ 你好\n\t\x00"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("A").ids == [65]
    config = json.loads((tmp_path / "generation_config.json").read_text())
    stops = config["eos_token_id"] if arch == "glm5" else [config["eos_token_id"]]
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"] if arch == "glm5" else ["<｜end▁of▁sentence｜>"]
    assert [tokenizer.token_to_id(n) for n in names] == stops


def test_family_traits() -> None:
    dsv3, dsv32, glm5 = (tiny_config(a) for a in ("dsv3", "dsv32", "glm5"))
    assert dsv3["rope_scaling"]["type"] == "yarn" and (dsv3["n_group"], dsv3["topk_group"]) == (4, 2)
    assert "index_topk" not in dsv3 and "indexer_rope_interleave" not in dsv32
    assert glm5["indexer_rope_interleave"] is True and "rope_scaling" not in glm5
    assert (glm5["qk_nope_head_dim"], glm5["v_head_dim"], glm5["n_group"]) == (192, 256, 1)


def test_mtp_layer_carries_its_own_copies() -> None:
    weights = tiny_weights(tiny_config("dsv3"))
    assert torch.equal(weights["model.layers.3.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(weights["model.layers.3.shared_head.head.weight"], weights["lm_head.weight"])
    kv = [weights[f"model.layers.{i}.self_attn.kv_b_proj.weight"].float() for i in (2, 3)]
    assert 0 < (kv[0] - kv[1]).norm() / kv[0].norm() < 0.2, "the MTP layer is a noisy copy of the last main layer"
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("override", "absent", "present"),
    [
        ({"q_lora_rank": None}, "q_a_proj", "q_proj"),
        ({"n_shared_experts": 0}, "shared_experts", "experts.0."),
        ({"num_nextn_predict_layers": 0}, "eh_proj", "lm_head"),
        ({"topk_method": "greedy"}, "e_score_correction_bias", "gate.weight"),
    ],
)
def test_config_keys_shape_the_weights(override: dict, absent: str, present: str) -> None:
    names = list(tiny_weights(tiny_config("dsv3", **override)))
    assert not [n for n in names if absent in n]
    assert [n for n in names if present in n]


@pytest.mark.parametrize("arch", ARCHS)
def test_transformers_finds_the_checkpoint_complete(tmp_path: Path, arch: str) -> None:
    transformers = pytest.importorskip("transformers")
    make_tiny(tmp_path, arch)
    try:
        config = transformers.AutoConfig.from_pretrained(tmp_path)
    except ValueError as error:
        assert arch == "kimi", error  # published with remote code; transformers has no kimi_k2 of its own
        pytest.skip(f"transformers {transformers.__version__} has no kimi_k2")
    assert config.kv_lora_rank == 512
    model_class = getattr(transformers, config.architectures[0], None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {config.architectures[0]}")
    model, info = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    mtp = f"model.layers.{config.num_hidden_layers}."
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert [k for k in info["unexpected_keys"] if not k.startswith(mtp)] == []
    with torch.inference_mode():
        logits = model(torch.arange(100, 140)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.1
