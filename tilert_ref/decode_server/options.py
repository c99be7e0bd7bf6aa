"""Command line of the decode server, and what follows from it before anything is started."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilert_ref.connector.allow import LOOPBACK_PEERS, AllowList, peers
from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, Profile, model_profile, profile
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.connector.secret import Secret, read_secret
from tilert_ref.connector.transport import MOONCAKE_PROTOCOLS, TRANSPORTS, MooncakeNetwork
from tilert_ref.decode_server.engine_client import EngineDeadlines
from tilert_ref.decode_server.engine_process import FACTORIES, OWN_ENGINES, resolve_device
from tilert_ref.decode_server.messages import LayoutSpec
from tilert_ref.engine.cache import check_fp8_rows
from tilert_ref.engine.config import ModelConfig, load_config
from tilert_ref.engine.flashinfer_mla import ATTENTION
from tilert_ref.engine.ref import COMPILE_HELP, check_device

MAX_SENDERS = 8
MAX_SLOTS = 16
FALSE_WORDS = ("", "0", "false", "no", "off")

DESCRIPTION = """\
Decode node: receives a prompt's KV cache from vLLM's prefill, decodes from it, streams token ids to the router.

Two ports. Prefill nodes connect to --ctrl-port, offer the KV of a request, and write it straight into this
process's receive buffer (--transport). The router posts /pd/decode to --http-port; the request waits there for its
KV, then for its tokens. One request at a time is decoded: a second one gets 429, or, if it asks for that ("queue":
true), waits for its turn with its KV in a receive slot of its own (--receive-slots). The engine runs in a process of
its own; if it dies, the request that it worked on gets an error, and the engine is started again.

--transport nixl is the default: it needs no RDMA, and on one host copies from process to process. TileRT's default is
mooncake, over RDMA; ours runs over tcp unless --mooncake-protocol rdma (untested) is given here, and
tilert_mooncake_protocol rdma at the other end. Mooncake opens two ports on every IPv4 interface, whatever --host says,
and whoever reaches them can write the receive buffer: keep them behind a firewall. zmq works everywhere.

Both ends must agree, and refuse each other by name if they don't, on: --transport, --kv-cache-dtype, the model's
layers (--with-mtp here <-> a speculative config in vLLM), and the number of sender ranks ($TILERT_PD_SENDERS).

Who may talk to it, on either port, is --allow-peers: without it this machine only. Name the prefill nodes and the
routers there, and whatever asks for /health. $TILERT_REF_SECRET_FILE adds a secret that prefill nodes must know.

GET /health answers 200 when a request could be served, 503 with the reason while the engine loads or restarts.
"""

EPILOG = """\
environment, as in TileRT:
  TILERT_PD_SENDERS        tensor-parallel ranks of the prefill node that send; 1..8, default 8. A prefill on one
                           GPU or CPU has one: set 1 (or --senders 1), else no transfer ever completes
  TILERT_PD_BUFFER_DEVICE  default of --pd-buffer-device
  TILERT_PD_NO_MTP         1: profile glm5 means its 78 layers without the MTP layer
  TILERT_PD_KI_TILED       1: index pages arrive in tiled order
  TILERT_DECODE_POLL_MS    collect a stream's tokens for so long, ms. Default 0 here (each step at once), 200 in TileRT
  TILERT_REF_SECRET_FILE   ours: a file with a secret of 16 bytes or more, for vLLM with our connector as well: only
                           prefill nodes that know it are served. Or TILERT_REF_SECRET: the secret itself
  TRITON_CACHE_DIR         Triton's: where kernels that were compiled for a GPU are kept for the next start, default
                           ~/.triton/cache. The start says what it found there and how long the rest took
not used here:
  TILERT_PD_SHARDS         the buffer is one region
  TILERT_PD_PROBE_ADDR     the data address is the one at which the prefill node reached --ctrl-port
  GLM5_AR_N                a cancel acts after the current step
  TILERT_INJECT_MODE       ROCm engine

examples:
  a double for testing a router or a prefill node, no model needed:
    python -m tilert_ref.decode_server --engine stub --model glm5 --senders 1
  a bf16 checkpoint behind a vLLM on the same machine:
    python -m tilert_ref.decode_server --model-weights-dir DIR --kv-cache-dtype bf16 --senders 1 --host 127.0.0.1
  for prefill nodes and routers of one network:
    ... --allow-peers 127.0.0.1 10.2.0.0/16
"""


@dataclass(frozen=True)
class Options:
    """Checked settings. num_mtp is 0 without MTP; poll_s in seconds; port 0 picks a free one.

    buffer_device: of the receive buffer: cpu, or the engine's torch device.
    """

    engine: str
    model_dir: str
    device: str
    buffer_device: str
    compile: bool
    num_mtp: int
    layout: LayoutSpec
    kv_scale_rule: ScaleRule
    attention: str
    transport: str
    network: MooncakeNetwork
    host: str
    peers: AllowList
    secret: Secret | None
    ctrl_port: int
    http_port: int
    senders: int
    poll_s: float
    receive_slots: int
    deadlines: EngineDeadlines
    any_checkpoint: bool


def build_parser(env: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilert_ref.decode_server",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_tilert_flags(parser, env)
    _add_own_flags(parser, env)
    return parser


def _add_tilert_flags(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    add = parser.add_argument_group("flags of TileRT's decode server").add_argument
    add(
        "--engine",
        default="ref",
        help="ref (default; `tilert` is an alias), stub, or PACKAGE.MODULE:FUNCTION of your own",
    )
    add("--model", help="layout profile: glm5, glm5_2, dsv32. Default: what DIR/config.json says; glm5 without DIR")
    add("--max-seq-len", type=int, default=4096, help="tokens that the receive buffer has room for (default 4096)")
    add("--ctrl-port", type=int, default=5556, help="for prefill nodes (default 5556; 0: any free port)")
    add("--http-port", type=int, default=5557, help="for routers (default 5557; 0: any free port)")
    add("--model-weights-dir", default="", metavar="DIR", help="checkpoint: config.json and safetensors")
    add(
        "--with-mtp",
        action="store_true",
        help="speculate with the model's MTP layer, whose KV the prefill then sends too",
    )
    add("--num-mtp", type=int, default=3, choices=(1, 2, 3), help="draft tokens per step with --with-mtp (default 3)")
    add("--transport", default="nixl", help=f"{', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]} (default nixl)")
    add(
        "--kv-cache-dtype",
        default="fp8_ds_mla",
        help="fp8 or fp8_ds_mla (default, as TileRT; sparse models only) or bf16: the cache of both ends",
    )
    add(
        "--pd-buffer-device",
        default=env.get("TILERT_PD_BUFFER_DEVICE") or None,
        help="memory of the receive buffer: cpu, or cuda for the engine's GPU, where NIXL writes directly. Senders "
        "must stage in the same kind of memory. Default: the engine's device with nixl, else cpu",
    )


def _add_own_flags(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    add = parser.add_argument_group("further flags").add_argument
    add("--host", default="::", help="address of both ports (default ::, every interface, IPv4 and IPv6)")
    add(
        "--allow-peers",
        nargs="+",
        metavar="ADDRESS",
        help="addresses and CIDR networks that may connect to the control port, the HTTP port and zmq's data port "
        f"(default {LOOPBACK_PEERS}); any: no limit, as in TileRT. NIXL's own ports are not covered",
    )
    add(
        "--any-checkpoint",
        action="store_true",
        help="take KV that was made with other weights too, for instance the same ones in another precision. Without "
        "it, prefill nodes of tilert_ref are refused whose checkpoint has another digest (TileRT's name none)",
    )
    add("--mooncake-protocol", metavar="NAME", help=f"{' or '.join(MOONCAKE_PROTOCOLS)} (default tcp): see above")
    add("--mooncake-devices", metavar="A,B", help="RDMA devices that Mooncake may use (default: all)")
    add("--device", default="auto", help="torch device of the engine (default: cuda if there is one, else cpu)")
    add("--compile", action="store_true", help=COMPILE_HELP)
    add(
        "--kv-scale-rule",
        default=ScaleRule.POWER_OF_TWO.value,
        choices=[rule.value for rule in ScaleRule],
        help="how fp8 rows are quantised, by the vLLM of the prefill node: power_of_two (default, 0.32), plain (0.26)",
    )
    add(
        "--attention-backend",
        default="auto",
        choices=ATTENTION,
        help="of decode, with --engine ref: auto (default), the engine's own for the device; triton, our Hopper "
        "kernels or an error; flashinfer, which needs flashinfer-python and a CUDA GPU",
    )
    add(
        "--receive-slots",
        type=int,
        default=2,
        help="requests whose KV can be here at the same time: with 2 (default) the next one's arrives while the "
        "current one is transferred, converted or decoded. Each costs memory of "
        "--pd-buffer-device for --max-seq-len tokens: for GLM-5 in fp8 62 kB a token, 12 GiB at 202752. 1: one "
        "at a time, as TileRT",
    )
    senders = env.get("TILERT_PD_SENDERS", str(MAX_SENDERS))
    add("--senders", type=int, default=senders, help=f"default of $TILERT_PD_SENDERS: {senders}")
    cancel, stall = EngineDeadlines.cancel_s, EngineDeadlines.stall_s
    add(
        "--engine-cancel-timeout-s",
        type=float,
        default=cancel,
        help=f"then a cancelled engine is killed (default {cancel:g})",
    )
    add(
        "--engine-stall-timeout-s",
        type=float,
        default=stall,
        help=f"then a silent engine is killed (default {stall:g})",
    )


def parse_options(argv: list[str] | None = None, env: Mapping[str, str] = os.environ) -> Options:
    """Ends the process with status 2 and a text that says what is legal if the flags don't make sense."""
    parser = build_parser(env)
    args = parser.parse_args(argv)
    try:
        return resolve(args, env)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace, env: Mapping[str, str]) -> Options:
    """Raises ValueError for everything that can be refused before a process or a port exists."""
    _check_engine(args)
    if args.transport not in TRANSPORTS:
        raise ValueError(f"--transport {args.transport}: legal: {', '.join(TRANSPORTS)}")
    engine_device = "cpu" if args.engine == "stub" else resolve_device(args.device)
    if args.engine in OWN_ENGINES:
        check_device(engine_device)
    buffer_device = resolve_buffer_device(args.pd_buffer_device, args.transport, engine_device)
    config = load_config(args.model_weights_dir) if args.model_weights_dir else None
    layout = LayoutSpec(
        profile=resolve_profile(args.model, config, args.with_mtp, _truthy(env, "TILERT_PD_NO_MTP")),
        kv_cache_dtype=args.kv_cache_dtype,
        max_seq_len=args.max_seq_len,
        tiled=_truthy(env, "TILERT_PD_KI_TILED"),
        **({"latent": config.kv_lora_rank, "rope": config.qk_rope_head_dim} if config else {}),
    )
    check_layout(layout.layout(), args.engine, config)
    return Options(
        engine=args.engine,
        model_dir=args.model_weights_dir,
        device=args.device,
        buffer_device=buffer_device,
        compile=args.compile,
        num_mtp=args.num_mtp if args.with_mtp else 0,
        layout=layout,
        kv_scale_rule=ScaleRule(args.kv_scale_rule),
        attention=args.attention_backend,
        transport=args.transport,
        network=_network(args),
        host=args.host,
        peers=peers(args.allow_peers),
        secret=read_secret(env),
        ctrl_port=args.ctrl_port,
        http_port=args.http_port,
        senders=min(max(args.senders, 1), MAX_SENDERS),  # TileRT clamps, and so does the other end
        poll_s=_poll_ms(env) / 1000,
        receive_slots=_receive_slots(args.receive_slots),
        deadlines=EngineDeadlines(args.engine_cancel_timeout_s, args.engine_stall_timeout_s),
        any_checkpoint=args.any_checkpoint,
    )


def resolve_buffer_device(wanted: str | None, transport: str, engine_device: str) -> str:
    """cpu, or the engine's GPU. wanted: None for the default. Raises ValueError for a GPU that nothing can write to."""
    on_gpu = torch.device(engine_device).type == "cuda"
    if wanted is None:
        return engine_device if on_gpu and transport == "nixl" else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise ValueError(f"--pd-buffer-device {wanted}: legal: cpu, cuda")
    if wanted == "cpu":
        return wanted
    if transport != "nixl":
        raise ValueError(f"--pd-buffer-device {wanted} with --transport {transport}: only nixl writes to a GPU")
    if not on_gpu:
        raise ValueError(f"--pd-buffer-device {wanted}: the engine is on {engine_device}, legal: cpu")
    return engine_device


def _receive_slots(count: int) -> int:
    if not 1 <= count <= MAX_SLOTS:
        raise ValueError(f"--receive-slots {count}: legal: 1 to {MAX_SLOTS}")
    return count


def _check_engine(args: argparse.Namespace) -> None:
    if args.engine not in FACTORIES and ":" not in args.engine:
        raise ValueError(f"--engine {args.engine}: legal: {', '.join(FACTORIES)}, or PACKAGE.MODULE:FUNCTION")
    if args.attention_backend != "auto" and args.engine not in OWN_ENGINES:
        raise ValueError(
            f"--attention-backend {args.attention_backend} with --engine {args.engine}: for --engine ref; legal: auto"
        )
    if args.compile and args.engine == "stub":
        raise ValueError("--compile with --engine stub: it computes nothing; legal with --engine ref")
    if args.engine in OWN_ENGINES and not args.model_weights_dir:
        raise ValueError(
            f"--engine {args.engine} needs --model-weights-dir DIR (--engine stub answers without a model)"
        )


def _network(args: argparse.Namespace) -> MooncakeNetwork:
    if args.transport != "mooncake" and (args.mooncake_protocol or args.mooncake_devices):
        raise ValueError("--mooncake-protocol and --mooncake-devices: only with --transport mooncake")
    devices = tuple(name for name in (args.mooncake_devices or "").split(",") if name)
    return MooncakeNetwork(args.mooncake_protocol or "tcp", devices)


def resolve_profile(name: str | None, config: ModelConfig | None, with_mtp: bool, no_mtp: bool) -> Profile:
    """What is on the wire: the published profile `name`, checked against the checkpoint, or the checkpoint's numbers.

    no_mtp: $TILERT_PD_NO_MTP. Raises ValueError if name, checkpoint and with_mtp contradict each other.
    """
    if config is None:
        return _published(name or "glm5", with_mtp, no_mtp)
    if with_mtp and not config.num_nextn_predict_layers:
        raise ValueError("--with-mtp: this checkpoint has no MTP layer (num_nextn_predict_layers is 0)")
    if name is None:
        num_layers = config.num_hidden_layers + config.num_nextn_predict_layers * with_mtp
        return model_profile(num_layers, has_mtp=with_mtp, has_index=config.index_topk is not None)
    found = _published(name, with_mtp, no_mtp)
    num_layers = config.num_hidden_layers + found.has_mtp
    if found.num_layers != num_layers:
        raise ValueError(
            f"--model {name} is a profile of {found.num_layers} layers, this checkpoint has {num_layers}; "
            "leave --model out to use the checkpoint's own numbers"
        )
    if found.has_index != (config.index_topk is not None):
        carries = "carries index pages" if found.has_index else "carries no index pages"
        raise ValueError(f"--model {name} {carries}, this checkpoint has index_topk = {config.index_topk}")
    return found


def _published(name: str, with_mtp: bool, no_mtp: bool) -> Profile:
    found = profile(name)
    if no_mtp and found.name == "glm5":
        found = profile("glm5_no_mtp")
    if with_mtp and not found.has_mtp:
        raise ValueError(f"--with-mtp: profile {found.name} carries no MTP layer, its drafts would come from stale KV")
    return found


def check_layout(layout: BufferLayout, engine: str, config: ModelConfig | None) -> None:
    """Raises ValueError for rows that the checkpoint can't have. The stub doesn't read them, so it takes any."""
    if engine == "stub" or config is None or layout.row_format is not FP8_DS_MLA:
        return
    try:
        check_fp8_rows(config)
    except ValueError as error:
        raise ValueError(f"{error}; pass --kv-cache-dtype bf16") from None


def _truthy(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() not in FALSE_WORDS


def _poll_ms(env: Mapping[str, str]) -> float:
    text = env.get("TILERT_DECODE_POLL_MS", "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 600_000:
        raise ValueError(f"TILERT_DECODE_POLL_MS={text!r}: milliseconds, 0 or more")
    return value
