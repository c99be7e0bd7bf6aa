"""A decode node for `tilert-ref bench handoff`: the real receive server over NIXL, in a process of its own.

    python -m tilert_ref.bench_receiver MODEL FORMAT TOKENS SLOTS      JSON lines in and out, ends with its input

Times are time.monotonic(), which is one clock for all processes of a machine.
"""

import json
import os
import subprocess
import sys
import threading
import time
from typing import IO, Any

import torch

from tilert_ref.connector import codec, wire
from tilert_ref.connector.layout import BufferLayout, model_profile, row_format
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.transport import make_transport
from tilert_ref.decode_server.buffer import SharedBuffer

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
TINY_GLM5 = model_profile(4, True, True)
"""Three layers and MTP, each with an indexer."""
MODELS = {"tiny-glm5": TINY_GLM5, "tiny-dsv3": model_profile(3, False, False)}


class Receiver:
    """The process, as its owner sees it.

    tokens: of each of its `slots` slots. row_format: by name. address: of the first slot.
    """

    def __init__(self, model: str, row_format: str, tokens: int, slots: int = 1) -> None:
        command = [sys.executable, "-m", "tilert_ref.bench_receiver", model, row_format, str(tokens), str(slots)]
        env = os.environ | {"UCX_NET_DEVICES": "lo"}
        self._process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ready = self._answer()
        self.port, self.address, self.pid = ready["port"], ready["address"], self._process.pid

    def expect(self, rids: list[str]) -> None:
        """Returns when the receiver is about to wait for the first of them."""
        self._say({"rids": rids})
        self._answer()

    def times(self) -> tuple[float, float]:
        """When the last done had been read, and when the waiting thread had the last expected record."""
        answer = self._answer()
        return answer["done"], answer["complete"]

    def check(self, wanted: int) -> None:
        """Raises RuntimeError if the first slot's bytes are not those of that checksum."""
        self._say({"checksum": True})
        if (got := self._answer()["checksum"]) != wanted:
            raise RuntimeError(f"the receiver's buffer has checksum {got}, the sender's {wanted}")

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, message: dict[str, Any]) -> None:
        _pipe(self._process.stdin).write(json.dumps(message) + "\n")
        _pipe(self._process.stdin).flush()

    def _answer(self) -> dict[str, Any]:
        for line in _pipe(self._process.stdout):
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the receiver ended with status {self._process.wait()}")


def checksum(memory: torch.Tensor) -> int:
    """Of uint8 [n], n a multiple of 4: depends on each byte's place."""
    words = memory.view(torch.int32).to(torch.int64)
    return int((words * torch.arange(1, len(words) + 1)).sum())


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("the child was started without a pipe")
    return stream


def _main(model: str, format_name: str, tokens: str, slots: str) -> None:
    layout = BufferLayout(MODELS[model], row_format(format_name), int(tokens))
    buffer = SharedBuffer.create(layout.total_bytes, int(slots)).slots
    server = ReceiveServer(layout, buffer, make_transport("nixl", HOST), HOST, 0)
    server.start()
    done_at = _watch_done()
    _print({"port": server.port, "address": buffer.data_ptr()})
    for line in sys.stdin:
        message = json.loads(line)
        if "checksum" in message:
            _print({"checksum": checksum(buffer[0])})
        else:
            _take(server, message["rids"], done_at)
    server.close()


def _take(server: ReceiveServer, rids: list[str], done_at: list[float]) -> None:
    for rid in rids:
        server.expect(rid)
    _print({"waiting": rids})
    for rid in rids:
        server.wait(rid, TIMEOUT_S, threading.Event())
        complete = time.monotonic()
        server.release(rid)
    _print({"done": done_at[-1], "complete": complete})


def _watch_done() -> list[float]:
    """A list whose only element becomes the time at which the last done was read."""
    read_done, at = wire.Connection.done, [0.0]

    def marked_done(connection: wire.Connection, deadline: float | None) -> codec.Done:
        done = read_done(connection, deadline)
        at[0] = time.monotonic()
        return done

    wire.Connection.done = marked_done
    return at


def _print(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
