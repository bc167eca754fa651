"""The record of one run over a contract, and what follows from it: verdict, gate, exit code.

Decides nothing about single invariants (a finding does) and renders nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entrenar_py.contract import SEVERITIES, Contract, Invariant
from entrenar_py.reports.curves import Curve
from entrenar_py.verdict import Finding, Verdict, worst

EXIT_HELD = 0
EXIT_FALSIFIED = 1
EXIT_INCONCLUSIVE = 4
EXIT_NOTHING_SELECTED = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a run found about one invariant.

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
class Report:
    """What a run found about a contract.

    `entries` stand in the contract's order, one per invariant that was selected. `contract_given`
    is what finds the contract again (`--contract`), `command` what repeats the whole run; both as
    typed in a shell. `environment` holds versions and devices. `num_traces` is how many stored
    traces were judged, None if scenarios were run. `curves` are the runs that were judged, where a
    report was asked for that draws them. `not_applying` are the clauses that were selected and say
    nothing of `system`: they have no entry. `interrupted` means that a person stopped the run, so
    that `entries` are only what is known so far.
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

    @property
    def left_out(self) -> tuple[str, ...]:
        """Which selected clauses do not apply to the system: a line for each reason."""
        clauses: dict[str, list[str]] = {}
        for one in self.not_applying:
            named = f"{one.invariant.id} ({one.invariant.name})"
            clauses.setdefault(one.reason, []).append(named)
        return tuple(f"not applied: {', '.join(ids)}: {why}" for why, ids in clauses.items())

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; INCONCLUSIVE at best when interrupted or when nothing was selected."""
        verdicts = [entry.verdict for entry in self.entries]
        return worst([*verdicts, Verdict.INCONCLUSIVE] if self.interrupted else verdicts)

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many entries have each verdict, worst verdict first, zeros included."""
        verdicts = [entry.verdict for entry in self.entries]
        return {verdict: verdicts.count(verdict) for verdict in _WORST_FIRST}

    @property
    def num_compared(self) -> int:
        """How many comparisons were made in all."""
        return sum(entry.finding.compared for entry in self.entries)

    @property
    def ranked(self) -> tuple[Entry, ...]:
        """The entries, worst verdict first, then by severity, then as in the contract."""
        return tuple(sorted(self.entries, key=_rank))

    @property
    def gate_broken(self) -> tuple[Entry, ...]:
        """The entries the contract's gate demands and that did not hold, worst first."""
        demanded, _ = self._gate_demands()
        return tuple(
            entry
            for entry in self.ranked
            if entry.invariant.id in demanded and entry.verdict is not Verdict.HELD
        )

    @property
    def gate_not_run(self) -> tuple[str, ...]:
        """What the gate demands but this run left out: ids, and names that no clause has."""
        demanded, unknown = self._gate_demands()
        ran = {entry.invariant.id for entry in self.entries}
        return (*(clause for clause in demanded if clause not in ran), *unknown)

    @property
    def gate_passed(self) -> bool | None:
        """Whether every clause the gate demands held.

        None is undecided: the contract has no gate or its gate demands nothing, the run was
        interrupted, or it left demanded clauses out and none of the others broke.
        """
        if self.contract.gate is None:
            return None
        if self.gate_broken:
            return False
        demanded, _ = self._gate_demands()
        if self.interrupted or self.gate_not_run or not demanded:
            return None
        return True

    def exit_code(self, *, allow_inconclusive: bool) -> int:
        """The process's exit code; an interrupted run never gives 0."""
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
        if not self.entries:
            return "nothing selected: no clause of the contract is left to check"
        return ""

    def replay_command(self, entry: Entry) -> str | None:
        """The shell command that replays the counterexample of `entry`; None if none was saved."""
        if entry.replay is None:
            return None
        words = ("entrenar-check", "--contract", self.contract_given, "--replay", entry.replay)
        return shlex.join(words)

    def meanings(self, entry: Entry) -> tuple[str, ...]:
        """What the contract says that it means if `entry` was falsified; none if it was not.

        The `if_fails` of every falsification test whose `rule` is the clause's id or name.
        """
        if entry.verdict is not Verdict.FALSIFIED:
            return ()
        attacked = (entry.invariant.id, entry.invariant.name)
        tests = self.contract.falsification_tests
        return tuple(test.if_fails for test in tests if test.rule in attacked and test.if_fails)

    def _gate_demands(self) -> tuple[list[str], list[str]]:
        """Ids of the clauses the gate demands, and the names in it that no clause has."""
        gate = self.contract.gate
        if gate is None:
            return [], []
        clauses = self.contract.invariants
        if not gate.checks:
            return [c.id for c in clauses if c.severity == "P0" or c.critical], []
        named = {name: [c.id for c in clauses if name in c.gate_names] for name in gate.checks}
        demanded = dict.fromkeys(clause for ids in named.values() for clause in ids)
        return list(demanded), [name for name, ids in named.items() if not ids]


_WORST_FIRST = (Verdict.FALSIFIED, Verdict.INCONCLUSIVE, Verdict.HELD)


def _rank(entry: Entry) -> tuple[int, int]:
    return -entry.verdict.badness, SEVERITIES.index(entry.invariant.severity)
