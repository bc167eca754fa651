"""The type of a row in the table of checks, and a judge that judges each run separately."""

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
    """A row of the table of checks: how one type of clause is decided.

    - `judge`: compares the runs and returns the finding.
    - `plan`: returns the scenarios for a clause that lists none.
    - `needs`: the other runs that a run is compared with.
    - `witnesses`: runs of a user's own trainer that show whether the runs may be compared at all.
    - `explores`: random scenarios near the planned ones make sense.
    - `in_step`: the check applies only if all workers take every step together. If a user's workers
      step alone and are synchronised after each round, `in_rounds` (if not None) judges the same
      clause.
    - `bitwise`: the check applies only to trainers that promise the same bits for any number of
      workers.
    - `takes_turned`: the check also judges runs with a turned knob: together with the base if
      `needs` has that knob, otherwise alone.
    - `takes_resumed`: the check also judges a user's resumed run alone.
    - `takes_commands`: the check also judges a user's command, as checks with `explores` do.
    - `not_of_commands`: the reason why a check that is not a probe judges no user's command.
    - `absent`: called if the judgement is inconclusive. Returns the subject of the clause that the
      runs of a user's trainer lack, so that the clause does not apply; "" if they may have it.
    - `advice`: returns why a violation is only advice if the user named no contract; "" if it is
      more than advice.
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
    """Return a judge that applies `compare` to each usable run separately.

    `nothing` is the finding's reason if no run had anything to compare.
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
    """Add a note if the device is a software adapter, which computes on the CPU."""
    if event.software:
        tally.note(f"software adapter {event.device}")
