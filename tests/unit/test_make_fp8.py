"""Block-fp8 checkpoints: the two scale rules by literal numbers, error bounds, names and shapes, and that the model
still answers after the way back. That the engine runs the variant itself is tested in test_engine_fp8.py.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.block_fp8 import BlockScale, block_scales, dequantize_blocks, quantize_blocks
from tilert_ref.engine.checkpoint import CheckpointError
from tilert_ref.engine.config import ConfigError
from tilert_ref.engine.make_fp8 import BECOMES_FP8, SCALE, STAYS, dequantise, main, make_fp8
from tilert_ref.engine.make_tiny import ARCHS, tiny_config, tiny_weights
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.generate import stream
from tilert_ref.tiny import model_dir, skills
from tilert_ref.tiny.chat import DEEPSEEK, GLM, Dialect
from tilert_ref.tiny.golden import Golden, Speaker

PLAIN, UE8M0 = BlockScale.PLAIN, BlockScale.UE8M0

# Half the distance of neighbours: three mantissa bits make 2^-4 of the power of two below, so relative to the value it
# is largest just above the power: (1/16) / (1 + 1/16). Below 2^-6 codes are subnormal, 2^-9 apart.
RELATIVE, SUBNORMAL = 1 / 17, 2.0**-10
FP32 = 2.0**-22  # the fp32 roundings of scale, reciprocal, quotient and product, 2^-24 each
BF16 = 2.0**-8  # half a step of bf16: seven mantissa bits


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def names(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def quantization(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The variants of tiny-glm5 (rule of the family: plain) and tiny-dsv32 (ue8m0)."""
    made = {name: tmp_path_factory.mktemp("fp8") / name for name in ("tiny-glm5", "tiny-dsv32")}
    for name, out in made.items():
        make_fp8(model_dir(name), out)
    return made


# The rules


def test_scales_literal() -> None:
    amax = torch.tensor([448.0, 450.0, 3.5, 0.875, 1.0, 0.0, 1e-5])
    plain = [1.0, 1.0044642686843872, 0.0078125, 0.001953125, 0.0022321429569274187, *2 * [2.2321428616578487e-07]]
    assert block_scales(amax, PLAIN).tolist() == plain
    assert block_scales(amax, UE8M0).tolist() == [1.0, 2.0, 2**-7, 2**-9, 2**-8, 2**-22, 2**-22]


def test_codes_literal() -> None:
    """One block with amax 7: plain scale 1/64; 0.07 * 64 = 4.48 is between 4 (code 0x48) and 4.5 (0x49)."""
    weight = torch.tensor([[7.0, -7.0, 0.07, 0.0], [3.6, 2.0**-13, 2.0**-16, -0.0]])
    codes, scales = quantize_blocks(weight, PLAIN)
    assert scales.tolist() == [[1 / 64]]
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0xFE, 0x49, 0x00], [0x76, 0x04, 0x00, 0x80]]
    assert dequantize_blocks(codes, scales).tolist() == [[7.0, -7.0, 4.5 / 64, 0.0], [3.5, 2.0**-13, 0.0, -0.0]]


def test_ue8m0_rounds_the_scale_up_before_it_divides() -> None:
    weight = torch.tensor([[8.0, 0.3]])  # 8 / 448 lies above 1/64, so the scale is 1/32: 256 and 9.6, whose code is 10
    codes, scales = quantize_blocks(weight, UE8M0)
    assert (scales.tolist(), codes.float().tolist()) == ([[1 / 32]], [[256.0, 10.0]])


def test_blocks_at_the_edge_and_their_own_scales() -> None:
    weight = torch.zeros(576, 130)  # kv_a_proj's rows: four blocks and a half
    weight[511, 127], weight[512, 0], weight[575, 129] = 448.0, 896.0, -1792.0
    codes, scales = quantize_blocks(weight, PLAIN)
    floor = block_scales(torch.zeros(()), PLAIN).item()
    assert scales.tolist() == [*3 * [[floor, floor]], [1.0, floor], [2.0, 4.0]]
    assert codes.shape == weight.shape and codes.is_contiguous()
    assert dequantize_blocks(codes, scales).equal(weight)


def test_scales_of_another_shape_are_refused() -> None:
    codes, scales = quantize_blocks(torch.ones(130, 4), PLAIN)
    with pytest.raises(ValueError, match=r"scales \[1, 1\] for codes \[130, 4\], not \[2, 1\]"):
        dequantize_blocks(codes, scales[:1])


def per_weight_bound(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Largest |code * scale - w|: relative where the code is normal, absolute below; fp32's own roundings on top."""
    steps = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return torch.maximum(weight.abs() * RELATIVE, steps * SUBNORMAL) + weight.abs() * FP32


@pytest.mark.parametrize("rule", BlockScale)
def test_round_trip_error_of_every_weight(rule: BlockScale) -> None:
    """Weights over fourteen octaves and six scales of block, so that normal and subnormal codes all occur."""
    generator = torch.Generator().manual_seed(7)
    octaves = torch.randint(-14, 1, (300, 260), generator=generator)
    weight = torch.ldexp(torch.rand(300, 260, generator=generator) - 0.5, octaves).bfloat16().float()
    weight[128:256] *= 1000
    codes, scales = quantize_blocks(weight, rule)
    error = (dequantize_blocks(codes, scales) - weight).abs()
    bound = per_weight_bound(weight, scales)
    assert bool((error <= bound).all()), f"{int((error > bound).sum())} weights beyond the bound"
    assert float((error / bound).max()) > 0.98, "the bound is not tight"
    assert bool((codes.float().abs() < 2.0**-6).any()) and bool((codes.float().abs() >= 256).any())
    # e4m3's top codes are 32 apart: no error in a block is beyond 16 scales.
    blockwise = torch.nn.functional.max_pool2d(error[None], 128, ceil_mode=True)[0]
    assert bool((blockwise <= 16 * scales * (1 + FP32)).all())


# The directory


@pytest.mark.parametrize("name", ["tiny-glm5", "tiny-dsv32"])
def test_names_shapes_and_bytes_of_a_variant(name: str, fp8: dict[str, Path]) -> None:
    before, after = tensors(model_dir(name)), tensors(fp8[name])
    coded = {n for n, t in after.items() if t.dtype is torch.float8_e4m3fn}
    assert set(after) == set(before) | {n + SCALE for n in coded}
    assert all(after[n].equal(before[n]) for n in set(before) - coded)
    for n in coded:
        rows, columns = before[n].shape
        scale = after[n + SCALE]
        assert (after[n].shape, scale.dtype) == ((rows, columns), torch.float32)
        assert scale.shape == (-(-rows // 128), -(-columns // 128))
        assert bool((torch.frexp(scale).mantissa == 0.5).all()) == (name == "tiny-dsv32")
        error = (dequantize_blocks(after[n], scale) - before[n].float()).abs()
        assert bool((error <= per_weight_bound(before[n].float(), scale)).all())
    assert after["model.layers.0.self_attn.kv_a_proj_with_mqa.weight" + SCALE].shape == (5, 1)


def test_which_tensors_become_fp8(fp8: dict[str, Path]) -> None:
    """By the last two parts of the name, written out: docs/numerics.md has the sources."""
    kinds = dict[str, set[torch.dtype]]()
    for name, tensor in tensors(fp8["tiny-glm5"]).items():
        parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
        key = "experts" if "experts" in parts else ".".join(parts[-2:]) if len(parts) > 3 else parts[-1]
        if not name.endswith(SCALE):
            kinds.setdefault(key.lstrip("0123456789."), set()).add(tensor.dtype)
    assert {key for key, dtypes in kinds.items() if dtypes == {torch.float8_e4m3fn}} == {
        *(f"self_attn.{p}_proj" for p in ("q_a", "q_b", "kv_b", "o")),
        "self_attn.kv_a_proj_with_mqa",
        *("indexer.wq_b", "indexer.wk", "experts"),
        *(f"{where}.{p}_proj" for where in ("mlp", "shared_experts") for p in ("gate", "up", "down")),
    }
    stays = set(kinds) - {key for key, dtypes in kinds.items() if torch.float8_e4m3fn in dtypes}
    assert stays == {
        *("embed_tokens", "lm_head", "norm", "shared_head.head", "shared_head.norm", "eh_proj", "enorm", "hnorm"),
        *("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
        *("indexer.k_norm", "indexer.weights_proj", "mlp.gate", "gate.e_score_correction_bias"),
    }


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tensor_of_the_family_has_one_rule(arch: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "vocab_size": 8, "kv_lora_rank": 8}
    for name in tiny_weights(tiny_config(arch, **sizes)):
        assert bool(BECOMES_FP8.fullmatch(name)) != bool(STAYS.fullmatch(name)), name


def test_split_index_and_other_files_are_kept(fp8: dict[str, Path]) -> None:
    source, out = model_dir("tiny-glm5"), fp8["tiny-glm5"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for file in ("model.safetensors", "model-indexer.safetensors"):
        assert {n for n, home in index["weight_map"].items() if home == file} == names(out / file)
        assert {n for n in names(out / file) if not n.endswith(SCALE)} == names(source / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(out).values())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    old, new = (json.loads((where / "config.json").read_text()) for where in (source, out))
    del new["quantization_config"]
    assert new == old


def test_quantization_config_of_the_families(fp8: dict[str, Path]) -> None:
    common = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert quantization(fp8["tiny-dsv32"]) == common | {"scale_fmt": "ue8m0"}
    glm = quantization(fp8["tiny-glm5"])
    kept = glm.pop("modules_to_not_convert")
    assert glm == common
    wide = {n for n, t in tensors(fp8["tiny-glm5"]).items() if t.element_size() > 1 and not n.endswith(SCALE)}
    assert sorted(kept) == sorted(n.removesuffix(".weight") for n in wide)
    assert {"lm_head", "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.3.eh_proj"} <= set(kept)


def test_configs_are_read_by_transformers_and_vllm(fp8: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    quantisation = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    for name, out in fp8.items():
        config = transformers.AutoConfig.from_pretrained(out)
        assert config.model_type == json.loads((model_dir(name) / "config.json").read_text())["model_type"]
        read = quantisation.Fp8Config.from_config(config.quantization_config)
        assert (read.is_checkpoint_fp8_serialized, read.weight_block_size) == (True, [128, 128])
        assert read.activation_scheme == "dynamic"
        assert read.ignored_layers == quantization(out).get("modules_to_not_convert", [])


def test_vllm_reads_the_same_weights(fp8: dict[str, Path]) -> None:
    """vLLM's own dequantisation of indexer.wk, the one fp8 tensor that it takes back to bf16 while loading."""
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    name = "model.layers.1.self_attn.indexer.wk.weight"
    stored = tensors(fp8["tiny-glm5"])
    theirs = utils.scaled_dequantize(
        stored[name], stored[name + SCALE], group_shape=utils.GroupShape(128, 128), out_dtype=torch.bfloat16
    )
    assert dequantize_blocks(stored[name], stored[name + SCALE]).bfloat16().equal(theirs)


def test_same_bytes_twice_and_a_finished_directory_is_left_alone(fp8: dict[str, Path], tmp_path: Path) -> None:
    make_fp8(model_dir("tiny-glm5"), tmp_path / "again")
    assert digests(tmp_path / "again") == digests(fp8["tiny-glm5"])
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "again").iterdir()}
    make_fp8(model_dir("tiny-glm5"), tmp_path / "again")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "again").iterdir()} == stamps
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


# Refusals


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir("tiny-glm5-dense"), tmp_path / "source"))


def replace(source: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Changes one tensor of model.safetensors; None takes it out."""
    held = load_file(source / "model.safetensors")
    held.pop(name, None)
    save_file(held if tensor is None else held | {name: tensor}, source / "model.safetensors")
    (source / "model.safetensors.index.json").unlink()


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (O_PROJ, torch.zeros(128, 256, dtype=torch.float16), f"weight {O_PROJ} is torch.float16, legal: .*bfloat16"),
        (O_PROJ, torch.zeros(128, 256), f"weight {O_PROJ} is torch.float32, legal: .*bfloat16"),
        (O_PROJ, torch.zeros(128, 256, dtype=torch.int8), "torch.int8"),
        (O_PROJ, torch.full((128, 256), torch.inf, dtype=torch.bfloat16), f"{O_PROJ} holds values that are not finite"),
        (O_PROJ, torch.full((128, 256), torch.nan, dtype=torch.bfloat16), f"{O_PROJ} holds values that are not finite"),
        (O_PROJ, torch.zeros(256, dtype=torch.bfloat16), r"has shape \[256\], legal: \[out, in\]"),
        ("lm_head.weight", torch.zeros(768, 128, dtype=torch.float16), "lm_head.weight is torch.float16"),
        ("model.layers.0.mlp.extra.weight", torch.zeros(2, 2), "no rule says whether model.layers.0.mlp.extra.weight"),
        (O_PROJ + SCALE, torch.zeros(1, 2), f"no rule says whether {O_PROJ + SCALE}"),
    ],
)
def test_unsupported_tensors_are_refused_and_leave_nothing(
    name: str, tensor: torch.Tensor, named: str, source: Path, tmp_path: Path
) -> None:
    replace(source, name, tensor)
    with pytest.raises(CheckpointError, match=named):
        make_fp8(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_quantised_input_and_other_families_are_refused(fp8: dict[str, Path], source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantised already \(quant_method 'fp8'\)"):
        make_fp8(fp8["tiny-glm5"], tmp_path / "out")
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        make_fp8(source, tmp_path / "out")


def test_an_existing_directory_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    make_fp8(source, out)  # empty: taken
    before = digests(out)
    with pytest.raises(FileExistsError, match=r"other content \(config.json, model.safetensors\); legal: a new or an"):
        make_fp8(source, out, UE8M0)
    assert digests(out) == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"other content \(notes.txt\)"):
        make_fp8(source, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_file_in_the_way_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match="not a directory"):
        make_fp8(source, tmp_path / "out")


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(tmp_path / "out"), "--scale", "ue8m0"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'out'}: block fp8\n"
    assert "104 of 135 tensors to fp8, scale rule ue8m0" in said.err and "model.safetensors: 239 tensors" in said.err
    assert quantization(tmp_path / "out")["scale_fmt"] == "ue8m0"
    assert main([str(tmp_path / "out"), str(tmp_path / "twice")]) == 2
    assert "error: " in capsys.readouterr().err


# The way back


def test_way_back_has_the_names_of_the_source_and_the_rounded_values(fp8: dict[str, Path], tmp_path: Path) -> None:
    for name, out in fp8.items():
        dequantise(out, tmp_path / name)
        before, coded, after = tensors(model_dir(name)), tensors(out), tensors(tmp_path / name)
        assert set(after) == set(before)
        for n, weight in after.items():
            assert (weight.dtype, weight.shape) == (before[n].dtype, before[n].shape)
            if n + SCALE in coded:
                bound = per_weight_bound(before[n].float(), coded[n + SCALE]) + BF16 * weight.float().abs()
                assert bool(((weight.float() - before[n].float()).abs() <= bound).all())
        source, back = (json.loads((d / "config.json").read_text()) for d in (model_dir(name), tmp_path / name))
        assert back == source


def test_ue8m0_loses_nothing_on_the_way_back(fp8: dict[str, Path], tmp_path: Path) -> None:
    dequantise(fp8["tiny-dsv32"], tmp_path / "bf16")
    coded, after = tensors(fp8["tiny-dsv32"]), tensors(tmp_path / "bf16")
    scaled = [n for n in after if n + SCALE in coded]
    assert len(scaled) == 112
    assert all(dequantize_blocks(coded[n], coded[n + SCALE]).equal(after[n].float()) for n in scaled)


def test_way_back_refuses_what_is_not_whole(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_config None, legal"):
        dequantise(source, tmp_path / "out")
    make_fp8(source, tmp_path / "fp8")
    replace(tmp_path / "fp8", O_PROJ + SCALE, None)
    with pytest.raises(CheckpointError, match=f"{O_PROJ} is fp8 and has no scale"):
        dequantise(tmp_path / "fp8", tmp_path / "out")
    held = load_file(tmp_path / "fp8" / "model.safetensors")
    save_file(held | {O_PROJ + SCALE: torch.ones(2, 2)}, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{O_PROJ}: scales \[2, 2\]"):
        dequantise(tmp_path / "fp8", tmp_path / "out")
    del held[O_PROJ]
    save_file(held | {O_PROJ + SCALE: torch.ones(1, 2)}, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"scale {O_PROJ}{SCALE} has no weight"):
        dequantise(tmp_path / "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def questions(speaker: Speaker, count: int) -> Iterator[Golden]:
    """`count` recalls over a conversation of some 800 tokens, and one answer known by heart."""
    rng, memory = random.Random("fp8"), skills.Memory()
    told = skills.remember(rng, memory, 100)
    for _ in range(count):
        yield speaker.ask([told], skills.recall(rng, memory), thinking=False)
    yield speaker.ask([], skills.answer(rng), thinking=False)


def said(engine: RefEngine, prompt: list[int], tokens: int) -> list[int]:
    """The first `tokens` greedy ids."""
    engine.reset()
    return [token for step in stream(engine, prompt, SamplingParams(ignore_eos=True), tokens) for token in step]


@pytest.mark.parametrize(
    ("name", "dialect", "rule", "recalls"),
    [("tiny-glm5-dense", GLM, PLAIN, 8), ("tiny-glm5", GLM, UE8M0, 2), ("tiny-dsv32-dense", DEEPSEEK, UE8M0, 4)],
)
def test_the_model_still_answers(name: str, dialect: Dialect, rule: BlockScale, recalls: int, tmp_path: Path) -> None:
    make_fp8(model_dir(name), tmp_path / "fp8", rule)
    dequantise(tmp_path / "fp8", tmp_path / "bf16")
    engine = load_engine(tmp_path / "bf16", max_seq_len=2048)
    speaker = Speaker(dialect, Tokenizer.from_file(str(tmp_path / "bf16" / "tokenizer.json")))
    for golden in questions(speaker, recalls):
        assert len(golden.prompt) > 256 or golden.kind == "answer"
        assert said(engine, golden.prompt, len(golden.answer)) == golden.answer
