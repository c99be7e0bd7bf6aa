"""The functions of a layer on a CPU, compiled by Inductor, with the bits of plain torch.

At batch 1 a decode step of a small model is a thousand calls of tiny kernels, and the calls take longer than the work.
Compiled, a product is one loop nest with whatever is pointwise around it, and attention is one kernel.

What keeps the bits: results are rounded where torch rounds them (emulate_precision_casts), no product swallows the
addition behind it (pattern_matcher), multiplication and addition are not contracted (Inductor's default), what is in
KEPT stays a call of torch's own kernel, and matrices are laid out so that loops take torch's sums in torch's order
(linear.OpenMatrix), in half of torch's time. Each piece is compared with plain torch, layer by layer, before it is
used.

Functions are traced here, and what Inductor makes is called directly: torch.compile's look at its guards took 30 us a
call, a tenth of a step, and what stands between standalone_compile's result and its kernels another 80. Layers of one
shape share what is compiled: weights are inputs. It takes some seconds a piece, once: Inductor keeps its results on
disk (TORCHINDUCTOR_CACHE_DIR).
"""

import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental.proxy_tensor import make_fx

from tilert_ref.engine import vllm_avx2
from tilert_ref.engine.attention import attend_absorbed, decode_kernel
from tilert_ref.engine.batch import Pieces
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.cpp_attention import CppAttention
from tilert_ref.engine.decode import Model
from tilert_ref.engine.linear import LanesMatrix, Matrix, OpenMatrix
from tilert_ref.engine.model import after_attention, before_attention
from tilert_ref.engine.numerics import KernelRounding, SumOrder
from tilert_ref.engine.vllm_avx2 import ROW_LANES
from tilert_ref.engine.weights import LayerWeights, MlpWeights, MoeWeights

OPTIONS = {"emulate_precision_casts": True, "pattern_matcher": False, "size_asserts": False, "alignment_asserts": False}
KEPT = {
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.sigmoid.default,
    torch.ops.aten.silu.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten.bmm.default,
}
"""Inductor takes sums in another order than torch, has other formulas for these functions, and makes sums of its own of
small batched products. Of sums only those over the last dimension are kept."""
TRIES = 8  # random inputs on which a piece must agree with plain torch in every bit

Progress = Callable[[str], None]
Function = Callable[..., Any]
Draw = Callable[[], tuple[torch.Tensor, ...]]


class CompileError(RuntimeError):
    """There is no compiler, or what it made has other bits."""


def compile_pieces(model: Model, tokens: Iterable[int], progress: Progress = lambda line: None) -> Pieces:
    """Compiles what decode steps of so many tokens run; steps of other sizes take plain torch.

    Raises CompileError, naming the reason.
    """
    check(model)
    with config.patch({"cpp.cxx": (None, cxx())}):
        return _compile_pieces(model, tokens, progress)


def _compile_pieces(model: Model, tokens: Iterable[int], progress: Progress) -> Pieces:
    start = time.monotonic()
    compiler, draw = _Compiler(progress), torch.Generator().manual_seed(0)
    before, after = _Piece(before_attention), _Piece(after_attention)
    layers = model.weights.layers + ([] if model.weights.mtp is None else [model.weights.mtp.layer])
    for number, w in enumerate(layers):
        starts = number in (0, model.config.num_hidden_layers)  # no residual stream yet: the first one and MTP's
        opened = _opened(w)
        for count in sorted(set(tokens)):
            where = f"layer {number}, {count} token(s)"
            into_before = partial(_into_before, model, count, starts, draw)
            compiler.add(before, model, w, opened, into_before, f"before it, {where}")
            compiler.add(after, model, w, opened, partial(_into_after, model, count, draw), f"after it, {where}")
    attend = None if model.config.index_topk is not None else _attention(model, draw)  # a sparse one's: two products
    pieces = len(compiler.done) + (attend is not None)
    progress(f"decode steps compiled in {time.monotonic() - start:.1f} s ({pieces} pieces)")
    return Pieces(before, after, attend)


def check(model: Model) -> None:
    """Raises CompileError where decode steps can't be compiled."""
    if model.kernels.order is not SumOrder.VLLM_AVX2 or model.rope.device.type != "cpu":
        raise CompileError("they are compiled for CPUs with AVX2 and without AVX512 only")
    if model.kernels.rounding is not KernelRounding.TRUNCATE:
        raise CompileError(f"they round as such CPUs do, truncating; not {model.kernels.rounding.value}")
    if model.config.block_fp8:
        raise CompileError("those of fp8 weights are not compiled")
    _cxx_words()


def cxx() -> str:
    """The C++ compiler as Inductor wants it named, one program; of a CXX with more words ("ccache g++") a script.

    The script lies beside Inductor's results, always under the same name: they are found again by the command that made
    them. Its name ends with the compiler's, in which Inductor looks for g++ and clang.
    """
    words = _cxx_words()
    if len(words) == 1:
        return words[0]
    text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
    programs = [Path(word).name for word in words if not word.startswith("-")]
    compiler = next((name for name in reversed(programs) if re.search(r"g\+\+|gcc|clang", name)), programs[-1])
    name = re.sub(r"[^\w.+-]", "_", compiler)[-100:]
    script = Path(cache_dir(), f"cxx-{hashlib.sha256(text.encode()).hexdigest()[:8]}-{name}")
    new = script.with_name(f"{script.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(0o755)
    new.replace(script)
    return str(script)


def _cxx_words() -> list[str]:
    """$CXX, a command line as make and CMake take it; g++ where it is not set. CompileError if it starts no program."""
    command = os.environ.get("CXX", "").strip() or "g++"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CompileError(f"CXX = {command!r}: {error}; legal: a command line, as ccache g++") from error
    if not words or shutil.which(words[0]) is None:
        missing = words[0] if words else command
        raise CompileError(f"there is no C++ compiler {missing!r}; install one or name one in CXX")
    return words


class _Piece:
    """function(w, config, kernels, absorbed, *tensors); absorbed, compiled for each layer and shape in `ready`."""

    def __init__(self, function: Function):
        self.function, self.ready = function, dict[tuple[int, int, int], Function]()

    def __call__(self, w: LayerWeights, config: Any, kernels: Any, absorbed: bool, *tensors: torch.Tensor) -> Any:
        compiled = self.ready.get(self.key(w, tensors)) if absorbed else None
        return self.function(w, config, kernels, absorbed, *tensors) if compiled is None else compiled(*tensors)

    @staticmethod
    def key(w: LayerWeights, tensors: tuple[torch.Tensor, ...]) -> tuple[int, int, int]:
        return id(w), len(tensors), tensors[0].shape[0]


def _attention(model: Model, draw: torch.Generator) -> CppAttention:
    """Raises CompileError if it differs from plain torch, at the ends of blocks or within them."""
    c = model.config
    try:
        attend = CppAttention.build(c.kv_lora_rank, c.qk_rope_head_dim, c.softmax_scale)
    except Exception as error:  # the compiler's, the disk's
        raise CompileError(f"attention: {type(error).__name__}: {str(error).strip()[:500]}") from error
    plain, cache = decode_kernel(model.kernels, sparse=False, fp8_rows=False), KVCache(c, 1, 64)
    cache.rows.copy_(_random(draw, *cache.rows.shape))
    for first in (0, 14, 15, 40, 60):
        q_latent, q_rope = (_random(draw, 2, c.num_attention_heads, n) for n in (c.kv_lora_rank, c.qk_rope_head_dim))
        seen = [slice(0, first + 1), slice(0, first + 2)]
        expected = attend_absorbed(q_latent, q_rope, cache.read(0, first + 2), seen, c.softmax_scale, plain)
        if not _same_bits(attend(q_latent, q_rope, cache, 0, first), expected):
            raise CompileError(f"attention to {first + 1} tokens: the compiled form differs from plain torch")
    return attend


class _Compiler:
    """done: compiled graphs by their code and the shapes of what goes into them."""

    def __init__(self, progress: Progress):
        self.progress, self.done = progress, dict[Any, Function]()

    def add(self, piece: _Piece, model: Model, w: LayerWeights, opened: LayerWeights, draw: Draw, name: str) -> None:
        """Compiles piece.function for the weights of a layer, which `opened` are too, laid out for a compiler."""
        plain, laid_out = (partial(piece.function, each, model.config, model.kernels, True) for each in (w, opened))
        piece.ready[piece.key(w, draw())] = self.compile(plain, laid_out, draw, name)

    def compile(self, plain: partial, laid_out: partial, draw: Draw, name: str) -> Function:
        """laid_out, compiled for tensors like those of draw(); its other arguments are bound to it.

        Raises CompileError if results differ from plain's.
        """
        tensors = draw()
        result = laid_out(*tensors)  # fills what is made on first use (linear.py)
        bound = list(_tensors(laid_out.args))
        given = [*bound, *tensors]
        used = [bool(node.users) for node in _placeholders(_trace(laid_out, tensors, given))]
        inputs = [tensor for tensor, there in zip(given, used, strict=True) if there]
        run, make = self._compiled(_trace(laid_out, tensors, inputs), inputs, name), _maker(result)
        weights = inputs[: sum(used[: len(bound)])]
        wanted = [index for index, there in enumerate(used[len(bound) :]) if there]

        def compiled(*tensors: torch.Tensor) -> Any:
            return make(iter(run([*weights, *[tensors[index] for index in wanted]])))

        for _ in range(TRIES):
            tensors = draw()
            if not all(map(_same_bits, _tensors(compiled(*tensors)), _tensors(plain(*tensors)))):
                raise CompileError(f"{name}: the compiled form differs from plain torch")
        return compiled

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], name: str) -> Function:
        key = graph.code, tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in inputs)
        if key not in self.done:
            self.progress(f"compiling decode steps: {name}")
            try:
                self.done[key] = _inductor(graph, inputs)
            except Exception as error:  # Inductor's own errors, the compiler's, the disk's: plain torch goes on
                raise CompileError(f"{name}: {type(error).__name__}: {str(error).strip()[:500]}") from error
        return self.done[key]


def _opened(w: LayerWeights) -> LayerWeights:
    """The same matrices laid out for a compiler, where the order of their products' sums is known."""
    a, mlp = w.attention, w.mlp
    names = ["q_a", "q_b", "kv_a", "o"]
    linears = {name: _open_linear(getattr(a, name)) for name in names if getattr(a, name) is not None}
    attention = replace(a, **linears, w_uk=_open_heads(a.w_uk), w_uv=_open_heads(a.w_uv))
    return replace(w, attention=attention, mlp=_open_mlp(mlp) if isinstance(mlp, MlpWeights) else _open_moe(mlp))


def _open_mlp(w: MlpWeights) -> MlpWeights:
    return MlpWeights(_open_linear(w.gate_up), _open_linear(w.down))


def _open_moe(w: MoeWeights) -> MoeWeights:
    gate_up, down = (OpenMatrix.of(stack.weight.transpose(1, 2), 1, True) for stack in (w.gate_up, w.down))
    return replace(w, gate_up=gate_up, down=down, shared=None if w.shared is None else _open_mlp(w.shared))


def _open_linear(w: torch.Tensor) -> Matrix:
    """w [out, in]."""
    opens = w.shape[1] % ROW_LANES == 0 and vllm_avx2.rows_in_lanes()
    return OpenMatrix.of(w.T, ROW_LANES, in_turn=False) if opens else w


def _open_heads(w: torch.Tensor | LanesMatrix) -> torch.Tensor | LanesMatrix | OpenMatrix:
    """w [H, in, out]; stored as [H, out, in] it is multiplied as a linear layer's matrix is."""
    if isinstance(w, LanesMatrix):
        return OpenMatrix.of(w.weight, vllm_avx2.BMM_LANES, in_turn=True)
    opens = w.stride(1) == 1 and w.shape[1] % ROW_LANES == 0 and vllm_avx2.rows_in_lanes()
    return OpenMatrix.of(w, ROW_LANES, in_turn=False) if opens else w


def _trace(function: Function, tensors: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of function(*tensors) over `inputs`: some of those and of what the function is bound to."""
    return make_fx(lambda *_: tuple(_tensors(function(*tensors))))(*inputs)


def _inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Function:
    """What Inductor makes of a graph: a function of a list of tensors, which it empties, to its results."""
    how = {"decomposition_table": _decompositions(), "tracing_mode": "fake"}
    with torch.no_grad(), config.patch(OPTIONS):
        graph = make_fx(torch.func.functionalize(graph), **how)(*inputs)
        for node in graph.graph.nodes:
            if node.target in KEPT and (node.target is not torch.ops.aten.sum.dim_IntList or node.args[1] == [-1]):
                node.meta["should_fallback"] = True
        fakes = [node.meta["val"] for node in _placeholders(graph)]
        with tracing(TracingContext(fakes[0].fake_mode)):
            return compile_fx_inner(graph, fakes, is_inference=True, get_decomp_fn=_decompositions).current_callable


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _decompositions() -> dict[Any, Function]:
    """Inductor's, but for what is kept."""
    return {target: how for target, how in select_decomp_table().items() if target not in KEPT}


def _random(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw).bfloat16()


def _into_before(model: Model, tokens: int, starts: bool, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    width = model.config.hidden_size
    stream = () if starts else (_random(draw, tokens, width),)
    return model.rope[:tokens], _random(draw, tokens, width), *stream


def _into_after(model: Model, tokens: int, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    c = model.config
    return _random(draw, tokens, c.num_attention_heads, c.kv_lora_rank), _random(draw, tokens, c.hidden_size)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in there, in order: those that a weight has made of itself (linear.py) too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        names = [field.name for field in fields(value)]
        for name in names + sorted(vars(value).keys() - names):
            yield from _tensors(getattr(value, name))


def _maker(result: Any) -> Callable[[Iterator[torch.Tensor]], Any]:
    """What makes something like `result` of its tensors."""
    if isinstance(result, torch.Tensor):
        return next
    parts = [_maker(part) for part in result]
    make = getattr(result, "_make", tuple)
    return lambda tensors: make([part(tensors) for part in parts])


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
