"""Our prefill side against the published receive server: every byte of its buffer, every tensor of its conversion."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ours
import pytest
import torch
import wire_case
from reference import Reference
from sweep import FORMATS, LENGTHS, SPREAD, environment, profile_name
from wire_case import Case

from tilert_ref.stack import free_port


@pytest.mark.parametrize("case", FORMATS + SPREAD + LENGTHS, ids=str)
def test_buffer_and_tensors(
    case: Case, reference: Reference, tmp_path: Path, log: Callable[..., None], device: str
) -> None:
    if device == "cuda" and case.shards > 1:
        pytest.skip("the published NIXL transport addresses one device only; shards are covered in host memory")
    made = wire_case.caches(case)
    port = free_port()
    args: dict[str, Any] = {"kv_cache_dtype": case.kv_cache_dtype, "max_seq_len": case.max_seq_len, "port": port}
    with (
        reference.part(
            "receiver", environment(case), model=profile_name(case), device=device, shards=case.shards, **args
        ) as node,
        ours.prefill_node(case, on(device, made)) as ranks,
    ):
        assert node.facts["layout_version"] == case.layout_version
        assert (node.facts["senders"], node.facts["shards"]) == (case.senders, case.shards)
        for rank in ranks:
            rank.prefill(ours.claim(case, port))
        record = node.wait(timeout=ours.LIMIT_S)
        assert record == {
            "rid": case.rid, "seq_len": case.seq_len, "last_prompt_token": 4711, "sampling": None,
            "prompt_token_ids": [], "generation": 1, "ranks": list(range(case.senders)),
        }  # fmt: skip
        compared = assert_buffer(case, made, node, tmp_path / "buffer")
        off_by_one = assert_tensors(case, made, node, tmp_path / "layers")
        log(node, case=str(case), layout_version=case.layout_version, bytes_moved=case.moved_bytes, device=device,
            bytes_compared=compared, index_values_rounded_otherwise=off_by_one)  # fmt: skip


def on(device: str, caches: wire_case.Caches) -> wire_case.Caches:
    return {name: cache.to("cuda") for name, cache in caches.items()} if device == "cuda" else caches


def assert_buffer(case: Case, made: wire_case.Caches, node: Any, path: Path) -> int:
    """Bytes compared: all of the buffer, also those that nothing may have touched."""
    nbytes = node.dump(path=str(path))
    got, start = np.fromfile(path, dtype="u1"), 0
    assert nbytes == got.size == case.shards * case.shard_bytes
    for shard, want in enumerate(wire_case.buffer(case, made)):
        wrong = np.flatnonzero(got[start : start + want.size] != want)
        assert wrong.size == 0, f"shard {shard}: {wrong.size} bytes differ, the first at {wrong[0]}"
        start += want.size
    path.unlink()
    return nbytes


def assert_tensors(case: Case, made: wire_case.Caches, node: Any, path: Path) -> int:
    """Counts the index values that are one bf16 step off."""
    assert node.convert(path=str(path)) == case.layers
    layers = torch.load(path)
    path.unlink()
    return sum(wire_case.check_converted(got, wire_case.converted(case, made, n)) for n, got in enumerate(layers))
