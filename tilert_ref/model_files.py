"""The files of a checkpoint directory as router, connector, engine and tools read them: what is wrong is named.

No torch, because the router has none.
"""

import errno
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SHOWN_CHARACTERS = 200  # of a value in an error: a file may hold anything, at any length


class InputError(ValueError):
    """What a caller or a file said can't be used; the text names it, what was got and what is legal. The command line
    shows it without a traceback."""


NO_FILE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_bad_input(error: Exception) -> bool:
    """Whether a caller, a file or a full disk is at fault: a tool says so in one line and ends with status 2. Anything
    else is a defect, and keeps its traceback."""
    if isinstance(error, OSError):  # with the name of a file: too long, a loop of links, a read-only place
        return isinstance(error, NO_FILE) or error.filename is not None or error.errno == errno.ENOSPC
    return isinstance(error, InputError)


def says_bad_input(main: Callable[..., int]) -> Callable[..., int]:
    """A tool's main that says bad input in a line of stderr and returns 2."""

    @functools.wraps(main)
    def run(*args: Any) -> int:
        try:
            return main(*args)
        except (InputError, OSError) as error:
            if not is_bad_input(error):
                raise
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run


class ConfigError(InputError):
    """A file of a checkpoint that can't be used; the text names file and key, what was got and what is legal."""


class CheckpointError(InputError):
    """Missing, leftover or misshapen weights; the text names the file or the tensors."""


def shown(value: Any) -> str:
    """repr on one line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def present(path: Path) -> bool:
    """Whether a file that may be left out is there. What is there and can't be read is not left out: reading it fails.

    So a directory, a link to nothing, and a file in a directory that may not be searched count as there.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # ValueError: no name that a file can have
        pass
    return True


def read_text(path: Path) -> str:
    """Raises ConfigError, naming the file, for what can't be read and what is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}), legal: a readable file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error}), legal: UTF-8 text") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError that names the file."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}), legal: a JSON object") from error
    except RecursionError:
        raise ConfigError(f"{path}: JSON nested too deeply, legal: a JSON object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {_KINDS[type(value)]}, legal: a JSON object")
    return value


_KINDS = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def read_config(directory: Path) -> dict[str, Any]:
    """DIR/config.json. Raises FileNotFoundError if there is none, ConfigError if it holds no JSON object."""
    path = directory / "config.json"
    if not present(path):
        raise FileNotFoundError(f"{path} not found: a Hugging Face checkpoint directory is expected")
    return read_json(path)


def read_weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor -> file as the index says; None without an index.

    Raises ConfigError if it is no JSON object, and CheckpointError unless it maps to names of files in this directory:
    an index that comes with downloaded weights must not name, and make-fp8 not write, a file elsewhere.
    """
    path = directory / INDEX
    if not present(path):
        return None
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path}: weight_map = {shown(table)}, legal: an object of tensor and file names")
    for tensor, file in table.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\0" in file:
            raise CheckpointError(
                f"{path}: weight_map has {shown(tensor)} in {shown(file)}, legal: the name of a file beside it"
            )
    return table
