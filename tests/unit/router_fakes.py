"""Small real HTTP servers that stand for vLLM and a decode node, with faults on request; and a router on a thread."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tilert_ref.http_limits import uvicorn_limits
from tilert_ref.router.app import Config, create_app

WAIT_S = 10.0


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)


class Exchange:
    """One request to a fake server, and the means to answer it, well or badly."""

    def __init__(self, method: str, path: str, headers: dict[str, str], content: bytes, streams: tuple) -> None:
        self.method, self.path, self.headers, self.content = method, path, headers, content
        self._reader, self._writer = streams

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    async def respond(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        self._writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
        await self._writer.drain()

    async def start(self) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head.encode())
        await self._writer.drain()

    async def raw(self, content: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(content), content))
        await self._writer.drain()

    async def line(self, body: Any) -> None:
        await self.raw(json.dumps(body).encode() + b"\n")

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def abort(self) -> None:
        """What the client of a killed process sees."""
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Returns when the client has closed its end."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


Handler = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """HTTP/1.1, one request a connection. Subclasses fill `routes`; every request is kept in `seen`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.seen: list[Exchange] = []
        self.routes: dict[str, Handler] = {}
        self.up()

    def up(self) -> None:
        """Listens, again on the same port after `down`."""
        self._server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = self._server.sockets[0].getsockname()[1]

    def down(self) -> None:
        """Refuses connections and breaks those that are open, as a killed process does."""
        self._loop.run(self._down())

    async def _down(self) -> None:
        # First stop accepting: a connection whose accept is under way when the server closes stays open for ever.
        for sock in self._server.sockets:
            self._loop.loop.remove_reader(sock.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            exchange = Exchange(method, path, headers, content, (reader, writer))
            self.seen.append(exchange)
            await self.routes[path](exchange)
            writer.close()
        except asyncio.IncompleteReadError:
            writer.close()
        except (asyncio.CancelledError, ConnectionError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    def asked(self, path: str) -> list[Exchange]:
        return [e for e in self.seen if e.path == path]

    def bodies(self, path: str) -> list[Any]:
        return [e.json for e in self.asked(path)]


class FakeVllm(FakeServer):
    """Answers prefills with `first_token`. `plan`, if set, replaces the answer."""

    def __init__(self, loop: Loop, first_token: int) -> None:
        self.first_token = first_token
        self.plan: Handler | None = None
        self.arrived, self.client_left = threading.Event(), threading.Event()
        super().__init__(loop)
        self.routes = {
            "/v1/chat/completions": self._prefill,
            "/v1/completions": self._prefill,
            "/v1/models": lambda e: e.respond(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]}),
            "/health": lambda e: e.respond(200, b""),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _prefill(self, exchange: Exchange) -> None:
        self.arrived.set()
        await (self.plan or self.answer)(exchange)

    async def answer(self, exchange: Exchange) -> None:
        await exchange.respond(200, self.reply(exchange))

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        """What vLLM 0.32 answers to max_tokens=1 with return_token_ids."""
        key, name = exchange.json["request_id"], f"token_id:{self.first_token}"
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        head = {"created": 1700000000, "model": "tiny", "usage": usage}
        if exchange.path == "/v1/completions":
            choice = {"text": "x", "logprobs": {"tokens": [name]}, "prompt_token_ids": [7, 8, 9]}
            return head | {"id": f"cmpl-{key}", "choices": [choice | {"token_ids": [self.first_token]}]}
        choice = {"message": {"content": "x"}, "logprobs": {"content": [{"token": name}]}}
        choice |= {"token_ids": [self.first_token]}
        return head | {"id": f"chatcmpl-{key}", "choices": [choice], "prompt_token_ids": [7, 8, 9]}

    async def hang(self, exchange: Exchange) -> None:
        """Never answers; notes when the client leaves."""
        await exchange.gone()
        self.client_left.set()


class FakeDecode(FakeServer):
    """Decodes to `[first token] + rest`, one line a token, up to max_tokens. `plan`, if set, replaces the answer."""

    def __init__(self, loop: Loop, rest: list[int]) -> None:
        self.rest = rest
        self.plan: Handler | None = None
        self.health = 200
        self.capabilities = {"penalties": False, "ignore_eos": True, "logprobs": False}
        self.facts: dict[str, Any] = {}  # what ours says beside its capabilities
        self.current: str | None = None
        self.arrived, self.decoding = threading.Event(), threading.Event()
        self.client_left, self.cancelled = threading.Event(), threading.Event()
        self.cancel_may_answer = asyncio.Event()
        self.cancel_may_answer.set()
        super().__init__(loop)
        self.routes = {
            "/health": lambda e: e.respond(
                self.health, {"status": "ok" if self.health == 200 else "engine is starting"}
            ),
            "/capabilities": lambda e: e.respond(200, {"capabilities": self.capabilities} | self.facts),
            "/decode_status": lambda e: e.respond(200, {"current_rid": self.current}),
            "/pd/cancel": self._cancel,
            "/pd/decode": self._decode,
        }

    @property
    def spec(self) -> str:
        return f"127.0.0.1:5556:{self.port}"

    async def _cancel(self, exchange: Exchange) -> None:
        self.cancelled.set()
        await self.cancel_may_answer.wait()
        await exchange.respond(404, {"error": "no matching in-flight request"})

    def let_cancel_answer(self, allowed: bool) -> None:
        change = self.cancel_may_answer.set if allowed else self.cancel_may_answer.clear
        self._loop.loop.call_soon_threadsafe(change)

    async def _decode(self, exchange: Exchange) -> None:
        self.arrived.set()
        self.current = exchange.json["rid"]
        try:
            await (self.plan or self.answer)(exchange)
        finally:
            self.current = None

    async def answer(self, exchange: Exchange) -> None:
        ids = [exchange.json["first_token_id"], *self.rest]
        finish = "stop" if len(ids) <= exchange.json["max_tokens"] else "length"
        ids = ids[: exchange.json["max_tokens"]]
        await exchange.start()
        for token in ids:
            await exchange.line({"t": [token]})
        await exchange.line(last_line(len(ids), finish))
        await exchange.end()

    async def hang(self, exchange: Exchange) -> None:
        """Never answers; notes when the client leaves."""
        await exchange.gone()
        self.client_left.set()

    async def one_token_then_hang(self, exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"t": [exchange.json["first_token_id"]]})
        self.decoding.set()
        await self.hang(exchange)

    async def one_token_then_die(self, exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"t": [exchange.json["first_token_id"]]})
        exchange.abort()


def last_line(n: int, finish: str = "stop") -> dict[str, Any]:
    timing = {"wire_wait": 1.5, "convert": 0.0, "inject": 0.5, "decode": 4.0, "finish_reason": finish}
    return {"done": True, "n": n, "seq_len": 3, "finish_reason": finish, "timing_ms": timing}


class _Server(uvicorn.Server):
    """uvicorn that says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextlib.contextmanager
def running_router(config: Config, max_connections: int = 1024) -> Iterator[str]:
    """A router on a thread; yields its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a client that doesn't read is felt early
    app, limits = create_app(config), uvicorn_limits(max_connections)
    server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, **limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert server.ready.wait(WAIT_S), "the router didn't start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()


def byte_tokenizer() -> Tokenizer:
    """Byte-level: one token a byte, plus `<|end|>` (special) and `<think>` (not special)."""
    vocab = {"<|end|>": 0, "<think>": 1}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids
