"""Runs the published `tilert` package's parts, each in a process of its own. Needs nothing of this project.

    python zygote.py            a line on stdin starts a part: {"role", "port", "env", "args"}

torch is imported once and every part is a fork, so a part costs a tenth of a second, and the package reads the
environment that the part is to have when it is imported. The part connects to `port` on the loopback interface, says
one line when it is ready, then answers one JSON line for each that it gets: {"op", ...} -> {"ok": ...} or {"error"}.
"""

import json
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import scipy.linalg  # noqa: F401  (the package's Hadamard transform)
import torch  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            part(json.loads(line))
            os._exit(0)


def part(order: dict[str, Any]) -> None:
    os.environ.update(order["env"])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with socket.create_connection(("127.0.0.1", order["port"])) as sock, sock.makefile("rw") as channel:
        try:
            role = _role(order["role"])(**order["args"])
        except BaseException as error:
            _say(channel, {"error": _text(error)})
            return
        _say(channel, {"ok": role.facts()})
        for line in channel:
            _say(channel, _answer(role, json.loads(line)))


def _role(name: str) -> Any:
    import roles

    return roles.ROLES[name]


def _answer(role: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": getattr(role, request.pop("op"))(**request)}
    except Exception as error:
        return {"error": _text(error)}


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _say(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
