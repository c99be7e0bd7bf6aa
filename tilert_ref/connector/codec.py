"""The control protocol's messages and frames. Pure: bytes in, structs out, and back.

    server -> client   hello            what the receive buffer looks like and where it is
    client -> server   announce         one rank offers one request's KV
    server -> client   accept | reject
    (the client writes memory)
    client -> server   done             every write is complete

A frame is a u32 big-endian length and that many bytes of JSON (an object). Unknown fields are ignored.

Wire versions (`protocol_version` in hello):
    1   A hello without `protocol_version` means 1. Not spoken here.
    2   TileRT 0.1.6.
Ours adds, without a new number, what a peer of version 2 ignores or refuses cleanly:
    -   `tilert_ref` in hello and announce: a `Geometry`, which has a `version` of its own (1 is the first);
    -   transport `zmq` and its hello field `zmq_endpoint`;
    -   `tilert_auth` in every message, if the ends have a shared secret: an `Auth` (see secret.py);
    -   `takes_failures` in hello: an announce with `failed` tells that a rank's handoff will not come, and why. It is
        the connection's only message. Any other server would take it for an offer;
    -   `any_slot` in announce: the sender writes to the addresses that accept names, if any (`kv_base`, `pe_base`,
        `ki_base`, as in hello);
    -   `error` in a done that is false: why the rank gave up.

Source: protocol.md section 3.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tilert_ref.connector.layout import MODEL_BASE_VERSION, PLANES, BufferLayout, Geometry, PlaneBases

MAGIC = "tilert-pd"
PROTOCOL_VERSION = 2
MAX_FRAME = 16 * 2**20  # the protocol's; only an announce with its prompt's ids comes near
MAX_HELLO = 2**20  # a thousand shards' addresses, or a big machine's NIXL metadata, with room
MAX_SMALL = 2**16  # challenge, accept, reject, done
MAX_SHARDS = 1024
MAX_LAYERS = 4096
MAX_PROMPT = 2**21
MAX_DEPTH = 16
MAX_REASON = 1000
TRANSIENT_REASONS = frozenset({"busy", "cancelling"})

HEADER_BYTES = 4
_HEADER = struct.Struct("!I")
_NULLABLE = frozenset({"sampling"})  # sent as null; every other None means the field is absent
_META_FIELDS = ("session_id", "nixl_meta", "nixl_dev", "zmq_endpoint")

Int32 = Annotated[int, Meta(ge=0, lt=2**31)]
Int63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
Hex64 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Bases = int | list[int]


class ProtocolError(Exception):
    """The peer sent something that is not the protocol. The only answer is to close the connection."""


class HandoffRefused(Exception):
    """The two ends do not fit together; `reason` says what was got and what was expected. Never worth a retry."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Auth(msgspec.Struct, kw_only=True):
    """Extension field of every message between ends with a shared secret (secret.py)."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    nonce: Hex64 | None = None
    proof: Hex64 | None = None


class Challenge(msgspec.Struct, kw_only=True):
    """What a sender with the shared secret answers to a hello that asks for it."""

    tilert_auth: Auth


class Hello(msgspec.Struct, kw_only=True):
    """The receive buffer: capacity in tokens, address of each plane (one per shard if sharded), transport.

    A hello with a nonce asks for the shared secret and keeps the addresses back: they are 0.
    """

    magic: str
    protocol_version: Int64 = 1
    layout_version: Int64
    transport: str
    max_seq_len: Annotated[int, Meta(ge=1, lt=2**31)]
    busy: bool = False
    senders: Int32 = 1
    kv_base: Bases
    pe_base: Bases
    ki_base: Bases
    nshards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] | None = None
    session_id: str | None = None
    nixl_meta: str | None = None
    nixl_dev: Int32 | None = None
    zmq_endpoint: str | None = None
    takes_failures: bool | None = None
    tilert_ref: Geometry | None = None
    tilert_auth: Auth | None = None

    def __post_init__(self) -> None:
        if not self.withheld:
            for name in ("kv_base", "pe_base", "ki_base"):
                _check_bases(name, getattr(self, name), self.nshards)

    @property
    def withheld(self) -> bool:
        return self.tilert_auth is not None and self.tilert_auth.nonce is not None

    @property
    def shard_count(self) -> int:
        return self.nshards or 1

    @property
    def sender_count(self) -> int:
        return self.senders or 1

    def plane_bases(self) -> PlaneBases:
        return PlaneBases(*(base if isinstance(base, list) else [base] for base in self._bases()))

    def meta(self) -> dict[str, Any]:
        """What the transport's `local_meta()` put in."""
        return {name: value for name in _META_FIELDS if (value := getattr(self, name)) is not None}

    def _bases(self) -> tuple[Bases, Bases, Bases]:
        return self.kv_base, self.pe_base, self.ki_base


class Announce(msgspec.Struct, kw_only=True):
    """One rank offers the KV of one request: seq_len prompt tokens.

    seq_len is any integer here: admission refuses a wrong one with a reason instead of dropping the connection.
    admission_window_s: how long this sender will keep retrying a transient reject, seconds.
    """

    rid: Rid
    rank: Int32
    seq_len: Int64 = 0
    last_prompt_token: Int32 = 0
    sampling: dict[str, Any] | None = None
    admission_window_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    kv_scales: Annotated[list[float], Meta(max_length=MAX_LAYERS)] | None = None
    prompt_token_ids: Annotated[list[Int32], Meta(max_length=MAX_PROMPT)] | None = None
    first_token_id: Int32 | None = None
    tilert_ref: Geometry | None = None
    any_slot: bool | None = None
    failed: Reason | None = None
    tilert_auth: Auth | None = None

    def __post_init__(self) -> None:
        if _depth(self.sampling) > MAX_DEPTH:
            raise ValueError(f"sampling is nested more than {MAX_DEPTH} deep")


class Accept(msgspec.Struct, kw_only=True):
    """The bases, if given, are where to write instead of hello's: only for a sender whose announce had `any_slot`."""

    accepted: bool = True
    rid: Rid
    rank: Int32
    generation: Int63
    kv_base: Bases | None = None
    pe_base: Bases | None = None
    ki_base: Bases | None = None
    tilert_auth: Auth | None = None


class Reject(msgspec.Struct, kw_only=True):
    """Why an announce was refused. Only the reasons in `TRANSIENT_REASONS` are worth another attempt."""

    accepted: bool = False
    error: str
    rid: str | None = None
    rank: Int64 | None = None
    detail: str | None = None
    busy_rid: str | None = None
    busy_state: str | None = None
    max_seq_len: Int64 | None = None
    tilert_auth: Auth | None = None

    @property
    def transient(self) -> bool:
        return self.error in TRANSIENT_REASONS


class Done(msgspec.Struct, kw_only=True):
    """Every write of this rank is complete and visible. `done` false (or absent) means that the rank gave up."""

    done: bool = False
    rid: Rid
    rank: Int32
    generation: Int63
    error: Reason | None = None
    tilert_auth: Auth | None = None


Message = Hello | Challenge | Announce | Accept | Reject | Done


def _check_bases(name: str, bases: Bases, nshards: int | None) -> None:
    """Raises ValueError, which msgspec reports as a validation error of the message."""
    addresses = bases if isinstance(bases, list) else [bases]
    if len(addresses) != (nshards or 1):
        raise ValueError(f"{name} has {len(addresses)} addresses for {nshards or 1} shards")
    for address in addresses:
        if not 0 < address < 2**64:
            raise ValueError(f"{name} holds {address}, which is not a 64-bit address")


def _depth(value: Any) -> int:
    """Nesting of lists and objects, counted no further than just past MAX_DEPTH."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [inner for inner in level if isinstance(inner, dict | list)]):
        depth += 1
        level = [i for inner in level for i in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def encode(message: Message) -> bytes:
    """The whole frame: header and JSON. Fields that are None are left out, but for `sampling`."""
    fields = msgspec.structs.asdict(message)
    present = {name: value for name, value in fields.items() if value is not None or name in _NULLABLE}
    payload = msgspec.json.encode(present)
    if len(payload) > MAX_FRAME:
        raise ProtocolError(f"{type(message).__name__} needs {len(payload)} bytes, a frame holds {MAX_FRAME}")
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into payloads. limit: of the frames that come next; may be set between two of them."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes = b"") -> list[bytes]:
        """Payloads that `data` completes. ProtocolError as soon as a header asks for more than the limit."""
        self._pending += data
        payloads = []
        while (end := self._frame_end()) is not None and end <= len(self._pending):
            payloads.append(bytes(self._pending[_HEADER.size : end]))
            del self._pending[:end]
        return payloads

    def finish(self) -> None:
        """To be called at end of stream: ProtocolError if it cuts a frame."""
        if self._pending:
            raise ProtocolError(f"the stream ended inside a frame, after {len(self._pending)} bytes of it")

    def _frame_end(self) -> int | None:
        if len(self._pending) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._pending)
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes; at most {self.limit} are legal")
        return _HEADER.size + length


_T = TypeVar("_T")


def _decode(payload: bytes, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a legal {name}: {error}") from error


def decode_hello(payload: bytes) -> Hello:
    return _decode(payload, Hello, "hello")


def decode_announce(payload: bytes) -> Announce:
    return _decode(payload, Announce, "announce")


def decode_challenge(payload: bytes) -> Challenge:
    return _decode(payload, Challenge, "challenge")


def decode_done(payload: bytes) -> Done:
    return _decode(payload, Done, "done")


class _Verdict(msgspec.Struct):
    accepted: bool


def decode_reply(payload: bytes) -> Accept | Reject:
    """An accept without an integer generation is a ProtocolError: the sender must not write on it."""
    accepted = _decode(payload, _Verdict, "reply").accepted
    return _decode(payload, Accept, "accept") if accepted else _decode(payload, Reject, "reject")


def make_hello(
    layout: BufferLayout,
    shard_addresses: Sequence[int],
    *,
    transport: str,
    senders: int,
    busy: bool = False,
    meta: dict[str, Any] | None = None,
    geometry: Geometry | None = None,
) -> Hello:
    """The hello of a receive buffer.

    Args:
        shard_addresses: address of each shard, layout.nshards of them.
        meta: the transport's `local_meta()`.
        geometry: default `layout.geometry()`.
    """
    kv, pe, ki = _wire_bases(layout, shard_addresses)
    return Hello(
        magic=MAGIC,
        protocol_version=PROTOCOL_VERSION,
        layout_version=layout.layout_version,
        transport=transport,
        max_seq_len=layout.max_seq_len,
        busy=busy,
        senders=senders,
        kv_base=kv,
        pe_base=pe,
        ki_base=ki,
        nshards=layout.nshards if layout.nshards > 1 else None,
        tilert_ref=geometry or layout.geometry(),
        **(meta or {}),
    )


def name_bases(accept: Accept, layout: BufferLayout, shard_addresses: Sequence[int]) -> Accept:
    """accept for a slot whose shards lie at other addresses than hello named."""
    kv, pe, ki = _wire_bases(layout, shard_addresses)
    return msgspec.structs.replace(accept, kv_base=kv, pe_base=pe, ki_base=ki)


def _wire_bases(layout: BufferLayout, shard_addresses: Sequence[int]) -> tuple[Bases, Bases, Bases]:
    bases = layout.bases_at(shard_addresses)
    kv, pe, ki = (base if layout.nshards > 1 else base[0] for base in (bases.kv, bases.pe, bases.ki))
    return kv, pe, ki


def check_hello(
    hello: Hello,
    expected: BufferLayout,
    senders: int,
    transport: str,
    seq_len: int,
    checkpoint: str | None = None,
) -> None:
    """The sender's checks, in the order of protocol.md 3.2, then the geometry. Raises HandoffRefused.

    Args:
        expected: the sender's own layout; its max_seq_len and nshards are not compared.
        checkpoint: the sender's checkpoint digest; compared if both ends name one.
    """
    facts = [
        ("magic", hello.magic, MAGIC),
        ("protocol_version", hello.protocol_version, PROTOCOL_VERSION),
        ("layout_version", hello.layout_version, expected.layout_version),
        ("senders", hello.sender_count, senders),
        ("transport", hello.transport, transport),
    ]
    for name, got, want in facts:
        if got != want:
            raise HandoffRefused(f"decode has {name} {got!r}, prefill has {want!r}")
    if seq_len > hello.max_seq_len:
        raise HandoffRefused(f"seq_len {seq_len} exceeds decode's max_seq_len {hello.max_seq_len}")
    check_geometry(hello.tilert_ref, expected, checkpoint)
    check_destination(hello, expected)


def check_destination(hello: Hello, expected: BufferLayout) -> None:
    """The planes lie beside each other in 64 bits of address, none over another. Raises HandoffRefused."""
    target = replace(expected, max_seq_len=hello.max_seq_len, nshards=hello.shard_count)
    bases = hello.plane_bases()
    ranges = sorted(
        (base, base + target.layer_slots * target.layer_bytes(plane), plane)
        for plane in PLANES
        for base in getattr(bases, plane)
        if target.layer_bytes(plane)
    )
    for (_, end, plane), (start, _, other) in pairwise(ranges):
        if end > start:
            raise HandoffRefused(f"decode's {plane} plane ends at {end:#x}, its {other} plane begins at {start:#x}")
    if ranges[-1][1] > 2**64:
        raise HandoffRefused(f"decode's {ranges[-1][2]} plane ends at {ranges[-1][1]:#x}, beyond 64 bits")


def destination(hello: Hello, accept: Accept) -> Hello:
    """hello with the addresses that an accept for another slot names. ProtocolError if they don't fit its shards."""
    bases = {name: getattr(accept, name) for name in ("kv_base", "pe_base", "ki_base")}
    if all(base is None for base in bases.values()):
        return hello
    moved = msgspec.structs.asdict(hello) | bases
    try:
        return Hello(**moved)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a legal accept: {error}") from error


def check_geometry(theirs: Geometry | None, layout: BufferLayout, checkpoint: str | None = None) -> None:
    """Compares a peer's geometry with our layout. Raises HandoffRefused.

    A published layout version says everything, so a peer (TileRT) may leave the geometry out. A model-defined one does
    not.
    """
    if theirs is None:
        if layout.base_version == MODEL_BASE_VERSION:
            raise HandoffRefused(
                f"layout {layout.layout_version} is model-defined and the peer sent no tilert_ref geometry"
            )
        return
    ours = layout.geometry()
    for name in ("version", "num_layers", "has_mtp", "has_index", "kv_bytes", "pe_bytes"):
        if getattr(theirs, name) != getattr(ours, name):
            raise HandoffRefused(f"the peer has {name} {getattr(theirs, name)!r}, we have {getattr(ours, name)!r}")
    if checkpoint and theirs.checkpoint and theirs.checkpoint != checkpoint:
        text = f"the peer has checkpoint {theirs.checkpoint!r}, we have {checkpoint!r}"
        rules = {name.partition(":")[0] for name in (theirs.checkpoint, checkpoint) if ":" in name}
        if len(rules) == 2:  # fingerprint.VERSION
            text += "; two rules of two releases: legal is one release at both ends, or --any-checkpoint at decode"
        raise HandoffRefused(text)
