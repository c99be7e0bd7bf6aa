"""What a /pd/decode body may ask for: its schema, and one table of sampling fields.

Source: http-api.md sections 1.3 and 5. A field's rule decides between accepted, 400 `invalid_parameter` (wrong type or
range) and 501 `capability_unavailable` (legal, but this engine can't). Null always counts as absent. Keys of `sampling`
that the table doesn't know are left alone, as in TileRT: newer routers must be able to talk to older nodes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, StrictInt

from tilert_ref.engine.api import Capabilities, SamplingParams

GREEDY_BELOW = 1e-5
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 86400.0
INT64 = range(-(2**63), 2**63)
INT32_LIMIT = 2**31


class DecodeError(Exception):
    """A request's failure with the HTTP status and the body that report it."""

    def __init__(self, status: int, error: str, error_type: str | None = None, rid: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.body = {"error": error}
        if error_type is not None:
            self.body["error_type"] = error_type
        if rid is not None:
            self.body["rid"] = rid

    def line(self) -> dict[str, str]:
        """The last line of a stream that fails after its 200. Always typed: routers show untyped text to the user."""
        return {"error": self.body["error"], "error_type": self.body.get("error_type", "decode_failed")}


def invalid(text: str) -> DecodeError:
    return DecodeError(400, text, "invalid_parameter")


def unavailable(text: str) -> DecodeError:
    return DecodeError(501, text, "capability_unavailable")


def _is_utf8(rid: str) -> str:
    try:
        rid.encode()
    except UnicodeEncodeError:
        raise ValueError("rid must be text that UTF-8 can encode, got a lone surrogate") from None
    return rid


Rid = Annotated[str, AfterValidator(_is_utf8), Field(min_length=1, max_length=256)]
"""It goes into JSON replies and log lines, which a lone surrogate would break."""


class DecodeBody(BaseModel):
    """Body of POST /pd/decode. max_tokens counts the first token; timeout_s is how long to wait for the KV, seconds.

    Ours: queue asks to wait behind the current request instead of a 429; announce_timeout_s gives up on KV that no
    prefill node has offered for so long, while none transfers anything to this node.
    """

    rid: Rid
    first_token_id: StrictInt
    max_tokens: int = 256
    sampling: dict[str, Any] | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    stream: bool = False
    grammar_spec: dict[str, Any] | None = None
    enable_thinking: bool = True
    top_logprobs: int | None = None
    queue: bool = False
    announce_timeout_s: float | None = None


Parse = Callable[[str, Any], Any]
"""(field name, value that is not None) -> the typed value, or raises `invalid`."""


def number(name: str, value: Any) -> float:
    """Any finite number."""
    if not _is_finite(value):
        raise invalid(f"{name} must be a finite number, got {value!r}")
    return float(value)


def non_negative(name: str, value: Any) -> float:
    """A finite number >= 0 or its decimal text."""
    got = number(name, _from_text(value))
    if got < 0:
        raise invalid(f"{name} must be >= 0, got {value!r}")
    return got


def whole_number(name: str, value: Any) -> int:
    """An integer-valued number or its decimal text, any sign."""
    got = _from_text(value)
    if not _is_finite(got) or got != int(got):
        raise invalid(f"{name} must be a whole number, got {value!r}")
    return int(got)


def integer_from(low: int) -> Parse:
    def parse(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise invalid(f"{name} must be an integer >= {low}, got {value!r}")
        return value

    return parse


def seed_value(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in INT64:
        raise invalid(f"{name} must be a 64 bit integer, got {value!r}")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {value!r}")
    return value


def anything(name: str, value: Any) -> Any:
    return value


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and for integers that no float can hold


def _from_text(value: Any) -> Any:
    """Decimal text -> number; anything else unchanged, for the caller to refuse."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@dataclass(frozen=True)
class Rule:
    """One field. `neutral`: the only accepted value, unless the engine has the capability named by `needs`.

    A rule without `neutral` accepts every value that parses.
    """

    name: str
    parse: Parse
    neutral: Callable[[Any], bool] | None = None
    legal: str = ""
    needs: str | None = None

    def check(self, value: Any, capabilities: Capabilities) -> None:
        parsed = self.parse(self.name, value)
        if self.neutral is None or self.neutral(parsed):
            return
        if self.needs is None or not getattr(capabilities, self.needs):
            raise unavailable(f"{self.name}={value!r} is not supported by this decode engine; legal: {self.legal}")


def _only(value: Any) -> dict[str, Any]:
    return {"neutral": lambda got: got == value, "legal": str(value).lower()}


def _empty(name: str) -> Rule:
    return Rule(name, anything, neutral=lambda got: not got, legal="empty or absent")


# Checked in this order: fields with a type, fields that no engine has, fields that depend on the engine.
RULES = (
    Rule("temperature", non_negative),
    Rule("top_p", non_negative),
    Rule("top_k", whole_number),
    Rule("seed", seed_value),  # TileRT refuses it unless greedy; here it is an extension
    *map(_empty, ("stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")),
    *map(_empty, ("structured_outputs", "logprob_token_ids")),
    Rule("min_tokens", integer_from(0), **_only(0)),
    Rule("n", integer_from(1), **_only(1)),
    Rule("best_of", integer_from(1), **_only(1)),
    Rule("frequency_penalty", number, **_only(0)),
    Rule("min_p", number, **_only(0)),
    Rule("prompt_logprobs", anything, neutral=lambda got: False, legal="absent"),
    Rule("use_beam_search", boolean, **_only(False)),
    Rule("skip_special_tokens", boolean, **_only(True)),
    Rule("repetition_penalty", number, **_only(1), needs="penalties"),
    Rule("presence_penalty", number, **_only(0), needs="penalties"),
    Rule("ignore_eos", boolean, **_only(False), needs="ignore_eos"),
)


def sampling_params(sampling: dict[str, Any] | None, capabilities: Capabilities) -> SamplingParams:
    """The body's `sampling` object -> resolved values. Raises DecodeError 400 or 501."""
    given = {name: value for name, value in (sampling or {}).items() if value is not None}
    for rule in RULES:
        if rule.name in given:
            rule.check(given[rule.name], capabilities)
    defaults = SamplingParams()
    top_k = whole_number("top_k", given.get("top_k", defaults.top_k))
    return SamplingParams(
        temperature=non_negative("temperature", given.get("temperature", defaults.temperature)),
        top_p=non_negative("top_p", given.get("top_p", defaults.top_p)),
        top_k=top_k if 0 < top_k < INT32_LIMIT else 0,  # 0: no limit, which is what a larger one means too
        ignore_eos=given.get("ignore_eos", defaults.ignore_eos),
        seed=given.get("seed", defaults.seed),
    )


def check_body(body: DecodeBody, capabilities: Capabilities) -> SamplingParams:
    """Steps 3 to 5 of http-api.md 1.4: everything that can be refused before any KV is awaited."""
    if body.top_logprobs is not None and not capabilities.logprobs:
        raise DecodeError(501, "this decode engine computes no logprobs", "logprobs_unavailable")
    for name, low in (("max_tokens", 1), ("first_token_id", 0), ("top_logprobs", 0)):
        value = getattr(body, name)
        if value is not None and not low <= value < INT32_LIMIT:
            raise invalid(f"{name} must be within {low} .. {INT32_LIMIT - 1}, got {value}")
    for name in ("timeout_s", "announce_timeout_s"):
        value = getattr(body, name)
        if value is not None and not 0 < value <= MAX_TIMEOUT_S:  # also refuses NaN
            raise invalid(f"{name} must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {value}")
    params = sampling_params(body.sampling, capabilities)
    if body.grammar_spec is not None:
        raise DecodeError(501, "this decode server has no constrained decoding (grammar_spec)", "grammar_unsupported")
    return params
