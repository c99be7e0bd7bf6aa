"""Block-fp8 variants of bf16 checkpoints, as DeepSeek-V3/V3.2 and GLM-5-FP8 are published, and the way back.

It takes any checkpoint of the family, not only the trained ones, and so stands beside make_tiny.py.
docs/numerics.md says which tensors become fp8 and how that is known.
"""

import argparse
import filecmp
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tilert_ref.engine.block_fp8 import BLOCK, BlockScale, dequantize_blocks, quantize_blocks
from tilert_ref.engine.checkpoint import Checkpoint, CheckpointError, Progress
from tilert_ref.engine.config import ConfigError, load_config
from tilert_ref.model_files import INDEX, read_config, says_bad_input, shown

Tensors = dict[str, torch.Tensor]

_LAYER = r"model\.layers\.\d+\."
BECOMES_FP8 = re.compile(
    _LAYER
    + r"(self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)"
    + r"|mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj)\.weight"
)
STAYS = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head)\.weight"
    rf"|{_LAYER}(embed_tokens|shared_head\.head|shared_head\.norm|enorm|hnorm|eh_proj)\.weight"
    rf"|{_LAYER}(input_layernorm|post_attention_layernorm|self_attn\.(q_a|kv_a)_layernorm)\.weight"
    rf"|{_LAYER}self_attn\.indexer\.(k_norm\.weight|k_norm\.bias|weights_proj\.weight)"
    rf"|{_LAYER}mlp\.gate\.(weight|e_score_correction_bias)"
)
"""Every tensor of the family is in one of the two; a name in neither is refused."""

SCALE = "_scale_inv"
COPIED = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tiktoken.model", "tokenization_kimi.py"),
    *("chat_template.jinja", "generation_config.json", "configuration_deepseek.py"),
)
"""Files that come along unchanged where the source has them."""


def make_fp8(source: Path, out: Path, rule: BlockScale | None = None, progress: Progress = lambda line: None) -> None:
    """Writes the block-fp8 variant of the bf16 checkpoint directory `source` into `out`; same input, same bytes.

    rule: None takes the one of the family, UE8M0 for deepseek_v32 and PLAIN for the others. Scales stand in the file
    of their weight, so a checkpoint split into model and indexer stays split. `out` appears when it is complete; one
    that holds the very same files is left alone.

    Raises ConfigError and CheckpointError (quantised input, unknown tensors, dtypes other than bf16 and fp32),
    FileExistsError if `out` holds something else, OSError.
    """
    source = Path(source)
    config = _bf16_config(source)
    rule = rule or published_rule(config["model_type"])
    with Checkpoint(source) as checkpoint:
        stays = sorted(name for name in checkpoint.home if not _becomes_fp8(name, source))
        config["quantization_config"] = quantization_config(config["model_type"], rule, stays)
        total = len(checkpoint.home)
        progress(f"{source}: {total - len(stays)} of {total} tensors to fp8, scale rule {rule.value}")
        _write(checkpoint, config, out, lambda name: _quantised(checkpoint, name, rule), progress)


def dequantise(source: Path, out: Path, progress: Progress = lambda line: None) -> None:
    """Writes the bf16 checkpoint bf16(code * scale_inv) of the block-fp8 directory `source` into `out`, atomically too.

    Under UE8M0 no bit of a code is lost, under PLAIN the product is rounded. Raises as make_fp8 does; ConfigError too
    if `source` is not block fp8.
    """
    source = Path(source)
    config = read_config(source)
    _check_block_fp8(config.pop("quantization_config", None), source)
    with Checkpoint(source) as checkpoint:
        widowed = sorted(n for n in checkpoint.home if n.endswith(SCALE) and n.removesuffix(SCALE) not in checkpoint)
        if widowed:
            raise CheckpointError(f"{source}: scale {widowed[0]} has no weight")
        _write(checkpoint, config, out, lambda name: _dequantised(checkpoint, name), progress)


def published_rule(model_type: str) -> BlockScale:
    """What the published fp8 checkpoints of a model type announce (see BlockScale)."""
    return BlockScale.UE8M0 if model_type == "deepseek_v32" else BlockScale.PLAIN


def quantization_config(model_type: str, rule: BlockScale, stays: list[str]) -> dict[str, Any]:
    """The config.json entry. GLM lists what stays, DeepSeek leaves that to the loader's knowledge of the model.

    GLM-5-FP8 spells the indexer's weights_proj "indexers_proj", which names no tensor (ROCm/ATOM, pull request 451);
    the list here has its real name.
    """
    entry: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    if rule is BlockScale.UE8M0:
        entry["scale_fmt"] = "ue8m0"
    entry["weight_block_size"] = [BLOCK, BLOCK]
    if model_type.startswith("glm"):
        entry["modules_to_not_convert"] = [name.removesuffix(".weight") for name in stays]
    return entry


# Reading


def _bf16_config(source: Path) -> dict[str, Any]:
    config, path = read_config(source), source / "config.json"
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{path}: the weights are quantised already (quant_method {shown(method)}); legal: none, bf16"
        )
    load_config(source)  # refuses what is not of the family
    if not isinstance(kind := config.get("model_type"), str):  # it decides which scales and lists are written
        raise ConfigError(f"{path}: model_type = {shown(kind)}, legal: a string")
    return config


def _check_block_fp8(entry: Any, source: Path) -> None:
    expected = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    got = {key: entry.get(key) for key in expected} if isinstance(entry, dict) else entry
    if got != expected:
        raise ConfigError(f"{source / 'config.json'}: quantization_config {shown(got)}, legal: {expected}")


def _becomes_fp8(name: str, source: Path) -> bool:
    if BECOMES_FP8.fullmatch(name):
        return True
    if not STAYS.fullmatch(name):
        raise CheckpointError(f"{source}: no rule says whether {name} becomes fp8")
    return False


def _tensor(checkpoint: Checkpoint, name: str, *legal: torch.dtype) -> torch.Tensor:
    tensor = checkpoint.tensor(name)
    if tensor.dtype not in legal:
        raise CheckpointError(f"{checkpoint.directory}: weight {name} is {tensor.dtype}, legal: {legal}")
    return tensor


def _quantised(checkpoint: Checkpoint, name: str, rule: BlockScale) -> Tensors:
    if not BECOMES_FP8.fullmatch(name):
        return {name: _tensor(checkpoint, name, torch.bfloat16, torch.float32)}
    weight = _tensor(checkpoint, name, torch.bfloat16)
    if weight.dim() != 2:
        raise CheckpointError(f"{checkpoint.directory}: weight {name} has shape {list(weight.shape)}, legal: [out, in]")
    codes, scales = quantize_blocks(weight, rule)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{checkpoint.directory}: weight {name} holds values that are not finite")
    return {name: codes, name + SCALE: scales}


def _dequantised(checkpoint: Checkpoint, name: str) -> Tensors:
    if name.endswith(SCALE):
        return {}
    tensor = _tensor(checkpoint, name, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    if tensor.dtype is not torch.float8_e4m3fn:
        if name + SCALE in checkpoint:
            raise CheckpointError(f"{checkpoint.directory}: weight {name} is {tensor.dtype} and has a scale")
        return {name: tensor}
    if name + SCALE not in checkpoint:
        raise CheckpointError(f"{checkpoint.directory}: weight {name} is fp8 and has no scale {name + SCALE}")
    scales = _tensor(checkpoint, name + SCALE, torch.float32)  # published shards may keep it in another file
    try:
        return {name: dequantize_blocks(tensor, scales).bfloat16()}
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: weight {name}: {error}") from error


# Writing


def _write(
    checkpoint: Checkpoint, config: dict[str, Any], out: Path, convert: Callable[[str], Tensors], progress: Progress
) -> None:
    """Converts file by file, so that memory holds one file of the checkpoint at a time."""
    weight_map, total = dict[str, str](), 0
    strangers = {path.name for path in out.iterdir()} if out.is_dir() else set()
    strangers -= {*checkpoint.files, INDEX, "config.json", *COPIED}
    if strangers:
        shown = ", ".join(sorted(strangers)[:4])
        raise FileExistsError(f"{out} exists with other content ({shown}); legal: a new or an empty directory")
    with _whole_directory(out) as directory:
        for file in sorted(checkpoint.files):
            names = sorted(name for name, home in checkpoint.home.items() if home == file)
            tensors = {new: tensor for name in names for new, tensor in convert(name).items()}
            save_file(tensors, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
            sizes = [(where / file).stat().st_size / 1e6 for where in (checkpoint.directory, directory)]
            progress(f"{file}: {len(tensors)} tensors, {sizes[0]:,.1f} -> {sizes[1]:,.1f} MB")
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX, index)
        _write_json(directory / "config.json", config)
        for name in COPIED:
            if (checkpoint.directory / name).is_file():
                shutil.copyfile(checkpoint.directory / name, directory / name)


@contextmanager
def _whole_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` at the end, and disappears on any error."""
    out = Path(out).absolute()
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a directory")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        _publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        os.replace(partial, out)
        return
    old, new = ({path.name for path in where.iterdir()} for where in (out, partial))
    other = old ^ new or {name for name in new if not filecmp.cmp(out / name, partial / name, shallow=False)}
    if other:
        shown = ", ".join(sorted(other)[:4])
        raise FileExistsError(f"{out} exists with other content ({shown}); legal: a new or an empty directory")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@says_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilert-ref make-fp8", description=__doc__.split("\n")[0])
    parser.add_argument("model_dir", type=Path, metavar="DIR", help="bf16 checkpoint directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write: new, empty, or the same already")
    parser.add_argument(
        "--scale",
        choices=[rule.value for rule in BlockScale],
        help="plain: amax / 448; ue8m0: the next power of two (default: ue8m0 for deepseek_v32, else plain)",
    )
    args = parser.parse_args(argv)
    rule = BlockScale(args.scale) if args.scale else None
    make_fp8(args.model_dir, args.out, rule, lambda line: print(line, file=sys.stderr))
    print(f"{args.out}: block fp8")
    return 0
