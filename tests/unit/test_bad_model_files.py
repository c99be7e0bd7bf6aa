"""Bad checkpoint directories: every tool ends with one line that names the file, what was got and what is legal."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tilert_ref import bench_plugin, bench_roof, cli, demo
from tilert_ref.decode_server import __main__ as decode_main
from tilert_ref.engine.checkpoint import Checkpoint, CheckpointError
from tilert_ref.engine.config import ConfigError, parse_config
from tilert_ref.engine.make_fp8 import make_fp8
from tilert_ref.engine.make_tiny import tiny_config
from tilert_ref.model_files import read_weight_map
from tilert_ref.router import pd_router

Edit = Callable[[Path], object]
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
CHAT, INDEX, WEIGHTS = "tokenizer_config.json", "model.safetensors.index.json", "model.safetensors"

TOOLS = {
    "generate": ["generate", "DIR", "--chat", "--prompt", "hi", "--max-tokens", "2", "--max-seq-len", "64"],
    "decode-server": ["decode-server", "--model-weights-dir", "DIR", "--kv-cache-dtype", "bf16"],
    "router": ["router", "--vllm-url", "http://127.0.0.1:1", "--decode", "127.0.0.1:1:2", "--model-path", "DIR"],
    "verify": ["verify", "GOLDEN", "--model-dir", "DIR", "--device", "cpu"],
    "bench": ["bench", "decode", "DIR", "--eager", "--tokens", "9", "--repeats", "1", "--context", "8"],
    "bench plugin": ["bench", "plugin", "DIR"],
    "make-fp8": ["make-fp8", "DIR", "OUT"],
    "scorecard": ["scorecard", "DIR", "--quick"],
    "demo": ["demo", "--model", "DIR"],
}
"""Those that read DIR; they end before they start a program."""
READS = {  # which of them read a file; scorecard and verify know before that this is not their model
    CONFIG: ("generate", "decode-server", "bench", "bench plugin", "make-fp8", "demo"),
    GENERATION: ("generate", "decode-server", "router", "bench", "make-fp8", "demo"),
    TOKENIZER: ("generate", "router", "scorecard", "demo"),
    CHAT: ("generate",),
    INDEX: ("generate", "bench", "make-fp8", "demo"),
    WEIGHTS: ("generate", "bench", "make-fp8", "demo"),
}


class Started(Exception):
    """A tool found nothing wrong and went on."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    """run(tool, directory) -> the last line of stderr of a tool that ended with status 2."""

    def started(*_: Any, **__: Any) -> None:
        raise Started

    for owner, name in ((decode_main, "run"), (pd_router.uvicorn, "run"), (demo, "programs"), (bench_plugin, "_Child")):
        monkeypatch.setattr(owner, name, started)
    monkeypatch.setattr(bench_roof, "copy_bandwidth", lambda device: 1e9)

    def call(tool: str, directory: Path) -> str:
        golden = sorted((Path(__file__).parents[1] / "golden" / "h200").rglob("*.golden"))
        names = {"DIR": directory, "OUT": directory.parent / "out", "GOLDEN": golden[0]}
        try:
            status = cli.main([str(names.get(word, word)) for word in TOOLS[tool]])
        except SystemExit as ended:  # argparse
            status = ended.code
        assert status == 2
        return capsys.readouterr().err.rstrip("\n").splitlines()[-1]

    return call


@pytest.fixture
def directory(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny checkpoint whose files can be replaced; the weights are links."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in tiny("dsv3").iterdir():
        if path.name == WEIGHTS:
            (copy / path.name).symlink_to(path)
        else:
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


def replaced(path: Path, content: bytes | None) -> None:
    """content: None for a directory in its place."""
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)


BROKEN = {
    "list": (b"[1]", "holds a JSON list"),
    "string": (b'"x"', "holds a JSON string"),
    "null": (b"null", "holds a JSON null"),
    "cut off": (b'{"a": 1', "not valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "endless": (b"[" * 100_000, "nested too deeply"),
    "directory": (None, "can't be read (Is a directory)"),
}


def cases() -> Iterator[Any]:
    for file in (CONFIG, GENERATION, CHAT, INDEX):
        for tool in READS[file]:
            for name in BROKEN if tool in ("generate", "router") else ("list", "directory"):
                yield pytest.param(tool, file, *BROKEN[name], id=f"{tool}-{file}-{name}")
    for tool in READS[TOKENIZER]:
        for name in ("list", "cut off", "directory"):
            yield pytest.param(tool, TOKENIZER, BROKEN[name][0], "can't read", id=f"{tool}-{TOKENIZER}-{name}")
    for tool in READS[WEIGHTS]:
        yield pytest.param(tool, WEIGHTS, b"\0" * 6, "not a readable safetensors file", id=f"{tool}-{WEIGHTS}-cut off")


@pytest.mark.parametrize(("tool", "file", "content", "said"), list(cases()))
def test_a_file_of_another_kind_is_named(
    tool: str, file: str, content: bytes | None, said: str, directory: Path, run: Callable[[str, Path], str]
) -> None:
    replaced(directory / file, content)
    line = run(tool, directory)
    assert str(directory / file) in line and said in line


@pytest.mark.parametrize("tool", TOOLS)
def test_no_such_directory_is_named(tool: str, tmp_path: Path, run: Callable[[str, Path], str]) -> None:
    assert str(tmp_path / "none") in run(tool, tmp_path / "none")


@pytest.mark.parametrize("method", ["read_text", "lstat"])
@pytest.mark.parametrize("tool", ["generate", "decode-server", "router", "demo"])
def test_a_file_that_may_not_be_read_is_named(
    tool: str, method: str, directory: Path, run: Callable[[str, Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is made up; of lstat it is one to search the directory."""
    file = directory / (GENERATION if tool == "router" else CONFIG)
    methods = {"read_text", method}
    for name in methods:
        real = getattr(Path, name)

        def refusing(path: Path, *args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, refusing)
    assert f"{file}: can't be read (Permission denied), legal: a readable file" in run(tool, directory)


# What a file says


def config(**change: Any) -> Edit:
    return lambda directory: (directory / CONFIG).write_text(json.dumps(tiny_config("dsv3") | change))


def weight_map(files: Any) -> Edit:
    return lambda directory: (directory / INDEX).write_text(json.dumps({"weight_map": files}))


def template(text: Any) -> Edit:
    return lambda directory: (directory / CHAT).write_text(json.dumps({"chat_template": text}))


def sampling(text: str) -> Edit:
    return lambda directory: (directory / GENERATION).write_text(text)


YARN = {"type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}
SAID = [
    ("decode-server", config(num_hidden_layers="3"), "num_hidden_layers = '3', legal: an integer from 1 to 1024"),
    ("decode-server", config(num_hidden_layers=-1), "num_hidden_layers = -1, legal: an integer from 1 to 1024"),
    ("demo", config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000, legal: an integer from 1 to 1024"),
    ("bench", config(rope_scaling=[1]), "rope_scaling = [1], legal: an object"),
    ("demo", config(quantization_config="fp8"), "quantization_config = 'fp8', legal: an object"),
    ("demo", config(quantization_config=[]), "quantization_config = [], legal: an object"),
    ("generate", config(mlp_layer_types=3), "mlp_layer_types = 3, legal: a list of 3"),
    ("generate", config(rope_theta=10**400), "000... (401 characters), legal: a finite number above 1"),
    ("generate", config(rope_theta=1, rope_scaling=YARN), "rope_theta = 1, legal: a finite number above 1"),
    ("generate", config(rope_scaling=YARN | {"beta_fast": 0}), "beta_fast = 0, legal: a finite number above 0"),
    ("generate", config(n_routed_experts=2**30, n_group=1, topk_group=1), "mlp.gate.weight has shape"),
    ("make-fp8", config(model_type=[1]), "model_type = [1], legal: a string"),
    ("make-fp8", lambda directory: (directory / INDEX).write_text("{}"), "weight_map = None, legal: an object"),
    ("make-fp8", weight_map({"w": "gone.safetensors"}), "names 'gone.safetensors', which is not there"),
    ("make-fp8", weight_map({"w": "../model/model.safetensors"}), "'../model/model.safetensors', legal: the name of"),
    ("bench", weight_map({"w": ".."}), "'..', legal: the name of a file beside it"),
    ("demo", weight_map([1]), "weight_map = [1], legal: an object"),
    ("generate", template(["x"]), "chat_template = ['x'], legal: a string"),
    ("generate", template("{% if %}"), "TemplateSyntaxError: Expected an expression"),
    ("generate", template("{{ 1 / 0 }}"), "ZeroDivisionError: division by zero, legal: a Jinja template"),
    ("router", sampling('{"temperature": 1%s}' % ("0" * 400)), "default temperature has to be a number, got 1000"),
    ("demo", sampling('{"temperature": "hot"}'), "default temperature has to be a number, got 'hot'"),
]


@pytest.mark.parametrize(("tool", "edit", "said"), SAID, ids=[f"{tool}-{said[:40]}" for tool, _, said in SAID])
def test_a_value_that_is_not_legal_is_named(
    tool: str, edit: Edit, said: str, directory: Path, run: Callable[[str, Path], str]
) -> None:
    edit(directory)
    assert said in run(tool, directory)


def test_a_good_directory_is_not_refused(directory: Path, run: Callable[[str, Path], str]) -> None:
    """The other tests would pass on tools that refuse everything."""
    for tool in ("decode-server", "router", "bench plugin", "demo"):
        with pytest.raises(Started):
            run(tool, directory)


def test_without_a_tokenizer_ids_give_ids(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / TOKENIZER).unlink()
    argv = ["generate", str(directory), "--prompt-ids", "1 2", "--max-tokens", "2", "--max-seq-len", "8"]
    assert cli.main(argv) == 0
    assert "\nids: [" in capsys.readouterr().out


JUNK = [None, True, -1, 0, 1, 10**30, 10**400, -0.5, 1e308, float("inf"), float("nan"), "", "x", [], [[]], {}, {"a": 1}]


@pytest.mark.parametrize("arch", ["dsv3", "glm5"])
def test_junk_is_read_or_refused_by_name(arch: str) -> None:
    """For each key of config.json and of what is nested in it, each kind of value that JSON has."""
    yarn = {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}}
    more = {"index_topk_pattern", "index_topk_freq", "indexer_types", "mlp_layer_types", "rope_parameters"}
    raw = tiny_config(arch) | yarn
    edits = [raw | {key: junk} for key in {*raw, *more, "quantization_config"} for junk in JUNK]
    edits += [raw | {"rope_scaling": raw["rope_scaling"] | {key: junk}} for key in raw["rope_scaling"] for junk in JUNK]
    refused = 0
    for edit in edits:
        try:
            parse_config(edit)
        except ConfigError as error:
            refused += 1
            assert len(str(error)) < 1000 and "\n" not in str(error)
    assert len(edits) / 2 < refused < len(edits)


def test_an_index_writes_nothing_elsewhere(directory: Path, tmp_path: Path) -> None:
    """make-fp8 writes files under the names that the index gives them."""
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "other.safetensors")
    before = (tmp_path / "other.safetensors").read_bytes()
    weight_map({"model.norm.weight": "../other.safetensors"})(directory)
    with pytest.raises(CheckpointError, match="legal: the name of a file beside it"):
        make_fp8(directory, tmp_path / "out")
    assert (tmp_path / "other.safetensors").read_bytes() == before and read_weight_map(tmp_path) is None


def test_a_tensor_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 3)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: weight w can't be read"), Checkpoint(tmp_path) as checkpoint:
        checkpoint.take("w", (4,), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "said"),
    [("blah", "device 'blah', legal: cpu, cuda, cuda:N"), ("cuda:99", "device 'cuda:99': this torch sees")],
)
@pytest.mark.parametrize("tool", ["generate", "decode-server", "bench"])
def test_a_device_that_is_none_is_named(
    tool: str, device: str, said: str, directory: Path, run: Callable[[str, Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOOLS, tool, [*TOOLS[tool], "--device", device])
    assert said in run(tool, directory)


def test_make_tiny_names_the_key_that_it_cannot_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["make-tiny", str(tmp_path / "new"), "--set", 'hidden_size="x"']) == 2
    assert "hidden_size = 'x', legal: an integer from 1 to" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_a_timeout_in_the_environment_that_is_none_is_named(
    text: str, monkeypatch: pytest.MonkeyPatch, directory: Path, run: Callable[[str, Path], str]
) -> None:
    monkeypatch.setenv("TILERT_PD_HTTP_TIMEOUT_S", text)
    assert "argument --request-timeout: " in run("router", directory)
