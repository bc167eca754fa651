"""Record scripts with ranks forked from one process that has imported torch."""

from __future__ import annotations

import sys
from pathlib import Path

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.record import Record
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.observing import ANATOMY
from entrenar_py.check.observing.auto import Settings
from falsification.twins import Twin
from tests.check.command import forked, zygote

STEPS = 8


def recorded(twin: Twin, folder: Path, *, steps: int = STEPS) -> tuple[dict[int, Record], Ended]:
    """Return the records of a twin's ranks, and how its processes ended."""
    work = folder / "work"
    work.mkdir(parents=True)
    script = work / twin.file
    script.write_text(twin.changed(), encoding="utf-8")
    ended = zygote.launch(
        [sys.executable, forked.__file__, str(twin.world_size), str(script), *twin.arguments],
        folder=folder,
        variables={**Settings(steps=steps).variables(), ANATOMY: "1"},
        deadline_s=60.0,
        is_over=lambda: False,
        cwd=work,
    )
    return record.load(folder), ended
