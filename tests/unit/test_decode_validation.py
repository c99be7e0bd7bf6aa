"""What the decode server refuses before anything runs: request bodies, sampling fields, command lines."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tilert_ref.connector.allow import LOOPBACK_PEERS
from tilert_ref.connector.fingerprint import checkpoint_fingerprint
from tilert_ref.connector.layout import FP8_DS_MLA, model_profile, profile
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.connector.transport import MooncakeNetwork
from tilert_ref.decode_server.options import Options, parse_options, resolve_buffer_device, resolve_profile
from tilert_ref.decode_server.server import checkpoint, keep_ucx_local
from tilert_ref.decode_server.validation import DecodeBody, DecodeError, check_body, sampling_params
from tilert_ref.engine.api import Capabilities, SamplingParams
from tilert_ref.engine.config import ModelConfig
from tilert_ref.tiny import model_dir

NONE = Capabilities()
ALL = Capabilities(penalties=True, ignore_eos=True, logprobs=True)


def body(**fields: Any) -> DecodeBody:
    return DecodeBody(**({"rid": "r", "first_token_id": 5} | fields))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SamplingParams()),
        ({"temperature": None, "top_p": None, "top_k": None, "seed": None}, SamplingParams()),
        ({"temperature": "0.5", "top_p": 1, "top_k": "5.0"}, SamplingParams(0.5, 1.0, 5)),
        ({"top_k": -1}, SamplingParams()),
        ({"top_k": 2**40}, SamplingParams()),
        ({"seed": 2**63 - 1}, SamplingParams(seed=2**63 - 1)),
        ({"n": 1, "min_p": 0.0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0}, SamplingParams()),
        ({"skip_special_tokens": True, "use_beam_search": False, "repetition_penalty": 1.0}, SamplingParams()),
        ({"something_newer": 3}, SamplingParams()),
    ],
)
def test_accepted_sampling(given: dict[str, Any] | None, expected: SamplingParams) -> None:
    assert sampling_params(given, NONE) == expected


@pytest.mark.parametrize(
    ("field", "invalid", "unavailable"),
    [
        ("temperature", [True, "hot", -0.1, float("nan"), float("inf"), [1]], []),
        ("top_p", [False, "x", -1], []),
        ("top_k", [True, 1.5, "1.5", "many", float("inf"), 10**400], []),
        ("seed", [1.0, True, "7", 2**63], []),
        ("min_tokens", [-1, 1.0, True], [1]),
        ("n", [0, "1", True], [2]),
        ("best_of", [0], [2]),
        ("frequency_penalty", ["0", True, float("nan")], [0.1]),
        ("min_p", ["0"], [0.1]),
        ("prompt_logprobs", [], [0, 1]),
        ("use_beam_search", [0], [True]),
        ("skip_special_tokens", [1], [False]),
        ("repetition_penalty", ["1", True], [1.1]),
        ("presence_penalty", ["0"], [0.5]),
        ("ignore_eos", [1, "true"], [True]),
        ("stop_token_ids", [], [[1]]),
        ("logit_bias", [], [{"1": 2}]),
        ("bad_words", [], [["x"]]),
        ("allowed_token_ids", [], [[1]]),
        ("structured_outputs", [], [{"json": {}}]),
        ("logprob_token_ids", [], [[1]]),
    ],
)
def test_refused_sampling(field: str, invalid: list[Any], unavailable: list[Any]) -> None:
    cases = [(v, 400, "invalid_parameter") for v in invalid] + [(v, 501, "capability_unavailable") for v in unavailable]
    for value, status, error_type in cases:
        with pytest.raises(DecodeError, match=field) as caught:
            sampling_params({field: value}, NONE)
        assert (caught.value.status, caught.value.body["error_type"]) == (status, error_type), value


def test_capabilities_open_fields() -> None:
    assert sampling_params({"ignore_eos": True, "repetition_penalty": 2, "presence_penalty": 1}, ALL).ignore_eos


@pytest.mark.parametrize(
    ("fields", "status", "error_type"),
    [
        ({"max_tokens": 0}, 400, "invalid_parameter"),
        ({"max_tokens": 2**31}, 400, "invalid_parameter"),
        ({"first_token_id": -1}, 400, "invalid_parameter"),
        ({"top_logprobs": -1}, 400, "invalid_parameter"),
        ({"timeout_s": 0}, 400, "invalid_parameter"),
        ({"timeout_s": 86401}, 400, "invalid_parameter"),
        ({"timeout_s": -1}, 400, "invalid_parameter"),
        ({"timeout_s": float("nan")}, 400, "invalid_parameter"),
        ({"timeout_s": float("inf")}, 400, "invalid_parameter"),
        ({"announce_timeout_s": 0}, 400, "invalid_parameter"),
        ({"announce_timeout_s": float("nan")}, 400, "invalid_parameter"),
        ({"grammar_spec": {"type": "json_object", "value": None}}, 501, "grammar_unsupported"),
    ],
)
def test_refused_bodies(fields: dict[str, Any], status: int, error_type: str) -> None:
    with pytest.raises(DecodeError) as caught:
        check_body(body(**fields), ALL)
    assert (caught.value.status, caught.value.body["error_type"]) == (status, error_type)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rid", value) for value in ("", "x" * 257, "\ud800", "a\udfffb", 7)),
        *(("first_token_id", value) for value in (True, "5", 5.0, None)),
    ],
)
def test_bodies_outside_the_schema(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        body(**{field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


def test_limits_are_legal() -> None:
    got = body(rid="\N{GRINNING FACE}" * 256, first_token_id=0, timeout_s=86400)
    assert check_body(got, ALL) == SamplingParams()


def test_logprobs_need_the_capability() -> None:
    with pytest.raises(DecodeError) as caught:
        check_body(body(top_logprobs=0), NONE)
    assert (caught.value.status, caught.value.body["error_type"]) == (501, "logprobs_unavailable")


# Options


def options(*flags: str, **env: str) -> Options:
    return parse_options(list(flags), env)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str, **env: str) -> str:
    with pytest.raises(SystemExit):
        options(*flags, **env)
    return capsys.readouterr().err


def test_tilert_defaults() -> None:
    got = options("--engine", "stub")
    assert (got.ctrl_port, got.http_port, got.host, got.senders) == (5556, 5557, "::", 8)
    assert got.layout.layout().layout_version == 10 and got.layout.max_seq_len == 4096
    assert (got.num_mtp, got.poll_s, got.transport) == (0, 0.0, "nixl")


def test_the_checkpoint_of_our_own_engine_only_is_told_and_compared() -> None:
    directory = model_dir("tiny-glm5")
    ref = ["--model-weights-dir", str(directory)]
    assert checkpoint(options(*ref)) == checkpoint_fingerprint(directory)
    assert checkpoint(options(*ref, "--any-checkpoint")) is None
    assert checkpoint(options(*ref, "--engine", "my.engine:make")) is None
    assert checkpoint(options("--engine", "stub")) is None


def test_peers_are_this_machine_unless_named() -> None:
    assert options("--engine", "stub").peers is LOOPBACK_PEERS
    some = options("--engine", "stub", "--allow-peers", "10.0.0.0/8", "::1").peers
    assert some.refusal_of_address("::ffff:10.1.2.3") is None and some.refusal_of_address("127.0.0.1") is not None
    assert options("--engine", "stub", "--allow-peers", "any").peers.refusal_of_address("203.0.113.9") is None


def test_the_secret_comes_from_the_environment_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert options("--engine", "stub").secret is None
    got = options("--engine", "stub", TILERT_REF_SECRET="correct horse battery")
    assert got.secret is not None and "horse" not in repr(got)
    assert "unrecognized arguments" in refusal(capsys, "--engine", "stub", "--secret", "correct horse battery")


@pytest.mark.parametrize(
    ("host", "devices"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("::1", "lo"), ("::", None), ("10.0.0.1", None)]
)
def test_nixl_listens_no_wider_than_we_do(host: str, devices: str | None) -> None:
    env: dict[str, str] = {}
    keep_ucx_local(host, env)
    assert env.get("UCX_NET_DEVICES") == devices
    own = {"UCX_NET_DEVICES": "mlx5_0:1"}
    keep_ucx_local(host, own)
    assert own == {"UCX_NET_DEVICES": "mlx5_0:1"}


def test_environment() -> None:
    got = options("--engine", "stub", TILERT_PD_SENDERS="1", TILERT_DECODE_POLL_MS="200", TILERT_PD_NO_MTP="1")
    assert (got.senders, got.poll_s, got.layout.profile.name) == (1, 0.2, "glm5_no_mtp")
    assert options("--engine", "stub", TILERT_PD_SENDERS="99").senders == 8
    assert options("--engine", "stub", TILERT_PD_KI_TILED="1").layout.layout().layout_version == 110


def test_mooncake_network() -> None:
    flags = ["--engine", "stub", "--transport", "mooncake"]
    assert parse_options(flags, {}).network == MooncakeNetwork("tcp", ())
    rdma = parse_options([*flags, "--mooncake-protocol", "rdma", "--mooncake-devices", "mlx5_0,mlx5_1"], {})
    assert (rdma.transport, rdma.network) == ("mooncake", MooncakeNetwork("rdma", ("mlx5_0", "mlx5_1")))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--engine", "vllm"], "--engine vllm: legal: ref, tilert, stub"),
        ([], "--engine ref needs --model-weights-dir"),
        (["--engine", "stub", "--transport", "tcp"], "legal: nixl, mooncake, zmq"),
        (["--engine", "stub", "--compile"], "--compile with --engine stub: it computes nothing"),
        (["--engine", "stub", "--mooncake-protocol", "rdma"], "only with --transport mooncake"),
        (["--engine", "stub", "--transport", "mooncake", "--mooncake-protocol", "ucx"], "'ucx'; legal: tcp, rdma"),
        (
            ["--engine", "stub", "--transport", "mooncake", "--mooncake-devices", "mlx5_0"],
            "nothing to Mooncake over tcp",
        ),
        (["--engine", "stub", "--kv-cache-dtype", "fp8_rocm"], "not supported yet"),
        (["--engine", "stub", "--kv-cache-dtype", "int4"], "legal: .*fp8_ds_mla"),
        (["--engine", "stub", "--pd-buffer-device", "cuda"], "cuda: the engine is on cpu, legal: cpu"),
        (["--engine", "stub", "--pd-buffer-device", "hip"], "--pd-buffer-device hip: legal: cpu, cuda"),
        (["--engine", "stub", "--pd-buffer-device", "cuda", "--transport", "zmq"], "only nixl writes to a GPU"),
        (["--engine", "stub", "--model", "llama"], "unknown profile"),
        (["--engine", "stub", "--model", "dsv32", "--with-mtp"], "carries no MTP layer"),
        (["--engine", "stub", "--num-mtp", "4"], "invalid choice"),
        (["--engine", "stub", "--max-seq-len", "0"], "at least 1"),
        (["--engine", "stub", "--allow-peers", "decode-1"], "--allow-peers has 'decode-1'; legal: addresses and CIDR"),
        (["--engine", "stub", "--allow-peers", "any", "::1"], "or 'any' alone for no limit"),
        (["--engine", "stub", "--kv-scale-rule", "rounded"], "invalid choice: 'rounded'.*power_of_two.*plain"),
    ],
)
def test_refused_flags(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(text, refusal(capsys, *flags))


@pytest.mark.parametrize(
    ("wanted", "transport", "engine", "expected"),
    [
        (None, "nixl", "cuda:1", "cuda:1"),
        (None, "nixl", "cpu", "cpu"),
        (None, "zmq", "cuda", "cpu"),
        ("cpu", "nixl", "cuda", "cpu"),
        ("cuda", "nixl", "cuda:1", "cuda:1"),
    ],
)
def test_where_the_receive_buffer_lies(wanted: str | None, transport: str, engine: str, expected: str) -> None:
    assert resolve_buffer_device(wanted, transport, engine) == expected


def test_refused_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert "TILERT_DECODE_POLL_MS='soon'" in refusal(capsys, "--engine", "stub", TILERT_DECODE_POLL_MS="soon")
    said = refusal(capsys, "--engine", "stub", TILERT_REF_SECRET="sesame")
    assert "TILERT_REF_SECRET: a shared secret has 16 to 4096 bytes, got 6" in said and "sesame" not in said


def test_rows_that_the_checkpoint_can_have(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    sparse, dense = (["--model-weights-dir", str(tiny(arch))] for arch in ("glm5", "dsv3"))
    got = options(*sparse)
    assert got.layout.layout().row_format is FP8_DS_MLA and got.kv_scale_rule is ScaleRule.POWER_OF_TWO
    assert options(*sparse, "--kv-cache-dtype", "fp8", "--kv-scale-rule", "plain").kv_scale_rule is ScaleRule.PLAIN
    assert "is for sparse models; this one has no index_topk, legal: bf16" in refusal(capsys, *dense)
    assert options(*dense, "--kv-cache-dtype", "bf16").layout.layout().row_format.name == "bf16"


def glm(layers: int = 78, mtp: int = 1, index_topk: int | None = 2048) -> ModelConfig:
    names = ModelConfig.__dataclass_fields__
    numbers = {"num_hidden_layers": layers, "num_nextn_predict_layers": mtp, "index_topk": index_topk}
    return ModelConfig(**(dict.fromkeys(names) | numbers))


def test_profile_follows_the_checkpoint() -> None:
    assert resolve_profile(None, glm(), True, False) == profile("glm5")
    assert resolve_profile(None, glm(), False, False) == profile("glm5_no_mtp")
    assert resolve_profile("glm5", glm(), False, False) == profile("glm5")
    assert resolve_profile("glm-5.2", glm(), True, False) == profile("glm5_2")
    assert resolve_profile(None, glm(4, 1, None), True, False) == model_profile(5, True, False)
    assert resolve_profile(None, glm(4, 0, None), False, False) == model_profile(4, False, False)


@pytest.mark.parametrize(
    ("name", "config", "with_mtp", "text"),
    [
        ("glm5", glm(4), True, "79 layers, this checkpoint has 5"),
        ("dsv32", glm(61), True, "carries no MTP"),
        (None, glm(mtp=0), True, "has no MTP layer"),
        ("glm5", glm(index_topk=None), True, "carries index pages, this checkpoint has index_topk = None"),
    ],
)
def test_profile_contradictions(name: str | None, config: ModelConfig, with_mtp: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_profile(name, config, with_mtp, no_mtp=False)
