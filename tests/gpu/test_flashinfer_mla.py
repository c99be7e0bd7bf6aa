"""FlashInfer's MLA kernels through flashinfer_mla.py: against float64, against our Triton kernels, and in an engine.

    python3 -m pytest tests/gpu/test_flashinfer_mla.py --noconftest -p no:cacheprovider

nvcc compiles the kernel at first use, for some minutes; $FLASHINFER_WORKSPACE_BASE says where it is kept. With
$TILERT_REF_ATTENTION_REPORT a JSON file of that name gets errors, times and where tokens differ.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilert_ref.connector.rounding import ScaleRule, quantize_fp8_ds_mla
from tilert_ref.engine import model as model_file
from tilert_ref.engine import tensor_cores
from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.config import ModelConfig, load_config
from tilert_ref.engine.decode import step
from tilert_ref.engine.flashinfer_mla import decode_attention, gathered
from tilert_ref.engine.graph import cuda_graph
from tilert_ref.engine.numerics import DecodeAttention
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.get_device_capability()[0] not in (8, 9, 10):
        return "needs a GPU of compute capability 8, 9 or 10"
    return None if importlib.util.find_spec("flashinfer") else "needs the package flashinfer-python"


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TOPK, ROOM = 2048, 8192
KINDS = ["dense", "sparse bf16", "sparse fp8"]
NORM_ERROR = 5e-3  # of a bf16 result, whose own rounding is up to 2e-3 of a value
REPEATS, CALLS = 20, 20


@pytest.fixture(scope="module", autouse=True)
def compiled(pytestconfig: pytest.Config) -> None:
    """Compiles first, and says so past pytest's capture."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)

    start = time.perf_counter()
    decode_attention("flashinfer", config(4, None), "cuda", room=ROOM, block_size=64, progress=say)
    seconds = round(time.perf_counter() - start, 1)
    say(f"FlashInfer MLA: ready after {seconds} s")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "compile_s": seconds}
    report("about", about | {"flashinfer": importlib.metadata.version("flashinfer-python")})


def report(part: str, value: Any) -> None:
    """Adds a value, or a row of a list of rows, to the report."""
    if not (name := os.environ.get("TILERT_REF_ATTENTION_REPORT")):
        return
    path = Path(name)
    written = json.loads(path.read_text()) if path.exists() and part != "about" else {}
    written[part] = value if part == "about" else [*written.get(part, []), value]
    path.write_text(json.dumps(written, indent=1) + "\n")


def config(heads: int, topk: int | None) -> ModelConfig:
    return replace(load_config(model_dir("tiny-glm5")), num_attention_heads=heads, index_topk=topk)


@functools.cache
def backend(heads: int, topk: int | None) -> DecodeAttention:
    made = {"room": ROOM, "block_size": 64, "progress": print}
    return decode_attention("flashinfer", config(heads, topk), "cuda", **made)


class Case:
    """Random queries and rows; slots are scattered over the cache, and undefined behind the counts."""

    def __init__(self, kind: str, tokens: int, heads: int, context: int, capacity: int = 16_384):
        torch.manual_seed(0)
        self.dense, self.fp8 = kind == "dense", kind == "sparse fp8"
        self.backend = backend(heads, None if self.dense else TOPK)
        self.scale = config(heads, None).softmax_scale
        latent, rope = (torch.randn(capacity, width, device="cuda").bfloat16() for width in (512, 64))
        self.rows = quantize_fp8_ds_mla(latent, rope, ScaleRule.PLAIN) if self.fp8 else torch.cat((latent, rope), 1)
        self.q_latent = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
        self.q_rope = torch.randn(tokens, heads, 64, device="cuda").bfloat16()
        most = context if self.dense else min(context, TOPK)
        self.counts = [min(most, max(1, context - tokens + 1 + t)) for t in range(tokens)]
        width = -(-most // 64) * 64
        chosen = [torch.randperm(capacity, device="cuda")[:width] for _ in range(tokens)]
        if self.dense:  # pages of 64 in any order
            pages = torch.randperm(capacity // 64, device="cuda")[: width // 64, None] * 64
            chosen = [(pages + torch.arange(64, device="cuda")).flatten()] * tokens
        self.slots = torch.stack(chosen).int()

    def ours(self) -> torch.Tensor:
        return self.backend(self.q_latent, self.q_rope, self.rows, self.slots, self.counts)

    def exact(self) -> torch.Tensor:
        """float64 [T, H, 512]."""
        out = []
        for q_latent, q_rope, slots, count in zip(self.q_latent, self.q_rope, self.slots, self.counts, strict=True):
            used = slots[:count]
            values = (gathered(self.rows, used) if self.fp8 else self.rows[used.long()]).double()
            probs = torch.softmax(torch.cat((q_latent, q_rope), 1).double() @ values.T * self.scale, dim=-1)
            out.append(probs @ values[:, :512])
        return torch.stack(out)

    def triton(self) -> torch.Tensor:
        counts, backwards = torch.tensor(self.counts, dtype=torch.int32, device="cuda"), not self.dense and not self.fp8
        query = self.q_latent, self.q_rope
        return tensor_cores.attention().attend(*query, self.rows, self.slots, counts, self.scale, backwards)


def norm_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("context", [1, 63, 2048, 8192])
@pytest.mark.parametrize("heads", [4, 16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_formula(kind: str, tokens: int, heads: int, context: int) -> None:
    case = Case(kind, tokens, heads, context)
    ours, exact = case.ours(), case.exact()
    errors = {"flashinfer": norm_error(ours, exact)}
    if tensor_cores.there(ours):
        errors["triton"] = norm_error(case.triton(), exact)
        errors["between"] = norm_error(ours, case.triton())
    report("norm_errors", {"kind": kind, "tokens": tokens, "heads": heads, "context": context} | errors)
    assert max(errors.values()) < NORM_ERROR, errors


@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_has_the_bits_that_it_has_alone(kind: str, heads: int) -> None:
    """Drafts are verified beside it; a prompt below index_topk, so that the counts differ."""
    case = Case(kind, 4, heads, 1500)
    together = case.ours()
    for t in range(4):
        one = slice(t, t + 1)
        at = case.slots[one], case.counts[one]
        assert case.backend(case.q_latent[one], case.q_rope[one], case.rows, *at).equal(together[one])


@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_replays_are_the_eager_results(kind: str, heads: int) -> None:
    """Other queries and slots at each replay; in between eager calls that have other numbers of rows."""
    case, short = Case(kind, 3, heads, ROOM), Case(kind, 3, heads, 100)
    counts, out = torch.tensor(case.counts, dtype=torch.int32, device="cuda"), torch.empty_like(case.q_latent)

    def run() -> None:
        out.copy_(case.backend(case.q_latent, case.q_rope, case.rows, case.slots, counts))

    replay = cuda_graph(run)
    for seed in range(3):
        torch.manual_seed(seed)
        case.q_latent.copy_(torch.randn_like(case.q_latent))
        case.slots.copy_(torch.randint_like(case.slots, len(case.rows)))
        assert norm_error(short.ours(), short.exact()) < NORM_ERROR
        replay()
        assert out.equal(case.ours())
        assert norm_error(out, case.exact()) < NORM_ERROR


def answer(engine: RefEngine, length: int, tokens: int) -> list[int]:
    first = engine.prefill([(7 * i + 3) % 480 for i in range(length)], GREEDY)
    return [token.id for event in list(engine.decode(first, tokens, GREEDY))[:-1] for token in event]


def tiny_engine(name: str, kv: str, attention: str, num_mtp: int = 0, capture: bool = True) -> RefEngine:
    how = {"max_seq_len": 512, "num_mtp": num_mtp, "kv_cache_dtype": kv, "capture": capture}
    return load_engine(model_dir(name), device="cuda", attention=attention, **how)


@pytest.mark.parametrize("num_mtp", [0, 3])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_captured_steps_are_eager_ones(kv: str, num_mtp: int) -> None:
    """Above index_topk, 256, with drafts and without; below it the engine takes eager steps by itself."""
    captured, eager = (tiny_engine("tiny-glm5", kv, "flashinfer", num_mtp, capture) for capture in (True, False))
    if not tensor_cores.is_hopper(captured.model.rope.device):
        pytest.skip("steps are captured on Hopper only")
    assert captured.captured is not None
    for length in (270, 40):
        assert answer(captured, length, 60) == answer(eager, length, 60)
        end = length + 55 - num_mtp
        for layer in range(len(eager.cache.rows)):
            assert captured.cache.read_rows(layer, end).equal(eager.cache.read_rows(layer, end))


Trace = list[tuple[str, torch.Tensor]]


def traced(engine: RefEngine, position: int, token: int) -> Trace:
    """What goes into and comes out of attention in each layer of one eager step, whichever back end computes it."""
    trace: Trace = []

    def spied(form: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            layer = len(trace) // 3
            out = form(*args)
            parts = "query's latent part", "query's rope part"
            trace.extend((f"layer {layer}: {part}", args[first + i].clone()) for i, part in enumerate(parts))
            trace.append((f"layer {layer}: attention", out.clone()))
            return out

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name, first in (("attend_by", 1), ("attend_selected", 0), ("attend_absorbed", 0)):
            patch.setattr(model_file, name, spied(getattr(model_file, name), first))
        step(engine.model, engine.cache, position, [token])
    return trace


@pytest.mark.parametrize(("name", "kv"), [("tiny-glm5", "bf16"), ("tiny-glm5", "fp8"), ("tiny-glm5-dense", "bf16")])
def test_tokens_and_the_first_operator_that_differs(name: str, kv: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything before the first attention has the same bits. Tokens may part where the best two are close."""
    own, other = tiny_engine(name, kv, "auto"), tiny_engine(name, kv, "flashinfer")
    theirs, ours = answer(own, 300, 100), answer(other, 300, 100)
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), len(theirs))
    traces = []
    for engine in (own, other):
        answer(engine, 300, 1)  # a prompt's rows come from the same kernels
        traces.append(traced(engine, 300, theirs[0]))
    differ = [(a, norm_error(x, y)) for (a, x), (_, y) in zip(*traces, strict=True) if not x.equal(y)]
    first = differ[0] if differ else ("none", 0.0)
    found = {"model": name, "kv": kv, "equal_tokens": same, "of": len(theirs), "first_operator": first[0]}
    if same < len(theirs):
        first_token = own.prefill([(7 * i + 3) % 480 for i in range(300)], GREEDY)
        events = list(own.decode(first_token, 100, GREEDY, top_logprobs=2))[:-1]
        top = [token for event in events for token in event][same].top
        found["logprobs_apart_there"] = top[0][1] - top[1][1]
    report("tokens", found | {"norm_error_there": first[1]})
    with capsys.disabled():
        print(f"\n{found}", flush=True)
    assert first[0] in ("layer 0: attention", "none")
    assert first[1] < NORM_ERROR
    assert found.get("logprobs_apart_there", 0.0) < 0.5


def median_us(run: Callable[[], None]) -> float:
    """Of one call, REPEATS times CALLS of them in a graph."""
    replay = cuda_graph(run)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


@pytest.mark.parametrize("rows", [2048, 8192])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_times(kind: str, tokens: int, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    """64 heads; each call of a graph reads other rows of a cache that is larger than the L2. FlashInfer's time has the
    copy of the slots in it, and of fp8 the gathered tile. planned: an eager call with a new plan, host included."""
    if rows > TOPK and kind != "dense":
        pytest.skip("a sparse query attends to 2,048 rows")
    case = Case(kind, tokens, 64, rows + tokens - 1, capacity=262_144)
    case.slots, case.counts = case.slots[:, :rows].contiguous(), [rows] * tokens
    counts = torch.tensor(case.counts, dtype=torch.int32, device="cuda")
    pools = [(case.slots + i * rows) % len(case.rows) for i in range(CALLS)]
    backwards = not case.dense and not case.fp8

    def flashinfer() -> None:
        for slots in pools:
            case.backend(case.q_latent, case.q_rope, case.rows, slots, counts)

    def triton() -> None:
        for slots in pools:
            tensor_cores.attention().attend(case.q_latent, case.q_rope, case.rows, slots, counts, case.scale, backwards)

    found = {"kind": kind, "tokens": tokens, "heads": 64, "rows": rows, "flashinfer_us": median_us(flashinfer)}
    if tensor_cores.there(case.q_latent):
        found["triton_us"] = median_us(triton)
    found["planned_us"] = _planned_us(case)
    report("times", {name: round(v, 2) if isinstance(v, float) else v for name, v in found.items()})
    with capsys.disabled():
        print(f"\n{found}", flush=True)
    assert found["flashinfer_us"] > 0


def _planned_us(case: Case) -> float:
    times = []
    for i in range(2 * REPEATS):
        counts = [count - i % 2 for count in case.counts]  # never the one before, so that it plans anew
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.backend(case.q_latent, case.q_rope, case.rows, case.slots, counts)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
