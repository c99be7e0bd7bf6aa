"""The glm47 and dsv32 parsers give what vLLM's own parsers of these formats give, on random well-formed answers."""

import random

import pytest

from tilert_ref.router.grammars import DSV32, GLM47
from tilert_ref.router.parser import Call, Content, Grammar, Parser, Reasoning, State
from tilert_ref.router.parsing import offered_tools

glm47_moe = pytest.importorskip("vllm.parser.glm47_moe")
deepseek_v32 = pytest.importorskip("vllm.parser.deepseek_v32")

pytestmark = pytest.mark.vllm

PROPERTIES = {
    "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
    "o": {"type": "object"}, "a": {"type": "array"}, "z": {"type": ["null", "integer", "string"]},
    "e": {"enum": [1, "x"]}, "u": {}, "y": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "f": {"type": "float"},
    "any": {"type": "any"},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "g"}},
]
VALUES = ["5", "-7", "5.0", "1e3", "true", "True", "0", "null", "NULL", "abc", " 5 ", "[1,2]", '{"a":1}', "[1", "1e999",
          "NaN", "", "\n", "ü世", "1_000", "007", '"q"', "a<b", "<think>"]  # fmt: skip
GAPS = ["", "\n"]


class NoTokenizer:
    """vLLM's parsers then look at the text alone, as ours always do."""

    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def get_vocab(self) -> dict[str, int]:
        return {}


def vllm_parse(parser_class: type, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "auto"}
    request = ChatCompletionRequest.model_validate(body)
    parser = parser_class(NoTokenizer(), request.tools)
    reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True)
    return reasoning or "", content or "", [(c.name, c.arguments) for c in calls or []]


def our_parse(grammar: Grammar, text: str, state: State) -> tuple[str, str, list[tuple[str, str]]]:
    parser = Parser(grammar, offered_tools({"tools": TOOLS}), state)
    events = parser.feed(text) + parser.finish()
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    content = "".join(e.text for e in events if isinstance(e, Content))
    return reasoning, content, [(e.name, e.arguments) for e in events if isinstance(e, Call)]


def glm_answer(rng: random.Random) -> str:
    pick = rng.choice
    text = pick(["think ", "", "<think>ab", "x\n"]) + pick(["</think>", "", "</think>\n"]) + pick(["", "Hi", "Hi\n"])
    for _ in range(rng.randrange(3)):
        text += "<tool_call>" + pick(["f", "g", "f\n", " f", "no such tool", ""])
        for _ in range(rng.randrange(4)):
            key, value = pick([*PROPERTIES, "unknown", " s "]), pick(VALUES)
            text += f"<arg_key>{key}</arg_key>{pick(GAPS)}<arg_value>{value}</arg_value>{pick(GAPS)}"
        text += "</tool_call>" + pick(["", "\n", "\n\n"])
    return text


def dsml_answer(rng: random.Random) -> str:
    pick = rng.choice
    text = pick(["", "Hi"]) + "<｜DSML｜function_calls>\n"
    for _ in range(rng.randrange(1, 4)):
        text += f'<｜DSML｜invoke name="{pick("fg")}">\n'
        for _ in range(rng.randrange(4)):
            # Names outside the schema: there both leave it to the model's own string="...".
            name, value, kind = pick("kl"), pick(VALUES), pick(["true", "false"])
            text += f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n"
    return text + "</｜DSML｜function_calls>"


def test_glm47() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        text = glm_answer(rng)
        theirs, ours = vllm_parse(glm47_moe.Glm47MoeParser, text), our_parse(GLM47, text, State.REASONING)
        # vLLM's blocking answers also drop whitespace before content, if calls follow; its streams keep it, as we do.
        assert (ours[0], ours[1].strip(), ours[2]) == (theirs[0], theirs[1].strip(), theirs[2]), text


def test_dsv32() -> None:
    rng = random.Random(7)
    for _ in range(500):
        text = dsml_answer(rng)
        if any(word in text for word in ("NaN", "1e999")):
            continue  # vLLM writes NaN and Infinity there, which are no JSON
        assert our_parse(DSV32, text, State.CONTENT) == vllm_parse(deepseek_v32.DeepSeekV32Parser, text), text


def test_where_the_length_cut_an_argument_we_follow_the_streams() -> None:
    text = "</think><tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>Par"
    assert vllm_parse(glm47_moe.Glm47MoeParser, text)[2] == [("f", '{"i": 1}')], "a call that looks whole"
    assert our_parse(GLM47, text, State.REASONING)[2] == [("f", '{"i": 1, "s": "Par')]
