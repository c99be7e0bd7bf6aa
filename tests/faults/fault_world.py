"""A prefill node's senders, a decode node or two, a router: real processes over real NIXL, with faults between them.

    with World() as world:
        report = world.run(plan_of(7))      raises nothing: report.wrong says what is wrong

Processes live over many runs; only what was killed is started again.
"""

import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import fault_processes as processes
import psutil
from fault_engine import checksum
from fault_plan import Ask, Plan
from fault_proxies import ControlProxy, Fault, HttpProxy, Steps

from tilert_ref.connector.layout import PLANES
from tilert_ref.stack import free_port

START_S = 90.0
REQUEST_S = 25.0
SETTLED_S = 40.0
"""How long after a run every slot, staging buffer and process may take to be as before. REQUEST_TIMEOUT_S, or a router
request's 12 s, where nothing else runs; a machine that starves these processes was seen to need 25."""
SPARE_FDS = 16
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Report:
    """Of one run. answers: what each request got. wrong: empty if all is well."""

    answers: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    settled_s: float = 0.0
    seconds: float = 0.0


@dataclass
class Answer:
    """status 0: no answer. ids: the tokens that came, all of them if complete."""

    status: int = 0
    ids: list[int] = field(default_factory=list)
    complete: bool = False
    error: str = ""

    def __str__(self) -> str:
        return f"{self.status} {'complete' if self.complete else self.error or 'cut'}"


class Node:
    """A decode server behind its proxies."""

    def __init__(self, steps: Steps) -> None:
        self.control, self.http = ControlProxy(steps), HttpProxy(steps)
        self.process: Any = None
        self.engine = 0

    @property
    def spec(self) -> str:
        return f"127.0.0.1:{self.control.port}:{self.http.port}"

    def get(self, path: str) -> dict[str, Any]:
        """Straight from the server, past the proxy."""
        return _call(self.http.target, "GET", path, None, 3.0)[1]


class World:
    def __init__(self, nodes: int = 1) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tilert-faults-"))
        self._environment = dict(os.environ)
        processes.prepare(self.directory)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # an orphan becomes our child, and is seen
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.steps = Steps(self._act)
        self.layout = processes.receive_layout()
        self.shm = _shm()
        self.others = set(psutil.Process().children(recursive=True))
        self.nodes = [Node(self.steps) for _ in range(nodes)]
        self.ranks: list[Any] = [None] * processes.RANKS
        self.pipes: list[Any] = [None] * processes.RANKS
        self.router: Any = None
        self.rids: dict[int, str] = {}  # key -> rid
        self.fds: dict[int, int] = {}  # pid -> descriptors after its first run
        self._killed: list[psutil.Process] = []
        self._log = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Life

    def _start(self) -> None:
        for node in self.nodes:
            for proxy in (node.control, node.http):
                self._call(proxy.listen())
        self.vllm_port = self._call(self._listen())
        self.router_port = free_port()
        self.revive()
        if failed := self._probe():  # the first handoff of a sender starts its NIXL
            raise TimeoutError(failed[0])

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._vllm, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    def revive(self) -> list[str]:
        """Starts what is not running; returns when all of it serves."""
        started = []
        fresh = [node for node in self.nodes if not _running(node.process)]
        for node in fresh:
            self._reap(node.process)
            self._log += 1
            log = self.directory / f"decode{self._log}"
            node.process, node.log = processes.start(processes.decode_server, log), log
        for number, process in enumerate(self.ranks):
            if not _running(process):
                self._reap(process)
                started.append(f"rank{number}")
                self._start_rank(number)
        if not _running(self.router):
            self._reap(self.router)
            started.append("router")
            specs = [node.spec for node in self.nodes]
            arguments = (self.router_port, self.vllm_port, specs)
            self.router = processes.start(processes.router, self.directory / "router", *arguments)
        for node in fresh:
            started.append("decode")
            self._learn_ports(node)
        for node in self.nodes:
            eventually(lambda node=node: self._engine_ready(node), "the engine is ready", START_S)
        eventually(lambda: self._router_up(), "the router is up", START_S)
        return started

    def _start_rank(self, number: int) -> None:
        from multiprocessing import get_context

        self.pipes[number], theirs = get_context("forkserver").Pipe()
        self.ranks[number] = processes.start(processes.rank, self.directory / f"rank{number}", theirs, number)
        theirs.close()

    def _learn_ports(self, node: Node) -> None:
        found = None

        def ports() -> bool:
            nonlocal found
            text = node.log.read_text() if node.log.exists() else ""
            found = re.search(r"http on \S+:(\d+), prefill nodes on port (\d+)", text)
            return found is not None

        eventually(ports, "the decode server listens", START_S)
        node.http.target, node.control.target = map(int, found.groups())

    @staticmethod
    def _engine_ready(node: Node) -> bool:
        if not _running(node.process):
            raise RuntimeError(f"the decode server ended: {node.log.read_text()[-2000:]}")
        engine = node.get("/health").get("engine", {})
        node.engine = engine.get("pid") or 0
        return engine.get("state") == "ready" and _lives(node.engine)

    def _router_up(self) -> bool:
        if not _running(self.router):
            raise RuntimeError(f"the router ended: {(self.directory / 'router').read_text()[-2000:]}")
        return _call(self.router_port, "GET", "/health", None, 3.0)[1].get("status") == "ok"

    @staticmethod
    def _reap(process: Any) -> None:
        if process is not None:
            process.join(5)
            process.close()

    def close(self) -> None:
        for process in [self.router, *(node.process for node in self.nodes), *self.ranks]:
            if process is not None:
                with contextlib.suppress(ValueError, ProcessLookupError):
                    process.kill()
                    process.join(10)
        for pipe in self.pipes:
            if pipe is not None:
                pipe.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        os.environ.clear()
        os.environ.update(self._environment)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(REQUEST_S)

    # vLLM's part: drives the ranks, answers with the first token

    async def _vllm(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            content = await reader.readexactly(int(length[1])) if length else b""
            status, body = await self._prefill(json.loads(content)) if content else (200, {})
            data = json.dumps(body).encode()
            writer.write(f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nConnection: close\r\n".encode())
            writer.write(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
        writer.close()

    async def _prefill(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        claim, prompt = processes.claim_of(body), body["prompt"]
        self.rids[prompt[0]] = claim.rid
        fault = await self.steps.reached("prefill")
        if fault and fault.what == "fail":
            return 500, {"error": {"message": "out of memory"}}
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send((claim, prompt[0], prompt[1] / 1000))
        fault = await self.steps.reached("prefill_reply")
        if fault and fault.what == "fail":
            return 500, {"error": {"message": "lost"}}
        choice = {"text": "x", "token_ids": [prompt[2]], "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        return 200, {"id": f"cmpl-{claim.rid}", "created": 1, "model": "m", "usage": usage, "choices": [choice]}

    # Faults

    async def _act(self, fault: Fault) -> None:
        if fault.what == "cancel":
            rid = self.rids.get(self._asks[int(fault.target)].key, "none")
            await asyncio.to_thread(_call, self.nodes[0].http.target, "POST", "/pd/cancel", {"rid": rid}, 2.0)
            return
        pid = self.pid(fault.target)
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if fault.what == "kill":
                self._killed.append(psutil.Process(pid))
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                self.loop.call_later(fault.seconds, self._resume, pid)

    @staticmethod
    def _resume(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def pid(self, name: str) -> int:
        if name.startswith("rank"):
            return self.ranks[int(name[4:])].pid
        node = self.nodes[0]
        return {"router": self.router, "decode": node.process}[name].pid if name != "engine" else node.engine

    # One run

    def run(self, plan: Plan) -> Report:
        began = time.monotonic()
        report, self._asks = Report(), plan.asks
        self.loop.call_soon_threadsafe(self.steps.begin, plan.faults)
        answers = self.ask_all(plan.asks)
        report.answers = [str(answer) for answer in answers]
        for ask, answer in zip(plan.asks, answers, strict=True):
            report.wrong += self.check(ask, answer, plan.disturbed)
        self._call(self._quiet())
        report.happened = [str(fault) for fault in self.steps.happened]
        ended = time.monotonic()
        try:
            report.restarted = self.revive()
            report.wrong += self.settle()
        except (TimeoutError, RuntimeError) as error:
            report.wrong.append(str(error))
        report.settled_s = round(time.monotonic() - ended, 2)
        report.seconds = round(time.monotonic() - began, 2)
        return report

    async def _quiet(self) -> None:
        """Faults that are still to come come now, and stopped processes go on."""
        self.steps.faults = []
        if self.steps.tasks:
            await asyncio.wait(self.steps.tasks, timeout=2)
        names = ("router", "decode", "engine", "rank0", "rank1")
        for name in names:
            self._resume(self.pid(name))
        # A killed process counts as alive for a moment; what is revived must not be mistaken.
        await asyncio.to_thread(eventually, lambda: all(map(_dead, self._killed)), "killed processes end", 10)
        self._killed = []

    def ask_all(self, asks: list[Ask]) -> list[Answer]:
        answers = [Answer() for _ in asks]
        clients = [threading.Thread(target=self._ask, args=pair) for pair in zip(asks, answers, strict=True)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(REQUEST_S + 5)
        return answers

    def _ask(self, ask: Ask, answer: Answer) -> None:
        time.sleep(ask.start)
        connection = http.client.HTTPConnection("127.0.0.1", self.router_port, timeout=REQUEST_S)
        leave = threading.Timer(ask.leaves or 0, lambda: _hang_up(connection))
        try:
            connection.connect()
            if ask.leaves is not None:
                leave.start()
            body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": ask.stream}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            answer.status = reply.status
            if reply.status == 200 and ask.stream:
                _read_events(reply, answer)
            else:
                _read_whole(reply, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = type(error).__name__
        finally:
            leave.cancel()
            connection.close()

    def check(self, ask: Ask, answer: Answer, disturbed: bool) -> list[str]:
        wanted = self.expected(ask)
        if answer.ids != wanted[: len(answer.ids)] or (answer.complete and answer.ids != wanted):
            return [f"WRONG TOKENS for {ask}: {answer.ids} instead of {wanted}"]
        if answer.error == "TimeoutError":
            return [f"no answer within {REQUEST_S} s to {ask}"]
        if not disturbed and not answer.complete:
            return [f"an undisturbed request failed: {answer} to {ask}"]
        return []

    def expected(self, ask: Ask) -> list[int]:
        tokens = [ask.step_ms if ask.seq_len > 3 else ask.inject_ms]
        for layer in range(self.layout.profile.num_layers):
            for index, plane in enumerate(PLANES):
                tokens.append(
                    checksum(processes.plane_bytes(ask.key, layer, index, self.layout.layer_bytes(plane, ask.seq_len)))
                )
        return tokens[: ask.max_tokens]

    # What must hold afterwards

    def settle(self) -> list[str]:
        """Everything that must be as before; what is not within SETTLED_S."""
        wrong = []
        for node in self.nodes:
            wrong += unless(lambda node=node: _stuck(node), "slots", SETTLED_S)
        wrong += self._probe()
        for node in self.nodes:
            wrong += unless(lambda node=node: _stuck(node), "slots after the probe", SETTLED_S)
        wrong += unless(self._staging, "staging", SETTLED_S)
        wrong += unless(self._strangers, "processes", SETTLED_S)
        wrong += unless(self._files, "buffers and files", SETTLED_S)
        wrong += unless(self._descriptors, "descriptors", SETTLED_S)
        return wrong + self._decoded_twice()

    def _probe(self) -> list[str]:
        """As many requests at once as a node has slots go through. The router may need a moment to see a new node."""
        asks = [Ask(key=10**6 + number, prefill_ms=2, stream=bool(number)) for number in range(2 * len(self.nodes))]

        def refused() -> str:
            answers = self.ask_all(asks)
            wrong = [text for ask, answer in zip(asks, answers, strict=True) for text in self.check(ask, answer, True)]
            return "; ".join(wrong) or ", ".join(str(answer) for answer in answers if not answer.complete)

        return unless(refused, "a request afterwards", SETTLED_S + processes.REQUEST_TIMEOUT_S)

    def _staging(self) -> str:
        used = []
        for number, pipe in enumerate(self.pipes):
            pipe.send(None)
            if not pipe.poll(10):
                return f"rank {number} does not answer"
            used.append(pipe.recv())
        return f"bytes in use: {used}" if any(used) else ""

    def _ours(self) -> list[int]:
        nodes = [pid for node in self.nodes for pid in (node.process.pid, node.engine)]
        return [self.router.pid, *nodes, *(process.pid for process in self.ranks)]

    def _strangers(self) -> str:
        for node in self.nodes:
            if not self._engine_ready(node):
                return "an engine is being restarted"
        known = set(self._ours())
        left = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(child.cmdline())
                helper = "multiprocessing.forkserver" in line or "multiprocessing.resource_tracker" in line
                if child.status() == psutil.STATUS_ZOMBIE:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)
                elif child.pid not in known and child not in self.others and not (helper and not self._forked(child)):
                    left.append(f"{child.pid} {line[-120:]}")
        return "; ".join(left)

    @staticmethod
    def _forked(process: psutil.Process) -> bool:
        """Programs keep the fork server's command line: its own parent is this process."""
        return process.ppid() != os.getpid()

    def _files(self) -> str:
        shm = _shm() - self.shm
        left = [path.name for path in self.directory.iterdir() if path.name.startswith("tilert-ref-")]
        return ", ".join([*shm, *left])

    def _descriptors(self) -> str:
        grown = []
        for pid in self._ours():
            with contextlib.suppress(psutil.NoSuchProcess):
                now = psutil.Process(pid).num_fds()
                known = self.fds.setdefault(pid, now)
                if now > known + SPARE_FDS:
                    grown.append(f"process {pid}: {known} -> {now}")
        return ", ".join(grown)

    def decodes(self) -> list[int]:
        """How many requests each node has decoded."""
        engines = [line.split()[1] for line in (self.directory / "decodes.log").read_text().splitlines()]
        return [engines.count(str(node.engine)) for node in self.nodes]

    def _decoded_twice(self) -> list[str]:
        log = self.directory / "decodes.log"
        rids = log.read_text().split()[::2] if log.exists() else []
        log.write_text("")
        return [f"decoded twice: {rid}" for rid in set(rids) if rids.count(rid) > 1]


def _running(process: Any) -> bool:
    """Started, and not killed. The fork server reports the end of a process a moment later, through `is_alive`."""
    return process is not None and process.is_alive() and _lives(process.pid)


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and not _dead(psutil.Process(pid))


def _dead(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _stuck(node: Node) -> str:
    """Slots that somebody still has, a lease that nobody gave back. KV that no consumer ever came for may stay: the
    next request gets its slot, as the probe shows."""
    status = node.get("/decode_status")
    slots = node.get("/health")["receiver"]["slots"]
    held = [s for s in slots if s["state"] == "CANCELLING" or s.get("writers") or s.get("claimed")]
    return f"{status} {held}" if held or status.get("current_rid") else ""


def unless(problem: Callable[[], str], what: str, seconds: float) -> list[str]:
    """Asks until there is no problem left; what is left of it after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            said = problem()
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            said = repr(error)
        if not said:
            return []
        if time.monotonic() > deadline:
            return [f"{what}: {said}"]
        time.sleep(0.05)


def eventually(happened: Callable[[], bool], what: str, seconds: float) -> None:
    if unless(lambda: "" if happened() else "not yet", what, seconds):
        raise TimeoutError(f"{what}: not within {seconds} s")


def _call(port: int, method: str, path: str, body: Any, timeout: float) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, {"error": repr(error)}
    finally:
        connection.close()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(2)


def _read_events(reply: http.client.HTTPResponse, answer: Answer) -> None:
    for line in reply:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            answer.complete = not answer.error
        elif data:
            message = json.loads(data)
            if "error" in message:
                answer.error = str(message["error"].get("code"))
            for choice in message.get("choices", ()):
                answer.ids += choice.get("token_ids") or []


def _read_whole(reply: http.client.HTTPResponse, answer: Answer) -> None:
    message = json.loads(reply.read())
    if answer.status == 200:
        answer.ids, answer.complete = message["choices"][0]["token_ids"], True
    else:
        answer.error = str(message["error"].get("code") if "error" in message else message)


def _shm() -> set[str]:
    """What the programs here can leave behind. Not counted: semaphores of other programs' multiprocessing (ours make
    none), and the page with a process's number that Intel's OpenMP leaves when its process is killed."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("__KMP_REGISTERED_LIB", "sem.mp-"))}
