"""Find what runs show against a declaration that a clause does not apply."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.check.command import judging
from entrenar_py.check.command.runs import Run
from entrenar_py.check.evidence.needs import KILLED, RESUMED
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.verdict import Verdict
from entrenar_py.shared.wording import listed

_RESTARTS = ("--max-restarts", "--max_restarts")  # of torchrun
_NAMED_MAX = 3  # files of a checkpoint


def refuted(
    declared: Sequence[Task], runs: Mapping[Path, Run], reasons: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield an entry for each clause that was declared not to apply, and that `runs` decide.

    No run is made for these clauses. `reasons` has, by id, why they are said not to apply.
    """
    for entry in judging.judge([task for task in declared if task.check is not None], runs):
        if entry.verdict is not Verdict.INCONCLUSIVE:
            why = reasons[entry.invariant.id]
            note = f"declared not to apply, and yet its runs decide it; take that out: {why}"
            finding = replace(entry.finding, notes=(*entry.finding.notes, note))
            yield replace(entry, finding=finding)


def doubts(
    declared: Sequence[Task], command: Sequence[str], folders: Collection[Path]
) -> dict[str, str]:
    """Return by id what speaks against a declaration about a run that was therefore not made.

    `folders` have the folders of the runs that were made.
    """
    works = [work for folder in folders for work in folder.glob("*/work")]
    saved = sorted({path.name for work in works for path in work.iterdir()})
    found = {
        RESUMED: saved and f"the script wrote {listed(saved, most=_NAMED_MAX)} to {{workdir}}",
        KILLED: restarts(command) and f"the command has {restarts(command)}",
    }
    return {
        task.invariant.id: str(why)
        for task in declared
        for need, why in found.items()
        if why and task.check is not None and need in task.check.needs
    }


def restarts(command: Sequence[str]) -> str:
    """Return the option by which the launcher starts workers again, with its value; else ""."""
    for at, word in enumerate(command):
        name, _, value = word.partition("=")
        value = value or "".join(command[at + 1 : at + 2])
        if name in _RESTARTS and value not in ("", "0"):
            return f"{name}={value}"
    return ""
