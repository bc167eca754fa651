"""Levels of rules: defaults, those set by a project, and --strict."""

from __future__ import annotations

import pytest

from entrenar_py.check.contract import validation
from entrenar_py.check.contract.rules import parse
from entrenar_py.check.contract.validation import RULES, Level
from entrenar_py.shared.errors import UsageError


def test_defaults() -> None:
    """Each rule keeps its own level if none is given."""
    assert validation.policy().levels == {rule.id: rule.level for rule in RULES}


def test_given_levels() -> None:
    """A given level applies; `warn` means `warning`, and case does not matter."""
    levels = validation.policy(rules={"SCHEMA-001": "warn", "AUDIT-001": "OFF"}).levels
    assert (levels["SCHEMA-001"], levels["AUDIT-001"]) == (Level.WARNING, Level.OFF)
    assert levels["SCHEMA-002"] is Level.ERROR


def test_strict() -> None:
    """Every warning becomes an error, a given one too; off and info stay."""
    rules = {"SCHEMA-001": "warning", "SCHEMA-009": "info", "SCHEMA-012": "off"}
    levels = validation.policy(rules=rules, strict=True).levels
    assert Level.WARNING not in levels.values()
    assert (levels["SCHEMA-001"], levels["SCHEMA-013"]) == (Level.ERROR, Level.ERROR)
    assert (levels["SCHEMA-009"], levels["SCHEMA-012"]) == (Level.INFO, Level.OFF)
    assert levels["ENTRENAR-002"] is Level.INFO


@pytest.mark.parametrize(
    ("rule", "level", "message"),
    [
        ("AUDIT-01", "off", "rule 'AUDIT-01' is unknown: did you mean 'AUDIT-0"),
        ("SCHEMA-001", "loud", "level 'loud': allowed are off, info, warning, error"),
        ("SCHEMA-001", "warnings", "level 'warnings': did you mean 'warning'?"),
        ("PV-VAL-001", "info", "rule PV-VAL-001 is always error; leave PV-VAL-001=info out"),
    ],
)
def test_refused(rule: str, level: str, message: str) -> None:
    """An unknown rule or level is refused by name, and so is another level for unreadable files."""
    with pytest.raises(UsageError) as refusal:
        validation.policy(rules={rule: level})
    assert message in str(refusal.value)


def test_every_level_can_be_named() -> None:
    """The names of levels are their values."""
    assert [parse(str(level)) for level in Level] == list(Level)
