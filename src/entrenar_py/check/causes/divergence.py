"""Up to which step both runs of a comparison are finite: NaN equals NaN in any trainer.

A training that turns NaN by its own doing is wrong, whatever was to be compared of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import (
    Event,
    Injected,
    Noticed,
    Shard,
    Start,
    Synchronised,
    Trace,
    Update,
)


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


def broken(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a training whose weights are no longer finite.

    None if that may not be its own doing: a value was planted, clipping is turned off by the
    harness, or some weights were not finite before the first step (a mask that is a parameter).
    """
    runs = (compared.model, compared.trace)
    if any(map(_is_disturbed, runs)):
        return None
    trace = compared.trace
    step = min(update.step for update in trace.standing.of(Update) if not update.finite)
    by_rank = evidence.updates(trace)[step]
    update = next(update for update in by_rank.values() if not update.finite)
    tensor, element = evidence.non_finite(update.weights) or (None, None)
    return {
        "message": (
            f"weights are not finite from step {step} on{_origin(trace, step)}, and no such value "
            "was planted: stop there, and look for a division by 0, a logarithm or a root of 0, "
            "or a learning rate that is too high"
        ),
        "tensor": tensor,
        "element": element,
        **evidence.place(trace, update),
    }


def _is_disturbed(trace: Trace) -> bool:
    planted = any(
        str(event.fault.get("kind")).startswith("non_finite_") for event in trace.of(Injected)
    )
    begun = any(evidence.non_finite(start.weights) for start in trace.of(Start))
    return planted or begun or _began_so(trace) or trace.traits.clipping == "told"


def _origin(trace: Trace, step: int) -> str:
    """Return which micro-batch was the first that was not finite, in words; "" if none was."""
    bad = [one for one in trace.standing.of(Shard) if not one.finite and one.step <= step]
    if not bad:
        return ""
    first = min(bad, key=lambda shard: (shard.step, shard.rank, shard.shard))
    tensor, _ = evidence.non_finite(first.gradient) or ("", None)
    what = f"the gradient of {tensor}" if tensor else "the loss or gradient"
    return f", as {what} on rank {first.rank} in step {first.step} is"


def _began_so(trace: Trace) -> bool:
    return any({"nan", "inf"} & {*event.peculiar.values()} for event in trace.of(Noticed))


def _advice(trace: Trace) -> str:
    if _began_so(trace):
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
