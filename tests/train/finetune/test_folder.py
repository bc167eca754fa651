"""Files come into a folder all together, also those in folders of their own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from entrenar_py.shared.errors import SystemFailure
from entrenar_py.train.finetune import outputs


def test_folders_within_are_replaced(tmp_path: Path) -> None:
    """As tokenizers with several chat templates write them; the second export is as the first."""
    for text in ("first", "second"):
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            inner = partial / "additional_chat_templates"
            inner.mkdir()
            (inner / f"{text}.jinja").write_text(text)
            (partial / "config.json").write_text(text)
    (inner,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.read_text() for path in inner.iterdir()] == ["second"]
    assert inner.stat().st_mode & 0o100, "it can be entered"


class Sudden(BaseException):
    """An interrupt, which no library's handler of errors takes."""


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, FULL), ValueError(f"I/O error: {FULL}")])
def test_a_disk_that_fills_in_the_middle(tmp_path: Path, error: Exception) -> None:
    """The message names the file and what is free; the earlier output stays, and a later one comes.

    safetensors and tokenizers have exceptions of their own.
    """

    def export(content: str, problem: BaseException | None) -> None:
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            (partial / "model.safetensors").write_text(content)
            if problem is not None:
                raise problem
            (partial / "config.json").write_text(content)

    export("first", None)
    told = rf"\(model\.safetensors: {FULL}: [\d,]+ bytes are free there\); try again"
    with pytest.raises(SystemFailure, match=told):
        export("second", error)
    with pytest.raises(Sudden):
        export("second", Sudden())
    names = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_text() for name in names] == ["first", "first"]
    export("third", None)
    assert [(tmp_path / name).read_text() for name in names] == ["third", "third"]
