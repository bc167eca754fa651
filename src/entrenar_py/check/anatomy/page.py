"""An anatomy as one self-contained page: a lane for each rank, in the order of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entrenar_py.check.anatomy.steps import Anatomy, Block, Difference, Line
from entrenar_py.check.anatomy.suspects import Suspect
from entrenar_py.check.anatomy.text import shown
from entrenar_py.shared.page import html_page
from entrenar_py.shared.untrusted.escaping import html
from entrenar_py.shared.wording import counted

_LANES_MAX = 8
# The beginning of a line's words -> the colour of its mark.
_COLOURS = (
    *(("draw", 0), ("a pass", 0), ("the pass", 0), ("forward", 2), ("backward", 1)),
    *(("clip", 4), ("save", 5)),
)
_STEP, _COLLECTIVE, _OTHER = 2, 3, 5


def page(anatomy: Anatomy, suspects: Sequence[Suspect], command: str) -> str:
    """Return the page."""
    return "\n".join(
        [*html_page.begin("Anatomy of a training step"), *_body(anatomy, suspects, command)]
    )


def _body(anatomy: Anatomy, suspects: Sequence[Suspect], command: str) -> Iterator[str]:
    yield f"<h1>Anatomy of a training step</h1><pre>{html(command)}</pre>"
    summary = f"{counted(len(anatomy.lanes), 'rank')}, {counted(anatomy.num_steps, 'step')}; "
    yield f"<p>{summary}step {anatomy.usual} is shown, as a usual one.</p>"
    yield f"<section><h2>{counted(len(suspects), 'suspect') if suspects else 'No suspects'}</h2>"
    for suspect in suspects:
        name = f'<span class="verdict inconclusive">{html(suspect.name)}</span>'
        yield f"<h3>{name} {html(suspect.place)}</h3>"
        yield f"<p>{html(suspect.where)}: {html(suspect.reason)}</p>"
        yield f"<p>Decided by: {html(suspect.decided)}</p>"
    yield "</section><section><h2>A usual step</h2>"
    yield '<div class="wide"><table><thead><tr>'
    lanes = [*anatomy.lanes.items()][:_LANES_MAX]
    yield "".join(f"<th></th><th>rank {rank}</th><th>line</th>" for rank, _ in lanes)
    yield "</tr></thead><tbody>"
    rows = [[*_rows(lane)] for _, lane in lanes]
    for at in range(max(map(len, rows))):
        cells = (row[at] if at < len(row) else "<td></td><td></td><td></td>" for row in rows)
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if left := len(anatomy.lanes) - len(lanes):
        yield f"<p>{counted(left, 'more rank')} in the JSON file.</p>"
    yield "</section><section><h2>Steps and ranks that differ</h2>"
    for difference in (*anatomy.by_step, *anatomy.by_rank):
        yield from _difference(difference)
    if not (anatomy.by_step or anatomy.by_rank):
        yield "<p>None.</p>"
    for rank, problem in anatomy.problems.items():
        yield f"<p>Rank {rank}: the record ends early: {html(problem)}</p>"
    yield f"</section>{html_page.END}"


def _rows(lane: Sequence[Block]) -> Iterator[str]:
    for block in lane:
        for number, line in enumerate(block.lines):
            times = f"&times;{block.times}" if block.times > 1 and not number else ""
            bar = "&#9474; " if block.times > 1 else ""
            colour = f'<span class="key c{_colour(line)}"></span>'
            yield (
                f'<td class="name">{times}</td><td>{bar}{colour}{html(shown(line))}</td>'
                f'<td class="name">{html(line.place)}</td>'
            )


def _colour(line: Line) -> int:
    for begin, colour in _COLOURS:
        if line.what.startswith(begin):
            return colour
    if " ranks" in line.what:
        return _COLLECTIVE
    return _STEP if ".step" in line.what else _OTHER


def _difference(one: Difference) -> Iterator[str]:
    yield f"<h3>{html(one.where)}</h3><table><tbody>"
    for word, lines in (("also", one.also), ("not", one.lacks)):
        for line, count in lines:
            times = f" &times;{count}" if count > 1 else ""
            yield f'<tr><td class="name">{word}</td><td>{html(line.what)}{times}</td>'
            yield f'<td class="name">{html(line.place)}</td></tr>'
    yield "</tbody></table>"
