"""The records of the table in `presuppositions`: what is compared, and what that presupposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations, run_comparison, sensitivity
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.causes.sensitivity import Sensitivity
from entrenar_py.check.evidence.needs import ALONE, REPEATED, Traces
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Counterexample, Tally


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two runs that a check compares: `trace` is judged by `model`.

    They are the same trace where ranks or steps of one run are compared with each other. `runs` are
    all runs that the check was given.
    """

    runs: Traces
    model: Trace
    trace: Trace

    @property
    def is_one_run(self) -> bool:
        """True if a run is compared with itself."""
        return self.model is self.trace

    @property
    def plain_runs(self) -> tuple[Trace, ...]:
        """Two runs of the same command with nothing changed between them; () if unknown."""
        runs = self.runs.witnesses.get(REPEATED, ())
        return runs if len(runs) == 2 else ()

    @property
    def sensitivity(self) -> Sensitivity:
        """How far rounding alone moves this training, as far as it was measured."""
        return sensitivity.of(self.runs)

    @cached_property
    def difference(self) -> Counterexample | None:
        """Where the runs differ by more than rounding, None if they don't.

        Where they don't, a presupposition that fails was without effect.
        """
        tried = Tally("", observed=True)
        run_comparison.compare(tried, self.model, self.trace, None, sensitivity=self.sensitivity)
        return tried.broken

    @cached_property
    def explanation(self) -> Explanation | None:
        """Why the runs differ, if one exact equation says so; None if none does."""
        step = None if self.is_one_run or self.difference is None else self.difference.step
        if step is None or step < 0:
            return None
        bounds = run_comparison.Bounds.of(evidence.updates(self.model), self.model, self.trace)
        bound = bounds.gradient_moved if step else bounds.gradient
        return explanations.difference(self.model, self.trace, step, bound)

    @property
    def alone(self) -> Trace | None:
        """The run on one worker, None if there is none."""
        return next(iter((*self.runs.of(ALONE), *self.runs.witnesses.get(ALONE, ()))), None)


@dataclass(frozen=True, kw_only=True)
class Presupposition:
    """A condition of comparing two tensors, losses or orders of samples.

    `says` completes "a comparison presupposes that ...". `lacking` tests it on the runs: it returns
    why it fails or is unknown, and the call that settles it, or "" if it holds. `left` returns what
    can still be compared where it fails, or None for nothing. If a difference that has an
    explanation can't come from this, `is_explained` is true. `broken` returns the counterexample
    of a training in which it fails by the script's own doing, None where that isn't certain.
    """

    name: str
    says: str
    lacking: Callable[[Compared], str]
    left: Callable[[Compared], Compared | None] = lambda _: None
    is_explained: bool = False
    broken: Callable[[Compared], Mapping[str, Any] | None] = lambda _: None
