"""Rows that are skipped are counted on the screen and listed in the output folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.train.finetune import foresight, outputs, settings_file
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from tests.train.finetune import runs

pytest.importorskip("peft")
pytest.importorskip("transformers")
NUM_BAD = 30


def prepared(small: Path, folder: Path, *, num_bad: int) -> Prepared:
    """Return a run whose file ends with rows of no class."""
    path = runs.configured(folder, small, data={"on_error": "skip"})
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"text": "ls", "label": "fine"}\n' * num_bad)
    return preparation.prepare(settings_file.load(path), folder / "cache")


def test_skipped_rows_are_told_and_listed(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each once, though both parts of the file know of it; the file has all of them."""
    found = prepared(small, tmp_path, num_bad=NUM_BAD)
    foresight.say_rows(found)
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "train: 36 samples",
        "validation: 12 samples",
        "skipped: 30 rows (data.on_error: skip)",
    ]
    assert told[3] == f"  {tmp_path}/rows.jsonl:49: label='fine': classes.labels has safe, unsafe"
    assert told[-1] == "  and 10 more"
    listed = outputs.make_folder(found) / foresight.SKIPPED
    lines = listed.read_text(encoding="utf-8").splitlines()
    places = [line.partition(": ")[0] for line in lines]
    assert places == [f"{tmp_path}/rows.jsonl:{49 + index}" for index in range(NUM_BAD)]


def test_a_list_of_an_earlier_run_goes(small: Path, tmp_path: Path) -> None:
    found = prepared(small, tmp_path, num_bad=0)
    listed = found.settings.output / foresight.SKIPPED
    listed.parent.mkdir()
    listed.write_text("rows.jsonl:1: bad", encoding="utf-8")
    outputs.make_folder(found)
    assert not listed.exists()
