"""Suppressions: the findings they cover, until when, and findings on stale suppressions."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.contract import Position, validation
from entrenar_py.check.contract.validation import Level, RuleFinding, Suppression
from entrenar_py.shared.errors import UsageError
from tests.check.contract.known import NOTHING
from tests.check.contract.validation.written import KERNEL, TODAY, judged, validated, written

WITHOUT_DIAGNOSES = KERNEL.replace(", if_fails: no division", "").replace(
    ", if_fails: overflow", ""
)
LATER = "2026-12-31"


def parsed(text: str) -> Suppression:
    """Return the suppression that is written as `text`."""
    return validation.parse(text)


def of(findings: tuple[RuleFinding, ...], rule: str) -> list[RuleFinding]:
    """Return the findings of one rule."""
    return [one for one in findings if one.rule.id == rule]


def loud(findings: tuple[RuleFinding, ...]) -> list[RuleFinding]:
    """Return the errors that count."""
    return [one for one in findings if one.counts and one.level is Level.ERROR]


def test_written_on_a_command_line() -> None:
    """The form has rule, item or file, last day and reason."""
    found = parsed("SCHEMA-009 in falsification_tests.T-1 until 2026-12-31: Ann: is at it")
    assert (found.rule, found.item, found.file) == ("SCHEMA-009", "falsification_tests.T-1", "")
    assert (found.until, found.reason) == (datetime.date(2026, 12, 31), "Ann: is at it")
    in_file = parsed("SCHEMA-009 in contracts/a b.yaml until 2026-12-31: because")
    assert (in_file.file, in_file.item) == ("contracts/a b.yaml", "")
    assert str(parsed("SCHEMA-009 until 2026-12-31: because")) == "SCHEMA-009 until 2026-12-31"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SCHEMA-009", "write RULE [in ITEM or FILE] until YYYY-MM-DD: REASON"),
        ("SCHEMA-009 until 2026-12-31:", "write RULE [in"),
        ("SCHEMA-009: because", "until is missing; give the last day"),
        ("SCHEMA-009 until tomorrow: because", "until 'tomorrow' is not a date; write YYYY-MM-DD"),
        ("SCHEMA-009 until 2026-02-30: because", "until '2026-02-30' is not a date"),
        ("SCHEMA-9 until 2026-12-31: because", "rule 'SCHEMA-9' is unknown: did you mean"),
        ("PV-VAL-001 until 2026-12-31: because", "PV-VAL-001 can't be suppressed"),
        ("PV-SUP-001 until 2026-12-31: because", "PV-SUP-001 can't be suppressed"),
    ],
)
def test_refused(text: str, message: str) -> None:
    """A missing or wrong part is named in the error."""
    with pytest.raises(UsageError) as refusal:
        parsed(text)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": "x"}, "unknown key 'rules': did you mean 'rule'?"),
        ({"reason": " "}, "SCHEMA-009 has no reason; say why"),
        ({"reason": 3}, "reason = 3: give a text"),
        ({"until": 3}, "until 3 is not a date"),
        ({"until": None}, "until is missing"),
        ({"until": datetime.datetime(2026, 12, 31, 1, 2)}, "is not a date"),
    ],
)
def test_tables_refused(change: dict[str, Any], message: str) -> None:
    """Tables of a configuration are refused for the same reasons, with their place."""
    table = {"rule": "SCHEMA-009", "reason": "because", "until": LATER} | change
    with pytest.raises(UsageError) as refusal:
        validation.read(table, source="p.toml:3")
    assert str(refusal.value).startswith("p.toml:3: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("where", "num_covered"),
    [
        ("", 2),
        (" in falsification_tests", 2),
        (" in falsification_tests.FALSIFY-1", 1),
        (" in falsification_tests.*.if_fails", 2),
        (" in falsification_tests.FALSIFY", 0),
        (" in c-v1.yaml", 2),
        (" in *-v1.yaml", 2),
        (" in other.yaml", 0),
    ],
)
def test_what_is_covered(tmp_path: Path, where: str, num_covered: int) -> None:
    """A suppression covers a rule, in a file, at an item or below it. The finding stays but is not
    counted.
    """
    path = written(tmp_path, WITHOUT_DIAGNOSES)
    policy = validation.policy(
        suppressed=[parsed(f"SCHEMA-009{where} until {LATER}: because")], strict=True
    )
    found = of(judged(path, policy).findings, "SCHEMA-009")
    assert [one.counts for one in found].count(False) == num_covered
    assert len(found) == 2
    assert all(one.level is Level.ERROR for one in found)


def test_the_verdict_is_of_what_is_left(tmp_path: Path) -> None:
    """A contract is valid if all its errors are suppressed."""
    path = written(tmp_path, KERNEL.replace("[a paper]", "[]"))
    only: dict[str, Any] = {"rules": {"ENTRENAR-001": "off"}}
    assert not validated(path, validation.policy(**only)).is_valid
    aside = [parsed(f"SCHEMA-001 until {LATER}: because")]
    found = validated(path, validation.policy(suppressed=aside, **only))
    (own,) = of(found.findings, "SCHEMA-001")
    assert own.suppressed is aside[0]
    assert found.stale == ()


@pytest.mark.parametrize("quietly", ["suppressed", "warning", "off"])
def test_what_can_not_be_read_is_never_valid(tmp_path: Path, quietly: str) -> None:
    """If a rule on an unreadable part is suppressed, the reader reports the error itself."""
    path = written(tmp_path, KERNEL.replace("1 within eps", "''"))
    assert [one.rule.id for one in loud(judged(path).findings)] == ["SCHEMA-008"]
    policy = validation.policy(rules={"SCHEMA-008": quietly.replace("suppressed", "error")})
    if quietly == "suppressed":
        policy = validation.policy(suppressed=[parsed(f"SCHEMA-008 until {LATER}: because")])
    found = validated(path, policy)
    assert [one.rule.id for one in loud(found.findings)] == ["PV-VAL-001"]
    assert not found.is_valid


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SCHEMA-009 until 2026-11-21: because", "ended with 2026-11-21"),
        ("SCHEMA-009 in falsification_tests.T-9 until 2026-12-31: because", "suppresses nothing"),
        ("SCHEMA-001 until 2026-12-31: because", "suppresses nothing; remove it"),
    ],
)
def test_stale(tmp_path: Path, text: str, why: str) -> None:
    """A suppression that is over or suppresses nothing is a warning; an error under --strict."""
    path = written(tmp_path, WITHOUT_DIAGNOSES)
    for strict, level in ((False, Level.WARNING), (True, Level.ERROR)):
        policy = validation.policy(suppressed=[parsed(text)], strict=strict)
        found = validated(path, policy)
        (stale,) = found.stale
        assert (stale.rule.id, stale.level, stale.item) == (
            "PV-SUP-001",
            level,
            f"--suppress {text!r}",
        )
        assert why in stale.message
        assert all(one.counts for one in found.findings)
    quiet = validation.policy(suppressed=[parsed(text)], rules={"PV-SUP-001": "off"})
    assert validated(path, quiet).stale == ()


def test_of_what_can_not_be_read_nobody_knows(tmp_path: Path) -> None:
    """An unused suppression of a file without a tree is not stale; one that is over is."""
    path = written(tmp_path, "metadata: [")
    for until, num_stale in ((LATER, 0), ("2026-01-01", 1)):
        policy = validation.policy(suppressed=[parsed(f"SCHEMA-009 until {until}: because")])
        assert len(validated(path, policy).stale) == num_stale


def test_the_last_day_counts(tmp_path: Path) -> None:
    """A suppression still applies on its last day."""
    policy = validation.policy(suppressed=[parsed(f"SCHEMA-009 until {TODAY}: because")])
    assert validated(written(tmp_path, WITHOUT_DIAGNOSES), policy).stale == ()


def test_several_contracts(tmp_path: Path) -> None:
    """A suppression is stale if no contract uses it; those for other files are not."""
    paths = [written(tmp_path, KERNEL, "a.yaml"), written(tmp_path, WITHOUT_DIAGNOSES, "b.yaml")]
    at = Position("pyproject.toml", 7, 1)
    tables: list[dict[str, Any]] = [
        {"rule": "SCHEMA-009"},
        {"rule": "SCHEMA-009", "file": "a.yaml"},
        {"rule": "SCHEMA-009", "file": "elsewhere.yaml"},
    ]
    rest = {"reason": "because", "until": datetime.date(2026, 12, 31)}
    aside = [validation.read(one | rest, source="pyproject.toml", at=at) for one in tables]
    policy = validation.policy(suppressed=aside)
    found = validation.validate(dict.fromkeys(paths, ()), policy, vocabulary=NOTHING, today=TODAY)
    assert [one.message for one in found.stale] == [
        "the suppression of SCHEMA-009 in a.yaml until 2026-12-31 (because) suppresses nothing; "
        "remove it"
    ]
    assert found.stale[0].at == at
