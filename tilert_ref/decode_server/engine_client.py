"""The server's side of the engine: spawn the process, watch it, restart it, run requests on it.

    EngineProcess   one process and its socket, from spawn to death
    EngineClient    keeps one EngineProcess alive; hands out one EngineRun at a time
    EngineRun       the events of one request

All of it lives on one asyncio loop. The engine process is only ever ended by SIGKILL: it holds nothing that needs
saving, and a hung one would ignore anything weaker.
"""

import asyncio
import contextlib
import itertools
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from tilert_ref.decode_server.buffer import NO_FD
from tilert_ref.decode_server.messages import (
    Cancel,
    Command,
    Ended,
    EngineSpec,
    Event,
    Failed,
    Generate,
    LoadFailed,
    Progress,
    Ready,
    RunEvent,
    decode_event,
    encode,
)

EngineState = Literal["loading", "ready", "restarting", "failed", "closed"]
DRAIN_MS = 200
"""A dead process's messages have all been read when none has come for so long."""
SHUTTING_DOWN = "the decode server is shutting down"
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0


class EngineUnavailable(Exception):
    """There is no engine to run on at the moment; the text says why."""


class EngineCrashed(Exception):
    """The engine process died, or had to be killed, while a request ran on it."""


class EngineStalled(EngineCrashed):
    """The engine produced nothing for the stall deadline and was killed."""


class EngineClosed(EngineCrashed):
    """The server is shutting down."""


@dataclass(frozen=True)
class EngineDeadlines:
    """cancel_s: from Cancel to the end of the run. stall_s: between two events. Past either: kill and restart."""

    cancel_s: float = 30.0
    stall_s: float = 600.0


@dataclass(frozen=True)
class EngineStatus:
    """reason: what stands in the way unless `ready`. restarts: processes started after the first."""

    state: EngineState
    reason: str = ""
    pid: int | None = None
    restarts: int = 0


class EngineProcess:
    """One engine process. Events arrive through `on_event`, in the loop; `wait` returns when the process is gone."""

    def __init__(self, spec: EngineSpec, on_event: Callable[[Event], None]) -> None:
        self._spec = spec
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._directory: str | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Spawns the process and serves its socket until it has died. Returns its exit status (negative: signal)."""
        self._directory = tempfile.mkdtemp(prefix="tilert-ref-")
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.PAIR)
        try:
            endpoint = f"ipc://{self._directory}/engine"
            self._socket.bind(endpoint)
            self._process = await self._spawn(endpoint)
            if self._killed:  # while it was being spawned
                self.kill()
            return await self._serve(self._process)
        finally:
            self.kill()
            self._socket.close(linger=0)
            context.term()
            self._remove_directory()

    def send(self, command: Command) -> None:
        """Raises zmq.Again if the process is not connected."""
        self._socket.send(encode(command), flags=zmq.NOBLOCK).result()

    def kill(self) -> None:
        self._killed = True
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _spawn(self, endpoint: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tilert_ref.decode_server.engine_process"),
            *(endpoint, msgspec.json.encode(self._spec).decode()),
            stdin=asyncio.subprocess.PIPE,  # held open: its end tells the process that the server is gone
            pass_fds=() if self._spec.buffer_fd == NO_FD else (self._spec.buffer_fd,),
            process_group=0,  # Ctrl-C in a terminal goes to the server, which ends the engine itself
        )

    async def _serve(self, process: asyncio.subprocess.Process) -> int:
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self.kill())  # an engine that can't be understood is as good as dead
        status = await process.wait()
        reader.cancel()
        while await self._socket.poll(DRAIN_MS):
            await self._read_one()
        return status

    async def _read(self) -> None:
        while True:
            await self._read_one()

    async def _read_one(self) -> None:
        event = decode_event(await self._socket.recv())
        self._remove_directory()
        self._on_event(event)

    def _remove_directory(self) -> None:
        """A connected socket needs no file, and what isn't there can't be left behind by a kill -9."""
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


class EngineRun:
    """The events of one request: Injected, Stepped ..., then Ended or Failed. `over`: the engine is free again."""

    def __init__(self, client: "EngineClient", number: int) -> None:
        self._client = client
        self.number = number
        self.over = asyncio.Event()
        self._events: asyncio.Queue[RunEvent | EngineCrashed] = asyncio.Queue()
        self._deadline: asyncio.TimerHandle | None = None

    async def next(self) -> RunEvent:
        """The next event. Raises EngineCrashed if the process died, EngineStalled if it was killed for its silence."""
        try:
            async with asyncio.timeout(self._client.deadlines.stall_s):
                event = await self._events.get()
        except TimeoutError:
            self._client.kill(EngineStalled("decode stalled"))
            event = await self._events.get()
        return self._checked(event)

    def cancel(self) -> None:
        """Asks the engine to stop; kills it if the run is not over within the deadline. Harmless when repeated."""
        if self.over.is_set() or self._deadline:
            return
        seconds = self._client.deadlines.cancel_s
        error = EngineCrashed(f"the engine did not stop within {seconds:g} s of a cancel and was killed")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._client.kill, error)
        self._client.send(Cancel(self.number))

    async def close(self) -> None:
        """Returns when the engine no longer works on this request, if need be because it was killed."""
        self.cancel()
        await self.over.wait()

    def deliver(self, event: RunEvent | EngineCrashed) -> None:
        self._events.put_nowait(event)
        if isinstance(event, Ended | Failed | EngineCrashed):
            self.over.set()
            if self._deadline:
                self._deadline.cancel()

    @staticmethod
    def _checked(event: RunEvent | EngineCrashed) -> RunEvent:
        if isinstance(event, EngineCrashed):
            raise event
        return event


class EngineClient:
    """Keeps one engine process alive from `start` to `close` and runs one request at a time on it."""

    def __init__(
        self,
        spec: EngineSpec,
        on_progress: Callable[[str], None],
        deadlines: EngineDeadlines = EngineDeadlines(),
    ) -> None:
        self.deadlines = deadlines
        self.status = EngineStatus("loading", "engine is loading")
        self.ready: Ready | None = None  # kept over a restart: capabilities don't change
        self._spec = spec
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._run: EngineRun | None = None
        self._numbers = itertools.count(1)
        self._why: EngineCrashed | None = None  # known reason for the death that is to come
        self._lost: EngineCrashed | None = None  # how the last process ended
        self._closing = asyncio.Event()
        self._loaded_once = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def loaded(self) -> None:
        """Returns when the engine is ready for the first time. Raises EngineUnavailable if it never will be."""
        loaded = asyncio.create_task(self._loaded_once.wait())
        try:
            await asyncio.wait({loaded, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()
        if not self._loaded_once.is_set():
            raise EngineUnavailable(self.status.reason)

    def generate(self, request: Generate) -> EngineRun:
        """Starts a request; its `run` number is set here. Raises EngineUnavailable if there is no engine to take it."""
        if self.status.state != "ready":
            raise EngineUnavailable(self.status.reason)
        if self._run and not self._run.over.is_set():
            raise RuntimeError(f"run {self._run.number} is not over")
        run = self._run = EngineRun(self, next(self._numbers))
        self.send(msgspec.structs.replace(request, run=run.number))
        return run

    def send(self, command: Command) -> None:
        """A process that can't be reached is dead or dying; its run fails when the supervisor has seen that."""
        if self._process:
            with contextlib.suppress(zmq.Again):
                self._process.send(command)

    def kill(self, why: EngineCrashed) -> None:
        """Ends the process. The current run fails with `why`, the supervisor starts a new one."""
        if self._process:
            self._why = why
            self._process.kill()

    async def close(self) -> None:
        """Ends the process for good. Returns when it is gone."""
        self._closing.set()
        self.kill(EngineClosed(SHUTTING_DOWN))
        if self._task:
            await self._task

    async def _supervise(self) -> None:
        pause = FIRST_RETRY_S
        for restarts in itertools.count():
            loaded = await self._live(restarts)
            if self._closing.is_set():
                self.status = EngineStatus("closed", SHUTTING_DOWN)
            elif not self._loaded_once.is_set():
                self.status = EngineStatus("failed", str(self._lost))
            elif loaded:
                pause = FIRST_RETRY_S
                continue
            elif not await self._closed_within(pause):
                pause = min(2 * pause, LAST_RETRY_S)
                continue
            return

    async def _live(self, restarts: int) -> bool:
        """One process from spawn to death. Returns whether it was ever ready."""
        self._why = None
        self._process = EngineProcess(self._spec, lambda event: self._on_event(event, restarts))
        if self._closing.is_set():
            return False
        try:
            status = await self._process.run()
            lost = self._why or EngineCrashed(f"the engine process died: {describe_exit(status)}")
        except (OSError, zmq.ZMQError) as error:
            lost = EngineCrashed(f"the engine process could not be started: {error}")
        except msgspec.MsgspecError as error:
            lost = EngineCrashed(f"the engine process could not be understood: {error}")
        self._lost = lost
        loaded = self.status.state == "ready"
        self.status = EngineStatus("restarting", f"engine is restarting: {lost}", restarts=restarts)
        if self._run and not self._run.over.is_set():
            self._run.deliver(lost)
        return loaded

    def _on_event(self, event: Event, restarts: int) -> None:
        match event:
            case Progress(text):
                self._on_progress(text)
            case Ready():
                self.ready = event
                self.status = EngineStatus("ready", pid=self._process.pid, restarts=restarts)
                self._loaded_once.set()
            case LoadFailed(error):
                self._why = EngineCrashed(error)
            case _:
                if self._run and event.run == self._run.number:
                    self._run.deliver(event)

    async def _closed_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()


def describe_exit(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
