"""What one seed means: the requests of a run and the faults that meet it. The same integer always means the same."""

import random
from dataclasses import dataclass

from fault_proxies import FRAME_FAULTS, FRAME_STEPS, HTTP_STEPS, STEPS, Fault

PROCESSES = ("router", "decode", "engine", "rank0", "rank1")
PROMPT_LENGTHS = (3, 40, 64, 65, 130, 400)


@dataclass(frozen=True)
class Ask:
    """One client request. key: of the prompt's KV. Delays in ms: of each layer's prefill, each layer's injection and
    each decode step. start: s after the run's begin. leaves: s after its own begin at which its client goes away."""

    key: int
    seq_len: int = 40
    max_tokens: int = 10
    stream: bool = False
    prefill_ms: int = 0
    inject_ms: int = 0
    step_ms: int = 0
    start: float = 0.0
    leaves: float | None = None

    @property
    def prompt(self) -> list[int]:
        return [self.key, self.prefill_ms, *[self.step_ms] * (self.seq_len - 3), self.inject_ms]


@dataclass(frozen=True)
class Plan:
    asks: list[Ask]
    faults: list[Fault]

    @property
    def disturbed(self) -> bool:
        return bool(self.faults) or any(ask.leaves is not None for ask in self.asks)


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    asks = [_ask(draw, seed * 8 + number) for number in range(draw.choice((1, 2, 2, 3, 4)))]
    count = draw.choices((0, 1, 2), (1, 7, 2))[0]
    return Plan(asks, [_fault(draw, len(asks)) for _ in range(count)])


def _ask(draw: random.Random, key: int) -> Ask:
    return Ask(
        key=key,
        seq_len=draw.choice(PROMPT_LENGTHS),
        max_tokens=draw.choice((1, 4, 10, 20)),
        stream=draw.random() < 0.5,
        prefill_ms=draw.choice((0, 0, 5, 20)),
        inject_ms=draw.choice((0, 0, 5, 30)),
        step_ms=draw.choice((0, 0, 2, 10)),
        start=draw.choice((0.0, 0.0, 0.02, 0.1)),
        leaves=draw.uniform(0, 0.3) if draw.random() < 0.08 else None,
    )


def _fault(draw: random.Random, asks: int) -> Fault:
    kind = draw.choices(("frame", "http", "stop", "kill", "cancel", "fail"), (40, 8, 20, 18, 10, 4))[0]
    nth = draw.choice((0, 0, 0, 1, 2))
    if kind == "frame":
        return Fault(draw.choice(FRAME_STEPS), draw.choice(FRAME_FAULTS), nth, seconds=draw.uniform(0.05, 0.8))
    if kind == "http":
        return Fault(draw.choice(HTTP_STEPS), draw.choice(("cut", "delay")), nth, seconds=draw.uniform(0.05, 0.8))
    if kind == "fail":
        return Fault(draw.choice(("prefill", "prefill_reply")), "fail", nth)
    after = draw.choice((0.0, 0.0, draw.uniform(0, 0.1)))
    target = str(draw.randrange(asks)) if kind == "cancel" else draw.choice(PROCESSES)
    return Fault(draw.choice(STEPS), kind, nth, target, draw.choice((0.1, 0.4, 1.2, 2.8)), after)
