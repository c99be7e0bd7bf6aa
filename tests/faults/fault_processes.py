"""The programs under test as processes: forked from a server that has torch imported, so that a restart is cheap.

What runs in them is the programs' own `main`. Only their waits are shorter, so that hundreds of faults fit into
minutes; the senders are driven over a pipe instead of by vLLM.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Job, Part
from tilert_ref.connector.layout import PLANES, BufferLayout
from tilert_ref.decode_server.options import parse_options

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
MODEL = ROOT / "tilert_ref/tiny/models/tiny-dsv32"
ENVIRONMENT: dict[str, str] = {}
RANKS = 2
MAX_SEQ_LEN = 512
REQUEST_TIMEOUT_S = 6.0
DECODE_FLAGS = [
    *("--engine", "fault_engine:load_engine", "--model-weights-dir", str(MODEL), "--kv-cache-dtype", "bf16"),
    *("--max-seq-len", str(MAX_SEQ_LEN), "--senders", str(RANKS), "--host", "127.0.0.1", "--device", "cpu"),
    *("--ctrl-port", "0", "--http-port", "0", "--transport", "nixl", "--receive-slots", "2"),
    *("--engine-cancel-timeout-s", "3", "--engine-stall-timeout-s", "4"),
]
ROUTER_FLAGS = [
    *("--host", "127.0.0.1", "--kv-timeout", "5", "--announce-timeout", "2.5", "--stall-timeout", "3"),
    *("--request-timeout", "12", "--queue-timeout", "4"),
]


def receive_layout() -> BufferLayout:
    return parse_options(DECODE_FLAGS, {}).layout.layout()


def plane_bytes(key: int, layer: int, plane: int, nbytes: int) -> torch.Tensor:
    """The KV of the prompt that begins with key: uint8 [nbytes]."""
    generator = torch.Generator().manual_seed(key * 16 + layer * 3 + plane)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


LIFE: list[Connection] = []
"""A pipe whose end tells the processes that the injector is gone, however it went: reading and writing end."""


def start(target: Any, log: Path, *arguments: Any) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    if not LIFE:
        LIFE.extend(context.Pipe(duplex=False))
    process = context.Process(target=_main, args=(target, str(log), ENVIRONMENT, LIFE[0], *arguments))
    process.start()
    return process


def prepare(directory: Path) -> None:
    """Before the first start: the environment that all processes get."""
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    ENVIRONMENT.update(PYTHONPATH=path, TMPDIR=str(directory), FAULT_LOG=str(directory / "decodes.log"))
    ENVIRONMENT.update(OMP_NUM_THREADS="1", UCX_NET_DEVICES="lo")
    os.environ.update(ENVIRONMENT)  # the fork server's own, which has that of the first start for good
    modules = ["torch", "tilert_ref.decode_server.server", "tilert_ref.router.pd_router", "tilert_ref.connector.sender"]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*modules, "fault_processes"])


def _main(target: Any, log: str, environment: dict[str, str], life: Connection, *arguments: Any) -> None:
    os.environ.update(environment)
    tempfile.tempdir = None  # the fork server's, looked up when it was started
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    target(*arguments)
    os._exit(0)


def _end_with(life: Connection) -> None:
    life.poll(None)
    os.kill(os.getpid(), signal.SIGKILL)


def decode_server() -> None:
    from functools import partial

    from tilert_ref.connector import receiver
    from tilert_ref.decode_server import server
    from tilert_ref.decode_server.__main__ import main

    receiver.ANNOUNCE_TIMEOUT_S, receiver.REPLY_TIMEOUT_S = 3.0, 2.0
    server.ReceiveServer = partial(receiver.ReceiveServer, request_timeout=REQUEST_TIMEOUT_S)
    os._exit(main(DECODE_FLAGS))


def router(port: int, vllm_port: int, nodes: list[str]) -> None:
    from tilert_ref.router.pd_router import main

    address = ["--port", str(port), "--vllm-url", f"http://127.0.0.1:{vllm_port}", "--decode", *nodes]
    main([*ROUTER_FLAGS, *address])


def rank(pipe: Connection, number: int) -> None:
    """One sender rank. Commands: (claim, key, layer delay in s) hands off; None asks for the staging bytes in use."""
    from tilert_ref.connector import sender as sending
    from tilert_ref.connector.staging import StagingPool
    from tilert_ref.connector.transport import make_transport

    sending.HANDSHAKE_TIMEOUT_S, sending.PART_TIMEOUT_S = 1.5, 3.0
    target = receive_layout()
    stage = BufferLayout(target.profile, target.row_format, MAX_SEQ_LEN, nshards=RANKS)
    config = sending.SenderConfig(stage, stage.geometry(), senders=RANKS, rank=number, write_timeout_s=2.0)
    sender = sending.Sender(config, lambda: make_transport("nixl", "", receiver=False))
    pool = StagingPool(stage, number, torch.device("cpu"), None, sender.forget)
    sender.start_transport()
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            os._exit(0)
        if command is None:
            pipe.send(pool.total_bytes - sum(slot.layout.shard_bytes for slot in pool._free))
            continue
        claim, key, delay = command
        slot = pool.acquire(claim.seq_len)
        job = Job(claim, slot, pool.release)
        sender.submit(job)
        threading.Thread(target=_prefill, args=(job, range(number, 3, RANKS), key, delay)).start()


def _prefill(job: Job, layers: range, key: int, delay: float) -> None:
    """What the forward pass does: the planes of a layer, then the next layer."""
    for layer in layers:
        time.sleep(delay)
        for index, plane in enumerate(job.slot.planes(layer, job.claim.seq_len)):
            plane.view(-1).copy_(plane_bytes(key, layer, index, plane.numel()))
        job.put(Part((layer,), PLANES))
    job.end()


def claim_of(body: dict[str, Any]) -> Claim:
    prompt, params = body["prompt"], body["kv_transfer_params"]
    rid = body["request_id"]
    host, port = params["tilert_host"], params["tilert_ctrl_port"]
    return Claim(rid, rid, len(prompt), prompt[-1], [], host, port)
