"""The Triton kernels of a Hopper GPU against what they stand for: the emulation of its tensor cores, bit for bit, and
the torch functions that run elsewhere, run here on the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from tilert_ref.connector.rounding import (
    INDEX_KEY_FLOOR,
    INDEX_QUERY_FLOOR,
    SMALLEST_POWER_OF_TWO_RATIO,
    ScaleRead,
    ScaleRule,
    dequantize_fp8_ds_mla,
    quantize_fp8_ds_mla,
    quantize_index,
)
from tilert_ref.engine import tensor_cores
from tilert_ref.engine import vllm_hopper as hopper
from tilert_ref.engine.block_fp8 import ActivationScale, BlockScale, quantize_activations, quantize_blocks
from tilert_ref.engine.indexer import top_positions
from tilert_ref.engine.linear import Fp8Matrix, fp8_product
from tilert_ref.engine.model import add_rms_norm
from tilert_ref.engine.numerics import Pointwise, SumOrder
from tilert_ref.engine.rope import apply_rope

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_attention = pytest.importorskip("tilert_ref.engine.triton_attention")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def wide(*shape: int) -> torch.Tensor:
    """Values over many powers of two."""
    return torch.randn(shape) * torch.exp(torch.randn(shape))


def equal_share(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours.cpu() == theirs.cpu()).float().mean().item()


@pytest.mark.parametrize("tokens", [1, 4, 17, 100])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (192, 256), (576, 1024), (128, 2048)])
@pytest.mark.parametrize("rule", BlockScale)
def test_fp8_products_have_the_emulated_bits(tokens: int, rows: int, columns: int, rule: BlockScale) -> None:
    """(128, 2048) is cut along K and added up by the program that comes last."""
    codes, scales = quantize_blocks(wide(rows, columns), rule)
    w = Fp8Matrix(codes, scales, ActivationScale.UE8M0, SumOrder.VLLM_HOPPER)
    x = wide(tokens, columns).to(BF16)
    on_gpu = Fp8Matrix(codes.cuda(), scales.cuda(), w.rule, w.order)
    ours = fp8_product(x.cuda(), on_gpu)
    assert ours.cpu()[:17].equal(fp8_product(x[:17], w))
    assert ours[-1:].equal(fp8_product(x[-1:].cuda(), on_gpu))  # alone as among others


@pytest.mark.parametrize("tokens", [1, 4, 100])
@pytest.mark.parametrize(("rows", "columns"), [(512, 1024), (4, 576), (192, 96)])
def test_bf16_products_have_the_emulated_bits(tokens: int, rows: int, columns: int) -> None:
    x, w = wide(tokens, columns).to(BF16), wide(rows, columns).to(BF16)
    ours = tensor_cores.products().bf16_product(x.cuda(), w.cuda(), torch.float32)
    assert ours.cpu().equal(hopper.bf16_dot(x, w))


def test_products_of_heads_and_experts_are_those_of_single_matrices() -> None:
    products = tensor_cores.products()
    x, w = wide(2, 4, 192).to(BF16).cuda()[..., :128], wide(4, 512, 128).to(BF16).cuda()
    alone = [products.bf16_product(x[:, h].contiguous(), w[h], BF16) for h in range(4)]
    assert products.heads_product(x, w).equal(torch.stack(alone, 1))
    x, w, ids = wide(3, 256).to(BF16).cuda(), wide(8, 256, 256).to(BF16), torch.tensor([5, 0, 7, 5, 2, 2]).cuda()
    alone = [products.bf16_product(x[p // 2][None], w[ids[p]].cuda(), torch.float32) for p in range(6)]
    assert products.bf16_product(x, w.cuda(), torch.float32, ids).equal(torch.cat(alone))
    blocks = [quantize_blocks(matrix.float(), BlockScale.PLAIN) for matrix in w]
    codes, scales = (torch.stack(part).cuda() for part in zip(*blocks, strict=True))
    a, s = quantize_activations(x, ActivationScale.UE8M0)
    a = a.flatten(1)
    alone = [products.fp8_product(a[p // 2][None], s[p // 2][None], codes[ids[p]], scales[ids[p]]) for p in range(6)]
    assert products.fp8_product(a, s, codes, scales, torch.float32, ids).equal(torch.cat(alone))


@triton.jit
def _reciprocal_kernel(x, out, size, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, triton_attention._reciprocal(tl.load(x + i, mask=i < size, other=1.0)), mask=i < size)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """The GPU's own, which torch has no function for; [H, 1]."""
    out = torch.empty_like(x)
    _reciprocal_kernel[(1,)](x.contiguous(), out, x.numel(), SIZE=triton.next_power_of_2(x.numel()))
    return out


@pytest.mark.parametrize(("heads", "tokens", "chosen"), [(4, 1, 256), (4, 2, 200), (64, 1, 2048), (128, 2, 100)])
@pytest.mark.parametrize("fp8", [True, False])
def test_attention_has_the_emulated_bits(
    heads: int, tokens: int, chosen: int, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulation runs on the GPU too, for its exp2, log2 and reciprocal."""
    monkeypatch.setattr(hopper, "_reciprocal", reciprocal)
    stored = quantize_fp8_ds_mla(torch.randn(3000, 512), torch.randn(3000, 64).to(BF16), ScaleRule.PLAIN)
    values = torch.cat(dequantize_fp8_ds_mla(stored, ScaleRead.BF16), -1)
    query = torch.randn(tokens, heads, 576).to(BF16).cuda()
    slots = torch.stack([torch.randperm(3000)[:chosen] for _ in range(tokens)]).cuda()
    scale = 192**-0.5
    rows, form = (stored, hopper.attend_fp8_rows) if fp8 else (values, hopper.attend_bf16_rows)
    counts = torch.full((tokens,), chosen, dtype=torch.int32, device="cuda")
    place, values = (rows.cuda(), slots.int(), counts), values.cuda().float()
    ours = tensor_cores.attention().attend(*query.split([512, 64], -1), *place, scale, not fp8)
    theirs = torch.stack([form(q.float(), values[s], 512, scale) for q, s in zip(query, slots, strict=True)])
    assert ours.equal(theirs.to(BF16))


@pytest.mark.parametrize(("heads", "tokens", "chosen"), [(4, 1, 256), (64, 1, 2048)])
@pytest.mark.parametrize("fp8", [True, False])
def test_attention_is_that_of_a_cpu_but_for_exp2(heads: int, tokens: int, chosen: int, fp8: bool) -> None:
    """And the reciprocal: one result in some thousands."""
    stored = quantize_fp8_ds_mla(torch.randn(3000, 512), torch.randn(3000, 64).to(BF16), ScaleRule.PLAIN)
    values = torch.cat(dequantize_fp8_ds_mla(stored, ScaleRead.BF16), -1)
    query = torch.randn(tokens, heads, 576).to(BF16)
    slots = torch.stack([torch.randperm(3000)[:chosen] for _ in range(tokens)])
    scale = 192**-0.5
    rows, form = (stored, hopper.attend_fp8_rows) if fp8 else (values, hopper.attend_bf16_rows)
    counts = torch.full((tokens,), chosen, dtype=torch.int32, device="cuda")
    place = rows.cuda(), slots.int().cuda(), counts
    ours = tensor_cores.attention().attend(*query.cuda().split([512, 64], -1), *place, scale, not fp8).cpu()
    theirs = torch.stack([form(q.float(), values[s].float(), 512, scale) for q, s in zip(query, slots, strict=True)])
    assert equal_share(ours, theirs.to(BF16)) > 0.999
    torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("capacity", [4608, 40_000])
def test_choice_is_exact_with_ties_and_scattered_blocks(capacity: int) -> None:
    """40,000 scores don't fit one chunk."""
    capacity -= capacity % 64
    scores = torch.randn(4, capacity)
    scores[:, 100:2000] = 0.0
    scores[0, ::2] = -0.0
    scores[3] = 1.0
    table, positions = torch.randperm(capacity // 64), torch.tensor([capacity - 1, 255, 300, 4000])
    slots, counts = tensor_cores.attention().choose(scores.cuda(), table.cuda(), positions.cuda(), 256)
    later = torch.arange(capacity) > positions[:, None]
    best = top_positions(scores.masked_fill(later, -math.inf), 256)
    assert counts.tolist() == [256] * 4
    assert slots.cpu().long().equal(table[best // 64] * 64 + best % 64)


def test_a_query_with_few_tokens_before_it_sees_them_all() -> None:
    table, positions = torch.tensor([1, 0]), torch.tensor([69, 3])
    slots, counts = tensor_cores.attention().choose(torch.randn(2, 128).cuda(), table.cuda(), positions.cuda(), 256)
    assert counts.tolist() == [70, 4]
    assert slots[0, :70].tolist() == [*range(64, 128), *range(6)]
    assert slots[1, :4].tolist() == [64, 65, 66, 67]


@pytest.mark.parametrize("vocabulary", [1024, 154_880])
def test_the_best_token_is_the_first_of_the_highest(vocabulary: int) -> None:
    rows = torch.randn(4, vocabulary).to(BF16)
    rows[1, [vocabulary - 1, 77, 4097 % vocabulary]] = 100.0
    rows[2] = -torch.inf
    rows[3, 5] = torch.nan
    assert tensor_cores.steps().best(rows.cuda()).tolist() == [*rows[:3].float().argmax(-1).tolist(), 5]
    assert rows[1].argmax() == min(77, 4097 % vocabulary)


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_index_scores_are_those_of_the_emulated_products(heads: int) -> None:
    pool = torch.zeros(9, 8448, dtype=torch.uint8)
    keys, key_scales = quantize_index(torch.randn(9 * 64, 128), INDEX_KEY_FLOOR)
    pool[:, :8192] = keys.view(torch.uint8).view(9, -1)
    pool.view(torch.float32)[:, 2048:] = key_scales.view(9, 64)
    query, weights = wide(2, heads, 128).to(torch.float8_e4m3fn), torch.randn(2, heads)
    table, positions = torch.randperm(9), torch.tensor([575, 70])
    place = table.cuda(), positions.cuda()
    ours = tensor_cores.attention().index_scores(query.cuda(), weights.cuda(), pool.cuda(), *place).cpu()
    order = (table[:, None] * 64 + torch.arange(64)).flatten()
    for row, q, w, end in zip(ours, query, weights, (576, 71), strict=True):
        dots = hopper.fp8_dot(hopper.operand(q), hopper.operand(keys[order])).relu()
        torch.testing.assert_close(row[:end], (w @ dots * key_scales[order])[:end], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
class TestPointwise:
    """Exact where nothing is summed; where something is, another order may move one bf16 result in a thousand."""

    def test_norms(self, tokens: int) -> None:
        x, residual, weight = (wide(tokens, 6144).to(BF16) for _ in range(3))
        ours = tensor_cores.pointwise().add_rms_norm(x.cuda(), residual.cuda(), weight[0].cuda(), 1e-6)
        theirs = add_rms_norm(x, residual, weight[0], 1e-6, Pointwise.FUSED)
        assert ours[1].cpu().equal(theirs[1])
        assert equal_share(ours[0], theirs[0]) > 0.999  # rsqrt is the GPU's
        for width in (128, 512, 2048, 6144):
            for before in (None, residual[:, :width].contiguous().cuda()):
                part = x[:, :width].cuda()
                out, stream = tensor_cores.pointwise().add_rms_norm(part, before, weight[0, :width].cuda(), 1e-6)
                total = part if before is None else (part.float() + before.float()).to(BF16)
                squares = hopper.sum_of_squares(total, before is not None)
                mean = squares / torch.tensor(float(width), device="cuda")  # by a Python number torch would multiply
                normed = total.float() * torch.rsqrt(mean + 1e-6) * weight[0, :width].cuda().float()
                assert stream.equal(total) and out.equal(normed.to(BF16))
        k, w, b = wide(tokens, 128).to(BF16), torch.randn(128), torch.randn(128)
        ours = tensor_cores.pointwise().layer_norm(k.cuda(), w.cuda(), b.cuda(), 1e-6)
        torch.testing.assert_close(ours.cpu(), F.layer_norm(k.float(), (128,), w, b, 1e-6).to(BF16))

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_rope(self, tokens: int, interleaved: bool) -> None:
        q, table = torch.randn(tokens, 4, 192).to(BF16), torch.randn(tokens, 2, 32)
        theirs = apply_rope(q[..., 128:], table, Pointwise.FUSED, interleaved=interleaved)
        ours = apply_rope(q.cuda()[..., 128:], table.cuda(), Pointwise.FUSED, interleaved=interleaved)
        assert ours.cpu().equal(theirs)
        whole = tensor_cores.pointwise().rope(q.cuda(), table.cuda(), interleaved, 64).cpu()
        assert whole[..., 64:].equal(q[..., 64:])
        assert whole[..., :64].equal(apply_rope(q[..., :64], table, Pointwise.FUSED, interleaved=interleaved))

    @pytest.mark.parametrize("rule", [ActivationScale.UE8M0, ActivationScale.PLAIN])
    def test_activations(self, tokens: int, rule: ActivationScale) -> None:
        x = wide(tokens, 2048).to(BF16)
        x[0, :128] = 0
        for ours, theirs in zip(quantize_activations(x.cuda(), rule), quantize_activations(x, rule), strict=True):
            assert ours.cpu().view(torch.uint8).equal(theirs.view(torch.uint8))

    @pytest.mark.parametrize("rule", ScaleRule)
    def test_rows(self, tokens: int, rule: ScaleRule) -> None:
        latent, rope, rows = wide(tokens, 512).to(BF16), wide(tokens, 64).to(BF16), torch.zeros(640, 656).byte().cuda()
        table, positions = torch.randperm(10), torch.tensor([70, 3, 200])[:tokens]
        place = rows, table.cuda(), 64, positions.cuda()
        plain = rule is ScaleRule.PLAIN
        write = tensor_cores.pointwise().write_rows
        write(*place, latent.cuda(), rope.cuda(), plain, SMALLEST_POWER_OF_TWO_RATIO)
        theirs = torch.zeros(640, 656).byte()
        theirs[table[positions // 64] * 64 + positions % 64] = quantize_fp8_ds_mla(latent, rope, rule)
        assert rows.cpu().equal(theirs)

    def test_index_keys(self, tokens: int) -> None:
        keys, pool = wide(tokens, 128).to(BF16), torch.zeros(10, 8448).byte().cuda()
        table, positions = torch.randperm(10), torch.tensor([70, 3, 200])[:tokens]
        tensor_cores.pointwise().write_index(pool, table.cuda(), 64, positions.cuda(), keys.cuda(), INDEX_KEY_FLOOR)
        codes, scales = quantize_index(keys, INDEX_KEY_FLOOR)
        for block, at, code, scale in zip(table[positions // 64], positions % 64, codes, scales, strict=True):
            assert pool[block, at * 128 : (at + 1) * 128].cpu().equal(code.view(torch.uint8))
            assert pool.view(torch.float32)[block, 2048 + at].cpu() == scale
        assert int((pool != 0).any(1).sum()) == tokens

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_index_queries(self, tokens: int, interleaved: bool) -> None:
        q, heads, table = wide(tokens, 32, 128).to(BF16), wide(tokens, 32).to(BF16), torch.randn(tokens, 2, 32)
        q[0, 0] = 0
        turned = apply_rope(q[..., :64], table, Pointwise.FUSED, interleaved=interleaved)
        codes, scales = quantize_index(torch.cat((turned, q[..., 64:]), -1), INDEX_QUERY_FLOOR)
        factors = 128**-0.5, 32**-0.5
        place = q.cuda(), heads.cuda(), table.cuda()
        ours = tensor_cores.pointwise().index_queries(*place, interleaved, INDEX_QUERY_FLOOR, factors)
        assert ours[0].cpu().view(torch.uint8).equal(codes.view(torch.uint8))
        assert ours[1].cpu().equal(heads.float() * scales * factors[0] * factors[1])

    def test_activation_and_routing(self, tokens: int) -> None:
        gate, up = wide(tokens, 1000).to(BF16), wide(tokens, 1000).to(BF16)
        ours = tensor_cores.pointwise().silu_mul(torch.cat((gate, up), 1).cuda())
        assert equal_share(ours, F.silu(gate) * up) > 0.999
        logits, bias = torch.randn(tokens, 256), torch.randn(256)
        weights, ids = tensor_cores.pointwise().route(logits.cuda(), bias.cuda(), True, 8, True)
        best = (logits.sigmoid() + bias).topk(8, sorted=True).indices
        chosen = logits.sigmoid().gather(1, best)
        assert ids.cpu().equal(best)
        torch.testing.assert_close(weights.cpu(), chosen / chosen.sum(-1, keepdim=True))

    def test_experts_are_rounded_before_they_are_added(self, tokens: int) -> None:
        outputs, weights, shared = wide(tokens * 8, 500), torch.rand(tokens, 8), wide(tokens, 500).to(BF16)
        ours = tensor_cores.pointwise().combine_experts(outputs.cuda(), weights.cuda(), 2.5, shared.cuda(), BF16)
        rounded = (outputs * weights.flatten()[:, None]).to(BF16).view(tokens, 8, -1).float()
        total = torch.zeros(tokens, 500)
        for expert in rounded.unbind(1):
            total = total + expert
        assert ours.cpu().equal(shared + total.to(BF16) * 2.5)
