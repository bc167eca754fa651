"""Shows the run to a person: a screen that is kept current, or plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.live import Live

from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.service.figures import scored, summary
from entrenar_py.train.service.run_events import Happening, Listener, Noted, Scored
from entrenar_py.train.service.screen import Screen

LINE_EVERY_S = 5.0
REFRESHES_A_SECOND = 4


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
    """Keep the screen current; notes scroll by above it."""
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
    """Prints notes and the last step; one other step and one save every LINE_EVERY_S."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._pace = Pace(clock)

    def __call__(self, happening: Happening) -> None:
        """Print the line of `happening`, unless one like it was just printed."""
        if isinstance(happening, Noted):
            if self._pace.allows(happening):
                self._print(escaping.line(happening.text))
        elif isinstance(happening, Scored):
            self._print(f"validation after step {happening.step}: {scored(happening)}")
        elif self._pace.allows(happening) or happening.step == happening.num_steps - 1:
            self._print(f"step {happening.step + 1}/{happening.num_steps}  {summary(happening)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)  # also flushes, for readers who follow the log
