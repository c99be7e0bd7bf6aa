"""What the client asked for, checked and resolved: the sampling defaults and one parsed request."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilert_ref.model_files import InputError, present, read_json, shown
from tilert_ref.router.errors import RouterError, bad_field
from tilert_ref.router.fields import BadValue, EndpointName, refuse_parsing, request_id, show, validate

DEFAULT_MAX_TOKENS = 256
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Sampling:
    """The values that both legs get, always all of them. top_k 0 or less means no limit.

    min_p is part of it because a vLLM that falls back to its own generation_config would apply one to the first token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    min_p: float = 0.0

    def of(self, body: Mapping[str, Any]) -> "Sampling":
        """These values overlaid with those that a checked body names."""
        return replace(self, **{k: body[k] for k in vars(self) if k in body})

    def as_dict(self) -> dict[str, float | int]:
        return dict(vars(self))


def sampling_defaults(model_path: str, generation_config: str, flags: Mapping[str, float | int | None]) -> Sampling:
    """The deployment's defaults: neutral, overlaid with generation_config.json, overlaid with flags.

    generation_config is "auto" (read the file if model_path has one) or "vllm" (don't). As in vLLM, `do_sample` in the
    file is not looked at. Raises ValueError for a value that the decode nodes couldn't follow (http-api.md 3.4).
    """
    values = _read_generation_config(model_path) if generation_config == "auto" else {}
    values |= {k: v for k, v in flags.items() if v is not None}
    known = {k: v for k, v in values.items() if k in vars(Sampling()) and v is not None}
    for name, value in known.items():
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise InputError(f"default {name} has to be a number, got {shown(value)}")
    sampling = replace(Sampling(), **known)
    _check_defaults(sampling)
    return sampling


def _read_generation_config(model_path: str) -> dict[str, Any]:
    path = Path(model_path) / "generation_config.json"
    return read_json(path) if model_path and present(path) else {}


def _check_defaults(sampling: Sampling) -> None:
    for name, neutral in (("min_p", 0.0), ("repetition_penalty", 1.0)):
        if getattr(sampling, name) != neutral:
            raise InputError(
                f"default {name} is {getattr(sampling, name)}, but the decode nodes only know {neutral}: remove it "
                "from generation_config.json (or the flag), or start with --generation-config vllm"
            )
    for name in ("temperature", "top_p"):
        if getattr(sampling, name) < 0:
            raise InputError(f"default {name} has to be >= 0, got {getattr(sampling, name)}")
    if sampling.top_k != int(sampling.top_k):
        raise InputError(f"default top_k has to be an integer, got {sampling.top_k}")


@dataclass(frozen=True)
class Request:
    """One checked request. `body` has no nulls; `caller_id` is the client's own name for it, or None."""

    endpoint: EndpointName
    body: dict[str, Any]
    sampling: Sampling
    max_tokens: int
    caller_id: str | None

    @property
    def stream(self) -> bool:
        return self.body.get("stream", False)

    @property
    def include_usage(self) -> bool:
        return self.body.get("stream_options", {}).get("include_usage", False)

    @property
    def return_token_ids(self) -> bool:
        return self.body.get("return_token_ids", False)

    @property
    def include_reasoning(self) -> bool:
        return self.body.get("include_reasoning", True)

    @property
    def parallel_tool_calls(self) -> bool:
        return self.body.get("parallel_tool_calls", True)

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that the decode node has to have."""
        return frozenset({"ignore_eos"}) if self.body.get("ignore_eos") else frozenset()

    def decode_sampling(self) -> dict[str, Any]:
        """The `sampling` object of /pd/decode (http-api.md 3.6)."""
        extra = {k: self.body[k] for k in ("presence_penalty", "ignore_eos", "seed") if k in self.body}
        return extra | self.sampling.as_dict()


def parse_request(
    raw: bytes, endpoint: EndpointName, defaults: Sampling, header_id: str | None, parses: bool = False
) -> Request:
    """Checks a body; raises RouterError. header_id, the X-Request-Id header, wins over the body's request_id.

    parses: whether answers are parsed; what needs that is refused otherwise.
    """
    body = validate(_load(raw), endpoint)
    if not parses:
        refuse_parsing(body)
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_MAX_TOKENS))
    caller_id = _header_id(header_id) or body.get("request_id")
    return Request(endpoint, body, defaults.of(body), max_tokens, caller_id)


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise RouterError(400, f"the body is not valid JSON: {e}", code="invalid_json") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _header_id(value: str | None) -> str | None:
    if not value:
        return None
    try:
        return request_id(value)
    except BadValue as e:
        raise bad_field("X-Request-Id", f"X-Request-Id header: got {show(value)}; legal: {e}") from None
