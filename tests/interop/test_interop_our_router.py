"""Our router in front of the published decode server with its stub engine: real HTTP, the OpenAI client, real NIXL.

The stub answers `first token, 11, 22, 33` whatever it is given, so what it was given is compared apart from that: the
tensors that the package injects into it, bit for bit.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kv_engine
import openai
import pytest
import services
import torch
import wire_case
from prefill_double import PrefillNode
from reference import Reference
from services import HTTP, Node, client
from wire_case import Case

CASE = Case("glm5", "bf16", seq_len=100)
FIRST = kv_engine.words()[kv_engine.FIRST_WORD]
IDS = [FIRST, 11, 22, 33]
TEXT = kv_engine.text_of(IDS)
KV_TIMEOUT_S = 6.0


@dataclass
class Stack:
    url: str
    node: Node
    part: Any
    prefill: PrefillNode

    def post(self, content: str = "go", **fields: Any) -> Any:
        body = {"model": "double", "messages": messages(content), "max_tokens": 50} | fields
        return HTTP.post(self.url + "/v1/chat/completions", json=body)


def messages(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs = tmp_path_factory.mktemp("our_router")
    flags = ["--generation-config", "vllm", "--parser", "none", "--kv-timeout", str(KV_TIMEOUT_S)]
    with (
        PrefillNode(CASE, FIRST) as prefill,
        services.their_decode_server(reference, CASE) as (node, part),
        services.our_router(node, prefill.url, kv_engine.MODEL_DIR, logs, *flags) as url,
    ):
        yield Stack(url, node, part, prefill)


def test_chat_and_what_was_injected(stack: Stack, tmp_path: Path, log: Callable[..., None]) -> None:
    reply = client(stack.url).chat.completions.create(model="double", messages=messages("go"), max_tokens=50)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (TEXT, "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 4)
    assert {"wire_wait", "convert", "inject", "decode"} <= set(reply.model_extra["pd_timing_ms"])
    given = stack.part.injected(path=str(tmp_path / "layers"))
    assert (given["rid"], given["seq_len"], given["last_prompt_token"]) == (reply.id.split("-", 1)[1], 100, 4711)
    compared = 0
    for layer, (_, kv, pe) in enumerate(torch.load(tmp_path / "layers")):
        _, want_kv, want_pe = wire_case.converted(CASE, stack.prefill.made, layer)
        assert torch.equal(kv.view(torch.int16), want_kv.view(torch.int16))
        assert torch.equal(pe.view(torch.int16), want_pe.view(torch.int16))
        compared += kv.nbytes + pe.nbytes
    assert compared == 79 * 100 * 576 * 2
    log(stack.part, case="chat; tensors in the engine", bytes_compared=compared)


def test_chat_stream_with_usage(stack: Stack, log: Callable[..., None]) -> None:
    options = {"include_usage": True}
    chunks = list(
        client(stack.url).chat.completions.create(
            model="double", messages=messages("go"), max_tokens=50, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 4
    log(case="chat stream")


def test_completions(stack: Stack, log: Callable[..., None]) -> None:
    ask = client(stack.url).completions.create
    assert ask(model="double", prompt="go", max_tokens=50).choices[0].text == TEXT
    chunks = list(ask(model="double", prompt="go", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    short = ask(model="double", prompt="go", max_tokens=2)
    assert (short.choices[0].text, short.usage.completion_tokens) == (kv_engine.text_of(IDS[:2]), 2)
    log(case="completions, stream, max_tokens")


def test_many_requests_one_after_the_other(stack: Stack, log: Callable[..., None]) -> None:
    """The node cleans up after its last line; the next request, sent at once, must not meet a busy node."""
    for _ in range(20):
        assert stack.post().json()["choices"][0]["message"]["content"] == TEXT
    log(case="20 requests in a row")


def test_two_requests_at_once(stack: Stack, log: Callable[..., None]) -> None:
    """One node: the second client gets OpenAI's 429 at once, or the node if the first was through."""
    replies: list[Any] = []
    threads = [threading.Thread(target=lambda: replies.append(stack.post())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reply.status_code for reply in replies) in ([200, 429], [200, 200])
    for reply in replies:
        content = reply.json()
        assert content["choices"][0]["message"]["content"] == TEXT if reply.status_code == 200 else content["error"]
    log(case="two at once")


def test_a_node_that_is_busy(stack: Stack, log: Callable[..., None]) -> None:
    """Another router's request holds the published node; ours says 429 in OpenAI's words, and comes back."""
    with services.occupied(stack.node, "other"), pytest.raises(openai.RateLimitError) as refused:
        client(stack.url).chat.completions.create(model="double", messages=messages("go"))
    assert refused.value.body["type"] == "rate_limit_error"
    stack.node.await_status("idle")
    assert stack.post().json()["choices"][0]["message"]["content"] == TEXT
    log(case="busy")


def test_kv_that_never_comes(stack: Stack, log: Callable[..., None]) -> None:
    reply = stack.post("no kv")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "kv_transfer_timeout")
    stack.node.await_status("idle")
    assert stack.post().status_code == 200
    log(case="no KV")


def test_a_handoff_that_fails(stack: Stack, log: Callable[..., None]) -> None:
    """The published server ignores our notice; the request ends with the KV timeout, and the slot is free again."""
    reply = stack.post("give up")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "kv_transfer_timeout")
    assert stack.post().status_code == 200
    log(case="handoff failed")


def test_the_client_leaves(stack: Stack, log: Callable[..., None]) -> None:
    """It goes while the node waits for KV: the node is told, and is idle long before its own timeout."""
    body = {"model": "double", "messages": messages("no kv"), "stream": True}
    with services.posted(stack.url, "/v1/chat/completions", body):
        stack.node.await_status("busy")
    stack.node.await_status("idle", seconds=KV_TIMEOUT_S * 0.7)
    services.eventually(lambda: HTTP.get(stack.url + "/health").json()["decode_free"] == 1, "the lease was not freed")
    assert stack.post().status_code == 200
    log(case="client leaves")


def test_refusals(stack: Stack, log: Callable[..., None]) -> None:
    """Nothing that can't be answered right reaches the node; vLLM's refusals and failures keep their meaning."""
    before = len(stack.prefill.bodies)
    assert stack.post(stop=["x"]).status_code == 501
    assert stack.post(logprobs=True).status_code == 501
    assert stack.post(response_format={"type": "json_object"}).status_code == 501
    assert stack.post(temperature=-1).status_code == 400
    assert len(stack.prefill.bodies) == before
    assert (stack.post("refuse").status_code, stack.post("refuse").json()["error"]["message"]) == (400, "refused")
    assert stack.post("break").status_code == 502
    assert stack.node.status() == {"status": "idle", "current_rid": None}
    log(case="refused at the router, by vLLM, broken vLLM")


def test_penalties_and_ignore_eos_follow_the_node(stack: Stack, log: Callable[..., None]) -> None:
    """The stub says that it can ignore stop tokens; then the field goes through."""
    reply = stack.post(ignore_eos=True)
    assert reply.json()["choices"][0]["message"]["content"] == TEXT
    log(case="capabilities")


def test_the_published_server_itself(stack: Stack, log: Callable[..., None]) -> None:
    """What our router relies on, asked directly: unknown rid cancelled, busy, KV timeout."""
    assert stack.node.cancel("nobody").status_code == 404
    with services.occupied(stack.node, "other"):
        busy = stack.node.decode("second")
        assert (busy.status_code, busy.json()) == (429, {"error": "busy", "current_rid": "other"})
    late = stack.node.decode("late", timeout_s=0.3)
    assert (late.status_code, late.json()["error"]) == (504, "kv_transfer_timeout")
    log(case="server's own answers")
