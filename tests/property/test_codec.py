"""Codec: any bytes give a ProtocolError or a message, and what we encode is what we decode."""

import functools
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilert_ref.connector.codec import (
    MAX_FRAME,
    Accept,
    Announce,
    Auth,
    Challenge,
    Done,
    FrameDecoder,
    Hello,
    Message,
    ProtocolError,
    Reject,
    decode_announce,
    decode_challenge,
    decode_done,
    decode_hello,
    decode_reply,
    encode,
)
from tilert_ref.connector.layout import Geometry

DECODERS: dict[str, tuple[Callable[[bytes], Message], tuple[type, ...]]] = {
    "hello": (decode_hello, (Hello,)),
    "challenge": (decode_challenge, (Challenge,)),
    "announce": (decode_announce, (Announce,)),
    "reply": (decode_reply, (Accept, Reject)),
    "done": (decode_done, (Done,)),
}
each_decoder = pytest.mark.parametrize("kind", DECODERS)


def decode_or_error(kind: str, payload: bytes) -> Message | None:
    """The message, None for a ProtocolError; any other exception, type or empty text fails the test."""
    decoder, types = DECODERS[kind]
    try:
        message = decoder(payload)
    except ProtocolError as error:
        assert str(error).startswith("not a legal ")
        return None
    assert isinstance(message, types)
    return message


text = st.text(max_size=8)
rids = st.text(min_size=1, max_size=12) | st.just("x" * 256)
int32 = st.integers(0, 2**31 - 1)
addresses = st.integers(1, 2**64 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
# Objects that JSON gives back as they are: numbers in `sampling` keep their type.
samplings = st.none() | st.dictionaries(text, st.integers(-(2**53), 2**53) | text | st.booleans(), max_size=4)
geometries = st.builds(
    Geometry,
    num_layers=int32,
    has_mtp=st.booleans(),
    has_index=st.booleans(),
    kv_bytes=int32,
    pe_bytes=int32,
    nixl_version=st.none() | text,
    checkpoint=st.none() | text,
)


hex64 = st.binary(min_size=32, max_size=32).map(bytes.hex)
auths = st.builds(Auth, nonce=st.none() | hex64, proof=st.none() | hex64)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    nshards = draw(st.none() | st.integers(1, 8))
    base = addresses if nshards is None else st.lists(addresses, min_size=nshards, max_size=nshards)
    return Hello(
        magic=draw(text),
        protocol_version=draw(st.integers(0, 5)),
        layout_version=draw(st.integers(0, 3000)),
        transport=draw(text),
        max_seq_len=draw(st.integers(1, 2**31 - 1)),
        busy=draw(st.booleans()),
        senders=draw(st.integers(0, 8)),
        kv_base=draw(base),
        pe_base=draw(base),
        ki_base=draw(base),
        nshards=nshards,
        session_id=draw(st.none() | text),
        nixl_meta=draw(st.none() | text),
        nixl_dev=draw(st.none() | int32),
        zmq_endpoint=draw(st.none() | text),
        tilert_ref=draw(st.none() | geometries),
        tilert_auth=draw(st.none() | auths),
    )


MESSAGES: dict[str, st.SearchStrategy[Any]] = {
    "hello": hellos(),
    "challenge": st.builds(Challenge, tilert_auth=auths),
    "announce": st.builds(
        Announce,
        rid=rids,
        rank=int32,
        seq_len=st.integers(-(2**63), 2**63 - 1),
        last_prompt_token=int32,
        sampling=samplings,
        admission_window_s=st.floats(0, 1e6),
        kv_scales=st.none() | st.lists(st.floats(-1e3, 1e3), max_size=4),
        prompt_token_ids=st.none() | st.lists(int32, max_size=5),
        first_token_id=st.none() | int32,
        tilert_ref=st.none() | geometries,
        tilert_auth=st.none() | auths,
    ),
    "reply": st.builds(Accept, rid=rids, rank=int32, generation=st.integers(0, 2**63 - 1))
    | st.builds(Reject, error=text, rid=st.none() | rids, rank=st.none() | int32, busy_state=st.none() | text),
    "done": st.builds(Done, done=st.booleans(), rid=rids, rank=int32, generation=st.integers(0, 2**63 - 1)),
}


def payload_of(message: Message) -> bytes:
    (payload,) = FrameDecoder().feed(encode(message))
    return payload


@each_decoder
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_round_trip(kind: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    assert decode_or_error(kind, payload_of(message)) == message


@each_decoder
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_unknown_fields_are_ignored(kind: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    fields = json.loads(payload_of(message)) | {"future_field": data.draw(json_values)}
    assert decode_or_error(kind, json.dumps(fields).encode()) == message


@each_decoder
@settings(max_examples=150, deadline=None)
@given(payload=st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_and_any_json_decode_cleanly(kind: str, payload: bytes) -> None:
    decode_or_error(kind, payload)


@each_decoder
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_messages_decode_cleanly(kind: str, data: st.DataObject) -> None:
    """One field replaced by any JSON value, or one byte by any byte."""
    payload = payload_of(data.draw(MESSAGES[kind]))
    if data.draw(st.booleans()):
        fields = json.loads(payload)
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_values)
        payload = json.dumps(fields).encode()
    else:
        damaged = bytearray(payload)
        damaged[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        payload = bytes(damaged)
    decode_or_error(kind, payload)


@each_decoder
@pytest.mark.parametrize("opening", [b"[", b'{"sampling":', b'{"accepted":true,"x":['])
def test_deep_nesting_is_a_protocol_error(kind: str, opening: bytes) -> None:
    assert decode_or_error(kind, opening * 50_000) is None


BASE = {"layout_version": 10, "transport": "nixl", "max_seq_len": 128, "kv_base": 1, "pe_base": 2, "ki_base": 3}
HELLO = {"magic": "tilert-pd", "protocol_version": 2} | BASE
ANNOUNCE = {"rid": "a", "rank": 0, "seq_len": 5}
DEEP = {"a": functools.reduce(lambda inner, _: [inner], range(16), 1)}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("hello", HELLO | {"max_seq_len": 0}, r">= 1.*max_seq_len"),
        ("hello", HELLO | {"kv_base": 0}, "kv_base holds 0"),
        ("hello", HELLO | {"ki_base": 2**64}, "not a 64-bit address"),
        ("hello", HELLO | {"pe_base": [1, 2]}, "pe_base has 2 addresses for 1 shards"),
        ("hello", HELLO | {"nshards": 2}, "kv_base has 1 addresses for 2 shards"),
        ("hello", HELLO | {"kv_base": -1}, "kv_base holds -1"),
        ("hello", {"magic": "tilert-pd"}, "missing required field"),
        ("announce", {"rank": 0}, "missing required field `rid`"),
        ("announce", {"rid": "a"}, "missing required field `rank`"),
        ("announce", ANNOUNCE | {"rid": ""}, "length >= 1"),
        ("announce", ANNOUNCE | {"rid": "x" * 257}, "length <= 256"),
        ("announce", ANNOUNCE | {"rank": -1}, "rank"),
        ("announce", ANNOUNCE | {"rank": "0"}, "rank"),
        ("announce", ANNOUNCE | {"admission_window_s": -0.1}, "admission_window_s"),
        ("announce", ANNOUNCE | {"sampling": DEEP}, "sampling is nested more than 16 deep"),
        ("announce", ANNOUNCE | {"kv_scales": [1.0] * 4097}, "length <= 4096"),
        ("hello", HELLO | {"layout_version": 2**63}, "layout_version"),
        ("hello", HELLO | {"tilert_auth": {"version": 2}}, "version"),
        ("hello", HELLO | {"kv_base": 0, "tilert_auth": {"proof": "0" * 64}}, "kv_base holds 0"),
        ("challenge", {"tilert_auth": {"nonce": "0" * 63}}, "nonce"),
        ("challenge", {"tilert_auth": {"nonce": "G" * 64}}, "nonce"),
        ("reply", {"accepted": True, "rid": "a", "rank": 0}, "missing required field `generation`"),
        ("reply", {"accepted": True, "rid": "a", "rank": 0, "generation": "1"}, "generation"),
        ("reply", {"accepted": True, "rid": "a", "rank": 0, "generation": 1.5}, "generation"),
        ("reply", {"error": "busy"}, "missing required field `accepted`"),
        ("done", {"done": True, "rid": "a", "rank": 0}, "missing required field `generation`"),
    ],
)
def test_wrong_values_are_named(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        DECODERS[kind][0](json.dumps(fields).encode())


@settings(max_examples=80, deadline=None)
@given(payloads=st.lists(st.binary(max_size=40), max_size=6), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_frames_survive_any_chunking(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack("!I", len(payload)) + payload for payload in payloads)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder()
    seen = []
    for start, stop in pairwise(edges):
        seen += decoder.feed(stream[start:stop])
    assert seen == payloads
    decoder.finish()


@given(payload=st.binary(max_size=20), missing=st.integers(1, 24))
def test_a_stream_that_ends_inside_a_frame_is_an_error(payload: bytes, missing: int) -> None:
    frame = struct.pack("!I", len(payload)) + payload
    decoder = FrameDecoder()
    start = frame[: max(1, len(frame) - missing)]
    assert decoder.feed(start) == []
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        decoder.finish()


def test_the_limit_is_known_from_the_header() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(struct.pack("!I", MAX_FRAME)) == []  # equal to the limit is allowed
    (payload,) = decoder.feed(bytes(MAX_FRAME))
    assert len(payload) == MAX_FRAME
    with pytest.raises(ProtocolError, match="16777217 bytes; at most 16777216"):
        decoder.feed(struct.pack("!I", MAX_FRAME + 1))
    with pytest.raises(ProtocolError):
        decoder.feed(b"more")  # and it stays that way


@settings(max_examples=60, deadline=None)
@given(payloads=st.lists(st.binary(max_size=60), max_size=4), limit=st.integers(0, 60), cut=st.integers(0, 250))
def test_no_frame_over_the_limit_gets_through(payloads: list[bytes], limit: int, cut: int) -> None:
    stream = b"".join(struct.pack("!I", len(payload)) + payload for payload in payloads)
    decoder, seen = FrameDecoder(limit), []
    try:
        seen += decoder.feed(stream[:cut])
        seen += decoder.feed(stream[cut:])
    except ProtocolError as error:
        assert f"at most {limit} are legal" in str(error) and max(map(len, payloads)) > limit
    else:
        assert seen == payloads and all(len(payload) <= limit for payload in payloads)


def test_a_message_larger_than_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="Announce needs"):
        encode(Announce(rid="a", rank=0, seq_len=1, sampling={"x": "y" * MAX_FRAME}))
