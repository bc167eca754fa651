"""Runs of real worker processes with each fault: the rows of docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs import ending_tables
from entrenar_py import systems
from entrenar_py.shared import faults, trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS

# Three processes, momentum, five steps; a silence of a second is death.
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
# Two blocks of an element, which pass all three workers; its weights are near those of the others.
RING = MESH.with_(system="ring", detail="values")
NEAR = 1e-5  # five steps, some roundings each
SECONDS = (0.3, 3.0)  # shorter and longer than that silence
STEP, RANK, SHARD = 2, 1, 3
COLUMNS = ("what happens in step 2, to worker 1", "at message", "seen", "the run", "weights")


def cases(scenario: Scenario) -> Iterator[Fault]:
    """Yield every kind of fault at every place that the system of `scenario` has."""
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
    if fault.kind in faults.SILENT:  # nothing but an audit sees them
        scenario = scenario.with_(options={**scenario.options, "audit_share": 1.0})
    run = systems.run(scenario.with_(faults=(fault,)))
    seen = [
        f"{one.change} in step {one.step}" + (f" ({one.reason})" if one.reason else "")
        for one in run.of(trace.Membership)
    ]
    for one in run.of(trace.Admission):
        seen.append(f"{'LET IN' if one.let_in else 'not let in'} (it was told: {one.answer})")
    cells = (
        *(what(fault), place(fault), "; ".join(seen) or "nothing", run.end.status),
        compared(run, undisturbed),
    )
    return f"| {' | '.join(cells)} |"


def what(fault: Fault) -> str:
    """Name the fault in a word or two."""
    if fault.seconds is not None:
        return f"{fault.kind} for {fault.seconds} s"
    return fault.kind if fault.value is None else f"{fault.kind}: {fault.value}"


def place(fault: Fault) -> str:
    """Return the message at which a fault strikes.

    Strangers come when the first shards are handed out; a worker goes wrong before it sends.
    """
    return fault.at or ("Computed" if fault.kind in faults.SILENT else "Assign")


def compared(run: trace.Trace, undisturbed: trace.Trace) -> str:
    """Compare the last weights of a run with those of the undisturbed one."""
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

This page shows how a run ends when a worker is killed, frozen or disconnected, lies, or sends
damaged bytes, at each message of a step. `entrenar-check --contract wire-protocol-v1.yaml` plays
such faults in virtual time; these tables are of real processes.

Three worker processes train over TCP on one machine. One is killed (SIGKILL), frozen (SIGSTOP, then
SIGCONT), disconnected or damaged, or lies; or a stranger connects. A killed worker restarts, and
gets the whole state. The last column compares the digest of the final weights with that of the
undisturbed run in one process. `docs/fault_table.py` has the scenarios, and `make docs` writes this
page.

The column "seen" is from one run. Whether the coordinator or the worker notices first is a race. In
the last two rows of the first table a gradient is finite but wrong: there all shards are audited.

## A parameter server
"""

MESH_INTRODUCTION = """\
## A mesh

`TreeNode` and `Average` pass between two workers here. Where that breaks, both still have the
coordinator: no worker leaves, and the step's exchange begins again in another round, which a trace
does not record.
"""

RING_INTRODUCTION = """\
## A ring

`Partial`, a sum on its way around, is in the place of `TreeNode` here. When a worker is lost, the
step is reduced around another ring, or in another order. The weights are then not the same bits,
but within 1e-5 of those of the undisturbed run (they are about 1), which the tables call near.
"""

HALTS_INTRODUCTION = """\
## What is not finite

No worker makes the step. Every worker's own process ends with the one error that names the culprit,
soon after the coordinator knows.
"""

DEATHS_INTRODUCTION = """\
## A coordinator that dies

`entrenar coordinator` with two workers and 400 steps, each a process of its own, as a service
([how](entrenar.md)).
"""


if __name__ == "__main__":
    (Path(__file__).parent / "faults.md").write_text(page(), encoding="utf-8")
