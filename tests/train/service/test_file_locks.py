"""Coordinators never share a file, and report files that they can't write at the start."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service import exit_codes, file_locks
from tests.train.service.cluster import cluster

STATE = {"path": "state", "every_steps": 5}


def claim(path: Path, *, warned: list[str] | None = None) -> None:
    """Take the lock and release it."""
    with file_locks.claimed(path, "checkpoint", warn=(warned if warned is not None else []).append):
        pass


def test_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    """The error names process, host and time. After release the lock is free and its file gone."""
    path = tmp_path / "state"
    host = os.uname().nodename
    with file_locks.claimed(path, "checkpoint", warn=print):
        with pytest.raises(UsageError) as caught:
            claim(path)
        assert f"checkpoint {path}: process {os.getpid()} on {host} (since " in str(caught.value)
        assert "is writing it; stop that first, or give another path" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    claim(path)


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    """After SIGKILL the kernel releases the lock, and the lock file left over does not matter."""
    path, (read, write) = tmp_path / "state", os.pipe()
    child = os.fork()
    if child == 0:
        with file_locks.claimed(path, "checkpoint", warn=print):
            os.write(write, b"!")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(UsageError, match=f"process {child} on "):
        claim(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [one.name for one in tmp_path.iterdir()] == ["state.lock"]
    claim(path)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 900,
        json.dumps({"pid": 1, "host": "\x1b[2J", "since": "2026-01-01 00:00:00"}).encode(),
        json.dumps({"pid": -1, "host": "a", "since": "2026-01-01 00:00:00"}).encode(),
    ],
)
def test_a_lock_that_others_wrote_into(tmp_path: Path, content: bytes) -> None:
    """Untrusted content of the lock file is not printed."""
    (tmp_path / "state.lock").write_bytes(content)
    with (tmp_path / "state.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="state: another process is writing it"):
            claim(tmp_path / "state")


def test_a_lock_that_is_no_file(tmp_path: Path) -> None:
    """A FIFO in place of the lock file is refused without blocking."""
    os.mkfifo(tmp_path / "state.lock")
    with pytest.raises(UsageError, match=r"state\.lock is not a regular file"):
        claim(tmp_path / "state")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on with a warning."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    warned: list[str] = []
    claim(tmp_path / "state", warned=warned)
    assert len(warned) == 1
    assert "its file system supports no locks (No locks available)" in warned[0]


def test_a_lock_that_is_removed_while_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its holder removes the lock file just then, the new file there is locked instead."""
    path, usual, times = tmp_path / "state", fcntl.flock, []

    def late(file: int, operation: int) -> None:
        times.append(file)
        if len(times) == 1:
            (tmp_path / "state.lock").unlink()
        usual(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with file_locks.claimed(path, "checkpoint", warn=print):
        assert len(times) == 2
        with pytest.raises(UsageError, match="is writing it"):
            claim(path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent/state", "can't be written (No such file or directory)"),
        ("secret/state", "can't be written (Not a directory)"),
        (".", "it is a directory"),
        ("pipe", "it is not a regular file"),
        ("x" * 248, "can't be made next to it (File name too long)"),
    ],
)
def test_a_checkpoint_that_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    """The command reports it in one line at the start, and leaves nothing behind."""
    with cluster(tmp_path) as star:
        os.mkfifo(tmp_path / "pipe")
        path = star.configure(checkpoint={**STATE, "path": name}, ledger="ledger.jsonl")
        before = sorted(tmp_path.iterdir())
        assert cli.main(["coordinator", str(path)]) == exit_codes.INVALID
        said = capsys.readouterr().err
        assert problem in said
        assert said.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before


def test_a_file_system_that_is_read_only(tmp_path: Path) -> None:
    """A read-only file system of the kernel is reported like any other."""
    with pytest.raises(UsageError, match="can't be written"):
        claim(Path("/sys/kernel/state"))


def test_two_coordinators_without_a_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused before it listens, however its path is spelled."""
    with cluster(tmp_path) as star:
        first = star.configure(checkpoint=STATE)
        (tmp_path / "link").symlink_to(tmp_path)
        with file_locks.claimed(tmp_path / "state", "checkpoint", warn=print):
            star.configure(checkpoint={**STATE, "path": "link/state"})
            for options in ([], ["--resume"]):
                assert cli.main(["coordinator", str(first), *options]) == exit_codes.INVALID
                assert f"process {os.getpid()} on " in capsys.readouterr().err


def test_one_file_for_two_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two purposes for the same file are refused, because each would destroy the other."""
    with cluster(tmp_path) as star:
        path = star.configure(checkpoint=STATE, ledger="./state")
        assert cli.main(["coordinator", str(path)]) == exit_codes.INVALID
        assert "the checkpoint is the same file; give each its own" in capsys.readouterr().err
