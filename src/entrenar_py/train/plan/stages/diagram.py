"""Draws the stages of a plan: machines, their blocks, and the bytes that links carry in a step."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.plan.stages.planned import StagesPlan
from entrenar_py.train.plan.units import size

_GRAPHVIZ_S = 30.0
_WIDTH, _HEIGHT, _GAP, _EDGE = 170, 84, 110, 20  # of a stage in our own SVG, in pixels
_NAME_CHARS = 20


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A stage as it is drawn; `after` is on the link to the next one, `up` to the coordinator."""

    lines: tuple[str, ...]
    after: str
    up: str


def draw(plan: StagesPlan, form: str) -> str:
    """Return the diagram in `form`: mermaid, dot or svg.

    An SVG is Graphviz's where its program `dot` is installed and works, else a plain one.
    """
    boxes = list(_boxes(plan))
    if form == "svg":
        return _by_graphviz("\n".join(_dot(boxes))) or "\n".join(_svg(boxes))
    return "\n".join((_mermaid if form == "mermaid" else _dot)(boxes))


def _boxes(plan: StagesPlan) -> Iterator[_Box]:
    for index, stage in enumerate(plan.stages):
        own = stage.blocks
        blocks = f"block {own.start}" if len(own) == 1 else f"blocks {own.start}-{own.stop - 1}"
        names = ", ".join(dict.fromkeys(one.name or "any worker" for one in stage.workers))
        kinds = ", ".join(dict.fromkeys(one.kind for one in stage.workers))
        needed = max(terms.needed for terms in stage.terms)
        hidden = stage.hidden_bytes * plan.costs.num_shards
        yield _Box(
            lines=(
                escaping.shortened(escaping.line(names), chars_max=200),
                f"stage {index}: {blocks}",
                f"{kinds}, {size(needed)}",
            ),
            after=f"{size(hidden)} each way",
            up=f"{size(stage.sent_bytes)} up, {size(stage.received_bytes)} down",
        )


def _mermaid(boxes: list[_Box]) -> Iterator[str]:
    yield "flowchart LR"
    yield '  coordinator(["coordinator"])'
    for index, box in enumerate(boxes):
        yield f'  stage{index}["{"<br/>".join(map(_entities, box.lines))}"]'
    for index, box in enumerate(boxes):
        if index < len(boxes) - 1:
            yield f'  stage{index} <-->|"{box.after}"| stage{index + 1}'
    for index, box in enumerate(boxes):
        yield f'  stage{index} <-.->|"{box.up}"| coordinator'


def _entities(text: str) -> str:
    """Return `text` for a label of mermaid, whose entities have # in place of &."""
    kept = " ,.:-_"
    return "".join(c if c.isalnum() or c in kept else f"#{ord(c)};" for c in text)


def _dot(boxes: list[_Box]) -> Iterator[str]:
    yield "digraph pipeline {"
    yield "  rankdir=LR"
    yield "  node [shape=box]"
    yield "  coordinator [shape=ellipse]"
    for index, box in enumerate(boxes):
        label = r"\n".join(map(_quoted, box.lines))
        yield f'  stage{index} [label="{label}"]'
    for index, box in enumerate(boxes):
        if index < len(boxes) - 1:
            yield f'  stage{index} -> stage{index + 1} [dir=both, label="{box.after}"]'
    for index, box in enumerate(boxes):
        yield f'  stage{index} -> coordinator [dir=both, style=dashed, label="{box.up}"]'
    yield "}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _by_graphviz(source: str) -> str:
    """Return what Graphviz makes of `source`; "" if it is not installed, or fails."""
    program = shutil.which("dot")
    if program is None:
        return ""
    try:
        made = subprocess.run(
            [program, "-Tsvg"],
            input=source.encode(),
            capture_output=True,
            timeout=_GRAPHVIZ_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return made.stdout.decode("utf-8", "replace").rstrip()


def _svg(boxes: list[_Box]) -> Iterator[str]:
    """Yield an SVG: stages in a row, and the coordinator above them."""
    width = len(boxes) * (_WIDTH + _GAP) - _GAP + 2 * _EDGE
    top = _EDGE + 3 * _HEIGHT
    middle = width / 2
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + _HEIGHT + _EDGE}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">'
    )
    yield f'<rect width="{width}" height="{top + _HEIGHT + _EDGE}" fill="white"/>'
    for index, box in enumerate(boxes):
        yield from _svg_stage(index, box, top, middle, has_next=index < len(boxes) - 1)
    yield f'<ellipse cx="{middle:g}" cy="{_EDGE + 24}" rx="80" ry="24" {_PEN}/>'
    yield _text(middle, _EDGE + 28, "coordinator")
    yield "</svg>"


_PEN = 'fill="white" stroke="black"'


def _svg_stage(index: int, box: _Box, top: int, middle: float, *, has_next: bool) -> Iterator[str]:
    left = _EDGE + index * (_WIDTH + _GAP)
    centre, line = left + _WIDTH / 2, 'stroke="black"'
    yield (
        f'<line x1="{centre:g}" y1="{top}" x2="{middle:g}" y2="{_EDGE + 48}" {line} '
        'stroke-dasharray="4"/>'
    )
    yield f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" {_PEN}/>'
    for number, text in enumerate(box.lines):
        yield _text(centre, top + 24 + 20 * number, _short(text))
    yield _text(centre, top - 14, box.up)
    if has_next:
        start, end, y = left + _WIDTH, left + _WIDTH + _GAP, top + _HEIGHT / 2
        yield f'<line x1="{start}" y1="{y:g}" x2="{end}" y2="{y:g}" {line}/>'
        yield _text((start + end) / 2, y - 6, box.after)


def _short(text: str) -> str:
    return text if len(text) <= _NAME_CHARS + 4 else f"{text[:_NAME_CHARS]} ..."


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escaping.html(text)}</text>'
