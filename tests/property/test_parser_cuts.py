"""The parser doesn't see how a text was cut: any cut of any text gives the events of one piece, and nothing raises."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilert_ref.router.grammars import DSV32, GLM47
from tilert_ref.router.parser import Call, Content, Event, Grammar, Parser, Reasoning, State

SCHEMAS = {"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": ["object", "null"]}, "u": {}}
TOOLS = {"f": SCHEMAS, "g": {}}
TAGS = {
    "glm47": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>", "<tool_call>f<arg_key>s</arg_key><arg_value>", "<arg_key>i</arg_key>\n<arg_value>-7"],
    "dsv32": ["<think>", "</think>", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
              '<｜DSML｜invoke name="f">', '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>",
              '<｜DSML｜parameter name="s" string="true">', '<｜DSML｜parameter name="i" string="false">-7',
              "</｜DSML｜parameter>"],
}  # fmt: skip
WORDS = ["f", "g", "no such tool", " ", "\n\n", "<", "</", "<<", "{", '"', "\\", "1e999", "[" * 2000, "ü世😀", "\ud800"]


@st.composite
def cut_texts(draw: st.DrawFn, grammar: Grammar) -> list[str]:
    """Pieces of a text of tags, beginnings of tags, words and noise, cut anywhere, also into empty pieces."""
    tag = st.sampled_from(TAGS[grammar.name])
    beginning = st.tuples(tag, st.integers(1, 12)).map(lambda t: t[0][: t[1]])
    part = st.one_of(tag, tag, beginning, st.sampled_from(WORDS), st.text(max_size=5))
    text = "".join(draw(st.lists(part, max_size=14)))
    bounds = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=12))), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def parse(grammar: Grammar, pieces: list[str], state: State, tools: dict | None, cut: bool) -> list[Event]:
    """All events; text of one channel that follows itself is joined."""
    parser = Parser(grammar, tools, state)
    joined: list[Event] = []
    for event in [*(e for piece in pieces for e in parser.feed(piece)), *parser.finish(cut)]:
        if joined and isinstance(event, Content | Reasoning) and type(event) is type(joined[-1]):
            event = type(event)(joined.pop().text + event.text)
        joined.append(event)
    return joined


@pytest.mark.parametrize("grammar", [GLM47, DSV32], ids=lambda g: g.name)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), state=st.sampled_from([State.REASONING, State.CONTENT]), cut=st.booleans())
def test_any_cut_of_any_text(grammar: Grammar, data: st.DataObject, state: State, cut: bool) -> None:
    pieces = data.draw(cut_texts(grammar))
    text = "".join(pieces)
    for tools in (TOOLS, None):
        whole = parse(grammar, [text], state, tools, cut)
        assert parse(grammar, pieces, state, tools, cut) == whole
        assert parse(grammar, list(text), state, tools, cut) == whole
        assert tools or not any(isinstance(e, Call) for e in whole)


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from([State.REASONING, State.CONTENT]))
@example("<tool_call>f</tool_call> a</think> \n", State.CONTENT)
def test_without_tools_and_thinking_nothing_is_lost(text: str, state: State) -> None:
    """There is no markup then: the content is the text."""
    events = parse(GLM47, list(text), State.CONTENT, None, cut=False)
    assert "".join(e.text for e in events) == text


VALUES = st.text().filter(lambda v: "</" not in v)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.data())
def test_string_arguments_come_back_as_written(arguments: dict[str, str], data: st.DataObject) -> None:
    """And a call that is cut off anywhere before its end is left out, or isn't JSON: nobody runs half a call."""
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    text = f"<tool_call>g{inner}</tool_call>"
    (call,) = parse(GLM47, [text], State.CONTENT, TOOLS, cut=False)
    assert isinstance(call, Call) and json.loads(call.arguments) == arguments
    part = text[: data.draw(st.integers(0, len(text) - 1))]
    for event in parse(GLM47, [part], State.CONTENT, TOOLS, cut=True):
        if isinstance(event, Call):
            with pytest.raises(json.JSONDecodeError):
                json.loads(event.arguments)
