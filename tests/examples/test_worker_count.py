"""The scaling table prints one result, and reports if there is more than one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py import systems
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Trace


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Import the example from its file."""
    path = Path(__file__).parents[2] / "examples" / "worker_count.py"
    spec = importlib.util.spec_from_file_location("worker_count", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_one_result(example: ModuleType, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number of workers ends with the same loss and the same weights."""
    assert example.main([workload, "--steps", "2"]) == 0
    heading, *rows, verdict = capsys.readouterr().out.splitlines()
    assert heading.split() == ["workers", "final", "loss", "weights", "steps/s"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "8"]
    assert len({tuple(row.split()[1:3]) for row in rows}) == 1
    assert verdict == "the same bits in every row"


def test_more_than_one_result(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer whose result depends on the number of workers is reported."""
    right = systems.run
    monkeypatch.setattr(systems, "run", lambda s: right(s.with_(seed=min(s.world_size, 3))))
    assert example.main(["linear", "--steps", "2"]) == 1
    assert capsys.readouterr().out.endswith("3 results, not one\n")


def test_a_run_without_an_end(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that fails has no row in the table."""

    def broken(scenario: Scenario) -> Trace:
        end = End(status="failed", reason="out of memory")
        return Trace(scenario=scenario, environment={}, promises=(), events=(end,))

    monkeypatch.setattr(systems, "run", broken)
    with pytest.raises(SystemFailure, match="world_size=1: failed out of memory"):
        example.main(["linear", "--steps", "2"])


def test_steps_that_can_not_be(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid number of steps gives one message."""
    with pytest.raises(SystemExit, match="2"):
        example.main(["--steps", "0"])
    assert "num_steps=0: use a whole number >= 1" in capsys.readouterr().err
