"""Byte layout of a handoff: cache rows, index pages, planes, shards, and the copies that move a prompt.

The tables in this file (`BF16`, `FP8_DS_MLA`, `INDEX_PAGE`, `PROFILES`) are the only copy of these numbers. Packing,
offsets, write plans, comparisons and docs/layout.md are derived from them. Print the page with
`python -m tilert_ref.connector.layout`.

Source: protocol.md sections 8 (layout, versions), 7.1 (write plan), 11 (worked example).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
import torch

from tilert_ref.model_files import InputError

PAGE_TOKENS = 64
INDEX_HEAD_DIM = 128
INDEX_TILE = 16
TILED_VERSION_OFFSET = 100
MODEL_BASE_VERSION = 2000
"""Base version of layouts that are not published: only the geometry in hello says what they are."""

Plane = Literal["kv", "pe", "ki"]
PLANES: tuple[Plane, ...] = get_args(Plane)


class LayoutError(InputError):
    """A name, size or index that the layout does not have. The text says what was got and what is legal."""


def page_count(tokens: int) -> int:
    """P(x) of protocol.md 8.2: pages of 64 tokens that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Field:
    """`count` little-endian values of `dtype`, `offset` bytes into their record."""

    name: str
    offset: int
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def view(self, records: torch.Tensor, start: int = 0) -> torch.Tensor:
        """This field of `records` (uint8 [n, bytes], first byte = byte `start` of the record): a [n, count] view."""
        return records[:, self.offset - start : self.end - start].view(self.dtype)


@dataclass(frozen=True)
class Record:
    """A fixed-size run of bytes: its fields in order, without gaps."""

    name: str
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        return self.fields[-1].end

    def __getitem__(self, name: str) -> Field:
        for entry in self.fields:
            if entry.name == name:
                return entry
        raise LayoutError(f"{self.name} has no field {name!r}; fields: {[f.name for f in self.fields]}")

    def unpack(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """uint8 [n, nbytes] -> one [n, count] view per field, in the field's dtype."""
        return {entry.name: entry.view(records) for entry in self.fields}

    def pack(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """One [n, count] tensor per field, in the field's dtype -> new uint8 [n, nbytes]."""
        if values.keys() != {entry.name for entry in self.fields}:
            raise LayoutError(f"{self.name} packs the fields {[f.name for f in self.fields]}, got {list(values)}")
        parts = [self._checked(entry, values[entry.name]) for entry in self.fields]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def diff(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, int]:
        """Number of differing bytes per field of two uint8 [n, nbytes] tensors."""
        unequal = left != right
        return {f.name: int(unequal[:, f.offset : f.end].sum()) for f in self.fields}

    def _checked(self, entry: Field, value: torch.Tensor) -> torch.Tensor:
        if value.dtype != entry.dtype or value.ndim != 2 or value.shape[1] != entry.count:
            got = f"{value.dtype} {list(value.shape)}"
            raise LayoutError(f"{self.name}.{entry.name} must be {entry.dtype} [n, {entry.count}], got {got}")
        return value


@dataclass(frozen=True)
class RowFormat(Record):
    """One token's row in a vLLM MLA cache: `kv_fields` fields for the kv plane, the rest for the pe plane."""

    kv_fields: int
    version_offset: int
    aliases: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.nbytes

    @property
    def kv_bytes(self) -> int:
        return self.fields[self.kv_fields].offset

    @property
    def pe_bytes(self) -> int:
        return self.row_bytes - self.kv_bytes

    def unpack_planes(self, kv: torch.Tensor, pe: torch.Tensor) -> dict[str, torch.Tensor]:
        """uint8 [n, kv_bytes] and [n, pe_bytes] -> one [n, count] view per field."""
        latent = {entry.name: entry.view(kv) for entry in self.fields[: self.kv_fields]}
        return latent | {entry.name: entry.view(pe, self.kv_bytes) for entry in self.fields[self.kv_fields :]}


def bf16_row(latent: int, rope: int) -> RowFormat:
    """A bf16 row of a model with this kv_lora_rank and qk_rope_head_dim. `BF16` is the published one, 512 and 64."""
    fields = (Field("latent", 0, torch.bfloat16, latent), Field("rope", 2 * latent, torch.bfloat16, rope))
    return RowFormat("bf16", fields, kv_fields=1, version_offset=40, aliases=("bf16", "bfloat16", "auto"))


BF16 = bf16_row(latent=512, rope=64)

FP8_DS_MLA = RowFormat(
    "fp8_ds_mla",
    (
        Field("latent", 0, torch.float8_e4m3fn, 512),
        Field("latent_scale", 512, torch.float32, 4),  # one per 128 values of latent
        Field("rope", 528, torch.bfloat16, 64),
    ),
    kv_fields=2,
    version_offset=0,
    aliases=("fp8_ds_mla", "fp8", "fp8_e4m3"),
)

ROW_FORMATS = (BF16, FP8_DS_MLA)

INDEX_PAGE = Record(
    "index_page",
    (
        Field("codes", 0, torch.float8_e4m3fn, PAGE_TOKENS * INDEX_HEAD_DIM),
        Field("scales", PAGE_TOKENS * INDEX_HEAD_DIM, torch.float32, PAGE_TOKENS),  # one per token
    ),
)
INDEX_PAGE_BYTES = INDEX_PAGE.nbytes

_ROCM_NAMES, _ROCM_ROW_BYTES = ("fp8_rocm", "rocm_fp8"), 576


def row_format(name: str) -> RowFormat:
    """The row format for a `--kv-cache-dtype` value (protocol.md 8.6)."""
    for candidate in ROW_FORMATS:
        if name in candidate.aliases:
            return candidate
    if name in _ROCM_NAMES:
        raise LayoutError(f"KV cache dtype {name!r} (ROCm flat fp8) is not supported yet")
    raise LayoutError(f"unknown KV cache dtype {name!r}; legal: {[a for f in ROW_FORMATS for a in f.aliases]}")


def row_format_of_width(row_bytes: int) -> RowFormat:
    """The published row format whose vLLM cache row has this many bytes."""
    for candidate in ROW_FORMATS:
        if candidate.row_bytes == row_bytes:
            return candidate
    if row_bytes == _ROCM_ROW_BYTES:
        raise LayoutError(f"cache rows of {row_bytes} bytes (ROCm flat fp8) are not supported yet")
    raise LayoutError(f"cache rows of {row_bytes} bytes; legal: {[f.row_bytes for f in ROW_FORMATS]}")


def index_code_offset(token: int, dim: int, tiled: bool = False) -> int:
    """Byte of an index page that holds value (token, dim) (protocol.md 8.3). Scales are linear in both orders."""
    if not tiled:
        return token * INDEX_HEAD_DIM + dim
    tile_row, row = divmod(token, INDEX_TILE)
    tile_column, column = divmod(dim, INDEX_TILE)
    return tile_row * INDEX_TILE * INDEX_HEAD_DIM + tile_column * INDEX_TILE**2 + row * INDEX_TILE + column


@dataclass(frozen=True)
class Profile:
    """What a family of models puts on the wire.

    num_layers counts the MTP layer, which is the last one. Without an indexer the ki plane is empty; with one every
    layer has index pages (protocol.md 8.5: a layer without its own sends a copy of the nearest lower one's).
    """

    name: str
    num_layers: int
    has_mtp: bool
    has_index: bool
    base_version: int
    aliases: tuple[str, ...] = ()


PROFILES = (
    Profile("glm5", 79, True, True, 10, ("glm_5", "glm-5")),
    Profile("glm5_no_mtp", 78, False, True, 1010),
    Profile("dsv32", 61, False, True, 11, ("deepseek_v3_2", "deepseek-v3.2", "dsv3.2", "v32")),
    Profile(
        "glm5_2", 79, True, True, 12,
        ("glm_5_2", "glm-5.2", "glm5.2", "glm52", "glm5_3", "glm_5_3", "glm-5.3", "glm5.3", "glm53"),
    ),
)  # fmt: skip


def profile(name: str) -> Profile:
    """The published profile of that name or alias (protocol.md 8.5)."""
    for candidate in PROFILES:
        if name == candidate.name or name in candidate.aliases:
            return candidate
    raise LayoutError(f"unknown profile {name!r}; legal: {[p.name for p in PROFILES]} and their aliases")


def model_profile(num_layers: int, has_mtp: bool, has_index: bool) -> Profile:
    """The profile that follows from a model's own numbers; num_layers counts the MTP layer if there is one.

    glm5 and glm5_2 have the same numbers: glm5 is meant, glm5_2 is only ever asked for by name.
    """
    for candidate in PROFILES:
        if (candidate.num_layers, candidate.has_mtp, candidate.has_index) == (num_layers, has_mtp, has_index):
            return candidate
    if num_layers < 1:
        raise LayoutError(f"a model has at least one layer, got {num_layers}")
    return Profile("model", num_layers, has_mtp, has_index, MODEL_BASE_VERSION)


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What the layout version alone does not say. Travels in hello and announce as `tilert_ref`.

    kv_bytes, pe_bytes: bytes of one token in one layer of that plane. nixl_version, checkpoint: None if not known.
    """

    version: _Count = 1
    num_layers: _Count
    has_mtp: bool
    has_index: bool
    kv_bytes: _Count
    pe_bytes: _Count
    nixl_version: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    checkpoint: Annotated[str, msgspec.Meta(max_length=256)] | None = None


@dataclass(frozen=True)
class PlaneBases:
    """Absolute addresses of the planes, one per shard."""

    kv: list[int]
    pe: list[int]
    ki: list[int]


@dataclass(frozen=True)
class BufferLayout:
    """Where every byte of a receive buffer or staging buffer lies (protocol.md 8.2, 8.3).

    Layer l lives in shard l mod nshards, as that shard's layer l div nshards. A shard is kv plane, pe plane, ki plane,
    each with room for max_seq_len tokens of every one of its layers.
    """

    profile: Profile
    row_format: RowFormat
    max_seq_len: int
    nshards: int = 1
    tiled: bool = False
    units_bytes: dict[Plane, int] = field(init=False, compare=False, repr=False)
    plane_bases: dict[Plane, int] = field(init=False, compare=False, repr=False)
    """First byte of each plane within a shard."""

    def __post_init__(self) -> None:
        if self.max_seq_len < 1 or self.nshards < 1:
            raise LayoutError(f"max_seq_len and nshards must be at least 1, got {self.max_seq_len} and {self.nshards}")
        index_page = INDEX_PAGE_BYTES if self.profile.has_index else 0
        units = {"kv": self.row_format.kv_bytes, "pe": self.row_format.pe_bytes, "ki": index_page}
        object.__setattr__(self, "units_bytes", units)  # once: a prompt of 79 layers asks a thousand times
        kv, pe = (self.layer_slots * self.layer_bytes(plane) for plane in ("kv", "pe"))
        object.__setattr__(self, "plane_bases", {"kv": 0, "pe": kv, "ki": kv + pe})

    @property
    def base_version(self) -> int:
        return self.profile.base_version if self.row_format in ROW_FORMATS else MODEL_BASE_VERSION

    @property
    def layout_version(self) -> int:
        """protocol.md 8.6."""
        return self.base_version + self.row_format.version_offset + (TILED_VERSION_OFFSET if self.tiled else 0)

    @property
    def layer_slots(self) -> int:
        """Layers that a shard has room for."""
        return -(-self.profile.num_layers // self.nshards)

    @property
    def shard_bytes(self) -> int:
        return self.plane_bases["ki"] + self.layer_slots * self.layer_bytes("ki")

    @property
    def total_bytes(self) -> int:
        return self.nshards * self.shard_bytes

    def unit_bytes(self, plane: Plane) -> int:
        """Bytes of one token (kv, pe) or one page (ki) of one layer."""
        return self.units_bytes[plane]

    def units(self, plane: Plane, seq_len: int) -> int:
        """Tokens (kv, pe) or pages (ki) that hold seq_len tokens."""
        return page_count(seq_len) if plane == "ki" else seq_len

    def layer_bytes(self, plane: Plane, seq_len: int | None = None) -> int:
        """Bytes of the first seq_len tokens of one layer in a plane; all of its room if seq_len is None."""
        return self.unit_bytes(plane) * self.units(plane, self.max_seq_len if seq_len is None else seq_len)

    def offset(self, plane: Plane, layer: int, index: int = 0) -> tuple[int, int]:
        """(shard, byte within the shard) of token `index` (kv, pe) or page `index` (ki) of a layer."""
        self.check_layer(layer)
        if not 0 <= index < self.units(plane, self.max_seq_len):
            raise LayoutError(f"{plane} index {index} of a buffer for {self.max_seq_len} tokens")
        slot, shard = divmod(layer, self.nshards)
        return shard, self.plane_bases[plane] + slot * self.layer_bytes(plane) + index * self.unit_bytes(plane)

    def bases_at(self, shard_addresses: Sequence[int]) -> PlaneBases:
        """The planes' addresses if shard i starts at shard_addresses[i]: what hello publishes."""
        if len(shard_addresses) != self.nshards:
            raise LayoutError(f"{len(shard_addresses)} addresses for {self.nshards} shards")
        kv, pe, ki = ([address + self.plane_bases[plane] for address in shard_addresses] for plane in PLANES)
        return PlaneBases(kv, pe, ki)

    def geometry(self, nixl_version: str | None = None, checkpoint: str | None = None) -> Geometry:
        return Geometry(
            num_layers=self.profile.num_layers,
            has_mtp=self.profile.has_mtp,
            has_index=self.profile.has_index,
            kv_bytes=self.row_format.kv_bytes,
            pe_bytes=self.row_format.pe_bytes,
            nixl_version=nixl_version,
            checkpoint=checkpoint,
        )

    def check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.profile.num_layers:
            raise LayoutError(f"layer {layer} of a model with layers 0..{self.profile.num_layers - 1}")

    def check_seq_len(self, seq_len: int) -> None:
        if not 1 <= seq_len <= self.max_seq_len:
            raise LayoutError(f"seq_len {seq_len} does not fit a buffer for 1..{self.max_seq_len} tokens")


class Copy(NamedTuple):
    """Move nbytes from absolute address src to absolute address dst."""

    src: int
    dst: int
    nbytes: int
    layer: int
    plane: Plane


class Source(NamedTuple):
    """A layer's part of a plane in staging: nbytes at absolute address src."""

    src: int
    nbytes: int
    layer: int
    plane: Plane


def write_plan(
    src: BufferLayout,
    src_bases: Sequence[int],
    dst: BufferLayout,
    dst_bases: PlaneBases,
    seq_len: int,
    layers: Collection[int],
) -> list[Copy]:
    """The copies that move `seq_len` tokens of `layers` from staging to the receive buffer (protocol.md 7.1, 8.4).

    Args:
        src_bases, seq_len, layers: see `read_plan`.
        dst: the receiver's layout: `dataclasses.replace(src, max_seq_len=hello.max_seq_len, nshards=...)`.
    """
    _check_compatible(src, dst)
    dst.check_seq_len(seq_len)
    return aimed(read_plan(src, src_bases, seq_len, layers), dst, dst_bases)


def read_plan(src: BufferLayout, src_bases: Sequence[int], seq_len: int, layers: Collection[int]) -> list[Source]:
    """What `seq_len` tokens of `layers` are in staging: the half of a write plan that is known before hello.

    Layers ascending; per layer kv, pe, ki (no ki without an indexer). Lengths of ki are whole pages.

    Args:
        src_bases: address of each staging shard. A rank that owns one shard of several may put 0 for the others, whose
            layers it must not ask for.
    """
    src.check_seq_len(seq_len)
    if len(set(layers)) != len(layers):
        raise LayoutError(f"a layer is listed twice: {sorted(layers)}")
    ordered = sorted(layers)
    for layer in ordered[:1] + ordered[-1:]:  # the others lie between them
        src.check_layer(layer)
    places = _places(src, src.bases_at(src_bases))
    nbytes = {plane: src.layer_bytes(plane, seq_len) for plane in PLANES}
    planes = PLANES if src.profile.has_index else PLANES[:2]
    return [Source(_address(*places[p], layer), nbytes[p], layer, p) for layer in ordered for p in planes]


def aimed(sources: Sequence[Source], dst: BufferLayout, dst_bases: PlaneBases) -> list[Copy]:
    """Each source to its place in a receive buffer: the other half. That the buffer is one for such rows, and has room
    for them, is checked by `codec.check_hello`, and in `write_plan`."""
    places = _places(dst, dst_bases)
    return [Copy(src, _address(*places[p], layer), nbytes, layer, p) for src, nbytes, layer, p in sources]


_Place = tuple[list[int], int]


def _places(layout: BufferLayout, bases: PlaneBases) -> dict[Plane, _Place]:
    """Per plane: its address in each shard, and the bytes of a layer."""
    places: dict[Plane, _Place] = {}
    for plane in PLANES:
        shards: list[int] = getattr(bases, plane)
        if len(shards) != layout.nshards:
            raise LayoutError(f"{len(shards)} {plane} addresses for {layout.nshards} shards")
        places[plane] = shards, layout.layer_bytes(plane)
    return places


def _address(shards: list[int], stride: int, layer: int) -> int:
    """Where a layer's part of a plane begins, see `BufferLayout.offset`."""
    return shards[layer % len(shards)] + layer // len(shards) * stride


def _check_compatible(src: BufferLayout, dst: BufferLayout) -> None:
    for name in ("profile", "row_format", "tiled"):
        if getattr(src, name) != getattr(dst, name):
            raise LayoutError(f"source and destination differ in {name}: {getattr(src, name)}, {getattr(dst, name)}")


def plane_views(
    layout: BufferLayout, buffer: torch.Tensor, layer: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One layer's part of a buffer, without copying.

    Args:
        buffer: uint8 [shard_bytes]: the shard that holds the layer (the whole buffer if there is one shard).

    Returns:
        kv [seq_len, kv_bytes], pe [seq_len, pe_bytes], ki [page_count(seq_len), 8448], all uint8; ki is None without an
        indexer.
    """
    layout.check_seq_len(seq_len)
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.shard_bytes,):
        got = f"{buffer.dtype} {list(buffer.shape)}"
        raise LayoutError(f"buffer must be torch.uint8 [{layout.shard_bytes}], got {got}")

    def view(plane: Plane) -> torch.Tensor:
        _, start = layout.offset(plane, layer)
        stop = start + layout.layer_bytes(plane, seq_len)
        return buffer[start:stop].view(layout.units(plane, seq_len), layout.unit_bytes(plane))

    return view("kv"), view("pe"), view("ki") if layout.profile.has_index else None


if __name__ == "__main__":
    from tilert_ref.connector.layout_docs import render

    print(render(), end="")
