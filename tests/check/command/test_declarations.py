"""Clauses that are said not to apply, and runs that show that they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.command import judging
from entrenar_py.check.command.judging import tasks
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.conftest import shipped_invariants

SAVES, RESTARTS, COPIES = "F-TI-003", "F-DP-006", "F-DP-001"
DECLARED = tasks([shipped_invariants()[name] for name in (SAVES, RESTARTS, COPIES)])
REASONS = dict.fromkeys((SAVES, RESTARTS, COPIES), "said so (x.toml:1:1)")


def test_a_clause_that_the_runs_decide_is_reported() -> None:
    """The entry says where it was declared; clauses without evidence stay left out."""
    ran = traces.run(traces.scenario())
    subject = ran.scenario.with_(workload="own", system="command")
    trace = replace(ran, scenario=subject, promises=())
    runs = {Path("3-workers.jsonl"): Run(settings=RunSettings(world_size=3, seed=0), trace=trace)}
    (entry,) = judging.refuted(DECLARED, runs, REASONS)
    assert (entry.invariant.id, entry.verdict) == (COPIES, Verdict.HELD)
    assert entry.finding.notes[-1].endswith(
        "the runs decide it; remove the declaration: said so (x.toml:1:1)"
    )


@pytest.mark.parametrize(
    ("command", "files", "doubts"),
    [
        (("torchrun", "train.py"), (), {}),
        (("torchrun", "--max-restarts=0", "train.py"), (), {}),
        (
            ("torchrun", "--max-restarts", "3", "train.py"),
            (),
            {RESTARTS: "the command has --max-restarts=3"},
        ),
        (
            ("train", "{workdir}"),
            ("ckpt.pt", "log"),
            {SAVES: "the script wrote ckpt.pt, log to {workdir}"},
        ),
    ],
)
def test_what_speaks_against_a_declaration(
    command: tuple[str, ...], files: tuple[str, ...], doubts: dict[str, str], tmp_path: Path
) -> None:
    """A launcher that restarts workers, and files that a script saved, cast doubt."""
    work = tmp_path / "2-workers" / "work"
    work.mkdir(parents=True)
    for name in files:
        (work / name).touch()
    assert judging.doubts(DECLARED, command, [tmp_path]) == doubts
