"""A run on a terminal: a few lines that are kept current."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from entrenar_py.train.service.figures import digits, duration, scored, size, traffic
from entrenar_py.train.service.run_events import Scored, StepMade

_BAR_WIDTH = 30


class Screen:
    """The last step and the last scores, as a table that rich renders anew at each refresh."""

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._step: StepMade | None = None
        self._scored: Scored | None = None

    def __call__(self, happening: StepMade | Scored) -> None:
        """Show this from the next refresh on."""
        if isinstance(happening, Scored):
            self._scored = happening
        else:
            self._step = happening

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row("step", self._bar())
        for name, text in self._rows():
            grid.add_row(name, Text(text))  # no markup: names of classes are a user's
        return grid

    def _bar(self) -> RenderableType:
        made = 0 if self._step is None else self._step.step + 1
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._num_steps, completed=made, width=_BAR_WIDTH)
        left = "waits for workers"
        if self._step is not None:
            pace = self._step.steps_per_s
            left = f"{duration((self._num_steps - made) / pace)} left" if pace else ""
        line.add_row(bar, Text(f"{made}/{self._num_steps}"), Text(left))
        return line

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the figures of each line below the bar."""
        if self._step is not None:
            yield "loss", _learned(self._step)
        if self._scored is not None:
            yield "validation", f"{scored(self._scored)} (after step {self._scored.step})"
        if self._step is not None:
            yield "pace", _pace(self._step)
            yield "memory", _memory(self._step)
            yield "workers", _workers(self._step)
            yield from (("traffic", f"{text} a step") for text in traffic(self._step))


def _learned(step: StepMade) -> str:
    parts = ["-" if math.isnan(step.loss) else f"{step.loss:.6g}"]
    if step.grad_norm is not None:
        parts.append(f"gradient norm {digits(step.grad_norm)}")
    if step.learning_rate is not None:
        parts.append(f"rate {step.learning_rate:.3g}")
    return ", ".join(parts)


def _pace(step: StepMade) -> str:
    rates = {"steps/s": step.steps_per_s, "tokens/s": step.tokens_per_s}
    parts = [f"{digits(rate)} {unit}" for unit, rate in rates.items() if rate is not None]
    times = {"exchange": step.exchange_ms, "reduce": step.reduce_ms}
    parts += [f"{name} {digits(ms)} ms" for name, ms in times.items() if ms is not None]
    return ", ".join(parts) or "-"


def _memory(step: StepMade) -> str:
    """Return the peaks, of the processes on this machine and of what torch holds on its GPUs."""
    parts = [] if step.memory_bytes is None else [size(step.memory_bytes)]
    if step.device_bytes is not None:
        parts.append(f"{size(step.device_bytes)} on GPUs")
    return ", ".join(parts) or "-"


def _workers(step: StepMade) -> str:
    parts = []
    for rank in step.workers:
        waited = step.waits_ms.get(rank) if len(step.workers) > 1 else None
        told = "" if waited is None else f" (waited {digits(waited)} ms)"
        parts.append(f"{rank} {step.backends.get(rank, '')}{told}".rstrip())
    return ", ".join(parts)
