"""The two text formats of answers that the router reads: glm47 (GLM-4.5 to GLM-5) and dsv32 (DeepSeek-V3.2's DSML).

Values of arguments follow vLLM 0.32's own parsers of these formats (vllm/parser/glm47_moe.py, deepseek_v32.py), so that
a client sees the same arguments whichever server answers. Differences, on purpose:
- Numbers keep all their digits: vLLM reads an integer for a `number` by way of a float.
- dsv32: the model's own string="true" or "false" decides alone; vLLM lets the tool's schema overrule it.
- An argument that was cut off leaves JSON that doesn't parse, as in vLLM's streams; vLLM's blocking answers leave it
  out, and then a client may run a call that was never complete.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tilert_ref.router.parser import Call, Grammar, State, Tools, partial_tag

R, C, CALL = State.REASONING, State.CONTENT, State.CALL


# Arguments as JSON text.


def arguments_json(members: Mapping[str, str], tail: str | None = None) -> str:
    """A JSON object of members that are JSON text. tail: its unfinished last member, after which nothing is closed."""
    inner = [f"{dumps(name)}: {value}" for name, value in members.items()]
    if tail is None:
        return "{" + ", ".join(inner) + "}"
    return "{" + ", ".join([*inner, tail] if tail else inner)


def dumps(value: Any) -> str:
    """JSON text; raises ValueError for infinities and NaN, RecursionError for what is too deep."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _reread(raw: str) -> Any:
    return json.loads(raw)


def _null(raw: str) -> None:
    if raw.lower() != "null":
        raise ValueError


def _number(raw: str) -> int | float:
    try:
        return int(raw)
    except ValueError:
        number = float(raw)
        return int(number) if number == int(number) else number


def _boolean(raw: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[raw.strip().lower()]


# In this order: "5" for a parameter that may be an integer or a string is the integer.
_READERS: dict[str, Callable[[str], Any]] = {
    "null": _null, "integer": int, "number": _number, "boolean": _boolean, "object": _reread, "array": _reread,
}  # fmt: skip
_PYTHON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
_PYTHON_NAMES["list"] = "array"


def value_json(raw: str, schema: Any) -> str:
    """An argument's raw text as JSON, by the parameter's schema; what doesn't fit the schema stays a string.

    A parameter without a type, or without a schema, is a string: so it is in vLLM.
    """
    kinds = types_of(schema)
    readers = [read for kind, read in _READERS.items() if kind in kinds]
    return _first_json(raw, readers if "string" in kinds else [*readers, _reread])


def _first_json(raw: str, readers: list[Callable[[str], Any]]) -> str:
    for read in readers:
        try:
            return dumps(read(raw))
        except (ValueError, KeyError, OverflowError, RecursionError):
            continue
    return dumps(raw)


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema names by type, enum, anyOf, oneOf or allOf; {"string"} if none."""
    found: set[str] = set()
    todo = [schema]  # not recursive: a client's schema may be deep
    while todo:
        part = todo.pop()
        part = part if isinstance(part, dict) else {}
        choices = [c for key in ("anyOf", "oneOf", "allOf") for c in _list(part.get(key))]
        here = {t for t in [*_list(part.get("type")), part.get("type")] if isinstance(t, str)}
        here |= {_type_of(v) for v in _list(part.get("enum"))}
        found |= here or (set() if choices else {"string"})
        todo += choices
    names = {t.strip().lower() for t in found}
    return {_PYTHON_NAMES.get(t, t) for t in names}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return _PYTHON_NAMES[type(value).__name__]


# GLM: <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>, values raw.

_GLM_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>(?:(?!</?arg_key>).)*+)</arg_key>\s*+<arg_value>(?P<value>.*?)(?:</arg_value>|(?P<open>\Z))",
    re.DOTALL,
)


def read_glm_call(body: str, tools: Tools, cut: bool) -> Call:
    name = body[: partial_tag(body, ("<arg_key>",))].partition("<arg_key>")[0].strip()
    schemas, members, tail = tools.get(name, {}), {}, "" if cut else None
    for match in _GLM_ARGUMENT.finditer(body):
        key, value = match["key"].strip(), match["value"]
        if match["open"] is None:
            members[key] = value_json(value, schemas.get(key))
        else:
            tail = _unfinished(key, value, types_of(schemas.get(key)) == {"string"}, "</arg_value>")
    return Call(name, arguments_json(members, tail))


def _unfinished(key: str, value: str, is_string: bool, closing_tag: str) -> str:
    """The beginning of a member. What isn't surely a string has no beginning that is surely right."""
    shown = value[: partial_tag(value, (closing_tag,))]
    return f"{dumps(key)}: " + (dumps(shown)[:-1] if is_string else "")


GLM47 = Grammar(
    name="glm47",
    moves={
        R: {"</think>": C, "<think>": R, "<tool_call>": CALL},
        C: {"</think>": C, "<think>": R, "<tool_call>": CALL},
        CALL: {"</tool_call>": C},
    },
    read_call=read_glm_call,
    # Qwen's tokenizers have the first four too, for another format.
    tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"),
    turn_tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    switches=("enable_thinking",),
    thinks=True,
)  # fmt: skip


# DeepSeek-V3.2: invoke blocks in a section; each parameter says itself whether it is a string.

_SECTION, _SECTION_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter\s+name="(?P<key>[^"]+)"(?:\s+string="(?P<string>[^"]*)")?\s*>(?P<value>.*?)'
    r"(?:</｜DSML｜parameter>|(?=<｜DSML｜parameter\s)|(?P<open>\Z))",
    re.DOTALL,
)


def read_dsml_call(body: str, tools: Tools, cut: bool) -> Call:
    name, _, parameters = body.partition('">')
    members, tail = {}, "" if cut else None
    for match in _DSML_PARAMETER.finditer(parameters):
        is_string = match["string"] == "true"
        if match["open"] is None:
            members[match["key"]] = _first_json(match["value"], [] if is_string else [_reread])
        else:
            tail = _unfinished(match["key"], match["value"], is_string, "</｜DSML｜parameter>")
    return Call(name, arguments_json(members, tail))


DSV32 = Grammar(
    name="dsv32",
    moves={
        R: {"</think>": C, "<think>": R, _SECTION: C, _INVOKE: CALL},
        C: {"</think>": C, "<think>": R, _SECTION: C, _SECTION_END: C, _INVOKE: CALL},
        CALL: {_INVOKE_END: C, _SECTION_END: C},
    },
    read_call=read_dsml_call,
    tokens=("<think>", "</think>", "｜DSML｜"),
    turn_tokens=("<｜User｜>", "<｜Assistant｜>"),
    switches=("thinking", "enable_thinking"),
    thinks=False,
)

GRAMMARS = {grammar.name: grammar for grammar in (GLM47, DSV32)}
