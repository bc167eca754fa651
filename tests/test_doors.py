"""The doors of the checker: what only reads (`--help`, `--validate`, `--judge`) loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entrenar_py.shared import package_data, trace
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.trace import End

CONTRACTS = [
    word for path in package_data.shipped_contracts() for word in ("--contract", path.name)
]
# Each call in one process, in this order, with its exit code and what it may not load.
HEAVY = ("torch", "entrenar_py.train", "entrenar_py.compute", "entrenar_py.systems")
CALLS: tuple[tuple[list[str], int, tuple[str, ...]], ...] = (
    (["--help"], 0, (*HEAVY, "numpy", "hypothesis", "rich", "yaml", "blake3")),
    (["--list", *CONTRACTS], 0, (*HEAVY, "hypothesis")),
    (["--validate", *CONTRACTS], 0, (*HEAVY, "hypothesis")),
    (["--suggest", "--contract", "distributed-training-v1"], 0, (*HEAVY, "hypothesis")),
    (["--judge", "own.jsonl", "ours.jsonl", *CONTRACTS], 4, (*HEAVY, "hypothesis")),
    (["--world-size", "1", "--", "true"], 4, (*HEAVY, "hypothesis")),
)
SCRIPT = """
import contextlib, io, json, sys
from entrenar_py.check import cli

for line, heavy in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main(line)
        except SystemExit as left:
            code = left.code
    print(json.dumps([code, [name for name in heavy if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    """Return the exit code of each call, and the modules that it should not have loaded."""
    folder = tmp_path_factory.mktemp("doors")
    for name, system, workload in (("own", OBSERVED, "own"), ("ours", "ddp", "linear")):
        scenario = Scenario(system=system, workload=workload, world_size=1, seed=0)
        end = End(status="completed")
        run = trace.Trace(scenario=scenario, environment={}, promises=(), events=(end,))
        trace.save(run, Path(folder, f"{name}.jsonl"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([(line, heavy) for line, _, heavy in CALLS]),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[line[0] for line, _, _ in CALLS])
def test_what_only_reads_loads_no_trainer(ends: list[list[object]], number: int) -> None:
    """No call imports torch, the trainer or a device: contracts and traces are read anywhere."""
    assert ends[number] == [CALLS[number][1], []]
