"""The time that a user waits for `--help`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable


def test_help(beside: Callable[..., list[float]], say: Callable[[str], None]) -> None:
    """`entrenar-check --help` against a Python that does nothing, each a process of its own."""

    def python(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    seconds = beside(
        "entrenar-check --help / python -c pass",
        ours=lambda: python("-m", "entrenar_py.check.cli", "--help"),
        peer=lambda: python("-c", "pass"),
        rounds=15,
    )
    say(f"entrenar-check --help: {min(seconds):.2f} s (goal 0.30 s)")
