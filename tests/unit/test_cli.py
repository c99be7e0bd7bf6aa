"""`tilert-ref`: every listed command exists, and help and mistakes are answered."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilert_ref.cli import COMMANDS, main
from tilert_ref.model_files import ConfigError
from tilert_ref.tiny import model_dir


@pytest.mark.parametrize("name", COMMANDS)
def test_command_module_exists(name: str) -> None:
    assert importlib.util.find_spec(COMMANDS[name].module) is not None


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "unknown command 'serve'; legal: demo, make-tiny" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from tilert_ref.cli import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("a.json: x, legal: y"), "a.json: x, legal: y"),
        (FileNotFoundError(2, "No such file"), "No such file"),
    ],
)
def test_bad_input_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(error, monkeypatch)
    assert main(["verify"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tilert-ref verify: error: ") and said in line


@pytest.mark.parametrize(
    "error", [ValueError("zip() argument 2 is longer"), TimeoutError(), BrokenPipeError(32, "a child's")], ids=str
)
def test_a_defect_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(error, monkeypatch)
    with pytest.raises(type(error)):
        main(["verify"])


@pytest.mark.parametrize(
    ("command", "works"),
    [
        (["generate", "DIR", "--prompt-ids", "1,2"], "tilert_ref.generate.load_engine"),
        (["scorecard", "DIR"], "tilert_ref.tiny.scorecard.score"),
        (["verify", "FILE", "--model-dir", "DIR"], "tilert_ref.golden.verify.engine_for"),
        (["make-fp8", "DIR", "OUT"], "tilert_ref.engine.make_fp8.make_fp8"),
        (["demo", "--model", "DIR"], "tilert_ref.demo.run"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("error", [ValueError("zip() argument 2 is longer"), TimeoutError()], ids=["value", "time"])
def test_no_command_takes_a_defect_for_bad_input(
    error: Exception, command: list[str], works: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(works, fails)
    golden = sorted((Path(__file__).parents[1] / "golden" / "h200").rglob("*.golden"))
    names = {"DIR": str(model_dir("tiny-glm5-dense")), "FILE": str(golden[0])}
    with pytest.raises(type(error)):
        main([names.get(word, word) for word in command])


LONG = "x" * 300
GENERATE = ["generate", "DIR", "--prompt-ids", "1,2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "DIR", "--prompt-ids", "1,x"], "--prompt-ids has 'x', legal: token ids"),
        (["generate", "DIR", "--prompt-ids", "1,-2"], "--prompt-ids has '-2', legal: token ids"),
        ([*GENERATE, "--kv-cache-dtype", "foo"], "unknown KV cache dtype 'foo'; legal: "),
        ([*GENERATE, "--seed", "9" * 23], f"--seed: {'9' * 23}, legal: 0 to"),
        ([*GENERATE, "--temperature", "nan"], "--temperature: nan, legal: 0 to 100"),
        ([*GENERATE, "--top-p", "-1"], "--top-p: -1, legal: 0 to 1"),
        ([*GENERATE, "--max-tokens", "0"], "--max-tokens: 0, legal: 1 to"),
        ([*GENERATE, "--top-k", "1.5"], "--top-k: invalid int value: '1.5'"),
        (["verify", f"{LONG}.golden", "--model-dir", "DIR"], "File name too long"),
        (["verify", "FILE", "--model-dir", LONG], "File name too long"),
        (["verify", "LOOP", "--model-dir", "DIR"], "Too many levels of symbolic links"),
        (["verify", "JUNK.whole.pt", "--model-dir", "DIR"], "JUNK.whole.pt: not a whole recording ("),
        (["make-fp8", "DIR", LONG], "File name too long"),
        (["make-tiny", LONG], "File name too long"),
        (["bench", "decode", "DIR", "--tokens", "8"], "--tokens 8, legal: more than the 8 of the short answer"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_what_a_caller_or_a_file_is_at_fault_for_is_one_line(
    command: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LOOP").symlink_to("LOOP")
    Path("JUNK.whole.pt").write_bytes(b"\x80\x02]q\x00.")
    golden = sorted((Path(__file__).parents[1] / "golden" / "h200").rglob("*.bf16-weights.*.golden"))
    names = {"DIR": str(model_dir("tiny-glm5")), "FILE": str(golden[0])}
    try:
        status = main([names.get(word, word) for word in command])
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("size", [1, 10**6], ids=["buffered", "at once"])
def test_a_reader_that_leaves_is_no_error(size: int) -> None:
    code = "import sys, tilert_ref.golden.verify as verify; from tilert_ref.cli import main; "
    code += f"verify.main = lambda argv: print('x' * {size}); sys.exit(main(['verify']))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert run.stderr.read() == b""
    assert run.wait(60) == 1


def ends_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("tilert_ref.golden.verify.main", main)
