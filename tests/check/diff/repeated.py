"""Which twins of `nondeterminism` have their source named: step, line and kind.

Real processes, some minutes: `python -m tests.check.diff.repeated [--jobs N] [WORD ...]` tries
those whose names have all words. The exit code is 1 if one is not judged as it should be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from falsification import twins
from falsification.twins import Twin
from tests.check.command import side_by_side
from tests.check.command.twins import words_and_jobs

FAMILY = "nondeterminism"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def command(twin: Twin) -> list[str]:
    """Return the command of a twin, whose script is in the current folder."""
    ranks = () if twin.world_size == 1 else (*LAUNCHER, str(twin.world_size))
    return [sys.executable, *ranks, twin.file]


def repeated(twin: Twin, folder: Path) -> dict[str, Any]:
    """Return what `entrenar-check diff --again` writes about a twin."""
    for name in ("project", "temporary"):
        (folder / name).mkdir()
    script = folder / "project" / twin.file
    script.write_text(twin.changed(), encoding="utf-8")
    told = ["diff", "--again", "--json", "out.json", "--", *command(twin)]
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-m", "entrenar_py.check.cli", *told],
        cwd=script.parent,
        env={**environment, "TMPDIR": str(folder / "temporary")},
        capture_output=True,
        text=True,
    )
    path = script.parent / "out.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {**record, "code": ended.returncode, "output": ended.stdout + ended.stderr}


def problem(twin: Twin, found: dict[str, Any]) -> str:
    """Return the difference from what is expected of a twin, "" if there is none."""
    if not twin.check:
        return "" if found.get("verdict") == "equal" else f"not equal: {found['output']}"
    source, bits = found.get("source"), found.get("first_bits")
    if source is None or bits is None:
        return f"no source: {found['output']}"
    line = twin.changed().splitlines()[source["line"] - 1]
    is_in_step = twin.step in (None, bits["step"])
    if source["kind"] != twin.check or not is_in_step or twin.words not in line:
        return f"{source['kind']} in step {bits['step']}, line {source['line']}: {line.strip()}"
    return ""


def tried(twin: Twin) -> tuple[bool, list[str]]:
    """Return whether a twin is judged as it should be, and the lines that say so."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = repeated(twin, Path(folder))
    wrong = problem(twin, found)
    head = f"{'MISSED' if wrong else 'ok':6} {time.monotonic() - began:5.1f} s  {twin.name}"
    return not wrong, [head, *([f"       {wrong}"] if wrong else [])]


def main() -> int:
    """Print whether each twin is judged as it should be, and the numbers."""
    words, jobs = words_and_jobs()
    chosen = [one for one in twins.family(FAMILY) if all(word in one.name for word in words)]
    missed = {True: 0, False: 0}
    for twin, (is_right, lines) in zip(
        chosen, side_by_side.results(tried, chosen, jobs), strict=True
    ):
        missed[bool(twin.check)] += not is_right
        print(*lines, sep="\n", flush=True)
    num_broken = sum(bool(twin.check) for twin in chosen)
    print(f"{num_broken} sources, {num_broken - missed[True]} named")
    print(f"{len(chosen) - num_broken} right scripts, {missed[False]} not equal to themselves")
    return int(any(missed.values()))


if __name__ == "__main__":
    sys.exit(main())
