"""Compiled decode steps: the bits of plain torch, and a clear word where there is nothing to compile with."""

import dataclasses
from functools import partial

import pytest
import torch

from tilert_ref.engine import compiled, opaque, vllm_avx2
from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.compiled import CompileError, check
from tilert_ref.engine.linear import InOrderMatrix, LanesMatrix
from tilert_ref.engine.numerics import TORCH, KernelRounding, Kernels, SumOrder
from tilert_ref.engine.ref import RefEngine, load_engine

AVX2 = Kernels(KernelRounding.TRUNCATE, SumOrder.VLLM_AVX2)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def decoded(engine: RefEngine, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    first = engine.prefill(prompt, GREEDY)
    *steps, _ = engine.decode(first, tokens, GREEDY)
    end = len(prompt) + tokens - 1
    rows = [engine.cache.read_rows(layer, end) for layer in range(len(engine.cache.rows))]
    return [token.id for step in steps for token in step], torch.stack(rows)


def test_compiled_steps_have_the_bits_of_plain_torch(tiny) -> None:
    """Across a group of 128 cached tokens. On a machine whose sums these are not it is the words that are checked."""
    lines = list[str]()
    directory = tiny("dsv3", first_k_dense_replace=0, num_hidden_layers=2)
    plain = load_engine(directory, max_seq_len=256)
    fast = load_engine(directory, max_seq_len=256, compile=True, progress=lines.append)
    if plain.model.kernels.order is not SumOrder.VLLM_AVX2:
        assert fast.model.pieces is None and "for CPUs with AVX2" in lines[-1]
        pytest.skip("no compiled steps on this CPU")
    assert lines[-1].startswith("decode steps compiled in") and lines[-1].endswith("(4 pieces)")
    prompt = [(7 * i + 3) % 480 for i in range(110)]
    (ids, rows), (fast_ids, fast_rows) = decoded(plain, prompt, 40), decoded(fast, prompt, 40)
    assert fast_ids == ids
    assert same_bits(fast_rows, rows)


def engine_with(directory, kernels: Kernels) -> RefEngine:
    return load_engine(directory, max_seq_len=32, kernels=kernels)


def test_without_a_compiler_steps_are_plain(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    lines = list[str]()
    engine = load_engine(tiny("dsv3"), max_seq_len=32, kernels=AVX2, compile=True, progress=lines.append)
    assert engine.model.pieces is None
    assert lines[-1].startswith("decode steps run as plain torch: there is no C++ compiler 'no-such-compiler'")
    assert len(decoded(engine, [5, 6, 7], 4)[0]) == 4


def test_other_sums_are_refused_by_name(tiny) -> None:
    with pytest.raises(CompileError, match="CPUs with AVX2"):
        check(engine_with(tiny("dsv3"), TORCH).model)


def test_a_piece_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for Inductor here adds the smallest float to every result."""

    def wrong(graph, inputs, **_):
        return lambda *args: [x.nextafter(torch.tensor(9.0)) for x in graph(*args)]

    monkeypatch.setattr(torch._inductor, "standalone_compile", wrong)
    draw = torch.Generator().manual_seed(0)
    compiler = compiled._Compiler(lambda line: None)
    with pytest.raises(CompileError, match="sum: the compiled form differs"):
        compiler.compile(lambda a, b: a + b, lambda: tuple(torch.randn(2, 8, generator=draw)), "sum")


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: 1 / 0)
    with pytest.raises(CompileError, match="sum: ZeroDivisionError: division by zero"):
        compiled._Compiler(lambda line: None).compile(lambda a: a + 1, lambda: (torch.ones(2),), "sum")


def test_layers_share_a_graph_and_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = list[str]()

    def as_traced(graph, inputs, **_):
        compiles.append(graph.code)
        return graph

    @dataclasses.dataclass
    class Layer:
        unused: torch.Tensor
        w: torch.Tensor

    monkeypatch.setattr(torch._inductor, "standalone_compile", as_traced)
    compiler, x = compiled._Compiler(lambda line: None), torch.ones(3)
    layers = [Layer(torch.zeros(n), torch.full((3,), float(n))) for n in (1, 2)]
    functions = [compiler.compile(lambda layer, x: layer.w * x, lambda n=n: (layers[n], x), "product") for n in (0, 1)]
    assert len(compiles) == 1
    assert [function(layer, 2 * x).tolist() for function, layer in zip(functions, layers, strict=True)] == [
        [2.0] * 3,
        [4.0] * 3,
    ]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 128, 129, 300])
def test_attention_in_groups_is_attention(tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    query, rows = (torch.randn(n, 576, generator=draw).bfloat16() for n in (4, tokens))
    whole = vllm_avx2.attend(query.float(), rows.float(), 512, 0.07)
    in_groups = partial(vllm_avx2.attend_in_groups, vllm_avx2.attend_group)
    assert same_bits(in_groups(query.float(), rows, 512, 0.07), whole)


def one_after_the_other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [in], w [out, in] fp32 -> [out]."""
    total = torch.zeros(len(w))
    for value, column in zip(x, w.T, strict=True):
        total = total + value * column
    return total


@pytest.mark.parametrize("kept", [True, False])
def test_expert_products_are_summed_in_order(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr("tilert_ref.engine.linear.KEPT_VALUES", 0)
    weight = vllm_avx2.cancelling_columns(200, 5 * 24).T.view(5, 24, 200).bfloat16()
    x, ids = torch.tensor([1.0, 0.5, -3.0, 2.0])[:, None].expand(-1, 200), torch.tensor([3, 0, 3, 4])
    products = InOrderMatrix(weight).product(x, ids)
    expected = torch.stack([one_after_the_other(row, weight[e].float()) for row, e in zip(x, ids, strict=True)])
    assert same_bits(products, expected)
    backwards = [one_after_the_other(row, weight[e].float().flip(1)) for row, e in zip(x, ids, strict=True)]
    assert not products.equal(torch.stack(backwards))


@pytest.mark.skipif(not vllm_avx2.in_four_lanes(), reason="torch.bmm has another order on this CPU")
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_heads_in_four_lanes_are_torchs_own_product(tokens: int) -> None:
    weight = vllm_avx2.cancelling_columns(192, 4 * 64).T.reshape(4, 64, 192).transpose(1, 2).bfloat16().contiguous()
    x = torch.tensor([1.0, 0.5, -3.0, 2.0])[:tokens, None, None].expand(-1, 4, 192).bfloat16()
    product = LanesMatrix(weight).product(x)
    assert same_bits(product, torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))
    in_order = [one_after_the_other(x[0, 0].float(), matrix.float().T) for matrix in weight]
    assert not product[0].equal(torch.stack(in_order).bfloat16())


def test_the_question_for_four_lanes_tells_orders_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([one_after_the_other(row.float(), w[0].float().T) for row in x[0]])[None].bfloat16()

    monkeypatch.setattr(torch, "bmm", in_order)
    assert not vllm_avx2.in_four_lanes.__wrapped__()


def test_the_routers_sigmoid_is_torchs_in_every_bit() -> None:
    """Inductor's own is a bit off in one of some twenty values of eight experts; a step's rounding mostly hides it."""
    compiled = torch.compile(lambda x: opaque.sigmoid(x) * 1.0, backend="inductor")
    logits = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    for row in logits.split(1):
        assert compiled(row).equal(row.sigmoid())
