"""The points of the sweep that both directions run, and how the published package is told about one."""

import wire_case
from wire_case import Case

FORMATS = [
    Case(profile, dtype, tiled)
    for profile in wire_case.LAYERS
    for dtype in wire_case.KV_BYTES
    for tiled in (False, True)
]
SPREAD = [
    Case("glm5", senders=senders, shards=shards, tiled=tiled)
    for senders, shards, tiled in [
        (1, 2, False), (1, 8, True), (2, 1, False), (3, 8, True), (4, 3, False), (5, 5, False), (6, 1, True),
        (7, 2, False), (8, 8, False),
    ]
] + [
    Case("dsv32", "bf16", senders=8, shards=1),
    Case("dsv32", senders=2, shards=8),
    Case("glm5_2", "bf16", senders=3, shards=2, tiled=True),
    Case("glm5_no_mtp", senders=8, shards=4),
]  # fmt: skip
LENGTHS = [
    Case("dsv32", seq_len=seq_len, max_seq_len=room, stage_max=stage)
    for seq_len, room, stage in [(1, 64, 64), (64, 64, 64), (65, 128, 320), (128, 200, 128), (384, 384, 384)]
]


def environment(case: Case, staging: bool = False) -> dict[str, str]:
    """staging: of a sender, whose own buffer is sharded by sender ranks only."""
    return {
        "TILERT_PD_SENDERS": str(case.senders),
        "TILERT_PD_SHARDS": str(1 if staging else case.shards),
        "TILERT_PD_KI_TILED": str(int(case.tiled)),
        "TILERT_PD_NO_MTP": str(int(case.profile == "glm5_no_mtp")),
    }


def profile_name(case: Case) -> str:
    return "glm5" if case.profile == "glm5_no_mtp" else case.profile
