"""What a run's processes note of what they save, read back by the harness."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from entrenar_py.check.rank_files import notes

HERE = {"weights": 80, "unreached": "", "library": "", "loads": False, "restarts": False}
LATER = {**HERE, "unreached": "train.py:7", "library": "trainer.py:9"}


def test_an_unseen_step_is_a_problem_only_if_nothing_is_recorded(tmp_path: Path) -> None:
    """A step that takes a closure begins before its passes, and is observed in spite of that."""
    (tmp_path / notes.ASKED).touch()
    notes.write_problem(tmp_path, "SGD stepped too early", notes.UNSEEN)
    assert not notes.problems(tmp_path)
    assert notes.why_nothing(tmp_path) == "SGD stepped too early"
    notes.write_problem(tmp_path, "no torch")
    assert notes.problems(tmp_path) == [notes.why_nothing(tmp_path)] == ["no torch"]


def test_without_notes_nothing_is_known(tmp_path: Path) -> None:
    """A record of another release, or by hand, says nothing of checkpoints."""
    assert notes.saved(tmp_path).traits(is_cut=False) == {}


def test_all_processes_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that one process saves, maybe in the background, is the run's."""
    for pid, saved in ((1, ()), (2, (4, 2, 4))):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        notes.write_save(tmp_path, **HERE)
        for after in saved:
            notes.write_save(tmp_path, after=after)
    traits = notes.saved(tmp_path).traits(is_cut=False)
    told = {name: traits[name] for name in ("saves", "saved_after", "loads", "restarts")}
    assert told == {
        "saves": "weights",
        "saved_after": (2, 4),
        "loads": "nothing",
        "restarts": "nothing",
    }


@pytest.mark.parametrize(
    ("note", "is_cut", "unreached"),
    [
        (HERE, True, ""),
        (LATER, False, "train.py:7"),
        ({**LATER, "unreached": ""}, True, "trainer.py:9"),
        ({**LATER, "unreached": ""}, False, ""),
    ],
)
def test_a_line_that_was_not_reached(
    tmp_path: Path, note: dict[str, object], is_cut: bool, unreached: str
) -> None:
    """A library's line counts only if the harness ended the run before it could be reached."""
    notes.write_save(tmp_path, **note)
    traits = notes.saved(tmp_path).traits(is_cut=is_cut)
    assert (traits["saves"], traits["unreached"]) == ("nothing", unreached)


@pytest.mark.parametrize(
    ("num_values", "saves"), [(20, "weights"), (0, "nothing")], ids=["weights", "a few losses"]
)
def test_a_file_that_is_left_may_be_a_checkpoint(
    tmp_path: Path, num_values: int, saves: str
) -> None:
    """Whatever wrote it: its first bytes and its size tell."""
    notes.write_save(tmp_path, **{**HERE, "weights": 8000})
    path = tmp_path / "root" / "home" / "out"
    path.mkdir(parents=True)
    np.save(path / "a.npy", np.zeros(num_values * 100, np.float32))
    (path / "log.txt").write_text("loss 1\n" * 1000)
    assert notes.saved(tmp_path).traits(is_cut=False)["saves"] == saves


def test_a_note_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A process that dies while it writes loses that note alone."""
    notes.write_save(tmp_path, **HERE)
    (file,) = tmp_path.glob(notes.SAVES)
    file.write_text(file.read_text() + '{"after": 3}\n{"aft')
    assert notes.saved(tmp_path).after == (3,)


@pytest.mark.parametrize(
    ("after", "at", "line"),
    [(3, 5_000, "train.py:12"), (3, 9_000, ""), (0, 5_000, "")],
    ids=["its own", "another file", "saved before the first step"],
)
def test_a_checkpoint_that_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, at: int, line: str
) -> None:
    """A file counts to which weights of a step were saved."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    notes.write_save(tmp_path, **HERE)
    notes.write_save(tmp_path, after=after, file=5_000)
    monkeypatch.setattr(os, "getpid", lambda: 2)
    notes.write_save(tmp_path, loaded=at, line="train.py:12")
    assert notes.saved(tmp_path).read_back == "", "of a process that doesn't train"
    notes.write_save(tmp_path, **HERE)
    assert notes.saved(tmp_path).read_back == line
