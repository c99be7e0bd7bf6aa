#!/usr/bin/env python3
"""Draws what `tilert-ref bench decode --json` measured as SVG: a step's time over the context, our phases stacked
behind it, and the share of the copy bandwidth.

python scripts/plot_bench.py MEASURED.json OUT.svg
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 760, 560, 70, 230, 30, 44, 56
LOWER = 130  # height of the share's panel
LINES = ("#1f5fa8", "#3b8a3e", "#7a4fa3", "#555555")
AREAS = ("#dbe7f3", "#f6e3d3", "#dcefdc", "#efe0f3", "#f5eec2", "#e3e3e3", "#f3d9dd", "#d5eeee")


class Panel:
    """Where a context and a value stand on the page; contexts on a logarithmic scale, values from 0."""

    def __init__(self, contexts: list[int], highest: float, top: float, height: float):
        self.low, self.high = math.log2(min(contexts)), math.log2(max(contexts))
        self.step = _round_step(highest / 4)
        self.highest = self.step * max(math.ceil(highest / self.step), 1)
        self.top, self.height = top, height

    def x(self, context: int) -> float:
        share = (math.log2(context) - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.highest)

    def axes(self, contexts: list[int], title: str) -> Iterator[str]:
        yield _text(LEFT, self.top - 10, title, "start")
        for i in range(round(self.highest / self.step) + 1):
            y = self.y(i * self.step)
            yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ccc" stroke-width="0.5"/>'
            yield _text(LEFT - 6, y + 4, f"{i * self.step:,g}", "end")
        for context in contexts:
            yield _text(self.x(context), self.top + self.height + 16, f"{context:,}", "middle")

    def line(self, points: list[tuple[int, float]], colour: str) -> Iterator[str]:
        placed = [(self.x(context), self.y(value)) for context, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        for x, y in placed:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'


def svg(bench: dict[str, Any]) -> str:
    """The page. bench: what --json wrote. ValueError if nothing was measured."""
    series = _series(bench["measured"])
    contexts = sorted({row["context"] for rows in series.values() for row in rows})
    if not contexts:
        raise ValueError("no measurement to draw; legal: one or more lines under `measured`")
    upper = HEIGHT - TOP - BOTTOM - GAP - LOWER
    highest = max(row["step_us"] for rows in series.values() for row in rows)
    times = Panel(contexts, highest, TOP, upper)
    shares = Panel(contexts, 100, TOP + upper + GAP, LOWER)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    parts = [head + 'font-size="12" fill="#333">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    parts += _phases(times, bench["measured"])
    parts += times.axes(contexts, "a step, us")
    parts += shares.axes(contexts, f"% of the copy bandwidth, {bench['copy_gb_s']:,.0f} GB/s, without drafts")
    for i, (name, rows) in enumerate(series.items()):
        colour = LINES[i % len(LINES)]
        parts += times.line([(row["context"], row["step_us"]) for row in rows], colour)
        parts += shares.line([(r["context"], 100 * r["share_of_copy"]) for r in rows if r.get("share_of_copy")], colour)
        parts += _label(i, colour, name)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens before the answer", "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(measured: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of one line each, contexts ascending: ours by drafts, vLLM."""
    lines = dict[str, list[dict[str, Any]]]()
    for row in sorted(measured, key=lambda row: row["context"]):
        drafts = f", {row['num_mtp']} draft(s)" if row["num_mtp"] else ""
        lines.setdefault(row["who"] + drafts, []).append(row)
    return lines


def _phases(panel: Panel, measured: list[dict[str, Any]]) -> Iterator[str]:
    """Our phases without drafts, one above the other, the greatest at the bottom."""
    rows = [row for row in measured if row.get("phases_us") and not row["num_mtp"]]
    rows.sort(key=lambda row: row["context"])
    names = dict.fromkeys(name for row in rows for name in row["phases_us"])
    floor = [0.0] * len(rows)
    ordered = sorted(names, key=lambda name: -max(row["phases_us"].get(name, 0.0) for row in rows))
    for i, name in enumerate(ordered):
        roof = [low + row["phases_us"].get(name, 0.0) for low, row in zip(floor, rows, strict=True)]
        edge = [*zip(rows, roof, strict=True), *reversed(list(zip(rows, floor, strict=True)))]
        path = " ".join(f"{panel.x(row['context']):.1f},{panel.y(value):.1f}" for row, value in edge)
        colour = AREAS[i % len(AREAS)]
        yield f'<polygon points="{path}" fill="{colour}"/>'
        yield f'<rect x="{WIDTH - RIGHT + 16}" y="{TOP + 90 + 18 * i}" width="18" height="10" fill="{colour}"/>'
        yield _text(WIDTH - RIGHT + 40, TOP + 99 + 18 * i, name, "start")
        floor = roof


def _label(i: int, colour: str, name: str) -> Iterator[str]:
    y = TOP + 6 + 18 * i
    yield f'<path d="M{WIDTH - RIGHT + 16} {y}h18" stroke="{colour}" stroke-width="2"/>'
    yield _text(WIDTH - RIGHT + 40, y + 4, name, "start")


def _round_step(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: plot_bench.py MEASURED.json OUT.svg", file=sys.stderr)
        return 2
    measured, out = map(Path, sys.argv[1:])
    out.write_text(svg(json.loads(measured.read_text())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
