"""Messages between the decode server and its engine process.

One ZeroMQ PAIR socket per engine process, one msgspec message (msgpack) per ZeroMQ message:

    server -> engine    Generate, Cancel
    engine -> server    Progress ..., Ready | LoadFailed, then per Generate: Injected, Stepped ..., Ended | Failed

Every message about a request carries its `run` number, so that what is left over from an earlier request can't be taken
for the current one. Prompts don't travel here: their KV lies in the receive buffer, which both processes have mapped.
"""

import msgspec

from tilert_ref.connector.layout import BufferLayout, Profile, bf16_row, row_format
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.decode_server.buffer import RemoteMemory
from tilert_ref.engine.api import Capabilities, FinishReason, SamplingParams


class LayoutSpec(msgspec.Struct, frozen=True):
    """A receive buffer's layout in a form that fits on a command line. latent and rope: widths of a bf16 row."""

    profile: Profile
    kv_cache_dtype: str
    max_seq_len: int
    latent: int = 512
    rope: int = 64
    tiled: bool = False

    def layout(self) -> BufferLayout:
        row = row_format(self.kv_cache_dtype)
        if row.name == "bf16":
            row = bf16_row(self.latent, self.rope)
        return BufferLayout(self.profile, row, self.max_seq_len, tiled=self.tiled)


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine process needs to start: its second command line argument, as JSON.

    engine: `ref`, `stub` or `package.module:function`. device: `auto` or a torch device. num_mtp: drafts a step, 0
    without MTP. buffer_fd: inherited descriptor of the receive buffer, which has `slots` slots; device_buffer: where it
    is if it lies on a GPU. kv_scale_rule: of fp8_ds_mla rows. attention: back end of decode's attention; engines that
    are not `ref` know only `auto`. compile: decode steps on a CPU are compiled.
    """

    engine: str
    model_dir: str
    device: str
    max_seq_len: int
    num_mtp: int
    layout: LayoutSpec
    buffer_fd: int
    kv_scale_rule: ScaleRule = ScaleRule.POWER_OF_TWO
    slots: int = 1
    attention: str = "auto"
    device_buffer: RemoteMemory | None = None
    compile: bool = False


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Inject the prompt that lies in this receive slot, then decode from it."""

    rid: str
    seq_len: int
    last_prompt_token: int
    first_token_id: int
    max_tokens: int
    sampling: SamplingParams
    top_logprobs: int | None = None
    run: int = 0
    slot: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    run: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line about loading, for people."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    name: str
    capabilities: Capabilities
    max_seq_len: int


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine could not be loaded; the process ends."""

    error: str


class Injected(msgspec.Struct, frozen=True, tag="injected"):
    """The engine has its own copy of the KV. Times in ms: views of the buffer built, planes copied.

    at: when the first decode step begins, seconds of time.monotonic(), which all processes of a machine share.
    """

    run: int
    convert_ms: float
    inject_ms: float
    at: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The tokens of one step. With logprobs, one entry per token; top holds (id, logprob) pairs."""

    run: int
    ids: list[int]
    logprobs: list[float | None] | None = None
    top: list[list[tuple[int, float]]] | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run is over and the engine has forgotten the sequence."""

    run: int
    reason: FinishReason
    stats: dict[str, float | int | str] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The run is over because the engine raised; the engine itself is still usable."""

    run: int
    error: str


Command = Generate | Cancel
Event = Progress | Ready | LoadFailed | Injected | Stepped | Ended | Failed
RunEvent = Injected | Stepped | Ended | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    return _commands.decode(data)


def decode_event(data: bytes) -> Event:
    return _events.decode(data)
