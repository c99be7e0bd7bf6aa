"""What an HTTP client may cost: slow headers and bodies, long ones, too many connections, peers that are not listed."""

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from decode_node import Server
from router_fakes import Exchange, Loop
from router_stack import error_of, eventually, stack

from tilert_ref import http_limits
from tilert_ref.connector.allow import EVERYBODY, AllowList, peers
from tilert_ref.connector.claims import Claim
from tilert_ref.connector.extract import Job, Part
from tilert_ref.connector.layout import FP8_DS_MLA, PLANES, BufferLayout, profile
from tilert_ref.connector.secret import Secret
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.staging import Slot
from tilert_ref.connector.transport import make_transport
from tilert_ref.http_limits import BodyLimit, uvicorn_limits
from tilert_ref.router import decode, prefill

LIMIT_S = 20.0
BODY_BYTES = 1000


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; GET /lazy answers without reading it, GET /hang never."""
    length = 0
    while scope["path"] != "/lazy":
        message = await receive()
        length += len(message.get("body", b""))
        if (not message.get("more_body", False) and scope["path"] != "/hang") or message["type"] == "http.disconnect":
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(length).encode()})


@contextlib.contextmanager
def serving(max_connections: int = 64, allowed: AllowList = EVERYBODY) -> Iterator[int]:
    """Port of an echo server with limits."""
    app, limits = BodyLimit(echo, BODY_BYTES), uvicorn_limits(max_connections, allowed)
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", timeout_keep_alive=1, timeout_graceful_shutdown=1, **limits
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
    assert not thread.is_alive()


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LIMIT_S, source_address=(source, 0))


def said(sock: socket.socket) -> bytes:
    """All that the server says until it closes."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            got += data
    return got


def drip(sock: socket.socket) -> bytes:
    """Sends a byte again and again until the server has closed. TimeoutError if it does not."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            sock.sendall(b"a")
            time.sleep(0.02)
        raise TimeoutError
    return b""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEADER_S", 0.4)
    monkeypatch.setattr(http_limits, "BODY_S", 0.4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "opening",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b HTTP/1.1\r\nHost:",  # the second one on a connection
        b"POST /lazy HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nabc",  # its answer is out; the body goes on
    ],
    ids=["nothing", "header", "body", "chunks", "second header", "body after the answer"],
)
@pytest.mark.parametrize("dripping", [False, True])
def test_a_request_that_does_not_come_is_not_waited_for(opening: bytes, dripping: bool) -> None:
    with serving() as port, connected(port) as slow:
        slow.sendall(opening)
        drip(slow) if dripping else said(slow)  # either ends when the server closes, or with a TimeoutError
        assert httpx.post(f"http://127.0.0.1:{port}/", content=b"y" * BODY_BYTES).text == str(BODY_BYTES)


@pytest.mark.usefixtures("impatient")
def test_an_answer_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as port, connected(port) as patient:
        patient.sendall(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        patient.settimeout(1.0)
        with pytest.raises(TimeoutError):
            patient.recv(1)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n",
    ],
)
def test_long_bodies_get_413(request_: bytes) -> None:
    with serving() as port, connected(port) as sock:
        sock.sendall(request_)
        sock.shutdown(socket.SHUT_WR)
        answer = said(sock)
        assert (
            answer.startswith(b"HTTP/1.1 413 ") and b'{"error": "the body is over the limit of 1000 bytes"}' in answer
        )


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000, b"GET /" + b"y" * 70_000, b"\0" * 70_000]
)
def test_long_headers_are_refused(request_: bytes) -> None:
    with serving() as port, connected(port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request_)
        assert said(sock)[:12] in (b"HTTP/1.1 400", b"")


def test_the_oldest_connection_without_a_request_makes_room() -> None:
    with serving(max_connections=3) as port:
        asking = connected(port)
        asking.sendall(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)  # its header has been read
        idle = [connected(port), connected(port)]
        fresh = httpx.get(f"http://127.0.0.1:{port}/")
        assert fresh.status_code == 200 and said(idle[0]) == b""
        asking.settimeout(0.1)
        with pytest.raises(TimeoutError):
            asking.recv(1)


def test_no_room_is_said() -> None:
    with serving(max_connections=1) as port, connected(port) as asking:
        asking.sendall(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        answer = httpx.get(f"http://127.0.0.1:{port}/")
        assert (answer.status_code, answer.json()) == (
            503,
            {"error": "1 connections of 127.0.0.1 are open, the limit is 1"},
        )


def test_peers_that_are_not_listed_get_403_and_nothing_they_send_is_parsed() -> None:
    with serving(allowed=peers(["127.0.0.2"])) as port:
        with connected(port) as stranger:
            stranger.sendall(b"\0garbage")
            answer = said(stranger)
            assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
            assert b"'127.0.0.1' is not in --allow-peers (127.0.0.2/32)" in answer
        with connected(port) as silent:
            began = time.monotonic()
            assert said(silent) == b"" and time.monotonic() - began < 5
        with connected(port, "127.0.0.2") as listed:
            listed.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert said(listed).startswith(b"HTTP/1.1 200")


# The decode server as a whole


def test_a_decode_node_with_a_list_and_a_secret(tmp_path: Path) -> None:
    """The real process: 403 for who is not listed, a handoff and a decode for who is and knows the secret."""
    key = tmp_path / "secret"
    key.write_text("correct horse battery\n")
    node = Server("--engine", "stub", "--allow-peers", "127.0.0.1", "10.0.0.0/8", TILERT_REF_SECRET_FILE=str(key))
    try:
        line = node.expect(
            r"http on (\S+), prefill nodes on port (\d+); .*peers 127.0.0.1/32, 10.0.0.0/8, a shared secret"
        )
        node.expect("ready: engine")
        url, ctrl = f"http://{line[1]}", int(line[2])
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as strangers:
            stranger = strangers.get(url + "/health")
        assert stranger.status_code == 403 and "'127.0.0.2' is not in --allow-peers" in stranger.json()["error"]
        assert connected(ctrl, "127.0.0.2").recv(1) == b""
        with httpx.Client(timeout=LIMIT_S) as listed:
            assert listed.get(url + "/health").json()["receiver"]["refused_connections"] == 1
            assert listed.post(url + "/pd/decode", content=b"x" * (5 << 20)).status_code == 413
            assert "the decode node asks for a shared secret" in handoff(ctrl, None)
            assert handoff(ctrl, Secret(b"correct horse battery")) is None
            reply = listed.post(url + "/pd/decode", json={"rid": "r", "first_token_id": 42, "max_tokens": 4})
            assert reply.json()["token_ids"] == [42, 11, 22, 33]
    finally:
        node.stop()


def handoff(port: int, secret: Secret | None) -> str | None:
    """Sends request `r`; returns why that failed, None if it did not."""
    layout, over = BufferLayout(profile("glm5"), FP8_DS_MLA, 256), threading.Event()
    sender = Sender(
        SenderConfig(layout, layout.geometry(), secret=secret), lambda: make_transport("zmq", "", receiver=False)
    )
    slot = Slot(layout, 0, torch.zeros(layout.total_bytes, dtype=torch.uint8))
    job = Job(Claim("r", "r", 7, 3, [[1]], "127.0.0.1", port), slot, lambda _: over.set())
    job.put(Part(tuple(range(79)), PLANES, None))
    job.end()
    sender.submit(job)
    assert over.wait(LIMIT_S)
    sender.close()
    return job.failure


# The router's peers


@pytest.fixture
def small_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_REPLY_BYTES", 10_000)
    monkeypatch.setattr(decode, "MAX_REPLY_BYTES", 10_000)


@pytest.mark.usefixtures("small_replies")
def test_vllm_s_reply_is_read_no_further_than_its_limit(loop: Loop) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(100):
            await exchange.raw(b"x" * 1000)

    with stack(loop) as s:
        s.vllm.plan = endless
        error = error_of(s.post(), 502, "prefill_failed")
        assert error["message"] == "prefill: the reply is over 10000 bytes"
        s.await_free()
        s.vllm.plan = None
        assert s.post().status_code == 200


@pytest.mark.usefixtures("small_replies")
def test_a_node_that_floods_its_health_page_is_down(loop: Loop) -> None:
    with stack(loop) as s:
        health = s.node.routes["/health"]
        s.node.routes["/health"] = lambda e: e.respond(200, b"x" * 20_000)
        eventually(lambda: s.get("/health").status_code == 503, "the node stays up")
        assert "/health: the reply is over 10000 bytes" in s.get("/health").text
        s.node.routes["/health"] = health
        eventually(lambda: s.get("/health").status_code == 200, "the node stays down")


def test_more_tokens_than_asked_for_are_an_error(loop: Loop) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(10):
            await exchange.line({"t": [5, 6, 7]})

    with stack(loop) as s:
        s.node.plan = flood
        error = error_of(s.post(max_tokens=8), 502, "decode_failed")
        assert "sent more than the 8 tokens that it was asked for" in error["message"]
        s.await_free()


def test_nothing_is_unpacked(loop: Loop) -> None:
    """Neither asked for nor read: 20 kB of it would be 20 MB."""
    bomb = gzip.compress(b"0" * (20 << 20))

    async def packed(exchange: Exchange) -> None:
        head = f"HTTP/1.1 200 x\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        exchange._writer.write(head.encode() + bomb)

    with stack(loop) as s:
        s.vllm.plan = packed
        error = error_of(s.post(), 502, "prefill_failed")
        assert "compressed ('gzip')" in error["message"]
        assert s.vllm.seen[-1].headers["accept-encoding"] == "identity"
