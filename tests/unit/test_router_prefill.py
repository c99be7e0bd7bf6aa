"""The prefill leg: cases K5 and K6, and reading vLLM's reply."""

import json

import pytest

from tilert_ref.connector.rid import derive_rid, new_request_id
from tilert_ref.router.errors import RouterError
from tilert_ref.router.prefill import first_token, prefill_body, read_reply
from tilert_ref.router.request import Sampling

MESSAGES = [{"role": "user", "content": "hi"}]
KEY = "0123456789abcdef0123456789abcdef"


def build(body: dict, endpoint: str = "chat", sampling: Sampling | None = None) -> dict:
    return prefill_body(body, endpoint, sampling or Sampling(), KEY, "node1", 5556)


def test_case_k5() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    client = {
        "model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True},
        "max_completion_tokens": 900, "n": 1, "stop": ["\n\n"], "logprobs": True, "top_logprobs": 3, "tools": tools,
        "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    before = json.dumps(client)
    body = build(client)
    assert json.dumps(client) == before, "the client's body is still needed for decode"
    assert body["stream"] is False and "stream_options" not in body
    assert body["max_tokens"] == 1 and "max_completion_tokens" not in body
    assert "stop" not in body
    assert body["tools"] == tools and body["tool_choice"] == "auto" and body["messages"] == MESSAGES
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["model"] == "m" and body["n"] == 1
    assert body["logprobs"] is True and body["top_logprobs"] == 3
    assert body["kv_transfer_params"] == {"tilert_host": "node1", "tilert_ctrl_port": 5556}
    assert body["request_id"] == KEY
    assert body["return_token_ids"] is True and body["return_tokens_as_token_ids"] is True


def test_the_documented_example() -> None:
    """http-api.md 3.4, as TileRT sends it, plus our own four fields."""
    body = build({"model": "m", "messages": MESSAGES, "max_tokens": 5, "n": 1, "top_p": None})
    assert body == {
        "model": "m", "messages": MESSAGES, "n": 1, "top_p": 1.0, "temperature": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "min_p": 0.0, "max_tokens": 1, "stream": False, "logprobs": True, "top_logprobs": 1,
        "kv_transfer_params": {"tilert_host": "node1", "tilert_ctrl_port": 5556},
        "request_id": KEY, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def test_completions_ask_for_one_logprob_and_explicit_sampling() -> None:
    body = build({"prompt": "hi", "max_tokens": 9, "stream": True}, "completions", Sampling(0.0, 0.9, 5))
    assert body["logprobs"] == 1 and "top_logprobs" not in body
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.0, 0.9, 5)


def test_the_client_cannot_choose_key_or_target() -> None:
    body = build({"messages": MESSAGES, "request_id": "mine", "kv_transfer_params": {"tilert_host": "evil"}})
    assert body["request_id"] == KEY and body["kv_transfer_params"]["tilert_host"] == "node1"


@pytest.mark.parametrize("suffix", ["", "-0", "-9f8e7d6c", "-0-9f8e7d6c"])
@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-"])
def test_case_k6_the_key_is_the_same_on_both_sides(prefix: str, suffix: str) -> None:
    """Whatever vLLM makes of the key, inside and outside; and whatever the caller chose, the key is new."""
    keys = {new_request_id() for _ in range(200)}
    assert len(keys) == 200
    assert all(derive_rid(prefix + key + suffix) == key for key in keys)


def reply(choice: dict, **fields) -> bytes:
    whole = {"id": f"chatcmpl-{KEY}", "model": "m", "created": 5, "choices": [choice], "usage": {"prompt_tokens": 3}}
    return json.dumps(whole | fields).encode()


def test_read_reply() -> None:
    got = read_reply(reply({"token_ids": [42]}, prompt_token_ids=[1, 2, 3]), "chat", KEY, 12.5)
    assert (got.rid, got.first_token_id, got.model, got.created, got.ms) == (KEY, 42, "m", 5, 12.5)
    assert got.prompt_tokens == 3 and got.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}])
def test_an_unknown_prompt_length_counts_as_0(usage: dict | None) -> None:
    assert read_reply(reply({"token_ids": [42]}, usage=usage), "chat", KEY, 0.0).prompt_tokens == 0


@pytest.mark.parametrize(
    ("choice", "endpoint"),
    [
        ({"token_ids": [42]}, "chat"),
        ({"token_ids": [42], "logprobs": None}, "completions"),
        ({"logprobs": {"content": [{"token": "token_id:42"}]}}, "chat"),
        ({"token_ids": None, "logprobs": {"tokens": ["token_id:42"]}}, "completions"),
    ],
)
def test_first_token(choice: dict, endpoint: str) -> None:
    assert first_token(choice, endpoint) == 42


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b"[]",
        b"{}",
        reply({}),
        reply({"token_ids": []}),
        reply({"token_ids": ["42"]}),
        reply({"token_ids": [True]}),
        reply({"token_ids": [-1]}),
        reply({"token_ids": [2**31]}),
        reply({"logprobs": {"content": [{"token": f"token_id:{2**31}"}]}}),
        reply({"logprobs": {"content": [{"token": " the"}]}}),
        reply({"logprobs": {"content": [{"token": "token_id:-4"}]}}),
        reply({"logprobs": {"content": []}}),
        reply({"token_ids": [42]}, id=None),
        reply({"token_ids": [42]}, id="chatcmpl-" + "f" * 32),
        reply({"token_ids": [42]}, usage=[1]),
        reply({"token_ids": [42]}, usage={"prompt_tokens": "3"}),
        reply({"token_ids": [42]}, usage={"prompt_tokens": 3.5}),
        reply({"token_ids": [42]}, usage={"prompt_tokens": True}),
        reply({"token_ids": [42]}, usage={"prompt_tokens": -1}),
        reply({"token_ids": [42]}, prompt_token_ids=[1, -1]),
        reply({"token_ids": [42]}, prompt_token_ids=[2**31]),
        reply({"token_ids": [42]}, prompt_token_ids=7),
        b"[" * 100_000,
    ],
)
def test_a_reply_that_cannot_be_used_is_502(content: bytes) -> None:
    with pytest.raises(RouterError) as info:
        read_reply(content, "chat", KEY, 0.0)
    assert (info.value.status, info.value.code) == (502, "prefill_failed")


def test_a_foreign_key_says_where_to_look() -> None:
    with pytest.raises(RouterError, match="X-Request-Id"):
        read_reply(reply({"token_ids": [42]}, id="chatcmpl-order-2024"), "chat", KEY, 0.0)
