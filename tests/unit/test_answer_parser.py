"""The two answer formats, case by case: channels, argument values, cut-off calls; and how a parser is chosen."""

import itertools
import json

import pytest
from router_fakes import byte_tokenizer
from tokenizers import AddedToken, Tokenizer

from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.grammars import DSV32, GLM47, types_of, value_json
from tilert_ref.router.parser import Call, Content, Event, Grammar, Parser, Reasoning, Rejected, State
from tilert_ref.router.parsing import Parsing, choose_parsing, offered_tools

R, C = State.REASONING, State.CONTENT
TOOLS = {"f": {"s": {"type": "string"}, "i": {"type": "integer"}}, "g": {}}


def parse(*pieces: str, grammar: Grammar = GLM47, state: State = R, tools: dict | None = TOOLS, cut: bool = False):
    parser = Parser(grammar, tools, state)
    return [*(e for p in pieces for e in parser.feed(p)), *parser.finish(cut)]


def channels(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """reasoning, content, calls"""
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    content = "".join(e.text for e in events if isinstance(e, Content))
    return reasoning, content, [(e.name, e.arguments) for e in events if isinstance(e, Call)]


def call(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


def argument(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


# GLM


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("why</think>what", "why", "what"),
        ("<think>why\n\n</think>\n\nwhat \n", "why", "\n\nwhat \n"),
        ("why", "why", ""),
        ("why </thin", "why </thin", ""),
        ("</think>a</think>b", "", "ab"),
        ("a</think>b<think>c</think>d", "ac", "bd"),
        ("a < b</think>a<b", "a < b", "a<b"),
    ],
)
def test_glm_reasoning(text: str, reasoning: str, content: str) -> None:
    assert channels(parse(text)) == (reasoning, content, [])


def test_glm_without_thinking_is_content_at_once() -> None:
    assert channels(parse("a </think> <think>", state=C)) == ("", "a </think> <think>", [])
    assert Parser(GLM47, TOOLS, C).feed("Hello") == [Content("Hello")]


def test_glm_calls() -> None:
    text = "why</think>Let me look.\n\n" + call("f\n" + argument("s", "Paris") + "\n" + argument(" i ", "3") + "\n")
    text += "\n" + call("g") + "\n"
    calls = [("f", '{"s": "Paris", "i": 3}'), ("g", "{}")]
    assert channels(parse(text)) == ("why", "Let me look.", calls)
    assert channels(parse(*text)) == ("why", "Let me look.", calls)


def test_a_call_ends_reasoning() -> None:
    assert channels(parse("why \n" + call("g") + "then")) == ("why", "then", [("g", "{}")])


def test_events_come_as_soon_as_they_are_sure() -> None:
    parser = Parser(GLM47, TOOLS, R)
    told = [parser.feed(p) for p in ["why", " ", "</th", "ink>", "a ", "b <", "tool_call>", "g", "</tool_call>", "!"]]
    assert told == [
        [Reasoning("why")], [], [], [], [Content("a")], [Content(" b")], [], [], [Call("g", "{}")], [Content("!")],
    ]  # fmt: skip


def test_without_offered_tools_the_markup_stays_text() -> None:
    text = f"why {call('g')}</think>{call('g')}"
    assert channels(parse(text, tools=None)) == ("why " + call("g"), call("g"), [])
    assert channels(parse("<｜DSML｜function_calls>x", grammar=DSV32, tools=None))[0] == "<｜DSML｜function_calls>x"


def test_a_call_of_a_tool_that_was_not_offered_is_told_apart() -> None:
    assert parse(call("h") + call("") + call("g"), state=C) == [Rejected("h"), Rejected(""), Call("g", "{}")]


@pytest.mark.parametrize(
    ("inner", "stopped", "cut"),
    [
        ("f", "{}", "{"),
        ("f<arg_k", "{}", "{"),
        ("f<arg_key>s", "{}", "{"),
        ("f<arg_key>s</arg_key>", "{}", "{"),
        ("f<arg_key>s</arg_key><arg_value>", '{"s": "', '{"s": "'),
        ('f<arg_key>s</arg_key><arg_value>a "b"\n', '{"s": "a \\"b\\"\\n', '{"s": "a \\"b\\"\\n'),
        ("f<arg_key>s</arg_key><arg_value>a</arg_va", '{"s": "a', '{"s": "a'),
        ("f<arg_key>i</arg_key><arg_value>1", '{"i": ', '{"i": '),
        ("f" + argument("i", "1"), '{"i": 1}', '{"i": 1'),
        ("f" + argument("i", "1") + "</tool_c", '{"i": 1}', '{"i": 1'),
        ("f" + argument("i", "1") + "<arg_key>s</arg_key><arg_value>a", '{"i": 1, "s": "a', '{"i": 1, "s": "a'),
    ],
)
def test_unfinished_calls(inner: str, stopped: str, cut: str) -> None:
    """What the length cut off never parses as JSON; a model that stopped by itself may have forgotten a closing tag."""
    assert parse("<tool_call>" + inner, state=C) == [Call("f", stopped)]
    assert parse("<tool_call>" + inner, state=C, cut=True) == [Call("f", cut)]


def test_half_a_name_is_no_call() -> None:
    tools = {"get_weather": {}}
    assert parse("<tool_call>get_wea", state=C, tools=tools, cut=True) == [Rejected("get_wea")]


def test_an_argument_that_the_call_end_cuts_off_is_no_json() -> None:
    text = "<tool_call>f<arg_key>s</arg_key><arg_value>a</tool_call>b"
    assert parse(text, state=C) == [Call("f", '{"s": "a'), Content("b")]


def test_malformed_arguments_are_passed_over() -> None:
    text = "<arg_key>x</arg_key>?<arg_value>1</arg_value>" + argument("i", "2") + "<arg_key>y<arg_key>s</arg_key>"
    assert parse(call("f" + text + "<arg_value>z</arg_value>"), state=C) == [Call("f", '{"i": 2, "s": "z"}')]


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.5", 5.5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5.0", 5),
        ({"type": "number"}, "-2.5", -2.5),
        ({"type": "number"}, "9007199254740993", 9007199254740993),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "NULL", None),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "[1, 1e999]", "[1, 1e999]"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"enum": [1, "x"]}, "1", 1),
        ({"type": "list"}, "[1]", [1]),
        ({"type": "str"}, "5", "5"),
        ({"type": "something"}, "5", 5),
        ({"description": "no type"}, "5", "5"),
        (None, "5", "5"),
        ("garbage", "5", "5"),
    ],
)
def test_argument_values_follow_the_schema(schema, raw: str, value) -> None:
    assert json.loads(value_json(raw, schema)) == value
    assert type(json.loads(value_json(raw, schema))) is type(value)


def test_deep_schemas_are_no_problem() -> None:
    schema: dict = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert types_of(schema) == {"integer"}


# DeepSeek


K8 = """<｜DSML｜function_calls>
<｜DSML｜invoke name="search">
</｜DSML｜invoke>
<｜DSML｜invoke name="run_query">
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="false">-7</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
K8_TOOLS = {"search": {}, "run_query": {}, "get_weather": {"city": {"type": "string"}}}


def test_case_k8_every_cut() -> None:
    wanted = [Call("search", "{}"), Call("run_query", "{}"), Call("get_weather", '{"city": -7}')]
    cuts = [(a,) for a in range(len(K8))] + list(itertools.combinations(range(0, len(K8), 7), 2))
    for cut in [*cuts, tuple(range(len(K8)))]:
        pieces = [K8[a:b] for a, b in itertools.pairwise([0, *cut, len(K8)])]
        assert parse(*pieces, grammar=DSV32, state=C, tools=K8_TOOLS) == wanted, pieces
    text = K8.replace('"false"', '"true"')
    assert parse(text, grammar=DSV32, state=C, tools=K8_TOOLS)[-1] == Call("get_weather", '{"city": "-7"}')


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ('<｜DSML｜parameter name="a" string="false">{"b": [1]}</｜DSML｜parameter>', '{"a": {"b": [1]}}'),
        ('<｜DSML｜parameter name="a" string="false">[1</｜DSML｜parameter>', '{"a": "[1"}'),
        ('<｜DSML｜parameter name="a">5</｜DSML｜parameter>', '{"a": 5}'),
        ('<｜DSML｜parameter name="a" string="true">x<｜DSML｜parameter name="b">1</｜DSML｜parameter>',
         '{"a": "x", "b": 1}'),
        ('<｜DSML｜parameter name="a" string="true">x', '{"a": "x'),
        ('<｜DSML｜parameter name="a" string="false">1', '{"a": '),
    ],
)  # fmt: skip
def test_dsml_parameters(parameters: str, arguments: str) -> None:
    text = f'why</think>Hi\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n{parameters}</｜DSML｜invoke>'
    assert channels(parse(text, grammar=DSV32)) == ("why", "Hi", [("g", arguments)])


# The tokenizer's part


def with_tokens(*tokens: str, special: bool = False) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=special) for t in tokens])
    return tokenizer


GLM_TOKENIZER = with_tokens(*GLM47.tokens, *GLM47.turn_tokens)


def test_auto_goes_by_the_tokenizer() -> None:
    def chosen(tokenizer: Tokenizer) -> str | None:
        parsing = choose_parsing("auto", Detokenizer(tokenizer))
        return parsing.grammar.name if parsing else None

    assert chosen(GLM_TOKENIZER) == "glm47"
    assert chosen(with_tokens(*DSV32.tokens)) == "dsv32"
    assert chosen(with_tokens("<think>", "</think>", "<tool_call>", "</tool_call>")) is None, "Qwen's format"
    assert choose_parsing("auto", None) is None and choose_parsing("none", Detokenizer(GLM_TOKENIZER)) is None
    assert choose_parsing("glm47", Detokenizer(byte_tokenizer())).grammar is GLM47
    with pytest.raises(ValueError, match="glm47.*--model-path"):
        choose_parsing("glm47", None)


def test_every_tag_can_be_told_from_its_beginning() -> None:
    """The parser looks for an unfinished tag at the last "<" only."""
    for grammar in (GLM47, DSV32):
        tags = [tag for tags in grammar.moves.values() for tag in tags]
        assert all(tag.rfind("<") == 0 for tag in tags)
        assert not any(a != b and a.startswith(b) for a in tags for b in tags)


@pytest.mark.parametrize(
    ("prompt", "kwargs", "state"),
    [
        ("", {}, R),
        ("", {"enable_thinking": False}, C),
        ("", {"enable_thinking": None}, R),
        ("<|user|>hi<|assistant|><think>", {}, R),
        ("<|user|>hi<|assistant|></think>", {}, C),
        ("<|user|>hi<|assistant|><think>", {"enable_thinking": False}, R),
        ("<|assistant|></think>a<|user|>hi<|assistant|>", {}, R),
        ("<|assistant|><think>a<|user|>hi<|assistant|>", {"enable_thinking": False}, C),
        ("<|user|>hi<|assistant|><think>already begun", {}, R),
    ],
)
def test_the_prompt_says_whether_the_answer_starts_with_reasoning(prompt: str, kwargs: dict, state: State) -> None:
    parsing = Parsing(GLM47, Detokenizer(GLM_TOKENIZER))
    assert parsing.parser({"chat_template_kwargs": kwargs}, GLM_TOKENIZER.encode(prompt).ids).state is state


def test_deepseek_thinks_only_when_asked() -> None:
    parsing = Parsing(DSV32, Detokenizer(with_tokens(*DSV32.tokens)))
    assert parsing.parser({}, ()).state is C
    assert parsing.parser({"chat_template_kwargs": {"thinking": True}}, ()).state is R


@pytest.mark.parametrize("special", [False, True])
def test_the_parser_sees_its_tags_and_no_other_special_token(special: bool) -> None:
    tokenizer = with_tokens("</think>", "<tool_call>", special=special)
    tokenizer.add_special_tokens([AddedToken("<|observation|>", special=True)])
    ids = tokenizer.encode("a</think><tool_call>b<|observation|><|end|>").ids
    plain = Detokenizer(tokenizer)
    assert Parsing(GLM47, plain).detokenizer.stream().push(ids) == "a</think><tool_call>b"
    assert plain.stream().push(ids) == ("ab" if special else "a</think><tool_call>b")


def test_offered_tools() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "b", "parameters": {"properties": [1]}}},
        {"function": {"name": "c", "parameters": None}},
    ]
    assert offered_tools({"tools": tools}) == {"a": {"x": {"type": "integer"}}, "b": {}, "c": {}}
    assert offered_tools({}) is None and offered_tools({"tools": tools, "tool_choice": "none"}) is None
