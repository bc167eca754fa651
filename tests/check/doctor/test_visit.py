"""`entrenar doctor`: the tables that it prints and the JSON that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.check.doctor import SCHEMA, Examination, Reach, Trainer, reach, visit
from entrenar_py.compute import machine
from entrenar_py.compute.machine import Found

EXAMINED = Examination(
    versions={"torch": "2.0"},
    backends=[
        Found(name="cpu", serves=True, device="x86_64"),
        Found(name="wgpu", serves=False, reason="no adapter"),
    ],
    trainers=[Trainer(system="reference", backends=("cpu",))],
    clauses=[
        Reach(contract="a-v1.yaml", id="F-A-001", name="one", planned=3, can=3),
        Reach(
            contract="a-v1.yaml", id="F-A-002", name="two", planned=2, can=0, lacking=("wgpu (no)",)
        ),
    ],
)


def test_what_is_printed_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables have backends with reasons and clauses with what they lack; so has the JSON."""
    monkeypatch.setattr(visit, "examine", lambda **_: EXAMINED)
    path = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--clauses", "--json", str(path), "--no-color"]) == 0
    text = capsys.readouterr().out
    for expected in ("no adapter", "F-A-001 one", "3 of 3", "wgpu (no)", "1 exercised, 0 partly"):
        assert expected in text
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["schema"] == SCHEMA
    assert [clause["state"] for clause in record["clauses"]] == ["yes", "no"]
    assert record["backends"][1]["reason"] == "no adapter"


def test_without_being_asked_no_clause_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The short examination says how to list the clauses; trainers that are alike share a row."""
    monkeypatch.setattr(machine, "found", lambda: EXAMINED.backends)
    monkeypatch.setattr(machine, "versions", lambda: EXAMINED.versions)
    monkeypatch.setattr(reach, "clauses", pytest.fail)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    assert lines[-1].startswith("entrenar doctor --clauses lists")
    assert any("reference, textbook" in line for line in lines)


def test_a_file_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that can't be written is refused before anything is examined."""
    monkeypatch.setattr(visit, "examine", pytest.fail)
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
