"""Up to which step both runs of a comparison are finite: NaN equals NaN in any trainer."""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.checks.compared import Compared, run_name
from entrenar_py.trace import Event, Noticed, Shard, Start, Synchronised, Trace, Update


def lacking(compared: Compared) -> str:
    """Return from which step on no run is finite, and what to change; "" if one always is."""
    step = _first(compared)
    if step is None:
        return ""
    names = dict.fromkeys(map(run_name, (compared.model, compared.trace)))
    return (
        f"in {' and '.join(names)} weights are not finite from step {step} on, so nothing can be "
        f"compared there: {_advice(compared.trace)}"
    )


def _advice(trace: Trace) -> str:
    if any({"nan", "inf"} & {*event.peculiar.values()} for event in trace.of(Noticed)):
        return "they were not before the first step either, see F-DP-003"
    if trace.traits.clipping == "told":
        return (
            "nothing is clipped, since {clip} is 1e9 in every run but its own; name the norm that "
            'you train with, [tool.entrenar-check.knobs] clip = {1e9 = "1.0"}'
        )
    return "check with a smaller learning rate, or fewer steps"


def before(compared: Compared) -> Compared:
    """Return the comparison of the steps before the first after which neither run is finite."""
    step = _first(compared)
    if step is None:
        return compared
    trace = until(compared.trace, step)
    model = trace if compared.is_one_run else until(compared.model, step)
    return replace(compared, model=model, trace=trace)


def _first(compared: Compared) -> int | None:
    """Return the first step after which neither run is finite, or None."""
    firsts = [_first_of(run) for run in (compared.model, compared.trace)]
    known = [first for first in firsts if first is not None]
    return max(known) if len(known) == len(firsts) else None


def _first_of(trace: Trace) -> int | None:
    """Return the first step after which a rank's weights are not finite, or None."""
    steps = [update.step for update in trace.standing.of(Update) if not update.finite]
    return min(steps, default=None)


def until(trace: Trace, step: int) -> Trace:
    """Return `trace` without the events of `step` and of later steps."""
    return replace(trace, events=tuple(e for e in trace.events if not _is_of(e, step)))


def _is_of(event: Event, step: int) -> bool:
    """Return whether `event` belongs to `step` or to a later step."""
    if isinstance(event, Start):
        return event.step > step
    return isinstance(event, Shard | Update | Synchronised) and event.step >= step
