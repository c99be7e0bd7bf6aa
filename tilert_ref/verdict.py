"""The verdict on one token: vLLM's own, one of two that vLLM itself could not tell apart, or another one."""

from collections.abc import Sequence
from typing import Literal

Verdict = Literal["identical", "tie", "diverged"]


def judge(ours: int, theirs: int, top: Sequence[tuple[int, float]]) -> Verdict:
    """top: vLLM's best tokens at this position as (id, logprob), best first.

    A tie needs vLLM's own top two equal to the last bit, and ours to be one of them. vLLM computes logits in bf16 and
    log_softmax of them in fp32: equal logits, and only those, give equal logprobs.
    """
    if ours == theirs:
        return "identical"
    tie = len(top) > 1 and top[0][1] == top[1][1] and ours in (top[0][0], top[1][0])
    return "tie" if tie else "diverged"
