"""The functions of a layer on a CPU, compiled by Inductor, with the bits of plain torch.

At batch 1 a decode step of a small model is a thousand calls of tiny kernels, and the calls take longer than the work.
Compiled, everything pointwise between two products is one call, and attention over 128 tokens is one loop nest.

What keeps the bits: results are rounded where torch rounds them (emulate_precision_casts), no product swallows the
addition behind it (pattern_matcher), multiplication and addition are not contracted (Inductor's default), and the
functions of opaque.py stay torch's own. Each piece is compared with plain torch, layer by layer, before it is used.

Functions are traced here and not by torch.compile, whose look at its guards took 30 us a call, a tenth of a step.
Layers of one shape share what is compiled: weights are inputs. It takes some seconds a piece, once: Inductor keeps its
results on disk (TORCHINDUCTOR_CACHE_DIR).
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx

from tilert_ref.engine import vllm_avx2
from tilert_ref.engine.batch import Pieces
from tilert_ref.engine.decode import Model
from tilert_ref.engine.model import after_attention, before_attention
from tilert_ref.engine.numerics import SumOrder
from tilert_ref.engine.weights import LayerWeights

OPTIONS = {"emulate_precision_casts": True, "pattern_matcher": False}
TRIES = 8  # random inputs on which a piece must agree with plain torch in every bit

Progress = Callable[[str], None]
Function = Callable[..., Any]


class CompileError(RuntimeError):
    """There is no compiler, or what it made has other bits."""


def compile_pieces(model: Model, tokens: Iterable[int], progress: Progress = lambda line: None) -> Pieces:
    """Compiles what decode steps of so many tokens run; steps of other sizes take plain torch.

    Raises CompileError, naming the reason.
    """
    check(model)
    start = time.monotonic()
    compiler, draw = _Compiler(progress), torch.Generator().manual_seed(0)
    before, after = _Piece(before_attention), _Piece(after_attention)
    mtp = [] if model.weights.mtp is None else [model.weights.mtp.layer]
    for count in sorted(set(tokens)):
        for number, w in enumerate(model.weights.layers + mtp):
            starts = number in (0, model.config.num_hidden_layers)  # no residual stream yet: the first one and MTP's
            where = f"layer {number}, {count} token(s)"
            into_before = partial(_into_before, model, w, count, starts, draw)
            before.ready[_key(*into_before())] = compiler.compile(before_attention, into_before, f"before it, {where}")
            into_after = partial(_into_after, model, w, count, draw)
            after.ready[_key(*into_after())] = compiler.compile(after_attention, into_after, f"after it, {where}")
    attend = None
    if model.config.index_topk is None:  # a sparse model's attention is two products
        group = compiler.compile(vllm_avx2.attend_group, partial(_into_attention, model, draw), "attention")
        attend = partial(vllm_avx2.attend_in_groups, group)
    progress(f"decode steps compiled in {time.monotonic() - start:.1f} s ({len(compiler.done)} pieces)")
    return Pieces(before, after, attend)


def check(model: Model) -> None:
    """Raises CompileError where decode steps can't be compiled."""
    if model.kernels.order is not SumOrder.VLLM_AVX2 or model.rope.device.type != "cpu":
        raise CompileError("they are compiled for CPUs with AVX2 and without AVX512 only")
    if model.config.block_fp8:
        raise CompileError("those of fp8 weights are not compiled")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CompileError(f"there is no C++ compiler {compiler!r}; install one or name one in CXX")


class _Piece:
    """function(w, config, kernels, *rest), with a compiled form for each layer and shape that was prepared."""

    def __init__(self, function: Function):
        self.function, self.ready = function, dict[tuple[Any, ...], Function]()

    def __call__(self, *args: Any) -> Any:
        return self.ready.get(_key(*args), self.function)(*args)


def _key(w: LayerWeights, config: Any, kernels: Any, *rest: Any) -> tuple[Any, ...]:
    return id(w), *(len(arg) if isinstance(arg, torch.Tensor) else arg for arg in rest)


class _Compiler:
    """done: compiled graphs by their code and the shapes of what goes into them."""

    def __init__(self, progress: Progress):
        self.progress, self.done = progress, dict[Any, Function]()

    def compile(self, function: Function, draw_args: Callable[[], tuple[Any, ...]], name: str) -> Function:
        """A function of the same arguments, for the weights and shapes of draw_args().

        Raises CompileError if it differs from plain torch.
        """
        args = draw_args()
        result = function(*args)  # fills what is made on first use (linear.py)
        given = list(_tensors(args))
        graph = _trace(function, args, given)
        used = [node.op == "placeholder" and bool(node.users) for node in graph.graph.nodes][: len(given)]
        inputs = [tensor for tensor, there in zip(given, used, strict=True) if there]
        run = self._compiled(_trace(function, args, inputs), inputs, name)

        rest = sum(isinstance(arg, torch.Tensor) for arg in args)  # they come last; what is before them are weights
        weights = inputs[: sum(used[: len(given) - rest])]
        wanted = used[len(given) - rest :]

        def compiled(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            outputs = run(*weights, *(tensor for tensor, there in zip(tensors, wanted, strict=True) if there))
            return _shaped_like(result, iter(outputs))

        for _ in range(TRIES):
            args = draw_args()
            if not all(map(_same_bits, _tensors(compiled(*args)), _tensors(function(*args)))):
                raise CompileError(f"{name}: the compiled form differs from plain torch")
        return compiled

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], name: str) -> Function:
        key = graph.code, tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in inputs)
        if key not in self.done:
            self.progress(f"compiling decode steps: {name}")
            how = {"dynamic_shapes": "from_example_inputs", "options": {"config_patches": OPTIONS}}
            try:
                self.done[key] = torch._inductor.standalone_compile(graph, inputs, **how)
            except Exception as error:  # Inductor's own errors, the compiler's, the disk's: plain torch goes on
                raise CompileError(f"{name}: {type(error).__name__}: {str(error).strip()[:500]}") from error
        return self.done[key]


def _trace(function: Function, args: tuple[Any, ...], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of function(*args) over `inputs`, tensors that stand somewhere in args."""
    return make_fx(lambda *_: tuple(_tensors(function(*args))))(*inputs)


def _random(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw).bfloat16()


def _into_before(model: Model, w: LayerWeights, tokens: int, starts: bool, draw: torch.Generator) -> tuple[Any, ...]:
    width = model.config.hidden_size
    stream = () if starts else (_random(draw, tokens, width),)
    return w, model.config, model.kernels, True, model.rope[:tokens], _random(draw, tokens, width), *stream


def _into_after(model: Model, w: LayerWeights, tokens: int, draw: torch.Generator) -> tuple[Any, ...]:
    c = model.config
    attended = _random(draw, tokens, c.num_attention_heads, c.kv_lora_rank)
    return w, c, model.kernels, True, attended, _random(draw, tokens, c.hidden_size)


def _into_attention(model: Model, draw: torch.Generator) -> tuple[Any, ...]:
    c, size = model.config, vllm_avx2.GROUP
    query, rows = (_random(draw, n, c.cache_width).float() for n in (c.num_attention_heads, size))
    tokens = int(torch.randint(1, size + 1, (), generator=draw))
    state = vllm_avx2.nothing_attended(len(query), c.kv_lora_rank)
    return c.softmax_scale, query, rows, torch.arange(size) < tokens, *state


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


def _shaped_like(result: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return next(tensors)
    parts = [_shaped_like(part, tensors) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
