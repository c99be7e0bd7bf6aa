"""The engine process: `python -m tilert_ref.decode_server.engine_process ENDPOINT SPEC_JSON`.

Started by engine_client.py. Maps the server's receive buffer, loads one engine, then runs one request at a time.
Between two steps, and two groups of layers of an injection, it looks for a Cancel. It ends when its stdin ends, which
happens however the server dies.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec
import torch
import zmq

from tilert_ref.connector.layout import FP8_DS_MLA, BufferLayout, plane_views
from tilert_ref.connector.planes import untile_index_pages
from tilert_ref.connector.rounding import ScaleRule, quantize_fp8_ds_mla
from tilert_ref.decode_server.buffer import DeviceBuffer, ReceiveBuffer, SharedBuffer
from tilert_ref.decode_server.messages import (
    Cancel,
    Ended,
    EngineSpec,
    Event,
    Failed,
    Generate,
    Injected,
    LoadFailed,
    Progress,
    Ready,
    Stepped,
    decode_command,
    encode,
)
from tilert_ref.engine.api import DecodeEngine, Finished, LayerKV, PromptKV, SamplingParams, Token

OWN_ENGINES = ("ref", "tilert")  # two names of one
FACTORIES = dict.fromkeys(OWN_ENGINES, "tilert_ref.engine.ref:load_engine") | {
    "stub": "tilert_ref.decode_server.stub:load_engine",
}
LOAD_FAILED_STATUS = 3
LINGER_MS = 1000
PR_SET_PDEATHSIG = 1


class Link:
    """This end of the socket. Remembers which run was cancelled."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.sndhwm = 0  # a slow HTTP client must not block a step; max_tokens bounds the queue
        self._socket.linger = LINGER_MS
        self._socket.connect(endpoint)
        self._cancelled = 0

    def send(self, event: Event) -> None:
        self._socket.send(encode(event))

    def next_request(self) -> Generate:
        """Blocks. A Cancel that arrives here belongs to a run that has already ended."""
        while True:
            command = decode_command(self._socket.recv())
            if isinstance(command, Generate):
                return command

    def cancelled(self, run: int) -> bool:
        """Whether the server has cancelled this run. Never blocks; about 2 us when nothing has arrived."""
        with contextlib.suppress(zmq.Again):
            while True:
                match decode_command(self._socket.recv(zmq.NOBLOCK)):
                    case Cancel(run=cancelled):
                        self._cancelled = cancelled
                    case other:
                        raise RuntimeError(f"the server sent {other} while run {run} was not over")
        return self._cancelled == run

    def close(self) -> None:
        """Waits until what was sent has left, at most LINGER_MS."""
        self._socket.close()
        self._context.term()


class Cancelled(Exception):
    """The request was cancelled while its KV was being injected."""


class WatchedLayers(list[LayerKV]):
    """A prompt's layers. Whoever iterates over them meets a cancel at the next layer: a long prompt takes a second."""

    def __init__(self, layers: Iterable[LayerKV], cancelled: Callable[[], bool]) -> None:
        super().__init__(layers)
        self._cancelled = cancelled

    def __iter__(self) -> Iterator[LayerKV]:
        for layer in super().__iter__():
            if self._cancelled():
                raise Cancelled
            yield layer


@dataclass(frozen=True)
class Host:
    """An engine with the receive slots that it reads its prompts from: uint8 [slots, layout.total_bytes].

    engine_layers: how many layers it has a cache for.
    """

    engine: DecodeEngine
    layout: BufferLayout
    slots: torch.Tensor
    engine_layers: int

    def prompt(self, request: Generate) -> PromptKV:
        """Views of the request's slot, no copies (tiled index pages excepted: engines read linear ones)."""
        slot = self.slots[request.slot]
        layers = [self._layer(slot, index, request.seq_len) for index in range(self.engine_layers)]
        return PromptKV(request.rid, request.seq_len, request.last_prompt_token, layers)

    def _layer(self, slot: torch.Tensor, index: int, seq_len: int) -> LayerKV:
        kv, pe, pages = plane_views(self.layout, slot, index, seq_len)
        if pages is not None and self.layout.tiled:
            pages = untile_index_pages(pages)
        latent = kv if self.layout.row_format is FP8_DS_MLA else kv.view(torch.bfloat16)
        return LayerKV(latent, pe.view(torch.bfloat16), pages)


def engine_layers(spec: EngineSpec, layout: BufferLayout) -> int:
    """Layers to hand to the engine: no MTP layer without speculation."""
    unused_mtp = layout.profile.has_mtp and spec.num_mtp == 0
    return layout.profile.num_layers - int(unused_mtp)


def run_request(host: Host, request: Generate, link: Link) -> None:
    """Runs one request and sends every event of it. The last one leaves after the engine has forgotten the sequence."""
    ending: Ended | Failed
    try:
        ending = _attempt(host, request, link)
    except Cancelled:
        ending = Ended(request.run, "cancelled")
    except torch.AcceleratorError:
        raise  # the device context is gone for good, only a new process helps
    except Exception as error:  # one request fails, the loaded weights stay
        traceback.print_exc()
        ending = Failed(request.run, describe(error))
    host.engine.reset()
    link.send(ending)


def _attempt(host: Host, request: Generate, link: Link) -> Ended:
    start = time.perf_counter()
    prompt = host.prompt(request)
    prompt = replace(prompt, layers=WatchedLayers(prompt.layers, lambda: link.cancelled(request.run)))
    converted = time.perf_counter()
    host.engine.inject(prompt)
    injected = time.perf_counter()
    if link.cancelled(request.run):
        return Ended(request.run, "cancelled")
    link.send(Injected(request.run, 1000 * (converted - start), 1000 * (injected - converted), time.monotonic()))
    return _decode(host.engine, request, link)


def _decode(engine: DecodeEngine, request: Generate, link: Link) -> Ended:
    steps = engine.decode(request.first_token_id, request.max_tokens, request.sampling, request.top_logprobs)
    with contextlib.closing(steps):
        for step in steps:
            if isinstance(step, Finished):
                return Ended(request.run, step.reason, step.stats)
            if step:
                link.send(stepped(request, step))
            if link.cancelled(request.run):
                return Ended(request.run, "cancelled")
    raise RuntimeError(f"engine {engine.name} ended a decode without Finished")


def stepped(request: Generate, tokens: list[Token]) -> Stepped:
    ids = [token.id for token in tokens]
    if request.top_logprobs is None:
        return Stepped(request.run, ids)
    return Stepped(request.run, ids, [token.logprob for token in tokens], [token.top or [] for token in tokens])


def describe(error: Exception) -> str:
    """Refusals (ValueError) speak for themselves; anything else needs its type."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def load(spec: EngineSpec, progress: Callable[[str], None]) -> Host:
    """Maps the receive buffer and loads the engine. Raises whatever the engine's factory raises."""
    layout, device = spec.layout.layout(), resolve_device(spec.device)
    buffer = open_buffer(spec, layout, device, progress)
    engine = factory(spec.engine)(
        spec.model_dir,
        device=device,
        max_seq_len=spec.max_seq_len,
        num_mtp=spec.num_mtp,
        kv_cache_dtype=layout.row_format.name,
        kv_scale_rule=spec.kv_scale_rule,
        progress=progress,
        **({} if spec.attention == "auto" else {"attention": spec.attention}),
        **({"compile": True} if spec.compile else {}),  # an engine that can't has no such argument
    )
    host = Host(engine, layout, buffer.slots, engine_layers(spec, layout))
    if torch.device(device).type == "cuda":
        try:
            warm_up(host, spec.kv_scale_rule)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # another engine may refuse such a prompt
            progress(f"no warm-up, the first request takes longer: {describe(error)}")
    return host


def warm_up(host: Host, rule: ScaleRule) -> None:
    """A prompt of one token, all zeros, and two tokens after it: a GPU loads kernels at their first use, which would
    cost the first request a tenth of a second. rule: of fp8_ds_mla rows, in which zeros have a scale too."""
    request = Generate("warm-up", 1, 0, 0, 2, SamplingParams(temperature=0.0, ignore_eos=True))
    prompt = host.prompt(request)
    layers = [
        LayerKV(
            _zero_rows(planes.latent, rule),
            torch.zeros_like(planes.rope),
            None if planes.index_pages is None else torch.zeros_like(planes.index_pages),
        )
        for planes in prompt.layers
    ]
    host.engine.inject(replace(prompt, layers=layers))
    for _ in host.engine.decode(request.first_token_id, request.max_tokens, request.sampling):
        pass
    host.engine.reset()


def _zero_rows(latent: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Zeros like a latent plane, [tokens, kv_lora_rank] bf16 or uint8 [tokens, 528]."""
    if latent.dtype != torch.uint8:
        return torch.zeros_like(latent)
    values = torch.zeros(len(latent), FP8_DS_MLA["latent"].count, dtype=torch.bfloat16, device=latent.device)
    return quantize_fp8_ds_mla(values, values[:, : FP8_DS_MLA["rope"].count], rule)[:, : latent.shape[1]]


def open_buffer(spec: EngineSpec, layout: BufferLayout, device: str, progress: Callable[[str], None]) -> ReceiveBuffer:
    if spec.device_buffer is not None:
        return DeviceBuffer.open(spec.device_buffer, layout.total_bytes, spec.slots)
    buffer = SharedBuffer(spec.buffer_fd, layout.total_bytes, spec.slots)
    if torch.device(device).type == "cuda":
        start = time.perf_counter()
        how = "pinned, one copy to the GPU" if buffer.pin() else "not pinned: the driver refused"
        progress(f"receive buffer in host memory, {how} ({time.perf_counter() - start:.1f} s)")
    return buffer


def factory(name: str) -> Callable[..., DecodeEngine]:
    """An engine's `load_engine`, by the engine's name or as `package.module:function`."""
    module, _, function = FACTORIES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), function)


def resolve_device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def end_with_server() -> None:
    """Ties this process to the server. The end of stdin always works, the signal also if a hung call holds the GIL."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    end_with_server()
    link, spec = Link(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineSpec)
    try:
        host = load(spec, lambda text: link.send(Progress(text)))
    except Exception as error:  # reported to the server, whatever it is
        if not isinstance(error, ValueError):
            traceback.print_exc()
        link.send(LoadFailed(describe(error)))
        link.close()
        return LOAD_FAILED_STATUS
    link.send(Ready(host.engine.name, host.engine.capabilities, host.engine.max_seq_len))
    while True:
        run_request(host, link.next_request(), link)


if __name__ == "__main__":
    sys.exit(main())
