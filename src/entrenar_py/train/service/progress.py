"""The display of a run: a live screen on a terminal, or plain lines in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from entrenar_py.shared.page import console
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.service.metrics import EventFiles, Metrics
from entrenar_py.train.service.run_events import Happening, Listener, Noted, Scored, StepMade

CLASSES_SHOWN = 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


def summary(step: StepMade) -> str:
    """Return one step as a line: loss, speed, workers, traffic, times and the last delivery."""
    parts = [] if math.isnan(step.loss) else [f"loss {step.loss:.6g}"]
    if step.steps_per_s is not None:
        parts.append(f"{digits(step.steps_per_s)} steps/s")
    parts.append(f"workers {','.join(map(str, step.workers))}")
    parts += traffic(step)
    if step.exchange_ms is not None:
        parts.append(f"exchange {digits(step.exchange_ms)} ms")
    if step.reduce_ms is not None:
        parts.append(f"reduce {digits(step.reduce_ms)} ms")
    longest = max(step.waits_ms, key=step.waits_ms.__getitem__, default=None)
    if longest is not None and len(step.waits_ms) > 1:
        waited_ms = step.waits_ms[longest]
        parts.append(f"worker {longest} waited {digits(waited_ms)} ms")
    if step.idle_share is not None:
        parts.append(f"idle {step.idle_share:.0%}")
    if step.last is not None:
        parts.append(f"last worker {step.last.rank}, {digits(step.last.behind_ms)} ms behind")
    return "  ".join(parts)


def traffic(step: StepMade) -> list[str]:
    """Return the coordinator's traffic in a step, as a list of one text; empty without traffic."""
    if step.bytes_in is None or step.bytes_out is None:
        return []
    return [f"in {size(step.bytes_in)} out {size(step.bytes_out)}"]


def scored(scores: Scored) -> str:
    """Return scores as a line: loss, perplexity, accuracy, margin, and scores of some classes."""
    parts = [f"loss {scores.loss:.4f}"]
    if scores.perplexity is not None:
        parts.append(f"perplexity {scores.perplexity:.4g}")
    if scores.accuracy is not None:
        parts.append(f"accuracy {scores.accuracy:.3f}")
    if scores.margin is not None:
        parts.append(f"margin {scores.margin:.4g}")
    for own in scores.classes[:CLASSES_SHOWN]:
        figures = {"recall": own.recall, "precision": own.precision, "F1": own.f1}
        texts = [f"{name} {'-' if x is None else f'{x:.3f}'}" for name, x in figures.items()]
        parts.append(f"{escaping.line(own.label)} {' '.join(texts)}")
    if len(scores.classes) > CLASSES_SHOWN:
        parts.append(f"and {len(scores.classes) - CLASSES_SHOWN} more classes")
    return ", ".join(parts)


def digits(number: float) -> str:
    """Return `number` with three significant digits or all integer digits, without an exponent."""
    return f"{number:.3g}" if 1e-4 <= abs(number) < 999.5 else f"{number:.0f}"


def size(num_bytes: float) -> str:
    """Return `num_bytes` as text in decimal units, with three digits."""
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:  # from there on, three digits would be 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Return `seconds` as h:mm:ss."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


_BAR_WIDTH = 30


class Screen:
    """The last step and the last scores, as a table that rich renders at each refresh."""

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._step: StepMade | None = None
        self._scored: Scored | None = None

    def __call__(self, happening: StepMade | Scored) -> None:
        """Show `happening` from the next refresh on."""
        if isinstance(happening, Scored):
            self._scored = happening
        else:
            self._step = happening

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row("step", self._bar())
        for name, text in self._rows():
            grid.add_row(name, Text(text))  # no markup: class names come from the user
        return grid

    def _bar(self) -> RenderableType:
        num_made = 0 if self._step is None else self._step.step + 1
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._num_steps, completed=num_made, width=_BAR_WIDTH)
        left = "waits for workers"
        if self._step is not None:
            pace = self._step.steps_per_s
            left = f"{duration((self._num_steps - num_made) / pace)} left" if pace else ""
        line.add_row(bar, Text(f"{num_made}/{self._num_steps}"), Text(left))
        return line

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the label and the values of each line below the progress bar."""
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
    """Return the memory peaks of the processes on this machine and of torch on its GPUs."""
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


LINE_EVERY_S = 5.0
REFRESHES_A_SECOND = 4


def listeners(
    stack: ExitStack, *, num_steps: int, metrics: Path | None, tensorboard: Path | None = None
) -> list[Listener]:
    """Return the listeners that show and write a run's events until `stack` is closed.

    The run is shown on the terminal. `metrics` is a file and `tensorboard` a folder of event files;
    None means that it isn't written. Raises UsageError if one can't be written.
    """
    shown = console.standard_output(color=True)
    opened_listeners: list[Listener] = [stack.enter_context(opened(shown, num_steps=num_steps))]
    if metrics is not None:
        opened_listeners.append(stack.enter_context(closing(Metrics(metrics))))
    if tensorboard is not None:
        opened_listeners.append(stack.enter_context(closing(EventFiles(tensorboard))))
    return opened_listeners


@contextmanager
def opened(console: Console, *, num_steps: int) -> Iterator[Listener]:
    """Yield a listener that shows the run on `console`: live on a terminal, in lines elsewhere."""
    if not console.is_terminal:
        yield Lines(console)
        return
    screen = Screen(num_steps=num_steps)
    with Live(screen, console=console, refresh_per_second=REFRESHES_A_SECOND) as live:
        yield partial(_show, screen, live.console, Pace(time.monotonic))


def _show(screen: Screen, console: Console, pace: Pace, happening: Happening) -> None:
    """Update the screen; notes scroll by above it."""
    if not isinstance(happening, Noted):
        screen(happening)
    elif pace.allows(happening):
        console.print(escaping.line(happening.text), markup=False, highlight=False)


class Pace:
    """Limits how often frequent events are shown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shown: dict[str, float] = {}

    def allows(self, happening: Happening) -> bool:
        """Return whether to show `happening` now. Only steps and checkpoints are limited."""
        if isinstance(happening, Scored):
            return True
        what = happening.what if isinstance(happening, Noted) else "step"
        if what not in ("step", "saved"):
            return True
        now = self._clock()
        if what in self._shown and now - self._shown[what] < LINE_EVERY_S:
            return False
        self._shown[what] = now
        return True


class Lines:
    """Prints all notes and the last step; else at most one step and one save in LINE_EVERY_S."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._pace = Pace(clock)

    def __call__(self, happening: Happening) -> None:
        """Print the line of `happening`, unless a similar line was just printed."""
        if isinstance(happening, Noted):
            if self._pace.allows(happening):
                self._print(escaping.line(happening.text))
        elif isinstance(happening, Scored):
            self._print(f"validation after step {happening.step}: {scored(happening)}")
        elif self._pace.allows(happening) or happening.step == happening.num_steps - 1:
            self._print(f"step {happening.step + 1}/{happening.num_steps}  {summary(happening)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)  # also flushes, for readers that follow the log
