"""Layout: records, offsets and write plans, against protocol.md's formulas written out a second time."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilert_ref.connector.layout import (
    BF16,
    FP8_DS_MLA,
    INDEX_PAGE,
    INDEX_PAGE_BYTES,
    PLANES,
    BufferLayout,
    Copy,
    LayoutError,
    Profile,
    Record,
    bf16_row,
    index_code_offset,
    page_count,
    plane_views,
    write_plan,
)

SMALL_ROW = bf16_row(latent=3, rope=2)
RECORDS = [BF16, FP8_DS_MLA, SMALL_ROW, INDEX_PAGE]
SHARD_GAP = 2**40  # distance of the shards' fake addresses

each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.name}-{record.nbytes}")


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@each_record
def test_fields_tile_the_record(record: Record) -> None:
    ends = [0, *(field.end for field in record.fields)]
    assert [field.offset for field in record.fields] == ends[:-1]
    assert all(field.offset % field.dtype.itemsize == 0 for field in record.fields)


@each_record
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_unpack_then_pack_keeps_every_byte(record: Record, n: int, seed: int) -> None:
    rows = random_bytes(n, record.nbytes, seed=seed)  # any bytes: NaNs and infinities too
    assert torch.equal(record.pack(record.unpack(rows)), rows)


@each_record
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_diff_names_the_field_of_a_changed_byte(record: Record, data: st.DataObject) -> None:
    rows = random_bytes(3, record.nbytes, seed=1)
    byte = data.draw(st.integers(0, record.nbytes - 1))
    changed = rows.clone()
    changed[1, byte] ^= 0xFF
    want = {f.name: int(f.offset <= byte < f.end) for f in record.fields}
    assert record.diff(rows, changed) == want
    assert record.diff(rows, rows) == dict.fromkeys(want, 0)


def test_pack_refuses_a_wrong_dtype_and_a_missing_field() -> None:
    values = BF16.unpack(random_bytes(2, BF16.row_bytes, seed=0))
    with pytest.raises(LayoutError, match=r"bf16\.rope must be torch\.bfloat16"):
        BF16.pack(values | {"rope": values["rope"].float()})
    with pytest.raises(LayoutError, match="packs the fields"):
        BF16.pack({"latent": values["latent"]})


@pytest.mark.parametrize("tiled", [False, True])
def test_index_code_order_is_a_permutation(tiled: bool) -> None:
    offsets = {index_code_offset(token, dim, tiled) for token in range(64) for dim in range(128)}
    assert offsets == set(range(8192))


# What protocol.md 8.2 and 8.3 say, independent of the code under test.


def spec_offset(layout: BufferLayout, plane: str, layer: int, index: int) -> tuple[int, int]:
    n, m = layout.nshards, layout.max_seq_len
    kvb, peb = layout.row_format.kv_bytes, layout.row_format.pe_bytes
    slots, j = -(-layout.profile.num_layers // n), layer // n
    offsets = {
        "kv": j * m * kvb + index * kvb,
        "pe": slots * m * kvb + j * m * peb + index * peb,
        "ki": slots * m * (kvb + peb) + j * -(-m // 64) * 8448 + index * 8448,
    }
    return layer % n, offsets[plane]


def planes_of(layout: BufferLayout) -> tuple[str, ...]:
    return PLANES if layout.profile.has_index else PLANES[:2]


@st.composite
def layouts(draw: st.DrawFn) -> BufferLayout:
    model = Profile("model", draw(st.integers(1, 5)), draw(st.booleans()), draw(st.booleans()), 2000)
    row = draw(st.sampled_from([BF16, FP8_DS_MLA, SMALL_ROW]))
    return BufferLayout(model, row, draw(st.integers(1, 140)), draw(st.integers(1, 4)))


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), data=st.data())
def test_offset_follows_the_specification(layout: BufferLayout, data: st.DataObject) -> None:
    plane = data.draw(st.sampled_from(planes_of(layout)))
    layer = data.draw(st.integers(0, layout.profile.num_layers - 1))
    index = data.draw(st.integers(0, layout.units(plane, layout.max_seq_len) - 1))
    assert layout.offset(plane, layer, index) == spec_offset(layout, plane, layer, index)


@settings(max_examples=30, deadline=None)
@given(layout=layouts())
def test_every_unit_has_its_own_bytes_inside_its_shard(layout: BufferLayout) -> None:
    owned = torch.zeros(layout.nshards, layout.shard_bytes, dtype=torch.uint8)
    units = 0
    for plane in planes_of(layout):
        size = layout.unit_bytes(plane)
        for layer in range(layout.profile.num_layers):
            for index in range(layout.units(plane, layout.max_seq_len)):
                shard, start = layout.offset(plane, layer, index)
                owned[shard, start : start + size] += 1
                units += size
    assert int(owned.max()) == 1
    assert int(owned.sum()) == units  # nothing fell off the end of a shard
    if layout.profile.num_layers % layout.nshards == 0:
        assert units == layout.total_bytes


class Memory:
    """Shards of a buffer at made-up addresses, and what a one-sided write does with them."""

    def __init__(self, layout: BufferLayout, base: int) -> None:
        self.layout = layout
        self.shards = torch.zeros(layout.nshards, layout.shard_bytes, dtype=torch.uint8)
        self.addresses = [base + SHARD_GAP * shard for shard in range(layout.nshards)]

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        shard, start = divmod(address - self.addresses[0], SHARD_GAP)
        assert 0 <= shard < self.layout.nshards and start + nbytes <= self.layout.shard_bytes, "outside the buffer"
        return self.shards[shard, start : start + nbytes]


def execute(copies: list[Copy], src: Memory, dst: Memory) -> None:
    for copy in copies:
        dst.at(copy.dst, copy.nbytes).copy_(src.at(copy.src, copy.nbytes))


def check_transfer(src_layout: BufferLayout, dst_layout: BufferLayout, seq_len: int, batches: list[list[int]]) -> None:
    """Fills staging, runs one plan per batch of layers, and compares every byte of the destination."""
    src, dst = Memory(src_layout, base=7 * 2**20), Memory(dst_layout, base=2**44)
    src.shards.copy_(random_bytes(*src.shards.shape, seed=seq_len))
    expected = torch.zeros_like(dst.shards)
    for layer in (layer for batch in batches for layer in batch):
        for plane in planes_of(src_layout):
            count = page_count(seq_len) if plane == "ki" else seq_len
            for index in range(count):
                size = {"kv": src_layout.row_format.kv_bytes, "pe": src_layout.row_format.pe_bytes, "ki": 8448}[plane]
                (s, a), (d, b) = (spec_offset(side, plane, layer, index) for side in (src_layout, dst_layout))
                expected[d, b : b + size] = src.shards[s, a : a + size]

    plans = [
        write_plan(src_layout, src.addresses, dst_layout, dst_layout.bases_at(dst.addresses), seq_len, batch)
        for batch in batches
    ]
    for plan, batch in zip(plans, batches, strict=True):
        assert [(c.layer, c.plane) for c in plan] == [(lay, p) for lay in sorted(batch) for p in planes_of(src_layout)]
        execute(plan, src, dst)
    assert torch.equal(dst.shards, expected)
    assert_disjoint([copy for plan in plans for copy in plan])


def assert_disjoint(copies: list[Copy]) -> None:
    for starts in ([(c.src, c.nbytes) for c in copies], [(c.dst, c.nbytes) for c in copies]):
        ordered = sorted(starts)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered))


@settings(max_examples=60, deadline=None)
@given(src=layouts(), data=st.data())
def test_write_plan_moves_exactly_the_prompt(src: BufferLayout, data: st.DataObject) -> None:
    dst = replace(src, max_seq_len=data.draw(st.integers(1, 140)), nshards=data.draw(st.integers(1, 4)))
    seq_len = data.draw(st.integers(1, min(src.max_seq_len, dst.max_seq_len)))
    layers = data.draw(st.permutations(range(src.profile.num_layers)))
    cut = data.draw(st.integers(0, len(layers)))
    check_transfer(src, dst, seq_len, [list(layers[:cut]), list(layers[cut:])])


@pytest.mark.parametrize("seq_len", range(1, 131))
def test_every_residue_of_seq_len(seq_len: int) -> None:
    src = BufferLayout(Profile("model", 3, True, True, 2000), SMALL_ROW, 192, nshards=2)
    check_transfer(src, replace(src, max_seq_len=130, nshards=1), seq_len, [[0, 1, 2]])


@settings(max_examples=30, deadline=None)
@given(layout=layouts(), data=st.data())
def test_plane_views_are_the_bytes_at_the_offsets(layout: BufferLayout, data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, layout.profile.num_layers - 1))
    seq_len = data.draw(st.integers(1, layout.max_seq_len))
    buffer = random_bytes(layout.shard_bytes, seed=3)
    views = dict(zip(PLANES, plane_views(layout, buffer, layer, seq_len), strict=True))
    assert (views["ki"] is not None) == layout.profile.has_index
    for plane in planes_of(layout):
        last = layout.units(plane, seq_len) - 1
        _, start = spec_offset(layout, plane, layer, last)
        assert views[plane].shape == (last + 1, layout.unit_bytes(plane))
        assert views[plane][last].data_ptr() == buffer[start:].data_ptr()
    fields = layout.row_format.unpack_planes(views["kv"], views["pe"])
    rows = torch.cat([views["kv"], views["pe"]], dim=1)
    assert torch.equal(layout.row_format.pack(fields), rows)


def test_a_plan_refuses_what_does_not_fit() -> None:
    src = BufferLayout(Profile("model", 2, True, True, 2000), FP8_DS_MLA, 100)
    dst = replace(src, max_seq_len=80)
    bases = dst.bases_at([2**40])

    def plan(seq_len: int = 80, layers: tuple[int, ...] = (0, 1), to: BufferLayout = dst) -> list[Copy]:
        return write_plan(src, [2**20], to, bases, seq_len, layers)

    assert len(plan()) == 6
    for wrong, message in (
        ({"seq_len": 81}, "seq_len 81 does not fit a buffer for 1..80"),
        ({"seq_len": 101, "to": replace(dst, max_seq_len=200)}, "seq_len 101 does not fit a buffer for 1..100"),
        ({"seq_len": 0}, "seq_len 0"),
        ({"layers": (0, 2)}, "layer 2 of a model with layers 0..1"),
        ({"layers": (1, 1)}, "listed twice"),
        ({"to": replace(dst, row_format=BF16)}, "differ in row_format"),
        ({"to": replace(dst, nshards=2)}, "1 kv addresses for 2 shards"),
        ({"to": replace(dst, tiled=True)}, "differ in tiled"),
    ):
        with pytest.raises(LayoutError, match=message):
            plan(**wrong)


def test_a_dense_model_sends_no_index_pages() -> None:
    dense = BufferLayout(Profile("model", 2, False, False, 2000), BF16, 64)
    assert dense.total_bytes == 2 * 64 * 1152
    assert dense.plane_bases["ki"] == dense.total_bytes
    copies = write_plan(dense, [4096], dense, dense.bases_at([8192]), 64, [0, 1])
    assert [copy.plane for copy in copies] == ["kv", "pe", "kv", "pe"]
    assert INDEX_PAGE_BYTES not in {copy.nbytes for copy in copies}
