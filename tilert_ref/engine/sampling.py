"""From logits to a token: greedy, or temperature with top-k and top-p, one uniform draw a token."""

import torch

from tilert_ref.engine.api import SamplingParams, Token


class Sampler:
    """Samples one request's tokens in order. One draw per emitted token, so drafting doesn't change the stream."""

    def __init__(self, params: SamplingParams, top_logprobs: int | None = None):
        self.params, self.top_logprobs = params, top_logprobs
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor) -> Token:
        """logits [V] fp32 -> Token. Ties go to the lowest id, as in vLLM's greedy sampler (argmax)."""
        token = int(logits.argmax()) if self.params.greedy else self._draw(logits)
        return Token(token) if self.top_logprobs is None else self._with_logprobs(token, logits)

    def _draw(self, logits: torch.Tensor) -> int:
        probs, ids = distribution(logits, self.params).sort(descending=True, stable=True)
        threshold = torch.rand((), generator=self.generator, dtype=torch.float64)
        index = int((probs.double().cpu().cumsum(-1) <= threshold).sum())
        return int(ids[min(index, int((probs > 0).sum()) - 1)])

    def _with_logprobs(self, token: int, logits: torch.Tensor) -> Token:
        """Log-probabilities of the unmodified distribution (vLLM's default logprobs_mode, raw_logprobs)."""
        logprobs = logits.log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self.top_logprobs or 0, len(logprobs)))
        return Token(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] probabilities after temperature, then top-k, then top-p (vLLM v1/sample/ops/topk_topp_sampler.py's order).

    top-p keeps the smallest set of most likely tokens whose mass reaches top_p; at least one token stays.
    """
    scaled = logits / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], float("-inf"))
    probs = scaled.softmax(dim=-1)
    if params.top_p >= 1.0:
        return probs
    ordered, ids = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens
    kept = torch.where(before < params.top_p, ordered, 0.0)
    kept[0] = ordered[0]
    return torch.zeros_like(probs).scatter_(0, ids, kept / kept.sum())
