"""Start the observation of this process once torch is imported, and seed the process.

A script without seeds begins with different weights in each run, so no two of its runs can be
compared. Therefore the generators of torch, numpy and Python are seeded before the script begins,
as its own first line could do. Later requests for a new seed (`torch.seed()`) get numbers that are
derived from this seed. Each rank has its own seed, as ranks without seeds draw different numbers:
a script that forgets to give all ranks the same weights is still detected. In a run with common
random numbers all ranks have the same seed. Generators that a script seeds itself keep their seed.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing import process
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from entrenar_py.check.observing import ANATOMY, FAULTS, FOLDER, auto
from entrenar_py.check.rank_files import notes
from entrenar_py.shared.faults import CONTROLLED

_TORCH_S: set[int] = set()  # the seeds that torch's generator got from this module


def seed_process(seed: int) -> None:
    """Seed this process's generators, and replace the functions that seed without a number."""
    fresh = _Seeds(f"{seed} {_own_place()}")
    torch.seed = torch.random.seed = _seeding_torch(fresh)
    torch.seed()
    for module, names in ((numpy.random, ("seed", "default_rng")), (random, ("seed",))):
        # A process without a rank may start the ranks, and draw a free port for them.
        if module is random and not _is_rank():
            continue
        for name in names:
            setattr(module, name, _with_seed(getattr(module, name), fresh))
        module.seed()


def is_unseeded() -> bool:
    """Return whether torch's generator still has a seed from this module."""
    return torch.initial_seed() in _TORCH_S


def _own_place() -> str:
    """Return a text that differs between ranks; "" if all ranks should draw the same numbers."""
    planned = json.loads(os.environ.get(FAULTS, "[]"))
    if any(fault["kind"] in CONTROLLED for fault in planned):
        return ""
    number = process.current_process().name.rpartition("-")[2]  # SpawnProcess-1 is rank 0
    # RANK may count within a replica group, so that several processes have the same number.
    told = os.environ.get("ENTRENAR_RANK") or os.environ.get("RANK")
    return told or str(int(number) - 1 if number.isdigit() else 0)


def _is_rank() -> bool:
    return "RANK" in os.environ or process.current_process().name != "MainProcess"


class _Seeds:
    """Seeds that are derived from the text `place`, one after the other."""

    def __init__(self, place: str) -> None:
        self._place, self._count = place, 0

    def next(self) -> int:
        """Return the next seed."""
        self._count += 1
        return zlib.crc32(f"{self._place} {self._count}".encode())


def _seeding_torch(fresh: _Seeds) -> Callable[[], int]:
    @wraps(torch.random.seed)
    def seed() -> int:
        number = fresh.next()
        _TORCH_S.add(number)
        torch.manual_seed(number)
        return number

    return seed


def _with_seed(original: Callable[..., Any], fresh: _Seeds) -> Callable[..., Any]:
    @wraps(original)
    def seeded(*given: Any, **named: Any) -> Any:
        if named or any(one is not None for one in given):
            return original(*given, **named)
        return original(fresh.next())

    if hasattr(original, "__self__"):  # the seeded generator is identified by it
        seeded.__self__ = original.__self__  # type: ignore[attr-defined]
    return seeded


class Waiting(Protocol):
    """The finder of `startup/sitecustomize.py`: calls a function after a module was imported."""

    awaited: dict[str, Callable[[], None]]


def begin(waiting: Waiting) -> None:
    """Seed the process, and set torch's global hooks, and patches where torch has no hook."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            (Path(folder) / notes.LOADED).touch()
    settings = auto.Settings.of(os.environ)
    if ANATOMY in os.environ:
        from entrenar_py.check.observing.auto import anatomy

        anatomy.begin(settings.steps, waiting.awaited)
        return
    if settings.seed is not None:
        seed_process(settings.seed)
    from entrenar_py.check.observing import (
        deterministic,
        planned_faults,
        script_lines,
        torch_calls,
    )
    from entrenar_py.check.observing.auto import follower

    if deterministic.begin_if_planned(settings.steps):
        return
    planned_faults.begin()
    if not settings.follows:
        torch_calls.install_for_line(waiting.awaited)
        return
    follower.CURRENT = follower.Follower(settings)
    torch_calls.install(follower.CURRENT, waiting.awaited)
    script_lines.begin_if_planned(int(_own_place() or 0))
