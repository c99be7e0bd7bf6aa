"""The published package on the other side of a test: where it is, and its parts as Python objects."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "TILERT_REF_INTEROP_PYTHON"
VERSION = "0.1.6.post3"
ZYGOTE = Path(__file__).parent / "peer" / "zygote.py"
LIMIT_S = 500.0
NEEDED = "import sys, tilert, nixl, scipy.linalg; assert sys.version_info >= (3, 12); print(tilert.__version__)"


@functools.cache
def find_python() -> tuple[str, str]:
    """(interpreter with the published package, "") or ("", why there is none)."""
    python = os.environ.get(VARIABLE) or sys.executable
    checked = subprocess.run([python, "-c", NEEDED], capture_output=True, text=True, timeout=LIMIT_S)
    if checked.returncode == 0 and checked.stdout.split()[-1] == VERSION:
        return python, ""
    got = checked.stdout.strip() or checked.stderr.strip().splitlines()[-1]
    return "", f"{python} has no tilert {VERSION} with nixl and scipy on Python 3.12 ({got}); name one in ${VARIABLE}"


class PartFailed(AssertionError):
    """The published package raised; the text is its traceback."""


class Part:
    """One running part. Every operation of the role is a method: `part.wait(timeout=5)`."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._file = channel.makefile("rw")
        self.facts: dict[str, Any] = self._read()

    def __getattr__(self, op: str) -> Any:
        return lambda **args: self._call({"op": op} | args)

    def begin(self, op: str, **args: Any) -> None:
        """Sends an operation without waiting for its end."""
        self._file.write(json.dumps({"op": op} | args) + "\n")
        self._file.flush()

    def end(self) -> Any:
        """The result of the operation that `begin` sent."""
        return self._read()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _call(self, request: dict[str, Any]) -> Any:
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        return self._read()

    def _read(self) -> Any:
        line = self._file.readline()
        if not line:
            raise PartFailed("the part ended; its output says why")
        answer = json.loads(line)
        if "error" in answer:
            raise PartFailed(answer["error"])
        return answer["ok"]


class Reference:
    """Starts parts of the published package. Their logs go to `log`."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, str(ZYGOTE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TILERT_PD_PROBE_ADDR": "127.0.0.1"},
        )
        assert self._process.stdout.readline() == "ready\n", f"the reference did not start, see {log}"

    def start(self, role: str, env: dict[str, str] | None = None, **args: Any) -> Part:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LIMIT_S)
            order = {"role": role, "port": listener.getsockname()[1], "env": env or {}, "args": args}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            channel, _ = listener.accept()
        channel.settimeout(LIMIT_S)
        return Part(channel)

    @contextlib.contextmanager
    def part(self, role: str, env: dict[str, str] | None = None, **args: Any) -> Iterator[Part]:
        part = self.start(role, env, **args)
        try:
            yield part
        finally:
            part.close()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(LIMIT_S)
        self._log.close()
