"""Starting and stopping programs, with small programs in place of vLLM: readiness, early death, no process left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tilert_ref import stack
from tilert_ref.stack import EPHEMERAL_PORTS, Command, Process, StackError, free_port, free_ports, wait_ready

# Answers /health, ends on SIGTERM unless told not to. Has a child in its process group and one in another.
SERVER = """
import http.server, os, signal, subprocess, sys
port, stubborn = int(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "signal.signal(15, signal.SIG_IGN);" if stubborn else ""
child = [sys.executable, "-c", f"import signal; {ignore} signal.pause()"]
children = [subprocess.Popen(child), subprocess.Popen(child, process_group=0)]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("children", *[c.pid for c in children], flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(manner: str = "polite") -> Command:
    port = free_port()
    return Command("server", [sys.executable, "-c", SERVER, str(port), manner], f"http://127.0.0.1:{port}")


def children(process: Process) -> list[int]:
    line = next(li for li in process.log.read_text().splitlines() if li.startswith("children"))
    return [int(pid) for pid in line.split()[1:]]


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def await_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[Command], Process]]:
    made: list[Process] = []

    def start(command: Command) -> Process:
        made.append(Process(command, tmp_path / f"{len(made)}.log").start())
        return made[-1]

    yield start
    for process in made:
        process.stop(grace=0)


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_stop_ends_the_whole_session(started: Callable[[Command], Process], manner: str) -> None:
    process = started(server(manner)).wait_ready(20)
    pids = [process.pid, *children(process)]
    assert all(running(pid) for pid in pids)
    began = time.monotonic()
    process.stop(grace=0.5 if manner == "stubborn" else 60)
    assert not [pid for pid in pids if running(pid)]
    assert time.monotonic() - began < 30, "nothing waits for a process that was not asked to end"


def test_restart_uses_the_same_url(started: Callable[[Command], Process]) -> None:
    process = started(server()).wait_ready(20)
    first = process.pid
    process.signal(signal.SIGKILL)
    assert process.ended_within(10)
    with pytest.raises(StackError, match="server ended with status -9"):
        process.ready()
    process.restart().wait_ready(20)
    assert process.pid != first and process.ready()


def test_early_death_is_told_with_the_log(started: Callable[[Command], Process]) -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    process = started(Command("vLLM", [sys.executable, "-c", code], f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StackError, match=r"vLLM ended with status 3(.|\n)*no such model"):
        process.wait_ready(20)


def test_not_ready_in_time(started: Callable[[Command], Process]) -> None:
    silent = Command("decode server", [sys.executable, "-c", "input"], f"http://127.0.0.1:{free_port()}")
    sleeper = Command(silent.name, ["sleep", "60"], silent.url)
    with pytest.raises(StackError, match="decode server not ready after 0 s"):
        started(sleeper).wait_ready(0.3)


def test_one_death_ends_the_wait_for_all(started: Callable[[Command], Process]) -> None:
    sleeper = started(Command("router", ["sleep", "60"], f"http://127.0.0.1:{free_port()}"))
    dead = started(Command("vLLM", ["false"], f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StackError, match="vLLM ended with status 1"):
        wait_ready([sleeper, dead], 20)


def test_misuse_is_refused(tmp_path: Path, started: Callable[[Command], Process]) -> None:
    sleeper = Command("x", ["sleep", "60"], "http://127.0.0.1:1")
    with pytest.raises(StackError, match="x is not started"):
        _ = Process(sleeper, tmp_path / "log").pid
    with pytest.raises(StackError, match="x is started already"):
        started(sleeper).start()


OWNER = """
import sys, time
from pathlib import Path
from tilert_ref.stack import Command, Process, end_on_signals
url, log, *argv = sys.argv[1:]
with end_on_signals():
    process = Process(Command("server", argv, url), Path(log)).start().wait_ready(20)
    print(process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_the_owner(tmp_path: Path, number: int) -> None:
    command = server()
    argv = [sys.executable, "-c", OWNER, command.url, str(tmp_path / "log"), *command.argv]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        # As in a terminal: whoever runs the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as owner:
        assert owner.stdout is not None
        process = Process(command, tmp_path / "log")
        pids = [int(owner.stdout.readline()), *children(process)]
        assert all(running(pid) for pid in pids)
        owner.send_signal(number)
        status = owner.wait(20)
    assert status == {signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}.get(number, 128 + number)
    assert await_true(lambda: not [pid for pid in pids if running(pid)], 10)


def test_free_ports_are_different_and_no_other_program_gets_one_by_chance() -> None:
    """A decode server with --http-port 0 once got the port that the router was to have, and answered in its place."""
    low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert not [port for port in ports if low <= port <= high]


def test_where_the_kernel_gives_out_all_ports_it_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))  # it does not listen yet, as a vLLM that loads its model
        port = taken.getsockname()[1]
        (tmp_path / "range").write_text(f"{port + 1}\t65535\n")
        monkeypatch.setattr(stack, "EPHEMERAL_PORTS", tmp_path / "range")
        monkeypatch.setattr(stack, "FIRST_PORT", port)
        assert len({port, *free_ports(3)}) == 4
