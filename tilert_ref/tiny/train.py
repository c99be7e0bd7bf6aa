"""Training of the tiny models: dense, then the indexer alone, then sparse (DeepSeek-V3.2 report, section 2.1.1).

The MTP layer is trained beside the main model from the first step on. Batches depend on (seed, step) only, so two runs
see the same data; floating-point sums on a GPU are not repeated bit for bit, so their models differ in low bits.
"""

import json
import math
import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tilert_ref.engine.config import ModelConfig
from tilert_ref.tiny.chat import Dialect
from tilert_ref.tiny.optimizer import Optimizer, Rates
from tilert_ref.tiny.rows import ROW_KINDS, RowMaker
from tilert_ref.tiny.train_model import Mode, Moe, TrainModel

Say = Callable[[str], None]

DRAFT_PASSES = 3
KL_ROWS = 256
LOG_EVERY = 50
SHORT = 512


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `rows` sequences of `length` tokens; every `short_every`-th one is of short sequences instead
    (SHORT, with as many tokens), so that a conversation's beginning isn't forgotten.

    kind: "dense", "indexer" (only the indexer learns, from dense attention) or "sparse" (with every `dense_every`-th
    step dense, so that the model stays sure of itself without its indexer too). lr: factor on the peak rates, from
    start to end of the stage, linear.
    """

    kind: str
    steps: int
    length: int
    rows: int
    lr: tuple[float, float]
    dense_every: int = 3
    short_every: int = 0

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length) of the batch at `step`."""
        if self.short_every and step % self.short_every == 0:
            return self.rows * self.length // SHORT, SHORT
        return self.rows, self.length


@dataclass(frozen=True)
class Recipe:
    """mtp_weight: of the drafts' mean loss (lambda of the DeepSeek-V3 paper, eq. 25). balance_rate: what a step adds to
    or takes from an expert's bias. warmup: steps until the rates are reached. workers: processes that make data.
    """

    stages: tuple[Stage, ...]
    seed: int = 0
    rates: Rates = field(default_factory=Rates)
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    warmup: int = 100
    workers: int = 14

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """(stage, step within it)."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise IndexError(step)

    def lr_at(self, step: int) -> float:
        stage, inner = self.stage_at(step)
        start, end = stage.lr
        return min(1.0, (step + 1) / self.warmup) * (start + (end - start) * inner / stage.steps)


# Data


def batch_of(maker: RowMaker, recipe: Recipe, step: int) -> tuple[np.ndarray, np.ndarray]:
    stage, _ = recipe.stage_at(step)
    rng = random.Random(f"{recipe.seed}/{step}")
    count, length = stage.shape(step)
    return _stack([maker.row(rng, length) for _ in range(count)])


def _stack(rows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids int16 [B, T], answered bool [B, T])."""
    return np.stack([ids for ids, _ in rows]), np.stack([answered for _, answered in rows])


def to_device(model: TrainModel, ids: np.ndarray, answered: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    device = model.rope.device
    return torch.from_numpy(ids).to(device).long(), torch.from_numpy(answered).to(device)


def _work(dialect: Dialect, tokenizer: str, recipe: Recipe, first: int, queue: Any) -> None:
    """One data process: batches first, first + workers, ..."""
    maker = RowMaker(dialect, Tokenizer.from_str(tokenizer))
    for step in range(first, recipe.steps, recipe.workers):
        queue.put(batch_of(maker, recipe, step))


def batches(maker: RowMaker, recipe: Recipe) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in the order of their steps, made by `recipe.workers` processes."""
    context = mp.get_context("spawn")
    queues = [context.Queue(maxsize=4) for _ in range(recipe.workers)]
    workers = [
        context.Process(target=_work, args=(maker.dialect, maker.tokenizer.to_str(), recipe, i, queue), daemon=True)
        for i, queue in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    try:
        for step in range(recipe.steps):
            yield queues[step % recipe.workers].get(timeout=300)
    finally:
        for worker in workers:
            worker.terminate()


# One step


def masked_loss(model: TrainModel, hidden: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy at the positions where the target is the model's to predict; 0 if there are none."""
    total = F.cross_entropy(model.logits(hidden[mask]), targets[mask], reduction="sum")
    return total / mask.sum().clamp_min(1)


def compute(
    model: TrainModel, stage: Stage, step: int, ids: torch.Tensor, answered: torch.Tensor, mtp_weight: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(total loss, its parts)."""
    mode = Mode(sparse=stage.kind == "sparse" and step % stage.dense_every != 0)
    if stage.kind != "dense":
        mode.kl_rows = torch.randint(ids.shape[1] - 1, (KL_ROWS,), device=ids.device)
    hidden = model.hidden(ids, mode)
    drafts = model.drafts(ids, hidden, mode, DRAFT_PASSES)
    main = masked_loss(model, hidden[:, :-1], ids[:, 1:], answered[:, 1:])
    mtp = torch.stack([masked_loss(model, d[:, :-1], ids[:, 2:], answered[:, 2:]) for d in drafts]).mean()
    kl = mode.kl()
    parts = {"main": main.detach(), "mtp": mtp.detach(), "kl": kl.detach()}
    if stage.kind == "indexer":
        return kl, parts
    return main + mtp_weight * mtp + kl, parts


# Watching


@torch.no_grad()
def evaluate(model: TrainModel, maker: RowMaker, length: int, sparse: bool, rows: int = 4) -> dict[str, Any]:
    """Scores for every kind of row, the same rows each time."""
    return {kind: _score(model, *_eval_rows(maker, kind, length, rows), sparse) for kind in ROW_KINDS}


def _eval_rows(maker: RowMaker, kind: str, length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = random.Random(f"eval/{kind}")
    return _stack([maker.row(rng, length, kind) for _ in range(rows)])


def _score(model: TrainModel, rows: np.ndarray, mask: np.ndarray, sparse: bool) -> dict[str, Any]:
    """Share of right tokens, near ties (top two within 2 bf16 ulp), loss, and how often each pass' drafts hold."""
    ids, answered = to_device(model, rows, mask)
    mode = Mode(sparse=sparse)
    hidden = model.hidden(ids, mode)
    logits = model.logits(hidden)[:, :-1]
    best, top, at = logits.argmax(-1), logits.topk(2).values, answered[:, 1:]
    near = top[..., 0] - top[..., 1] < 2 * 2.0 ** (top[..., 0].abs().log2().floor() - 7)
    # slot i drafts token i+2, which the main model gives at position i+1
    guesses = [model.logits(d[:, :-1]).argmax(-1) for d in model.drafts(ids, hidden, mode, DRAFT_PASSES)]
    return {
        "right": (best == ids[:, 1:])[at].float().mean().item(),
        "near_tie": near[at].float().mean().item(),
        "loss": F.cross_entropy(logits[at], ids[:, 1:][at]).item(),
        "drafts": [(guess == best[:, 1:])[at[:, 1:]].float().mean().item() for guess in guesses],
    }


def brief(report: dict[str, Any]) -> str:
    return "  ".join(
        f"{kind} {100 * r['right']:.2f}% tie {100 * r['near_tie']:.2f}% drafts "
        + "/".join(f"{100 * d:.0f}" for d in r["drafts"])
        for kind, r in report.items()
    )


@dataclass
class Log:
    """What was measured, kept beside the checkpoint. Losses are means over the steps since the last entry."""

    recipe: dict[str, Any]
    losses: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _count: int = 0

    def collect(self, parts: dict[str, torch.Tensor]) -> None:
        self._sums = {k: self._sums.get(k, 0) + v for k, v in parts.items()}
        self._count += 1

    def flush(self, step: int) -> dict[str, float]:
        """Means of what was collected. Raises FloatingPointError if the main loss is no number."""
        means = {k: float(v) / self._count for k, v in self._sums.items()}
        self.losses.append({"step": step, **means})
        self._sums, self._count = {}, 0
        if not math.isfinite(means["main"]):
            raise FloatingPointError(f"the loss is {means['main']} at step {step}")
        return means

    def save(self, path: Path) -> None:
        kept = {"recipe": self.recipe, "losses": self.losses, "evaluations": self.evaluations}
        path.write_text(json.dumps(kept, indent=1) + "\n")


# The whole


class Training:
    """A model being trained. say gets progress lines, keep the model and its log at the end of every stage."""

    def __init__(
        self, config: ModelConfig, dialect: Dialect, tokenizer: Tokenizer, recipe: Recipe, device: str, say: Say
    ):
        torch.manual_seed(recipe.seed)
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        with torch.device(device):
            self.model = TrainModel(config, max(stage.length for stage in recipe.stages), dtype)
        self.model.rope = self.model.rope.to(device)
        self.recipe, self.say, self.log = recipe, say, Log(asdict(recipe))
        self.optimizer = Optimizer(self.model, recipe.rates)
        self.maker = RowMaker(dialect, tokenizer)

    def run(self, keep: Callable[[TrainModel, Log], None], eval_every: int = 500) -> None:
        self.say(f"{sum(p.numel() for p in self.model.parameters()):,} parameters, {self.recipe.steps:,} steps")
        started = time.monotonic()
        for step, rows in enumerate(batches(self.maker, self.recipe)):
            stage, inner = self.recipe.stage_at(step)
            last = inner == stage.steps - 1
            self._step(step, stage, *to_device(self.model, *rows))
            if (inner + 1) % LOG_EVERY == 0 or last:
                means = "  ".join(f"{k} {v:.4f}" for k, v in self.log.flush(step + 1).items())
                elapsed = time.monotonic() - started
                self.say(f"{elapsed:6.1f} s  step {step + 1:>5} {stage.kind} x{stage.length}  {means}")
            if (step + 1) % eval_every == 0 or last:
                self._evaluate(step, stage)
            if last:
                keep(self.model, self.log)

    def _step(self, step: int, stage: Stage, ids: torch.Tensor, answered: torch.Tensor) -> None:
        for name, p in self.model.named_parameters():
            p.requires_grad_("indexer" in name or stage.kind != "indexer")
        loss, parts = compute(self.model, stage, step, ids, answered, self.recipe.mtp_weight)
        loss.backward()
        self.optimizer.step(self.recipe.lr_at(step))
        for moe in (m for m in self.model.modules() if isinstance(m, Moe)):
            moe.balance(self.recipe.balance_rate if stage.kind != "indexer" else 0.0)
        self.log.collect(parts)

    def _evaluate(self, step: int, stage: Stage) -> None:
        for sparse in sorted({False, stage.kind == "sparse"}):
            report = evaluate(self.model, self.maker, stage.length, sparse)
            self.log.evaluations.append({"step": step + 1, "sparse": sparse, "length": stage.length, **report})
            self.say(f"         {'sparse' if sparse else 'dense'}: {brief(report)}")
