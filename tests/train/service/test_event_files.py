"""TensorBoard reads what a run told."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service.metrics import EventFiles
from entrenar_py.train.service.run_events import ClassScored, Noted, Scored
from tests.train.service.happened import made

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
