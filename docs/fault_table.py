"""docs/faults.md: runs of real worker processes, one for each fault at each message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs import ending_tables
from entrenar_py import systems
from entrenar_py.shared import faults, trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS

# Three processes, momentum, five steps; a peer that is silent for a second counts as dead.
STAR = Scenario(
    system="parameter_server",
    workload="linear",
    world_size=3,
    seed=0,
    num_steps=5,
    optimizer="momentum",
    options={"heartbeat_s": 0.1, "dead_after_s": 1.0},
)
# Two blocks: workers 0 and 1 average one each.
MESH = STAR.with_(system="mesh", options={**STAR.options, "block_bytes": 4})
# Two blocks of one element, which pass all three workers. The weights are near the reference's.
RING = MESH.with_(system="ring", detail="values")
NEAR = 1e-5  # five steps, a few roundings in each
SECONDS = (0.3, 3.0)  # shorter and longer than `dead_after_s`
STEP, RANK, SHARD = 2, 1, 3
COLUMNS = ("fault in step 2, at worker 1", "at message", "seen", "the run", "weights")


def cases(scenario: Scenario) -> Iterator[Fault]:
    """Yield each type of fault at each message at which the system of `scenario` can inject it."""
    places = SYSTEMS[scenario.system].places
    for kind in faults.ON_THE_WAY:
        for seconds in SECONDS if "seconds" in faults.NEEDED[kind] else (None,):
            for at in places:
                yield Fault(kind=kind, step=STEP, rank=RANK, at=at, seconds=seconds)
    for value, said in faults.LIE_PLACES.items():
        for at in said:
            if at not in places:
                continue
            yield Fault(kind="lie", step=STEP, rank=RANK, at=at, value=value)
    for value in faults.STRANGERS:
        rank = RANK if value == "taken_rank" else None
        yield Fault(kind="stranger", step=STEP, rank=rank, value=value)
    if "restart" in SYSTEMS[scenario.system].faults:
        for at in places:
            yield Fault(kind="restart", step=STEP, at=at)
    if "audit_share" in SYSTEMS[scenario.system].options:
        yield Fault(kind="corrupt_gradient", step=STEP, rank=RANK, shard=SHARD, value="0.5")
        yield Fault(kind="corrupt_worker", step=STEP, rank=RANK, value="0.5")


def row(scenario: Scenario, fault: Fault, undisturbed: trace.Trace) -> str:
    """Return one line of a table: the run with `fault`, compared with the one without it."""
    if fault.kind in faults.SILENT:  # only an audit detects them
        scenario = scenario.with_(options={**scenario.options, "audit_share": 1.0})
    run = systems.run(scenario.with_(faults=(fault,)))
    seen = [
        f"{one.change} in step {one.step}" + (f" ({one.reason})" if one.reason else "")
        for one in run.of(trace.Membership)
    ]
    for one in run.of(trace.Admission):
        seen.append(f"{'LET IN' if one.let_in else 'not let in'} (answer: {one.answer})")
    cells = (
        *(what(fault), place(fault), "; ".join(seen) or "nothing", run.end.status),
        compared(run, undisturbed),
    )
    return f"| {' | '.join(cells)} |"


def what(fault: Fault) -> str:
    """Return the first cell of a row: the fault's kind, with its seconds or its value."""
    if fault.seconds is not None:
        return f"{fault.kind} for {fault.seconds} s"
    return fault.kind if fault.value is None else f"{fault.kind}: {fault.value}"


def place(fault: Fault) -> str:
    """Return the message at which a fault strikes.

    A stranger connects when the first shards are assigned ("Assign"). A silent corruption strikes
    before the worker sends its results ("Computed").
    """
    return fault.at or ("Computed" if fault.kind in faults.SILENT else "Assign")


def compared(run: trace.Trace, undisturbed: trace.Trace) -> str:
    """Return "the same", "near" (for a ring) or "DIFFERENT": the final weights compared."""
    updates = run.of(trace.Update)
    if not updates:
        return "DIFFERENT"
    ours, theirs = updates[-1].weights, undisturbed.of(trace.Update)[-1].weights
    if run.scenario.system != RING.system:
        digests = [{name: one.digest for name, one in held.items()} for held in (ours, theirs)]
        return "the same" if digests[0] == digests[1] else "DIFFERENT"
    near = (_near(ours[name], theirs[name]) for name in theirs)
    return "near" if ours.keys() == theirs.keys() and all(near) else "DIFFERENT"


def _near(one: trace.TensorRecord, other: trace.TensorRecord) -> bool:
    ours, theirs = one.values(), other.values()
    assert ours is not None, "a ring's run records values"
    assert theirs is not None, "and so does the undisturbed one"
    return bool(abs(ours - theirs).max() <= NEAR)


def table(scenario: Scenario) -> str:
    """Return a table with a row for every case."""
    undisturbed = systems.run(scenario.with_(system="reference", options={}))
    rows = [row(scenario, fault, undisturbed) for fault in cases(scenario)]
    heading = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|"]
    return "\n".join([*heading, *rows, ""])


def page() -> str:
    """Return the text of docs/faults.md."""
    systems_told = ((INTRODUCTION, STAR), (MESH_INTRODUCTION, MESH), (RING_INTRODUCTION, RING))
    parts = [text for opening, system in systems_told for text in (opening, table(system))]
    parts += [HALTS_INTRODUCTION, ending_tables.halts()]
    parts += [DEATHS_INTRODUCTION, ending_tables.deaths()]
    return "\n".join(parts)


INTRODUCTION = """\
# Faults on real processes

This page shows how a run ends when a fault strikes a worker, a message or the coordinator, at each
message of a step. `entrenar-check --contract wire-protocol-v1.yaml` simulates such faults in
virtual time; these tables show runs of real processes. `docs/fault_table.py` has the scenarios, and
`make docs` writes this page.

Three worker processes train over TCP on one machine. One worker is killed (SIGKILL), frozen
(SIGSTOP, then SIGCONT) or disconnected, or sends a damaged or false message; or a *stranger*, a
peer that must not take part, connects. [Planned faults](contract-format.md#scenarios) explains the
names of faults (`half_open`), lies (`old_step`) and strangers (`slow_loris`). A peer that is silent
for 1 s counts as dead. A killed worker restarts, and gets the complete state.

The column "seen" lists the workers that left and joined in one run. Whether the coordinator or the
worker notices a fault first is a race. The last column compares the digest of the final weights
with that of the undisturbed run in one process. In the last two rows of the first table a gradient
is finite but wrong; in these runs all shards are audited.

## A parameter server
"""

MESH_INTRODUCTION = """\
## A mesh

In a mesh `TreeNode` and `Average` pass between two workers. If the connection between them breaks,
both are still connected to the coordinator: no worker leaves, and the exchange of the step starts
again in a new round, which a trace does not record.
"""

RING_INTRODUCTION = """\
## A ring

In a ring `Partial`, a sum that is passed around, takes the place of `TreeNode`. A ring adds
gradients in an order that depends on its workers, so the weights don't have the bits of the
undisturbed run, which uses the tree. In this table they are compared by value: "near" means that
every weight (about 1) is within 1e-5 of the undisturbed run's. No other result passes.
"""

HALTS_INTRODUCTION = """\
## What is not finite

If a gradient or a loss is not finite, no worker takes the step. Every worker process ends with the
same error, which names the worker with the bad value, within 1 s after the coordinator received it.
"""

DEATHS_INTRODUCTION = """\
## A coordinator that dies

`entrenar coordinator` and its workers train for 400 steps as a service ([how](entrenar.md)), each
in a separate process. In the first two rows two workers train, the coordinator is killed, and a
second one continues with `--resume`. In the last row one worker trains, and no process dies: the
coordinator is stopped by SIGTERM, and resumed with a limit on the size of files that is too small
for a checkpoint.
"""


if __name__ == "__main__":
    (Path(__file__).parent / "faults.md").write_text(page(), encoding="utf-8")
