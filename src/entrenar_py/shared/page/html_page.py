"""Self-contained HTML pages: their frame and style, and line charts as inline SVG.

A page's content security policy allows no scripts and no requests. Charts use the page's style
sheet. Overlapping lines stay visible, because each line is thinner than the line below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.shared.untrusted import escaping

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
END = "</body>\n</html>"


def begin(title: str) -> Iterator[str]:
    """Yield the lines of an HTML page up to its body. `title` is escaped here."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>{escaping.html(title)}</title>"
    yield f"<style>\n{STYLE}</style>\n</head>\n<body>"


WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 36  # room for the numbers at the axes
NUM_COLOURS = 6
_TICKS = 4


Points = tuple[tuple[int, float], ...]  # step and value, ascending


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart with its label. `colour` is an index into the page's colours."""

    label: str
    points: Points
    colour: int

    @property
    def style(self) -> str:
        """The class of the line in the page's style sheet."""
        return f"c{self.colour % NUM_COLOURS}"


@dataclass(frozen=True)
class _Axis:
    """A mapping of values to coordinates. A logarithmic axis places 0 below all other values."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the coordinate of `value`."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False) -> str:
    """Return a figure of these lines over steps, with a legend; `unit` labels the value axis.

    With `log`, the value axis is logarithmic, and no value may be negative.
    """
    body = [*_frame(lines, unit, log=log)]
    named = escaping.html(title)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{named}">'
        f"<title>{named}</title>{''.join(body)}</svg>"
    )
    legend = "".join(
        f'<li><span class="key {line.style}"></span>{escaping.html(line.label)}</li>'
        for line in lines
    )
    return f"<figure><figcaption>{named}</figcaption>{svg}<ul>{legend}</ul></figure>"


def _frame(lines: Sequence[Line], unit: str, *, log: bool) -> Iterator[str]:
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    x = _Axis(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = _values_axis(values, log=log)
    for value, text in _value_ticks(y, values):
        at = y.place(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="end" x="{LEFT - 6}" y="{at + 3.5:.1f}">{text}</text>'
    for step in _step_ticks(int(x.low), int(x.high)):
        yield f'<text class="mid" x="{x.place(step):.1f}" y="{HEIGHT - BOTTOM + 15}">{step}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="mid" x="{middle:.1f}" y="{HEIGHT - 5}">step</text>'
    across = f'transform="rotate(-90 10 {HEIGHT / 2:.0f})"'
    yield f'<text class="mid" x="10" y="{HEIGHT / 2:.0f}" {across}>{escaping.html(unit)}</text>'
    for number, line in enumerate(lines):
        width = 1.4 + 1.6 * (len(lines) - 1 - number)
        yield from _drawn(line.points, x, y, line.style, min(width, 9.0))


def _drawn(points: Points, x: _Axis, y: _Axis, name: str, width: float) -> Iterator[str]:
    places = [f"{x.place(step):.1f},{y.place(value):.1f}" for step, value in points]
    if len(places) == 1:
        at, across = places[0].split(",")
        yield f'<circle class="dot {name}" cx="{at}" cy="{across}" r="{1 + width / 2:.1f}"/>'
    elif places:
        yield f'<polyline class="{name}" stroke-width="{width:.1f}" points="{" ".join(places)}"/>'


def _values_axis(values: Sequence[float], *, log: bool) -> _Axis:
    start, end = HEIGHT - BOTTOM, TOP
    if not log:
        every = _round((max(values) - min(values)) or abs(max(values)) or 1.0)
        low, high = math.floor(min(values) / every), math.ceil(max(values) / every)
        return _Axis(low * every, max(high, low + 1) * every, start, end)
    logs = [math.log10(value) for value in values if value > 0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    # One more decade at the bottom for 0.
    return _Axis(low - (0 in values), max(high, low + 1), start, end, log=True)


def _value_ticks(axis: _Axis, values: Sequence[float]) -> Iterator[tuple[float, str]]:
    if not axis.log:
        every = _round((max(values) - min(values)) or abs(max(values)) or 1.0)
        for number in range(round((axis.high - axis.low) / every) + 1):
            value = axis.low + number * every
            yield value, f"{value:.6g}"
        return
    lowest = int(axis.low) + (0 in values)
    if 0 in values:
        yield 0.0, "0"
    every = max(1, -(-(int(axis.high) - lowest) // _TICKS))
    for power in range(lowest, int(axis.high) + 1, every):
        yield 10.0**power, f"1e{power}"


def _round(span: float) -> float:
    """Return the smallest 1, 2 or 5 times 10^n that fits into `span` at most _TICKS times."""
    least = span / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _step_ticks(low: int, high: int) -> range:
    every = max(1, round(_round(max(high - low, 1))))
    return range(-(-low // every) * every, high + 1, every)
