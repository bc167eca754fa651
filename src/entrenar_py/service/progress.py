"""Shows the run to a person: one line that is kept current, or plain lines in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from entrenar_py.service.run_events import Happening, Listener, Noted, StepMade
from entrenar_py.untrusted import escaping

LINE_EVERY_S = 5.0
_UNITS = ("B", "kB", "MB", "GB", "TB")


@contextmanager
def opened(console: Console, *, num_steps: int) -> Iterator[Listener]:
    """Yield a listener that shows the run on `console`: live on a terminal, in lines elsewhere."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("waits for workers", total=num_steps)
        yield Live(progress, task)


class Pace:
    """Limits how often frequent events are shown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shown: dict[str, float] = {}

    def allows(self, happening: Happening) -> bool:
        """Return whether to show `happening` now. Only steps and checkpoints are limited."""
        what = happening.what if isinstance(happening, Noted) else "step"
        if what not in ("step", "saved"):
            return True
        now = self._clock()
        if what in self._shown and now - self._shown[what] < LINE_EVERY_S:
            return False
        self._shown[what] = now
        return True


class Lines:
    """Prints notes and the last step; one other step and one save every LINE_EVERY_S."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._pace = Pace(clock)

    def __call__(self, happening: Happening) -> None:
        """Print the line of `happening`, unless one like it was just printed."""
        if isinstance(happening, Noted):
            if self._pace.allows(happening):
                self._print(escaping.line(happening.text))
        elif self._pace.allows(happening) or happening.step == happening.num_steps - 1:
            self._print(f"step {happening.step + 1}/{happening.num_steps}  {summary(happening)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)  # also flushes, for readers who follow the log


class Live:
    """Shows a bar with the run's state. Notes scroll by above it."""

    def __init__(
        self, progress: Progress, task: TaskID, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._task = progress, task
        self._pace = Pace(clock)

    def __call__(self, happening: Happening) -> None:
        """Print a note, or update the bar."""
        if isinstance(happening, Noted):
            if self._pace.allows(happening):
                text = escaping.line(happening.text)
                self._progress.console.print(text, markup=False, highlight=False)
            return
        self._progress.update(
            self._task, completed=happening.step + 1, description=summary(happening)
        )


def summary(step: StepMade) -> str:
    """Return one step in a line: loss, pace, workers, traffic, times, and who delivered last."""
    parts = [] if math.isnan(step.loss) else [f"loss {step.loss:.6g}"]
    if step.steps_per_s is not None:
        parts.append(f"{_digits(step.steps_per_s)} steps/s")
    parts += [
        f"workers {','.join(map(str, step.workers))}",
        f"in {_size(step.bytes_in)} out {_size(step.bytes_out)}",
    ]
    if step.exchange_ms is not None:
        parts.append(f"exchange {_digits(step.exchange_ms)} ms")
    if step.reduce_ms is not None:
        parts.append(f"reduce {_digits(step.reduce_ms)} ms")
    longest = max(step.waits_ms, key=step.waits_ms.__getitem__, default=None)
    if longest is not None and len(step.waits_ms) > 1:
        waited_ms = step.waits_ms[longest]
        parts.append(f"worker {longest} waited {_digits(waited_ms)} ms")
    if step.last is not None:
        parts.append(f"last worker {step.last.rank}, {_digits(step.last.behind_ms)} ms behind")
    return "  ".join(parts)


def _digits(number: float) -> str:
    """Format `number` with three digits, or more before the point, and never an exponent."""
    return f"{number:.3g}" if 1e-4 <= abs(number) < 999.5 else f"{number:.0f}"


def _size(num_bytes: float) -> str:
    """Format `num_bytes` in decimal units, with three digits."""
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:  # from there on three digits are 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {_UNITS[-1]}"
