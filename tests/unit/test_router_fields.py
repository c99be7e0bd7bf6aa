"""The table of request fields: what is accepted, what is refused, and that nothing is ignored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilert_ref.router.errors import RouterError
from tilert_ref.router.fields import FIELDS, fields_of, markdown, validate
from tilert_ref.router.request import Request, Sampling, parse_request, sampling_defaults

MESSAGES = [{"role": "user", "content": "hi"}]


VLLM_CHAT = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection"""


def chat(**fields) -> dict:
    return validate({"messages": MESSAGES, **fields}, "chat")


def parse(endpoint: str = "chat", header_id: str | None = None, **fields) -> Request:
    body = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "hi"}
    return parse_request(json.dumps(body | fields).encode(), endpoint, Sampling(), header_id)


def refused(call, *args, **kwargs) -> RouterError:
    with pytest.raises(RouterError) as info:
        call(*args, **kwargs)
    return info.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("stop", ["\n"]),
        ("stop", "x"),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("min_p", 0.1),
        ("n", 2),
        ("min_tokens", 1),
        ("stop_token_ids", [1]),
        ("bad_words", ["a"]),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("prompt_logprobs", 0),
        ("use_beam_search", True),
        ("skip_special_tokens", False),
        ("kv_transfer_params", {"tilert_host": "evil"}),
        ("vllm_xargs", {"a": 1}),
        ("echo", True),
        ("store", True),
    ],
)
def test_what_decode_cannot_do_is_refused_by_name(field: str, value) -> None:
    error = refused(chat, **{field: value})
    assert (error.status, error.code, error.param) == (501, "capability_unavailable", field)
    assert field in error.message
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "warm"),
        ("temperature", "nan"),
        ("top_p", [1]),
        ("top_k", 1.5),
        ("top_k", 10**400),
        ("top_k", "1e30"),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("max_completion_tokens", 0),
        ("n", 0),
        ("n", True),
        ("stream", "yes"),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"continuous_usage_stats": True}),
        ("stream_options", {"surprise": True}),
        ("messages", []),
        ("messages", "hi"),
        ("model", 5),
        ("request_id", ""),
        ("request_id", "a\nb"),
        ("request_id", "x" * 257),
        ("chat_template_kwargs", [1]),
        ("ignore_eos", 1),
        ("skip_special_tokens", 1),
        ("tools", {}),
        ("tools", ["f"]),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": " "}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("include_reasoning", 0),
    ],
)
def test_wrong_values_are_400_and_say_what_is_legal(field: str, value) -> None:
    error = refused(chat, stream=True, **{field: value}) if field != "stream" else refused(chat, stream=value)
    assert (error.status, error.code, error.param) == (400, "invalid_parameter", field)
    assert "legal:" in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("tools", [{"type": "function", "function": {"name": "f"}}]), ("include_reasoning", False)]
)
def test_what_needs_a_parser_is_refused_without_one(field: str, value) -> None:
    error = refused(parse, **{field: value})
    assert (error.status, error.code, error.param) == (501, "capability_unavailable", field)
    assert "--parser" in error.message
    raw = json.dumps({"messages": MESSAGES, field: value}).encode()
    assert parse_request(raw, "chat", Sampling(), None, parses=True).body[field] == value


def test_neutral_values_are_accepted() -> None:
    clean = chat(
        n=1, stop=[], logprobs=False, top_logprobs=0, tools=[], tool_choice="auto", response_format={"type": "text"},
        presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logit_bias={}, min_p=0, min_tokens=0,
        skip_special_tokens=True, store=False, service_tier="auto", modalities=["text"], user="me", metadata={"a": "b"},
    )  # fmt: skip
    assert "stop" not in clean and "tools" not in clean and "logit_bias" not in clean
    assert clean["n"] == 1


def test_null_counts_as_absent_for_every_field() -> None:
    for endpoint, base in (("chat", {"messages": MESSAGES}), ("completions", {"prompt": "hi"})):
        nulls = {name: None for name in fields_of(endpoint) if name not in base}
        assert validate(nulls | base, endpoint) == base


def test_unknown_fields_are_refused_by_name() -> None:
    error = refused(chat, temprature=0)
    assert (error.status, error.param) == (400, "temprature")
    assert "unknown field" in error.message
    error = refused(validate, {"prompt": "hi", "messages": MESSAGES}, "completions")
    assert error.param == "messages" and "doesn't belong" in error.message


def test_a_null_does_not_hide_an_unknown_field() -> None:
    assert refused(chat, temprature=None).param == "temprature"


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_bodies_other_than_objects_are_refused(body) -> None:
    assert refused(validate, body, "chat").status == 400


def test_required_fields_are_named() -> None:
    assert refused(validate, {}, "chat").param == "messages"
    assert refused(validate, {"prompt": None}, "completions").param == "prompt"
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], [1, "a"], [True], [-1], [[]], {}, [1.0]])
def test_only_one_prompt_is_legal(prompt) -> None:
    assert refused(validate, {"prompt": prompt}, "completions").param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "used"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([5], [5])]
)
def test_prompt_forms(prompt, used) -> None:
    assert validate({"prompt": prompt}, "completions")["prompt"] == used


def test_numeric_strings_become_numbers_before_either_leg_sees_them() -> None:
    """TileRT let "5.0" for top_k through and failed with 502 after a node was leased (http-api.md 7.46)."""
    clean = chat(temperature="0.5", top_k="5.0", max_tokens="7", top_p=1)
    assert clean["temperature"] == 0.5 and clean["max_tokens"] == 7
    assert clean["top_k"] == 5 and type(clean["top_k"]) is int


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1, -(2**63)])
def test_integers_given_as_strings_keep_every_digit(seed: int) -> None:
    assert chat(seed=str(seed))["seed"] == seed


@pytest.mark.parametrize(
    "raw", [b"{", b"", b"\xff", b'{"messages": NaN}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_malformed_json_is_400(raw: bytes) -> None:
    error = refused(parse_request, raw, "chat", Sampling(), None)
    assert (error.status, error.code) == (400, "invalid_json")


def test_max_tokens() -> None:
    assert parse().max_tokens == 256
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert parse(max_tokens=5, max_completion_tokens=None).max_tokens == 5


def test_caller_ids() -> None:
    assert parse().caller_id is None
    assert parse(request_id="order-2024").caller_id == "order-2024"
    assert parse(request_id="order-2024", header_id="h-1").caller_id == "h-1"
    assert refused(parse, header_id="x" * 300).param == "X-Request-Id"


def test_needs_and_decode_sampling() -> None:
    request = parse(ignore_eos=True, seed=5, temperature=0.7, user="me")
    assert request.needs == {"ignore_eos"}
    resolved = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": 0.0}
    assert request.decode_sampling() == resolved | {"ignore_eos": True, "seed": 5}
    assert parse(ignore_eos=False).needs == frozenset()


def test_sampling_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "do_sample": False, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    auto = sampling_defaults(str(tmp_path), "auto", {"top_p": 0.5, "top_k": None})
    assert auto == Sampling(temperature=0.6, top_p=0.5, top_k=0)
    assert sampling_defaults(str(tmp_path), "vllm", {}) == Sampling()
    assert sampling_defaults("", "auto", {}) == Sampling()
    assert auto.of({"temperature": 0.0, "messages": []}) == Sampling(temperature=0.0, top_p=0.5)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": "high"}, "top_p"),
    ],
)
def test_defaults_that_decode_cannot_follow_stop_the_start(tmp_path: Path, values: dict, word: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=word):
        sampling_defaults(str(tmp_path), "auto", {})


def test_the_table_documents_itself() -> None:
    page = markdown()
    assert all(f"| `{f.name}` |" in page for f in FIELDS)
    assert len({(f.name, e) for f in FIELDS for e in f.endpoints}) == sum(len(f.endpoints) for f in FIELDS)


def test_fields_of_vllms_own_api_are_all_known() -> None:
    """Names of vLLM 0.32's request models: none may be refused as unknown."""
    assert [name for name in VLLM_CHAT.split() if name not in fields_of("chat")] == []


def test_the_router_needs_no_heavy_package() -> None:
    code = (
        "import sys, tilert_ref.router.pd_router; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy', 'nixl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_published_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "openai-fields.md"
    assert page.read_text().endswith(markdown()), "append the output of: python -m tilert_ref.router.fields"
