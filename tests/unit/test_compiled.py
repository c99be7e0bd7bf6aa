"""Compiled decode steps: the bits of plain torch, and a clear word where there is nothing to compile with."""

import dataclasses
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler, is_gcc
from torch.fx.experimental.proxy_tensor import make_fx

from tilert_ref.engine import compiled, vllm_avx2
from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.compiled import CompileError, check
from tilert_ref.engine.config import load_config
from tilert_ref.engine.cpp_attention import CppAttention
from tilert_ref.engine.linear import InOrderMatrix, LanesMatrix, OpenMatrix, linear
from tilert_ref.engine.numerics import TORCH, KernelRounding, Kernels, SumOrder, round_kernel, vllm_kernels
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
    """Across blocks of cached tokens. On a machine whose sums these are not it is the words that are checked."""
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


@pytest.mark.parametrize("command", ["env g++ -DTWO='2 words'", "  env   g++ "])
def test_a_compiler_may_be_a_command_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles the attention kernel with it; here it only asks for the version, a second less."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    with config.patch({"cpp.cxx": (None, compiled.cxx())}):
        program = get_cpp_compiler()
        assert is_gcc() and program == compiled.cxx()
    assert subprocess.check_output([program, "--version"]) == subprocess.check_output(["g++", "--version"])
    assert [path.name for path in tmp_path.iterdir()] == [Path(program).name]


@pytest.mark.parametrize(("command", "named"), [("g++", "g++"), ("", "g++"), (None, "g++"), ("/bin/sh", "/bin/sh")])
def test_a_compiler_of_one_word_goes_to_inductor_as_it_is(
    command: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if command is not None:
        monkeypatch.setenv("CXX", command)
    assert compiled.cxx() == named


@pytest.mark.parametrize(
    ("command", "said"), [("no-such g++", r"no C\+\+ compiler 'no-such'"), ("g++ '", "No closing quotation; legal: a")]
)
def test_a_command_line_that_starts_nothing_is_named(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(CompileError, match=said):
        compiled.cxx()


def test_other_sums_are_refused_by_name(tiny) -> None:
    with pytest.raises(CompileError, match="CPUs with AVX2"):
        check(engine_with(tiny("dsv3"), TORCH).model)


def test_a_piece_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for Inductor here adds the smallest float to every result."""

    def wrong(graph, inputs):
        return lambda tensors: [x.nextafter(torch.tensor(9.0)) for x in graph(*tensors)]

    monkeypatch.setattr(compiled, "_inductor", wrong)
    draw, add = torch.Generator().manual_seed(0), partial(torch.add)
    compiler = compiled._Compiler(lambda line: None)
    with pytest.raises(CompileError, match="sum: the compiled form differs"):
        compiler.compile(add, add, lambda: tuple(torch.randn(2, 8, generator=draw)), "sum")


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_fx_inner", lambda *_, **__: 1 / 0)
    negative = partial(torch.neg)
    with pytest.raises(CompileError, match="sum: ZeroDivisionError: division by zero"):
        compiled._Compiler(lambda line: None).compile(negative, negative, lambda: (torch.ones(2),), "sum")


def test_layers_share_a_graph_and_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = list[str]()

    def as_traced(graph, inputs):
        compiles.append(graph.code)
        return lambda tensors: graph(*tensors)

    @dataclasses.dataclass
    class Layer:
        unused: torch.Tensor
        w: torch.Tensor

    monkeypatch.setattr(compiled, "_inductor", as_traced)
    compiler, x = compiled._Compiler(lambda line: None), torch.ones(3)
    products = [
        partial(lambda layer, x: layer.w * x, Layer(torch.zeros(n), torch.full((3,), float(n)))) for n in (1, 2)
    ]
    functions = [compiler.compile(product, product, lambda: (x,), "product") for product in products]
    assert len(compiles) == 1
    assert [function(2 * x).tolist() for function in functions] == [[2.0] * 3, [4.0] * 3]


@pytest.fixture(scope="module")
def cpp_attention() -> CppAttention:
    if vllm_kernels("cpu") != AVX2:
        pytest.skip("no compiled steps on this CPU")
    return CppAttention.build(512, 64, 0.07)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300])
def test_attention_in_cpp_is_attention(tokens: int, cpp_attention: CppAttention, tiny) -> None:
    """Of two queries, in blocks that lie anywhere; what stands behind a query is not looked at."""
    draw = torch.Generator().manual_seed(tokens)
    cache = KVCache(load_config(tiny("dsv3")), 2, 320)
    cache.block_table = torch.randperm(5, generator=draw)
    cache.rows.copy_(torch.randn(cache.rows.shape, generator=draw))
    cache.layer_rows(1)[cache.all_slots[tokens + 1 :]] = float("nan")
    q_latent, q_rope = (torch.randn(2, 4, n, generator=draw).bfloat16() for n in (512, 64))
    attended = cpp_attention(q_latent, q_rope, cache, 1, tokens - 1)
    rows = cache.read(1, tokens + 1).float()
    for t, query in enumerate(torch.cat((q_latent, q_rope), dim=-1).float()):
        expected = vllm_avx2.attend(query, rows[: tokens + t], 512, 0.07)
        assert same_bits(attended[t], round_kernel(expected, torch.bfloat16, KernelRounding.TRUNCATE))


@pytest.mark.parametrize("widths", [(500, 64), (512, 40)])
def test_attention_of_other_widths_is_refused(widths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"rows of {widths[0]} \+ {widths[1]} values; legal"):
        CppAttention.build(*widths, 0.07)


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


@pytest.mark.skipif(not vllm_avx2.rows_in_lanes(), reason="torch's products have another order on this CPU")
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_an_open_matrix_compiled_is_torchs_own_product(tokens: int) -> None:
    """Also of columns that leave another rest in another order."""
    columns = vllm_avx2.cancelling_columns(192, 48)
    x, w = torch.arange(1.0, tokens + 1)[:, None].expand(-1, 192).bfloat16(), columns.T.contiguous().bfloat16()
    opened = OpenMatrix.of(w.T, 64, in_turn=False)
    compiled_product = compiled_by_inductor(lambda x, weight: linear(x, OpenMatrix(weight, False)), x, opened.weight)
    assert same_bits(compiled_product([x, opened.weight])[0], linear(x, w))
    assert not linear(x, w)[0].equal(one_after_the_other(x[0].float(), w.float()).bfloat16())


def test_the_question_for_rows_in_lanes_tells_orders_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([one_after_the_other(row.float(), w.float()) for row in x]).bfloat16()

    monkeypatch.setattr(torch.nn.functional, "linear", in_order)
    assert not vllm_avx2.rows_in_lanes.__wrapped__()


def compiled_by_inductor(function, *tensors: torch.Tensor):
    return compiled._inductor(make_fx(lambda *args: (function(*args),))(*tensors), list(tensors))


def test_the_routers_sigmoid_is_torchs_in_every_bit() -> None:
    """Inductor's own is a bit off in one of some twenty values of eight experts; a step's rounding mostly hides it."""
    logits = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    sigmoid = compiled_by_inductor(lambda x: x.sigmoid() * 1.0, logits[:1])
    for row in logits.split(1):
        assert sigmoid([row])[0].equal(row.sigmoid())
