"""A plan of stages as text, as `stages:` of a configuration, as JSON, and as a diagram."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.plan.devices import seconds, short, size
from entrenar_py.train.plan.stage_costs import Terms
from entrenar_py.train.plan.stage_plan import PlannedStage, StagesPlan
from entrenar_py.train.plan.text import COLUMNS, columns, step_lines

SCHEMA = "entrenar-pipeline-plan/1"
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_HEAD = (
    *("stage", "blocks", "worker", "on", "needs", "there", "a shard"),
    *("a shard, on", "a step, up", "down"),
)
_TERMS = ("weights", "trained", "gradients", "arriving", "kept", "hidden", "passing", "runtime")


def lines(plan: StagesPlan, *, length_from: str) -> Iterator[str]:
    """Yield the lines of a plan: the model, each stage, and the time of a step."""
    yield from step_lines(plan.costs.run, length_from, "shards")
    yield ""
    yield "stages: memory of a worker, time of a shard, bytes on the wire"
    yield from columns(_HEAD, list(_rows(plan)))
    yield ""
    yield "bytes of a worker, term by term"
    yield from columns(("stage", *_TERMS), list(_term_rows(plan)))
    yield ""
    yield from _step(plan)


def section(stages: Sequence[StagePlan]) -> Iterator[str]:
    """Yield the lines of `stages:` for a configuration."""
    yield "stages:"
    for stage in stages:
        parts = [f"layers: [{stage.layers[0]}, {stage.layers[1]}]"]
        names = [scalar(name) for name in stage.worker]
        if names:
            listed = f"[{', '.join(names)}]"
            parts.append(f"worker: {names[0] if len(names) == 1 else listed}")
        if stage.backend:
            parts.append(f"backend: {stage.backend}")
        yield f"- {{{', '.join(parts)}}}"


def scalar(text: str) -> str:
    """Return `text` such that YAML reads it back, with quotes if it needs them."""
    is_plain = _PLAIN.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def to_record(plan: StagesPlan) -> dict[str, Any]:
    """Return a plan in a form that JSON can hold. Sizes are in bytes, times in seconds or None."""
    costs = plan.costs
    return {
        "schema": SCHEMA,
        "blocks": costs.num_blocks,
        "shards": costs.num_shards,
        "shard": {"rows": costs.run.rows, "tokens": costs.run.length},
        "stages": [_stage_record(stage, has_speed=plan.has_speed) for stage in plan.stages],
        "bubble": plan.bubble,
        "step_seconds": plan.step_seconds,
        "coordinator_bytes": int(costs.coordinator_bytes),
    }


def _stage_record(stage: PlannedStage, *, has_speed: bool) -> dict[str, Any]:
    return {
        "layers": [stage.blocks.start, stage.blocks.stop],
        "workers": [
            {
                "worker": worker.name or None,
                "backend": worker.kind,
                "memory_bytes": worker.memory,
                "needed_bytes": int(terms.needed),
                "needs": {term: int(getattr(terms, term)) for term in _TERMS},
            }
            for worker, terms in zip(stage.workers, stage.terms, strict=True)
        ],
        "shard_seconds": stage.seconds if has_speed else None,
        "hidden_bytes": stage.hidden_bytes,
        "sent_bytes": stage.sent_bytes,
        "received_bytes": stage.received_bytes,
    }


def _rows(plan: StagesPlan) -> Iterator[tuple[str, ...]]:
    for index, stage in enumerate(plan.stages):
        time = seconds(stage.seconds) if plan.has_speed else f"{stage.seconds:.2f} blocks"
        sizes = (stage.hidden_bytes, stage.sent_bytes, stage.received_bytes)
        moved = (time, *(size(num_bytes) if num_bytes else "-" for num_bytes in sizes))
        for number, (worker, terms) in enumerate(zip(stage.workers, stage.terms, strict=True)):
            yield (
                str(index),
                f"{stage.blocks.start}-{stage.blocks.stop - 1}",
                worker.name[:20] or "any",
                worker.kind,
                size(terms.needed),
                "?" if worker.memory is None else size(worker.memory),
                *(moved if not number else ("",) * len(moved)),
            )


def _term_rows(plan: StagesPlan) -> Iterator[tuple[str, ...]]:
    for index, stage in enumerate(plan.stages):
        kinds = dict[str, Terms]()
        for worker, terms in zip(stage.workers, stage.terms, strict=True):
            kinds.setdefault(worker.kind, terms)
        for kind, terms in kinds.items():
            name = str(index) if len(kinds) == 1 else f"{index} {kind}"
            yield (name, *(short(getattr(terms, term)) for term in _TERMS))


def _step(plan: StagesPlan) -> Iterator[str]:
    """Yield the time of a step, and the terms that add up to it."""
    num_shards, num_stages = plan.costs.num_shards, len(plan.stages)
    if plan.step_seconds is None:
        sentence = (
            "time     no speed is known (flops or seconds_per_block of workers): workers are "
            "assumed to be equally fast, and links to take no time. The slowest stage takes "
            f"{plan.slowest:.2f} blocks a shard."
        )
    else:
        sentence = (
            f"time     a step takes {seconds(plan.step_seconds)}: a shard through all stages, "
            f"{num_shards - 1} more behind the slowest stage ({seconds(plan.slowest)} each), and "
            f"gradients and weights over the coordinator's link ({size(plan.costs.run.bandwidth)}"
            "/s)"
        )
    yield from textwrap.wrap(sentence, COLUMNS, subsequent_indent=" " * 9)
    yield (
        f"bubble   {100 * plan.bubble:.0f} % of a step is idle: {counted(num_stages, 'stage')} and "
        f"{counted(num_shards, 'shard')}, (P - 1) / (S + P - 1)"
    )
    yield f"coordinator needs {size(plan.costs.coordinator_bytes)}"


_GRAPHVIZ_S = 30.0
_WIDTH, _HEIGHT, _GAP, _EDGE = 170, 84, 110, 20  # of a stage in our own SVG, in pixels
_NAME_CHARS = 20


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A drawn stage. `after` labels its link to the next stage, `up` the coordinator's link."""

    lines: tuple[str, ...]
    after: str
    up: str


def draw(plan: StagesPlan, form: str) -> str:
    """Return the diagram in `form`: mermaid, dot or svg.

    Graphviz draws the SVG if its program `dot` works; otherwise this module draws a plain one.
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
    """Return `text` escaped for a label of mermaid, where entities begin with # instead of &."""
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
    """Return the SVG that Graphviz draws from `source`; "" if it is not installed, or fails."""
    program = shutil.which("dot")
    if program is None:
        return ""
    try:
        drawing = subprocess.run(
            [program, "-Tsvg"],
            input=source.encode(),
            capture_output=True,
            timeout=_GRAPHVIZ_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return drawing.stdout.decode("utf-8", "replace").rstrip()


def _svg(boxes: list[_Box]) -> Iterator[str]:
    """Yield the lines of an SVG: stages in a row, and the coordinator above them."""
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
    yield _svg_text(middle, _EDGE + 28, "coordinator")
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
        yield _svg_text(centre, top + 24 + 20 * number, _short(text))
    yield _svg_text(centre, top - 14, box.up)
    if has_next:
        start, end, y = left + _WIDTH, left + _WIDTH + _GAP, top + _HEIGHT / 2
        yield f'<line x1="{start}" y1="{y:g}" x2="{end}" y2="{y:g}" {line}/>'
        yield _svg_text((start + end) / 2, y - 6, box.after)


def _short(text: str) -> str:
    return text if len(text) <= _NAME_CHARS + 4 else f"{text[:_NAME_CHARS]} ..."


def _svg_text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escaping.html(text)}</text>'
