"""F-FT-016: adapters that ranks train together are those of a single device, and infer the same.

Source: finetune-v1, equation moved.
"""

from __future__ import annotations

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes.rounding_bounds import ADAM_GRADIENT_BOUND
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.tuned_weights import planned
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import SINGLE, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Explained, ReadBack, Start, Tensors, Trace, record_tensor
from entrenar_py.shared.verdict import Finding, Tally


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan adapters by each kind of strategy."""
    kinds = ("ddp", "ddp_canonical", "fsdp", "tensor_parallel", "pipeline_parallel")
    asked = [{"task": "instruct", "strategy": kind} for kind in kinds]
    return [planned(options=one).with_(system="finetuned_by_ranks") for one in asked]


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Compare what ranks wrote with a single device's last weights, and its outputs with float64.

    Outputs are those of the written adapters, and so the single device's as far as adapters are.
    """
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None:
        for single in runs.of(SINGLE):
            _compare(tally, single, runs.base)
        for explained in runs.base.of(Explained) if runs.of(SINGLE) else ():
            closeness.judge_explained(tally, explained, runs.base)
    nothing = "no run by ranks and on a single device of one fine-tuning was recorded"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare(tally: Tally, single: Trace, trace: Trace) -> None:
    """Compare by how much each tensor was moved, within a share of the distance."""
    start, made = next(iter(single.of(Start)), None), evidence.updates(single)
    if start is None or not made:
        tally.miss("the single device recorded no start, or no step")
        return
    last = evidence.any_rank(made[max(made)])
    for event in trace.of(ReadBack):
        due, got = _moved(start.weights, last.weights), _moved(start.weights, event.tensors)
        if due is None or got is None:
            tally.miss("the values of what was trained were not recorded")
            continue
        message = "the ranks have not moved the weights as the single device has"
        closeness.compare_close(
            tally, due, got, ADAM_GRADIENT_BOUND, message, step=last.step, scenario=trace.scenario
        )


def _moved(before: Tensors, after: Tensors) -> Tensors | None:
    """Return the change of each tensor, float64; None without values."""
    moved = {}
    for name, record in after.items():
        first, last = (one.values() for one in (before.get(name, record), record))
        if first is None or last is None or first.size != last.size:
            return None
        apart = last.astype(np.float64) - first.astype(np.float64)
        moved[name] = record_tensor(apart, values=True)
    return moved


ROWS = (
    Check(
        name="strategy_adapters",
        id="F-FT-016",
        decides="ranks write the adapters of a single device, and these infer the same",
        spoken_of="strategy torchrun adapters",
        judge=judge,
        plan=plan,
        needs=(SINGLE,),
        tolerance_kinds=("relative",),
    ),
)
