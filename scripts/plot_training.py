#!/usr/bin/env python3
"""Draws a training log as SVG: the losses over the steps, on a logarithmic scale, stage by stage.

python scripts/plot_training.py tilert_ref/tiny/models/tiny-glm5/training_log.json OUT.svg
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 16, 34, 44
CURVES = {
    "main": ("#1f5fa8", "next token"),
    "mtp": ("#c2571a", "drafts (mean of three passes)"),
    "kl": ("#3b8a3e", "indexer against attention (KL)"),
}
STAGES = {"dense": "#f4f4f4", "indexer": "#e6f2e6", "sparse": "#e8eef7"}


class Frame:
    """Where a step and a loss stand on the page."""

    def __init__(self, steps: int, values: list[float]):
        self.steps = steps
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def svg(log: dict[str, Any]) -> str:
    """The page. log: what training_log.json holds; a loss of 0 was not measured and isn't drawn."""
    stages, losses = log["recipe"]["stages"], log["losses"]
    values = [row[name] for row in losses for name in CURVES if row[name] > 0]
    frame = Frame(sum(stage["steps"] for stage in stages), values)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return (
        "\n".join([head, background, *_stages(frame, stages), *_axes(frame), *_curves(frame, losses), "</svg>"]) + "\n"
    )


def _stages(frame: Frame, stages: list[dict[str, Any]]) -> Iterator[str]:
    first = 0
    for stage in stages:
        left, right = frame.x(first), frame.x(first + stage["steps"])
        size = f'width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        yield f'<rect x="{left:.1f}" y="{TOP}" {size} fill="{STAGES[stage["kind"]]}" stroke="#fff"/>'
        if right - left > 60:
            middle = (left + right) / 2
            yield _text(middle, TOP + 14, f"{stage['kind']}, {stage['length']:,}", "middle")
        first += stage["steps"]


def _axes(frame: Frame) -> Iterator[str]:
    for power in range(frame.low, frame.high + 1):
        y = frame.y(10.0**power)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ccc" stroke-width="0.5"/>'
        yield _text(LEFT - 6, y + 4, f"{10.0**power:g}", "end")
    for step in range(0, frame.steps + 1, 500):
        yield _text(frame.x(step), HEIGHT - BOTTOM + 16, f"{step:,}", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step", "middle")
    for i, (colour, name) in enumerate(CURVES.values()):
        yield f'<path d="M{LEFT + 220 * i} 16h18" stroke="{colour}" stroke-width="2"/>'
        yield _text(LEFT + 220 * i + 24, 20, name, "start")


def _curves(frame: Frame, losses: list[dict[str, float]]) -> Iterator[str]:
    for name, (colour, _) in CURVES.items():
        points = [f"{frame.x(row['step']):.1f},{frame.y(row[name]):.1f}" for row in losses if row[name] > 0]
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: plot_training.py LOG.json OUT.svg", file=sys.stderr)
        return 2
    log, out = map(Path, sys.argv[1:])
    out.write_text(svg(json.loads(log.read_text())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
