"""The results of a run over a contract, and what follows from them: verdict, gate, exit code.

Verdicts on single invariants are in their findings. Nothing is rendered here.
"""

from __future__ import annotations

import datetime
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from entrenar_py.check.contract import SEVERITIES, Contract, Invariant, Position, gates
from entrenar_py.check.contract.gates import Demands
from entrenar_py.shared.verdict import MEANING, Finding, Verdict, worst
from entrenar_py.shared.wording import counted

if TYPE_CHECKING:
    from entrenar_py.check.reports.html import Curve

EXIT_HELD = 0
EXIT_FALSIFIED = 1
EXIT_INCONCLUSIVE = 4
EXIT_NOTHING_SELECTED = 5
_REASON_CHARS_MAX = 120  # length of a clause's reason in the explanation of the exit code
_NAMED_MAX = 5  # ids in the explanation, if nothing but these is known
_INTERRUPTED = "interrupted: these are the results so far"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result for one invariant.

    - `num_scenarios`: how many of the clause's own scenarios were run.
    - `num_explored`: how many examples Hypothesis drew near them.
    - `replay`: the path of the saved counterexample as text, or None if none was saved.
    - `accepted`: the reason why a falsification is accepted, else "".
    - `advice`: whether it is accepted because the clause counts only as advice.
    - `untried`: the placeholders that the clause could use and that the command lacks.
    """

    invariant: Invariant
    finding: Finding
    num_scenarios: int
    num_explored: int
    elapsed_s: float
    replay: str | None = None
    accepted: str = ""
    advice: bool = False
    untried: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The finding's verdict."""
        return self.finding.verdict

    @property
    def is_accepted(self) -> bool:
        """True if the clause is falsified and the falsification is accepted."""
        return bool(self.accepted) and self.verdict is Verdict.FALSIFIED


@dataclass(frozen=True, kw_only=True)
class NotApplying:
    """A selected clause that does not apply to the system of the run, and the reason.

    `outside` is true if the clause is about something other than what was checked: a gate over the
    clauses for a script does not demand a probe of backends. `seen` is true if the runs themselves
    showed that the clause does not apply.
    """

    invariant: Invariant
    reason: str
    outside: bool = False
    seen: bool = False


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A selected clause that the configuration leaves out until a day, and the reason.

    `until` is the last day. `place` is the place in the configuration file.
    """

    invariant: Invariant
    reason: str
    until: datetime.date
    place: str

    @property
    def named(self) -> str:
        """The clause as `ID (name)`."""
        return f"{self.invariant.id} ({self.invariant.name})"

    @property
    def why(self) -> str:
        """The reason, last day and place, as text for any format."""
        return f"until {self.until}: {self.reason} ({self.place})"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A project's configuration file: its place, and its keys that a run `used`.

    `overruled` are the keys that the command line replaced. `command` is the command in the
    configuration, or empty if it has none.
    """

    place: str
    used: tuple[str, ...]
    overruled: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The configuration in words: where each value came from, and the command."""
        command = (f"command {' '.join(self.command)}",) if self.command else ()
        return "; ".join((self._used, *command, *self._replaced))

    @property
    def sources(self) -> str:
        """Where each value came from, in words."""
        return "; ".join((self._used, *self._replaced))

    @property
    def _used(self) -> str:
        return f"{', '.join(self.used)} from {self.place}" if self.used else self.place

    @property
    def _replaced(self) -> tuple[str, ...]:
        names = ", ".join(self.overruled)
        return (f"replaced by the command line: {names}",) if names else ()


@dataclass(frozen=True)
class Ending:
    """The exit code of a call, and the reason for it."""

    code: int
    reason: str

    def __str__(self) -> str:
        """Return `exit 1: F-DP-005 falsified`."""
        return f"exit {self.code}: {self.reason}"


def ending(reports: Sequence[Report], *, allow_inconclusive: bool) -> Ending:
    """Return the exit code of a call with several contracts, and the reason for it.

    It is the worst code of all contracts, and never 0 for an interrupted run.
    """
    entries = [entry for report in reports for entry in report.ranked]
    broken = [e for e in entries if e.verdict is Verdict.FALSIFIED]
    falsified = [entry.invariant.id for entry in broken if not entry.is_accepted]
    unknown = [entry for entry in entries if entry.verdict is Verdict.INCONCLUSIVE]
    interrupted = any(report.interrupted for report in reports)
    gates = [report.gate_open for report in reports if report.gate_open]
    if falsified:
        more = f"; {_INTERRUPTED}" if interrupted else ""
        return Ending(EXIT_FALSIFIED, f"{', '.join(falsified)} falsified{more}")
    if interrupted:
        return Ending(EXIT_INCONCLUSIVE, _INTERRUPTED)
    if (unknown or gates) and not allow_inconclusive:
        are_all = len(unknown) == len(entries) > _NAMED_MAX
        named = [f"all {len(unknown)} clauses inconclusive"] if are_all else _unknown(unknown)
        return Ending(EXIT_INCONCLUSIVE, "; ".join((*named, *gates)))
    if empty := [report for report in reports if not report.entries]:
        return Ending(EXIT_NOTHING_SELECTED, empty[0].incomplete)
    counts = {
        "held": len(entries) - len(broken) - len(unknown),
        "falsified and accepted": sum(not entry.advice for entry in broken),
        "advice": sum(entry.advice for entry in broken),
        "inconclusive and allowed": len(unknown),
    }
    told = [f"{number} {words}" for words, number in counts.items() if number]
    return Ending(EXIT_HELD, ", ".join([*told, *gates]))


def _unknown(entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    ids = ", ".join(entry.invariant.id for entry in entries)
    why = entries[0].finding.reason if len(entries) == 1 else ""
    short = textwrap.shorten(why, _REASON_CHARS_MAX, placeholder=" ...")
    return [f"{ids} inconclusive{short and f': {short}'}"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run over one contract.

    - `contract_given`, `bindings_given`: the values of `--contract` and `--bind`, as typed.
    - `command`: the shell command that repeats the whole run.
    - `entries`: one Entry for each judged invariant, in the contract's order.
    - `environment`: versions and devices.
    - `interrupted`: whether a person stopped the run; `entries` then has the results so far.
    - `num_traces`: the number of stored traces judged, or None if scenarios were run.
    - `curves`: losses and distances of the runs; empty unless the report draws them.
    - `not_applying`: the selected clauses that don't apply to `system`.
    - `excluded`: the selected clauses that the `configuration` leaves out.
    - `places`: purpose -> line of the script that was run. Purposes are `step` (of the optimizer),
      `samples` (their drawing) and `save` (of a checkpoint).
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
    places: Mapping[str, Position] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[str, ...]:
        """One line for each excluded clause, then one for each reason why clauses do not apply."""
        return self._left_out(self.not_applying)

    @property
    def left_out_by_choice(self) -> tuple[str, ...]:
        """The lines of `left_out`, without clauses about something other than what was checked.

        If the runs showed that a clause doesn't apply, the reason is cut at its first colon.
        """
        chosen = [left for left in self.not_applying if not left.outside]
        return self._left_out(
            [
                replace(one, reason=one.reason.partition(": ")[0]) if one.seen else one
                for one in chosen
            ]
        )

    def _left_out(self, not_applying: Sequence[NotApplying]) -> tuple[str, ...]:
        clauses: dict[str, list[str]] = {}
        for skipped in not_applying:
            named = f"{skipped.invariant.id} ({skipped.invariant.name})"
            clauses.setdefault(skipped.reason, []).append(named)
        excluded = (f"excluded: {exclusion.named} {exclusion.why}" for exclusion in self.excluded)
        applied = (f"not applied: {', '.join(ids)}: {why}" for why, ids in clauses.items())
        return (*excluded, *applied)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the entries, without accepted falsifications.

        It is at least INCONCLUSIVE if the run was interrupted, if no clause was selected, or if the
        whole contract ran and its gate is undecided (`gate_open`).
        """
        verdicts = [Verdict.HELD if entry.is_accepted else entry.verdict for entry in self.entries]
        unknown = self.interrupted or bool(self.gate_open)
        return worst([*verdicts, Verdict.INCONCLUSIVE] if unknown else verdicts)

    @property
    def counts(self) -> dict[Verdict, int]:
        """The number of entries with each verdict, worst verdict first, including zeros."""
        verdicts = [entry.verdict for entry in self.entries]
        return {verdict: verdicts.count(verdict) for verdict in _WORST_FIRST}

    @property
    def num_compared(self) -> int:
        """The number of comparisons of all entries."""
        return sum(entry.finding.compared for entry in self.entries)

    @property
    def ranked(self) -> tuple[Entry, ...]:
        """The entries, worst verdict first, then by severity, then in the contract's order."""
        return tuple(sorted(self.entries, key=rank))

    @cached_property
    def _asked(self) -> Demands:
        return gates.demands(self.contract)

    @property
    def gate_unresolved(self) -> tuple[str, ...]:
        """The demands of the gate that no clause of the contract decides."""
        return self._asked.unresolved

    @property
    def _demanded(self) -> tuple[str, ...]:
        left_out = {left.invariant.id for left in self.not_applying if left.outside or left.seen}
        return tuple(clause for clause in self._asked.clauses if clause not in left_out)

    @property
    def gate_size(self) -> str:
        """The gate's number of clauses: `over 6 clauses`, or `over 3 script clauses`."""
        num_seen = sum(left.seen for left in self.not_applying)
        of_script = "script " if len(self._demanded) + num_seen < len(self._asked.clauses) else ""
        return f"over {counted(len(self._demanded), f'{of_script}clause')}"

    @property
    def gate_scope(self) -> str:
        """`gate_size`, and which of the gate's clauses don't apply, as the runs showed."""
        seen = [left.invariant.id for left in self.not_applying if left.seen]
        without = ", ".join(clause for clause in self._asked.clauses if clause in seen)
        return f"{self.gate_size} ({without} not applied)" if without else self.gate_size

    @property
    def gate_broken(self) -> tuple[Entry, ...]:
        """The entries that the gate demands and that did not hold, worst first."""
        demanded = self._demanded
        return tuple(
            entry
            for entry in self.ranked
            if entry.invariant.id in demanded and entry.verdict is not Verdict.HELD
        )

    @property
    def gate_not_run(self) -> tuple[str, ...]:
        """The ids of the clauses that the gate demands and that have no entry."""
        ran = {entry.invariant.id for entry in self.entries}
        return tuple(clause for clause in self._demanded if clause not in ran)

    @property
    def gate_passed(self) -> bool | None:
        """True if every clause that the gate demands held, False if one failed, None if undecided.

        The gate is undecided if there is none, or if it demands nothing. It is also undecided if
        the run was interrupted, left demanded clauses out, or could not decide some demands
        (`gate_unresolved`), or if a clause that the gate doesn't demand is falsified.
        """
        if self.contract.gate is None:
            return None
        if self.gate_broken:
            return False
        lacking = self.gate_not_run or self.gate_unresolved or not self._demanded
        return None if self.interrupted or lacking or self._broken_otherwise else True

    @property
    def _broken_otherwise(self) -> tuple[str, ...]:
        """The ids of falsified clauses that the gate does not demand, and that are not accepted."""
        return tuple(
            entry.invariant.id
            for entry in self.ranked
            if entry.verdict is Verdict.FALSIFIED
            and not entry.is_accepted
            and entry.invariant.id not in self._demanded
        )

    @property
    def gate_why(self) -> str:
        """The reasons that keep the gate from passing; "" if it passed or there is none."""
        if self.contract.gate is None or self.gate_passed:
            return ""
        if self.gate_broken:
            verdicts: dict[str, list[str]] = {}
            for entry in self.gate_broken:
                verdicts.setdefault(entry.verdict, []).append(entry.invariant.id)
            return ", ".join(f"{', '.join(ids)} {verdict}" for verdict, ids in verdicts.items())
        excluded = {exclusion.invariant.id: " (excluded)" for exclusion in self.excluded}
        left = ", ".join(f"{clause}{excluded.get(clause, '')}" for clause in self.gate_not_run)
        undecided, others = map(", ".join, (self.gate_unresolved, self._broken_otherwise))
        parts = (
            left and f"not checked in this run: {left}",
            undecided and f"no clause decides: {undecided}",
            others and f"{others} falsified, which it does not demand",
        )
        other = "interrupted" if self.interrupted else "it demands no clause"
        return "; ".join(filter(None, parts)) or other

    @property
    def gate_open(self) -> str:
        """The reason why the gate is undecided after a run of the whole contract, or "".

        It is "" if only some clauses were run. Clauses that are excluded or don't apply count as
        run.
        """
        seen = {one.invariant.id for one in self.entries} | {e.invariant.id for e in self.excluded}
        seen |= {skipped.invariant.id for skipped in self.not_applying}
        whole = all(clause.id in seen for clause in self.contract.invariants)
        if not self.entries or not whole or self.gate_broken or not self.gate_unresolved:
            return ""
        return f"the gate is undecided: no clause decides {', '.join(self.gate_unresolved)}"

    def exit_code(self, *, allow_inconclusive: bool) -> int:
        """Return the exit code of a run over this contract alone."""
        return ending([self], allow_inconclusive=allow_inconclusive).code

    @property
    def incomplete(self) -> str:
        """The reason why results are missing, or "" if none are."""
        if self.interrupted:
            return "the run was interrupted: the other clauses have the results so far"
        if not self.contract.invariants:
            return "nothing selected: the contract has no clause and no proof obligation to check"
        if not self.entries:
            return "nothing selected: no clause of the contract is left to check"
        return ""

    def replay_command(self, entry: Entry) -> str | None:
        """Return the shell command that replays the counterexample, or None if none was saved."""
        if entry.replay is None:
            return None
        bound = [word for file in self.bindings_given for word in ("--bind", file)]
        contract = ("--contract", self.contract_given, *bound)
        return shlex.join(("entrenar-check", *contract, "--replay", entry.replay))

    def meanings(self, entry: Entry) -> tuple[str, ...]:
        """Return the contract's possible causes of the failure of `entry`, or () if it didn't fail.

        They are the `if_fails` of each test that attacks the clause or that became the clause. If
        the entry's own reason says what it could mean, the contract's causes are left out.
        """
        if entry.verdict is not Verdict.FALSIFIED or MEANING in entry.finding.reason:
            return ()
        tests, clause = self.contract.falsification_tests, entry.invariant
        names = {clause.id, clause.name, clause.item}
        return tuple(t.if_fails for t in tests if t.if_fails and names & {t.target, t.id})


_WORST_FIRST = (Verdict.FALSIFIED, Verdict.INCONCLUSIVE, Verdict.HELD)


def rank(entry: Entry) -> tuple[int, int]:
    """Return the key by which entries are sorted: worst verdict first, then by severity."""
    return -entry.verdict.badness, SEVERITIES.index(entry.invariant.severity)
