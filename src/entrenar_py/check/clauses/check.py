"""The type of the rows in the table of checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entrenar_py.check.contract import EQUALITY_KINDS, CheckTerms, Invariant
from entrenar_py.check.evidence.needs import Need, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Counterexample, Finding


def _nothing_absent(_: Sequence[Trace]) -> str:
    return ""


def _is_more(_: Counterexample) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Check(CheckTerms):
    """A row of the table: how one kind of clause is decided.

    `judge` compares the runs. `plan` returns the scenarios for a clause that lists none. `needs`
    are the other runs that a run is judged with, `witnesses` the runs of a user's own trainer that
    show whether the comparisons' presuppositions hold. `explores`: random scenarios around the plan
    make sense. `in_step`: the check applies only if all workers make every step together; of a
    user's workers that step alone and are brought together after rounds, `in_rounds` judges the
    same clause, if there is one.
    `bitwise`: it applies only to trainers whose bits do not depend on the number of workers.
    `takes_turned`: it also judges runs with a turned knob: with the base if `needs` has that knob,
    else alone. `takes_resumed`: it judges a user's resumed run, too, by itself. `takes_commands`:
    it also judges a user's command, as checks that explore do. `not_of_commands`: why it judges
    none, if it is no probe either. `absent` returns what the runs of a user's own trainer were seen
    not to have, so that the clause does not apply to them; "" if they may have it. It is asked
    where the judgement is inconclusive. `advice` returns why a break is only advice to a user who
    named no contract; "" if it is more.
    """

    judge: Callable[[Invariant, Traces], Finding]
    plan: Callable[[Invariant], list[Scenario]]
    needs: tuple[Need, ...] = ()
    witnesses: tuple[Need, ...] = ()
    explores: bool = False
    tolerance_kinds: tuple[str, ...] = EQUALITY_KINDS
    takes_tolerance: bool = False
    in_step: bool = False
    in_rounds: Callable[[Invariant, Traces], Finding] | None = None
    bitwise: bool = False
    takes_turned: bool = False
    takes_resumed: bool = False
    takes_commands: bool = False
    not_of_commands: str = ""
    advice: Callable[[Counterexample], str] = _is_more
    absent: Callable[[Sequence[Trace]], str] = _nothing_absent
