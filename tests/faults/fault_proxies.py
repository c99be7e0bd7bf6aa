"""What sits between the processes: TCP proxies that know the protocol's steps, and the vLLM that drives the senders.

Each step that passes is reported to `Steps`, which says what to do with it.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

STEPS = ("prefill", "prefill_reply", "connect", "hello", "announce", "reply", "done", "decode_post", "decode_reply")
FRAME_FAULTS = ("drop", "double", "truncate", "cut", "delay", "stale", "garbage")
FRAME_STEPS = ("hello", "announce", "reply", "done")
HTTP_STEPS = ("decode_post", "decode_reply")


@dataclass(frozen=True)
class Fault:
    """what: of FRAME_FAULTS for this frame, or kill, stop, cancel, leave, fail. nth: which occurrence of the step, from
    0. target: a process, or the number of a request. seconds: how long. after: seconds from the step to the fault."""

    step: str
    what: str
    nth: int = 0
    target: str = ""
    seconds: float = 0.0
    after: float = 0.0


class Steps:
    """Counts what passes, and lets the faults of the current run happen."""

    def __init__(self, act: Callable[[Fault], Awaitable[None]]) -> None:
        self._act = act
        self.tasks: set[asyncio.Task[None]] = set()
        self.begin([])

    def begin(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.passed: Counter[str] = Counter()
        self.happened: list[Fault] = []

    async def reached(self, step: str) -> Fault | None:
        """Returns the fault of the message itself, if it has one; others happen here."""
        nth = self.passed[step]
        self.passed[step] += 1
        found = None
        for fault in [f for f in self.faults if (f.step, f.nth) == (step, nth)]:
            self.happened.append(fault)
            if fault.what in FRAME_FAULTS or fault.what == "fail":
                found = fault
            elif fault.after:
                task = asyncio.create_task(self._later(fault))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                await self._act(fault)
        return found

    async def _later(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after)
        await self._act(fault)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Listens for good; `target` is where the process behind it listens at the moment."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.target = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            theirs = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(theirs[1])
            pumps = [self.up(reader, theirs[1]), self.down(theirs[0], writer)]
            await asyncio.gather(*(self._pumped(pump, writers) for pump in pumps))
        except OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort() if each.transport.get_write_buffer_size() else each.close()

    async def _pumped(self, pump: Awaitable[None], writers: list[asyncio.StreamWriter]) -> None:
        """The end of one direction ends the connection: nothing here half-closes."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await pump
        for each in writers:
            each.close()

    async def up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class ControlProxy(Proxy):
    async def up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.steps.reached("connect")
        await self._frames(reader, writer, ("announce", "done"))

    async def down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._frames(reader, writer, ("hello", "reply"))

    async def _frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: tuple[str, str]) -> None:
        for step in [*steps, "later"]:
            head = await reader.readexactly(4)
            frame = head + await reader.readexactly(int.from_bytes(head))
            fault = await self.steps.reached(step)
            for data in await self._faulty(frame, fault):
                writer.write(data)
                await writer.drain()
            if fault and fault.what in ("truncate", "cut"):
                return
        await reader.read()

    @staticmethod
    async def _faulty(frame: bytes, fault: Fault | None) -> list[bytes]:
        match fault and fault.what:
            case "drop" | "cut":
                return []
            case "double":
                return [frame, frame]
            case "truncate":
                return [frame[: len(frame) * 2 // 3]]
            case "garbage":
                return [frame[:4] + b"\xff" * (len(frame) - 4)]
            case "delay":
                await asyncio.sleep(fault.seconds)
            case "stale":
                message = json.loads(frame[4:])
                if "generation" in message:
                    payload = json.dumps(message | {"generation": max(0, message["generation"] - 1)}).encode()
                    return [len(payload).to_bytes(4) + payload]
        return [frame]


class HttpProxy(Proxy):
    """To the decode server's HTTP port. Only /pd/decode counts as a step."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._decoding: set[asyncio.Task[Any] | None] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.read(65536)
        counts = head.startswith(b"POST /pd/decode")
        if counts and await self._stopped_by("decode_post"):
            writer.close()
            return
        writers = [writer]
        try:
            theirs = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(theirs[1])
            theirs[1].write(head)
            pumps = [_copy(reader, theirs[1]), self._answer(theirs[0], writer, counts)]
            await asyncio.gather(*(self._pumped(pump, writers) for pump in pumps))
        except OSError:
            pass
        finally:
            for each in writers:
                each.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        while data := await reader.read(65536):
            if counts and await self._stopped_by("decode_reply"):
                return
            writer.write(data)
            await writer.drain()

    async def _stopped_by(self, step: str) -> bool:
        fault = await self.steps.reached(step)
        if fault and fault.what == "delay":
            await asyncio.sleep(fault.seconds)
        return fault is not None and fault.what == "cut"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
