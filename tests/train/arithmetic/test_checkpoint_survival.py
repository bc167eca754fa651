"""A checkpoint survives when its writer is really killed, or its disk is really full."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from entrenar_py.train.arithmetic import checkpoint

NUM_FLOATS = 2**20
NUM_KILLS = 12


def saver(*arguments: object) -> subprocess.Popen[str]:
    """Start the process of `tests.train.arithmetic.saver`."""
    command = [sys.executable, "-m", "tests.train.arithmetic.saver", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def require_whole(path: Path, least: int) -> int:
    """Return the step of the checkpoint at `path`; it must be whole and at least step `least`."""
    arrays, progress = checkpoint.load(path)
    step = int(progress["step"])
    assert step >= least
    assert np.array_equal(arrays["w"], np.full(NUM_FLOATS, step, np.float32))
    return step


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_checkpoint(tmp_path: Path) -> None:
    """After a kill at a random time in a save, the old or the new checkpoint is there, whole.

    The moments are drawn over the time that two saves take, so some fall in every part of one.
    """
    path, moments = tmp_path / "c", random.Random(0)
    for _ in range(NUM_KILLS):
        with saver(path, NUM_FLOATS) as process:
            assert process.stdout is not None
            lines = iter(process.stdout)
            assert next(lines) == "saving 1\n"
            began = time.monotonic()
            assert next(lines) == "saved 1\n"
            took_s = time.monotonic() - began
            time.sleep(moments.uniform(0, 2 * took_s))  # a moment, not a wait for anything
            process.kill()
            saved = [1] + [int(line.split()[1]) for line in lines if line.startswith("saved")]
        require_whole(path, max(saved))


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    """A save that does not fit fails with its reason, and only the checkpoint before remains."""
    path = tmp_path / "c"
    with saver(path, NUM_FLOATS, 2 * NUM_FLOATS) as process:
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
    assert said[-2:] == ["saving 3", f"failed 3 {errno.EFBIG}"]
    assert require_whole(path, 2) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
