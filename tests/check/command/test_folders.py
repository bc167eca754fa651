"""The folder of a command's runs, and the working folder of each."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from entrenar_py.check import cli
from entrenar_py.check.cli import command_work
from entrenar_py.check.command import folders
from entrenar_py.check.command.folders import OwnFolder
from entrenar_py.check.command.launch import launch
from entrenar_py.check.project import commands
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses.traces import clause

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


def test_a_copy_that_cannot_be_made_is_done_without(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no copy can be made, the command runs in the folder itself, and this is said."""
    (tmp_path / "root").touch()
    with folders.own_folder(project, tmp_path / "root") as own:
        assert own is None
    assert "runs in the folder itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "elsewhere"),
    [(("docker", "run", "x"), True), (("/usr/bin/ssh", "a"), True), (("torchrun", "ssh"), False)],
)
def test_commands_that_run_elsewhere(command: tuple[str, ...], elsewhere: bool) -> None:
    """A container or another machine may not have what the links lead to."""
    assert folders.runs_elsewhere(command) is elsewhere


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
    with folders.temporary() as kept:
        (kept.path / "2-workers.jsonl").write_text("")
        kept.see(entry(verdict, reason.format(kept.path)))
    assert kept.path.exists() is stays
    assert (f"the runs are kept in {kept.path}" in capsys.readouterr().err) is stays


def test_a_folder_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that the user named is kept without a message; contracts share the other one."""
    shared = command_work.Shared()
    assert shared.folder(tmp_path).path == tmp_path
    first = shared.folder(None)
    assert shared.folder(None) is first
    assert shared.folders == [tmp_path, first.path, first.path]
    shared.stack.close()
    assert (tmp_path.exists(), first.path.exists()) == (True, False)
    assert not capsys.readouterr().err


def test_contracts_share_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that two contracts need is launched once."""
    script = "open('times', 'a').write('once '); raise SystemExit(3)"
    two = ("--contract", "distributed-training-v1.yaml", "--contract", "training-integrity-v1.yaml")
    monkeypatch.chdir(tmp_path)
    told = ("--in-place", "--", sys.executable, "-c", script)
    assert cli.main([*two, *told, "{world_size}"]) == 4
    assert (tmp_path / "times").read_text() == "once "
    report = capsys.readouterr()
    assert report.out.count("exit code 3") == 1, "all clauses share the reason"
    assert report.err.count("the runs are kept in") == 1


@pytest.mark.parametrize(
    ("typed", "command", "told"),
    [
        ("--nproc_per_node=2", "--nproc_per_node=2", "stands for the number of workers, instead"),
        ("", "--nproc_per_node=2", "--nproc_per_node={world_size} was added to torchrun"),
    ],
)
def test_the_launchers_own_number_of_workers_is_filled_in(
    typed: str,
    command: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command as it is run today is checked on one worker and on two, and a line says so."""
    launcher = tmp_path / "bin" / "torchrun"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\necho "$@" > ../started\nexit 3\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{launcher.parent}:{os.environ['PATH']}")
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    contract = ("--contract", "distributed-training-v1.yaml", "--in-place")
    assert cli.main([*contract, "--", "torchrun", *typed.split(), "train.py"]) == 4
    assert (tmp_path / "started").read_text() == f"{command} train.py\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("command", ["./train.sh", "sh -c 'torchrun --nproc_per_node=2 a.py'"])
def test_a_number_of_workers_that_cannot_be_filled_in_is_refused_at_once(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing runs, and the message says where {world_size} goes."""
    (tmp_path / "train.sh").touch(0o755)
    monkeypatch.chdir(tmp_path)
    contract = ("--contract", "distributed-training-v1.yaml")
    assert cli.main([*contract, "--", *shlex.split(command)]) == 2
    told = capsys.readouterr().err
    assert (
        "would start the same number of workers in each run, and runs on 2 and 1 are needed: put {w"
        in told
    )


@pytest.mark.parametrize(
    ("command", "is_alone"),
    [
        ("python train.py --lr 0.1", True),
        ("env A=1 /usr/bin/python3 -m train", True),
        ("A=1 ./train.py", True),
        ("python train.py --workers {world_size}", False),
        ("torchrun train.py", False),
        ("python -m torch.distributed.run train.py", False),
        ("./train.sh", False),
        ("sh -c 'python train.py'", False),
    ],
)
def test_a_script_without_a_launcher_is_tried_on_one_worker(command: str, is_alone: bool) -> None:
    """A program that may start workers itself is not: it has to say where their number goes."""
    assert commands.starts_one(shlex.split(command)) is is_alone


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=2 train.py", "on 2 machines"),
        ("torchrun --nnodes 2:4 --nproc-per-node={world_size} train.py", "on 2 machines"),
        ("accelerate launch --num_machines 3 train.py", "on 3 machines"),
        ("torchrun --nnodes=1 --nproc_per_node=2 train.py --nnodes=2", ""),
        ("torchrun --nnodes=1:2 --nproc_per_node=2 train.py", ""),
        ("srun --nodes=2 -n 2 python train.py", ""),
    ],
)
def test_a_launcher_of_one_of_several_machines_is_refused(command: str, told: str) -> None:
    """Each call would start {world_size} workers on its machine; srun starts those of all."""
    words = command.split()
    if not told:
        commands.require_one_machine(words)
        return
    with pytest.raises(UsageError, match=f"{told}.*docs/multi-node.md"):
        commands.require_one_machine(words)
    assert cli.main(["--contract", "distributed-training-v1.yaml", "--", *words]) == 2
