"""Curves side by side as SVG, written by hand: curves of one name have one colour and are drawn thin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

COLOURS = ("#1f6fb4", "#d9622b", "#3a923a", "#7f5fb0")
WIDTH, HEIGHT = 420, 300  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 38, 44  # margins


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    x: str
    y: str
    curves: Sequence[Curve]


def draw(panels: Sequence[Panel]) -> str:
    """One SVG document with the panels in a row. Raises ValueError for a panel without points."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    parts = [
        f'<g transform="translate({i * WIDTH},0)">{_panel(panel, colours)}</g>'
        for i, panel in enumerate(panels)
    ]
    style = "text{font:12px sans-serif;fill:#333}path{fill:none;stroke-width:1.2;stroke-linejoin:round}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Two round numbers or more that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = floor(low / step), ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel, colours: dict[str, str]) -> str:
    points = [point for curve in panel.curves for point in curve.points]
    if not points:
        raise ValueError(f"draw: a panel of {panel.y} over {panel.x} without points")
    xs, ys = (ticks(min(axis), max(axis)) for axis in zip(*points, strict=True))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (right - LEFT) * (x - xs[0]) / (xs[-1] - xs[0]),
            bottom - (bottom - TOP) * (y - ys[0]) / (ys[-1] - ys[0]),
        )

    out = []
    for x in xs:
        left, _ = place(x, ys[0])
        out.append(_line(left, bottom, left, bottom + 4, "#333"))
        out.append(_text(left, bottom + 17, f"{x:g}", "middle"))
    for y in ys:
        _, top = place(xs[0], y)
        out.append(_line(LEFT, top, right, top, "#e4e4e4"))
        out.append(_text(LEFT - 6, top + 4, f"{y:g}", "end"))
    out.append(_line(LEFT, bottom, right, bottom, "#333"))
    for curve in panel.curves:
        steps = " L".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in curve.points)
        out.append(f'<path d="M{steps}" stroke="{colours[curve.name]}"/>')
    out.append(_text((LEFT + right) / 2, HEIGHT - 8, panel.x, "middle"))
    out.append(_text(LEFT, 18, panel.y, "start"))
    for i, (name, colour) in enumerate(colours.items()):
        out.append(_line(right - 118, 12 + 14 * i, right - 98, 12 + 14 * i, colour))
        out.append(_text(right - 92, 16 + 14 * i, name, "start"))
    return "".join(out)


def _line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
