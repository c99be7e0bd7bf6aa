"""The one table of request fields: it validates a body, decides what prefill gets, and prints the documentation.

`python -m tilert_ref.router.fields` prints the table as Markdown.

Why a field can be refused at all: vLLM samples only the first token of an answer, the decode node samples the rest. A
field that only vLLM would honour would be right for one token and silently wrong for all others (TileRT 0.1.6's rule,
http-api.md section 5). Null always counts as absent. A field that isn't in the table is refused by its name.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tilert_ref.router.errors import RouterError, bad_field, unavailable

EndpointName = Literal["chat", "completions"]
Status = Literal["supported", "neutral-only", "refused"]
Prefill = Literal["copy", "drop", "set"]

BOTH: tuple[EndpointName, ...] = ("chat", "completions")
CHAT: tuple[EndpointName, ...] = ("chat",)
COMPLETIONS: tuple[EndpointName, ...] = ("completions",)


class BadValue(ValueError):
    """Raised by a check; the text says what is legal."""


@dataclass(frozen=True)
class Field:
    """One request field.

    check turns a JSON value into the value that is used, or raises BadValue (400). neutral decides for a neutral-only
    field whether the checked value asks for nothing (else 501). prefill says what vLLM gets: a copy, nothing ("drop"),
    or a value of the router's own ("set").
    """

    name: str
    status: Status
    check: Callable[[Any], Any]
    legal: str
    note: str
    endpoints: tuple[EndpointName, ...] = BOTH
    prefill: Prefill = "copy"
    neutral: Callable[[Any], bool] = lambda value: True

    def validate(self, value: Any) -> Any:
        """The checked value; raises RouterError (400 or 501) that names the field."""
        if self.status == "refused":
            raise unavailable(self.name, f"{self.name} is not supported: {self.note}")
        try:
            checked = self.check(value)
        except BadValue as e:
            raise bad_field(self.name, f"{self.name}: got {show(value)}; legal: {e}") from None
        if self.status == "neutral-only" and not self.neutral(checked):
            raise unavailable(self.name, f"{self.name}: got {show(value)}; accepted: {self.legal}. {self.note}")
        return checked


def show(value: Any) -> str:
    """A short JSON form of a client's value for error texts."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# Checks. Numeric strings count as numbers, as with TileRT and vLLM's pydantic; both legs get the number.


def finite(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValue("a number")
    try:
        number = _number(value) if isinstance(value, str) else value
        if math.isfinite(number):
            return number
    except (ValueError, OverflowError):
        pass
    raise BadValue("a finite number")


def _number(word: str) -> float | int:
    # Integers not by way of float: a seed has 64 bits, a float only 53.
    try:
        return int(word)
    except ValueError:
        return float(word)


def non_negative(value: Any) -> float | int:
    number = finite(value)
    if number < 0:
        raise BadValue("a number >= 0")
    return number


def integer(value: Any) -> int:
    number = finite(value)
    if number != int(number) or not -(2**63) <= number < 2**63:
        raise BadValue("an integer of at most 64 bits")
    return int(number)


def positive_integer(value: Any) -> int:
    number = integer(value)
    if not 1 <= number < 2**31:
        raise BadValue("an integer from 1 to 2147483647")
    return number


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue("true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue("a string")
    return value


def request_id(value: Any) -> str:
    """The caller's name for the request. It goes into the reply id, so it has to be printable and short."""
    if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
        raise BadValue("1 to 256 printable characters")
    return value


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValue("an object")
    return value


def messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise BadValue("a non-empty list of message objects")
    return value


def tools(value: Any) -> list[Any] | None:
    """OpenAI's function tools; an empty list is none. What else is in them is vLLM's and the template's business."""
    if not isinstance(value, list) or not all(map(_is_function, value)):
        raise BadValue('a list of {"type": "function", "function": {"name": string, "parameters": object}}')
    return value or None


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        return False
    return isinstance(function.get("parameters"), dict | None)


def prompt(value: Any) -> Any:
    """One prompt: text, or token ids, or a list that holds exactly one of those."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value):
        return value
    raise BadValue("one non-empty prompt, as a string or as a list of token ids")


def stream_options(value: Any) -> dict[str, Any]:
    options = {k: v for k, v in mapping(value).items() if v is not None}
    for key in ("continuous_usage_stats", "include_obfuscation"):
        if options.pop(key, False) is not False:
            raise BadValue(f"{key} only as false: it is not built here")
    if options.keys() - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise BadValue('{"include_usage": true or false}')
    return options


def anything(value: Any) -> Any:
    return value


# Makers of rows.


def _neutral(
    name: str,
    check: Callable[[Any], Any],
    values: Iterable[Any],
    note: str,
    endpoints: tuple[EndpointName, ...] = BOTH,
    prefill: Prefill = "copy",
) -> Field:
    values = tuple(values)
    legal = " or ".join(["null", *(show(v) for v in values)])
    return Field(name, "neutral-only", check, legal, note, endpoints, prefill, lambda v: v in values)


def _empty(name: str, note: str, endpoints: tuple[EndpointName, ...] = BOTH, prefill: Prefill = "copy") -> Field:
    # Checked to None, and so absent: vLLM refuses some of these when they are empty (allowed_token_ids, suffix).
    return Field(
        name, "neutral-only", lambda v: v or None, "null or empty", note, endpoints, prefill, lambda v: v is None
    )


def _refused(names: str, note: str, endpoints: tuple[EndpointName, ...] = BOTH) -> list[Field]:
    return [Field(name, "refused", anything, "null", note, endpoints) for name in names.split()]


def _prompt_shape(
    names: str, check: Callable[[Any], Any], legal: str, endpoints: tuple[EndpointName, ...]
) -> list[Field]:
    note = "Shapes the prompt; vLLM renders the prompt, so vLLM alone needs it."
    return [Field(name, "supported", check, legal, note, endpoints) for name in names.split()]


def _no_effect(names: str, check: Callable[[Any], Any], legal: str, note: str) -> list[Field]:
    return [Field(name, "supported", check, legal, note, prefill="drop") for name in names.split()]


_GRAMMAR = "No engine here decodes under a grammar yet; vLLM would constrain the first token only."
_PENALTY = "No engine here applies penalties yet; vLLM would apply it to the first token only."
_LOGPROBS = "Logprobs of decoded tokens come with a later release."
_PARSER = "Needs a parser for the model's answers (--parser), else 501."
_FORCED = "A call can't be forced without a grammar; vLLM would force the first token only."
_STOP = "Stop strings are matched on text at the router, which is not built yet."
_SAMPLER = "The decode nodes' sampler doesn't know it; vLLM would apply it to the first token only."
_OUTPUT = "Nothing here makes this kind of output."

FIELDS: tuple[Field, ...] = (
    Field("model", "supported", text, "string", "vLLM checks the name."),
    Field("messages", "supported", messages, "list of objects", "vLLM renders them with the chat template.", CHAT),
    Field("prompt", "supported", prompt, "one string or one list of ids", "One prompt a request.", COMPLETIONS),
    Field("request_id", "supported", request_id, "1 to 256 printable characters",
          "Appears in the reply id. vLLM gets the router's own key instead, because the handoff key has to be the same "
          "on both sides. The X-Request-Id header does the same and wins.", prefill="set"),
    # Length and streaming.
    Field("max_tokens", "supported", positive_integer, "integer >= 1",
          "Default 256. Decode gets it; prefill samples 1 token.", prefill="set"),
    Field("max_completion_tokens", "supported", positive_integer, "integer >= 1", "Wins over max_tokens.",
          prefill="drop"),
    Field("stream", "supported", boolean, "true or false", "", prefill="set"),
    Field("stream_options", "supported", stream_options, '{"include_usage": bool}', "Only together with stream: true.",
          prefill="drop"),
    # Sampling. Both legs get the same resolved values.
    Field("temperature", "supported", non_negative, "number >= 0", "Below 1e-5: greedy.", prefill="set"),
    Field("top_p", "supported", non_negative, "number >= 0", "vLLM refuses values above 1.", prefill="set"),
    Field("top_k", "supported", integer, "integer", "0 or less: no limit.", prefill="set"),
    Field("seed", "supported", integer, "integer",
          "Goes to both legs: the same seed gives the same answer again on the same system, not vLLM's own "
          "continuation. A decode node that can't seed a request (TileRT 0.1.6) answers 501 itself."),
    Field("ignore_eos", "supported", boolean, "true or false",
          "true needs a decode node with the ignore_eos capability; else 501."),
    _neutral("repetition_penalty", finite, [1.0], _PENALTY, prefill="set"),
    _neutral("presence_penalty", finite, [0.0], _PENALTY),
    _neutral("frequency_penalty", finite, [0.0], _PENALTY),
    _neutral("min_p", non_negative, [0.0], _SAMPLER, prefill="set"),
    _neutral("min_tokens", integer, [0], _SAMPLER),
    _neutral("n", positive_integer, [1], "A decode node makes one sequence at a time."),
    _neutral("best_of", positive_integer, [1], "A decode node makes one sequence at a time."),
    _neutral("use_beam_search", boolean, [False], "A decode node makes one sequence at a time."),
    _neutral("length_penalty", finite, [1.0], "Belongs to beam search."),
    _empty("logit_bias", _SAMPLER),
    _empty("bad_words", _SAMPLER),
    _empty("allowed_token_ids", _SAMPLER),
    _empty("stop_token_ids", "The decode nodes stop at the model's own stop tokens only."),
    _neutral("watermarking", boolean, [False], _SAMPLER),
    _neutral("thinking_token_budget", integer, [-1], _SAMPLER),
    *_refused("repetition_detection vllm_xargs logits_processors", _SAMPLER),
    # Text.
    _empty("stop", _STOP, prefill="drop"),
    _neutral("include_stop_str_in_output", boolean, [False], _STOP, prefill="drop"),
    _neutral("skip_special_tokens", boolean, [True], "The router always leaves special tokens out of the text."),
    _neutral("spaces_between_special_tokens", boolean, [True], "There are no special tokens in the text."),
    _neutral("echo", boolean, [False], "The router returns generated text only."),
    _empty("suffix", "Nothing here fills in the middle.", COMPLETIONS),
    # Logprobs. Prefill sets them to learn the first token's id.
    _neutral("logprobs", boolean, [False], _LOGPROBS, CHAT, "set"),
    Field("logprobs", "refused", anything, "null", _LOGPROBS, COMPLETIONS, "set"),
    _neutral("top_logprobs", integer, [0], _LOGPROBS, CHAT, "set"),
    *_refused("prompt_logprobs", "The prompt's logprobs are vLLM's; they are not handed through yet."),
    _empty("logprob_token_ids", _LOGPROBS),
    # Tools and constrained output.
    Field("tools", "supported", tools, "list of functions",
          f"{_PARSER} vLLM puts them into the prompt, and has to run with --enable-auto-tool-choice and "
          "--tool-call-parser.", CHAT),
    _neutral("tool_choice", anything, ["none", "auto"], _FORCED, CHAT),
    Field("parallel_tool_calls", "supported", boolean, "true or false", "false: only the first call is given.", CHAT),
    *_refused("functions function_call", "The old form of tools and tool_choice; use those.", CHAT),
    Field("response_format", "neutral-only", mapping, 'null or {"type": "text"}', _GRAMMAR,
          neutral=lambda v: v.get("type") == "text"),
    _empty("structured_outputs", _GRAMMAR),
    *_refused("regex ebnf json_schema structural_tag guided_json guided_regex guided_choice guided_grammar "
              "guided_decoding_backend guided_whitespace_pattern", _GRAMMAR),
    # What shapes the prompt.
    *_prompt_shape("chat_template_kwargs mm_processor_kwargs media_io_kwargs", mapping, "object", CHAT),
    *_prompt_shape("chat_template reasoning_effort", text, "string", CHAT),
    *_prompt_shape("documents", anything, "list of objects", CHAT),
    *_prompt_shape("add_generation_prompt continue_final_message", boolean, "true or false", CHAT),
    *_prompt_shape("add_special_tokens", boolean, "true or false", BOTH),
    *_prompt_shape("truncate_prompt_tokens", integer, "integer", BOTH),
    *_prompt_shape("truncation_side", text, "string", BOTH),
    *_refused("prompt_embeds", "The connector hands over prompts of token ids only.", COMPLETIONS),
    Field("include_reasoning", "supported", boolean, "true or false",
          f"false leaves reasoning_content out of the answer. {_PARSER} Not for vLLM: with false it leaves out the ids "
          "too, and the first token with them.", CHAT, prefill="drop"),
    # How vLLM runs the prefill.
    Field("priority", "supported", integer, "integer", "Orders vLLM's queue; the router's own is first in, first out."),
    Field("cache_salt", "supported", text, "string", "Salts vLLM's prefix cache."),
    Field("session_id", "supported", text, "string", "vLLM's own bookkeeping."),
    Field("user", "supported", text, "string", "No effect on the answer."),
    *_refused("kv_transfer_params ec_transfer_params",
              "The router sets the handoff: a client that named the target could have any prompt's KV sent there."),
    # Extra output.
    Field("return_token_ids", "supported", boolean, "true or false",
          "Adds token_ids to every choice and prompt_token_ids to the reply.", prefill="set"),
    Field("return_tokens_as_token_ids", "supported", boolean, "true or false", "Only shows in logprobs.",
          prefill="set"),
    _neutral("return_prompt_text", boolean, [False], _OUTPUT),
    _neutral("return_token_offsets", boolean, [False], _OUTPUT),
    _neutral("routed_experts_prompt_start", integer, [0], _OUTPUT),
    _neutral("return_mm_kwargs", boolean, [False], _OUTPUT),
    _neutral("mm_payload", text, ["tensors", "none"], _OUTPUT),
    _neutral("stream_interval", integer, [1], "Chunks follow the decode node's own lines."),
    # OpenAI's fields that name no maths.
    *_no_effect("metadata", mapping, "object", "Nothing is stored."),
    *_no_effect("safety_identifier prompt_cache_key prompt_cache_retention", text, "string",
                "Concerns OpenAI's own service only."),
    _neutral("store", boolean, [False], "Nothing is stored.", prefill="drop"),
    _neutral("service_tier", text, ["auto", "default"], "There is one tier.", prefill="drop"),
    _neutral("modalities", anything, [["text"]], _OUTPUT, CHAT, "drop"),
    _neutral("verbosity", text, ["medium"], "No model here knows it.", CHAT, "drop"),
    *_refused("audio prediction web_search_options", _OUTPUT, CHAT),
)  # fmt: skip

_TABLES: dict[EndpointName, dict[str, Field]] = {
    endpoint: {f.name: f for f in FIELDS if endpoint in f.endpoints} for endpoint in BOTH
}


def fields_of(endpoint: EndpointName) -> dict[str, Field]:
    """The table of one endpoint, by field name."""
    return _TABLES[endpoint]


def validate(body: Any, endpoint: EndpointName) -> dict[str, Any]:
    """The checked values, without null and empty ones; raises RouterError that names the first bad field."""
    if not isinstance(body, dict):
        raise RouterError(400, f"the body has to be a JSON object, got {show(body)}", code="invalid_parameter")
    table = fields_of(endpoint)
    for name in body:
        if name not in table:
            raise bad_field(name, _unknown(name, endpoint))
    checked = {name: table[name].validate(value) for name, value in body.items() if value is not None}
    clean = {name: value for name, value in checked.items() if value is not None}
    _check_together(clean, endpoint)
    return clean


def refuse_parsing(body: dict[str, Any]) -> None:
    """For a router without a parser: refuses what a checked body asks of one; raises RouterError 501."""
    for name, wanted in (("tools", "tools" in body), ("include_reasoning", not body.get("include_reasoning", True))):
        if wanted:
            raise unavailable(
                name, f"{name}: this router doesn't parse the model's answers; start it with --parser (see its --help)"
            )


def _unknown(name: str, endpoint: EndpointName) -> str:
    shown = show(name)
    if any(name in table for table in _TABLES.values()):
        return f"field {shown} doesn't belong to this endpoint ({endpoint})"
    return f"unknown field {shown}: it is refused, not ignored; `python -m tilert_ref.router.fields` lists the fields"


def _check_together(body: dict[str, Any], endpoint: EndpointName) -> None:
    required = "messages" if endpoint == "chat" else "prompt"
    if required not in body:
        raise bad_field(required, f"{required} is required")
    if "stream_options" in body and not body.get("stream", False):
        raise bad_field("stream_options", "stream_options is only legal together with stream: true")


def markdown() -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| Field | Endpoint | Status | Accepted | To vLLM | Note |", "|---|---|---|---|---|---|"]
    for f in FIELDS:
        where = "both" if f.endpoints == BOTH else f.endpoints[0]
        lines.append(f"| `{f.name}` | {where} | {f.status} | {f.legal} | {f.prefill} | {f.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
