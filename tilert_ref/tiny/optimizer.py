"""The optimiser of the tiny models: Muon for the layers' matrices, AdamW for everything else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilert_ref.tiny.train_model import TrainModel


@dataclass(frozen=True)
class Rates:
    """Peak learning rates, weight decay (both optimisers), and the largest norm of a step's gradient."""

    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    clip: float = 1.0


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

    def __init__(self, model: TrainModel, rates: Rates):
        self.params = dict(model.named_parameters())
        muon = [p for name, p in self.params.items() if self._is_muon(name, p)]
        rest = [p for name, p in self.params.items() if not self._is_muon(name, p)]
        decayed, plain = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() < 2]
        self.muon = Muon(muon, rates.muon_lr, rates.weight_decay)
        groups = [{"params": decayed, "weight_decay": rates.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=rates.adam_lr, betas=(0.9, 0.95), eps=1e-10)
        self.rates = rates

    @staticmethod
    def _is_muon(name: str, p: torch.nn.Parameter) -> bool:
        return p.dim() > 1 and ".layers." in name and "indexer" not in name and "mlp.gate.weight" not in name

    def step(self, factor: float) -> None:
        grads = [p for p in self.params.values() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(grads, self.rates.clip)
        for group in self.adam.param_groups:
            group["lr"] = self.rates.adam_lr * factor
        self.adam.step()
        self.muon.step(factor)
        self.adam.zero_grad(set_to_none=True)
        for p in self.muon.buffers:
            p.grad = None
