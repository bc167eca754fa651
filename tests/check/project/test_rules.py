"""The rules that a project suppresses: read, refused at their place, applied by --validate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.contract.validation.written import KERNEL, written
from tests.command_line import check

TABLE = """\
[tool.entrenar-check]
contract = "c-v1.yaml"
json = "run.json"
suppress = ["SCHEMA-001", "ENTRENAR-001"]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SCHEMA-00X", "--suppress SCHEMA-00X: no such rule: did you mean"),
        ("PV-VAL-001", "--suppress PV-VAL-001: can't be suppressed"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    """A wrong rule is an error at its place."""
    written(tmp_path, KERNEL)
    written(tmp_path, TABLE.replace("SCHEMA-001", name), "pyproject.toml")
    assert check("--validate") == 2
    assert f"pyproject.toml:4:1: error: {message}" in capsys.readouterr().err


def test_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--validate suppresses what is configured, or typed; a run's reports are not overwritten."""
    written(tmp_path, KERNEL.replace("[a paper]", "[]").replace(", if_fails: no division", ""))
    written(tmp_path, TABLE, "pyproject.toml")
    assert check("--validate") == 0
    assert "valid, 2 invariants, 1 warning, 1 note, 1 suppressed" in capsys.readouterr().out
    assert check("--validate", "--suppress", "SCHEMA-009") == 2
    assert check("--validate", "--no-config", "--contract", "c-v1.yaml") == 2
    assert not (tmp_path / "run.json").exists()
