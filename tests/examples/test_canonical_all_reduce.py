"""The example prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(num_ranks: int) -> str:
    """Return what the example prints on so many ranks."""
    found = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/command/forked.py"),
            str(num_ranks),
            "examples/canonical_all_reduce.py",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_one_digest_for_two_world_sizes() -> None:
    """Dropout, clipping and AdamW included."""
    digest, _, rest = printed(1).partition(" ")
    assert len(digest) == 16
    assert rest == "on 1 ranks\n"
    assert printed(4) == f"{digest} on 4 ranks\n"
