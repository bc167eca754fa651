"""Figures in files: JSON lines, and event files that TensorBoard reads."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service.metrics import EventFiles, Metrics
from entrenar_py.train.service.run_events import ClassScored, Noted, Scored
from tests.train.service.happened import made

NOTE = Noted(what="left", step=3, text="worker 1 left")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the file's records."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each(tmp_path: Path) -> None:
    """Each event is a line with all its fields and the time."""
    metrics = Metrics(tmp_path / "m")
    metrics(made(4))
    metrics(NOTE)
    metrics.close()
    step, note = read(tmp_path / "m")
    assert step.pop("time") <= note.pop("time")
    assert step == {
        "what": "step",
        "step": 4,
        "num_steps": 10,
        "loss": 2.25,
        "workers": [0, 2],
        "step_ms": 12.5,
        "exchange_ms": 7.25,
        "reduce_ms": 0.25,
        "steps_per_s": 80.0,
        "bytes_in": 20800,
        "bytes_out": 1234567,
        "last": {"rank": 2, "behind_ms": 3.5},
        "waits_ms": {"0": 4.5, "2": 0.0},
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 2560.0,
        "backends": {"0": "cpu", "2": "wgpu"},
        "memory_bytes": 10**9,
        "device_bytes": None,
    }
    assert note == {"what": "left", "step": 3, "text": "worker 1 left"}


def test_an_empty_file_is_not_left_behind(tmp_path: Path) -> None:
    """A new file that stays empty is removed, one that existed before is kept."""
    Metrics(tmp_path / "m").close()
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").touch()
    Metrics(tmp_path / "m").close()
    assert (tmp_path / "m").exists()


def test_it_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    """New lines are appended, also after a partial line of a killed writer."""
    for _ in range(2):
        metrics = Metrics(tmp_path / "m")
        metrics(NOTE)
        metrics.close()
    assert len(read(tmp_path / "m")) == 2
    content = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(content[:-9])
    metrics = Metrics(tmp_path / "m")
    metrics(NOTE)
    metrics.close()
    last = (tmp_path / "m").read_text().splitlines()[-1]
    assert json.loads(last)["text"] == "worker 1 left"


def test_where_none_can_be_written(tmp_path: Path) -> None:
    """A bad path is reported before anything runs."""
    with pytest.raises(UsageError, match=r"metrics .*: can't be written \(Is a directory\)"):
        Metrics(tmp_path)


class Full:
    """A file on a full disk."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        """Do nothing."""


class Unclosed(Full):
    """A file on a disk that is full when the file is closed."""

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk gives one warning and does not end the run."""
    metrics = Metrics(tmp_path / "m")
    metrics.close()
    metrics._file = Full()  # type: ignore[assignment]
    metrics(NOTE)
    metrics(NOTE)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "can't be written any more (No space left on device); the run goes on" in said


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some file systems write only when a file is closed: that gives the same warning."""
    metrics = Metrics(tmp_path / "m")
    metrics.close()
    metrics._file = Unclosed()  # type: ignore[assignment]
    metrics.close()
    metrics.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "can't be written any more (No space left on device); the run goes on" in said


SCORED = Scored(
    step=2,
    loss=0.5,
    weight=8,
    perplexity=None,
    accuracy=0.75,
    classes=(ClassScored(label="bad\x1b", recall=1.0, precision=None, f1=None),),
    confusion=((1,),),
)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points that TensorBoard would draw, by name."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        name: [(point.step, point.value) for point in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def test_figures_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    files = EventFiles(tmp_path / "new" / "folder")
    for happening in (made(0), made(1, loss=1.5), SCORED, Noted(what="left", step=1, text="")):
        files(happening)
    files.close()
    found = scalars(tmp_path / "new" / "folder")
    assert found["train/loss"] == [(1, 2.25), (2, 1.5)]
    assert found["train/gradient_norm"] == [(1, 0.5), (2, 0.5)]
    assert found["validation/loss"] == [(2, 0.5)]
    assert found["validation/recall/bad\\x1b"] == [(2, 1.0)]
    assert "validation/f1/bad\\x1b" not in found
    assert "memory/device_bytes" not in found


def test_a_resumed_run_hides_what_it_makes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps in ([0, 1, 2], [1, 2]):
        files = EventFiles(tmp_path)
        for step in steps:
            files(made(step))
        files.close()
    assert [point for point, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which extra has it."""
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"needs tensorboard .*; pip install 'tensorboard>="):
        EventFiles(tmp_path)


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--tensorboard .*file/x: can't be made"):
        EventFiles(tmp_path / "file" / "x")


def test_a_full_disk_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk gives one warning."""
    pytest.importorskip("tensorboard")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = EventFiles(tmp_path)
    files._new_writer = full  # type: ignore[assignment]
    files(made(0))
    files(made(1))
    files.close()
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "can't be written any more (No space left on device); the run goes on" in told
