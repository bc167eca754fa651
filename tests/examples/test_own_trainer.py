"""A training loop of one's own, on any number of ranks: held as it is, falsified with its bug."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py.shared import trace
from tests.command_line import check, report, verdicts

CONTRACT = ("--contract", "distributed-training-v1.yaml")
REVEALED = "F-DP-001,F-DP-002,F-DP-003"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Import the example from its file."""
    path = Path(__file__).parents[2] / "examples" / "own_trainer.py"
    spec = importlib.util.spec_from_file_location("own_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_what_it_reveals_is_held(example: ModuleType, ranks: int, tmp_path: Path) -> None:
    """Every clause that its trace can decide holds, with shards of unequal size."""
    file, written = tmp_path / "trace.jsonl", tmp_path / "report.json"
    example.main([str(file), "--ranks", str(ranks)])
    recorded = trace.load(file)
    assert recorded.scenario.world_size == ranks
    assert len({shard.weight for shard in recorded.of(trace.Shard)}) == 2
    assert check(*CONTRACT, "--only", REVEALED, "--judge", file, "--json", written) == 0
    assert set(verdicts(written).values()) == {"held"}


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_forgotten_synchronisation_is_found(
    example: ModuleType, ranks: int, tmp_path: Path
) -> None:
    """The loss falls from epoch to epoch, and yet F-DP-001 names the rank that drifts."""
    file, written = tmp_path / "trace.jsonl", tmp_path / "report.json"
    example.main([str(file), "--ranks", str(ranks), "--forget-sync"])
    losses = [
        update.loss or 0.0 for update in trace.load(file).of(trace.Update) if update.rank == 0
    ]
    assert losses[2] < losses[0]
    assert losses[3] < losses[1]
    assert check(*CONTRACT, "--only", REVEALED, "--judge", file, "--json", written) == 1
    assert verdicts(written) == {"F-DP-001": "falsified", "F-DP-002": "held", "F-DP-003": "held"}
    found = report(written)["results"][0]["counterexample"]
    assert (found["step"], found["rank"]) == (0, ranks - 1)


def test_a_whole_contract_is_inconclusive(example: ModuleType, tmp_path: Path) -> None:
    """A clause about facts that the trace doesn't have is not held."""
    file, written = tmp_path / "trace.jsonl", tmp_path / "report.json"
    example.main([str(file)])
    assert check(*CONTRACT, "--judge", file, "--json", written) == 4
    held = [clause for clause, verdict in verdicts(written).items() if verdict == "held"]
    assert held == REVEALED.split(",")


def test_help_keeps_its_commands(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands to type stand on lines of their own."""
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "\n    python examples/own_trainer.py trace.jsonl\n" in capsys.readouterr().out
