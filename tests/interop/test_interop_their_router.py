"""The published router in front of our decode server: real HTTP, the OpenAI client, KV over real NIXL.

The engine behind our server answers with words that are checksums of the KV that it was given (kv_engine.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kv_engine
import pytest
import services
import torch
import wire_case
from prefill_double import FIRST_LOGPROB, PrefillNode
from reference import Reference
from services import HTTP, Node, client
from wire_case import Case

from tilert_ref.engine.api import LayerKV

CASE = Case("dsv32", seq_len=100)
WORDS = kv_engine.words()
FIRST = WORDS[kv_engine.FIRST_WORD]


def expected_answer(made: wire_case.Caches) -> list[int]:
    layers = []
    for layer in range(4):
        rows = wire_case.prompt_rows(CASE, made, layer)
        pages = wire_case.prompt_pages(CASE, made, layer)
        layers.append(LayerKV(*(torch.from_numpy(p.copy()) for p in (rows[:, :528], rows[:, 528:], pages))))
    return kv_engine.answer(layers, FIRST)


@dataclass
class Stack:
    url: str
    node: Node
    prefill: PrefillNode
    ids: list[int]

    @property
    def text(self) -> str:
        return kv_engine.text_of(self.ids)

    def post(self, content: str = "go", **fields: Any) -> Any:
        body = {"model": "double", "messages": messages(content), "max_tokens": 50} | fields
        return HTTP.post(self.url + "/v1/chat/completions", json=body)

    def stream(self, content: str = "go", **fields: Any) -> Any:
        return client(self.url).chat.completions.create(
            model="double", messages=messages(content), stream=True, max_tokens=fields.pop("max_tokens", 50), **fields
        )


def messages(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs = tmp_path_factory.mktemp("their_router")
    with (
        PrefillNode(CASE, FIRST) as prefill,
        services.our_decode_server(CASE, logs, "kv_engine:load_engine") as node,
        services.their_router(
            reference, node, prefill.url, kv_engine.MODEL_DIR, "--parser", "none", "--generation-config", "vllm"
        ) as url,
    ):
        yield Stack(url, node, prefill, expected_answer(prefill.made))


def test_chat(stack: Stack, log: Callable[..., None]) -> None:
    reply = client(stack.url).chat.completions.create(model="double", messages=messages("go"), max_tokens=50)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (stack.text, "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, len(stack.ids))
    assert {"prefill", "wire_wait", "convert", "inject", "decode"} <= set(reply.model_extra["pd_timing_ms"])
    log(case="chat", tokens=len(stack.ids))


def test_chat_stream_with_usage(stack: Stack, log: Callable[..., None]) -> None:
    chunks = list(stack.stream(stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == stack.text
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(stack.ids)
    log(case="chat stream", tokens=len(stack.ids))


def test_completions(stack: Stack, log: Callable[..., None]) -> None:
    reply = client(stack.url).completions.create(model="double", prompt="go", max_tokens=50)
    assert (reply.choices[0].text, reply.choices[0].token_ids) == (stack.text, stack.ids)
    log(case="completions", tokens=len(stack.ids))


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_length(max_tokens: int, stack: Stack, log: Callable[..., None]) -> None:
    reply = client(stack.url).completions.create(model="double", prompt="go", max_tokens=max_tokens)
    assert (reply.choices[0].token_ids, reply.choices[0].finish_reason) == (stack.ids[:max_tokens], "length")
    assert reply.usage.completion_tokens == max_tokens
    log(case=f"max_tokens {max_tokens}")


def test_stop_strings(stack: Stack, log: Callable[..., None]) -> None:
    """Matched by the router, which then leaves our stream in the middle; the node is free at once."""
    stop = kv_engine.text_of(stack.ids[3:5])
    before, _, _ = stack.text.partition(stop)
    choice = stack.post(stop=[stop]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    texts = [chunk.choices[0].delta.content or "" for chunk in stack.stream(stop=[stop]) if chunk.choices]
    assert "".join(texts) == before
    stack.node.await_status("idle")
    log(case="stop strings")


def test_a_stop_string_ends_an_endless_answer(stack: Stack, log: Callable[..., None]) -> None:
    stop = kv_engine.text_of([stack.ids[1]] * 3)
    assert stack.post("endless", stop=stop).json()["choices"][0]["stop_reason"] == stop
    stack.node.await_status("idle")
    log(case="stop string, then cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream: bool, stack: Stack, log: Callable[..., None]) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    if stream:
        chunks = list(stack.stream(**asked))
        entries = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        reply = client(stack.url).chat.completions.create(
            model="double", messages=messages("go"), max_tokens=50, **asked
        )
        entries = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [kv_engine.logprob_of(token) for token in stack.ids]
    assert entries[0].logprob != FIRST_LOGPROB, "the decode node's own value, not the prefill's"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert [entry.top_logprobs[1].logprob for entry in entries] == [kv_engine.logprob_of(t) - 1 for t in stack.ids]
    log(case=f"logprobs, stream {stream}", tokens=len(entries))


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_stops(stream: bool, stack: Stack, log: Callable[..., None]) -> None:
    """Edge 16: the published engine adapters make their own router report a truncated answer here; ours doesn't."""
    if stream:
        chunks = list(stack.stream("stop"))
        assert not "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        reply = stack.post("stop").json()
        assert (reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]) == ("", 0)
    log(case=f"first token stops, stream {stream}")


def test_the_client_leaves(stack: Stack, log: Callable[..., None]) -> None:
    stream = stack.stream("endless")
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stack.node.await_status("busy")
    stream.close()
    stack.node.await_status("idle")
    assert stack.post().json()["choices"][0]["message"]["content"] == stack.text
    log(case="client leaves a stream")


def test_cancel_by_rid(stack: Stack, log: Callable[..., None]) -> None:
    """/pd/cancel ends the stream with a last line that the router takes for a stop."""
    stream = iter(stack.stream("endless"))
    next(stream)
    rid = stack.node.status()["current_rid"]
    assert stack.node.cancel("another").status_code == 404
    assert stack.node.cancel(rid).json() == {"cancelled": rid}
    assert list(stream)[-1].choices[0].finish_reason == "stop"
    stack.node.await_status("idle")
    log(case="cancelled at the node")


def test_a_node_that_is_busy(stack: Stack, log: Callable[..., None]) -> None:
    """Another router's request holds the node: the published router tries twice, then says so."""
    with services.occupied(stack.node, "other"):
        reply = stack.post()
        assert (reply.status_code, reply.json()["error_type"]) == (429, "decode_busy")
    stack.node.await_status("idle")
    log(case="busy")


def test_errors_before_decode(stack: Stack, log: Callable[..., None]) -> None:
    assert stack.post("refuse").status_code == 400
    assert stack.post("break").status_code == 502
    grammar = stack.post(response_format={"type": "json_object"})
    assert (grammar.status_code, grammar.json()["error_type"]) == (501, "grammar_unsupported")
    assert grammar.elapsed.total_seconds() < 20, "a refusal waits for nothing (the published server: 30 s for the KV)"
    stack.node.await_status("idle")
    log(case="refused by vLLM, broken vLLM, grammar")


def test_a_failed_handoff_is_known_at_once(stack: Stack, log: Callable[..., None]) -> None:
    reply = stack.post("give up")
    assert (reply.status_code, reply.json()["status"]) == (502, 502), "the published router hides the node's reason"
    stack.node.await_status("idle")
    log(case="handoff failed")


@pytest.mark.parametrize("content", ["raise", "crash"])
def test_a_decode_that_breaks(content: str, stack: Stack, log: Callable[..., None]) -> None:
    """A stream's error line reaches the published router's client as text, never as a clean end."""
    assert stack.post(content).status_code == 502
    _await_engine(stack.node)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stack.stream(content) if chunk.choices)
    assert text.startswith(kv_engine.text_of(stack.ids[:1])) and "decode error" in text
    _await_engine(stack.node)
    log(case=f"decode fails: {content}")


def _await_engine(node: Node) -> None:
    services.eventually(lambda: HTTP.get(node.url + "/health").status_code == 200, "no engine came back", 60)
