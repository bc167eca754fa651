"""Tensors that an optimizer holds twice, so that each step moves them twice. Part of F-TI-008."""

from __future__ import annotations

from collections.abc import Set

from entrenar_py.check import evidence
from entrenar_py.shared.trace import Noticed, Trace, Update
from entrenar_py.shared.verdict import Tally


def judge(tally: Tally, trace: Trace) -> Set[str]:
    """Check that no tensor is stepped twice; return those that are, whose steps follow no rule.

    Two parameters of one memory may be right: plain SGD adds their gradients.
    """
    noticed = trace.of(Noticed)
    twice = {name for event in noticed for name in event.doubled}
    update = next(iter(trace.of(Update)), None)
    if update is None:
        return twice
    plain = trace.scenario.optimizer == "sgd" and not trace.scenario.weight_decay
    for name in sorted(twice & update.weights.keys()):
        groups = {group for event in noticed for group in event.shared if name in group}
        others = sorted({one for group in groups for one in group} & twice - {name})
        if not others:
            why = "the optimizer's parameters have it twice"
        elif plain:
            tally.note(f"{name} and {others[0]} are parameters of the same memory: SGD steps both")
            continue
        else:
            why = f"{others[0]} is another parameter of the same memory"
        place = evidence.place(trace, update)
        message = f"{name} moves twice in each step: {why}"
        tally.check(False, message, tensor=name, **place)
    return twice
