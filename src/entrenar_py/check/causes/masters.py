"""Follow copies that an optimizer steps in place of the weights: masters in float32, or shards.

The copies are not recorded. They begin as the weights do, move by the optimizer's rule, and are
written back, rounded to the weights' format. So they are recomputed from the first step on, never
from the weights that are recorded later, and all weights have to be what they round to. If they are
not, nothing is known: copies may begin as other numbers, or be stepped by an order of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from entrenar_py.check.causes import divided_inside, update_rule
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.causes.update_rule import Expected, Rule
from entrenar_py.check.evidence import precision
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.trace import Start, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Tally

# Units of a weight: the rounding of its copy, and that of a first weight whose copy has more bits.
_ROUNDINGS = 2


def follow(tally: Tally, runs: Traces, trace: Trace) -> bool:
    """Count each weight of each step that copies make by their rule, if all of them are such.

    Return whether they are, in every step of every rank.
    """
    compared = divided_inside.reduced(tally, Compared(runs=runs, model=trace, trace=trace))
    if trace.traits.steps == "model" or trace.traits.rule != "known":
        return False
    for decaying in (compared.trace, _all_decayed(compared.trace)):
        counts = [_num_followed(update, copies) for update, copies in _steps(decaying)]
        if counts and all(counts):
            tally.compared += sum(counts)
            tally.note(
                "the optimizer steps copies of the weights: all weights are what its rule makes of "
                "such copies from the first step on, rounded"
            )
            return True
    return False


def _all_decayed(trace: Trace) -> Trace:
    """Return a run in which all tensors have weight decay: which copies have it is not recorded."""
    return replace(
        trace,
        events=tuple(
            replace(event, decayed=event.trainable) if isinstance(event, Start) else event
            for event in trace.events
        ),
    )


def _steps(trace: Trace) -> Iterator[tuple[Update, dict[str, Expected] | None]]:
    """Yield each update, with the copies after it; None for them if they are unknown."""
    rules: dict[int, Rule] = {}
    for event in trace.standing.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        rule = rules.get(event.rank)
        bare = replace(event, edited={})  # what is written back is no edit of a copy
        expected = None if rule is None else dict(rule.step(bare))
        yield event, expected
        if rule is not None and expected:
            copies = {n: record_tensor(e.weight, values=True) for n, e in expected.items()}
            rule.weights = {**event.weights, **copies}


def _num_followed(update: Update, expected: dict[str, Expected] | None) -> int:
    """Return how many tensors are what their copies round to; 0 if any isn't, or is unknown."""
    if not expected or expected.keys() != update.gradient.keys():
        return 0
    unit = precision.unit_of(update.weights)
    kept = (update.step + 1) * (update_rule.UPDATE_ULPS + update.step) * precision.FLOAT32
    share = kept + (_ROUNDINGS * unit if unit > precision.FLOAT32 else 0.0)
    for name, copy in expected.items():
        weight = update.weights[name].values()
        if weight is None or weight.shape != copy.weight.shape:
            return 0
        allowed = share * (np.abs(copy.weight) + copy.moved)
        if not bool((np.abs(copy.weight - weight.astype(np.float64)) <= allowed).all()):
            return 0
    return len(expected)
