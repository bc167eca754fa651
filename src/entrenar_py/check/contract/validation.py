"""Validation: applies the rules to contracts, and says whether these are valid.

It is separate from loading: a finding of a rule stops no run of checks. Nothing is executed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from entrenar_py.check import contract
from entrenar_py.check.contract.clauses import Vocabulary
from entrenar_py.check.contract.records import Contract, Invariant
from entrenar_py.check.contract.rules import (
    BY_ID,
    DEFAULTS,
    FIXED,
    LEVELS,
    NOTE,
    OURS,
    RULES,
    STALE,
    UNREADABLE,
    Breach,
    Level,
    Outline,
    Rule,
    outline,
    resolve,
)
from entrenar_py.shared.config.problems import Position, Problem, Problems
from entrenar_py.shared.errors import UsageError, did_you_mean

KEYS = ("rule", "file", "item", "reason", "until")
FORM = "RULE [in ITEM or FILE] until YYYY-MM-DD: REASON"
_WRITTEN = re.compile(
    r"(?P<rule>\S+)(?:\s+in\s+(?P<where>.+?))?(?:\s+until\s+(?P<until>\S+?))?\s*:\s+(?P<reason>.+)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Suppression:
    """A suppression of findings of `rule`, limited to `file` and `item` if they are given.

    `file` is a name, the end of a path, or a pattern. `item` is a dotted path that also covers what
    is below it, or a pattern. `until` is the last day. `source` describes where the suppression was
    written; `at` is its place if that is a file.
    """

    rule: str
    reason: str
    until: datetime.date
    file: str = ""
    item: str = ""
    source: str = ""
    at: Position | None = None

    def covers_file(self, path: str) -> bool:
        """Return whether it applies to the contract at `path`."""
        if not self.file:
            return True
        posix_path, parts = PurePath(path).as_posix(), PurePath(self.file).parts
        is_end = PurePath(path).parts[-len(parts) :] == parts
        return is_end or any(fnmatchcase(posix_path, f"{start}{self.file}") for start in ("", "*/"))

    def covers(self, rule: str, path: str, item: str) -> bool:
        """Return whether it suppresses a finding of `rule` at `item` of the contract at `path`."""
        if rule != self.rule or not self.covers_file(path):
            return False
        below = item == self.item or item.startswith((f"{self.item}.", f"{self.item}["))
        return not self.item or below or fnmatchcase(item, self.item)

    def is_over(self, today: datetime.date) -> bool:
        """Return whether its last day has passed."""
        return self.until < today

    def __str__(self) -> str:
        where = " and ".join(filter(None, (self.file, self.item)))
        return f"{self.rule}{f' in {where}' if where else ''} until {self.until}"


def read(entry: Mapping[str, Any], *, source: str, at: Position | None = None) -> Suppression:
    """Return the suppression in `entry`, a table of a configuration with the keys KEYS.

    `until` is a date or its text. `source` names the table in messages, `at` is its place. Raises
    UsageError for an unknown key or rule, a rule that can't be suppressed, and a rule, reason or
    day that is missing or of another type.
    """
    for key in entry:
        if key not in KEYS:
            raise UsageError(f"{source}: unknown key {key!r}: {did_you_mean(key, KEYS)}")
    texts = {name: entry.get(name, "") for name in ("rule", "file", "item", "reason")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{source}: {name} = {text!r}: give a text")
    texts = {name: text.strip() for name, text in texts.items()}
    rule = texts["rule"]
    if rule not in BY_ID:
        raise UsageError(f"{source}: rule {rule!r} is unknown: {did_you_mean(rule, BY_ID)}")
    if BY_ID[rule].fixed or rule == STALE:
        raise UsageError(f"{source}: rule {rule} can't be suppressed; correct what breaks it")
    if not texts["reason"]:
        raise UsageError(f"{source}: {rule} has no reason; say why it is suppressed")
    until = _day(entry.get("until"), f"{source}: {rule}")
    return Suppression(**texts, until=until, source=source, at=at)


def parse(text: str) -> Suppression:
    """Return the suppression written in `text` in the form FORM, as on a command line.

    The text after `in` is a file if it ends in .yaml or .yml, else an item. Raises UsageError for a
    text of another form, and for the same errors as `read`.
    """
    source = f"--suppress {text!r}"
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{source}: write {FORM}")
    where = match["where"] or ""
    key = "file" if where.endswith((".yaml", ".yml")) else "item"
    entry = {"rule": match["rule"], key: where, "reason": match["reason"], "until": match["until"]}
    return read(entry, source=source)


def _day(given: Any, what: str) -> datetime.date:
    if given is None:
        raise UsageError(f"{what}: until is missing; give the last day as YYYY-MM-DD")
    if isinstance(given, datetime.date) and not isinstance(given, datetime.datetime):
        return given
    try:
        return datetime.datetime.strptime(str(given), "%Y-%m-%d").date()
    except ValueError:
        raise UsageError(f"{what}: until {given!r} is not a date; write YYYY-MM-DD") from None


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
    resolved = resolve(DEFAULTS, rules or {}, fixed=FIXED, strict=strict)
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
