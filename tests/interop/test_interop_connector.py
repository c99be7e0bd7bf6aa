"""The published connector against our receive server: every byte of our buffer, for the same sweep.

Each tensor-parallel rank is a process with the package's connector in it, both halves, driven step by step as vLLM's
scheduler and model runner do. (With a real vLLM around it: run_full_depth.py.)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import ours
import pytest
import torch
import wire_case
from reference import Part, Reference
from sweep import FORMATS, LENGTHS, SPREAD, environment, profile_name
from wire_case import BLOCKS, Case

from tilert_ref.connector.receiver import HandoffTimeout


@contextmanager
def ranks(case: Case, made: wire_case.Caches, reference: Reference, path: Path, device: str) -> Iterator[list[Part]]:
    """The connectors of all ranks, over caches that a vLLM of this case would have."""
    torch.save(wire_case.tiled_caches(made) if case.tiled else made, path)
    with ExitStack() as stack:
        args = {"model": profile_name(case), "caches": str(path), "stage_max": case.stage_max, "device": device}
        yield [
            stack.enter_context(reference.part("connector", environment(case, staging=True), rank=rank, **args))
            for rank in range(case.senders)
        ]


def prefill(case: Case, parts: list[Part], port: int, rid: str | None = None, chunk: int = 64, **how: bool) -> None:
    """One request on all ranks at once, in chunks."""
    prompt = [*range(1, case.seq_len), 4711]
    for part in parts:
        part.begin(
            "prefill", request_id=f"chatcmpl-{rid or case.rid}-9f8e7d6c", prompt=prompt, blocks=BLOCKS, port=port,
            chunk=chunk, **how,
        )  # fmt: skip
    for part in parts:
        assert part.end() == -(-case.seq_len // chunk)


@pytest.mark.parametrize("case", [*FORMATS, *SPREAD, *LENGTHS], ids=str)
def test_buffer(case: Case, reference: Reference, tmp_path: Path, log: Callable[..., None], device: str) -> None:
    if device == "cuda" and case.shards * case.senders > 1:
        pytest.skip("the published sender gives rank i to GPU i; several ranks and shards are covered in host memory")
    made = wire_case.caches(case)
    with (
        ours.DecodeNode(case, device=device) as node,
        ranks(case, made, reference, tmp_path / "caches.pt", device) as parts,
    ):
        prefill(case, parts, node.server.port)
        record = node.server.wait(case.rid, ours.LIMIT_S, ours.NEVER)
        assert (record.seq_len, record.last_prompt_token, record.sampling) == (case.seq_len, 4711, None)
        assert_buffer(case, made, node.buffer)
        log(parts[0], case=str(case), layout_version=case.layout_version, bytes_moved=case.moved_bytes, device=device,
            bytes_compared=node.buffer.numel())  # fmt: skip


def assert_buffer(case: Case, made: wire_case.Caches, buffer: torch.Tensor) -> None:
    got, want = buffer.cpu().numpy(), np.concatenate(wire_case.buffer(case, made))
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}"


def test_a_second_request_waits_for_the_buffer(reference: Reference, tmp_path: Path, log: Callable[..., None]) -> None:
    """The published sender retries while our slot is busy, and its second prompt lands only when the first is read."""
    case = Case("dsv32")
    made = wire_case.caches(case)
    with ours.DecodeNode(case) as node, ranks(case, made, reference, tmp_path / "caches.pt", "cpu") as parts:
        prefill(case, parts, node.server.port, "first")
        node.server.wait("first", ours.LIMIT_S, ours.NEVER)
        before = node.buffer.clone()
        prefill(case, parts, node.server.port, "second", layerwise=False)
        assert not _arrives(node, "second")
        assert torch.equal(node.buffer, before)
        node.server.release("first")
        record = node.server.wait("second", ours.LIMIT_S, ours.NEVER)
        assert record.rid == "second"
        assert_buffer(case, made, node.buffer)
        log(parts[0], case="busy, then admitted", bytes_compared=node.buffer.numel())


@pytest.mark.skipif(find_spec("tilert_ref.connector.events") is None, reason="this receiver has one slot")
def test_a_second_request_arrives_beside_the_first(
    reference: Reference, tmp_path: Path, log: Callable[..., None]
) -> None:
    """With two slots hello names the free one, which is all that the published sender goes by."""
    case = Case("dsv32", senders=2)
    made = wire_case.caches(case)
    with ours.DecodeNode(case, slots=2) as node, ranks(case, made, reference, tmp_path / "caches.pt", "cpu") as parts:
        for rid in ("first", "second"):
            prefill(case, parts, node.server.port, rid)
            record = node.server.wait(rid, ours.LIMIT_S, ours.NEVER)
            assert_buffer(case, made, node.slot_of(record))
        assert_buffer(case, made, node.buffer[0])
        assert_buffer(case, made, node.buffer[1])
        node.server.release("first")
        prefill(case, parts, node.server.port, "third")
        node.server.wait("third", ours.LIMIT_S, ours.NEVER)
        log(parts[0], case="two slots", bytes_compared=node.buffer.numel())


def _arrives(node: ours.DecodeNode, rid: str) -> bool:
    try:
        node.server.wait(rid, 0.7, ours.NEVER)
    except HandoffTimeout:
        return False
    return True


@pytest.mark.parametrize(
    ("theirs", "our_side"),
    [
        (Case("dsv32"), Case("dsv32", "bf16")),
        (Case("dsv32"), Case("glm5")),
        (Case("dsv32"), Case("dsv32", tiled=True)),
        (Case("dsv32"), Case("dsv32", senders=2)),
        (Case("dsv32", seq_len=130), Case("dsv32", max_seq_len=128)),
    ],
    ids=["dtype", "profile", "tiling", "senders", "length"],
)
def test_the_published_sender_leaves_a_node_alone_that_does_not_fit(
    theirs: Case, our_side: Case, reference: Reference, tmp_path: Path, log: Callable[..., None]
) -> None:
    made = wire_case.caches(theirs)
    with (
        ours.DecodeNode(our_side) as node,
        ranks(theirs, made, reference, tmp_path / "caches.pt", "cpu") as parts,
    ):
        prefill(theirs, parts, node.server.port)
        assert not _arrives(node, theirs.rid)
        assert not node.buffer.any()
        log(parts[0], case=f"refused: {theirs} at {our_side}")
