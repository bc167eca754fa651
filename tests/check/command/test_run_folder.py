"""The folder in which the runs of a command are kept."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from entrenar_py.check import cli
from entrenar_py.check.cli import command_work
from entrenar_py.check.command import folders
from entrenar_py.check.project import commands
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.verdict import Finding, Verdict
from tests.traces import clause


def entry(verdict: Verdict, reason: str) -> Entry:
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


def test_traces_of_an_earlier_call_are_removed(tmp_path: Path) -> None:
    """They may be of another script. Whatever isn't surely such a trace stays."""
    for name in ("2-workers", "2-workers-interrupted", "exp1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "output.txt").touch()
    for name in ("2-workers", "2-workers-interrupted", "exp1", "2-workers-before"):
        (tmp_path / f"{name}.jsonl").touch()
    shared = command_work.Shared()
    shared.folder(tmp_path)
    assert sorted(file.stem for file in tmp_path.glob("*.jsonl")) == ["2-workers-before", "exp1"]
    (tmp_path / "2-workers.jsonl").touch()
    shared.folder(tmp_path)
    assert (tmp_path / "2-workers.jsonl").exists(), "it is of this call"


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
        (
            "--nproc_per_node=2",
            "--standalone --nproc_per_node=2",
            "stands for the number of workers, instead",
        ),
        (
            "",
            "--standalone --nproc_per_node=2",
            "--nproc_per_node={world_size} was added to torchrun",
        ),
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
    (folder / "train.py").touch()
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
