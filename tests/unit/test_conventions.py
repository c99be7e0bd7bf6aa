"""Conventions that two ends of ours could share and still be wrong: each is flipped here, and bytes or answers show it.

Prompts of the trained models, longer than their index_topk. The other end is transformers, in fp32: its latents, rotary
keys and index keys become planes by formulas written out here, and are handed to our decode or compared with what our
prefill writes. The flips are made in the running engine: a check that lets one pass fails.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine import cache as cache_module
from tilert_ref.engine import indexer
from tilert_ref.engine.api import LayerKV, PromptKV, SamplingParams
from tilert_ref.engine.checkpoint import StrictTensors
from tilert_ref.engine.decode import prefill
from tilert_ref.engine.numerics import Pointwise
from tilert_ref.engine.ref import load_engine
from tilert_ref.tiny import model_dir
from tilert_ref.tiny.chat import DEEPSEEK, GLM
from tilert_ref.tiny.golden import Golden, golden_prompts

DIALECTS = {"tiny-glm5": GLM, "tiny-dsv32": DEEPSEEK}  # index keys interleaved and half-split
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
ANSWERED = 48  # tokens of the answer, six codes looked up in the prompt; under a flip one of the first 26 is wrong
WRITTEN = 300  # tokens of the prompt whose written bytes are looked at
ROOM = 700
RULES = {"tiny-glm5": ScaleRule.POWER_OF_TWO, "tiny-dsv32": ScaleRule.PLAIN}

WEIGHTS, BIAS = "model.safetensors", "gate.e_score_correction_bias"
Flip = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Peer:
    """What transformers made of a golden prompt; the tensors have one row a token, a list one entry a layer."""

    name: str
    golden: Golden
    latents: list[torch.Tensor]  # [T, 512]
    ropes: list[torch.Tensor]  # [T, 64]
    keys: list[torch.Tensor]  # [T, 128]
    directory: Path  # the model in one file, where transformers finds all of it

    def planes(self) -> PromptKV:
        prompt = self.golden.prompt
        layers = [
            LayerKV(latent.bfloat16(), rope.bfloat16(), pages(keys))
            for latent, rope, keys in zip(self.latents, self.ropes, self.keys, strict=True)
        ]
        return PromptKV("r", len(prompt), prompt[-1], layers)


@pytest.fixture(scope="module", params=DIALECTS)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    transformers = pytest.importorskip("transformers", reason="the other end is transformers")
    source, joined = model_dir(request.param), tmp_path_factory.mktemp(request.param)
    tensors = {n: t for file in source.glob("*.safetensors") for n, t in load_file(file).items()}
    save_file(tensors, joined / WEIGHTS, metadata={"format": "pt"})
    (joined / "config.json").write_text((source / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(joined, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    golden = golden_prompts(DIALECTS[request.param], tokenizer, 4)[3]
    assert golden.kind == "recall" and len(golden.prompt) > 2 * model.config.index_topk
    with torch.no_grad():
        cache = model(torch.tensor([golden.prompt]), use_cache=True).past_key_values.layers
    keys = [layer.indexer_keys[0] for layer in cache]
    if model.config.model_type == "glm_moe_dsa":
        keys = [torch.cat((in_pairs(key[:, :64]), key[:, 64:]), dim=1) for key in keys]
    ropes = [in_pairs(layer.values[0, 0]) for layer in cache]
    return Peer(request.param, golden, [layer.keys[0, 0] for layer in cache], ropes, keys, joined)


def in_pairs(rotated: torch.Tensor) -> torch.Tensor:
    """transformers leaves interleaved pairs in another order than vLLM: all first values, then all second ones."""
    return rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


# The formulas of the wire


def power_of_two(amax: torch.Tensor, floor: float) -> torch.Tensor:
    """The smallest power of two that is no less than amax / 448 or the floor."""
    scales = [2.0 ** math.ceil(math.log2(max(value / 448, floor))) for value in amax.flatten().tolist()]
    return torch.tensor(scales).view_as(amax)


def pages(keys: torch.Tensor) -> torch.Tensor:
    """Index keys [T, 128] -> uint8 [P, 8448]: e4m3 codes, then a power-of-two scale a token (case K2)."""
    out = torch.zeros(-(-len(keys) // 64), 8448, dtype=torch.uint8)
    scales = power_of_two(keys.abs().amax(1), 1e-4 / 448)
    codes = (keys / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    for t, (code, scale) in enumerate(zip(codes, scales[:, None].view(torch.uint8), strict=True)):
        out[t // 64, t % 64 * 128 :][:128] = code
        out[t // 64, 8192 + t % 64 * 4 :][:4] = scale
    return out


def row_scales(latent: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """The four fp32 scales of each fp8_ds_mla row, [T, 4] (case K1)."""
    amax = latent.bfloat16().float().unflatten(1, (4, 128)).abs().amax(2)
    return amax / 448 if rule is ScaleRule.PLAIN else power_of_two(amax, 1e-4)


# The flips


def other_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the indexer alone, queries and keys (case K3)."""
    right = indexer.apply_rope

    def other(x: torch.Tensor, cos_sin: torch.Tensor, rule: Pointwise, *, interleaved: bool) -> torch.Tensor:
        return right(x, cos_sin, rule, interleaved=not interleaved)

    monkeypatch.setattr(indexer, "apply_rope", other)


def hadamard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries and keys, as in DeepSeek's own code: with themselves they agree, with the peer's keys they don't."""
    right, matrix = indexer.rotate, torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix = matrix.bfloat16() / 128**0.5
    monkeypatch.setattr(indexer, "rotate", lambda *args: right(*args) @ matrix)


def other_scale_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cache_module.quantize_fp8_ds_mla
    others = dict(zip(ScaleRule, reversed(ScaleRule), strict=True))

    def other(latent: torch.Tensor, rope: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
        return right(latent, rope, others[rule])

    monkeypatch.setattr(cache_module, "quantize_fp8_ds_mla", other)


def bf16_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StrictTensors.take

    def rounded(self: StrictTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = right(self, name, shape, dtype)
        return tensor.bfloat16() if name.endswith(BIAS) else tensor

    monkeypatch.setattr(StrictTensors, "take", rounded)


# What is seen of them


@pytest.mark.parametrize("flip", [None, other_pairing, hadamard])
def test_the_peers_planes_give_the_right_answer(peer: Peer, flip: Flip | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose queries aren't in the convention of the peer's keys looks up the wrong rows."""
    if flip:
        flip(monkeypatch)
    engine = load_engine(model_dir(peer.name), max_seq_len=ROOM)
    engine.inject(peer.planes())
    *steps, _ = engine.decode(peer.golden.answer[0], ANSWERED, GREEDY)
    answer = [token.id for tokens in steps for token in tokens]
    assert (answer == peer.golden.answer[:ANSWERED]) == (flip is None)


@pytest.mark.parametrize(
    ("flip", "wrong"),
    [
        (None, set()),
        (other_pairing, {"rotary codes"}),
        (hadamard, {"rotary codes", "other codes"}),
        (other_scale_rule, {"row scales"}),
    ],
)
def test_written_bytes_are_those_of_the_peers_values(
    peer: Peer, flip: Flip | None, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of equal bytes, the lowest of the layers: bf16 against fp32 moves some to a neighbour, a flip nearly all.

    Plain scales keep every bit of a tile's largest value: half of them are equal, where 99% of the powers of two are.
    """
    if flip:
        flip(monkeypatch)
    rule = RULES[peer.name]
    engine = load_engine(model_dir(peer.name), max_seq_len=ROOM, kv_cache_dtype="fp8", kv_scale_rule=rule)
    prefill(engine.model, engine.cache, peer.golden.prompt[:WRITTEN])
    shares = dict.fromkeys(("rotary codes", "other codes", "row scales"), 1.0)
    for layer, (latent, keys) in enumerate(zip(peer.latents, peer.keys, strict=True)):
        equal = engine.cache.index_blocks(layer).flatten(1)[: WRITTEN // 64] == pages(keys)[: WRITTEN // 64]
        codes = equal[:, :8192].unflatten(1, (64, 128)).float()
        scales = engine.cache.read_rows(layer, WRITTEN)[:, 512:528].view(torch.float32)
        own = codes[..., :64], codes[..., 64:], (scales == row_scales(latent, rule)[:WRITTEN]).float()
        for name, share in zip(shares, own, strict=True):
            shares[name] = min(shares[name], share.mean().item())
    assert {name for name, share in shares.items() if share < 0.25} == wrong
    assert {name for name, share in shares.items() if share < 0.4} == wrong, f"{shares}: one is neither right nor wrong"


@pytest.mark.parametrize("flip", [None, bf16_bias])
def test_a_bias_that_all_experts_share_changes_no_byte(
    flip: Flip | None, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case K4 (a): 7 more for every expert moves no choice, unless the bias is rounded to bf16, where 7.1 is 7.09."""
    tensors = {n: t + 7.0 if n.endswith(BIAS) else t for n, t in load_file(peer.directory / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((peer.directory / "config.json").read_text())
    if flip:
        flip(monkeypatch)
    rows = []
    for directory in (peer.directory, tmp_path):
        engine = load_engine(directory, max_seq_len=ROOM)
        prefill(engine.model, engine.cache, peer.golden.prompt[:WRITTEN])
        rows.append(engine.cache.rows)
    changed = (rows[0] != rows[1]).any(-1).sum().item()
    assert changed > 10 if flip else changed == 0
