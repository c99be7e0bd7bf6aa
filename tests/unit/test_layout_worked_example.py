"""protocol.md section 11 to the byte, the sizes of 8.5, the versions of 8.6, the names, and the generated page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilert_ref.connector.codec import (
    Accept,
    Announce,
    Done,
    FrameDecoder,
    HandoffRefused,
    Hello,
    Message,
    Reject,
    check_geometry,
    check_hello,
    decode_announce,
    decode_done,
    decode_hello,
    decode_reply,
    encode,
    make_hello,
)
from tilert_ref.connector.layout import (
    BF16,
    FP8_DS_MLA,
    PLANES,
    PROFILES,
    BufferLayout,
    LayoutError,
    PlaneBases,
    Profile,
    RowFormat,
    bf16_row,
    model_profile,
    page_count,
    profile,
    row_format,
    row_format_of_width,
    write_plan,
)
from tilert_ref.connector.layout_docs import render

B = 140000000000000
EXAMPLE = BufferLayout(Profile("example", 2, False, True, 10), FP8_DS_MLA, max_seq_len=128)
LENGTHS = {"kv": 36_960, "pe": 8_960, "ki": 16_896}
DESTINATIONS = [
    (0, "kv", 0),
    (0, "pe", 135_168),
    (0, "ki", 167_936),
    (1, "kv", 67_584),
    (1, "pe", 151_552),
    (1, "ki", 184_832),
]


def test_unsharded_buffer() -> None:
    assert (page_count(128), page_count(70), page_count(64), page_count(65)) == (2, 2, 1, 2)
    assert EXAMPLE.total_bytes == EXAMPLE.shard_bytes == 201_728
    assert EXAMPLE.plane_bases == {"kv": 0, "pe": 135_168, "ki": 167_936}
    assert EXAMPLE.bases_at([B]) == PlaneBases([B], [B + 135_168], [B + 167_936])


def test_write_plan() -> None:
    source = 2**40
    copies = write_plan(EXAMPLE, [source], EXAMPLE, EXAMPLE.bases_at([B]), 70, [1, 0])
    got = [(c.layer, c.plane, c.src - source, c.dst - B, c.nbytes) for c in copies]
    assert got == [(layer, plane, at, at, LENGTHS[plane]) for layer, plane, at in DESTINATIONS]


def test_two_destination_shards() -> None:
    sharded = replace(EXAMPLE, nshards=2)
    b0, b1 = B, 2 * B
    assert sharded.shard_bytes == 100_864
    bases = sharded.bases_at([b0, b1])
    assert bases == PlaneBases([b0, b1], [b0 + 67_584, b1 + 67_584], [b0 + 83_968, b1 + 83_968])
    copies = write_plan(EXAMPLE, [2**40], sharded, bases, 70, [0, 1])
    assert [c.dst for c in copies] == [b + at for b in (b0, b1) for at in (0, 67_584, 83_968)]


def test_two_senders() -> None:
    staging = replace(EXAMPLE, max_seq_len=256, nshards=2)
    for rank in (0, 1):
        own = 2**40
        bases = [own if shard == rank else 0 for shard in range(2)]
        copies = write_plan(staging, bases, EXAMPLE, EXAMPLE.bases_at([B]), 70, [rank])
        assert [c.src - own for c in copies] == [0, 135_168, 167_936]
        assert [(c.layer, c.plane, c.dst - B) for c in copies] == DESTINATIONS[3 * rank : 3 * rank + 3]


def test_token_69_of_layer_1() -> None:
    assert EXAMPLE.offset("kv", 1, 69) == (0, 104_016)
    assert 104_016 + FP8_DS_MLA["latent_scale"].offset == 104_528
    assert EXAMPLE.offset("pe", 1, 69) == (0, 160_384)
    _, page = EXAMPLE.offset("ki", 1, 1)
    assert (page + 5 * 128, page + 8192 + 4 * 5) == (193_920, 201_492)


def test_bf16_sizes() -> None:
    layout = replace(EXAMPLE, row_format=BF16)
    planes = [layout.layer_slots * layout.layer_bytes(plane) for plane in PLANES]
    assert planes == [262_144, 32_768, 33_792]
    assert (layout.total_bytes, layout.layout_version) == (328_704, 50)
    assert [layout.layer_bytes(plane, 70) for plane in PLANES] == [71_680, 8_960, 16_896]


def test_published_sizes() -> None:
    glm5 = BufferLayout(profile("glm5"), FP8_DS_MLA, 202_752)
    assert glm5.total_bytes == 12_621_717_504
    assert replace(glm5, nshards=8).shard_bytes == 1_597_685_760
    assert replace(glm5, profile=profile("dsv32")).total_bytes == 9_745_883_136


def json_of(message: Message) -> dict[str, object]:
    (payload,) = FrameDecoder().feed(encode(message))
    return json.loads(payload)


def test_frames_of_one_transfer() -> None:
    """The published frames, both ways: decoded they give our structs, encoded our structs give them."""
    hello_json = (
        '{"magic":"tilert-pd","protocol_version":2,"layout_version":10,"transport":"mooncake","max_seq_len":128,'
        '"busy":false,"session_id":"10.0.0.2:15001","senders":1,"kv_base":140000000000000,"pe_base":140000000135168,'
        '"ki_base":140000000167936}'
    )
    announce_json = (
        '{"rid":"00ff","rank":0,"seq_len":70,"last_prompt_token":154829,"sampling":null,"admission_window_s":3.0}'
    )
    accept_json = '{"accepted":true,"rid":"00ff","rank":0,"generation":1}'
    done_json = '{"done":true,"rid":"00ff","rank":0,"generation":1}'

    meta = {"session_id": "10.0.0.2:15001"}
    hello = make_hello(EXAMPLE, [B], transport="mooncake", senders=1, meta=meta)
    announce = Announce(rid="00ff", rank=0, seq_len=70, last_prompt_token=154829, admission_window_s=3.0)
    accept = Accept(rid="00ff", rank=0, generation=1)
    done = Done(done=True, rid="00ff", rank=0, generation=1)

    ours = json_of(hello)
    assert ours.pop("tilert_ref") is not None
    assert ours == json.loads(hello_json)
    assert [json_of(m) for m in (announce, accept, done)] == [
        json.loads(text) for text in (announce_json, accept_json, done_json)
    ]
    published = decode_hello(hello_json.encode())
    assert published.meta() == meta
    assert published.plane_bases() == EXAMPLE.bases_at([B])
    check_hello(published, EXAMPLE, senders=1, transport="mooncake", seq_len=70)
    assert decode_announce(announce_json.encode()) == announce
    assert decode_reply(accept_json.encode()) == accept
    assert decode_done(done_json.encode()) == done


def test_sharded_hello() -> None:
    hello = make_hello(replace(EXAMPLE, nshards=2), [B, 2 * B], transport="nixl", senders=2, meta={"nixl_dev": 0})
    fields = json_of(hello)
    assert (fields["nshards"], fields["kv_base"]) == (2, [B, 2 * B])
    assert decode_hello(json.dumps(fields).encode()).plane_bases() == PlaneBases(
        [B, 2 * B], [B + 67_584, 2 * B + 67_584], [B + 83_968, 2 * B + 83_968]
    )


def test_rejects_are_classified() -> None:
    def reply(error: str) -> Reject | Accept:
        return decode_reply(json.dumps({"accepted": False, "error": error, "busy_rid": "x", "other": []}).encode())

    transient = {error for error in ("busy", "cancelling", "duplicate_rank", "new reason") if reply(error).transient}
    assert transient == {"busy", "cancelling"}


def hello_with(**changes: object) -> Hello:
    hello = make_hello(EXAMPLE, [B], transport="nixl", senders=1)
    for name, value in changes.items():
        setattr(hello, name, value)
    return hello


ORDER = ["magic", "protocol_version", "layout_version", "senders", "transport", "max_seq_len"]
WRONG = {
    "magic": "other",
    "protocol_version": 1,
    "layout_version": 50,
    "senders": 8,
    "transport": "zmq",
    "max_seq_len": 69,
}


def test_check_hello_accepts_what_fits() -> None:
    check_hello(hello_with(), EXAMPLE, 1, "nixl", 70)
    check_hello(hello_with(senders=0, busy=True, tilert_ref=None), EXAMPLE, 1, "nixl", 128)


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_check_hello_reports_the_first_difference_in_order(first: int) -> None:
    wrong = {name: WRONG[name] for name in ORDER[first:]}
    with pytest.raises(HandoffRefused, match=ORDER[first]) as refusal:
        check_hello(hello_with(**wrong), EXAMPLE, 1, "nixl", 70)
    assert str(wrong[ORDER[first]]) in refusal.value.reason


def test_check_hello_compares_the_geometry_last() -> None:
    hello = hello_with(tilert_ref=replace(EXAMPLE, row_format=BF16).geometry())
    with pytest.raises(HandoffRefused, match="transport"):
        check_hello(hello, EXAMPLE, 1, "zmq", 70)
    with pytest.raises(HandoffRefused, match="kv_bytes 1024, we have 528"):
        check_hello(hello, EXAMPLE, 1, "nixl", 70)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (replace(EXAMPLE, profile=replace(EXAMPLE.profile, num_layers=3)), "num_layers"),
        (replace(EXAMPLE, profile=replace(EXAMPLE.profile, has_mtp=True)), "has_mtp"),
        (replace(EXAMPLE, profile=replace(EXAMPLE.profile, has_index=False)), "has_index"),
        (replace(EXAMPLE, row_format=bf16_row(256, 64)), "kv_bytes"),
        (replace(EXAMPLE, row_format=bf16_row(264, 32)), "pe_bytes"),
    ],
)
def test_geometry_is_compared(other: BufferLayout, name: str) -> None:
    with pytest.raises(HandoffRefused, match=name):
        check_geometry(other.geometry(), EXAMPLE)


def test_a_model_defined_layout_needs_the_geometry() -> None:
    own = replace(EXAMPLE, profile=model_profile(4, True, False))
    with pytest.raises(HandoffRefused, match="layout 2000 is model-defined"):
        check_geometry(None, own)
    check_geometry(own.geometry(), own)
    check_geometry(None, EXAMPLE)  # a published peer sends none


def test_checkpoints_are_compared_if_both_are_known() -> None:
    theirs = EXAMPLE.geometry(checkpoint="aaaa")
    check_geometry(theirs, EXAMPLE)
    check_geometry(theirs, EXAMPLE, checkpoint="aaaa")
    check_geometry(EXAMPLE.geometry(), EXAMPLE, checkpoint="bbbb")
    with pytest.raises(HandoffRefused, match=r"'aaaa'.*'bbbb'"):
        check_geometry(theirs, EXAMPLE, checkpoint="bbbb")


VERSIONS = {  # protocol.md 8.6: fp8 linear, bf16 linear, fp8 tiled, bf16 tiled
    "glm5": (10, 50, 110, 150),
    "dsv32": (11, 51, 111, 151),
    "glm5_2": (12, 52, 112, 152),
    "glm5_no_mtp": (1010, 1050, 1110, 1150),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_layout_versions(name: str) -> None:
    versions = tuple(
        BufferLayout(profile(name), row, 64, tiled=tiled).layout_version
        for tiled in (False, True)
        for row in (FP8_DS_MLA, BF16)
    )
    assert versions == VERSIONS[name]


def test_a_row_that_is_not_published_has_no_published_version() -> None:
    assert bf16_row(512, 64) == BF16
    layout = BufferLayout(profile("glm5"), bf16_row(256, 64), 64)
    assert layout.layout_version == 2040


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((79, True, True), "glm5"),
        ((78, False, True), "glm5_no_mtp"),
        ((61, False, True), "dsv32"),
        ((61, False, False), "model"),
        ((4, True, True), "model"),
    ],
)
def test_model_profile(numbers: tuple[int, bool, bool], name: str) -> None:
    found = model_profile(*numbers)
    assert (found.name, found.num_layers, found.has_mtp, found.has_index) == (name, *numbers)


def test_names_and_aliases() -> None:
    assert {alias: profile(alias).name for alias in ("glm-5", "glm5.3", "v32", "deepseek-v3.2")} == {
        "glm-5": "glm5",
        "glm5.3": "glm5_2",
        "v32": "dsv32",
        "deepseek-v3.2": "dsv32",
    }
    names = [name for p in PROFILES for name in (p.name, *p.aliases)]
    assert len(names) == len(set(names))
    with pytest.raises(LayoutError, match=r"unknown profile 'glm6'; legal: \['glm5'"):
        profile("glm6")


@pytest.mark.parametrize(
    ("names", "width", "row"),
    [(("fp8_ds_mla", "fp8", "fp8_e4m3"), 656, FP8_DS_MLA), (("bf16", "bfloat16", "auto"), 1152, BF16)],
)
def test_row_format_names(names: tuple[str, ...], width: int, row: RowFormat) -> None:
    assert {row_format(name).name for name in names} == {row.name}
    assert row_format_of_width(width) == row


def test_row_formats_that_are_refused() -> None:
    for name in ("fp8_rocm", "rocm_fp8"):
        with pytest.raises(LayoutError, match="not supported yet"):
            row_format(name)
    with pytest.raises(LayoutError, match="not supported yet"):
        row_format_of_width(576)
    with pytest.raises(LayoutError, match="unknown KV cache dtype 'int8'; legal:"):
        row_format("int8")
    with pytest.raises(LayoutError, match=r"rows of 512 bytes; legal: \[1152, 656\]"):
        row_format_of_width(512)


def test_the_docs_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "layout.md"
    assert page.read_text() == render(), "run: python -m tilert_ref.connector.layout > docs/layout.md"
