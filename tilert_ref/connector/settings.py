"""Prefill side settings: `kv_connector_extra_config` keys and TILERT_PD_* variables. Pure.

Source: protocol.md 6.4. What is ours, or differs from TileRT:

- `tilert_transport` defaults to `nixl`, which needs no RDMA, and on one host copies from process to process (CMA).
  TileRT's default is `mooncake`.
- `tilert_mooncake_protocol` (`tcp`, the default, or `rdma`) and `tilert_mooncake_devices` (a list of RDMA devices; all
  without it) are new: TileRT asks for RDMA, and takes TCP in silence on a machine without.
- `tilert_pd_buffer_device` defaults to the device of vLLM's caches: host staging on a CPU, device staging on a GPU.
- `tilert_max_staging_bytes` and `tilert_write_timeout_s` are new.
- `tilert_allowed_hosts` is new: where a request may have its KV sent. Addresses, CIDR networks and host names; without
  it this machine only, with ["*"] wherever a request says (which is what TileRT does). See allow.py.
- TILERT_PD_SENDERS defaults to the TP size instead of 8, and may not exceed it: more senders never complete.
- TILERT_PD_EAGER_INIT defaults to 0: a server that hands nothing off starts no transport.
- Without effect: `tilert_host` (every request names its own), TILERT_PD_SHARDS (staging is one region), and
  TILERT_PD_PROBE_ADDR (no local address is needed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilert_ref.connector.allow import LOOPBACK_HOSTS, AllowList
from tilert_ref.connector.secret import Secret, read_secret
from tilert_ref.connector.transport import MOONCAKE_PROTOCOLS, TRANSPORTS, MooncakeNetwork

MAX_SENDERS = 8
BUFFER_DEVICES = ("cpu", "cuda")

_KEYS = (
    "tilert_host",
    "tilert_ctrl_port",
    "tilert_model",
    "tilert_max_seq_len",
    "tilert_transport",
    "tilert_mooncake_protocol",
    "tilert_mooncake_devices",
    "tilert_admission_attempts",
    "tilert_pd_buffer_device",
    "tilert_max_staging_bytes",
    "tilert_allowed_hosts",
    "tilert_write_timeout_s",
)
# TileRT's names for things that are done one way only here, with the only value that is right.
_FIXED_ENV = {"TILERT_PD_PIPELINE_SIDE_STREAM": "0", "TILERT_EXTRACT_MODE": "fast"}


class SettingsError(ValueError):
    """A key or value that is not legal. The text says what was got and what is legal."""


@dataclass(frozen=True)
class Settings:
    """max_seq_len in tokens; model None derives the profile from the model; buffer_device None follows the caches;
    max_staging_bytes None means room for two prompts of max_seq_len tokens and at least 1 GiB."""

    ctrl_port: int
    model: str | None
    max_seq_len: int
    transport: str
    network: MooncakeNetwork
    admission_attempts: int
    buffer_device: str | None
    max_staging_bytes: int | None
    allowed_hosts: AllowList
    write_timeout_s: float
    secret: Secret | None
    senders: int
    pipeline: bool
    eager_init: bool
    tiled: bool
    no_mtp: bool


def read_settings(extra: Mapping[str, Any], env: Mapping[str, str], max_model_len: int, tp_size: int) -> Settings:
    """Raises SettingsError for an unknown key or a value out of range."""
    if unknown := set(extra) - set(_KEYS):
        raise SettingsError(f"unknown kv_connector_extra_config keys {sorted(unknown)}; legal: {', '.join(_KEYS)}")
    _check_fixed(env)
    hosts = extra.get("tilert_allowed_hosts")
    device = extra.get("tilert_pd_buffer_device") or env.get("TILERT_PD_BUFFER_DEVICE")
    staging = extra.get("tilert_max_staging_bytes")
    return Settings(
        ctrl_port=_integer("tilert_ctrl_port", extra.get("tilert_ctrl_port", 5556), 1, 65535),
        model=extra.get("tilert_model"),
        max_seq_len=_integer("tilert_max_seq_len", extra.get("tilert_max_seq_len", max_model_len), 1, 2**31 - 1),
        transport=_one_of("tilert_transport", extra.get("tilert_transport", "nixl"), TRANSPORTS),
        network=_network(extra),
        admission_attempts=_integer("tilert_admission_attempts", extra.get("tilert_admission_attempts", 5), 1, 20),
        buffer_device=None if device is None else _one_of("tilert_pd_buffer_device", device, BUFFER_DEVICES),
        max_staging_bytes=None if staging is None else _integer("tilert_max_staging_bytes", staging, 1, 2**63),
        allowed_hosts=LOOPBACK_HOSTS if hosts is None else _hosts(hosts),
        write_timeout_s=float(_integer("tilert_write_timeout_s", extra.get("tilert_write_timeout_s", 60), 1, 3600)),
        secret=_secret(env),
        senders=_senders(env, tp_size),
        pipeline=_flag(env, "TILERT_PD_PIPELINE", default=True),
        eager_init=_flag(env, "TILERT_PD_EAGER_INIT", default=False),
        tiled=_flag(env, "TILERT_PD_KI_TILED", default=False),
        no_mtp=_flag(env, "TILERT_PD_NO_MTP", default=False),
    )


def _network(extra: Mapping[str, Any]) -> MooncakeNetwork:
    used = [key for key in ("tilert_mooncake_protocol", "tilert_mooncake_devices") if key in extra]
    if used and extra.get("tilert_transport") != "mooncake":
        raise SettingsError(f"{', '.join(used)}: only with tilert_transport mooncake")
    protocol = _one_of("tilert_mooncake_protocol", extra.get("tilert_mooncake_protocol", "tcp"), MOONCAKE_PROTOCOLS)
    devices = extra.get("tilert_mooncake_devices", [])
    if not isinstance(devices, list) or not all(isinstance(device, str) and device for device in devices):
        raise SettingsError(f"tilert_mooncake_devices is {devices!r}; legal: a list of RDMA device names")
    try:
        return MooncakeNetwork(protocol, tuple(devices))
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _senders(env: Mapping[str, str], tp_size: int) -> int:
    wanted = env.get("TILERT_PD_SENDERS")
    if wanted is None:
        return min(MAX_SENDERS, tp_size)
    return _integer("TILERT_PD_SENDERS", wanted, 1, min(MAX_SENDERS, tp_size), " (the tensor parallel size bounds it)")


def _secret(env: Mapping[str, str]) -> Secret | None:
    try:
        return read_secret(env)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _check_fixed(env: Mapping[str, str]) -> None:
    for name, only in _FIXED_ENV.items():
        if env.get(name, only) != only:
            raise SettingsError(f"{name}={env[name]} is not supported; legal: {only}")


def _integer(name: str, value: object, low: int, high: int, note: str = "") -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise SettingsError(f"{name} is {value!r}; legal: {low} .. {high}{note}")
    return number


def _one_of(name: str, value: object, legal: Sequence[str]) -> str:
    if value not in legal:
        raise SettingsError(f"{name} is {value!r}; legal: {', '.join(legal)}")
    return str(value)


def _hosts(value: object) -> AllowList:
    if not isinstance(value, list) or not all(isinstance(host, str) for host in value):
        raise SettingsError(
            f'tilert_allowed_hosts is {value!r}; legal: a list of addresses, CIDR networks and host names, or ["*"]'
        )
    try:
        return AllowList.parse("tilert_allowed_hosts", value)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    value = env.get(name)
    if value is None:
        return default
    return value.strip().lower() not in ("0", "false", "no", "off", "")
