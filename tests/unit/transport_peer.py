"""The receiving end of a transport in a process of its own, driven over a pipe."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tilert_ref.connector.transport import TransferError, make_transport

DEADLINE_S = 120


def serve(pipe: Connection, name: str, nbytes: int) -> None:
    """Commands: ("clear", tag to admit), ("read",) -> the buffer's bytes. Ends with the pipe."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    transport = make_transport(name, "127.0.0.1")
    transport.register(buffer.data_ptr(), nbytes, buffer)
    pipe.send((transport.local_meta("127.0.0.1"), buffer.data_ptr()))
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            os._exit(0)
        if command[0] == "clear":
            buffer.zero_()
            transport.admit({command[1]: buffer.data_ptr()})
        pipe.send(buffer.numpy().tobytes() if command[0] == "read" else None)


def needs(name: str) -> None:
    """Skips the test where transport mooncake cannot work: its libraries are root's to install (scripts/setup-env)."""
    if name == "mooncake":
        try:
            make_transport(name, "", receiver=False).start()
        except TransferError as error:
            pytest.skip(str(error))


class Peer:
    """A receiver process. meta: what its hello would carry; address: of its buffer."""

    def __init__(self, name: str, nbytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])  # imported once, not by every receiver
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, nbytes), daemon=True)
        self._process.start()
        theirs.close()
        self.meta, self.address = self._answer()

    def clear(self, tag: bytes) -> None:
        """Zeroes the buffer and admits writes with this tag."""
        self._pipe.send(("clear", tag))
        self._answer()

    def read(self) -> bytes:
        self._pipe.send(("read",))
        return self._answer()

    def stop(self) -> None:
        """Returns when all threads stand still: on a busy machine some go on until one of them has met the signal."""
        os.kill(self._process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while not self._stands_still():
            assert time.monotonic() < deadline, "the receiver process does not stop"
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        try:
            return all(") T " in stat.read_text() for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"))
        except FileNotFoundError:  # a thread that has just ended
            return False

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError("the receiver process does not answer")
        return self._pipe.recv()
