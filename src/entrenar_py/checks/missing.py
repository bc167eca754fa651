"""What a trace does not reveal, and the reason that says what to record; judges nothing.

Reasons name events and fields as `entrenar_py.trace` has them; docs/traces.md has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Trace, Update
from entrenar_py.verdict import Tally

# A trace that differs in more fields than these from one that is missing is of another training.
_NEAR = 3
# How a trace keeps more of a tensor than its digest.
WITH_VALUES = "with values, record_tensor(array, values=True)"


def ask(tally: Tally, why: str, what: str) -> None:
    """Counts `why` as missing, and `what` as what to record; of the same `what` the first alone."""
    advice = f": record {what}"
    if not any(reason.endswith(advice) for reason in tally.missing):
        tally.miss(why + advice)


def require_shards(tally: Tally, trace: Trace) -> None:
    """Counts steps as missing that were made, and of which no shard was recorded."""
    known = evidence.shards(trace)
    bare = sorted(step for step in evidence.updates(trace) if step not in known)
    if bare:
        ask(
            tally,
            f"no shard of steps {str(bare[:5])[1:-1]} was recorded",
            "a Shard with ids, loss_sum, weight and finite for every rank and step",
        )


def require_updates(tally: Tally, *traces: Trace) -> bool:
    """Whether each of `traces` that completed shows a step; one that does not is missing."""
    for trace in traces:
        if trace.end.status == "completed" and not trace.of(Update):
            ask(tally, "no step was recorded", "an Update for every rank and step")
            return False
    return True


def bare_fields(tally: Tally, model: Trace, trace: Trace) -> dict[str, Any]:
    """The fields of a Shard that at least one of two runs never fills in, with what they hold then.

    One that the other run does fill in is counted as missing.
    """
    found: dict[str, Any] = {}
    for name, unknown in (("ids", ()), ("draws", None), ("gradient", {})):
        if name == "draws" and not trace.scenario.dropout:
            continue  # none is what a run without dropout draws
        filled = [any(getattr(one, name) for one in run.of(Shard)) for run in (model, trace)]
        if not all(filled):
            found[name] = unknown
        if any(filled) and not all(filled):
            ask(tally, f"one run only has {name} in its shards", f"Shard.{name} in both")
    return found


def when(step: int) -> str:
    """`in step 3`, or `before the first step` for -1."""
    return "before the first step" if step < 0 else f"in step {step}"


def nearest(
    own: Scenario, others: Iterable[Scenario], family: Callable[[Scenario], list[Scenario]]
) -> tuple[Scenario, dict[str, str]] | None:
    """Of `others` the one that comes nearest to a run that `family` wants beside `own`, and the
    fields in which it misses it: name -> `4, needed 2`. None where none is near: what `own` and the
    wanted run differ in must be right.
    """
    wanted = [one for one in family(own) if one != own and one.system == own.system]
    found = [
        (other, _differences(other, one))
        for other in others
        for one in wanted
        if _differences(own, one).keys().isdisjoint(_differences(other, one))
    ]
    near = [pair for pair in found if 0 < len(pair[1]) <= _NEAR]
    return min(near, key=lambda pair: len(pair[1]), default=None)


def but_for(traces: Sequence[Trace], family: Callable[[Scenario], list[Scenario]]) -> str:
    """What to end a reason with where `traces` lack a run of a `family`: `; the nearest other trace
    differs in num_shards (4, needed 2)`. Empty where none is near.
    """
    found = []
    for trace in traces:
        others = [other.scenario for other in traces if other is not trace]
        near = nearest(trace.scenario, others, family)
        found += [] if near is None else [near[1]]
    if not found:
        return ""
    fields = ", ".join(f"{name} ({how})" for name, how in min(found, key=len).items())
    return f"; the nearest other trace differs in {fields}"


def _differences(given: Scenario, needed: Scenario) -> dict[str, str]:
    """Field -> `4, needed 2`, of the fields in which two scenarios differ."""
    right = needed.to_dict()
    return {
        name: f"{value}, needed {right[name]}"
        for name, value in given.to_dict().items()
        if value != right[name] and name != "detail"
    }


def probed(invariant: Invariant, what: str) -> str:
    """The reason of a clause that a trace of training says nothing about; begins with `what`."""
    return (
        f"{what}: {invariant.id} is decided by a probe that the harness runs itself, not by a "
        f"trainer's trace; run entrenar-check with --only {invariant.id} and without --judge"
    )
