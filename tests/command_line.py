"""A small contract, a way to break the trainer from outside, and ways to call `entrenar-check`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py.check import cli
from entrenar_py.train.arithmetic import sharding

SCENARIO = (
    "{workload: linear, world_size: 2, num_shards: 3, num_samples: 9, batch_size: 4, num_steps: 4}"
)
CONTRACT = """\
metadata: {version: "1.0", references: [a book]}
clauses:
  - {id: F-DP-001, name: identical, severity: P0, invariant: same weights, scenarios: [SCENARIO]}
  - {id: F-DP-002, name: covered, severity: P1, invariant: each sample once, scenarios: [SCENARIO]}
falsification_tests:
  - {id: T-1, rule: F-DP-001, prediction: same digests, if_fails: not synchronised}
qa_gate: {id: G-1, name: gate, checks: [F-DP-001, F-DP-002]}
"""


def contract_file(folder: Path, *, extra: str = "", scenario: str = SCENARIO) -> str:
    """Write a contract with two short clauses, and `extra`; return its path."""
    text = CONTRACT.replace("falsification_tests:", f"{extra}falsification_tests:", 1)
    path = folder / "small-v1.yaml"
    path.write_text(text.replace("SCENARIO", scenario), encoding="utf-8")
    return str(path)


def check(*arguments: object) -> int:
    """Return the exit code of `entrenar-check ARGUMENTS`, called in this process."""
    return cli.main([str(argument) for argument in arguments])


def report(path: Path) -> dict[str, Any]:
    """Return a parsed JSON report."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def verdicts(path: Path) -> dict[str, str]:
    """Return clause id -> verdict, from a JSON report."""
    return {result["id"]: result["verdict"] for result in report(path)["results"]}


def repeat_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every epoch from now on visit its first sample twice and its last never."""
    right = sharding.order

    def wrong(num_samples: int, rng: np.random.Generator) -> sharding.Ids:
        ids = list(right(num_samples, rng))
        return [*ids[:-1], ids[0]]

    monkeypatch.setattr(sharding, "order", wrong)


def launch(arguments: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Start `entrenar-check ARGUMENTS` in a process of its own, with its output in pipes."""
    command = [sys.executable, "-m", "entrenar_py.check.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
