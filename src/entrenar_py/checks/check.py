"""A row of the table of checks: how one kind of clause is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entrenar_py.checks.needs import Need, Traces
from entrenar_py.contract import EQUALITY_KINDS, CheckTerms, Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Check(CheckTerms):
    """A row of the table: how one kind of clause is decided.

    `plan` gives the scenarios of a clause that brings none. `needs` are the runs that it judges one
    beside. `explores`: random scenarios around the plan make sense. `in_step`: it presupposes that
    every step is one of all workers together, and says nothing of those that step alone. `bitwise`:
    it is of trainers whose bits do not depend on the number of workers. `takes_turned`: it judges a
    run with a knob turned by itself, as any other.
    """

    judge: Callable[[Invariant, Traces], Finding]
    plan: Callable[[Invariant], list[Scenario]]
    needs: tuple[Need, ...] = ()
    explores: bool = False
    tolerance_kinds: tuple[str, ...] = EQUALITY_KINDS
    takes_tolerance: bool = False
    in_step: bool = False
    bitwise: bool = False
    takes_turned: bool = False
