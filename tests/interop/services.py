"""Programs with HTTP on the loopback interface: ours as processes, the published ones as parts of the reference."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from reference import LIMIT_S, Reference
from sweep import environment, profile_name
from wire_case import Case

from tilert_ref.stack import Command, Process, free_ports, wait_ready

HERE = Path(__file__).parent
HTTP = httpx.Client(timeout=LIMIT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
LOOPBACK = {"UCX_NET_DEVICES": "lo"}


class Node:
    """A decode node, ours or the published one."""

    def __init__(self, ctrl_port: int, http_port: int) -> None:
        self.ctrl_port = ctrl_port
        self.url = f"http://127.0.0.1:{http_port}"
        self.spec = f"127.0.0.1:{ctrl_port}:{http_port}"

    def decode(self, rid: str, **fields: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/pd/decode", json={"rid": rid, "first_token_id": 42} | fields)

    def cancel(self, rid: str) -> httpx.Response:
        return HTTP.post(f"{self.url}/pd/cancel", json={"rid": rid})

    def status(self) -> dict[str, Any]:
        return HTTP.get(f"{self.url}/decode_status").json()

    def await_status(self, wanted: str, seconds: float = 10.0) -> None:
        eventually(lambda: self.status()["status"] == wanted, f"the node never became {wanted}", seconds)


@contextmanager
def occupied(node: Node, rid: str) -> Iterator[None]:
    """The node waits for KV that never comes, until the end of the block."""
    waiting = threading.Thread(target=node.decode, args=(rid,), kwargs={"timeout_s": 60}, daemon=True)
    waiting.start()
    node.await_status("busy")
    yield
    assert node.cancel(rid).status_code == 200
    waiting.join(10)


def eventually(happened: Any, what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def posted(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that has posted and reads nothing; it leaves at the end of the block."""
    content = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as client_socket:
        client_socket.sendall(head.encode() + content)
        yield


@contextmanager
def our_decode_server(case: Case, logs: Path, engine: str) -> Iterator[Node]:
    ctrl, http = free_ports(2)
    argv = [sys.executable, "-m", "tilert_ref.decode_server", "--engine", engine, "--model", profile_name(case)]
    argv += f"--host 127.0.0.1 --ctrl-port {ctrl} --http-port {http} --senders {case.senders}".split()
    argv += f"--max-seq-len {case.max_seq_len} --kv-cache-dtype {case.kv_cache_dtype} --transport nixl".split()
    argv += ["--device", "cpu"]  # the prefill node that writes to it stages in host memory
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = Command("our decode server", argv, f"http://127.0.0.1:{http}", {"PYTHONPATH": _root(path)} | LOOPBACK)
    with _running(command, logs / "decode.log"):
        yield Node(ctrl, http)


@contextmanager
def our_router(node: Node, vllm_url: str, model_dir: Path, logs: Path, *flags: str) -> Iterator[str]:
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "tilert_ref.router.pd_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--vllm-url", vllm_url, "--model-path", str(model_dir), "--decode", node.spec, *flags]
    command = Command("our router", argv, f"http://127.0.0.1:{port}")
    with _running(command, logs / "router.log"):
        yield command.url


@contextmanager
def _running(command: Command, log: Path) -> Iterator[Process]:
    process = Process(command, log).start()
    try:
        wait_ready([process], LIMIT_S)
        yield process
    finally:
        process.stop()


@contextmanager
def their_decode_server(reference: Reference, case: Case) -> Iterator[tuple[Node, Any]]:
    ctrl, http = free_ports(2)
    flags = f"--model {profile_name(case)} --max-seq-len {case.max_seq_len} --kv-cache-dtype {case.kv_cache_dtype}"
    flags += f" --ctrl-port {ctrl} --http-port {http}"
    with reference.part("decode_server", environment(case), flags=flags.split()) as part:
        node = Node(ctrl, http)
        eventually(lambda: _healthy(node.url), "the published decode server did not start", LIMIT_S)
        yield node, part


@contextmanager
def their_router(reference: Reference, node: Node, vllm_url: str, model_dir: Path, *flags: str) -> Iterator[str]:
    (port,) = free_ports(1)
    argv = ["--port", str(port), "--vllm-url", vllm_url, "--decode", node.spec, "--model-path", str(model_dir), *flags]
    with reference.part("router", {"TILERT_ROUTER_TOKENIZE": "0"}, flags=argv):
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _healthy(url), "the published router did not start", LIMIT_S)
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=HTTP)


def _healthy(url: str) -> bool:
    try:
        return HTTP.get(url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


def _root(path: str) -> str:
    return os.pathsep.join([str(HERE.parents[1]), path])
