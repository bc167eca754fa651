"""--last-failed: what a call leaves, when its runs are used again, and what to run next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.cli import last_failed
from entrenar_py.check.command.run_settings import RunSettings, Turn, answers
from entrenar_py.check.evidence.needs import KILLED, POISONED, RESUMED, turned
from entrenar_py.check.project import command_line
from entrenar_py.check.reports.report import Report, ending
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.verdict import Verdict
from tests.check.reports.conftest import full_report
from tests.command_line import check

TYPED = ("--html", "{contract}.html", "--", "python", "train.py", "--last-failed")


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in a folder with a script and the traces of two runs."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    Path("traces").mkdir()
    for name in ("1-worker", "1-worker-again"):
        Path(f"traces/{name}.jsonl").write_text("{}\n")


def concluded(report: Report, typed: Sequence[str] = TYPED, *folders: str) -> str:
    """Return what to run after a call with this report."""
    options = command_line.configured(command_line.read(typed))
    if options.last_failed:
        options.last = last_failed.read(Path())
    made = [[*Path(name).glob("1-worker*.jsonl")] for name in folders]
    conclude = last_failed.Conclusion(options, typed, made)
    return conclude([report], ending([report], allow_inconclusive=False))


def held() -> Report:
    report = full_report()
    return replace(report, entries=tuple(e for e in report.entries if e.verdict is Verdict.HELD))


def digest() -> str:
    return last_failed.digest(command_line.configured(command_line.read(TYPED)))


def test_a_call_that_falsifies_leaves_its_clauses_and_runs() -> None:
    """The next call with --last-failed repeats the call, with further options.

    Traces of earlier calls in the same folder are not those of this call.
    """
    Path("traces/2-workers-interrupted.jsonl").write_text("{}\n")
    assert concluded(full_report(), TYPED, "traces") == "entrenar-check --last-failed"
    last = last_failed.read(Path())
    assert last is not None
    assert (last.ids, last.digest) == (("F-DP-005",), digest())
    runs = sorted(file.name for file in Path(".entrenar-check/runs").iterdir())
    assert runs == ["1-worker-again.jsonl", "1-worker.jsonl"]
    assert Path(".entrenar-check/.gitignore").read_text() == "*\n"
    again = last_failed.repeated(["--last-failed", "-v"])
    assert again == [*TYPED[:2], "--last-failed", "-v", *TYPED[2:]]
    assert last_failed.repeated(TYPED) == [*TYPED], "an option of the script"


def test_a_clause_that_was_not_judged_stays() -> None:
    """What the next call of the same command holds is removed; the rest is tried once more."""
    concluded(full_report(), TYPED, "traces")
    again = last_failed.repeated(["--last-failed"])
    other = replace(held(), entries=held().entries[:1])
    assert concluded(other, again) == f"entrenar-check {shlex.join(TYPED)}"
    assert last_failed.read(Path()) is not None, "F-DP-005 was not judged"
    report = full_report()
    mended = tuple(replace(e, finding=held().entries[0].finding) for e in report.entries)
    assert concluded(replace(report, entries=mended), again).startswith("entrenar-check --html")
    assert not Path(".entrenar-check").exists()


def test_what_to_run_after_a_call() -> None:
    """`init` stores a command that held; -v shows more of one that is inconclusive."""
    assert concluded(held()) == "entrenar-check init -- python train.py --last-failed"
    assert not Path(".entrenar-check").exists(), "a folder in which nothing broke is left alone"
    report = full_report()
    entries = tuple(e for e in report.entries if e.verdict is Verdict.INCONCLUSIVE)
    told = concluded(replace(report, entries=entries))
    assert told == f"entrenar-check -v {shlex.join(TYPED)}"
    reason = "the run on 1 worker failed: nothing was recorded: exit code 2"
    failed = replace(entries[0], finding=replace(entries[0].finding, reason=reason))
    assert concluded(replace(report, entries=(failed,))) == "python train.py --last-failed"


def test_runs_are_judged_again_only_if_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, variables and settings count; reports, hidden folders and terminals do not."""
    before = digest()
    Path("distributed-training-v1.html").write_text("a report")
    Path(".cache").mkdir()
    Path(".cache/kernel").touch()
    monkeypatch.setenv("COLUMNS", "40")
    assert digest() == before
    monkeypatch.setenv("BATCH", "4")
    changed = digest()
    assert changed != before
    os.utime("train.py", (1, 1))
    assert digest() != changed
    monkeypatch.setattr(last_failed, "FILES_MAX", 2)
    assert digest() == "", "too many files to compare"


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large runs, runs that can't be read, and a call that another user stored."""
    concluded(full_report(), TYPED, "traces")
    options = command_line.configured(command_line.read(TYPED))
    options.last = last_failed.read(Path())
    assert last_failed.kept(options) == {}, "they are no traces"
    monkeypatch.setattr(last_failed, "RUNS_BYTES_MAX", 3)
    concluded(full_report(), TYPED, "traces")
    last = last_failed.read(Path())
    assert last is not None
    assert last.digest == ""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert last_failed.read(Path()) is None


def test_a_folder_without_an_earlier_call(capsys: pytest.CaptureFixture[str]) -> None:
    """--last-failed alone says what to give; with a command it tries everything."""
    assert check("--last-failed") == 2
    assert "no call in this folder is known that falsified a clause" in capsys.readouterr().err
    assert last_failed.repeated(["--last-failed", *TYPED]) == ["--last-failed", *TYPED]


def test_the_runs_with_findings_are_made_again() -> None:
    """A clause may be falsified in a run that a different clause needed."""
    plain = RunSettings(world_size=2, seed=0)
    assert answers(plain) == set()
    nan = Fault(kind="non_finite_gradient", step=1, rank=1, value="nan")
    assert answers(replace(plain, faults=(nan,))) == {POISONED}
    assert answers(replace(plain, faults=(Fault(kind="leave", step=1, rank=1),))) == {KILLED}
    assert answers(replace(plain, stops=(2,), turn=Turn("clip", "1"))) == {RESUMED, turned("clip")}
