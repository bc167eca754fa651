"""F-WP-006: an audit by another worker detects a wrong, finite gradient, and names the culprit.

Source: wire-protocol-v1, F-WP-006.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from entrenar_py.check import evidence
from entrenar_py.check.clauses import plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import CALM, Traces
from entrenar_py.shared.faults import PLANTED, SILENT, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Audit, Halt, Injected, Membership, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

SHARE = "audit_share"
# (step, shard) -> the ranks that computed the shard wrongly.
Strikes: TypeAlias = Mapping[tuple[int, int], set[int]]


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan audits of all and of some shards; one worker is wrong once or always, one is killed."""
    usual = plans.mlp(
        system="parameter_server_simulated",
        num_steps=4,
        width=8,
        optimizer="momentum",
        options={SHARE: 1.0, "block_bytes": 1000},
    )
    some, few = ({**usual.options, SHARE: share} for share in (0.4, 0.2))
    owner = Fault(kind="corrupt_gradient", step=1, rank=1, shard=2, value="0.5")
    # A fault of another worker, in the last block.
    auditor = replace(owner, rank=2, tensor="output.bias", element=9, value="1e-6")
    lasting = Fault(kind="corrupt_worker", step=1, rank=1, value="0.5")
    killed = Fault(kind="kill", step=1, rank=0, at="Computed")
    return [
        usual,
        usual.with_(options=some, dropout=0.2),
        usual.with_(faults=(owner,)),
        usual.with_(faults=(auditor,), optimizer="adamw", learning_rate=0.01),
        usual.with_(faults=(lasting,), num_steps=5),
        usual.with_(faults=(lasting,), num_steps=5, options=some),
        # With two workers, no auditor is left after one is dropped. In step 1 only shard 1 is
        # audited.
        usual.with_(faults=(replace(owner, shard=1),), world_size=2, options=few),
        usual.with_(faults=(owner, killed), world_size=4),
    ]


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that enough shards are audited, only culprits are named, and the weights are right.

    The weights are right if they equal those of the run without faults.
    """
    tally = Tally(invariant.id)
    trace = runs.base
    if trace is not None and trace.scenario.options.get(SHARE):
        calm = evidence.calm_run(tally, trace, runs)
        if calm is not None:
            _enough(tally, trace)
            for audit, there, wrong in _with_who_was_there(trace):
                _right(tally, trace, audit, there, wrong)
            _told(tally, trace)
            _same_weights(tally, calm, trace)
    return tally.finding(nothing=missing.probed(invariant, "no shard of any run was audited"))


def undecided(trace: Trace) -> list[Audit]:
    """Return the audits in which workers disagreed, but which could not determine the culprit."""
    return [audit for audit in trace.of(Audit) if _is_undecided(audit)]


def _is_undecided(audit: Audit) -> bool:
    one_word = len(set(audit.ranks)) == 1 and set(audit.ranks).issubset(audit.disputed)
    return audit.culprit is None and (one_word or len(set(audit.alike)) > 1)


def first_open(trace: Trace) -> float:
    """Return the first step with a wrong shard that stayed undetected; inf if there is none.

    A wrong shard is detected if two workers' results for it were compared, or if its rank was
    caught in another shard of the step.
    """
    seen = {(audit.step, audit.shard) for audit in trace.of(Audit) if len(set(audit.ranks)) > 1}
    caught = {(audit.step, audit.culprit) for audit in trace.of(Audit)}
    return min(
        (
            step
            for (step, shard), ranks in _strikes(trace).items()
            if (step, shard) not in seen and any((step, rank) not in caught for rank in ranks)
        ),
        default=math.inf,
    )


def _strikes(trace: Trace) -> Strikes:
    strikes: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in trace.of(Injected):
        if event.fault.get("kind") not in SILENT:
            continue
        if event.step is not None and event.shard is not None and event.rank is not None:
            strikes[event.step, event.shard].add(event.rank)
    return strikes


def _with_who_was_there(trace: Trace) -> Iterator[tuple[Audit, set[int], set[int]]]:
    """Yield each audit, the ranks present, and the audited ranks that computed the shard wrongly.

    An Injected event precedes the audit of its shard. If the worker leaves before the audit, the
    event is dropped, since nothing that the worker computed was used.
    """
    there: set[int] = set()
    open_at: dict[tuple[int | None, int | None], set[int | None]] = defaultdict(set)
    for event in trace.events:
        if isinstance(event, Start):
            there.add(event.rank)
        elif isinstance(event, Injected) and event.fault.get("kind") in SILENT:
            open_at[event.step, event.shard].add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            there.discard(event.rank)
            for ranks in open_at.values():
                ranks.discard(event.rank)
        elif isinstance(event, Audit):
            struck = open_at.pop((event.step, event.shard), set())
            yield event, set(there), {rank for rank in event.ranks if rank in struck}


def _enough(tally: Tally, trace: Trace) -> None:
    """Check that every step audited at least as many shards as the scenario requests."""
    scenario = trace.scenario
    due = max(1, round(scenario.options[SHARE] * scenario.num_shards))
    audited: dict[int, set[int]] = defaultdict(set)
    for audit in trace.of(Audit):
        audited[audit.step].add(audit.shard)
    for step in sorted({update.step for update in trace.of(Update)}):
        tally.check(
            len(audited[step]) >= due,
            f"step {step}: {len(audited[step])} of {scenario.num_shards} shards were audited",
            step=step,
            expected=f"{due} or more",
            got=str(len(audited[step])),
            scenario=scenario,
        )


def _right(tally: Tally, trace: Trace, audit: Audit, there: set[int], wrong: set[int]) -> None:
    """Check that two workers computed the shard, and that the audit named only the wrong rank."""
    place = evidence.place(trace, audit)
    where = f"shard {audit.shard} of step {audit.step}"
    num_ranks = len(set(audit.ranks))
    if _is_undecided(audit):
        _given_up(tally, trace, audit, len(there), rank=min(wrong, default=None))
    elif num_ranks < 2:
        if len(there) < 2:
            tally.miss(
                f"{where} was computed by one worker, and no other worker was present to audit it"
            )
            return
        message = f"{where} was audited by no other worker, though others were present"
        tally.check(False, message, rank=audit.ranks[0], **place)
    elif audit.culprit is not None:
        named = (
            f"worker {audit.culprit} was named as culprit for {where}, which it computed correctly"
        )
        tally.check(audit.culprit in wrong, named, rank=audit.culprit, **place)
    else:
        message = (
            f"the audit passed {where}, which worker {min(wrong, default=None)} computed wrongly"
        )
        tally.check(not wrong, message, rank=min(wrong, default=None), **place)


def _given_up(
    tally: Tally, trace: Trace, audit: Audit, num_there: int, *, rank: int | None
) -> None:
    """Check that an undecided audit asked a third worker, or both again, and then halted."""
    place = evidence.place(trace, audit)
    what = f"workers disagreed about shard {audit.shard} of step {audit.step}"
    num_ranks = len(set(audit.ranks))
    if num_ranks < 3 and num_there > num_ranks:
        message = f"{what}, and no third worker was asked to decide"
        tally.check(False, message, rank=rank, **place)
        return
    if num_ranks == 2 and any(audit.ranks.count(rank) < 2 for rank in audit.ranks):
        tally.check(False, f"{what}, and not both were asked again", rank=rank, **place)
        return
    later_steps = [update.step for update in trace.of(Update) if update.step >= audit.step]
    halted = any(halt.step == audit.step for halt in trace.of(Halt))
    message = f"{what}, no culprit was named, and training went on"
    tally.check(halted and not later_steps, message, rank=audit.ranks[0], **place)


def _told(tally: Tally, trace: Trace) -> None:
    """Count as missing that no wrong shard was audited. Add a note if only some were."""
    strikes, audited = _strikes(trace), {(audit.step, audit.shard) for audit in trace.of(Audit)}
    if strikes and not audited.intersection(strikes):
        tally.miss("no wrong shard was audited: audit a larger share, or more steps")
    elif (step := first_open(trace)) < math.inf:
        tally.note(
            f"a wrong gradient in step {step} was not audited: the weights from that step on are "
            "not compared"
        )


def _reasons_to_halt(model: Trace, trace: Trace) -> set[int | None]:
    planted = {one.step for one in trace.of(Injected) if one.fault.get("kind") in PLANTED} - {None}
    return {audit.step for audit in undecided(trace)} | {h.step for h in model.of(Halt)} | planted


def _same_weights(tally: Tally, model: Trace, trace: Trace) -> None:
    """Check that the run halts only where it must, and has the weights of a run without faults."""
    scenario, limit = trace.scenario, first_open(trace)
    halts, reasons = [halt.step for halt in trace.of(Halt)], _reasons_to_halt(model, trace)
    for step in halts:
        needless = f"training halted in step {step}, though every culprit in it could be named"
        tally.check(step in reasons or step >= limit, needless, step=step, scenario=scenario)
    status = "halted" if halts else model.end.status
    how = f"the run ended {trace.end.status} ({trace.end.reason})"
    tally.equal(status, trace.end.status, how, scenario=scenario)
    message = "not the weights of the run without wrong values"
    closeness.compare_updates(tally, model, trace, "weights", message, before=limit)
    lost = evidence.updates(model).keys() - evidence.updates(trace).keys()
    due = (step for step in lost if step < min([*halts, math.inf]))
    closeness.compare_steps_made(tally, due, trace)


ROWS = (
    Check(
        name="audits",
        id="F-WP-006",
        decides="an audit detects a worker that computes wrong values, and names it",
        spoken_of="corruption audit silent recompute",
        judge=judge,
        plan=plan,
        needs=(CALM,),
    ),
)
