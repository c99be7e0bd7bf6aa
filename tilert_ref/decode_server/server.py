"""Starts the parts of a decode node, keeps them together, and takes them down within two seconds."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, MutableMapping

import uvicorn

from tilert_ref.connector.allow import parse_address
from tilert_ref.connector.fingerprint import known_fingerprint
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.transport import make_transport
from tilert_ref.connector.wire import listen
from tilert_ref.decode_server.app import Identity, create_app
from tilert_ref.decode_server.buffer import DeviceBuffer, ReceiveBuffer, SharedBuffer
from tilert_ref.decode_server.engine_client import EngineClient, EngineUnavailable
from tilert_ref.decode_server.engine_process import OWN_ENGINES
from tilert_ref.decode_server.messages import EngineSpec
from tilert_ref.decode_server.options import Options
from tilert_ref.decode_server.service import DecodeService
from tilert_ref.http_limits import BodyLimit, uvicorn_limits

SHUTDOWN_S = 1.8
"""Seconds from the signal to the end of the process, whatever hangs."""
MAX_BODY_BYTES = 4 * 2**20
MAX_HTTP_CONNECTIONS = 256


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process before the rest of it is taken down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever read our output is gone; serving goes on
        print(f"decode server: {text}", flush=True)


async def run(options: Options) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status: 0, or 1 if the engine could not be loaded."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop_by_signal, stop)
    with listen(options.host, options.http_port) as http_socket:
        buffer = await asyncio.to_thread(receive_buffer, options)
        engine = EngineClient(engine_spec(options, buffer), say, options.deadlines)
        engine.start()
        try:
            receiver = await asyncio.to_thread(start_receiver, options, buffer)
            try:
                return await _serve(options, engine, receiver, http_socket, stop)
            finally:
                await asyncio.to_thread(receiver.close)
        finally:
            await engine.close()


async def _serve(
    options: Options, engine: EngineClient, receiver: ReceiveServer, http_socket: socket.socket, stop: asyncio.Event
) -> int:
    service = DecodeService(engine, receiver, options.receive_slots)
    app = BodyLimit(create_app(service, Identity(options.layout.profile.name, options.poll_s)), MAX_BODY_BYTES)
    limits = uvicorn_limits(MAX_HTTP_CONNECTIONS, options.peers)
    http = HttpServer(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, **limits
        )
    )
    serving = asyncio.create_task(http.serve([http_socket]))
    say(f"http on {_address(http_socket)}, prefill nodes on port {receiver.port}; {describe(options)}")
    try:
        return await _until_stopped(engine, serving, stop)
    finally:
        await engine.close()  # a request that it works on fails,
        service.cancel_all()  # those that wait are cancelled, and all still get their reply
        http.should_exit = True
        await serving


async def _until_stopped(engine: EngineClient, serving: asyncio.Task[None], stop: asyncio.Event) -> int:
    loading, stopping = asyncio.create_task(engine.loaded()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            say(f"ready: engine {engine.ready.name}")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    except EngineUnavailable as error:
        print(f"decode server: the engine could not be loaded: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        loading.cancel()
        stopping.cancel()
    return 0


def engine_spec(options: Options, buffer: ReceiveBuffer) -> EngineSpec:
    return EngineSpec(
        engine=options.engine,
        model_dir=options.model_dir,
        device=options.device,
        max_seq_len=options.layout.max_seq_len,
        num_mtp=options.num_mtp,
        layout=options.layout,
        buffer_fd=buffer.fd,
        kv_scale_rule=options.kv_scale_rule,
        slots=options.receive_slots,
        attention=options.attention,
        device_buffer=buffer.remote,
        compile=options.compile,
    )


def receive_buffer(options: Options) -> ReceiveBuffer:
    """Raises what torch raises if the GPU has no room."""
    nbytes, slots = options.layout.layout().total_bytes, options.receive_slots
    if options.buffer_device == "cpu":
        return SharedBuffer.create(nbytes, slots)
    return DeviceBuffer.create(nbytes, slots, options.buffer_device)


def keep_ucx_local(host: str, env: MutableMapping[str, str]) -> None:
    """NIXL's UCX listens on every interface unless told otherwise, also where --host says that we don't."""
    address = parse_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        env.setdefault("UCX_NET_DEVICES", "lo")


def start_receiver(options: Options, buffer: ReceiveBuffer) -> ReceiveServer:
    keep_ucx_local(options.host, os.environ)
    receiver = ReceiveServer(
        layout=options.layout.layout(),
        buffer=buffer.slots,
        transport=make_transport(options.transport, options.host, peers=options.peers, network=options.network),
        host=options.host,
        port=options.ctrl_port,
        senders=options.senders,
        checkpoint=checkpoint(options),
        peers=options.peers,
        secret=options.secret,
    )
    receiver.start()
    return receiver


def checkpoint(options: Options) -> str | None:
    """Digest of the engine's checkpoint, for prefill nodes to compare with theirs. None if anything goes, or if it is
    not known: another engine than `ref` may have converted its weights."""
    if options.any_checkpoint:
        return known_fingerprint(options.model_dir, "--any-checkpoint")
    own = options.engine in OWN_ENGINES
    return known_fingerprint(options.model_dir, "" if own else f"engine {options.engine} reads what it likes")


def describe(options: Options) -> str:
    layout = options.layout.layout()
    profile = layout.profile
    return (
        f"{options.transport}, {layout.row_format.name}, profile {profile.name} with {profile.num_layers} layers, "
        f"{options.receive_slots} slot(s) of {layout.max_seq_len} tokens ({layout.total_bytes / 2**20:.0f} MiB each) "
        f"on {options.buffer_device}, "
        f"{options.senders} sender(s), peers {options.peers}, {'a' if options.secret else 'no'} shared secret"
    )


def _address(http_socket: socket.socket) -> str:
    host, port = http_socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _stop_by_signal(stop: asyncio.Event) -> None:
    """Asks for an orderly end; a second signal, or a part that hangs, ends the process at once."""
    if stop.is_set():
        os._exit(1)
    stop.set()
    timer = threading.Timer(SHUTDOWN_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
