"""Saves one checkpoint after the other and reports each, as a process to be killed meanwhile.

    python -m tests.train.arithmetic.saver PATH NUM_FLOATS [BYTES_MAX]

For each line on standard input a process is forked from this one, which has torch loaded. It prints
`pid N`, then `saving K` before each save, and `saved K` or `failed K ERRNO` after it. `ended`
follows when it has ended. No file may grow beyond BYTES_MAX, which has the effect of a full disk.
"""

from __future__ import annotations

import os
import resource
import sys
from itertools import count
from pathlib import Path

import numpy as np

from entrenar_py.train.arithmetic import checkpoint


def main(path: Path, num_floats: int, bytes_max: int | None) -> None:
    """Fork a process for each line, and wait for its end."""
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            save(path, num_floats, bytes_max)
            os._exit(0)
        os.waitpid(pid, 0)
        tell("ended")


def save(path: Path, num_floats: int, bytes_max: int | None) -> None:
    """Save until killed. With a limit, save twice without it and once with it."""
    tell(f"pid {os.getpid()}")
    steps = count(1) if bytes_max is None else range(1, 4)
    for step in steps:
        if step == 3 and bytes_max is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
        tell(f"saving {step}")
        try:
            checkpoint.save(path, {"w": np.full(num_floats, step, np.float32)}, {"step": step})
        except OSError as error:
            tell(f"failed {step} {error.errno}")
        else:
            tell(f"saved {step}")


def tell(line: str) -> None:
    """Write a line at once and whole: after a kill, another process writes to the same pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
    main(Path(sys.argv[1]), int(sys.argv[2]), limit)
