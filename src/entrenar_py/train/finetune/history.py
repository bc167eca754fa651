"""A run's curves, read back from its metrics: all of it, however often it was resumed.

Long runs are thinned out while they are read, so that memory does not grow with the steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.finetune import timeline
from entrenar_py.train.wire.pipeline import Timed

POINTS_MAX = 400  # of a curve of steps
NOTES_MAX = 100
BEGINNINGS = ("listening", "began")  # a coordinator's run, and one of torchrun's ranks
ALERTS = ("spike", "halted", "left", "not_saved", "not_scored", "gap", "unchecked")


@dataclass
class History:
    """What a run told, by the number of steps made.

    `losses` are means and `norms` the largest of stretches of equal length. `alerts` are the words
    of the last NOTES_MAX notes that are no routine; `num_alerts` counts all of them by name.
    `evaluations` are records of `run_events.Scored`, by step. `passes` are those of each rank of a
    layer pipeline in the last step.
    """

    num_steps: int
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    num_alerts: Counter[str] = field(default_factory=Counter)
    passes: dict[int, list[Timed]] = field(default_factory=dict)
    _sums: dict[int, tuple[float, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def take(self, record: dict[str, Any]) -> None:
        """Take a line of the metrics; one that is not of the form of `run_events` is left out."""
        what, step = record.get("what"), record.get("step")
        if type(step) is not int:
            return
        if what == "step":
            self._take_step(step + 1, record)
        elif what == "evaluation" and _is_finite(record.get("loss")):
            self.evaluations[step] = record
        elif what in ALERTS and isinstance(record.get("text"), str):
            self.num_alerts[what] += 1
            self.alerts = [*self.alerts, record["text"]][-NOTES_MAX:]

    def _take_step(self, made: int, record: dict[str, Any]) -> None:
        length = -(-self.num_steps // POINTS_MAX) or 1
        place = min(-(-made // length) * length, self.num_steps)  # the end of the step's stretch
        self.passes = timeline.passes_of(record)
        loss, norm = record.get("loss"), record.get("grad_norm")
        if _is_finite(loss):
            total, count = self._sums[place]
            self._sums[place] = total + loss, count + 1
            self.losses[place] = (total + loss) / (count + 1)
        if _is_finite(norm):
            self.norms[place] = max(norm, self.norms.get(place, 0.0))


def read(path: Path, *, num_steps: int) -> History:
    """Return the history in the metrics at `path`, from the last time that the run began anew.

    Raises OSError if the file can't be read. Lines that were cut off are left out.
    """
    history = History(num_steps)
    with files.open_file(path) as file:
        for line in files.lines(file):
            try:
                record = json_text.load(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            if record.get("what") in BEGINNINGS and record.get("step") == 0:
                history = History(num_steps)
            history.take(record)
    return history


def _is_finite(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
