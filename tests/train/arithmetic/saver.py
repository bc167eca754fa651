"""Saves one checkpoint after the other and reports each, as a process to be killed meanwhile.

    python -m tests.train.arithmetic.saver PATH NUM_FLOATS [BYTES_MAX]

Prints `saving K` before each save, and `saved K` or `failed K ERRNO` after it. No file may grow
beyond BYTES_MAX, which has the effect of a full disk.
"""

from __future__ import annotations

import resource
import sys
from itertools import count
from pathlib import Path

import numpy as np

from entrenar_py.train.arithmetic import checkpoint


def main(path: Path, num_floats: int, bytes_max: int | None) -> None:
    """Save until killed. With a limit, save twice without it and once with it."""
    steps = count(1) if bytes_max is None else range(1, 4)
    for step in steps:
        if step == 3 and bytes_max is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
        print(f"saving {step}", flush=True)
        try:
            checkpoint.save(path, {"w": np.full(num_floats, step, np.float32)}, {"step": step})
        except OSError as error:
            print(f"failed {step} {error.errno}", flush=True)
        else:
            print(f"saved {step}", flush=True)


if __name__ == "__main__":
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
    main(Path(sys.argv[1]), int(sys.argv[2]), limit)
