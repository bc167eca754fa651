"""Run the example scripts, with ranks forked from one process, and judge the runs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.command import judging, run_plan, runs
from entrenar_py.check.command.run_settings import Run
from entrenar_py.check.harness.plan import Task
from entrenar_py.shared.verdict import Finding
from tests.conftest import shipped_invariants

EXAMPLES = Path(__file__).parents[3] / "examples/user_trainers"
LAUNCHER = Path(__file__).with_name("forked.py")
LAUNCHED = (sys.executable, str(LAUNCHER), "{world_size}")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
    "--nproc_per_node={world_size}",
)
DEADLINE_S = 60.0
KNOBS = {
    "accumulation": ("--accumulation", "{accumulation}"),
    "clip": ("--clip", "{clip}"),
    "loss_scale": ("--loss-scale", "{loss_scale}"),
    "permute": ("--permute", "{permute}"),
    "strategy": ("--ddp", "{strategy}"),
}


def command(
    script: Path, turned: Collection[str] = (), launcher: Sequence[str] = LAUNCHED
) -> tuple[str, ...]:
    """Return the command of a script: steps and folder for `resume.py`, or knobs."""
    told: tuple[str, ...] = tuple(word for knob in turned for word in KNOBS[knob])
    if script.name == "resume.py":
        told += ("--steps", "{steps}", "--dir", "{workdir}")
    return (*launcher, str(script), *told)


def record(
    told: Sequence[str],
    wanted: Collection[str],
    folder: Path,
    *,
    witnesses: bool = False,
    **changes: object,
) -> dict[Path, Run]:
    """Return, by file, the runs of a command that the checks in `wanted` need.

    With `witnesses` also those that show what comparisons presuppose, as for a user's command.
    """
    needs = {need for name in wanted for need in CHECKS[name].needs}
    needs |= {need for name in wanted for need in CHECKS[name].witnesses if witnesses}
    plan = run_plan.Plan(
        command=tuple(told),
        needs=needs,
        folder=folder,
        **{"deadline_s": DEADLINE_S, **changes},  # type: ignore[arg-type]
    )
    return dict(runs.record(plan, lambda *_: None))


@cache
def _tasks() -> list[Task]:
    return judging.tasks([*shipped_invariants().values()])


def findings(recorded: dict[Path, Run], wanted: Collection[str] = ()) -> dict[str, Finding]:
    """Return the findings on the runs, by check."""
    found = {}
    for task in _tasks():
        assert task.check is not None
        if not wanted or task.check.name in wanted:
            for entry in judging.judge([task], recorded):
                found[task.check.name] = entry.finding
    return found
