"""The commands `entrenar distill logits`, `train` and `status`."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill import producing, status
from entrenar_py.train.distill.producing import Progress, Stage
from entrenar_py.train.finetune import distill_page, local, rows_read, settings_file
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.settings import Distillation, Settings
from entrenar_py.train.service import exit_codes, signals
from entrenar_py.train.service.figures import duration

TELL_EVERY_S = 10.0


def logits(given: argparse.Namespace) -> int:
    """Run the teacher; return the exit code. Raises as `producing.Stage` does."""
    settings, section = settings_of(given.config)
    prepared = preparing.prepare(settings, needs_weights=False)
    rows_read.say(prepared)
    stage = Stage(prepared, given.backend, given.part)
    facts = stage.facts
    printing.say(
        f"{sum(facts.rows)} rows of {facts.top_k} tokens in {facts.num_shards} shards, in "
        f"{section.shards}"
    )
    show = _Shown(section)
    with stopped_by_signals("stops when the batch in work is done") as stopping:
        is_done = stage.run(show, stopping)
    show.last()
    if show.progress is not None:
        printing.say(f"drawn in {distill_page.write(section, show.progress)}")
    if not is_done:
        printing.say("stopped; start it again to go on with the first missing shard")
        return exit_codes.STOPPED
    whose = "all shards are" if given.part is None else f"part {_of(given.part)} is"
    printing.say(f"{whose} there")
    return exit_codes.DONE


def train(given: argparse.Namespace) -> int:
    """Train the student on this machine; return the exit code. Raises as `local.train` does."""
    settings_of(given.config)
    return local.train(
        given.config,
        resume=given.resume,
        names=given.backends,
        halt_on_spike=given.halt_on_spike,
        tensorboard=given.tensorboard,
        follow=given.follow,
    )


def look(given: argparse.Namespace) -> int:
    """Say what is in a folder of shards; 1 if something is missing or damaged."""
    found = status.look(given.folder)
    for line in found.lines():
        printing.say(line)
    if given.json is not None:
        arguments.write_file(found.record(), given.json)
    return exit_codes.DONE if found.is_whole else exit_codes.WRONG


def settings_of(path: Path) -> tuple[Settings, Distillation]:
    """Return the configuration at `path` and its section; raises as `settings_file.load` does."""
    settings = settings_file.load(path)
    if settings.distill is None:
        raise UsageError(
            f"{path}: distill is missing: the section names the teacher, and the folder of its "
            "shards (logits)"
        )
    return settings, settings.distill


def _of(part: producing.Part) -> str:
    return f"{part[0]}/{part[1]}"


@contextmanager
def stopped_by_signals(told: str) -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set; a second one ends the process as usual.

    At the first one, `told` is printed.
    """
    stopping = threading.Event()
    before = {}

    def stop(number: int, _: object) -> None:
        if stopping.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stopping.set()
        printing.say(told)

    signals.settle()
    if signals.noted():  # while something was loaded, and the interrupt got lost
        stopping.set()
    for number in signals.taken():
        before[number] = signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown:
    """Prints how far the stage is, now and then."""

    def __init__(self, section: Distillation) -> None:
        self.progress: Progress | None = None
        self._section, self._next_s = section, 0.0

    def __call__(self, progress: Progress) -> None:
        """Print a line, and draw the page, if it is time."""
        self.progress = progress
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_EVERY_S
            self.last()
            distill_page.write(self._section, progress)

    def last(self) -> None:
        """Print a line."""
        one = self.progress
        if one is None:
            return
        facts = one.facts
        parts = [
            f"{one.shards_done} of {facts.num_shards} shards",
            f"{one.rows_done:,} of {sum(facts.rows):,} rows",
        ]
        if one.made:
            parts.append(f"{one.tokens_per_s:,.0f} tokens/s here")
        if one.made and one.left_s:
            parts.append(f"{duration(one.left_s)} left at this pace")
        printing.say(", ".join(parts))
