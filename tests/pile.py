"""Work that the processes of one test run share: each does jobs that no other has begun.

A job is done under a lock of its own, which the system releases if the process dies. So results are
waited for without a deadline, and a process that finds one missing computes it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of this run share."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def share(folder: Path, jobs: Mapping[str, Callable[[], T]]) -> list[T]:
    """Return the result of each job, in order; do the jobs that no other process does.

    Results are pickled to `folder`. A job whose process failed is done again here.
    """
    for wait in (False, True):
        for name, job in jobs.items():
            _do(folder / f"{name}.pickle", job, wait=wait)
    return [pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in jobs]


def _do(path: Path, job: Callable[[], T], *, wait: bool) -> None:
    """Write the result of `job` to `path`, unless it exists or, without `wait`, is in work."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(pickle.dumps(job()))
            part.rename(path)
