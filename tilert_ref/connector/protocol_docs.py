"""Renders docs/protocol.md from the codec's structs and the transition table.

Run `python -m tilert_ref.connector.protocol_docs > docs/protocol.md`.

What a struct can't say, a field's meaning and whose it is, stands here; a field without it ends the rendering.
"""

import inspect
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import inspect as types

from tilert_ref.connector import codec, receiver, sender
from tilert_ref.connector.admission import RETRY_STEP_S, UNCLAIMED_GRACE_S
from tilert_ref.connector.layout import Geometry
from tilert_ref.connector.transitions import ANY, OURS, REASONS, ROWS, Reason, Row

_INTRO = f"""\
# The control protocol

Generated from the message structs (`tilert_ref/connector/codec.py`) and the transition table
(`tilert_ref/connector/transitions.py`). Do not edit: a test compares the page with them. Renew:

    python -m tilert_ref.connector.protocol_docs > docs/protocol.md

It is version {codec.PROTOCOL_VERSION} of TileRT's protocol (0.1.6). What is **ours** is an extension that a
peer of that version ignores or refuses cleanly. "protocol.md" in comments of the code is the description of
TileRT's protocol that this was written from; row numbers below are those of its section 5.2.

## A connection

One TCP connection carries one rank of one request. The decode server listens and speaks first.

    decode -> prefill   hello            what the receive buffer looks like and where it is
    prefill -> decode   announce         one rank offers one request's KV; or, ours, that it will not come (`failed`)
    decode -> prefill   accept | reject
    (prefill writes memory)
    prefill -> decode   done             every write is complete and visible; or the rank gave up
    both close

Closing is the only other signal: done has no answer. With a shared secret (**ours**, `connector/secret.py`),
the first hello keeps the addresses back and asks for a challenge, and everything after it carries a proof:

    decode -> prefill   hello (nonce)
    prefill -> decode   challenge (nonce, proof)
    decode -> prefill   hello (proof), or reject `secret_required` | `wrong_secret`
    ...                 announce, accept, done, each with a proof

## Frames

A frame is a u32 in network byte order, N, and N bytes of JSON, an object. Fields that a receiver does not know
are ignored. Absent and null are the same, and an absent field is left out, except `sampling`, which is sent as
null. A frame over its limit, a stream that ends inside a frame and a message that is none close the connection
without an answer.
"""

_TIMES = """\
## Deadlines
"""

_DEADLINES = (
    ("from connect to announce, decode side", f"{receiver.ANNOUNCE_TIMEOUT_S:g}", "120 for each read"),
    ("connect and hello, prefill side", f"{sender.HANDSHAKE_TIMEOUT_S:g}", "60 for each operation"),
    ("announce and its reply, prefill side", f"{sender.HANDSHAKE_TIMEOUT_S:g}", "60 for each operation"),
    (
        "from accept to done",
        "zmq: `request_timeout`; nixl, mooncake: none, as the write goes on as long as its sender lives",
        "120",
    ),
    ("pauses after a transient reject", f"{RETRY_STEP_S:g}, doubled each time, 5 attempts", "the same"),
    (
        "how long a released rid is refused",
        "`request_timeout` (120), by a monotonic clock",
        "the same, by the wall clock",
    ),
    ("how long a complete record that nobody expects is safe", f"{UNCLAIMED_GRACE_S:g}", "0"),
    (
        "how long a slot is kept after an accepted connection broke off; not zmq",
        f"{receiver.SETTLE_S:g}; {receiver.FOREIGN_SETTLE_S:g} for senders without `tilert_ref`",
        "0",
    ),
)

_REASONS = """\
## Rejects

A *transient* reject is worth another attempt on a new connection; every other one, known or not, is permanent.
"""

_MACHINE = f"""\
## Admission

The decode side's state machine (`connector/admission.py`): for each event the state of the slot that it is
about (its request's, else the one that hello offered), a guard, the actions in their order, and the slot's next
state; none means that it stays. An announce meets the rows from top to bottom, and the first that fits is
taken. Where the guard does not say whose slot it is, it may be any request's. TileRT has one slot; ours may
have several, and a request is in one of them at most.

A *writer* is an accepted connection that has not said done and is not closed. A *tombstone* marks a rid that
was released and not expected again. A slot is *abandoned* if it has no writers, `request_timeout` after its
start, or (**ours**) after {UNCLAIMED_GRACE_S:g} s if one of its ranks has failed or there is only one. A rank
that has *failed* (**ours**) fails its request at once for the consumer that waits.
"""

_HTTP = """\
## Extensions of the HTTP APIs

A router or node of TileRT neither sends nor reads these. All of them are **ours**.
"""

_KINDS: tuple[tuple[type[msgspec.Struct], str, int], ...] = (
    (codec.Hello, "decode", codec.MAX_HELLO),
    (codec.Challenge, "prefill", codec.MAX_SMALL),
    (codec.Announce, "prefill", codec.MAX_FRAME),
    (codec.Accept, "decode", codec.MAX_SMALL),
    (codec.Reject, "decode", codec.MAX_SMALL),
    (codec.Done, "prefill", codec.MAX_SMALL),
)

_BASES = "address, below 2^64, of this plane in each shard; one number if there is one shard. 0 in a hello with a nonce"
_ELSEWHERE = "where to write instead; only for an announce with `any_slot`"
_AUTH = "nonce and proof of the shared secret"

# Field -> meaning. The second table holds the fields that protocol 2 does not have.
_MEANING: dict[str, dict[str, str]] = {
    "Hello": {
        "magic": f"`{codec.MAGIC}`",
        "protocol_version": f"{codec.PROTOCOL_VERSION}; absent means 1",
        "layout_version": "see layout.md; must equal the sender's",
        "transport": "`nixl` or `mooncake`; `zmq` is ours. Must equal the sender's",
        "max_seq_len": "tokens that a slot has room for; the sender needs it for its strides",
        "busy": "a new request would be refused at this moment. Advice only",
        "senders": "how many ranks make a request complete; 0 means 1",
        "kv_base": _BASES,
        "pe_base": _BASES,
        "ki_base": _BASES,
        "nshards": "absent means one",
        "session_id": "mooncake: `host:port`",
        "nixl_meta": "nixl: the agent's metadata, base64",
        "nixl_dev": "nixl: device id of the memory",
    },
    "Challenge": {},
    "Announce": {
        "rid": "the request",
        "rank": "which of the senders",
        "seq_len": "prompt tokens whose KV is sent",
        "last_prompt_token": "id of the last of them, which decode feeds again",
        "sampling": "copy of `kv_transfer_params.sampling`; not used",
        "admission_window_s": "how long this sender will try again, seconds",
        "kv_scales": "one per layer; only 1.0 is taken here",
        "prompt_token_ids": "rank 0, if the request has a repetition penalty; one per prompt token",
        "first_token_id": "reserved; no connector sends it",
    },
    "Accept": {
        "accepted": "true; a reply has to have it",
        "rid": "as announced; the sender compares",
        "rank": "as announced; the sender compares",
        "generation": "of the slot's use; never repeats",
    },
    "Reject": {
        "accepted": "false; a reply has to have it",
        "error": "see Rejects",
        "rid": "",
        "rank": "",
        "detail": "for people",
        "busy_rid": "who has the slot",
        "busy_state": "the slot's state",
        "max_seq_len": "",
    },
    "Done": {
        "done": "false or absent: the rank gave up",
        "rid": "as accepted; ours compares, TileRT does not",
        "rank": "as accepted",
        "generation": "as accepted",
    },
}
_OURS: dict[str, dict[str, str]] = {
    "Hello": {
        "zmq_endpoint": "zmq: `tcp://address:port` of the data plane",
        "takes_failures": "announces with `failed` are understood",
        "tilert_ref": "geometry, see below",
        "tilert_auth": _AUTH,
    },
    "Challenge": {"tilert_auth": _AUTH},
    "Announce": {
        "tilert_ref": "geometry; required for layouts that a model defines",
        "any_slot": "the sender writes to the addresses that accept names, if any",
        "failed": "nothing is offered: this rank's handoff will not come, and why",
        "tilert_auth": _AUTH,
    },
    "Accept": {"kv_base": _ELSEWHERE, "pe_base": _ELSEWHERE, "ki_base": _ELSEWHERE, "tilert_auth": _AUTH},
    "Reject": {"tilert_auth": _AUTH},
    "Done": {"error": "with done false: why the rank gave up", "tilert_auth": _AUTH},
    "Auth": {
        "version": "of this extension",
        "nonce": "of the end that sends it: in hello's first form and in challenge",
        "proof": "HMAC-SHA256, hex; in every other message, and in challenge",
    },
    "Geometry": {
        "version": "of this extension",
        "num_layers": "the MTP layer counted",
        "has_mtp": "",
        "has_index": "",
        "kv_bytes": "of a token of one layer",
        "pe_bytes": "of a token of one layer",
        "nixl_version": "named in errors; not compared",
        "checkpoint": "digest, see connector/fingerprint.py; compared if both ends name one",
    },
}

TILERT_DECODE_FIELDS = frozenset(
    (
        "rid",
        "first_token_id",
        "max_tokens",
        "sampling",
        "timeout_s",
        "stream",
        "grammar_spec",
        "enable_thinking",
        "top_logprobs",
    )
)
HTTP_EXTENSIONS = (
    ("POST /pd/decode", "queue", "take the request behind the current one, if a receive slot is free, instead of 429"),
    (
        "POST /pd/decode",
        "announce_timeout_s",
        "502 `kv_transfer_failed` when no prefill node has offered the KV for so long",
    ),
    ("/pd/decode, stream", '`{"queued": true}`', "a line every 2 s until the request has its turn"),
    ("/pd/decode, stream", "`status` of an error line", "the status that a refusal after the queue would have had"),
    ("/pd/decode", "`timing_ms.queue`", "ms from the KV's arrival to the request's turn"),
    (
        "/pd/decode",
        "`timing_ms.first_step`",
        "ms from the KV's last byte, or from what came later of the request and its turn, to the first decode step",
    ),
    ("GET /capabilities", "receive_slots", "requests at a time, queued ones counted"),
    ("GET /capabilities", "max_seq_len", "of the engine: prompt and answer together"),
    ("GET /decode_status", "queued", "rids behind the current one"),
    ("GET /health", "engine, receiver", "their states; 503 if a request could not be served"),
    ("vLLM's reply", "`kv_transfer_params.tilert_error`", "why the plugin refused the handoff: the router fails by it"),
)


def render() -> str:
    """The whole page."""
    sections = [
        _INTRO,
        _table(("message", "sent by", "limit, bytes"), [(_name(kind), by, f"{limit:,}") for kind, by, limit in _KINDS]),
        "## Messages\n",
        *(_message(kind) for kind, _, _ in _KINDS),
        "## Extension objects\n",
        _message(codec.Auth, "tilert_auth"),
        _message(Geometry, "tilert_ref"),
        _REASONS,
        _table(("error", "class", "comes with", "when", "whose"), map(_reason, REASONS)),
        _MACHINE,
        _table(("row", "event", "state", "guard", "actions", "next state", "also", "whose"), map(_row, ROWS)),
        _TIMES,
        _table(("what", "ours, seconds", "TileRT"), _DEADLINES),
        _HTTP,
        _table(("where", "what", "meaning"), HTTP_EXTENSIONS),
    ]
    return "\n".join(sections)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _name(kind: type[msgspec.Struct]) -> str:
    return kind.__name__.lower()


def _message(kind: type[msgspec.Struct], name: str | None = None) -> str:
    fields = types.type_info(kind).fields
    if extra := {*_MEANING.get(kind.__name__, {}), *_OURS.get(kind.__name__, {})} - {field.name for field in fields}:
        raise KeyError(f"{kind.__name__} has no fields {sorted(extra)}")
    about = " ".join(inspect.cleandoc(kind.__doc__).split("\n\n")[0].split())
    rows = [(f"`{field.name}`", _type(field.type), _needed(field), *_about(kind, field.name)) for field in fields]
    return f"### {name or _name(kind)}\n\n{about}\n\n" + _table(
        ("field", "type", "if absent", "meaning", "whose"), rows
    )


def _about(kind: type[msgspec.Struct], field: str) -> tuple[str, str]:
    theirs, ours = (table.get(kind.__name__, {}) for table in (_MEANING, _OURS))
    if (field in theirs) == (field in ours):
        raise KeyError(f"{kind.__name__}.{field} needs a meaning, in one of the two tables")
    return (theirs[field], "TileRT") if field in theirs else (ours[field], "**ours**")


def _needed(field: types.Field) -> str:
    if field.required:
        return "not legal"
    return "" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"


def _type(kind: types.Type) -> str:
    match kind:
        case types.UnionType(kinds):
            return " or ".join(_type(inner) for inner in kinds if not isinstance(inner, types.NoneType))
        case types.IntType(gt=None, ge=low, le=high, lt=below):
            top = high if high is not None else None if below is None else below - 1
            return "int" if low is top is None else f"int {_power(low)}..{'' if top is None else _power(top)}"
        case types.FloatType(ge=low, le=high):
            return "float" if low is high is None else f"float {low:g}..{high:g}"
        case types.StrType(min_length=low, max_length=high, pattern=pattern):
            limit = f" `{pattern}`" if pattern else f" of {low or 0}..{high:,} characters" if high else ""
            return f"str{limit}"
        case types.ListType(item_type=item, max_length=most):
            return f"list of {_type(item)}" + (f", {most:,} at most" if most else "")
        case types.BoolType():
            return "bool"
        case types.DictType():
            return f"object, nested {codec.MAX_DEPTH} deep at most"
        case types.StructType(cls=struct):
            return "`tilert_auth`" if struct is codec.Auth else "`tilert_ref`"
    raise TypeError(f"no name for {kind!r}")


def _power(number: int) -> str:
    """2^63-1 rather than its nineteen digits."""
    sign, size = ("-", -number) if number < 0 else ("", number)
    exponent = (size + 1).bit_length() - 1
    if exponent > 15 and size + 1 == 2**exponent:
        return f"{sign}2^{exponent}-1"
    exponent = size.bit_length() - 1
    return f"{sign}2^{exponent}" if exponent > 15 and size == 2**exponent else str(number)


def _reason(reason: Reason) -> tuple[str, ...]:
    kind = "transient" if reason.error in codec.TRANSIENT_REASONS else "permanent"
    extras = ", ".join(f"`{extra}`" for extra in reason.extras)
    return f"`{reason.error}`", kind, extras, reason.when, _whose(reason.source)


def _row(row: Row) -> tuple[str, ...]:
    states = "any" if row.states == ANY else ", ".join(row.states)
    return (
        row.number,
        row.event.__name__,
        states,
        row.guard,
        ", ".join(row.actions) or "none",
        row.then,
        row.effect,
        _whose(row.source),
    )


def _whose(source: str) -> str:
    return f"**{source}**" if source == OURS else source


if __name__ == "__main__":
    print(render(), end="")
