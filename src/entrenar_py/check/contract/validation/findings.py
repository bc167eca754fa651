"""Applies the rules to one contract: findings, their levels, and the suppression of each."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check import contract
from entrenar_py.check.contract.records import Contract, Invariant
from entrenar_py.check.contract.validation.levels import Level
from entrenar_py.check.contract.validation.outline import Outline, outline
from entrenar_py.check.contract.validation.published import Breach
from entrenar_py.check.contract.validation.rules import (
    BY_ID,
    NOTE,
    OURS,
    RULES,
    STALE,
    UNREADABLE,
    Rule,
)
from entrenar_py.check.contract.validation.suppressions import Suppression
from entrenar_py.check.contract.vocabulary import Vocabulary
from entrenar_py.shared.config.problems import Position, Problem, Problems

# Level of a problem from the reader of contracts -> the rule under which it is reported.
_READER = {"error": UNREADABLE, "warning": OURS, "note": NOTE}


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A contract's file and its `problems`: the reader's, and each clause that can't be tried.
    `contract` is None if the reader found an error, `outline` is None if the file has no tree.
    """

    path: Path
    outline: Outline | None
    contract: Contract | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """One breach of `rule`. `at` is None if no file has its place; `item` is a dotted path or "".

    A `suppressed` breach doesn't count. For a stale suppression, `item` is its source.
    """

    rule: Rule
    level: Level
    at: Position | None
    item: str
    message: str
    suppressed: Suppression | None = None

    @property
    def counts(self) -> bool:
        """Return whether the finding has the effect of its level; a suppressed one has none."""
        return self.suppressed is None


def examine(
    path: Path,
    *,
    vocabulary: Vocabulary,
    bind: Sequence[Path],
    unrunnable: Callable[[Invariant], str],
) -> Examined:
    """Read the contract at `path`; its errors are returned as problems, never raised."""
    problems = Problems()
    root, loaded = contract.read(path, vocabulary=vocabulary, problems=problems, bind=bind)
    if any(problem.level == "error" for problem in problems.all):
        loaded = None
    for clause in () if loaded is None else loaded.invariants:
        if why := unrunnable(clause):
            problems.error(clause.position, why)
    seen = None if root is None else outline(root)
    return Examined(path=path, outline=seen, contract=loaded, problems=problems.all)


def judge(
    examined: Examined,
    *,
    levels: Mapping[str, Level],
    suppressions: Sequence[Suppression],
    today: datetime.date,
) -> tuple[RuleFinding, ...]:
    """Return the findings in one contract, in the file's order, but none of rules that are off."""
    active = [suppression for suppression in suppressions if not suppression.is_over(today)]
    path = str(examined.path)

    def finding(rule: Rule, breach: Breach) -> RuleFinding:
        covers = (
            suppression for suppression in active if suppression.covers(rule.id, path, breach.item)
        )
        return RuleFinding(
            rule=rule,
            level=levels[rule.id],
            at=breach.at,
            item=breach.item,
            message=breach.message,
            suppressed=None if rule.fixed else next(covers, None),
        )

    findings = [finding(rule, breach) for rule, breach in _of_rules(examined)]
    findings += [finding(rule, breach) for rule, breach in _of_reader(examined.problems, findings)]
    findings = [each for each in findings if each.level is not Level.OFF]
    return tuple(sorted(findings, key=_order))


def stale(
    suppressions: Sequence[Suppression],
    findings: Sequence[RuleFinding],
    *,
    paths: Mapping[str, bool],
    levels: Mapping[str, Level],
    today: datetime.date,
) -> tuple[RuleFinding, ...]:
    """Return a finding for each suppression that is over or that suppressed none of `findings`.

    `paths` maps each file that was examined to whether rules could be applied to it. Suppressions
    in other files, and of rules that are off, are passed over.
    """
    if levels[STALE] is Level.OFF:
        return ()
    used = {id(finding.suppressed) for finding in findings}
    stale_findings = []
    for suppression in suppressions:
        if levels[suppression.rule] is Level.OFF or not any(map(suppression.covers_file, paths)):
            continue
        if suppression.is_over(today):
            why = f"ended with {suppression.until}, so its findings count again; correct them"
        elif id(suppression) not in used and all(
            paths[path] for path in paths if suppression.covers_file(path)
        ):
            why = "suppresses nothing; remove it"
        else:
            continue
        message = f"the suppression of {suppression} ({suppression.reason}) {why}"
        stale_findings.append(
            RuleFinding(
                rule=BY_ID[STALE],
                level=levels[STALE],
                at=suppression.at,
                item=suppression.source,
                message=message,
            )
        )
    return tuple(stale_findings)


def _of_reader(
    problems: Iterable[Problem], by_rules: Sequence[RuleFinding]
) -> Iterator[tuple[Rule, Breach]]:
    """Yield the problems of the reader, except those that a rule reports at the same line.

    An error is left out only if the rule's finding counts as an error too.
    """
    reported = {_what(finding) for finding in by_rules}
    reported_as_error = {
        _what(finding) for finding in by_rules if finding.level is Level.ERROR and finding.counts
    }
    for problem in problems:
        if (problem.rule, problem.at.line) not in (
            reported_as_error if problem.level == "error" else reported
        ):
            yield (
                BY_ID[_READER[problem.level]],
                Breach(at=problem.at, item="", message=problem.message),
            )


def _what(finding: RuleFinding) -> tuple[str, int]:
    return finding.rule.id, 0 if finding.at is None else finding.at.line


def _order(finding: RuleFinding) -> tuple[Position, str]:
    return finding.at or Position("", 0, 0), finding.rule.id


def _of_rules(examined: Examined) -> Iterator[tuple[Rule, Breach]]:
    if examined.outline is not None:
        for rule in RULES:
            yield from ((rule, breach) for breach in rule.find(examined.outline))
