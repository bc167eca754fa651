"""An anatomy and its suspects on one screen, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entrenar_py.check.anatomy.steps import Anatomy, Block, Difference, Line
from entrenar_py.check.anatomy.suspects import Suspect
from entrenar_py.shared.wording import counted

_VALUES_CHARS = 38
_DIFFERING_MAX = 18  # lines on steps and ranks that differ
_LINES_MAX = 4  # of one difference


def screen(anatomy: Anatomy, suspects: Sequence[Suspect]) -> Iterator[str]:
    """Yield the lines of the text."""
    first = min(anatomy.lanes)
    yield (
        f"{counted(len(anatomy.lanes), 'rank')}, {counted(anatomy.num_steps, 'step')}; a usual "
        f"step: step {anatomy.usual} of rank {first} ({_alike(anatomy)})"
    )
    differences = (*anatomy.by_rank, *anatomy.by_step)
    lines = [line for block in anatomy.lanes[first] for line in block.lines]
    lines += [
        line for difference in differences for line, _ in (*difference.also, *difference.lacks)
    ]
    width = max(len(line.place) for line in lines)
    for block in anatomy.lanes[first]:
        yield from _block(block, width)
    differing = [text for one in differences for text in _difference(one, width)]
    yield from differing[:_DIFFERING_MAX]
    if more := len(differing[_DIFFERING_MAX:]):
        yield f"{counted(more, 'more line')} on other steps (--json, --html)"
    if not anatomy.by_rank and len(anatomy.lanes) > 1:
        yield "all ranks make the same calls in this step"
    for rank, problem in anatomy.problems.items():
        yield f"rank {rank}: the record ends early: {problem}"
    yield "no suspects" if not suspects else counted(len(suspects), "suspect") + ":"
    for suspect in suspects:
        yield f"? {suspect.name}: {suspect.place} ({suspect.where}): {suspect.reason}"
        yield f"    decided by: {suspect.decided}"


def _alike(anatomy: Anatomy) -> str:
    others = len(anatomy.alike) - 1
    return f"{others} of the other {anatomy.num_steps - 1} make the same calls"


def _block(block: Block, width: int) -> Iterator[str]:
    for number, line in enumerate(block.lines):
        mark = f"x{block.times}" if block.times > 1 and not number else ""
        bar = "|" if block.times > 1 else " "
        yield f"{mark:>4} {bar} {line.place:<{width}}  {shown(line)}".rstrip()


def shown(line: Line) -> str:
    """Return what a line does, with its values; those of the last repetition, too."""
    values = line.values
    if line.last != line.values and len(line.values) + len(line.last) <= _VALUES_CHARS:
        values += f" ... {line.last.rpartition(': ')[2]}"
    return f"{line.what}  [{values}]" if values else line.what


def _difference(one: Difference, width: int) -> Iterator[str]:
    yield f"{one.where}:"
    for word, lines in (("also", one.also), ("not", one.lacks)):
        for line, count in lines[:_LINES_MAX]:
            times = f" x{count}" if count > 1 else ""
            yield f"  {word:>4}   {line.place:<{width}}  {line.what}{times}"
        if more := len(lines[_LINES_MAX:]):
            yield f"  {word:>4}   {counted(more, 'more line')}"


# --- JSON -----------------------------------------------------------------------------------------

VERSION = 1


def as_json(anatomy: Anatomy, suspects: Sequence[Suspect], command: str) -> dict[str, Any]:
    """Return the record of an anatomy for a file."""
    return {
        "version": VERSION,
        "command": command,
        "world_size": anatomy.world_size,
        "steps": anatomy.num_steps,
        "usual_step": anatomy.usual,
        "same_calls": list(anatomy.alike),
        "lanes": {str(rank): [*map(_of_block, lane)] for rank, lane in anatomy.lanes.items()},
        "differing_steps": [*map(_of_difference, anatomy.by_step)],
        "differing_ranks": [*map(_of_difference, anatomy.by_rank)],
        "problems": {str(rank): problem for rank, problem in anatomy.problems.items()},
        "suspects": [
            {
                "name": one.name,
                "file": relative(one.file),
                "line": one.line,
                "where": one.where,
                "reason": one.reason,
                "decided_by": one.decided,
            }
            for one in suspects
        ],
    }


def relative(file: str) -> str:
    """Return a path from this folder, if it is below it."""
    near = os.path.relpath(file) if file else ""
    return file if near.startswith("..") else near


def _of_block(block: Block) -> dict[str, Any]:
    return {"times": block.times, "lines": [*map(_of_line, block.lines)]}


def _of_line(line: Line) -> dict[str, Any]:
    row = {"file": relative(line.file), "line": line.line, "what": line.what}
    return {**row, "values": line.values, "last_values": line.last}


def _of_difference(difference: Difference) -> Mapping[str, Any]:
    return {
        "where": difference.where,
        "also": [{**_of_line(line), "times": count} for line, count in difference.also],
        "lacks": [{**_of_line(line), "times": count} for line, count in difference.lacks],
    }
