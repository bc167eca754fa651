"""Run a script with torch's deterministic algorithms, and time its steps."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from entrenar_py.check.observing import FOLDER
from entrenar_py.check.observing.auto.follower import Ending
from entrenar_py.check.rank_files import border_file

SUFFIX = ".times.json"  # of a file with the times at which a process's steps ended


def begin_if_planned(steps: int | None) -> bool:
    """Use deterministic algorithms if the harness asked for it.

    Return whether the steps, up to this number, are timed in place of any other observation.
    """
    settings = border_file.Settings.planned() or border_file.Settings()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if settings.timed:
        _time(steps)
    return settings.timed


def _time(steps: int | None) -> None:
    ends, ending, pid = list[float](), Ending(), os.getpid()

    def stepped(*_: Any) -> None:
        if os.getpid() == pid:
            ends.append(perf_counter())
            if len(ends) == steps:
                ending.leave()

    path = Path(os.environ[FOLDER], f"{pid}{SUFFIX}")
    register_optimizer_step_post_hook(stepped)
    atexit.register(lambda: path.write_text(json.dumps(ends)))
