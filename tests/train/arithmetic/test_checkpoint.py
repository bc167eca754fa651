"""Checkpoint files: whole or refused, even if the process dies while it writes one."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from entrenar_py.shared.errors import CheckpointError
from entrenar_py.train.arithmetic import checkpoint

PROGRESS = {"step": 3, "epoch": 1, "offset": 12, "rng": {"state": 2**100}, "note": "é"}
ARRAYS: checkpoint.Arrays = {
    "tensors/w": np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32),
    "tensors/b": np.zeros(0, np.float32),
    "optimizer/count": np.array([7.0], np.float32),
    "rng": np.array([2**64 - 1], np.uint64),
}


@pytest.fixture(scope="module")
def content() -> bytes:
    """Return the bytes of a good checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "c"), ARRAYS, PROGRESS)
        return Path(folder, "c").read_bytes()


def _bits(arrays: checkpoint.Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}


def _load(content: bytes) -> tuple[checkpoint.Arrays, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")
        path.write_bytes(content)
        return checkpoint.load(path)


def _refused(content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        _load(content)
    return str(caught.value)


def _signed(payload: bytes) -> bytes:
    """Return a checkpoint of `payload` with a valid digest."""
    return checkpoint.MAGIC + blake3(payload).hexdigest().encode() + b"\n" + payload


def test_a_checkpoint_is_exact(content: bytes) -> None:
    """Load returns every bit of every array, the dtypes, the shapes and the progress."""
    arrays, progress = _load(content)
    assert _bits(arrays) == _bits(ARRAYS)
    assert progress == PROGRESS


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_any_bit_pattern_survives(patterns: list[int]) -> None:
    """NaN payloads, signalling NaNs and subnormals come back unchanged."""
    array = np.array(patterns, np.uint32).view(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "c"), {"w": array}, {})
        loaded, progress = checkpoint.load(Path(folder, "c"))
    assert loaded["w"].tobytes() == array.tobytes()
    assert progress == {}


def test_memory_order_does_not_matter(tmp_path: Path) -> None:
    """Transposed and strided arrays are saved by value."""
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    checkpoint.save(tmp_path / "c", {"t": square.T, "s": square[::2, 1::2]}, {})
    arrays, _ = checkpoint.load(tmp_path / "c")
    assert np.array_equal(arrays["t"], square.T)
    assert np.array_equal(arrays["s"], square[::2, 1::2])


@given(st.data())
def test_truncation_is_refused(content: bytes, data: st.DataObject) -> None:
    """A file cut at any byte is refused."""
    _refused(content[: data.draw(st.integers(0, len(content) - 1))])


@given(st.data())
def test_any_flipped_bit_is_refused(content: bytes, data: st.DataObject) -> None:
    """A flipped bit is refused in the magic, the digest, the header and the values."""
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    _refused(bytes(changed))


@pytest.mark.parametrize("extra", [b"\n", b"\0", b"more"])
def test_appended_bytes_are_refused(content: bytes, extra: bytes) -> None:
    """The digest covers the whole rest."""
    assert "truncated or was changed" in _refused(content + extra)


@pytest.mark.parametrize("content_", [b"", b"\n", b"PK\x03\x04", b"entrenar-checkpoint x\n"])
def test_other_files_are_refused(content_: bytes) -> None:
    """Empty and foreign files are refused."""
    assert "its first line is not a checkpoint's" in _refused(content_)


def test_another_version_is_named(content: bytes) -> None:
    """Whatever follows: nothing of it can be understood."""
    later = content.replace(b"checkpoint 1 ", b"checkpoint 2 ", 1)
    assert "version 2: this release reads version 1; go on with the release" in _refused(later)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"short",
        b"\xff" * 64,
        safetensors.save({"w": np.zeros(2, np.float32)}),
        safetensors.save({"w": np.zeros(2, np.float32)}, {"note": "no progress"}),
        safetensors.save({"w": np.zeros(2, np.float32)}, {"progress": "{"}),
        safetensors.save({"w": np.zeros(2, np.float32)}, {"progress": "3"}),
    ],
)
def test_edited_content_under_a_right_digest_is_refused(payload: bytes) -> None:
    """Edited content with a recomputed digest raises CheckpointError, too."""
    assert "its content is not a checkpoint's" in _refused(_signed(payload))


def test_what_can_not_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file and a folder are refused."""
    with pytest.raises(CheckpointError, match=r"can't be read \(No such file"):
        checkpoint.load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"can't be read \(Is a directory\)"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_crash_while_writing_keeps_the_old_file(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the sync or the rename keeps the old file, and saving works again after it."""
    path = tmp_path / "c"
    checkpoint.save(path, ARRAYS, {"step": 1})

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(*((os, "fsync", crash) if broken == "fsync" else (Path, "replace", crash)))
        with pytest.raises(OSError, match="power cut"):
            checkpoint.save(path, {"w": np.ones(3, np.float32)}, {"step": 2})
    arrays, progress = checkpoint.load(path)
    assert (_bits(arrays), progress) == (_bits(ARRAYS), {"step": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    checkpoint.save(path, {"w": np.ones(3, np.float32)}, {"step": 3})
    assert checkpoint.load(path)[1] == {"step": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_content_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is sync, rename, sync of the folder. Any other could leave an empty file."""
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def logged_sync(descriptor: int) -> None:
        calls.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync")  # noqa: PTH112
        sync(descriptor)

    def logged_rename(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(Path, "replace", logged_rename)
    checkpoint.save(tmp_path / "c", ARRAYS, {})
    assert calls == ["sync", "rename", "sync folder"]


@pytest.mark.parametrize("problem", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_folder_that_can_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """Some file systems sync no folders; the checkpoint is written all the same."""
    sync = os.fsync

    def of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(problem, "no")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    checkpoint.save(tmp_path / "c", ARRAYS, PROGRESS)
    assert checkpoint.load(tmp_path / "c")[1] == PROGRESS


def test_groups_come_apart_as_they_went_together() -> None:
    """Groups come back, also with a slash in a name. A missing group is empty."""
    one, two = {"a/b": np.zeros(1, np.float32)}, {"a": np.ones(1, np.float32)}
    arrays = checkpoint.as_arrays(tensors=one, optimizer=two)
    assert list(arrays) == ["tensors/a/b", "optimizer/a"]
    assert checkpoint.group_of(arrays, "tensors") == one
    assert checkpoint.group_of(arrays, "optimizer") == two
    assert checkpoint.group_of(arrays, "tensor") == {}


def test_progress_is_json(content: bytes) -> None:
    """Other tools can read the payload: safetensors with JSON in its metadata."""
    payload = content.partition(b"\n")[2]
    length = int.from_bytes(payload[:8], "little")
    metadata = json.loads(payload[8 : 8 + length])["__metadata__"]
    assert json.loads(metadata["progress"]) == PROGRESS


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        ({"seed": 2, "options": {"alpha": 4}}, "a run with seed=2, but this run has seed=1"),
        ({"seed": 1, "options": {"alpha": 8}}, "a run with alpha=8, but this run has alpha=4"),
        ({"seed": 1, "options": {}}, "a run with alpha=None, but this run has alpha=4"),
        ({"seed": 1, "options": {"alpha": 4, "r": 2}}, "a run with r=2, but this run has r=None"),
        (None, "a run with seed=None, but this run has seed=1"),
    ],
)
def test_the_checkpoint_of_another_run(noted: object, told: str) -> None:
    """The first difference is named, also one of the plan's options."""
    own = {"seed": 1, "options": {"alpha": 4}}
    checkpoint.require_own(Path("c"), {"plan": own}, own)
    for key in ("plan", "scenario"):
        with pytest.raises(CheckpointError, match=told):
            checkpoint.require_own(Path("c"), {key: noted}, own)


def test_the_checkpoint_of_an_earlier_release() -> None:
    """It notes a scenario, whose faults and mutant must be none."""
    plan = {"trainer": "mesh", "seed": 1}
    noted = {"system": "mesh", "seed": 1, "faults": [], "stops": [], "repeat": 0, "mutant": None}
    checkpoint.require_own(Path("c"), {"scenario": noted}, plan)
    with pytest.raises(CheckpointError, match="with mutant='m', but this run has mutant=None"):
        checkpoint.require_own(Path("c"), {"scenario": {**noted, "mutant": "m"}}, plan)


def test_the_number_of_workers_may_change_where_it_changes_no_bit() -> None:
    """Not with torch's own collectives, and not in a scenario."""
    for key, name in (("trainer", "ddp"), ("trainer", "mesh"), ("system", "parameter_server")):
        plan = {key: name, "world_size": 2}
        with pytest.raises(CheckpointError, match="with world_size=1, but this run has"):
            checkpoint.require_own(Path("c"), {"plan": {**plan, "world_size": 1}}, plan)
    for name in ("parameter_server", "ddp_canonical", "fsdp_canonical"):
        plan = {"trainer": name, "world_size": 2, "seed": 1}
        checkpoint.require_own(Path("c"), {"plan": {**plan, "world_size": 1}}, plan)
        with pytest.raises(CheckpointError, match="with seed=2"):
            checkpoint.require_own(Path("c"), {"plan": {**plan, "seed": 2}}, plan)


NUM_FLOATS = 2**20
NUM_KILLS = 12


class Saver(subprocess.Popen[str]):
    """The process of `tests.train.arithmetic.saver`, which forks those that save."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.train.arithmetic.saver", *map(str, arguments)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def fork(self) -> tuple[int, Iterator[str]]:
        """Return a new process's id, and the lines that it prints."""
        assert self.stdin is not None
        assert self.stdout is not None
        self.stdin.write("\n")
        self.stdin.flush()
        pid = int(self.stdout.readline().removeprefix("pid "))
        return pid, takewhile("ended\n".__ne__, self.stdout)


def require_whole(path: Path, least: int) -> int:
    """Return the step of the checkpoint at `path`; it must be whole and at least step `least`."""
    arrays, progress = checkpoint.load(path)
    step = int(progress["step"])
    assert step >= least
    assert np.array_equal(arrays["w"], np.full(NUM_FLOATS, step, np.float32))
    return step


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_checkpoint(tmp_path: Path) -> None:
    """After a kill at a random time in a save, the old or the new checkpoint is there, whole.

    The moments are drawn over the time that two saves take, so some fall in every part of one.
    """
    path, moments = tmp_path / "c", random.Random(0)
    with Saver(path, NUM_FLOATS) as saver:
        for _ in range(NUM_KILLS):
            pid, lines = saver.fork()
            assert next(lines) == "saving 1\n"
            began = time.monotonic()
            assert next(lines) == "saved 1\n"
            took_s = time.monotonic() - began
            time.sleep(moments.uniform(0, 2 * took_s))  # a moment, not a wait for anything
            os.kill(pid, signal.SIGKILL)
            saved = [1] + [int(line.split()[1]) for line in lines if line.startswith("saved")]
            require_whole(path, max(saved))


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    """A save that does not fit fails with its reason, and only the checkpoint before remains."""
    path = tmp_path / "c"
    with Saver(path, NUM_FLOATS, 2 * NUM_FLOATS) as saver:
        said = [line.strip() for line in saver.fork()[1]]
    assert said[-2:] == ["saving 3", f"failed 3 {errno.EFBIG}"]
    assert require_whole(path, 2) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
