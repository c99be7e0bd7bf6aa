"""A router between fake servers, and what the tests over HTTP do with it."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import openai
from router_fakes import WAIT_S, FakeDecode, FakeVllm, Loop, byte_tokenizer, ids_of, running_router

from tilert_ref.router.app import Config
from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.pool import parse_node

TOKENIZER = byte_tokenizer()
TEXT = "Grüße, 世界 \ufffd"
IDS = ids_of(TOKENIZER, TEXT)
MESSAGES = [{"role": "user", "content": "hi"}]
HTTP = httpx.Client(timeout=WAIT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Stack:
    """A fake vLLM, fake decode nodes and a router in front of them."""

    def __init__(self, loop: Loop, nodes: int) -> None:
        self.vllm = FakeVllm(loop, IDS[0])
        self.nodes = [FakeDecode(loop, IDS[1:]) for _ in range(nodes)]
        self.node = self.nodes[0]
        self.url = ""

    def config(self, **changes) -> Config:
        specs = [parse_node(n.spec) for n in self.nodes]
        return replace(Config(self.vllm.url, specs, Detokenizer(TOKENIZER)), **changes)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="secret", max_retries=0, http_client=HTTP)

    def post(self, path: str = "/v1/chat/completions", headers: dict | None = None, **fields) -> httpx.Response:
        base = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
        return HTTP.post(self.url + path, json=base | fields, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.url + path)

    def free(self) -> int:
        return self.get("/health").json()["decode_free"]

    def await_free(self) -> None:
        eventually(lambda: self.free() == 1, "the node was never freed")

    def waiting(self) -> int:
        return self.get("/pool_status").json()["waiting"]


def eventually(happened: Callable[[], bool], what: str) -> None:
    """For states of another process or thread that give no event to wait for."""
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextlib.contextmanager
def stack(loop: Loop, nodes: int = 1, facts: dict | None = None, **changes) -> Iterator[Stack]:
    """facts: what the nodes' /capabilities say beside TileRT's part."""
    s = Stack(loop, nodes)
    for node in s.nodes:
        node.facts = facts or {}
    try:
        with running_router(s.config(**changes)) as s.url:
            yield s
    finally:
        for server in (s.vllm, *s.nodes):
            server.down()


def error_of(response: httpx.Response, status: int, code: str | None) -> dict:
    """The error object; checks status and OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code, error
    return error


def events_of(text: str) -> list:
    lines = [e.removeprefix("data: ") for e in text.split("\n\n") if e]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.contextmanager
def deaf_client(url: str, body: dict, path: str = "/v1/completions") -> Iterator[None]:
    """Posts on a bare socket, reads nothing, and closes it at the end of the block."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as sock:
        sock.settimeout(WAIT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + content)
        yield


def leave_after(url: str, path: str, body: dict, event: threading.Event) -> None:
    """Posts and closes the connection once the event has happened."""
    with deaf_client(url, body, path):
        assert event.wait(WAIT_S), "the request never came so far"
