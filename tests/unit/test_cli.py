"""`tilert-ref`: every listed command exists, and help and mistakes are answered."""

import importlib.util
import subprocess
import sys

import pytest

from tilert_ref.cli import COMMANDS, main


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
