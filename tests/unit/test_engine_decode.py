"""The decode loop: budget, stops, cancellation, injection, and lossless drafting at every acceptance rate."""

from collections.abc import Sequence

import pytest
import torch

from tilert_ref.engine.api import Finished, LayerKV, PromptKV, SamplingParams, Token
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import load_config
from tilert_ref.engine.decode import Model, draft, step, until_stop, verify
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.engine.rope import rope_table
from tilert_ref.engine.sampling import Sampler
from tilert_ref.engine.weights import load_weights

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i + 3) % 480 for i in range(45)]


def run(engine: RefEngine, first: int, tokens: int, sampling: SamplingParams = GREEDY) -> tuple[list[int], Finished]:
    *steps, finished = engine.decode(first, tokens, sampling)
    return [token.id for tokens_ in steps for token in tokens_], finished


def answer(model_dir, num_mtp: int, tokens: int, sampling: SamplingParams = GREEDY) -> tuple[list[int], Finished]:
    engine = load_engine(model_dir, max_seq_len=512, num_mtp=num_mtp)
    return run(engine, engine.prefill(PROMPT, sampling), tokens, sampling)


def handed_over(engine: RefEngine, prompt: Sequence[int]) -> PromptKV:
    """What the wire would deliver after `engine` prefilled: views of its rows."""
    rows = [engine.cache.read(layer, len(prompt)) for layer in range(len(engine.cache.rows))]
    return PromptKV("r", len(prompt), prompt[-1], [LayerKV(r[:, :512], r[:, 512:]) for r in rows])


@pytest.mark.parametrize("num_mtp", [1, 2, 3])
@pytest.mark.parametrize("arch", ["dsv3", "glm47"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, 0.95, 50, True, seed=3)], ids=["greedy", "sampled"])
def test_drafting_changes_speed_not_tokens(arch: str, num_mtp: int, sampling: SamplingParams, tiny) -> None:
    plain, _ = answer(tiny(arch), 0, 48, sampling)
    drafted, finished = answer(tiny(arch), num_mtp, 48, sampling)
    assert drafted == plain
    assert finished.stats["mtp_verify_calls"] <= 47


class Oracle:
    """Replaces `draft` by the true continuation, with every `wrong`-th draft spoiled (0: none)."""

    def __init__(self, truth: Sequence[int], wrong: int):
        self.truth, self.wrong, self.asked = list(truth), wrong, 0

    def __call__(self, model, cache, first, next_ids, hidden, num_drafts, *, keep_rows=False) -> list[int]:
        at = first + len(next_ids) - len(PROMPT)  # index of the last known token in the answer
        drafts = self.truth[at + 1 : at + 1 + num_drafts]
        drafts += [0] * (num_drafts - len(drafts))
        self.asked += 1
        if self.wrong and self.asked % self.wrong == 0:
            spoiled = self.asked % num_drafts
            drafts[spoiled] = (drafts[spoiled] + 1) % 480
        return drafts


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
@pytest.mark.parametrize("num_mtp", [1, 2, 3])
def test_lossless_at_every_acceptance_rate(num_mtp: int, wrong: int, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right drafts, wrong ones at each place of the window, and budgets that end inside a window."""
    truth, _ = answer(tiny("dsv3"), 0, 40)
    for tokens in (30, 31):
        monkeypatch.setattr("tilert_ref.engine.decode.draft", Oracle(truth, wrong))
        drafted, finished = answer(tiny("dsv3"), num_mtp, tokens)
        assert drafted == truth[:tokens]
        if wrong == 0:
            assert finished.stats["mtp_accept_mean"] == num_mtp + 1


def fp32_engine(model_dir, num_mtp: int) -> RefEngine:
    """Without bf16's roundings, prefill's and decode's forms of attention agree closely."""
    config = load_config(model_dir)
    weights = load_weights(config, model_dir, with_mtp=True, dtype=torch.float32)
    cache = KVCache(config, config.num_hidden_layers + 1, 256, dtype=torch.float32)
    return RefEngine(Model(config, weights, rope_table(config, 256, torch.float32), Kernels()), cache, num_mtp, 250)


def test_draft_rows_are_those_of_a_full_pass(tiny) -> None:
    """After decoding with drafts, the MTP layer's rows equal the ones computed from the whole text at once.

    That is: provisional rows of rejected drafts were overwritten, and each slot saw the token that really came next.
    """
    engine = fp32_engine(tiny("dsv3"), num_mtp=2)
    tokens, _ = run(engine, engine.prefill(PROMPT, GREEDY), 30)
    final = len(PROMPT) + 20
    rows = engine.cache.read(3, final)
    fresh = fp32_engine(tiny("dsv3"), num_mtp=2)
    fresh.prefill([*PROMPT, *tokens], GREEDY)
    torch.testing.assert_close(rows, fresh.cache.read(3, final), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_mtp", [0, 2])
def test_injected_rows_decode_like_own_prefill(num_mtp: int, tiny) -> None:
    source = load_engine(tiny("dsv3"), max_seq_len=512, num_mtp=num_mtp)
    first = source.prefill(PROMPT, GREEDY)
    target = load_engine(tiny("dsv3"), max_seq_len=300, num_mtp=num_mtp, block_size=16)
    target.inject(handed_over(source, PROMPT))
    assert run(target, first, 50)[0] == run(source, first, 50)[0]
    assert target.cache.read(1, len(PROMPT)).equal(source.cache.read(1, len(PROMPT))), "transferred rows were rewritten"


def test_answer_depends_on_every_layer_of_the_injected_kv(tiny) -> None:
    source = load_engine(tiny("dsv3"), max_seq_len=512)
    first = source.prefill(PROMPT, GREEDY)
    good = run(source, first, 40)[0]
    for layer in range(3):
        kv = handed_over(source, PROMPT)
        kv.layers[layer].latent[:] = 0
        target = load_engine(tiny("dsv3"), max_seq_len=512)
        target.inject(kv)
        assert run(target, first, 40)[0] != good


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda kv: PromptKV(kv.rid, kv.seq_len, 3, kv.layers[:2]), "2 layers of KV for an engine with 3"),
        (lambda kv: PromptKV(kv.rid, 0, 3, kv.layers), "prompt of 0 tokens"),
        (lambda kv: PromptKV(kv.rid, 512, 3, kv.layers), "prompt of 512 tokens"),
        (lambda kv: PromptKV(kv.rid, kv.seq_len, 512, kv.layers), "token id 512"),
        (lambda kv: PromptKV(kv.rid, kv.seq_len - 1, 3, kv.layers), r"latent: \[45, 512\]"),
    ],
)
def test_kv_that_does_not_fit_is_refused_by_name(spoil, named: str, tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=512)
    engine.prefill(PROMPT)
    with pytest.raises(ValueError, match=named):
        engine.inject(spoil(handed_over(engine, PROMPT)))


def test_budget_is_limited_by_max_seq_len(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=len(PROMPT) + 6, num_mtp=3)
    tokens, finished = run(engine, engine.prefill(PROMPT), 100)
    assert (len(tokens), finished.reason) == (5, "length")


def test_no_room_at_all_still_gives_the_first_token(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=len(PROMPT) + 1)
    first = engine.prefill(PROMPT)
    assert run(engine, first, 100) == ([first], Finished("length"))


@pytest.mark.parametrize("num_mtp", [0, 3])
def test_stop_token_ends_and_is_not_emitted(num_mtp: int, tiny) -> None:
    tokens, _ = answer(tiny("dsv3"), 0, 40)
    place = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
    stopping = tiny("dsv3", eos_token_id=tokens[place])
    for_real = SamplingParams(temperature=0.0)
    assert answer(stopping, num_mtp, 40, for_real)[0] == tokens[:place]
    assert answer(stopping, num_mtp, 40, for_real)[1].reason == "stop"
    assert answer(stopping, num_mtp, place, for_real)[1].reason == "length", "the budget ends before the stop token"
    assert answer(stopping, num_mtp, 40, GREEDY)[0] == tokens, "ignore_eos goes on"


def test_first_token_that_is_a_stop_token_gives_an_empty_answer() -> None:
    assert list(until_stop(iter([]), 9, 5, frozenset({9}))) == ["stop"]


def test_until_stop_cuts_inside_a_step() -> None:
    steps = iter([[Token(1), Token(2)], [Token(3), Token(9), Token(4)]])
    assert list(until_stop(steps, 0, 50, frozenset({9}))) == [[Token(0)], [Token(1), Token(2)], [Token(3)], "stop"]


def test_verify_takes_the_longest_right_prefix() -> None:
    rows = torch.eye(5)[[3, 1, 4]] * 9  # argmax 3, 1, 4
    sampler = Sampler(GREEDY)
    assert [t.id for t in verify(sampler, rows, [3, 1])] == [3, 1, 4]
    assert [t.id for t in verify(sampler, rows, [3, 2])] == [3, 1]
    assert [t.id for t in verify(sampler, rows, [0, 1])] == [3]


def test_closing_the_generator_cancels_and_the_engine_goes_on(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=512)
    first = engine.prefill(PROMPT)
    expected = run(engine, first, 20)[0]
    events = engine.decode(first, 400, GREEDY)
    for _ in range(3):
        next(events)
    events.close()
    engine.reset()
    with pytest.raises(RuntimeError, match="no prompt"):
        next(engine.decode(first, 5, GREEDY))
    assert run(engine, engine.prefill(PROMPT), 20)[0] == expected


def test_refeeding_leaves_transferred_rows_untouched(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=512, num_mtp=1)
    first = engine.prefill(PROMPT)
    engine.cache.rows[:, :, :] += 0.5  # not what the engine would compute
    before = engine.cache.rows.clone()
    hidden, _ = step(engine.model, engine.cache, len(PROMPT) - 1, PROMPT[-1:], keep_rows=True)
    draft(engine.model, engine.cache, len(PROMPT) - 1, [first], hidden, 1, keep_rows=True)
    assert engine.cache.rows.equal(before)


def test_logprobs_come_with_every_decoded_token(tiny) -> None:
    engine = load_engine(tiny("dsv3"), max_seq_len=512, num_mtp=2)
    first = engine.prefill(PROMPT)
    *steps, _ = engine.decode(first, 20, GREEDY, top_logprobs=3)
    tokens = [token for tokens_ in steps for token in tokens_]
    assert tokens[0].logprob is None
    for token in tokens[1:]:
        assert token.top[0] == (token.id, token.logprob), "greedy: the sampled token is the most likely one"
        assert len(token.top) == 3
        assert all(lp <= 0 for _, lp in token.top)
