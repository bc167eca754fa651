"""The ends of runs that halt or lose their coordinator: the last tables of docs/faults.md."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star.processes import ProcessTransport
from entrenar_py.systems.star.scenario_run import ScenarioRun
from tests.train.service.cluster import LONG, Cluster, cluster, weights

Training: TypeAlias = dict[str, Any]

STEP, RANK = 2, 1
PROMISED_S = 1.0  # within which every process must end after a halt
REAL = ("parameter_server", "mesh", "ring")
POISONS = [
    (kind, value) for kind in ("non_finite_gradient", "non_finite_loss") for value in ("nan", "inf")
]
LARGE: Training = {**LONG, "workload": "mlp", "width": 64}  # its checkpoint takes a while to write


def halts() -> str:
    """Return the table of runs with a value that is not finite, for each system with processes."""
    columns = (
        "system",
        "planted in worker 1, step 2",
        "the error",
        "processes that end with it",
        "steps taken",
    )
    rows = [_halt(system, *poison) for system in REAL for poison in POISONS]
    return _table(columns, rows)


def run_with(system: str, kind: str, value: str) -> ScenarioRun:
    """Return a run of three workers, in which one computes `value`."""
    scenario = Scenario(
        system=system,
        workload="linear",
        world_size=3,
        seed=0,
        num_steps=5,
        faults=(Fault(kind=kind, step=STEP, rank=RANK, value=value),),
    )
    return ScenarioRun(scenario, ProcessTransport)


def _halt(system: str, kind: str, value: str) -> tuple[str, ...]:
    star = run_with(system, kind, value)
    run = star.train()
    assert isinstance(star.transport, ProcessTransport)
    ending = "halted", run.end.reason
    told = [one for one in star.transport.ends if (one.status, one.reason) == ending]
    late_s = max((one.after_s for one in told), default=0.0)
    when = f"within {PROMISED_S:.0f} s" if late_s < PROMISED_S else f"AFTER {late_s:.1f} s"
    made = sorted({one.step for one in run.of(trace.Update)})
    return (
        system,
        f"{kind}: {value}",
        run.end.reason,
        f"{len(told)} of {star.scenario.world_size}, {when}",
        ", ".join(map(str, made)),
    )


def deaths() -> str:
    """Return the table of runs in which a coordinator is killed, or can't write a checkpoint."""
    rows = []
    for what, story in STORIES.items():
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as star:
            seen, training = story(star)
            right = f"completed: step {training['num_steps']}, weights {weights(training)}"
            same = any(right in one.text for one in star.processes)
            rows.append((what, seen, "the same" if same else "DIFFERENT"))
    return _table(("what happens to the coordinator", "seen", "weights"), rows)


def _killed(star: Cluster, training: Training, *, every_steps: int) -> tuple[str, Training]:
    star.configure(training, wait_for=2, checkpoint={"path": "state", "every_steps": every_steps})
    first = star.coordinator()
    workers = [star.worker(), star.worker()]
    first.until(r"checkpoint before step")
    first.kill()
    second = star.coordinator("--resume")
    codes = sorted({one.code() for one in (second, *workers)})
    exits = ", ".join(map(str, codes))
    return f"`--resume` continues; all processes exit with {exits}", training


def _full(star: Cluster) -> tuple[str, Training]:
    star.configure(LARGE, checkpoint={"path": "state", "every_steps": 1000})
    first = star.coordinator()
    star.worker()
    first.until(r"step 1/")
    first.signal(signal.SIGTERM)
    first.code()
    kept = (star.folder / "state").read_bytes()
    full = star.coordinator("--resume", limit_bytes=len(kept) // 2)
    star.worker()
    code, whole = full.code(), (star.folder / "state").read_bytes() == kept
    kept_as_it_was = "unchanged" if whole else "DAMAGED"
    return f"trains to the end, exit code {code}; the old checkpoint is {kept_as_it_was}", LARGE


STORIES: dict[str, Callable[[Cluster], tuple[str, Training]]] = {
    "SIGKILL between two checkpoints": lambda star: _killed(star, LONG, every_steps=3),
    "SIGKILL while it saves after every step": lambda star: _killed(star, LARGE, every_steps=1),
    "no room for a checkpoint": _full,
}


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
