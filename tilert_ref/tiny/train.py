"""Training of the tiny models: dense, then the indexer alone, then sparse (DeepSeek-V3.2 report, section 2.1.1).

The MTP layer is trained beside the main model from the first step on. Batches depend on (seed, step) only, so two runs
see the same data; floating-point sums on a GPU are not repeated bit for bit, so their models differ in low bits.
"""

import json
import math
import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tilert_ref.engine.config import ModelConfig
from tilert_ref.tiny.chat import Dialect
from tilert_ref.tiny.rows import ROW_KINDS, RowMaker
from tilert_ref.tiny.train_model import Mode, Moe, TrainModel

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
    stages: tuple[Stage, ...]
    seed: int = 0
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    warmup: int = 100
    clip: float = 1.0
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
    rows = [maker.row(rng, length) for _ in range(count)]
    return np.stack([ids for ids, _ in rows]), np.stack([answered for _, answered in rows])


def _work(dialect: Dialect, tokenizer: str, recipe: Recipe, first: int, queue: Any) -> None:
    maker = RowMaker(dialect, Tokenizer.from_str(tokenizer))
    for step in range(first, recipe.steps, recipe.workers):
        queue.put(batch_of(maker, recipe, step))


def batches(dialect: Dialect, tokenizer: Tokenizer, recipe: Recipe) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in the order of their steps, made by `recipe.workers` processes."""
    context = mp.get_context("spawn")
    queues = [context.Queue(maxsize=4) for _ in range(recipe.workers)]
    workers = [
        context.Process(target=_work, args=(dialect, tokenizer.to_str(), recipe, i, queue), daemon=True)
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


# Optimiser


class Muon:
    """Momentum with orthogonalised updates for matrices (K. Jordan et al., 2024), stacks of matrices included.

    Matrices of one shape are orthogonalised together: at this size the number of kernels is the cost.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], lr: float, decay: float, momentum: float = 0.95):
        self.lr, self.decay, self.momentum = lr, decay, momentum
        self.groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.buffers = {p: torch.zeros_like(p) for p in params}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for shape, params in self.groups.items():
            params = [p for p in params if p.grad is not None]
            if not params:
                continue
            for p in params:
                self.buffers[p].lerp_(p.grad, 1 - self.momentum)
            looked_ahead = [p.grad.lerp(self.buffers[p], self.momentum).view(-1, *shape) for p in params]
            updates = orthogonal(torch.cat(looked_ahead)).split([len(g) for g in looked_ahead])
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(params, updates, strict=True):
                p.mul_(1 - self.lr * factor * self.decay).add_(update.view_as(p), alpha=-self.lr * factor * scale)


def orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices, [n, a, b] -> [n, a, b]."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Muon for the matrices of the layers; AdamW for embeddings, head, norms, router and indexer."""

    def __init__(self, model: TrainModel, recipe: Recipe):
        self.params = dict(model.named_parameters())
        muon = [p for name, p in self.params.items() if self._is_muon(name, p)]
        rest = [p for name, p in self.params.items() if not self._is_muon(name, p)]
        decayed, plain = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() < 2]
        self.muon = Muon(muon, recipe.muon_lr, recipe.weight_decay)
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=recipe.adam_lr, betas=(0.9, 0.95), eps=1e-10)
        self.recipe = recipe

    @staticmethod
    def _is_muon(name: str, p: torch.nn.Parameter) -> bool:
        return p.dim() > 1 and ".layers." in name and "indexer" not in name and "mlp.gate.weight" not in name

    def step(self, factor: float) -> None:
        grads = [p for p in self.params.values() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(grads, self.recipe.clip)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.adam_lr * factor
        self.adam.step()
        self.muon.step(factor)
        self.adam.zero_grad(set_to_none=True)
        for p in self.muon.buffers:
            p.grad = None


# One step


@dataclass
class Losses:
    main: float = 0.0
    mtp: float = 0.0
    kl: float = 0.0


def masked_loss(model: TrainModel, hidden: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy at the positions where the target is the model's to predict."""
    return F.cross_entropy(model.logits(hidden[mask]), targets[mask])


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
    kl = mode.kl / max(mode.terms, 1)
    parts = {"main": main.detach(), "mtp": mtp.detach(), "kl": torch.as_tensor(kl).detach()}
    if stage.kind == "indexer":
        return kl, parts
    return main + mtp_weight * mtp + kl, parts


# Watching


@torch.no_grad()
def evaluate(model: TrainModel, maker: RowMaker, length: int, sparse: bool, rows: int = 4) -> dict[str, Any]:
    """Per kind of row: share of right tokens, near ties (top two within 2 bf16 ulp), and how often drafts hold."""
    report: dict[str, Any] = {}
    for kind in ROW_KINDS:
        rng = random.Random(f"eval/{kind}")
        made = [maker.row(rng, length, kind) for _ in range(rows)]
        device = model.rope.device
        ids = torch.from_numpy(np.stack([m[0] for m in made])).long().to(device)
        answered = torch.from_numpy(np.stack([m[1] for m in made])).to(device)
        mode = Mode(sparse=sparse)
        hidden = model.hidden(ids, mode)
        drafts = model.drafts(ids, hidden, mode, DRAFT_PASSES)
        logits = model.logits(hidden)
        top = logits.topk(2).values
        ulp = 2.0 ** (top[..., 0].abs().log2().floor() - 7)
        at = answered[:, 1:]
        best = logits.argmax(-1)
        report[kind] = {
            "right": (best[:, :-1] == ids[:, 1:])[at].float().mean().item(),
            "near_tie": (top[..., 0] - top[..., 1] < 2 * ulp)[:, :-1][at].float().mean().item(),
            "loss": F.cross_entropy(logits[:, :-1][at], ids[:, 1:][at]).item(),
            # slot i drafts token i+2, which the main model gives at position i+1
            "drafts": [
                (model.logits(d[:, :-1]).argmax(-1) == best[:, 1:-1])[at[:, 1:]].float().mean().item() for d in drafts
            ],
        }
    return report


def brief(report: dict[str, Any]) -> str:
    return "  ".join(
        f"{kind} {100 * r['right']:.2f}% tie {100 * r['near_tie']:.2f}% drafts "
        + "/".join(f"{100 * d:.0f}" for d in r["drafts"])
        for kind, r in report.items()
    )


@dataclass
class Log:
    """Everything that was measured, kept beside the checkpoint."""

    recipe: dict[str, Any]
    losses: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def train(
    config: ModelConfig,
    dialect: Dialect,
    tokenizer: Tokenizer,
    recipe: Recipe,
    device: str,
    say: Callable[[str], None],
    eval_every: int = 500,
    keep: Callable[[TrainModel, Log], None] = lambda model, log: None,
) -> tuple[TrainModel, Log]:
    """Runs the recipe and returns the model and its log; `keep` gets both at the end of every stage."""
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        model = TrainModel(config, max(stage.length for stage in recipe.stages), dtype)
    model.rope = model.rope.to(device)
    optimizer, log, maker = Optimizer(model, recipe), Log(asdict(recipe)), RowMaker(dialect, tokenizer)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {recipe.steps:,} steps")
    started, sums, count = time.monotonic(), {}, 0
    for step, (ids, answered) in enumerate(batches(dialect, tokenizer, recipe)):
        stage, inner = recipe.stage_at(step)
        _select(model, stage)
        ids = torch.from_numpy(ids).to(device, non_blocking=True).long()
        answered = torch.from_numpy(answered).to(device, non_blocking=True)
        loss, parts = compute(model, stage, step, ids, answered, recipe.mtp_weight)
        loss.backward()
        optimizer.step(recipe.lr_at(step))
        for moe in (m for m in model.modules() if isinstance(m, Moe)):
            moe.balance(recipe.balance_rate if stage.kind != "indexer" else 0.0)
        sums, count = {k: sums.get(k, 0) + v for k, v in parts.items()}, count + 1
        if count == LOG_EVERY or inner == stage.steps - 1:
            means = {k: float(v) / count for k, v in sums.items()}
            log.losses.append({"step": step + 1, **means})
            say(
                f"{time.monotonic() - started:6.1f} s  step {step + 1:>5} {stage.kind} x{stage.length}  "
                + "  ".join(f"{k} {v:.4f}" for k, v in means.items())
            )
            if not math.isfinite(means["main"]):
                raise FloatingPointError(f"the loss is {means['main']} at step {step + 1}")
            sums, count = {}, 0
        if (step + 1) % eval_every == 0 or inner == stage.steps - 1:
            for sparse in {False, stage.kind == "sparse"}:
                report = evaluate(model, maker, stage.length, sparse)
                log.evaluations.append({"step": step + 1, "sparse": sparse, "length": stage.length, **report})
                say(f"         {'sparse' if sparse else 'dense'}: {brief(report)}")
        if inner == stage.steps - 1:
            keep(model, log)
    return model, log


def _select(model: TrainModel, stage: Stage) -> None:
    """In the indexer stage only the indexers learn."""
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" in name or stage.kind != "indexer")


def save_log(log: Log, path: Path) -> None:
    path.write_text(json.dumps(asdict(log), indent=1) + "\n")
