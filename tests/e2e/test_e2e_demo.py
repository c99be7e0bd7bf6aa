"""`tilert-ref demo` as a user runs it: equal tokens, exit status, and no process left however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tilert_ref.tiny.skills import known_answers

pytestmark = pytest.mark.vllm
SKY = next(answer for questions, answer in known_answers() if "Why is the sky blue?" in questions)


class Demo:
    """One run. Its processes are found by a variable in their environment."""

    def __init__(self, *args: str) -> None:
        self.mark = uuid.uuid4().hex
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tilert_ref.cli", "demo", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"DEMO_MARK": self.mark},
            # As in a terminal: whoever runs the tests in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for(self, text: str) -> None:
        assert self.popen.stdout is not None
        seen = []
        for line in self.popen.stdout:
            seen.append(line)
            if text in line:
                return
        pytest.fail(f"the demo ended without {text!r}:\n{''.join(seen)}")

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._ours(p)]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("DEMO_MARK") == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


@contextmanager
def demo(*args: str) -> Iterator[Demo]:
    run = Demo(*args)
    try:
        yield run
    finally:
        run.popen.kill()
        run.popen.communicate()


def finished(*args: str) -> str:
    """The output of a run that ends by itself: status 0, no process left."""
    with demo(*args) as run:
        out, _ = run.popen.communicate(timeout=500)
        assert run.popen.returncode == 0, out
        assert run.processes() == []
    for row in ("prefill", "handoff", "first token", "per token"):
        assert any(line.startswith(f"  {row} ") and " ms " in line for line in out.splitlines()), out
    return out


@pytest.mark.parametrize("extra", [(), ("--num-mtp", "3")])
def test_the_trained_model_answers_and_calls_a_tool(extra: tuple[str, ...]) -> None:
    """The right answers, each to its end, and every token vLLM's; with drafts more than two tokens a step."""
    out = finished(*extra)
    for said in (SKY, '(calls) get_weather {"city": "Paris"}', "In Paris it is 21 degrees and sun."):
        assert f"  {said}\n" in out
    last = re.fullmatch(r"tokens: (\d+) identical, 0 tie, 0 diverged against vLLM's own decode", out.splitlines()[-1])
    assert last, out
    assert int(last[1]) > 80
    steps = [float(found) for found in re.findall(r"^  MTP +(\d+\.\d+) ", out, re.MULTILINE)]
    assert len(steps) == 3 * bool(extra)
    assert all(step > 2 for step in steps), steps


def test_a_random_model_is_noise_but_vllms() -> None:
    out = finished("--arch", "glm47", "--transport", "zmq")
    assert out.splitlines()[-1] == "tokens: 64 identical, 0 tie, 0 diverged against vLLM's own decode", out


def test_a_wrong_token_is_seen() -> None:
    """The stub engine makes up tokens: exit status 1, and every token of it is judged."""
    with demo("--engine", "stub", "--max-tokens", "4", "--json") as run:
        out, _ = run.popen.communicate(timeout=500)
    assert run.popen.returncode == 1, out
    result = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert result["diverged"] >= 1
    assert result["identical"] + result["tie"] + result["diverged"] == sum(map(len, result["vllm_ids"]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(number: int) -> None:
    with demo() as run:
        run.wait_for("waiting for vLLM")
        assert len(run.processes()) >= 4
        run.popen.send_signal(number)
        run.popen.wait(60)
        assert run.popen.returncode == 128 + number
        assert run.processes() == []


def test_killed_it_leaves_nothing() -> None:
    with demo() as run:
        run.wait_for("waiting for vLLM")
        run.popen.kill()
        deadline = time.monotonic() + 30
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run.processes() == []
