"""Renders docs/layout.md from the tables of `layout`. Run `python -m tilert_ref.connector.layout > docs/layout.md`."""

from collections.abc import Iterable, Sequence

from tilert_ref.connector.layout import (
    FP8_DS_MLA,
    INDEX_PAGE,
    INDEX_PAGE_BYTES,
    INDEX_TILE,
    MODEL_BASE_VERSION,
    PAGE_TOKENS,
    PROFILES,
    ROW_FORMATS,
    BufferLayout,
    Profile,
    Record,
    RowFormat,
    index_code_offset,
    write_plan,
)

_INTRO = """\
# Layout of a handoff

Generated from the tables in `tilert_ref/connector/layout.py`. Do not edit: a test compares the page with them. Renew:

    python -m tilert_ref.connector.layout > docs/layout.md

All values are little-endian, all offsets and sizes are bytes, `e4m3` is OCP `e4m3fn`.
"""

_ROWS = """\
## Cache rows

One token of one layer, as it lies in vLLM's MLA cache. The first fields of a row go to the kv plane, the rest to the pe
plane.
"""

_INDEX = f"""\
## Index page

{INDEX_PAGE_BYTES} bytes hold the index keys of {PAGE_TOKENS} tokens of one layer: first all codes, then one scale per
token. A value is its code times the scale of its token.
"""

_PLANES = f"""\
## Planes and shards

`L` layers, room for `M` tokens, `n` shards, `P(x) = ceil(x / {PAGE_TOKENS})`, `KVB` and `PEB` as above. Layer `l` lies
in shard `l mod n`, as that shard's layer `j = l div n`; every shard has room for `S = ceil(L / n)` layers.

| plane | first byte within the shard | unit, bytes | element of layer j |
|---|---|---|---|
| kv | 0 | token, KVB | `j*M*KVB + t*KVB` |
| pe | `S*M*KVB` | token, PEB | `+ j*M*PEB + t*PEB` |
| ki | `S*M*(KVB+PEB)` | page, {INDEX_PAGE_BYTES} | `+ (j*P(M) + p) * {INDEX_PAGE_BYTES}` |

A model without an indexer has no ki plane. Staging and receive buffer both have this form, each with own `M` and `n`.
A prompt of `s` tokens moves as three copies per layer: `s*KVB`, `s*PEB` and `P(s)*{INDEX_PAGE_BYTES}` bytes.
"""

_VERSIONS = f"""\
## Layout versions

Both ends must have the same number. A model that is not one of the published profiles has base {MODEL_BASE_VERSION}:
then the `tilert_ref` object in hello and announce says what the number cannot.
"""

_EXAMPLE = """\
## Worked example

2 layers, M = 128, fp8_ds_mla, a prompt of 70 tokens, one staging shard and one receive shard, both at address 0.
"""


def render() -> str:
    """The whole page."""
    sections = [
        _INTRO,
        _ROWS,
        *(_row_section(row) for row in ROW_FORMATS),
        _INDEX,
        _record_table(INDEX_PAGE, ["ki"] * len(INDEX_PAGE.fields)),
        _code_orders(),
        _PLANES,
        "## Profiles\n",
        _profile_table(),
        _VERSIONS,
        _version_table(),
        _EXAMPLE,
        _example_table(),
    ]
    return "\n".join(sections)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _record_table(record: Record, planes: Sequence[str]) -> str:
    rows = [
        (f.name, f"{f.offset}..{f.end - 1}", str(f.dtype).removeprefix("torch."), f.count, plane)
        for f, plane in zip(record.fields, planes, strict=True)
    ]
    return _table(("field", "bytes", "dtype", "count", "plane"), rows)


def _row_section(row: RowFormat) -> str:
    sizes = f"{row.row_bytes} bytes: KVB = {row.kv_bytes}, PEB = {row.pe_bytes}."
    names = ", ".join(f"`{alias}`" for alias in row.aliases)
    planes = ["kv"] * row.kv_fields + ["pe"] * (len(row.fields) - row.kv_fields)
    return f"### {row.name}\n\n{sizes} Names for `--kv-cache-dtype`: {names}.\n\n{_record_table(row, planes)}"


def _code_orders() -> str:
    token, dim = INDEX_TILE + 1, INDEX_TILE + 2
    linear, tiled = (index_code_offset(token, dim, order) for order in (False, True))
    return (
        "Codes lie in one of two orders: *linear* (token by token) and *tiled* (ROCm builds of TileRT): tiles of "
        f"{INDEX_TILE} tokens by {INDEX_TILE} dims.\n"
        f"Value {dim} of token {token} is byte {linear} in linear order and byte {tiled} in tiled order.\n"
    )


def _profile_table() -> str:
    rows = [
        (p.name, p.num_layers, p.num_layers - 1 if p.has_mtp else "none", p.base_version, ", ".join(p.aliases))
        for p in PROFILES
    ]
    return _table(("profile", "layers", "MTP layer", "base version", "aliases"), rows)


def _version_table() -> str:
    kinds = [(row, tiled) for tiled in (False, True) for row in reversed(ROW_FORMATS)]
    header = ["base", *(f"{row.name} {'tiled' if tiled else 'linear'}" for row, tiled in kinds)]
    model = Profile("model", 1, False, True, MODEL_BASE_VERSION)
    rows = [
        [f"{p.base_version} {p.name}", *(BufferLayout(p, row, 1, tiled=tiled).layout_version for row, tiled in kinds)]
        for p in (*PROFILES, model)
    ]
    return _table(header, rows)


def _example_table() -> str:
    layout = BufferLayout(Profile("example", 2, False, True, 10), FP8_DS_MLA, max_seq_len=128)
    copies = write_plan(layout, [0], layout, layout.bases_at([0]), seq_len=70, layers=range(2))
    rows = [(copy.layer, copy.plane, copy.src, copy.dst, copy.nbytes) for copy in copies]
    return _table(("layer", "plane", "source", "destination", "bytes"), rows)
