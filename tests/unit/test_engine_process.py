"""The engine process and its client, with real processes: crash, hang, cancel, restart, death of the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from decode_doubles import plane_token

from tilert_ref.connector.layout import Profile, plane_views
from tilert_ref.decode_server.buffer import NO_FD, DeviceBuffer, RemoteMemory, SharedBuffer
from tilert_ref.decode_server.engine_client import (
    EngineClient,
    EngineCrashed,
    EngineDeadlines,
    EngineRun,
    EngineStalled,
    EngineUnavailable,
)
from tilert_ref.decode_server.messages import Ended, EngineSpec, Failed, Generate, Injected, LayoutSpec, Stepped
from tilert_ref.engine.api import SamplingParams

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
LAYOUT = LayoutSpec(profile=Profile("model", 3, True, True, 2000), kv_cache_dtype="bf16", max_seq_len=128)
SEQ_LEN = 70
START_S = 60
STEP_S = 20


class Rig:
    """One supervised engine on an event loop of its own, kept over the tests of this file."""

    def __init__(self, **overrides: Any) -> None:
        layout = LAYOUT.layout()
        self.buffer = SharedBuffer.create(layout.total_bytes)
        self.buffer.slots[0].copy_(torch.arange(layout.total_bytes) % 251)
        self.progress: list[str] = []
        spec = EngineSpec(
            engine="decode_doubles:load_engine",
            model_dir="",
            device="cpu",
            max_seq_len=128,
            num_mtp=3,
            layout=LAYOUT,
            buffer_fd=self.buffer.fd,
        )
        spec = EngineSpec(**{name: overrides.get(name, getattr(spec, name)) for name in spec.__struct_fields__})
        self.client = EngineClient(spec, self.progress.append, EngineDeadlines(cancel_s=0.5, stall_s=STEP_S))
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Any], limit: float = START_S) -> Any:
        return self.runner.run(asyncio.wait_for(work, limit))

    async def start(self) -> None:
        self.client.start()
        await self.client.loaded()

    async def restarted(self, before: int) -> None:
        while self.client.status.state != "ready" or self.client.status.pid == before:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.run(self.client.close())
        self.runner.close()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]))
        rig = Rig()
        rig.run(rig.start())
        yield rig
        rig.close()


def test_slots_on_a_gpu_are_described_to_the_engine_process() -> None:
    """The memory itself takes a GPU (tests/gpu/test_gpu_handoff.py); here it is the host's."""
    remote = RemoteMemory(0, b"\0\xff", 3 * 8192, 512, b"counter", 7, b"event", True)
    spec = EngineSpec("ref", "", "cuda", 128, 0, LAYOUT, NO_FD, device_buffer=remote)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=EngineSpec) == spec
    memory = torch.arange(3 * 8192).to(torch.uint8)
    slots = DeviceBuffer(memory, 5000, 3, remote).slots
    assert slots.shape == (3, 5000) and slots[2].data_ptr() == memory.data_ptr() + 2 * 8192
    with pytest.raises(ValueError, match="has 24576 bytes, 2 slots of this layout need 16384"):
        DeviceBuffer(memory, 5000, 2, remote)


def generate(client: EngineClient, rid: str, max_tokens: int = 100) -> EngineRun:
    return client.generate(
        Generate(
            rid=rid,
            seq_len=SEQ_LEN,
            last_prompt_token=5,
            first_token_id=42,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
        )
    )


async def decode(client: EngineClient, rid: str, max_tokens: int = 100) -> list[Any]:
    return await events(generate(client, rid, max_tokens))


async def events(run: EngineRun) -> list[Any]:
    got = [await run.next()]
    while not isinstance(got[-1], Ended | Failed):
        got.append(await run.next())
    return got


def tokens(got: list[Any]) -> list[int]:
    return [token for event in got if isinstance(event, Stepped) for token in event.ids]


def test_ready_says_what_the_engine_is(rig: Rig) -> None:
    assert rig.client.ready.name == "DoubleEngine"
    assert rig.client.ready.capabilities.logprobs and not rig.client.ready.capabilities.penalties
    assert rig.progress[0] == "loading the double"


def test_the_engine_reads_the_bytes_of_the_shared_buffer(rig: Rig) -> None:
    got = rig.run(decode(rig.client, "normal"))
    layout = LAYOUT.layout()
    planes = [view for layer in range(3) for view in plane_views(layout, rig.buffer.slots[0], layer, SEQ_LEN)]
    assert isinstance(got[0], Injected)
    assert tokens(got) == [42, *map(plane_token, planes)]
    assert got[-1].reason == "length" and got[-1].stats == {"steps": 3}


def test_an_engine_error_ends_the_request_and_not_the_process(rig: Rig) -> None:
    pid = rig.client.status.pid
    assert rig.run(decode(rig.client, "inject_raise"))[-1].error == "this prompt is refused"
    assert rig.run(decode(rig.client, "raise"))[-1].error == "RuntimeError: decode broke"
    assert "without Finished" in rig.run(decode(rig.client, "no_end"))[-1].error
    assert tokens(rig.run(decode(rig.client, "normal", 3)))[0] == 42
    assert rig.client.status.pid == pid


def test_cancel_between_two_steps(rig: Rig) -> None:
    async def work() -> list[Any]:
        run = generate(rig.client, "endless")
        while not isinstance(await run.next(), Stepped):
            pass
        run.cancel()
        return await events(run)

    assert rig.run(work())[-1].reason == "cancelled"


def test_cancel_during_inject_ends_before_decode(rig: Rig) -> None:
    async def work() -> list[Any]:
        run = generate(rig.client, "inject_slow")
        await asyncio.sleep(0.05)
        run.cancel()
        return await events(run)

    got = rig.run(work())
    assert [type(event) for event in got] == [Ended] and got[0].reason == "cancelled"


def test_only_one_run_at_a_time(rig: Rig) -> None:
    async def work() -> None:
        run = generate(rig.client, "endless")
        with pytest.raises(RuntimeError, match="is not over"):
            generate(rig.client, "second")
        await run.close()

    rig.run(work())


def test_a_crash_fails_the_request_and_the_engine_comes_back(rig: Rig) -> None:
    async def work() -> None:
        before = rig.client.status.pid
        with pytest.raises(EngineCrashed, match="SIGKILL"):
            await decode(rig.client, "crash")
        with pytest.raises(EngineUnavailable, match="restarting"):
            generate(rig.client, "too early")
        await rig.restarted(before)
        assert tokens(await decode(rig.client, "normal"))[0] == 42

    rig.run(work())


def test_a_hung_engine_is_killed_after_a_cancel(rig: Rig) -> None:
    async def work() -> None:
        before = rig.client.status.pid
        run = generate(rig.client, "inject_hang")
        run.cancel()
        run.cancel()
        with pytest.raises(EngineCrashed, match=r"did not stop within 0.5 s"):
            await events(run)
        assert run.over.is_set() and not psutil.pid_exists(before)
        await rig.restarted(before)

    rig.run(work())


def test_a_silent_engine_is_killed_at_the_stall_deadline(rig: Rig) -> None:
    async def work() -> None:
        before = rig.client.status.pid
        rig.client.deadlines = EngineDeadlines(cancel_s=0.5, stall_s=0.3)
        with pytest.raises(EngineStalled, match="decode stalled"):
            await decode(rig.client, "hang")
        rig.client.deadlines = EngineDeadlines(cancel_s=0.5, stall_s=STEP_S)
        await rig.restarted(before)

    rig.run(work())


def test_an_idle_engine_that_dies_is_replaced(rig: Rig) -> None:
    async def work() -> None:
        before = rig.client.status.pid
        os.kill(before, signal.SIGKILL)
        await rig.restarted(before)
        assert tokens(await decode(rig.client, "normal", 1)) == [42]

    rig.run(work())


def test_an_engine_that_never_loads_is_not_retried(rig: Rig) -> None:
    async def work(broken: Rig, reason: str) -> None:
        with pytest.raises(EngineUnavailable, match=reason):
            await broken.start()
        assert broken.client.status.state == "failed"
        await broken.client.close()

    async def both() -> None:
        rigs = Rig(model_dir="broken"), Rig(model_dir="dies")
        await asyncio.gather(work(rigs[0], "missing weight: model.norm.weight"), work(rigs[1], "SIGKILL"))

    rig.run(both())


SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_engine_process import Rig, generate
async def work(rig):
    await rig.start()
    generate(rig.client, "hang")
    print(rig.client.status.pid, flush=True)
    await asyncio.sleep(600)
rig = Rig()
rig.run(work(rig), 600)
"""


def test_kill_9_of_the_server_leaves_no_process_and_no_file(rig: Rig, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER.format(tests=str(TESTS))]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        engine = psutil.Process(int(server.stdout.readline()))
        server.kill()
        engine.wait(timeout=5)  # raises TimeoutExpired if it lives on
    assert list(tmp_path.iterdir()) == []


def test_close_while_the_process_is_being_spawned(rig: Rig) -> None:
    async def work() -> None:
        other = Rig()
        other.client.start()
        await asyncio.sleep(0)
        await other.client.close()
        assert other.client.status.state == "closed"

    rig.run(work())


def test_close_ends_the_process_at_once(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pid = rig.client.status.pid
        run = generate(rig.client, "endless")
        start = time.monotonic()
        await rig.client.close()
        assert time.monotonic() - start < 1.5
        assert not psutil.pid_exists(pid)
        with pytest.raises(EngineCrashed, match="shutting down"):
            await events(run)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            generate(rig.client, "too late")

    rig.run(work())
