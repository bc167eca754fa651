"""F-WP-006: what a worker computes wrongly, finite and unseen, is found by another, and named.

Source: wire-protocol-v1, F-WP-006.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from entrenar_py.checks import evidence, missing, plans
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import CALM, Traces
from entrenar_py.contract import Invariant
from entrenar_py.faults import PLANTED, SILENT, Fault
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Audit, Halt, Injected, Membership, Start, Trace, Update
from entrenar_py.verdict import Finding, Tally

SHARE = "audit_share"
# Step and shard -> the ranks for which it went wrong.
Strikes: TypeAlias = Mapping[tuple[int, int], set[int]]


def plan(invariant: Invariant) -> list[Scenario]:
    """All shards audited, and some; owner or auditor wrong, once or for good; others lost, too."""
    usual = plans.mlp(
        system="parameter_server_simulated",
        num_steps=4,
        width=8,
        optimizer="momentum",
        options={SHARE: 1.0, "block_bytes": 1000},
    )
    some, one = ({**usual.options, SHARE: share} for share in (0.4, 0.2))
    owner = Fault(kind="corrupt_gradient", step=1, rank=1, shard=2, value="0.5")
    # Of another worker, and in the last block.
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
        # When one of two is gone nobody is left to audit the other: of step 1 shard 1 is audited.
        usual.with_(faults=(replace(owner, shard=1),), world_size=2, options=one),
        usual.with_(faults=(owner, killed), world_size=4),
    ]


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """As many shards are audited as asked for, the culprit alone is named, and nothing changes."""
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
    """The audits in which workers disagreed, and nobody could say who was wrong."""
    return [one for one in trace.of(Audit) if _is_undecided(one)]


def _is_undecided(audit: Audit) -> bool:
    """Return whether no rank was named though copies differ, or did while the others were there."""
    one_word = len(set(audit.ranks)) == 1 and set(audit.ranks).issubset(audit.disputed)
    return audit.culprit is None and (one_word or len(set(audit.alike)) > 1)


def first_open(trace: Trace) -> float:
    """The first step in which something wrong was not audited, so that anything may follow."""
    seen = {(one.step, one.shard) for one in trace.of(Audit) if len(set(one.ranks)) > 1}
    caught = {(one.step, one.culprit) for one in trace.of(Audit)}
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
    """Each audit, who was there then, and who of those whose copies it had did go wrong.

    What went wrong is recorded before the audit that it is in; or the worker left before that, and
    nothing that it computed was used.
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
    """In every step that was made as many shards were audited as the scenario asks for."""
    scenario = trace.scenario
    due = max(1, round(scenario.options[SHARE] * scenario.num_shards))
    audited: dict[int, set[int]] = defaultdict(set)
    for audit in trace.of(Audit):
        audited[audit.step].add(audit.shard)
    for step in sorted({update.step for update in trace.of(Update)}):
        tally.check(
            len(audited[step]) >= due,
            f"of {scenario.num_shards} shards of step {step} {len(audited[step])} were audited",
            step=step,
            expected=f"{due} or more",
            got=str(len(audited[step])),
            scenario=scenario,
        )


def _right(tally: Tally, trace: Trace, audit: Audit, there: set[int], wrong: set[int]) -> None:
    """An audit is by two, names who was wrong, and nobody else."""
    place = evidence.place(trace, audit)
    where = f"shard {audit.shard} of step {audit.step}"
    asked = len(set(audit.ranks))
    if _is_undecided(audit):
        _given_up(tally, trace, audit, len(there), rank=min(wrong, default=None))
    elif asked < 2:
        if len(there) < 2:
            tally.miss(f"{where} was computed by one worker, and no other was there to audit it")
            return
        message = f"{where} was audited by nobody but its worker, though others were there"
        tally.check(False, message, rank=audit.ranks[0], **place)
    elif audit.culprit is not None:
        named = f"worker {audit.culprit} was caught at {where}, where it computed nothing wrong"
        tally.check(audit.culprit in wrong, named, rank=audit.culprit, **place)
    else:
        message = f"what worker {min(wrong, default=None)} computed wrongly passed as {where}"
        tally.check(not wrong, message, rank=min(wrong, default=None), **place)


def _given_up(
    tally: Tally, trace: Trace, audit: Audit, num_there: int, *, rank: int | None
) -> None:
    """Nobody is named only after everyone was asked who could say it, and training halts then."""
    place = evidence.place(trace, audit)
    what = f"workers disagreed on shard {audit.shard} of step {audit.step}"
    asked = len(set(audit.ranks))
    if asked < 3 and num_there > asked:
        message = f"{what}, and none of those who could say was asked"
        tally.check(False, message, rank=rank, **place)
        return
    if asked == 2 and any(audit.ranks.count(rank) < 2 for rank in audit.ranks):
        tally.check(False, f"{what}, and were not asked once more each", rank=rank, **place)
        return
    made = [update.step for update in trace.of(Update) if update.step >= audit.step]
    halted = any(halt.step == audit.step for halt in trace.of(Halt))
    message = f"{what}, nobody was named, and training went on"
    tally.check(halted and not made, message, rank=audit.ranks[0], **place)


def _told(tally: Tally, trace: Trace) -> None:
    """Says so where nothing that went wrong was audited, or not all of it."""
    strikes, audited = _strikes(trace), {(one.step, one.shard) for one in trace.of(Audit)}
    if strikes and not audited.intersection(strikes):
        tally.miss("no shard that went wrong was audited: audit a larger share, or more steps")
    elif (step := first_open(trace)) < math.inf:
        tally.note(
            f"what went wrong in step {step} was not audited: the weights from there on are not "
            "compared"
        )


def _reasons_to_halt(model: Trace, trace: Trace) -> set[int | None]:
    """The steps that can't be made: workers disagree there, or something is not finite."""
    planted = {one.step for one in trace.of(Injected) if one.fault.get("kind") in PLANTED} - {None}
    return {audit.step for audit in undecided(trace)} | {h.step for h in model.of(Halt)} | planted


def _same_weights(tally: Tally, model: Trace, trace: Trace) -> None:
    """Whatever was found, the steps are made as if nothing had gone wrong."""
    scenario, limit = trace.scenario, first_open(trace)
    halts, reasons = [halt.step for halt in trace.of(Halt)], _reasons_to_halt(model, trace)
    for step in halts:
        needless = f"training halted in step {step}, where all that was wrong could be told"
        tally.check(step in reasons or step >= limit, needless, step=step, scenario=scenario)
    status = "halted" if halts else model.end.status
    how = f"the run ended {trace.end.status} ({trace.end.reason})"
    tally.equal(status, trace.end.status, how, scenario=scenario)
    message = "not the weights of the run in which nothing is wrong"
    evidence.compare_updates(tally, model, trace, "weights", message, before=limit)
    lost = evidence.updates(model).keys() - evidence.updates(trace).keys()
    due = (step for step in lost if step < min([*halts, math.inf]))
    evidence.compare_steps_made(tally, due, trace)


ROWS = (
    Check(
        name="audits",
        id="F-WP-006",
        decides="what a worker computes wrongly and unseen is found by another, and it is named",
        spoken_of="corruption audit silent recompute",
        judge=judge,
        plan=plan,
        needs=(CALM,),
    ),
)
