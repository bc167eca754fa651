"""Start the observation of this process, once torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from entrenar_py.check.observing import FOLDER, auto
from entrenar_py.check.observing.auto import seeding
from entrenar_py.check.rank_files import auto_notes


class Waiting(Protocol):
    """The finder of `startup/sitecustomize.py`: calls a function when a module was imported."""

    awaited: dict[str, Callable[[], None]]


def begin(waiting: Waiting) -> None:
    """Seed the process; set torch's global hooks, and the patches where it has none."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            (Path(folder) / auto_notes.LOADED).touch()
    settings = auto.Settings.of(os.environ)
    if settings.seed is not None:
        seeding.begin(settings.seed)
    from entrenar_py.check.observing.auto import follower, patches

    if not settings.follows:
        patches.install_for_line(waiting.awaited)
        return
    follower.CURRENT = follower.Follower(settings)
    patches.install(follower.CURRENT, waiting.awaited)
