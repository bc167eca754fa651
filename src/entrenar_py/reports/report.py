"""The record of one run over a contract, and what follows from it: verdict, gate, exit code.

Decides nothing about single invariants (a finding does) and renders nothing.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from entrenar_py.contract import SEVERITIES, Contract, Invariant, gates
from entrenar_py.contract.gate_criteria import Demands
from entrenar_py.reports.curves import Curve
from entrenar_py.verdict import Finding, Verdict, worst

EXIT_HELD = 0
EXIT_FALSIFIED = 1
EXIT_INCONCLUSIVE = 4
EXIT_NOTHING_SELECTED = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of a run for one invariant.

    `num_scenarios` counts the scenarios the clause asked for, `num_explored` the examples that
    Hypothesis tried around them. `replay` is the path of the saved counterexample, as text; None
    if none was saved.
    """

    invariant: Invariant
    finding: Finding
    num_scenarios: int
    num_explored: int
    elapsed_s: float
    replay: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The finding's verdict."""
        return self.finding.verdict


@dataclass(frozen=True, kw_only=True)
class NotApplying:
    """A clause that was selected and says nothing of the system asked for, and why."""

    invariant: Invariant
    reason: str


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A clause that was selected, and that the configuration leaves out until a day, and why.

    `until` is the last day of that; `place` is where the configuration says so.
    """

    invariant: Invariant
    reason: str
    until: datetime.date
    place: str

    @property
    def named(self) -> str:
        """The clause: `ID (name)`."""
        return f"{self.invariant.id} ({self.invariant.name})"

    @property
    def why(self) -> str:
        """In words, for any format."""
        return f"until {self.until}: {self.reason} ({self.place})"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A project's configuration: its place, and which of its keys took part in a run.

    `overruled` are those of which the command line said otherwise; `command` is the command that it
    brought, empty if it brought none.
    """

    place: str
    used: tuple[str, ...]
    overruled: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """In words: what came from where."""
        parts = [f"{', '.join(self.used)} from {self.place}" if self.used else self.place]
        if self.command:
            parts.append(f"command {' '.join(self.command)}")
        if self.overruled:
            parts.append(f"the command line says otherwise of {', '.join(self.overruled)}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a run over a contract.

    `entries` stand in the contract's order, one per invariant that was selected. `contract_given`
    and `bindings_given` are what finds the contract again (`--contract`, `--bind`), `command` what
    repeats the whole run; all as typed in a shell. `environment` holds versions and devices.
    `num_traces` is how many stored traces were judged, None if scenarios were run. `curves` are the
    runs that were judged, where a report was asked for that draws them. `not_applying` are the
    clauses that were selected and say nothing of `system`: they have no entry. Nor have those that
    the `configuration` leaves out, `excluded`. `interrupted` means that a person stopped the run,
    so that `entries` are only what is known so far.
    """

    contract: Contract
    contract_given: str
    system: str
    seed: int
    entries: tuple[Entry, ...]
    environment: Mapping[str, Any]
    elapsed_s: float
    interrupted: bool
    command: str
    num_traces: int | None = None
    curves: tuple[Curve, ...] = ()
    not_applying: tuple[NotApplying, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    configuration: Configuration | None = None
    bindings_given: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """The excluded clauses that were selected, a line each; then those that do not apply,
        a line for each reason.
        """
        clauses: dict[str, list[str]] = {}
        for skipped in self.not_applying:
            named = f"{skipped.invariant.id} ({skipped.invariant.name})"
            clauses.setdefault(skipped.reason, []).append(named)
        excluded = (f"excluded: {exclusion.named} {exclusion.why}" for exclusion in self.excluded)
        applied = (f"not applied: {', '.join(ids)}: {why}" for why, ids in clauses.items())
        return (*excluded, *applied)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; INCONCLUSIVE at best when interrupted or when nothing was selected,
        and where the whole contract ran and its gate is open (`gate_open`).
        """
        verdicts = [entry.verdict for entry in self.entries]
        unknown = self.interrupted or bool(self.gate_open)
        return worst([*verdicts, Verdict.INCONCLUSIVE] if unknown else verdicts)

    @property
    def counts(self) -> dict[Verdict, int]:
        """The number of entries with each verdict, worst verdict first, zeros included."""
        verdicts = [entry.verdict for entry in self.entries]
        return {verdict: verdicts.count(verdict) for verdict in _WORST_FIRST}

    @property
    def num_compared(self) -> int:
        """The number of comparisons that were made in all."""
        return sum(entry.finding.compared for entry in self.entries)

    @property
    def ranked(self) -> tuple[Entry, ...]:
        """The entries, worst verdict first, then by severity, then as in the contract."""
        return tuple(sorted(self.entries, key=_rank))

    @cached_property
    def _asked(self) -> Demands:
        return gates.demands(self.contract)

    @property
    def gate_unresolved(self) -> tuple[str, ...]:
        """The demands of the contract's gate that no clause of the contract answers."""
        return self._asked.unresolved

    @property
    def gate_broken(self) -> tuple[Entry, ...]:
        """The entries the contract's gate demands and that did not hold, worst first."""
        demanded = self._asked.clauses
        return tuple(
            entry
            for entry in self.ranked
            if entry.invariant.id in demanded and entry.verdict is not Verdict.HELD
        )

    @property
    def gate_not_run(self) -> tuple[str, ...]:
        """Ids of the clauses that the gate demands and this run left out."""
        demanded = self._asked.clauses
        ran = {entry.invariant.id for entry in self.entries}
        return tuple(clause for clause in demanded if clause not in ran)

    @property
    def gate_passed(self) -> bool | None:
        """True if every clause that the gate demands held, False if one did not.

        None is undecided: the contract has no gate or its gate demands nothing, or none of what it
        demands broke but the run was interrupted, left demanded clauses out, or could not decide
        what no clause decides (`gate_unresolved`).
        """
        if self.contract.gate is None:
            return None
        if self.gate_broken:
            return False
        asked = self._asked
        if self.interrupted or self.gate_not_run or asked.unresolved or not asked.clauses:
            return None
        return True

    @property
    def gate_why(self) -> str:
        """The reasons that keep the gate from passing; empty if it passed or there is none."""
        if self.contract.gate is None or self.gate_passed:
            return ""
        if self.gate_broken:
            return ", ".join(f"{entry.invariant.id} {entry.verdict}" for entry in self.gate_broken)
        excluded = {exclusion.invariant.id: " (excluded)" for exclusion in self.excluded}
        left = ", ".join(f"{clause}{excluded.get(clause, '')}" for clause in self.gate_not_run)
        undecided = ", ".join(self.gate_unresolved)
        parts = (
            left and f"not checked in this run: {left}",
            undecided and f"no clause decides: {undecided}",
        )
        why = "; ".join(filter(None, parts))
        return why or ("interrupted" if self.interrupted else "it demands no clause")

    @property
    def gate_open(self) -> str:
        """The reason why the gate is undecided though the whole contract ran; empty if it is not.

        A run of some of the clauses leaves the gate aside: then it is empty too. A clause that the
        configuration excludes makes no such run of the others.
        """
        seen = {entry.invariant.id for entry in self.entries}
        seen |= {skipped.invariant.id for skipped in self.not_applying}
        seen |= {exclusion.invariant.id for exclusion in self.excluded}
        whole = all(clause.id in seen for clause in self.contract.invariants)
        if not self.entries or not whole or self.gate_broken or not self.gate_unresolved:
            return ""
        return f"the gate is undecided: no clause decides {', '.join(self.gate_unresolved)}"

    def exit_code(self, *, allow_inconclusive: bool) -> int:
        """Return the process's exit code; an interrupted run never gives 0."""
        if self.verdict is Verdict.FALSIFIED:
            return EXIT_FALSIFIED
        if self.interrupted:
            return EXIT_INCONCLUSIVE
        if not self.entries:
            return EXIT_NOTHING_SELECTED
        if self.verdict is Verdict.INCONCLUSIVE and not allow_inconclusive:
            return EXIT_INCONCLUSIVE
        return EXIT_HELD

    @property
    def incomplete(self) -> str:
        """Why the entries are not all that was to be known; empty if they are."""
        if self.interrupted:
            return "the run was interrupted: the other results are what is known so far"
        if not self.contract.invariants:
            return "nothing selected: the contract has no clause and no proof obligation to check"
        if not self.entries:
            return "nothing selected: no clause of the contract is left to check"
        return ""

    def replay_command(self, entry: Entry) -> str | None:
        """Return the shell command that replays what broke `entry`; None if nothing was saved."""
        if entry.replay is None:
            return None
        bound = [word for file in self.bindings_given for word in ("--bind", file)]
        words = ("entrenar-check", "--contract", self.contract_given, *bound)
        return shlex.join((*words, "--replay", entry.replay))

    def meanings(self, entry: Entry) -> tuple[str, ...]:
        """Return what the contract says that it means if `entry` was falsified; () if it was not.

        The `if_fails` of every falsification test that attacks the clause, or is it.
        """
        if entry.verdict is not Verdict.FALSIFIED:
            return ()
        tests = self.contract.falsification_tests
        clause = entry.invariant
        names = {clause.id, clause.name, clause.item}
        return tuple(t.if_fails for t in tests if t.if_fails and names & {t.target, t.id})


_WORST_FIRST = (Verdict.FALSIFIED, Verdict.INCONCLUSIVE, Verdict.HELD)


def _rank(entry: Entry) -> tuple[int, int]:
    return -entry.verdict.badness, SEVERITIES.index(entry.invariant.severity)
