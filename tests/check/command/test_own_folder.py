"""A run works in a copy of the user's folder, which it may change as it likes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from entrenar_py.check.command import folders
from entrenar_py.check.command.folders import OwnFolder
from entrenar_py.check.command.launch import launch
from entrenar_py.shared.errors import SystemFailure

REMEMBERS = (
    "import os, pathlib; note = pathlib.Path('out/note.txt'); note.parent.mkdir(exist_ok=True); "
    "note.write_text((note.read_text() if note.exists() else '') + 'x'); "
    "print(note.read_text(), os.environ['PWD'] == os.getcwd(), open('../beside.txt').read())"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "home/project"
    for folder in ("conf", "data", ".git", ".venv", "env/bin"):
        (project / folder).mkdir(parents=True)
    (project / "env/pyvenv.cfg").touch()
    (project / "train.py").write_text("print('here')")
    (project / "train.sh").write_text("#!/bin/sh\necho here")
    (project / "train.sh").chmod(0o755)
    (project / "conf/model.yaml").write_text("width: 8")
    (project / "latest").symlink_to("conf/model.yaml")
    (project.parent / "beside.txt").write_text("beside")
    return project


def made(project: Path, root: Path) -> OwnFolder:
    own = OwnFolder(project, root)
    own.make()
    return own


def test_every_run_finds_the_folder_as_the_user_left_it(project: Path, tmp_path: Path) -> None:
    """A run does not see the files of another, and the user's folder stays as it is."""
    before = sorted(project.rglob("*"))
    for name in ("one", "two"):
        with folders.own_folder(project, tmp_path / name / "root") as own:
            assert own is not None
            ended = own.launched(launch)(
                [sys.executable, "-c", REMEMBERS],
                folder=tmp_path / name,
                variables={},
                deadline_s=60.0,
            )
        assert ended.tail == ("x True beside",)
        left = [file for file in (tmp_path / name / "root").rglob("*") if not file.is_dir()]
        assert [file.name for file in left] == ["note.txt"], "only what the run has made is kept"
    assert sorted(project.rglob("*")) == before


def test_the_copy_is_the_folder(project: Path, tmp_path: Path) -> None:
    """Files are copied with mode and time, and a large folder or environment is a link."""
    own = made(project, tmp_path / "root")
    here = own.path
    assert here.name == project.name
    assert (here / "conf").is_dir()
    assert not (here / "conf").is_symlink()
    assert (here / "latest").read_text() == "width: 8"
    links = sorted(entry.name for entry in here.iterdir() if entry.is_symlink())
    assert links == [".git", ".venv", "env", "latest"]
    assert (here / "train.py").stat().st_mtime_ns == (project / "train.py").stat().st_mtime_ns
    assert subprocess.run([here / "train.sh"], capture_output=True, check=True).stdout == b"here\n"
    (here / "conf/model.yaml").write_text("width: 16")
    assert (project / "conf/model.yaml").read_text() == "width: 8"


def test_large_files_and_folders_are_links(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too large to copy for every run is read through a link."""
    monkeypatch.setattr(folders, "FILE_BYTES_MAX", 10)
    monkeypatch.setattr(folders, "FOLDER_ENTRIES_MAX", 2)
    for number in range(3):
        (project / f"data/{number}.bin").write_bytes(bytes(number))
    (project / "conf/large.bin").write_bytes(bytes(11))
    here = made(project, tmp_path / "root").path
    assert (here / "data").is_symlink()
    assert (here / "conf/large.bin").is_symlink()
    assert not (here / "conf/model.yaml").is_symlink()


def test_a_run_folder_inside_of_the_users_is_no_part_of_the_copy(project: Path) -> None:
    """The folder of the runs may lie in the folder that is copied."""
    own = made(project, project / "runs/2-workers/root")
    assert not (own.path / "runs").exists()
    own.clear()
    assert not own.root.exists()


def test_a_run_folder_that_a_link_leads_to_is_no_part_of_the_copy(
    project: Path, tmp_path: Path
) -> None:
    """However the user names it, or the project."""
    (tmp_path / "link").symlink_to(project)
    for source, root in ((project, tmp_path / "link"), (tmp_path / "link", project)):
        own = made(source, root / "runs/2-workers/root")
        assert (own.path / "train.py").exists()
        assert not (own.path / "runs").exists()
        own.clear()
        assert not own.root.exists()


def test_a_checkpoint_is_copied_before_large_data(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that a run doesn't overwrite it; a change through a link is told, once for all runs."""
    for name, size in (("data/a", 60), ("data/b", 80), ("out/last.pt", 90), ("train.log", 5)):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_bytes(bytes(size))
    monkeypatch.setattr(folders, "_Budget", partial(folders._Budget, bytes=200))
    for run in ("one", "two"):
        own = made(project, tmp_path / run / "root")
        assert (own.path / "data/b").is_symlink()
        for name in ("data/a", "out/last.pt", "train.log", "data/b"):
            (own.path / name).write_bytes(b"x" * 80)
        own.clear()
    assert (project / "out/last.pt").stat().st_size == 90
    told = capsys.readouterr().err
    assert told.startswith(f"{project / 'data/b'}: changed while the command ran")
    assert told.count("\n") == 1


def test_files_that_vanish_are_left_out(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may remove temporary files and folders while the copy is made."""
    listed = folders._entries

    def entries(folder: Path) -> list[os.DirEntry[str]]:
        found = listed(folder)
        for entry in found:
            if entry.name == "data":
                Path(entry.path).rmdir()
            elif entry.name == "model.yaml":
                Path(entry.path).unlink()
        return found

    monkeypatch.setattr(folders, "_entries", entries)
    here = made(project, tmp_path / "root").path
    assert not os.path.lexists(here / "data")
    assert [*(here / "conf").iterdir()] == []
    assert (here / "train.py").exists()


def test_a_copy_that_cannot_be_made(project: Path, tmp_path: Path) -> None:
    """The command isn't run in the folder itself instead: only the user may allow that."""
    (tmp_path / "root").touch()
    with (
        pytest.raises(SystemFailure, match=r"no copy .* --in-place"),
        folders.own_folder(project, tmp_path / "root"),
    ):
        pass


@pytest.mark.parametrize(
    ("command", "elsewhere"),
    [
        ("docker run x", True),
        ("/usr/bin/ssh a", True),
        ("torchrun ssh", False),
        ("env NCCL_DEBUG=INFO srun train.sh", True),
        ("sudo -u me nice -n 10 time -p docker run x", True),
        ("env -u A B=ssh torchrun srun", False),
        ("env A=1", False),
    ],
)
def test_commands_that_run_elsewhere(command: str, elsewhere: bool) -> None:
    """A container or another machine may not have what the links lead to."""
    assert folders.runs_elsewhere(command.split()) is elsewhere
