"""The type of the rows in the table of checks, and how a probe's runs are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.contract import EQUALITY_KINDS, CheckTerms, Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Need, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Explained, Manifest, Poisoned, Product, Stepped, Trace
from entrenar_py.shared.verdict import Counterexample, Finding, Tally


def _nothing(_: object) -> str:
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
    `bitwise`: it applies only to trainers with equal bits for any number of workers.
    `takes_turned`: it also judges runs with a turned knob: with the base if `needs` has that knob,
    else alone. `takes_resumed`: it also judges a user's resumed run alone. `takes_commands`:
    it also judges a user's command, as checks that explore do. `not_of_commands`: why it judges
    none, if it is no probe either. `absent` returns what the runs of a user's own trainer were seen
    not to have, so that the clause does not apply to them; "" if they may have it. It is asked
    where the judgement is inconclusive. `advice` returns why a break is only advice if a user
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
    advice: Callable[[Counterexample], str] = _nothing
    absent: Callable[[Sequence[Trace]], str] = _nothing


def probe(
    system: str, *, workload: str = "linear", seed: int = 0, world_size: int = 1, **fields: Any
) -> Scenario:
    """Return the scenario of a probe, by default on one worker."""
    return Scenario(system=system, workload=workload, world_size=world_size, seed=seed, **fields)


def judge_each(
    compare: Callable[[Tally, Trace], None], nothing: str
) -> Callable[[Invariant, Traces], Finding]:
    """Return a judge that applies `compare` to each run separately.

    `nothing` is the reason if no run had anything to compare.
    """

    def judged(invariant: Invariant, traces: Traces) -> Finding:
        tally = Tally(invariant.id)
        for trace in evidence.usable(traces, tally):
            compare(tally, trace)
        return tally.finding(nothing=missing.probed(invariant, nothing))

    return judged


def note_software(
    tally: Tally, event: Attempt | Explained | Manifest | Poisoned | Product | Stepped
) -> None:
    """Add a note if a device is a software adapter, which computes on the CPU."""
    if event.software:
        tally.note(f"software adapter {event.device}")
