"""Validation: applies the published rules to contracts, and says whether these are valid.

It is separate from loading: a finding of a rule stops no run of checks. Nothing is executed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check.contract.records import Contract, Invariant
from entrenar_py.check.contract.validation import levels
from entrenar_py.check.contract.validation.findings import RuleFinding, examine, judge, stale
from entrenar_py.check.contract.validation.levels import LEVELS, Level
from entrenar_py.check.contract.validation.rules import DEFAULTS, FIXED, RULES, Rule
from entrenar_py.check.contract.validation.suppressions import Suppression
from entrenar_py.check.contract.vocabulary import Vocabulary

__all__ = [
    "LEVELS",
    "RULES",
    "Judged",
    "Level",
    "Policy",
    "Rule",
    "RuleFinding",
    "Suppression",
    "Validation",
    "count",
    "policy",
    "validate",
]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A project's policy on the rules: a level for each rule, and suppressions."""

    levels: Mapping[str, Level]
    suppressions: tuple[Suppression, ...] = ()


def policy(
    *,
    rules: Mapping[str, str] | None = None,
    suppressed: Iterable[Suppression] = (),
    strict: bool = False,
) -> Policy:
    """Return the policy of a command line and a configuration; `rules` are levels by rule id.

    Under `strict` every warning is an error. Raises UsageError for unknown rules and levels.
    """
    resolved = levels.resolve(DEFAULTS, rules or {}, fixed=FIXED, strict=strict)
    return Policy(levels=resolved, suppressions=tuple(suppressed))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A contract with its findings; `kind` is the kind it was judged as, "" if unreadable."""

    path: Path
    contract: Contract | None
    kind: str
    findings: tuple[RuleFinding, ...]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The findings in all contracts; `stale` are the findings on suppressions."""

    contracts: tuple[Judged, ...]
    levels: Mapping[str, Level]
    stale: tuple[RuleFinding, ...] = ()

    @property
    def findings(self) -> tuple[RuleFinding, ...]:
        """All findings, suppressed or not: those in each contract, then those on suppressions."""
        return (*(finding for judged in self.contracts for finding in judged.findings), *self.stale)

    @property
    def is_valid(self) -> bool:
        """Return whether no finding counts as an error."""
        return not count(self.findings, Level.ERROR)


def count(findings: Iterable[RuleFinding], level: Level) -> int:
    """Return the number of `findings` of this level that are not suppressed."""
    return sum(finding.counts and finding.level is level for finding in findings)


def validate(
    contracts: Mapping[Path, Sequence[Path]],
    policy: Policy,
    *,
    vocabulary: Vocabulary,
    unrunnable: Callable[[Invariant], str] = lambda clause: "",
    today: datetime.date | None = None,
) -> Validation:
    """Return the findings of the rules in `contracts` under `policy`. Nothing is executed.

    `contracts` maps each path to its files of bindings. A file that can't be read is a finding too.
    `unrunnable` returns the reason why a clause can't be tried as written, or "". `today` is this
    machine's date by default.
    """
    day = today or datetime.date.today()
    judged = []
    for path, bind in contracts.items():
        examined = examine(path, vocabulary=vocabulary, bind=bind, unrunnable=unrunnable)
        aside = policy.suppressions
        findings = judge(examined, levels=policy.levels, suppressions=aside, today=day)
        kind = "" if examined.outline is None else examined.outline.kind
        judged.append(Judged(path=path, contract=examined.contract, kind=kind, findings=findings))
    return Validation(
        contracts=tuple(judged),
        levels=policy.levels,
        stale=stale(
            policy.suppressions,
            [finding for contract in judged for finding in contract.findings],
            paths={str(contract.path): bool(contract.kind) for contract in judged},
            levels=policy.levels,
            today=day,
        ),
    )
