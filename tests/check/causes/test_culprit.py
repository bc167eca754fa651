"""Which of two ranks is wrong, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from entrenar_py.check.causes import culprit
from entrenar_py.shared.trace import Trace, Update
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import SHAPES, records, summed, times, trace_of

RIGHT = [summed(step) for step in range(3)]


def apart(**changes: Any) -> Trace:
    """Return a run in which rank 0's update of step 1 has `changes`."""
    other = records({name: np.full(size, 0.5) for name, size in SHAPES.items()})
    return traces.altered(
        trace_of(RIGHT), Update, {"step": 1, "rank": 0}, **{"weights": other, **changes}
    )


def test_the_gradient_decides() -> None:
    """A rank that applied its own samples' gradient is wrong, even if it is the lower one."""
    blame = culprit.of(apart(gradient=records(summed(1, ranks=[0]))), 1, "a", 0, 1)
    assert blame.rank == 0
    assert blame.words == "the gradient that rank 0 applied is that of its own samples alone"


def test_gradients_that_differ_by_a_factor_do_not_decide() -> None:
    """The factor is told, with both ranks."""
    blame = culprit.of(apart(gradient=records(times(2, summed(1)))), 1, "a", 0, 1)
    assert blame.rank is None
    assert blame.words.startswith(
        "rank 1 applied another gradient than rank 0: it is half as large"
    )


def test_rates_that_differ_are_told() -> None:
    """Neither rank is known to be right."""
    blame = culprit.of(apart(learning_rate=0.2), 1, "a", 0, 1)
    assert blame == culprit.Blame(words="the learning rate is 0.1 on rank 1, 0.2 on rank 0")


def test_an_edit_decides() -> None:
    """A weight that only one rank changed outside of the optimizer is wrong there."""
    blame = culprit.of(apart(edited=records({"a": np.ones(6)})), 1, "a", 0, 1)
    assert blame.rank == 0


def test_the_rule_decides() -> None:
    """Of two updates from equal gradients, the one that follows from them is right."""
    trace = trace_of(RIGHT)
    moved = {name: 1 - np.float32(0.1) * summed(0)[name] for name in SHAPES}
    trace = traces.altered(trace, Update, {"step": 0, "rank": 1}, weights=records(moved))
    blame = culprit.of(trace, 0, "a", 0, 1)
    assert blame.rank == 0
    assert "rank 0's update does not follow from its gradient" in blame.words


def test_both_ranks_are_named_if_nothing_decides() -> None:
    """The place has both; with three ranks it has the minority."""
    finding = traces.judge("replica_identity", [apart()])
    assert traces.broken(finding).place().startswith("step 1, rank 1 or 0, tensor a[0]")
    assert replace(traces.broken(finding), or_rank=None, index=(2, 3)).place() == (
        "step 1, rank 1, tensor a[2, 3]"
    )
