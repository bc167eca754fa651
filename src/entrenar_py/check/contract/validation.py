"""Validation: applies the rules to contracts, and says whether the contracts are valid.

It is separate from loading, because a finding of a rule doesn't stop a run of checks. Nothing is
executed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check import contract
from entrenar_py.check.contract.clauses import Vocabulary
from entrenar_py.check.contract.records import Contract, Invariant
from entrenar_py.check.contract.rules import (
    BY_ID,
    NOTE,
    OURS,
    RULES,
    UNREADABLE,
    Breach,
    Level,
    Outline,
    Rule,
    outline,
)
from entrenar_py.shared.config.problems import Position, Problem, Problems
from entrenar_py.shared.errors import UsageError, did_you_mean

# Level of a problem from the reader of contracts -> the rule that reports it.
_READER = {"error": UNREADABLE, "warning": OURS, "note": NOTE}


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """A place that breaks `rule`.

    `item` is a dotted path or "". If `suppressed`, it doesn't count.
    """

    rule: Rule
    level: Level
    at: Position
    item: str
    message: str
    suppressed: bool


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A contract with its findings. `kind` is the kind it was judged as, "" if it is unreadable."""

    path: Path
    contract: Contract | None
    kind: str
    findings: tuple[RuleFinding, ...]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The findings in all contracts. With `strict`, warnings count as errors."""

    contracts: tuple[Judged, ...]
    strict: bool

    @property
    def findings(self) -> tuple[RuleFinding, ...]:
        """The findings in all contracts, suppressed or not."""
        return tuple(finding for judged in self.contracts for finding in judged.findings)

    @property
    def is_valid(self) -> bool:
        """True if no finding counts as an error."""
        return not count(self.findings, Level.ERROR)


def count(findings: Iterable[RuleFinding], level: Level) -> int:
    """Return the number of `findings` of this level that are not suppressed."""
    return sum(not finding.suppressed and finding.level is level for finding in findings)


def require_suppressible(rules: Iterable[str]) -> None:
    """Raise UsageError for a rule that is unknown or can't be suppressed."""
    for rule in rules:
        if rule not in BY_ID:
            hint = did_you_mean(rule, BY_ID)
            raise UsageError(f"--suppress {rule}: no such rule: {hint}", field="suppress")
        if rule == UNREADABLE:
            problem = "can't be suppressed; correct what it reports"
            raise UsageError(f"--suppress {rule}: {problem}", field="suppress")


def validate(
    contracts: Mapping[Path, Sequence[Path]],
    *,
    vocabulary: Vocabulary,
    suppressed: Collection[str] = (),
    strict: bool = False,
    unrunnable: Callable[[Invariant], str] = lambda clause: "",
) -> Validation:
    """Return the findings of the rules in `contracts`. Nothing is executed.

    `contracts` maps the path of each contract to its files of bindings. A file that can't be read
    is also a finding. Findings of the rules in `suppressed` don't count. With `strict`, every
    warning is an error. `unrunnable` returns the reason why a clause can't be tested as written, or
    "".
    """
    judged = []
    for path, bind in contracts.items():
        problems = Problems()
        root, loaded = contract.read(path, vocabulary=vocabulary, problems=problems, bind=bind)
        if any(problem.level == "error" for problem in problems.all):
            loaded = None
        for clause in () if loaded is None else loaded.invariants:
            if reason := unrunnable(clause):
                problems.error(clause.position, reason)
        seen = None if root is None else outline(root)
        findings = _findings(seen, problems.all, suppressed, strict=strict)
        kind = "" if seen is None else seen.kind
        judged.append(Judged(path=path, contract=loaded, kind=kind, findings=findings))
    return Validation(contracts=tuple(judged), strict=strict)


def _findings(
    seen: Outline | None, problems: Iterable[Problem], suppressed: Collection[str], *, strict: bool
) -> tuple[RuleFinding, ...]:
    """Return the findings in one contract, in the file's order."""

    def finding(rule: Rule, breach: Breach) -> RuleFinding:
        return RuleFinding(
            rule=rule,
            level=level_of(rule, strict=strict),
            at=breach.at,
            item=breach.item,
            message=breach.message,
            suppressed=rule.id in suppressed,
        )

    pairs = [] if seen is None else [(rule, breach) for rule in RULES for breach in rule.find(seen)]
    findings = [finding(rule, breach) for rule, breach in pairs]
    findings += [finding(rule, breach) for rule, breach in _of_reader(problems, findings)]
    return tuple(sorted(findings, key=lambda found: (found.at, found.rule.id)))


def level_of(rule: Rule, *, strict: bool) -> Level:
    """Return the level of the findings of `rule`; with `strict`, an error in place of a warning."""
    return Level.ERROR if strict and rule.level is Level.WARNING else rule.level


def _of_reader(
    problems: Iterable[Problem], by_rules: Sequence[RuleFinding]
) -> Iterator[tuple[Rule, Breach]]:
    """Yield the problems of the reader, except those that a rule reports on the same line.

    An error of the reader is left out only if the rule's finding counts as an error, too.
    """
    reported = {(finding.rule.id, finding.at.line) for finding in by_rules}
    reported_as_error = {
        (finding.rule.id, finding.at.line)
        for finding in by_rules
        if finding.level is Level.ERROR and not finding.suppressed
    }
    for problem in problems:
        known = reported_as_error if problem.level == "error" else reported
        if (problem.rule, problem.at.line) not in known:
            breach = Breach(at=problem.at, item="", message=problem.message)
            yield BY_ID[_READER[problem.level]], breach
