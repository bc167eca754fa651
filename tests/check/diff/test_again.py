"""`diff --again` on some twins, whose ranks are forked; `repeated` tries all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from entrenar_py.check.command import warm
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.diff import comparison, repetition, report, sources
from entrenar_py.check.diff.runs import CommandSide, Launching
from entrenar_py.check.observing.auto import Settings
from falsification import twins
from falsification.twins import Twin
from tests.check.command import forked, zygote
from tests.check.diff import repeated

TWINS = {twin.name.partition(": ")[2]: twin for twin in twins.family(repeated.FAMILY)}
SAMPLE = (
    "torch is not seeded before the weights are drawn",
    "numpy is not seeded, and samples get noise from it",
    "samples are left out by a random name of the run",
    "each worker of a loader has a generator of its own, unseeded",
    "features have the order in which threads are done",
    "the backward pass of an index adds with atomics",
    "the average is used before it is there",
    "texts, their time and names only written down",
)


@dataclass(kw_only=True)
class Forked(CommandSide):
    """A side whose processes are forked."""

    world_size: int = 1

    def _launch(self, folder: Path, variables: Mapping[str, str], steps: int) -> Ended:
        return zygote.launch(
            [sys.executable, forked.__file__, str(self.world_size), *self.command],
            folder=folder,
            variables={**Settings(steps=steps).variables(), **variables},
            deadline_s=60.0,
            is_over=lambda: False,
            cwd=self.launching.folder,
        )


def outcome(twin: Twin, folder: Path) -> comparison.Outcome:
    """Return what runs of a twin show."""
    (folder / twin.file).write_text(twin.changed(), encoding="utf-8")
    launching = Launching(
        folder=folder,
        steps=2,
        seed=None,
        num_disturbed=0,
        deadline_s=60.0,
        in_place=True,
        lines=True,
    )
    first, second = (
        Forked(
            name=name,
            command=(twin.file,),
            launching=launching,
            parents=warm.Parents(None),
            world_size=twin.world_size,
        )
        for name in "AB"
    )
    return repetition.repeat(first, second)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_source_of_a_difference_is_named(name: str, tmp_path: Path) -> None:
    """Its kind and line, if there is one; a right script is equal to itself."""
    twin = TWINS[name]
    found = outcome(twin, tmp_path)
    if not twin.check:
        assert (found.verdict, found.source) == (comparison.EQUAL, None)
        return
    assert found.source is not None
    line = twin.changed().splitlines()[found.source.line - 1]
    assert found.source.kind == twin.check
    assert twin.words in line
    if found.source.kind == sources.OPERATION:
        assert found.step_ms is not None
        assert min(found.step_ms) > 0
    assert f"source: {found.source.file}:{found.source.line}: " in "\n".join(report.lines(found))


def test_each_kind_of_source_has_a_twin() -> None:
    """A broken one that is named, and a right one that looks like it."""
    broken = {twin.check for twin in TWINS.values() if twin.check}
    assert broken == {name for twin in TWINS.values() for name in twin.wanted}
