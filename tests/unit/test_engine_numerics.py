"""Literal numbers of the roundings and of the fixed summation order; cases K3 and K4."""

import numpy as np
import pytest
import torch

from tilert_ref.engine import vllm_avx2
from tilert_ref.engine.attention import (
    GATHERED_VALUES,
    DecodeKernel,
    attend_absorbed,
    attend_chosen,
    attend_plain,
    decode_kernel,
)
from tilert_ref.engine.config import YarnScaling, parse_config
from tilert_ref.engine.make_tiny import tiny_config
from tilert_ref.engine.moe import route
from tilert_ref.engine.numerics import (
    HOPPER,
    OTHER_CUDA,
    TORCH,
    KernelRounding,
    Kernels,
    SumOrder,
    round_kernel,
    vllm_kernels,
)
from tilert_ref.engine.rope import apply_rope, inverse_frequencies

BF16 = torch.bfloat16


def dense(kernels: Kernels) -> DecodeKernel:
    return decode_kernel(kernels, sparse=False, fp8_rows=False)


@pytest.mark.parametrize(
    ("value", "nearest", "truncated"),
    [
        (1.00585938, 1.0078125, 1.0),
        (-1.00585938, -1.0078125, -1.0),
        (1.00390625, 1.0, 1.0),
        (3.0, 3.0, 3.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_round_kernel(value: float, nearest: float, truncated: float) -> None:
    x = torch.tensor([value])
    assert round_kernel(x, BF16, KernelRounding.NEAREST).item() == nearest
    assert round_kernel(x, BF16, KernelRounding.TRUNCATE).item() == truncated


def test_kernels_by_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for hopper, kernels in ((True, HOPPER), (False, OTHER_CUDA)):
        monkeypatch.setattr("tilert_ref.engine.tensor_cores.is_hopper", lambda _, answer=hopper: answer)
        assert vllm_kernels("cuda") == vllm_kernels("cuda:1") == kernels
    assert vllm_kernels("cpu:0") == vllm_kernels("cpu") != HOPPER
    assert vllm_kernels("mps") == TORCH


def test_truncation_is_for_bf16_only() -> None:
    x = torch.tensor([1.00585938])
    assert round_kernel(x, torch.float32, KernelRounding.TRUNCATE).equal(x)


def test_k3_rotary_pairings() -> None:
    inv = inverse_frequencies(4, 10000.0, None)
    cos_sin = torch.stack((inv.cos(), inv.sin()))[None]  # position 1
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    half_split = torch.tensor([[-1.984111, 1.959901, 2.462378, 4.019800]])
    interleaved = torch.tensor([[-1.142640, 1.922076, 2.959851, 4.029800]])
    torch.testing.assert_close(apply_rope(x, cos_sin, interleaved=False), half_split, rtol=0, atol=1e-6)
    torch.testing.assert_close(apply_rope(x, cos_sin), interleaved, rtol=0, atol=1e-6)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones() -> None:
    yarn = YarnScaling(factor=40, original_max_position_embeddings=4096)
    plain, scaled = inverse_frequencies(64, 10000.0, None), inverse_frequencies(64, 10000.0, yarn)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1].item() / 40)
    assert ((scaled <= plain) & (scaled >= plain / 40 * 0.999)).all()


def test_k4_weights_come_from_unbiased_scores() -> None:
    config = parse_config(tiny_config("dsv3", n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1))
    weights, ids = route(config, torch.tensor([[-17.0, -18.0]]), torch.tensor([12.0, 12.0]))
    by_id = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert by_id[0] == pytest.approx(0.731059, abs=1e-6)
    assert by_id[1] == pytest.approx(0.268941, abs=1e-6)


def test_bias_steers_the_choice_and_groups_limit_it() -> None:
    config = parse_config(tiny_config("dsv3"))  # 8 experts in 4 groups, 2 groups, top 2
    bias = torch.zeros(8)
    bias[6:] = 5.0  # group 3 wins whatever the logits say
    logits = torch.tensor([[3.0, 2.9, -1, -1, -1, -1, -4, -4.5]])
    assert set(route(config, logits, bias)[1][0].tolist()) == {6, 7}
    spread = torch.tensor([[9.0, -9, 8, -9, 7.1, 7, -9, -9]])  # group 2 has the best pair, group 0 is second
    chosen = set(route(config, spread, torch.zeros(8))[1][0].tolist())
    assert chosen == {0, 4}, "expert 2 scores second best, but its group's two best sum to less than group 2's"


def _random_decode(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, 576, generator=draw).to(BF16).float(), torch.randn(tokens, 576, generator=draw).to(
        BF16
    ).float()


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 200])
def test_vllm_avx2_is_attention(tokens: int) -> None:
    query, rows = _random_decode(tokens)
    probs = (query.double() @ rows.double().T * 0.07).softmax(-1)
    exact = (probs @ rows[:, :512].double()).float()
    torch.testing.assert_close(vllm_avx2.attend(query, rows, 512, 0.07), exact, rtol=0, atol=2e-6)


def test_vllm_avx2_takes_the_documented_order() -> None:
    """Against the same order written out in scalar numpy, for one head and a block and a half of tokens."""
    query, rows = _random_decode(24)
    q, k = query[0].numpy(), rows.numpy()
    f32 = np.float32

    def score(row: np.ndarray) -> np.float32:
        lanes = np.zeros(16, f32)
        for step in range(36):
            lanes = lanes + q[16 * step : 16 * step + 16] * row[16 * step : 16 * step + 16]
        low, high = f32(0), f32(0)
        for i in range(8):
            low, high = low + lanes[i], high + lanes[8 + i]
        return (low + high) * f32(0.07)

    def exp(x: np.float32) -> np.float32:
        return f32(np.exp(np.float64(x)))

    merged, merged_lse = None, None
    for block in (k[:16], k[16:]):
        scores = [score(row) for row in block]
        top = max(scores)
        weights = [exp(s - top) for s in scores]
        total = f32(0)
        for w in weights:
            total = total + w
        out = np.zeros(512, f32)
        for w, row in zip(weights, block, strict=True):
            out = out + (w / total) * row[:512]
        lse = f32(np.log(np.float64(total))) + top
        if merged is None:
            merged, merged_lse = out, lse
            continue
        high = max(merged_lse, lse)
        before, here = exp(merged_lse - high), exp(lse - high)
        merged = merged * (before / (before + here)) + out * (here / (before + here))
    assert np.array_equal(vllm_avx2.attend(query, rows, 512, 0.07)[0].numpy(), merged)


def up_to(*lengths: int) -> list[slice]:
    return [slice(0, length) for length in lengths]


@pytest.mark.parametrize("order", list(SumOrder))
def test_absorbed_attention_of_a_row_ignores_its_neighbours(order: SumOrder) -> None:
    """What makes MTP lossless: verifying three drafts beside a token doesn't change that token's bits."""
    _, rows = _random_decode(70)
    draw = torch.Generator().manual_seed(1)
    q_latent, q_rope = torch.randn(4, 4, 512, generator=draw).to(BF16), torch.randn(4, 4, 64, generator=draw).to(BF16)
    kernels = Kernels(order=order)
    kernel = dense(kernels)
    together = attend_absorbed(q_latent, q_rope, rows.to(BF16), up_to(67, 68, 69, 70), 0.07, kernel)
    for t in range(4):
        one = slice(t, t + 1)
        alone = attend_absorbed(q_latent[one], q_rope[one], rows[: 67 + t].to(BF16), up_to(67 + t), 0.07, kernel)
        assert alone[0].equal(together[t])


def test_plain_and_absorbed_are_the_same_sum() -> None:
    draw = torch.Generator().manual_seed(2)
    heads, nope, value, tokens = 2, 32, 16, 9
    rows = torch.randn(tokens, 576, generator=draw)
    w_uk, w_uv = torch.randn(heads, nope, 512, generator=draw) / 20, torch.randn(heads, 512, value, generator=draw) / 20
    q_nope, q_rope = torch.randn(3, heads, nope, generator=draw), torch.randn(3, heads, 64, generator=draw)
    k_nope = torch.einsum("hpl,sl->shp", w_uk, rows[:, :512])
    v = torch.einsum("hlv,sl->shv", w_uv, rows[:, :512])
    plain = attend_plain(torch.cat((q_nope, q_rope), -1), k_nope, rows[:, 512:], v, tokens - 3, 0.1)
    q_latent = torch.einsum("thp,hpl->thl", q_nope, w_uk)
    latent = attend_absorbed(q_latent, q_rope, rows, up_to(tokens - 2, tokens - 1, tokens), 0.1, dense(Kernels()))
    torch.testing.assert_close(torch.einsum("thl,hlv->thv", latent, w_uv), plain, rtol=1e-4, atol=1e-4)


def test_chosen_rows_of_a_prompt_are_the_sum_of_decode_over_these_rows() -> None:
    """Queries that see all before them, then more chosen ones than fit into one group; every row of a choice counts."""
    draw = torch.Generator().manual_seed(3)
    rows, queries = torch.randn(900, 576, generator=draw), 12
    q = torch.randn(queries, 2, 576, generator=draw)
    q_latent, q_rope = q[..., :512], q[..., 512:]
    chosen = [torch.randperm(900, generator=draw)[:500].sort().values for _ in range(queries - 2)]
    assert len(chosen) > GATHERED_VALUES // (500 * 576)
    seen = [*up_to(499, 500), *chosen]
    out = attend_chosen(q_latent, q_rope, rows, seen, 0.05)
    torch.testing.assert_close(out, attend_absorbed(q_latent, q_rope, rows, seen, 0.05, dense(Kernels())))
    for t, positions in enumerate(chosen, start=2):
        probs = torch.softmax(q[t].double() @ rows[positions].double().T * 0.05, dim=-1)
        torch.testing.assert_close(out[t].double(), probs @ rows[positions, :512].double(), rtol=1e-4, atol=1e-4)
