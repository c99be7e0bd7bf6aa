"""Configuration of the prefill side: defaults, variables, and refusals that name the key."""

from typing import Any

import pytest

from tilert_ref.connector.allow import LOOPBACK_HOSTS
from tilert_ref.connector.settings import Settings, SettingsError, read_settings
from tilert_ref.connector.transport import MooncakeNetwork


def read(extra: dict[str, Any] | None = None, env: dict[str, str] | None = None, tp: int = 1) -> Settings:
    return read_settings(extra or {}, env or {}, max_model_len=4096, tp_size=tp)


MOONCAKE = {"tilert_transport": "mooncake"}


def test_defaults() -> None:
    settings = read()
    assert (settings.ctrl_port, settings.transport, settings.admission_attempts) == (5556, "nixl", 5)
    assert (settings.max_seq_len, settings.model, settings.buffer_device) == (4096, None, None)
    assert settings.pipeline and not settings.eager_init and not settings.tiled and not settings.no_mtp
    assert settings.secret is None
    assert settings.allowed_hosts is LOOPBACK_HOSTS and settings.max_staging_bytes is None


@pytest.mark.parametrize(("tp", "senders"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_senders_follow_the_tp_size(tp: int, senders: int) -> None:
    assert read(tp=tp).senders == senders
    assert read(env={"TILERT_PD_SENDERS": "1"}, tp=tp).senders == 1


def test_more_senders_than_ranks_never_complete() -> None:
    with pytest.raises(SettingsError, match=r"TILERT_PD_SENDERS is '8'; legal: 1 .. 4 \(the tensor parallel size"):
        read(env={"TILERT_PD_SENDERS": "8"}, tp=4)


def test_values() -> None:
    settings = read(
        {
            "tilert_ctrl_port": 7000,
            "tilert_model": "glm5",
            "tilert_max_seq_len": "128",
            "tilert_transport": "zmq",
            "tilert_admission_attempts": 2,
            "tilert_max_staging_bytes": 1 << 20,
            "tilert_allowed_hosts": ["d1", "d2"],
            "tilert_write_timeout_s": 5,
        },
        {"TILERT_PD_BUFFER_DEVICE": "cpu", "TILERT_PD_PIPELINE": "0", "TILERT_PD_KI_TILED": "1"}
        | {"TILERT_PD_NO_MTP": "1", "TILERT_PD_EAGER_INIT": "1", "TILERT_REF_SECRET": "correct horse battery"},
    )
    assert settings.secret is not None and "horse" not in repr(settings)
    assert (settings.ctrl_port, settings.model, settings.max_seq_len) == (7000, "glm5", 128)
    assert (settings.transport, settings.admission_attempts, settings.write_timeout_s) == ("zmq", 2, 5.0)
    assert settings.allowed_hosts.names == {"d1", "d2"} and settings.max_staging_bytes == 1 << 20
    assert settings.buffer_device == "cpu" and not settings.pipeline
    assert settings.tiled and settings.no_mtp and settings.eager_init


def test_mooncake_network() -> None:
    assert read(MOONCAKE).network == MooncakeNetwork("tcp", ())
    rdma = read(MOONCAKE | {"tilert_mooncake_protocol": "rdma", "tilert_mooncake_devices": ["mlx5_0", "mlx5_1"]})
    assert (rdma.transport, rdma.network) == ("mooncake", MooncakeNetwork("rdma", ("mlx5_0", "mlx5_1")))


def test_key_wins_over_variable() -> None:
    assert read({"tilert_pd_buffer_device": "cuda"}, {"TILERT_PD_BUFFER_DEVICE": "cpu"}).buffer_device == "cuda"


@pytest.mark.parametrize("value", ["0", "false", "No", " off ", ""])
def test_flags_that_are_off(value: str) -> None:
    assert read(env={"TILERT_PD_KI_TILED": value}).tiled is False


@pytest.mark.parametrize(
    ("extra", "env", "text"),
    [
        ({"tilert_prot": 1}, {}, r"unknown kv_connector_extra_config keys \['tilert_prot'\]; legal: tilert_host, "),
        ({"tilert_ctrl_port": 0}, {}, r"tilert_ctrl_port is 0; legal: 1 .. 65535"),
        ({"tilert_ctrl_port": True}, {}, "tilert_ctrl_port is True"),
        ({"tilert_ctrl_port": "http"}, {}, "tilert_ctrl_port is 'http'"),
        ({"tilert_transport": "tcp"}, {}, "tilert_transport is 'tcp'; legal: nixl, mooncake, zmq"),
        ({"tilert_mooncake_protocol": "rdma"}, {}, "tilert_mooncake_protocol: only with tilert_transport mooncake"),
        (MOONCAKE | {"tilert_mooncake_protocol": "ucx"}, {}, "tilert_mooncake_protocol is 'ucx'; legal: tcp, rdma"),
        (MOONCAKE | {"tilert_mooncake_devices": "mlx5_0"}, {}, "tilert_mooncake_devices is 'mlx5_0'; legal: a list"),
        (MOONCAKE | {"tilert_mooncake_devices": ["mlx5_0"]}, {}, "mean nothing to Mooncake over tcp"),
        ({"tilert_admission_attempts": 0}, {}, "tilert_admission_attempts is 0"),
        ({"tilert_allowed_hosts": "d1"}, {}, "tilert_allowed_hosts is 'd1'; legal: a list"),
        ({"tilert_allowed_hosts": []}, {}, r"tilert_allowed_hosts is \[\]; legal: addresses, .* or '\*' alone"),
        ({"tilert_allowed_hosts": ["10.0.0.0/33"]}, {}, "tilert_allowed_hosts has '10.0.0.0/33'; legal: addresses"),
        ({}, {"TILERT_REF_SECRET": "sesame"}, "TILERT_REF_SECRET: a shared secret has 16 to 4096 bytes, got 6"),
        ({}, {"TILERT_PD_BUFFER_DEVICE": "tpu"}, "is 'tpu'; legal: cpu, cuda"),
        ({}, {"TILERT_EXTRACT_MODE": "legacy"}, "TILERT_EXTRACT_MODE=legacy is not supported; legal: fast"),
        ({}, {"TILERT_PD_PIPELINE_SIDE_STREAM": "1"}, "TILERT_PD_PIPELINE_SIDE_STREAM=1 is not supported"),
    ],
)
def test_refusals(extra: dict[str, Any], env: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        read(extra, env)
