"""Golden tokens on a model with random weights: prompts of one token, and around the ends of blocks and pages.

Its answers are near ties almost everywhere, so it shows differences of a last bit that a trained model hides; a
divergence is accepted only where vLLM's own noise is larger than its gap. On a processor whose vLLM kernels this engine
doesn't follow (numerics.vllm_kernels: AVX512, AMX) last bits differ, so tokens are counted and not judged there. The
main suite, of a trained model, is test_golden_cpu.py and holds everywhere.
"""

from collections import Counter

import pytest

from tilert_ref.engine.numerics import vllm_kernels
from tilert_ref.engine.ref import load_engine
from tilert_ref.golden.replay import Replay, gap, kv_shares, noise, percent, replay, reproducible, smallest_gap
from tilert_ref.verdict import judge

from .conftest import EDGE_TOKENS, EDGES, Recording

pytestmark = [pytest.mark.golden, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ours(golden_edges: Recording) -> list[Replay]:
    engine = load_engine(golden_edges.model_dir, max_seq_len=max(EDGES) + EDGE_TOKENS + 1)
    return [replay(engine, p, a) for p, a in zip(golden_edges.prompts, golden_edges.rounds["alone"], strict=True)]


def test_tokens(golden_edges: Recording, ours: list[Replay], capsys: pytest.CaptureFixture[str]) -> None:
    """Every position identical or a tie; a divergence must be smaller than what vLLM does to itself."""
    alone, counts, diverged = golden_edges.rounds["alone"], Counter[str](), []
    for replayed, answer, length in zip(ours, alone, EDGES, strict=True):
        for position, token in enumerate(answer["ids"]):
            verdict = judge(replayed.ids[position], token, answer["top"][position])
            counts[verdict] += 1
            if verdict == "diverged":
                diverged.append((length, position, gap(answer, position)))
    floor = noise("batch", alone, golden_edges.rounds["batch"])
    largest = max(r.logprob_difference(a) for r, a in zip(ours, alone, strict=True))
    with capsys.disabled():
        print(f"\nrandom dsv3, {len(EDGES)} prompts x {EDGE_TOKENS} tokens")
        print(
            f"  vLLM alone vs batch: {floor.flips} of {floor.positions} positions flip, "
            f"largest logprob change {floor.largest_logprob_change:.4f}"
        )
        print(
            f"  this engine vs vLLM alone: {counts['identical']} identical, {counts['tie']} tie, {counts['diverged']} "
            f"diverged, largest logprob difference {largest:.6f}, smallest top-two gap {smallest_gap(alone):.4f}"
        )
    kernels = vllm_kernels("cpu")
    if not reproducible(kernels.order):
        pytest.skip(f"vLLM's kernels of this processor are not followed ({kernels}): {dict(counts)}")
    unexplained = [d for d in diverged if d[2] > floor.largest_logprob_change]
    assert not unexplained, f"(prompt length, position, gap) above vLLM's own noise floor, {floor}: {unexplained}"


def test_layer_0_rows_are_equal_bit_for_bit(golden_edges: Recording, ours: list[Replay]) -> None:
    for replayed, answer, length in zip(ours, golden_edges.rounds["alone"], EDGES, strict=True):
        theirs = answer["rows"][0, :length]
        assert replayed.prefilled is not None and replayed.prefilled[0].equal(theirs), f"prompt of {length} tokens"


def test_kv_bytes(golden_edges: Recording, ours: list[Replay], capsys: pytest.CaptureFixture[str]) -> None:
    """Share of equal bytes, prompt rows and decode rows; exact where vLLM's kernels are the known ones."""
    engine = load_engine(golden_edges.model_dir)
    prompt, answer = kv_shares(ours, golden_edges.rounds["alone"], EDGES)
    with capsys.disabled():
        print(f"\n  equal KV bytes a layer: prefill {percent(prompt)}; decode {percent(answer)}")
    assert prompt[0] == answer[0] == 1.0, "layer 0 depends on the token ids only"
    if reproducible(engine.model.kernels.order):
        assert min(prompt) == 1.0
        # Not 1: glibc's logf is now and then not the correctly rounded value, and one row and its successors differ.
        assert min(answer) > 0.999
