"""Golden tokens, live: vLLM-CPU and this engine on a trained model, position by position.

The engine gets the prompt's KV rows that vLLM wrote and is fed vLLM's own tokens (re-anchored at every position), so
each position is an independent comparison: 22 x 256 in every run, all 64 x 256 with TILERT_REF_GOLDEN=full. vLLM runs
in several arrangements, each compared with vLLM alone (its noise floor) and with us. Verdicts: docs/numerics.md.
"""

from collections.abc import Callable

import pytest
import torch

from tilert_ref.engine.api import Finished, SamplingParams
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.golden.replay import (
    Replay,
    kv_shares,
    noise,
    percent,
    prompt_kv,
    replay,
    replay_in_windows,
    reproducible,
    smallest_gap,
    verdicts,
)
from tilert_ref.tiny.golden import GOLDEN_PROMPTS, GOLDEN_TOKENS

from .conftest import (
    BATCHED,
    CHOSEN,
    COMPILED,
    CONTEXT,
    DRAFTED,
    DRAFTED_TOKENS,
    FULL,
    REPEATED,
    SHUFFLED,
    Recording,
)

pytestmark = [pytest.mark.golden, pytest.mark.timeout(1200)]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = len(range(GOLDEN_PROMPTS)[CHOSEN])
ONE_BY_ONE = range(3, PROMPTS, 5) if FULL else range(0, PROMPTS, 3)  # 13, or 8: all kinds, 10 to 3,810 tokens
WINDOW = 16  # the others: a window costs half of 16 single tokens
FREE_TOKENS = GOLDEN_TOKENS if FULL else 64
EVERYTHING = slice(None)


@pytest.fixture(scope="module")
def engine(golden: Recording) -> RefEngine:
    return load_engine(golden.model_dir, max_seq_len=CONTEXT)


@pytest.fixture(scope="module")
def ours(golden: Recording, engine: RefEngine) -> list[Replay]:
    pairs = zip(golden.prompts, golden.rounds["alone"], strict=True)
    return [
        replay(engine, p, a) if i in ONE_BY_ONE else replay_in_windows(engine, p, a, WINDOW)
        for i, (p, a) in enumerate(pairs)
    ]


def check(
    what: str,
    theirs: list[dict],
    alone: list[dict],
    ours: list[Replay],
    say: Callable[[str], None],
) -> None:
    """Prints and asserts: this run of vLLM has the tokens of vLLM alone, and ours; 0 diverged."""
    floor = noise(what, alone, theirs)
    counts = verdicts([o.ids for o in ours], alone, theirs)
    say(
        f"  vLLM {what}: {floor.flips} of {floor.positions} positions flip against vLLM alone, "
        f"largest logprob change {floor.largest_logprob_change:.4f}; "
        f"this engine: {counts['identical']} identical, {counts['tie']} tie, {counts['diverged']} diverged"
    )
    assert floor.flips == 0 and counts["diverged"] == 0


def test_tokens(golden: Recording, ours: list[Replay], say: Callable[[str], None]) -> None:
    alone = golden.rounds["alone"]
    counts = verdicts([o.ids for o in ours], alone, alone)
    largest = max(o.logprob_difference(a) for o, a in zip(ours, alone, strict=True))
    say(f"vLLM {golden.facts['vllm']} on this CPU, {len(alone)} prompts x {GOLDEN_TOKENS} tokens, greedy, bf16")
    say(
        f"  vLLM alone: this engine: {counts['identical']} identical, {counts['tie']} tie, "
        f"{counts['diverged']} diverged; largest logprob difference {largest:.4f}, "
        f"smallest top-two gap {smallest_gap(alone):.4f}"
    )
    assert counts.total() == PROMPTS * GOLDEN_TOKENS
    assert counts["diverged"] == 0


@pytest.mark.parametrize(
    ("arrangement", "round_", "part"),
    [
        ("golden_batch", "batch", BATCHED),
        ("golden_shuffled", "batch", SHUFFLED),
        ("golden_compiled", "batch", COMPILED),
        ("golden_repeat", "repeat", REPEATED),
        ("golden_chunked", "alone", EVERYTHING),
        ("golden_chunked", "repeat", EVERYTHING),
    ],
)
def test_arrangement(
    arrangement: str,
    round_: str,
    part: slice,
    golden: Recording,
    ours: list[Replay],
    say: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> None:
    theirs = request.getfixturevalue(arrangement).rounds[round_]
    check(f"{arrangement.removeprefix('golden_')} ({round_})", theirs, golden.rounds["alone"][part], ours[part], say)


def test_kv_bytes(golden: Recording, engine: RefEngine, ours: list[Replay], say: Callable[[str], None]) -> None:
    """Share of equal bytes, prompt rows and decode rows; exact where vLLM's kernels are the known ones."""
    alone = golden.rounds["alone"]
    prompt, answer = kv_shares(
        [ours[i] for i in ONE_BY_ONE], [alone[i] for i in ONE_BY_ONE], [len(golden.prompts[i]) for i in ONE_BY_ONE]
    )
    say(f"  equal KV bytes a layer, {len(ONE_BY_ONE)} prompts: prefill {percent(prompt)}; decode {percent(answer)}")
    assert prompt[0] == answer[0] == 1.0, "layer 0 depends on the token ids only"
    if reproducible(engine.model.kernels.order):
        # Seen: one or two rows of the last layer in prompts of more than 2,800 tokens, 5 to 20% of their values.
        assert min(prompt) > 0.9999
        assert min(answer) > 0.999


def test_vllm_with_drafts(
    golden: Recording, golden_mtp: Recording, ours: list[Replay], say: Callable[[str], None]
) -> None:
    alone = [answer | {"ids": answer["ids"][:DRAFTED_TOKENS]} for answer in golden.rounds["alone"][DRAFTED]]
    check("with its MTP layer", golden_mtp.rounds["alone"], alone, ours[DRAFTED], say)


@pytest.mark.parametrize("num_mtp", [0, 1, 2, 3])
def test_free_running_decode_with_drafts(
    num_mtp: int, golden: Recording, golden_mtp: Recording, say: Callable[[str], None]
) -> None:
    """From the KV that a drafting vLLM handed over, undisturbed by re-anchoring: the tokens of vLLM without drafts."""
    engine = load_engine(golden.model_dir, max_seq_len=CONTEXT, num_mtp=num_mtp)
    kept, lengths = 3 + (num_mtp > 0), []
    plain = golden.rounds["alone"][DRAFTED]
    for prompt, drafting, reference in zip(golden_mtp.prompts, golden_mtp.rounds["alone"], plain, strict=True):
        engine.inject(prompt_kv(prompt, drafting | {"rows": drafting["rows"][:kept]}))
        *steps, finished = engine.decode(drafting["ids"][0], FREE_TOKENS, GREEDY)
        assert isinstance(finished, Finished)
        ids = [token.id for tokens in steps for token in tokens]
        assert ids == reference["ids"][:FREE_TOKENS], f"{len(prompt)}-token prompt"
        lengths.append(finished.stats.get("mtp_accept_mean", 1.0))
    say(f"  free-running with {num_mtp} drafts: equal; tokens per step {', '.join(f'{n:.2f}' for n in lengths)}")
    assert min(lengths) >= 1 + num_mtp / 2, "a trained draft layer is right more often than not"


def test_draft_layer_rows_of_the_prompt(golden_mtp: Recording, say: Callable[[str], None]) -> None:
    """Our own prefill of the MTP layer gives vLLM's draft rows; the last slot depends on the sampled first token."""
    engine = load_engine(golden_mtp.model_dir, max_seq_len=CONTEXT, num_mtp=1)
    differ, total = 0, 0
    for prompt, answer in zip(golden_mtp.prompts, golden_mtp.rounds["alone"], strict=True):
        assert engine.prefill(prompt, GREEDY) == answer["ids"][0]
        theirs = answer["rows"][3, : len(prompt)].contiguous().view(torch.bfloat16)
        rows = engine.cache.read(3, len(prompt))
        differ, total = differ + int((rows != theirs).any(dim=1).sum()), total + len(prompt)
        torch.testing.assert_close(rows.float(), theirs.float(), rtol=0.1, atol=0.1)
    say(f"  draft rows of our own prefill: {total - differ} of {total} equal to vLLM's in every byte")
    if reproducible(engine.model.kernels.order):
        # One value of a hidden state that rounds the other way changes half of its row by a bf16 step.
        assert differ <= 0.01 * total, (differ, total)


def test_decode_from_chunked_and_cached_prompts(golden_chunked: Recording, engine: RefEngine) -> None:
    """Decode from KV that vLLM made in chunks of 256 tokens: vLLM's own tokens of that run."""
    for index in ONE_BY_ONE:
        prompt, answer = golden_chunked.prompts[index], golden_chunked.rounds["alone"][index]
        counts = verdicts([replay_in_windows(engine, prompt, answer, WINDOW).ids], [answer], [answer])
        assert counts["diverged"] == 0, f"prompt {index}"
