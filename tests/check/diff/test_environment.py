"""What surrounds two runs is compared as texts, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check.diff import environment


def test_commands_files_and_variables_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what differs is named; hidden folders and stored runs are no part of it."""
    for folder in (".git", "good", "lib"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("1")
    (tmp_path / "good" / environment.STORED).touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = environment.of(["python", "a b.py"], tmp_path)
    for folder in (".git", "good", "lib"):
        (tmp_path / folder / "code.py").write_text("2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = environment.differences(before, environment.of(["python", "c.py"], tmp_path))
    assert found.pop("command") == ("python 'a b.py'", "python c.py")
    assert found.pop("variable OMP_NUM_THREADS") == ("1", "2")
    assert found.pop("variable NCCL_DEBUG") == ("", "INFO")
    assert [*found] == ["file lib/code.py"]


def test_secrets_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is printed, and stored in a file that is passed on."""
    secret = ("HF_TOKEN", "NVIDIA_API_KEY", "HF_DATASETS_TOKEN", "TORCH_SECRET", "NCCL_PASSWORD")
    for name in (*secret, "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "told")
    known = environment.of(["python"], tmp_path)
    assert [name for name, text in known.items() if text == "told"] == ["variable HF_HUB_OFFLINE"]
