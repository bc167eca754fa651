"""A project's levels and suppressions: read, refused at their places, applied by --validate."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from entrenar_py.check.project import configuration
from entrenar_py.shared.errors import ContractError
from tests.check.contract.validation.written import KERNEL, written
from tests.command_line import check

TABLE = """\
[tool.entrenar-check]
contract = "c-v1.yaml"
json = "run.json"

[tool.entrenar-check.rule]
SCHEMA-009 = "info"
ENTRENAR-001 = "off"
ENTRENAR-002 = "off"

[[tool.entrenar-check.suppress]]
rule = "SCHEMA-001"
file = "c-*.yaml"
reason = "the paper is being written"
until = 2999-12-31
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configured(folder: Path, text: str = TABLE) -> Path:
    """Return the path of a configuration with this text."""
    return written(folder, text, "pyproject.toml")


def test_read(tmp_path: Path) -> None:
    """Levels are read by rule, and suppressions with their places."""
    project = configuration.load(configured(tmp_path))
    assert project.levels["SCHEMA-009"] == "info"
    (one,) = project.suppressions
    assert (one.rule, one.file, one.until) == (
        "SCHEMA-001",
        "c-*.yaml",
        datetime.date(2999, 12, 31),
    )
    assert one.at is not None
    assert (one.at.file, one.at.line) == ("pyproject.toml", 10)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "SCHEMA-009",
            "SCHEMA-00X",
            "6:1: error: rule: rule 'SCHEMA-00X' is unknown: did you mean",
        ),
        ('"info"', '"loud"', "6:1: error: rule: level 'loud': allowed are off, info, warning"),
        ('"info"', "3", "6:1: error: rule: level 3: give one of off, info, warning, error"),
        ("SCHEMA-009", "PV-VAL-001", "6:1: error: rule: rule PV-VAL-001 is always error"),
        (
            "file =",
            "fil =",
            "10:23: error: suppress: a suppression: unknown key 'fil': did you mean",
        ),
        ("2999-12-31", '"soon"', "10:23: error: suppress: a suppression: SCHEMA-001: until 'soon'"),
        ('reason = "the paper is being written"', "", "SCHEMA-001 has no reason; say why"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A wrong value is an error at its place."""
    path = configured(tmp_path, TABLE.replace(old, new, 1))
    with pytest.raises(ContractError) as refusal:
        configuration.load(path)
    assert message in str(refusal.value)


def test_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--validate applies both, but typed levels first; a run's reports are not overwritten."""
    written(tmp_path, KERNEL.replace("[a paper]", "[]").replace(", if_fails: no division", ""))
    configured(tmp_path)
    assert check("--validate") == 0
    assert "valid, 2 invariants, 0 warnings, 1 note, 1 suppressed" in capsys.readouterr().out
    assert check("--validate", "--rule", "SCHEMA-009=error") == 2
    assert check("--validate", "--no-config", "--contract", "c-v1.yaml") == 2
    assert not (tmp_path / "run.json").exists()


def test_a_stale_one_is_named_at_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A suppression that suppresses nothing is reported at its place in the configuration."""
    written(tmp_path, KERNEL)
    configured(tmp_path)
    assert check("--validate") == 0
    assert "pyproject.toml:10:23: warning: PV-SUP-001: " in capsys.readouterr().err
    assert check("--validate", "--strict") == 2
