"""The folder in which the runs of a command are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from entrenar_py.command import run_folder
from entrenar_py.reports.report import Entry
from entrenar_py.verdict import Finding, Verdict
from tests.checks.traces import clause


def entry(verdict: Verdict, reason: str) -> Entry:
    """Return the finding of a clause."""
    invariant = clause("parity")
    found = Finding(invariant=invariant.id, verdict=verdict, compared=1, reason=reason)
    return Entry(invariant=invariant, finding=found, num_scenarios=1, num_explored=0, elapsed_s=0.0)


@pytest.mark.parametrize(
    ("verdict", "reason", "stays"),
    [
        (Verdict.HELD, "", False),
        (Verdict.INCONCLUSIVE, "the command has no {{steps}}", False),
        (Verdict.INCONCLUSIVE, "exit code 1 (its output is in {}/output.txt)", True),
        (Verdict.FALSIFIED, "off", True),
    ],
)
def test_a_folder_for_temporary_files(
    verdict: Verdict,
    reason: str,
    stays: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A temporary folder is removed with its runs, or named if a finding refers to them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder.folder(None) as kept:
        (kept.path / "2-workers.jsonl").write_text("")
        kept.see(entry(verdict, reason.format(kept.path)))
    assert kept.path.exists() is stays
    assert (f"the runs are kept in {kept.path}" in capsys.readouterr().err) is stays


def test_a_folder_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that the user named is kept without a message."""
    with run_folder.folder(tmp_path) as kept:
        kept.see(entry(Verdict.HELD, ""))
    assert tmp_path.exists()
    assert not capsys.readouterr().err
