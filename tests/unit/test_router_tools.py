"""Reasoning and tool calls over real sockets: blocking and streamed, with the openai client and byte by byte."""

import json
import re
from collections.abc import Iterator

import openai
import pytest
from router_fakes import Exchange, Loop, byte_tokenizer
from router_stack import MESSAGES, Stack, error_of, events_of, stack
from tokenizers import AddedToken

from tilert_ref.router.app import Config
from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.grammars import GLM47
from tilert_ref.router.parsing import Parsing
from tilert_ref.router.pd_router import build_parser, config_from, main

TOKENIZER = byte_tokenizer()
TOKENIZER.add_tokens([AddedToken(token, special=False) for token in GLM47.tokens])
TOKENIZER.add_special_tokens([AddedToken(token, special=True) for token in GLM47.turn_tokens])

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TIME = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, TIME]
REASONING, CONTENT = "The user wants 天气.", "Let me look."
CALLS = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>\n<tool_call>now</tool_call>"
)
ANSWER = f"{REASONING}\n</think>{CONTENT}\n\n{CALLS}"
WANTED = [("get_weather", {"city": "Zürich", "days": 3}), ("now", {})]
PROMPT_TOKEN = {True: "<think>", False: "</think>"}


@pytest.fixture(scope="module")
def glm(loop: Loop) -> Iterator[Stack]:
    detokenizer = Detokenizer(TOKENIZER)
    with stack(loop, detokenizer=detokenizer, parsing=Parsing(GLM47, detokenizer)) as s:
        yield s


@pytest.fixture
def tools(glm: Stack) -> Iterator[Stack]:
    answer(glm, ANSWER)
    yield glm
    glm.vllm.plan = None
    glm.await_free()


def answer(s: Stack, text: str) -> list[int]:
    """What the model is going to say; returns its ids."""
    ids = TOKENIZER.encode(text).ids
    s.vllm.first_token, s.node.rest = ids[0], ids[1:]
    return ids


def calls_of(message) -> list[tuple[str, dict]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def deltas_of(response) -> list[dict]:
    """The deltas of a stream before the chunk with the finish reason."""
    return [e["choices"][0]["delta"] for e in events_of(response.text)[:-2]]


def test_a_blocking_call(tools: Stack) -> None:
    reply = tools.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == CONTENT
    assert choice.message.model_extra["reasoning_content"] == REASONING
    assert calls_of(choice.message) == WANTED
    assert all(re.fullmatch("call_[0-9a-f]{24}", c.id) and c.type == "function" for c in choice.message.tool_calls)
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert "reasoning_content" in reply.model_dump_json() and "<" not in reply.model_dump_json()


def test_a_streamed_call(tools: Stack) -> None:
    stream = tools.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last, usage = list(stream)
    deltas = [c.choices[0].delta for c in chunks]
    assert deltas[0].role == "assistant"
    kinds = ["reasoning_content" if "reasoning_content" in d.model_extra else "call" if d.tool_calls else "content"
             for d in deltas[1:]]  # fmt: skip
    assert [k for k, after in zip(kinds, [*kinds[1:], ""], strict=True) if k != after] == [
        "reasoning_content", "content", "call",
    ]  # fmt: skip
    assert "".join(d.model_extra.get("reasoning_content", "") for d in deltas) == REASONING
    assert "".join(d.content or "" for d in deltas) == CONTENT
    calls = [c for d in deltas for c in d.tool_calls or []]
    assert [c.index for c in calls] == [0, 1] and all(re.fullmatch("call_[0-9a-f]{24}", c.id) for c in calls)
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == WANTED
    assert last.choices[0].finish_reason == "tool_calls" and usage.usage.completion_tokens > 0


def test_the_openai_clients_own_stream_helper_puts_it_together(tools: Stack) -> None:
    with tools.openai.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == WANTED and message.content == CONTENT


def test_the_shape_of_a_stream(tools: Stack) -> None:
    """http-api.md 4.5, in JSON."""
    answer(tools, "</think><tool_call>now</tool_call>")
    events = events_of(tools.post(tools=TOOLS, stream=True).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    call = events[1]["choices"][0]["delta"]["tool_calls"][0]
    assert call == {
        "index": 0, "id": call["id"], "type": "function", "function": {"name": "now", "arguments": "{}"}
    }  # fmt: skip
    assert events[2]["choices"][0]["delta"] == {} and events[2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[2]["choices"][0]["stop_reason"] is None and events[3:] == ["[DONE]"]


def test_tools_reach_vllm_as_they_are_and_not_the_node(tools: Stack) -> None:
    tools.post(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    prefill, decode = tools.vllm.bodies("/v1/chat/completions")[-1], tools.node.bodies("/pd/decode")[-1]
    assert (prefill["tools"], prefill["tool_choice"], prefill["parallel_tool_calls"]) == (TOOLS, "auto", False)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(decode)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_alone_and_its_absence(tools: Stack, stream: bool) -> None:
    answer(tools, "think</think>say")
    assert spoken(tools.post(stream=stream)) == {"content": "say", "reasoning_content": "think"}
    assert spoken(tools.post(stream=stream, include_reasoning=False)) == {"content": "say"}
    assert "include_reasoning" not in tools.vllm.bodies("/v1/chat/completions")[-1], "vLLM would leave out the ids"
    answer(tools, "say <b>it</b>")
    kwargs = {"enable_thinking": False}
    assert spoken(tools.post(stream=stream, chat_template_kwargs=kwargs)) == {"content": "say <b>it</b>"}


def spoken(response) -> dict:
    """The channels of either kind of answer, without empty ones."""
    if "event-stream" not in response.headers["content-type"]:
        message = response.json()["choices"][0]["message"]
        return {k: v for k, v in message.items() if k != "role" and v}
    told: dict[str, str] = {}
    for delta in deltas_of(response):
        for name in ("content", "reasoning_content"):
            told[name] = told.get(name, "") + delta.get(name, "")
    return {k: v for k, v in told.items() if v}


@pytest.mark.parametrize("thinks", [False, True])
def test_the_rendered_prompt_decides_where_the_answer_starts(tools: Stack, thinks: bool) -> None:
    """vLLM's own template defaults aren't in the request, but show in the prompt that it returns."""

    async def rendered(exchange: Exchange) -> None:
        prompt = TOKENIZER.encode(f"<|user|>hi<|assistant|>{PROMPT_TOKEN[thinks]}").ids
        await exchange.respond(200, tools.vllm.reply(exchange) | {"prompt_token_ids": prompt})

    answer(tools, "words")
    tools.vllm.plan = rendered
    assert spoken(tools.post()) == {"reasoning_content" if thinks else "content": "words"}


def test_tool_choice_none_leaves_the_markup_in_the_text(tools: Stack) -> None:
    choice = tools.post(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == f"{CONTENT}\n\n{CALLS}"


def test_parallel_tool_calls_false_gives_the_first_call_only(tools: Stack) -> None:
    message = tools.post(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["get_weather"]
    deltas = deltas_of(tools.post(tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert sum("tool_calls" in d for d in deltas) == 1


def test_a_tool_that_was_not_offered_is_not_called(tools: Stack, caplog: pytest.LogCaptureFixture) -> None:
    choice = tools.post(tools=[WEATHER]).json()["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
    assert "'now'" in caplog.text and "no such tool" in caplog.text
    answer(tools, "</think><tool_call>rm</tool_call>")
    choice = tools.post(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("value", "arguments"), [("Zür", '{"city": "Zür'), ("Zürich</arg_value>", '{"city": "Zürich"')], ids=["in", "after"]
)
def test_a_call_cut_off_by_max_tokens(tools: Stack, value: str, arguments: str, stream: bool) -> None:
    text = "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>" + value
    answer(tools, text + "ich</arg_value></tool_call>")
    response = tools.post(tools=TOOLS, max_tokens=len(TOKENIZER.encode(text).ids), stream=stream)
    if stream:
        last = events_of(response.text)[-2]["choices"][0]
        call = next(d for d in deltas_of(response) if "tool_calls" in d)["tool_calls"][0]
    else:
        last = response.json()["choices"][0]
        call = last["message"]["tool_calls"][0]
    assert last["finish_reason"] == "tool_calls" and call["function"]["arguments"] == arguments


def test_ids_of_parsed_answers(tools: Stack) -> None:
    ids = TOKENIZER.encode(ANSWER).ids
    choices = [
        e["choices"][0] for e in events_of(tools.post(tools=TOOLS, return_token_ids=True, stream=True).text)[:-1]
    ]
    assert [i for c in choices for i in c.get("token_ids", [])] == ids


def test_several_events_of_one_line_share_its_ids(tools: Stack) -> None:
    ids = TOKENIZER.encode(ANSWER).ids

    async def at_once(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.line({"t": ids})
        await exchange.line({"done": True, "n": len(ids), "finish_reason": "stop"})
        await exchange.end()

    tools.node.plan = at_once
    try:
        events = events_of(tools.post(tools=TOOLS, return_token_ids=True, stream=True).text)[1:-2]
    finally:
        tools.node.plan = None
    assert [list(e["choices"][0]["delta"]) for e in events] == [
        ["reasoning_content"], ["content"], ["tool_calls"], ["tool_calls"],
    ]  # fmt: skip
    assert [e["choices"][0]["token_ids"] for e in events] == [ids, [], [], []]


def test_other_special_tokens_do_not_leak(tools: Stack) -> None:
    answer(tools, "a<|observation|></think>b<|end|><|user|>c")
    assert spoken(tools.post(tools=TOOLS)) == {"reasoning_content": "a", "content": "bc"}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_never_parsed(tools: Stack, stream: bool) -> None:
    response = tools.post("/v1/completions", stream=stream)
    choices = [e["choices"][0] for e in events_of(response.text)[:-1]] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == ANSWER
    assert choices[-1]["finish_reason"] == "stop"


def test_what_stays_refused(tools: Stack) -> None:
    seen = len(tools.vllm.seen)
    for field, value in (("tool_choice", "required"), ("stop", ["x"]), ("logprobs", True), ("functions", [{}])):
        assert error_of(tools.post(tools=TOOLS, **{field: value}), 501, "capability_unavailable")["param"] == field
    assert error_of(tools.post(tools=["f"]), 400, "invalid_parameter")["param"] == "tools"
    with pytest.raises(openai.BadRequestError):
        tools.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function"}])
    assert len(tools.vllm.seen) == seen, "refused before anything was contacted"


# The command line


def configured(tmp_path, *flags: str) -> Config:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    base = ["--vllm-url", "http://127.0.0.1:1", "--decode", "127.0.0.1:1:2"]
    return config_from(build_parser().parse_args([*base, *flags]))


def test_the_default_parser_is_the_models(tmp_path) -> None:
    assert configured(tmp_path, "--model-path", str(tmp_path)).parsing.grammar is GLM47
    assert configured(tmp_path, "--model-path", str(tmp_path), "--parser", "none").parsing is None
    assert configured(tmp_path, "--model-path", str(tmp_path), "--parser", "dsv32").parsing.grammar.name == "dsv32"
    assert configured(tmp_path).parsing is None, "no tokenizer, no text"


def test_help_says_what_the_parser_does(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    page = " ".join(capsys.readouterr().out.split())
    for word in ("auto (default)", "glm47", "dsv32", "--enable-auto-tool-choice", "reasoning_content"):
        assert word in page
