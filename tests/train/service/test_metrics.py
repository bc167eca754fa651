"""The file of metrics: one JSON object a line, also after its writer was killed."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service.metrics import Metrics
from entrenar_py.train.service.run_events import Noted
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
