"""Block-fp8 checkpoints in the engine: the activation rules by literal numbers, the product against the same formula in
float64, what the loader makes of which matrix, and that the tiny models still answer.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tilert_ref.engine import model
from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.block_fp8 import (
    ActivationScale,
    BlockScale,
    dequantize_blocks,
    quantize_activations,
    quantize_blocks,
    recast_ue8m0,
)
from tilert_ref.engine.checkpoint import CheckpointError
from tilert_ref.engine.config import load_config
from tilert_ref.engine.linear import Fp8Matrix, concat_rows, linear, place, room_for
from tilert_ref.engine.make_fp8 import SCALE, make_fp8
from tilert_ref.engine.moe import experts, mlp
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.engine.weights import MlpWeights, MoeWeights, Weights, load_weights
from tilert_ref.generate import stream
from tilert_ref.tiny import model_dir, skills
from tilert_ref.tiny.chat import DEEPSEEK, GLM, Dialect
from tilert_ref.tiny.golden import Golden, Speaker

UE8M0, PLAIN, FLASHINFER = ActivationScale.UE8M0, ActivationScale.PLAIN, ActivationScale.FLASHINFER


def stack(matrices: list[Fp8Matrix]) -> Fp8Matrix:
    stacked = room_for(len(matrices), matrices[0])
    for index, matrix in enumerate(matrices):
        place(stacked, index, matrix)
    return stacked


def groups(*amax: float, rows: int = 1) -> torch.Tensor:
    """[rows, 128 * n]: a group per amax, which is its last value; the others are 0."""
    x = torch.zeros(rows, len(amax), 128)
    x[..., -1] = torch.tensor(amax)
    return x.flatten(1)


# The rules


def test_activation_scales_literal() -> None:
    x = groups(448.0, 450.0, 3.5, 1.0, 1e-9, 0.0)
    plain = [1.0, 1.0044642686843872, 0.0078125, 0.0022321429569274187, 2.2321428559679557e-12, 2.2321428288629014e-13]
    assert quantize_activations(x, PLAIN)[1].tolist() == [plain]
    power = [1.0, 2.0, 2**-7, 2**-8, 2**-33, 2**-33]  # 1e-10 lies between 2^-34 and 2^-33
    assert quantize_activations(x, UE8M0)[1].tolist() == [power]
    assert quantize_activations(x, FLASHINFER)[1][0, :4].tolist() == [
        1.0,
        1 / torch.tensor(448 / 450.0),
        2**-7,
        plain[3],
    ]
    assert quantize_activations(x, FLASHINFER)[1][0, 5] == 1.0


def test_activation_codes_literal() -> None:
    """amax 3: 0.02 is 2.98 of 448 under the plain scale (code 3) and 2.56 of 384 under the power of two, 2^-7 (2.5)."""
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([3.0, -3.0, 0.02])
    for rule, expected in ((PLAIN, [448.0, -448.0, 3.0]), (UE8M0, [384.0, -384.0, 2.5]), (FLASHINFER, [448, -448, 3])):
        codes, _ = quantize_activations(x, rule)
        assert (codes.shape, codes.dtype) == ((1, 1, 128), torch.float8_e4m3fn)
        assert codes[0, 0, :4].float().tolist() == [*expected, 0.0]


def test_flashinfer_takes_few_tokens_only() -> None:
    few, many = groups(1.0, rows=31), groups(1.0, rows=32)
    assert quantize_activations(few, FLASHINFER)[1][0].tolist() == [0.0022321429569274187]
    assert quantize_activations(many, FLASHINFER)[1][0].tolist() == [2**-8]
    assert (FLASHINFER.experts, FLASHINFER.recasts_weights) == (UE8M0, True)
    assert (PLAIN.experts, PLAIN.recasts_weights) == (PLAIN, False)


def test_activations_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="activations of width 130, legal: multiples of 128"):
        quantize_activations(torch.ones(1, 130), PLAIN)


def test_recast_literal() -> None:
    """0.75 * 448 under scale 0.75 becomes scale 1; 336 and 6.75 are halfway between two codes and go to the even."""
    codes = torch.tensor([[448.0, 9.0]]).to(torch.float8_e4m3fn)
    new, scales = recast_ue8m0(codes, torch.tensor([[0.75]]))
    assert (scales.tolist(), new.float().tolist()) == ([[1.0]], [[320.0, 7.0]])


def test_recast_keeps_weights_whose_scales_are_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.ldexp(
        torch.randn(300, 260, generator=generator), torch.randint(-8, 3, (300, 260), generator=generator)
    )
    codes, scales = quantize_blocks(weight, BlockScale.UE8M0)
    assert dequantize_blocks(*recast_ue8m0(codes, scales)).equal(dequantize_blocks(codes, scales))


# The product


def random_matrix(rows: int, columns: int, rule: ActivationScale, seed: int = 0) -> Fp8Matrix:
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-6, 1, (rows, columns), generator=generator)
    weight = torch.ldexp(torch.randn(rows, columns, generator=generator), octaves)
    weight[: rows // 2] *= 30  # blocks of different scale
    scale = BlockScale.UE8M0 if rule.recasts_weights else BlockScale.PLAIN
    return Fp8Matrix(*quantize_blocks(weight, scale), rule)


def activations(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.logspace(-2, 2, rows)[:, None]).bfloat16()


def expected_product(x: torch.Tensor, w: Fp8Matrix, rule: ActivationScale) -> torch.Tensor:
    """The formula with numbers of its own: scales element by element, one float64 product of dequantised matrices."""
    amax = x.float().view(len(x), -1, 128).abs().amax(-1).double()
    scales = (amax.clamp_min(1e-10) / 448).float().double()
    if rule is UE8M0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    wide = scales.repeat_interleave(128, dim=1)  # [T, K]
    a = (x.double() / wide).float().to(torch.float8_e4m3fn).double() * wide
    rows, columns = w.codes.shape
    w_scales = torch.empty(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for b in range(columns // 128):
            w_scales[i, b * 128 : (b + 1) * 128] = w.scales[i // 128, b]
    return a @ (w.codes.double() * w_scales).T


@pytest.mark.parametrize("rule", [UE8M0, PLAIN])
def test_product_equals_the_formula_in_float64(rule: ActivationScale, capsys: pytest.CaptureFixture[str]) -> None:
    """576 rows: the last block of scales covers 64."""
    w, x = random_matrix(576, 640, rule), activations(60, 640)
    got, expected = linear(x, w), expected_product(x, w, rule)
    assert got.dtype is torch.bfloat16
    equal = (got == expected.bfloat16()).float().mean().item()
    with capsys.disabled():
        print(f"\nfp8 product, {rule.value}: {equal:.4%} of {got.numel()} bf16 values equal float64's")
    assert equal >= 0.998
    # What differs is one bf16 step, except where the sum cancels: there fp32's own error is larger than the value.
    scale = x.float().abs().amax() * dequantize_blocks(w.codes, w.scales).abs().amax()
    assert ((got.double() - expected).abs() <= expected.abs() * 2**-7 + float(scale) * 2**-20).all()


def test_a_product_is_a_rounded_one() -> None:
    """Against the bf16 product of the unrounded activations it is off by percents: nothing is skipped."""
    w, x = random_matrix(256, 256, UE8M0), activations(8, 256)
    exact = x.double() @ dequantize_blocks(w.codes, w.scales).double().T
    error = (linear(x, w).double() - exact).norm() / exact.norm()
    assert 0.005 < float(error) < 0.05


@pytest.mark.parametrize("rule", [UE8M0, PLAIN])
def test_a_token_does_not_depend_on_the_others(rule: ActivationScale) -> None:
    w, x = random_matrix(192, 384, rule), activations(40, 384)
    whole = linear(x, w)
    assert all(linear(x[t : t + 1], w).equal(whole[t : t + 1]) for t in range(40))


def test_dropped_or_transposed_scales_change_the_product() -> None:
    w, x = random_matrix(256, 256, PLAIN), activations(4, 256)
    assert not w.scales.equal(w.scales.T) and not w.scales.eq(1).any()
    for scales in (torch.ones_like(w.scales), w.scales.T.contiguous(), w.scales.flip(0)):
        wrong = linear(x, Fp8Matrix(w.codes, scales, PLAIN))
        assert (wrong == linear(x, w)).float().mean() < 0.05


def test_matrices_above_each_other_multiply_as_one() -> None:
    gate, up, x = random_matrix(256, 256, UE8M0), random_matrix(192, 256, UE8M0, seed=5), activations(3, 256)
    assert linear(x, concat_rows([gate, up])).equal(torch.cat((linear(x, gate), linear(x, up)), dim=1))
    assert linear(x, stack([gate, random_matrix(256, 256, UE8M0, 6)])[0]).equal(linear(x, gate))
    with pytest.raises(ValueError, match=r"rows \[192, 256\], legal: multiples of 128"):
        concat_rows([up, gate])
    for join in (concat_rows, stack):
        with pytest.raises(ValueError, match="some are fp8 and some are not"):
            join([gate, torch.zeros(256, 256)])


# Experts


def test_experts_equal_the_formula() -> None:
    """Each expert written out: rounded gate and up, rounded silu, the routing weight before the one rounding."""
    count, width, inner, tokens = 3, 256, 128, 9
    gate_up = stack([random_matrix(2 * inner, width, UE8M0, seed=10 + e) for e in range(count)])
    down = stack([random_matrix(width, inner, UE8M0, seed=20 + e) for e in range(count)])
    x = activations(tokens, width)
    ids = torch.tensor([[t % 3, (t + 1 + t // 5) % 3] for t in range(tokens)])
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(2))
    w = MoeWeights(gate=torch.empty(0), bias=None, gate_up=gate_up, down=down, shared=None)
    got = experts(w, x, weights, ids, Kernels())
    for t in range(tokens):
        outputs = []
        for slot in range(2):
            e = int(ids[t, slot])
            gate, up = linear(x[t : t + 1], gate_up[e]).chunk(2, dim=1)
            hidden = F.silu(gate.float()).bfloat16() * up
            out = expected_product(hidden, down[e], UE8M0).float() * weights[t, slot]
            outputs.append(out.bfloat16().float())
        assert ((got[t] == sum(outputs).bfloat16()[0]).float().mean()) > 0.99


def test_a_shared_expert_is_two_linear_layers() -> None:
    w = MlpWeights(random_matrix(256, 256, UE8M0), random_matrix(256, 128, UE8M0, seed=4))
    x = activations(5, 256)
    gate, up = linear(x, w.gate_up).chunk(2, dim=1)
    assert mlp(w, x).equal(linear(F.silu(gate) * up, w.down))


# Loading


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny-glm5 with plain scales, tiny-dsv32 with powers of two, as their families are published."""
    made = {name: tmp_path_factory.mktemp("fp8") / name for name in ("tiny-glm5", "tiny-dsv32")}
    for name, out in made.items():
        make_fp8(model_dir(name), out)
    return made


def load(directory: Path, rule: ActivationScale = UE8M0) -> Weights:
    return load_weights(load_config(directory), directory, with_mtp=True, kernels=Kernels(fp8=rule))


def stored(directory: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """codes and scales of a matrix of layer 1, as the files have them."""
    tensors = load_file(directory / "model.safetensors") | load_file(directory / "model-indexer.safetensors")
    return tensors[f"model.layers.1.{name}.weight"], tensors[f"model.layers.1.{name}.weight{SCALE}"]


def same(w: object, codes: torch.Tensor, scales: torch.Tensor) -> bool:
    assert isinstance(w, Fp8Matrix)
    return w.codes.view(torch.uint8).equal(codes.view(torch.uint8)) and w.scales.equal(scales)


def test_linear_layers_are_recast_and_experts_are_not(fp8: dict[str, Path]) -> None:
    layer = load(fp8["tiny-glm5"]).layers[1]
    o, down = stored(fp8["tiny-glm5"], "self_attn.o_proj"), stored(fp8["tiny-glm5"], "mlp.experts.3.down_proj")
    assert same(layer.attention.o, *recast_ue8m0(*o)) and not same(layer.attention.o, *o)
    assert bool((torch.frexp(layer.attention.o.scales).mantissa == 0.5).all())
    assert same(layer.mlp.down[3], *down) and layer.mlp.down.rule is UE8M0
    shared = stored(fp8["tiny-glm5"], "mlp.shared_experts.down_proj")
    assert same(layer.mlp.shared.down, *recast_ue8m0(*shared))
    layer = load(fp8["tiny-glm5"], FLASHINFER).layers[1]
    rules = [w.rule for w in (layer.attention.o, layer.mlp.shared.gate_up, layer.mlp.gate_up, layer.mlp.down)]
    assert rules == [FLASHINFER, FLASHINFER, UE8M0, UE8M0]


@pytest.mark.parametrize("name", ["tiny-glm5", "tiny-dsv32"])
def test_without_deep_gemm_everything_is_as_stored(name: str, fp8: dict[str, Path]) -> None:
    layer = load(fp8[name], PLAIN).layers[1]
    for w, tensor in (
        (layer.attention.q_a, "self_attn.q_a_proj"),
        (layer.attention.q_b, "self_attn.q_b_proj"),
        (layer.attention.kv_a, "self_attn.kv_a_proj_with_mqa"),
        (layer.attention.kv_b, "self_attn.kv_b_proj"),
        (layer.attention.o, "self_attn.o_proj"),
        (layer.attention.indexer.wq_b, "self_attn.indexer.wq_b"),
        (layer.mlp.shared.down, "mlp.shared_experts.down_proj"),
        (layer.mlp.down[7], "mlp.experts.7.down_proj"),
    ):
        assert same(w, *stored(fp8[name], tensor)) and w.rule is PLAIN
    gate, up = (stored(fp8[name], f"mlp.experts.2.{part}_proj") for part in ("gate", "up"))
    assert same(layer.mlp.gate_up[2], *(torch.cat(pair) for pair in zip(gate, up, strict=True)))


def test_recasting_scales_that_are_powers_of_two_changes_no_weight(fp8: dict[str, Path]) -> None:
    attention = load(fp8["tiny-dsv32"]).layers[1].attention
    for w, name in ((attention.q_b, "self_attn.q_b_proj"), (attention.indexer.wq_b, "self_attn.indexer.wq_b")):
        assert w.dequantized(torch.float32).equal(dequantize_blocks(*stored(fp8["tiny-dsv32"], name)))


@pytest.mark.parametrize("rule", [UE8M0, PLAIN])
def test_what_vllm_takes_back_to_bf16(rule: ActivationScale, fp8: dict[str, Path]) -> None:
    """W_UK and W_UV from kv_b as the linear layer has it, recast or not; the indexer's wk from the file's scales."""
    attention = load(fp8["tiny-glm5"], rule).layers[1].attention
    assert attention.indexer.wk.equal(dequantize_blocks(*stored(fp8["tiny-glm5"], "self_attn.indexer.wk")).bfloat16())
    codes, scales = stored(fp8["tiny-glm5"], "self_attn.kv_b_proj")
    kv_b = dequantize_blocks(*(recast_ue8m0(codes, scales) if rule is UE8M0 else (codes, scales))).bfloat16()
    w_uk, w_uv = kv_b.view(4, 128, 512).split(64, dim=1)
    assert attention.w_uk.equal(w_uk) and attention.w_uv.equal(w_uv.transpose(1, 2))
    assert attention.w_uk.dtype is torch.bfloat16


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"
DOWN = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(8)]
UP = "model.layers.0.mlp.up_proj.weight"
EH_PROJ = "model.layers.3.eh_proj.weight"
Edit = Callable[[dict[str, torch.Tensor]], object]


def wide(tensors: dict[str, torch.Tensor], name: str) -> None:
    """A matrix as bf16, without its scale."""
    tensors[name] = dequantize_blocks(tensors[name], tensors.pop(name + SCALE)).bfloat16()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(O_PROJ + SCALE), f"{O_PROJ} is torch.float8_e4m3fn, .* needs a scale {O_PROJ}{SCALE}"),
        (lambda t: t.update({O_PROJ + SCALE: torch.ones(2, 1)}), rf"{O_PROJ}{SCALE} has shape \[2, 1\], not \[1, 2\]"),
        (lambda t: t.update({O_PROJ: t[O_PROJ].bfloat16()}), f"{O_PROJ} is torch.bfloat16, legal: torch.float8_e4m3fn"),
        (lambda t: t.update({O_PROJ + SCALE: t[O_PROJ + SCALE].half()}), f"{O_PROJ}{SCALE} is torch.float16"),
        (lambda t: t.pop(O_PROJ), rf"{O_PROJ} \[128, 256\] is missing"),
        (lambda t: t.update({EH_PROJ + SCALE: torch.ones(1, 2)}), f"no place for: {EH_PROJ}{SCALE}"),
        (lambda t: t.update({EH_PROJ: t[EH_PROJ].to(torch.float8_e4m3fn)}), f"{EH_PROJ} is torch.float8_e4m3fn"),
        (lambda t: wide(t, UP), "gate_proj and up_proj, multiplied as one: some are fp8 and some are not"),
        (lambda t: [wide(t, n) for n in DOWN], r"experts.\*: of gate_up and down one is fp8 and one is not"),
        (lambda t: t.pop(EXPERT), rf"model: weight {EXPERT} \[128, 128\] is missing"),
        (lambda t: wide(t, EXPERT), r"model.layers.1.mlp.experts.\*: some are fp8 and some are not"),
    ],
)
def test_what_does_not_fit_is_named(edit: Edit, named: str, fp8: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(fp8["tiny-glm5"], tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    tensors |= load_file(copy / "model-indexer.safetensors")
    save_file(tensors, copy / "model.safetensors")
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=named):
        load(copy)


def test_some_linear_layers_may_stay_bf16(fp8: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(fp8["tiny-glm5"], tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors") | load_file(copy / "model-indexer.safetensors")
    wide(tensors, O_PROJ)
    save_file(tensors, copy / "model.safetensors")
    (copy / "model.safetensors.index.json").unlink()
    attention = load(copy).layers[0].attention
    assert attention.o.dtype is torch.bfloat16 and isinstance(attention.q_b, Fp8Matrix)


def test_without_the_config_entry_fp8_weights_are_refused(fp8: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(fp8["tiny-dsv32"], tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is torch.float8_e4m3fn, .* and a quantization_config"):
        load(copy)


# The models answer


def questions(speaker: Speaker, recalls: int) -> list[Golden]:
    """Recalls over a conversation of some 500 tokens, and one answer known by heart."""
    rng, memory = random.Random("engine/fp8"), skills.Memory()
    told = skills.remember(rng, memory, 60)
    asked = [speaker.ask([told], skills.recall(rng, memory), thinking=False) for _ in range(recalls)]
    return [*asked, speaker.ask([], skills.answer(rng), thinking=False)]


def said(engine: RefEngine, prompt: list[int], tokens: int) -> list[int]:
    """The first `tokens` greedy ids."""
    engine.reset()
    return [token for step in stream(engine, prompt, SamplingParams(ignore_eos=True), tokens) for token in step]


@pytest.mark.parametrize(("name", "dialect"), [("tiny-glm5", GLM), ("tiny-dsv32", DEEPSEEK)])
def test_the_model_answers_with_and_without_drafts(name: str, dialect: Dialect, fp8: dict[str, Path]) -> None:
    """Two recalls beyond index_topk = 256 tokens and one known answer; drafts change no token."""
    asked = questions(Speaker(dialect, Tokenizer.from_file(str(fp8[name] / "tokenizer.json"))), 2)
    for num_mtp in (0, 2):
        engine = load_engine(fp8[name], max_seq_len=1024, num_mtp=num_mtp)
        assert isinstance(engine.model.weights.layers[1].mlp.gate_up, Fp8Matrix)
        for golden in asked:
            assert len(golden.prompt) > 256 or golden.kind == "answer"
            assert said(engine, golden.prompt, len(golden.answer)) == golden.answer


@pytest.mark.parametrize("num_mtp", [0, 2])
def test_fp8_weights_over_an_fp8_cache(num_mtp: int, fp8: dict[str, Path]) -> None:
    speaker = Speaker(GLM, Tokenizer.from_file(str(fp8["tiny-glm5"] / "tokenizer.json")))
    engine = load_engine(fp8["tiny-glm5"], max_seq_len=512, num_mtp=num_mtp, kv_cache_dtype="fp8")
    golden = questions(speaker, 0)[0]
    assert said(engine, golden.prompt, len(golden.answer)) == golden.answer


def test_a_dense_prompt_multiplies_the_quantised_kv_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill expands keys and values through kv_b's fp8 product, decode goes through W_UK and W_UV."""
    make_fp8(model_dir("tiny-glm5-dense"), tmp_path / "fp8")
    engine = load_engine(tmp_path / "fp8", max_seq_len=512)
    golden = questions(Speaker(GLM, Tokenizer.from_file(str(tmp_path / "fp8" / "tokenizer.json"))), 0)[0]
    used = list[object]()
    monkeypatch.setattr(model, "linear", lambda x, w: used.append(w) or linear(x, w))
    first = engine.prefill(golden.prompt)
    expanding = [layer.attention.kv_b for layer in engine.model.weights.layers]
    assert [w for w in used if any(w is kv_b for kv_b in expanding)] == expanding
    assert all(isinstance(kv_b, Fp8Matrix) for kv_b in expanding)
    used.clear()
    tokens = len(golden.answer)
    steps = [s for s in engine.decode(first, tokens, SamplingParams(0.0, ignore_eos=True)) if isinstance(s, list)]
    assert [token.id for step in steps for token in step] == golden.answer
    assert used and not any(w is kv_b for w in used for kv_b in expanding)


def test_scales_matter_to_the_answer(fp8: dict[str, Path], tmp_path: Path) -> None:
    """Every scale of one kind of matrix set to their mean: loads, and answers otherwise."""
    copy = Path(shutil.copytree(fp8["tiny-glm5"], tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    for name in [n for n in tensors if n.endswith(f"kv_b_proj.weight{SCALE}")]:
        tensors[name] = tensors[name].mean().expand_as(tensors[name]) * 4
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    speaker = Speaker(GLM, Tokenizer.from_file(str(copy / "tokenizer.json")))
    golden = questions(speaker, 1)[-1]
    assert said(load_engine(copy, max_seq_len=512), golden.prompt, len(golden.answer)) != golden.answer
