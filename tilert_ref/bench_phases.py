"""Where the time of a greedy step goes: marks between its phases, recorded in the graph that runs them.

The step stays as it is: for the time of a measurement the functions of PHASES are wrapped where the step looks them up.
A mark is a CUDA event that is a node of the captured graph, on other devices a look at the clock. What the marks
themselves cost, the step with them less the step without, is taken off every phase by the number of its marks, so that
the phases add up to the captured step.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from tilert_ref.bench_roof import seconds_each
from tilert_ref.engine import graph, model
from tilert_ref.engine.graph import DecodeState, cuda_graph, greedy_step, step_end, up_to
from tilert_ref.engine.ref import RefEngine

REST, PROJECTIONS = "argmax, acceptance, state", "embedding, projections, RoPE, rows"
NORMS, INDEXER, ATTENTION, EXPERTS, HEAD, MTP = "norms", "indexer", "attention", "MoE and MLP", "head", "MTP drafts"
PHASES: tuple[tuple[ModuleType, str, str], ...] = (
    (graph, "forward", PROJECTIONS),  # what no other phase of it takes
    (graph, "head", HEAD),
    (graph, "draft_on_device", MTP),  # whatever it calls
    (model, "add_rms_norm", NORMS),
    (model, "lightning_index", INDEXER),
    (model, "attend_selected", ATTENTION),
    (model, "mlp", EXPERTS),
    (model, "moe", EXPERTS),
)
REPLAYS, WARM_UP = 20, 3


@dataclass(frozen=True)
class Split:
    """us: of each phase, in the order in which they first come; step_us: the captured step, their sum. marks_us: what
    the marks cost while it was measured, taken off."""

    us: dict[str, float]
    step_us: float
    marks_us: float

    def rows(self) -> Iterator[str]:
        for phase, us in sorted(self.us.items(), key=lambda item: -item[1]):
            yield f"  {phase:34s} {us:9.1f} us {100 * us / self.step_us:5.1f}%"
        yield f"  {'sum, the step':34s} {self.step_us:9.1f} us, the marks cost {self.marks_us:.1f} us more"


class Marks:
    """Which phase begins when. make: a mark with the methods of a CUDA event, recorded again in each step."""

    def __init__(self, make: "Callable[[], torch.cuda.Event | _Moment]"):
        self._make = make
        self._points, self._phases, self._stack = list[Any](), list[str](), list[str]()

    def run(self, step: Callable[[], None]) -> None:
        """One step from the first mark to the last. Marks of an earlier one are recorded again."""
        self._phases.clear()
        with self.inside(REST):
            step()

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        if MTP in self._stack:
            yield
            return
        self._stack.append(phase)
        self._mark(phase)
        yield
        self._stack.pop()
        self._mark(self._stack[-1] if self._stack else "")

    def _mark(self, phase: str) -> None:
        if len(self._phases) == len(self._points):
            self._points.append(self._make())
        self._points[len(self._phases)].record()
        self._phases.append(phase)

    def spans(self) -> list[tuple[str, float]]:
        """(phase, us) from each mark to the next."""
        points = self._points[: len(self._phases)]
        apart = [1000 * before.elapsed_time(after) for before, after in pairwise(points)]
        return list(zip(self._phases[:-1], apart, strict=True))


@contextlib.contextmanager
def marked(marks: Marks) -> Iterator[None]:
    """The functions of PHASES mark where they begin and end."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in PHASES]

    def wrapped(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with marks.inside(phase):
                return function(*args, **kwargs)

        return run

    try:
        for (module, name, function), (_, _, phase) in zip(kept, PHASES, strict=True):
            setattr(module, name, wrapped(function, phase))
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def split_step(engine: RefEngine, position: int, replays: int = REPLAYS) -> Split:
    """Of greedy steps at `position` of a filled cache, with the engine's drafts; medians of `replays` steps.

    On a GPU they are captured, elsewhere run as they are. The rows from `position` on are overwritten.
    """
    device = engine.model.rope.device
    cuda = device.type == "cuda"
    capture = cuda_graph if cuda else lambda run: run
    state = DecodeState.empty(64, engine.num_mtp, device)
    last = position + (replays + 1) * (1 + engine.num_mtp)  # if all drafts hold
    form = up_to(engine.model, step_end(last, engine.num_mtp))

    def step() -> None:
        greedy_step(form, engine.cache, state)

    marks = Marks(_event if cuda else _Moment)
    with torch.inference_mode():
        plain = capture(step)
        with marked(marks):
            with_marks = capture(lambda: marks.run(step))
            spans = [_replayed(with_marks, marks, state, position) for _ in range(WARM_UP + replays)][WARM_UP:]
        state.start(position, 1)
        step_us = 1e6 * seconds_each(plain, replays, str(device))  # one after the other: no launch is waited for
    times = [statistics.median(us for _, us in column) for column in zip(*spans, strict=True)]
    return _split([phase for phase, _ in spans[0]], times, step_us)


def _split(phases: list[str], times: list[float], step_us: float) -> Split:
    """times: us from each mark to the next. A phase can't cost less than nothing: what a mark costs is a mean."""
    marks_us = sum(times) - step_us
    us = dict.fromkeys(phases, 0.0)
    for phase, time_us in zip(phases, times, strict=True):
        us[phase] += time_us - marks_us / len(times)
    shown = {phase: max(value, 0.0) for phase, value in us.items()}
    scale = step_us / sum(shown.values())
    return Split({phase: value * scale for phase, value in shown.items()}, step_us, marks_us)


def _replayed(run: Callable[[], None], marks: Marks, state: DecodeState, position: int) -> list[tuple[str, float]]:
    state.start(position, 1)
    if state.tokens.is_cuda:
        torch.cuda.synchronize()
    run()
    if state.tokens.is_cuda:
        torch.cuda.synchronize()
    return marks.spans()


class _Moment:
    """A mark where nothing runs behind the host's back."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "_Moment") -> float:
        return 1000 * (other.at - self.at)


def _event() -> torch.cuda.Event:
    """External: in a capture it becomes a node of the graph, and its time that of the last replay."""
    return torch.cuda.Event(enable_timing=True, external=True)
