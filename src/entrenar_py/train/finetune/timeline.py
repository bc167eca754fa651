"""The passes of a layer pipeline's last step, a line a stage, as inline SVG for the run's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.pipeline import Timed

WIDTH, ROW, LEFT, BOTTOM = 900, 26, 80, 30
PASSES_MAX = 2_000  # drawn in one picture


def passes_of(record: Mapping[str, Any]) -> dict[int, list[Timed]]:
    """Return each rank's passes in a line of the metrics; none if they are not of that form."""
    found = dict[int, list[Timed]]()
    given = record.get("passes_us")
    for rank, times in given.items() if isinstance(given, dict) else ():
        if not rank.isdecimal() or not isinstance(times, list):
            return {}
        if not all(type(one) is int for one in times):
            return {}
        try:
            found[int(rank)] = pipeline.decode(times)
        except ProtocolError:
            return {}
    return found


def draw(passes: Mapping[int, Sequence[Timed]], num_shards: int) -> Iterator[str]:
    """Yield the picture of `passes`, by rank, with what stages of equal speed would wait."""
    every = [one for of_rank in passes.values() for one in of_rank]
    idle = pipeline.idle_share(passes)
    if idle is None or len(every) > PASSES_MAX:
        return
    start, end = min(one.began for one in every), max(one.ended for one in every)
    height = ROW * len(passes) + BOTTOM
    yield '<section><h2>Passes of the last step</h2><div class="wide">'
    yield f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="passes of each rank">'
    for row, (rank, of_rank) in enumerate(sorted(passes.items())):
        top = ROW * row
        yield f'<text x="0" y="{top + 17}">rank {rank}</text>'
        yield from (_box(one, start, end, top) for one in of_rank)
    span_ms = (end - start) / 1e3
    yield f'<text x="{LEFT}" y="{height - 8}">0</text>'
    yield f'<text x="{WIDTH}" y="{height - 8}" text-anchor="end">{span_ms:.1f} ms</text>'
    yield "</svg></div>"
    expected = (len(passes) - 1) / (num_shards + len(passes) - 1)
    text = (
        f"Dark: forward passes; in the last stage the backward pass, too. Light: backward passes. "
        f"{idle:.1%} of the time stages waited; equal stages that wait for nothing else do so for "
        f"(P - 1) / (S + P - 1) = {expected:.1%}, of P = {len(passes)} stages and S = {num_shards} "
        "shards."
    )
    yield f"<p>{escaping.html(text)}</p></section>"


def _box(one: Timed, start: int, end: int, top: int) -> str:
    scale = (WIDTH - LEFT) / (end - start)
    left, width = LEFT + scale * (one.began - start), max(1.0, scale * (one.ended - one.began))
    opacity = 0.9 if one.is_forward else 0.4
    kind = "forward" if one.is_forward else "backward"
    took_ms = (one.ended - one.began) / 1e3
    return (
        f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{ROW - 6}" '
        f'fill="currentColor" fill-opacity="{opacity}">'
        f"<title>shard {one.shard}, {kind}: {took_ms:.1f} ms</title></rect>"
    )
