"""Suppressions: until a last day, and for a given reason, findings of a rule don't count."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from entrenar_py.check.contract.validation.rules import BY_ID, STALE
from entrenar_py.shared.config.problems import Position
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
