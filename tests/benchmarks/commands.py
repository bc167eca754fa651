"""The command `entrenar` as benchmarks run it, and the steps in a run's metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ENTRENAR = (sys.executable, "-m", "entrenar_py.entrenar")


def run(*words: str) -> None:
    """Run `entrenar WORDS`; end with what it said if it fails."""
    done = subprocess.run([*ENTRENAR, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])


def steps(output: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    return [one for one in records if one["what"] == "step"]
