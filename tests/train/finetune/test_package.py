"""The list of a run's files: what it says comes back, and what an attacker writes is refused."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.finetune import package
from entrenar_py.train.finetune.package import Contents, File, ReceivedFiles
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.terms import Part
from tests.fuzz.bad_files import KINDS

CONTENTS = Contents(
    settings={"task": "text"},
    class_weights=(0.1, 3.5),
    samples=File("x.samples", 5, "a" * 64),
    model=(File("config.json", 7, "b" * 64), File("model.safetensors", 9, "c" * 64)),
)


def named(*names: str, **settings: Any) -> bytes:
    """Return a list whose checkpoint has files of these names."""
    files = tuple(File(name, 7, f"{number:064x}") for number, name in enumerate(names))
    return package.dump(replace(CONTENTS, model=files, settings=settings))


def test_what_is_written_is_read() -> None:
    """All of it comes back, floats with every bit."""
    assert package.parse(package.dump(CONTENTS)) == CONTENTS


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "..",
        ".",
        "",
        "/etc/cron.d/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:evil.safetensors",
        ".hidden.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "-rf.safetensors",
        "pytorch_model.bin",
        "model.pkl",
        "model.pt",
        "adapter_config.json",
        "modeling_evil.py",
        "sitecustomize.py",
        "config.json ",
        "é.safetensors",
        "a" * 300 + ".safetensors",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    """No path, no pickle, no code, no hidden file, no odd character: nothing is fetched then."""
    with pytest.raises(UsageError, match="nothing was fetched"):
        package.parse(named("config.json", name))


def test_code_is_named_only_with_the_setting() -> None:
    """Python files may be listed where the run's settings say that the checkpoint has code."""
    assert package.parse(named("modeling_own.py", trust_remote_code=True)).model[0].num_bytes == 7
    for said in (1, "true", None, "yes"):
        with pytest.raises(UsageError, match="nothing was fetched"):
            package.parse(named("modeling_own.py", trust_remote_code=said))
    with pytest.raises(UsageError, match="nothing was fetched"):
        package.parse(named("../evil.py", trust_remote_code=True))


def test_two_names_that_a_file_system_may_take_for_one() -> None:
    """Names that differ in case alone are refused."""
    with pytest.raises(UsageError, match="a file twice"):
        package.parse(named("config.json", "Model.safetensors", "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"settings": []},
        {"class_weights": [float("nan")]},
        {"class_weights": ["1"]},
        {"class_weights": [-1.0]},
        {"model": [{"name": "config.json"}]},
        {"model": [{"name": "config.json", "num_bytes": -1, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": 2**62, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": True, "digest": "b" * 64}]},
        {"model": [{"name": "config.json", "num_bytes": 7, "digest": "../../etc/passwd"}]},
        {"model": [{"name": "config.json", "num_bytes": 7, "digest": "b" * 64, "path": "/"}]},
        {"model": 3},
        {"samples": None},
        {"more": 1},
    ],
)
def test_what_is_no_list_is_refused(change: dict[str, Any]) -> None:
    """Every wrong shape, size and digest has one message."""
    record = json.loads(package.dump(CONTENTS)) | change
    with pytest.raises(UsageError, match="can't be read"):
        package.parse(json.dumps(record).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    """Any bytes are refused with the same message."""
    with pytest.raises(UsageError, match="use one release on both ends"):
        package.parse(data)


def test_one_content_of_two_sizes() -> None:
    """A digest has one size."""
    files = (File("config.json", 7, "b" * 64), File("model.safetensors", 8, "b" * 64))
    with pytest.raises(UsageError, match="two sizes"):
        package.parse(package.dump(replace(CONTENTS, model=files)))


def test_a_list_that_is_too_long() -> None:
    """A checkpoint with too many files for a list is told when the run begins."""
    names = [f"model-{number:05}.safetensors" for number in range(10_000)]
    with pytest.raises(UsageError, match="fewer files"):
        named(*names)


def test_the_files_of_a_package_are_its_contents() -> None:
    """A content that has two names is one file."""
    files = (File("config.json", 7, "b" * 64), File("vocab.json", 7, "b" * 64))
    both = replace(CONTENTS, model=files).files()
    assert [file.digest for file in both] == ["b" * 64, "a" * 64]
    assert Path(both[0].name).name in ("config.json", "vocab.json")


CONTENT = bytes(range(256)) * 40
PIECE = 1000
LONG_S = 60.0


def file_of(content: bytes = CONTENT, name: str = "model.safetensors") -> File:
    """Return the file with this content."""
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def cache_in(
    folder: Path, say: Callable[[str], None] = lambda text: None, *, patience_s: float = LONG_S
) -> ReceivedFiles:
    """Return the cache in this folder."""
    return ReceivedFiles(folder, say, patience_s=patience_s)


class Coordinator:
    """Sends `contents`, each piece at a time; `num_bytes` counts what it sent."""

    def __init__(self, *contents: bytes, after: Callable[[int], None] = lambda sent: None) -> None:
        self.contents = {hashlib.sha256(one).hexdigest(): one for one in contents}
        self.num_bytes = 0
        self._after = after

    async def fetch(
        self, missing: Callable[[], Sequence[Part]], store: Callable[[str, int, Buffer], None]
    ) -> Finish:
        for part in missing():
            for offset in range(part.start, part.num_bytes, PIECE):
                piece = self.contents[part.file][offset : min(offset + PIECE, part.num_bytes)]
                self.num_bytes += len(piece)
                store(part.file, offset, piece)
                self._after(self.num_bytes)
                await asyncio.sleep(0)
        return Finish("completed")


def get(cache: ReceivedFiles, files: Sequence[File], sender: Coordinator) -> Finish | None:
    """Get the files."""
    return asyncio.run(cache.get(files, sender.fetch))


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    """Another worker finds it there, and verifies it."""
    sender, file = Coordinator(CONTENT), file_of()
    for _ in range(2):
        cache = cache_in(tmp_path)
        assert get(cache, [file], sender) is None
        assert cache.path(file).read_bytes() == CONTENT
    assert sender.num_bytes == len(CONTENT)
    assert cache.num_fetched == 0


class Killed(Exception):
    """The process dies."""


def test_a_killed_worker_leaves_what_it_had(tmp_path: Path) -> None:
    """The next one goes on from the byte on that is missing."""

    def die(sent: int) -> None:
        if sent > 4 * PIECE:
            raise Killed

    first = Coordinator(CONTENT, after=die)
    with pytest.raises(Killed):
        get(cache_in(tmp_path), [file_of()], first)
    there = (tmp_path / f"{file_of().digest}.part").stat().st_size
    assert there == 5 * PIECE
    second, told = Coordinator(CONTENT), list[str]()
    assert get(cache_in(tmp_path, told.append), [file_of()], second) is None
    assert second.num_bytes == len(CONTENT) - there
    assert told == [f"fetches 1 files, {len(CONTENT)} bytes; {there} of them are here"]


def test_a_worker_killed_before_the_last_step(tmp_path: Path) -> None:
    """A file that came completely and was not renamed is not fetched again."""
    (tmp_path / f"{file_of().digest}.part").write_bytes(CONTENT)
    sender = Coordinator(CONTENT)
    cache = cache_in(tmp_path)
    assert get(cache, [file_of()], sender) is None
    assert (sender.num_bytes, cache.path(file_of()).read_bytes()) == (0, CONTENT)


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"x" + CONTENT[1:], CONTENT + b"x"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    """A file of another content is found by its hash, told, and fetched again."""
    told, sender = list[str](), Coordinator(CONTENT)
    cache = cache_in(tmp_path, told.append)
    cache.path(file_of()).write_bytes(damage)
    assert get(cache, [file_of()], sender) is None
    assert cache.path(file_of()).read_bytes() == CONTENT
    assert told[0] == f"model.safetensors in {tmp_path} is damaged: it is fetched again"


@pytest.mark.parametrize("part", [b"x" * 2000, b"x" * len(CONTENT), b"x" * 99_999])
def test_a_damaged_part_is_found_at_the_end(tmp_path: Path, part: bytes) -> None:
    """What a part begins with is hashed, too: if it was wrong, all of it comes once more."""
    (tmp_path / f"{file_of().digest}.part").write_bytes(part)
    cache = cache_in(tmp_path)
    assert get(cache, [file_of()], Coordinator(CONTENT)) is None
    assert cache.path(file_of()).read_bytes() == CONTENT


def test_a_coordinator_that_sends_other_bytes(tmp_path: Path) -> None:
    """After the second time the worker gives up, and keeps nothing of it."""
    sender = Coordinator(CONTENT)
    sender.contents[file_of().digest] = b"y" * len(CONTENT)
    cache = cache_in(tmp_path)
    with pytest.raises(SystemFailure, match="sends bytes that don't match SHA-256"):
        get(cache, [file_of()], sender)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_two_workers_share_a_cache(tmp_path: Path) -> None:
    """While one fetches a file the other waits, and then finds it: each byte comes once."""

    async def story() -> None:
        waits, sender = asyncio.Event(), Coordinator(CONTENT, b"second")

        def hear(text: str) -> None:
            if "another worker of this host" in text:
                waits.set()

        async def fetch(missing: Any, store: Any) -> Finish:
            await waits.wait()  # or this one could be done before the other one looks
            return await sender.fetch(missing, store)

        caches = [cache_in(tmp_path, hear) for _ in range(2)]
        files = [file_of(), file_of(b"second", "config.json")]
        got = await asyncio.gather(*(cache.get(files, fetch) for cache in caches))
        assert got == [None, None]
        assert sender.num_bytes == len(CONTENT) + len(b"second")

    asyncio.run(story())


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are fetched, and one line says what is missing."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    told: list[str] = []
    files = [file_of(), file_of(b"second", "config.json")]
    assert get(cache_in(tmp_path, told.append), files, Coordinator(CONTENT, b"second")) is None
    (line,) = [one for one in told if "locks" in one]
    assert "supports no locks (Function not implemented): let only one worker fetch" in line


def test_a_file_that_another_one_finished(tmp_path: Path) -> None:
    """A worker that waits for a lock goes on as soon as it is free."""

    async def story() -> None:
        cache, sender = cache_in(tmp_path), Coordinator(CONTENT)
        handle = os.open(tmp_path / f"{file_of().digest}.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX)
        waiting = asyncio.ensure_future(cache.get([file_of()], sender.fetch))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        cache.path(file_of()).write_bytes(CONTENT)
        os.close(handle)
        assert await waiting is None
        assert sender.num_bytes == 0

    asyncio.run(story())


def test_who_stands_still_with_a_lock_is_named(tmp_path: Path) -> None:
    """A stopped process keeps its locks: a worker waits as long as its patience, and says whose."""
    sender, told = Coordinator(CONTENT), list[str]()
    file = file_of()
    with ExitStack() as held:
        assert cache_in(tmp_path)._lock(file, held)
        finish = get(cache_in(tmp_path, told.append, patience_s=0.3), [file], sender)
        assert finish is not None
        assert finish.status == "failed"
        lock = tmp_path / f"{file.digest}.lock"
        assert f"process {os.getpid()} on " in finish.reason
        assert f"fetches it, and nothing has come for 0.3 s ({lock})" in finish.reason
    assert len(told) == 1
    assert get(cache_in(tmp_path, patience_s=0.3), [file], sender) is None


def test_who_goes_on_with_a_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other one fetches or hashes: while that goes on, patience is not used up."""
    times = itertools.count()  # each look at the clock takes longer than the patience
    monkeypatch.setattr(package, "WAIT_S", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(times)))
    file = file_of()
    lock = tmp_path / f"{file.digest}.lock"

    async def story() -> None:
        holder = cache_in(tmp_path)
        with ExitStack() as held:
            assert holder._lock(file, held)
            os.utime(lock, ns=(0, 0))
            holder._touch()
            assert lock.stat().st_mtime_ns > 0
            waiter = cache_in(tmp_path, patience_s=0.5)
            plain, num_looks = waiter._touched, 0

            def touched(one: File) -> int:
                nonlocal num_looks
                num_looks += 1
                os.utime(lock, ns=(num_looks, num_looks))  # as `_touch` does, in other moments
                if num_looks == 10:
                    held.close()
                return plain(one)

            monkeypatch.setattr(waiter, "_touched", touched)
            assert await waiter.get([file], Coordinator(CONTENT).fetch) is None
            assert num_looks == 10

    asyncio.run(story())


@pytest.mark.parametrize("suffix", ["", ".part", ".lock"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "full"])
def test_what_is_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, suffix: str
) -> None:
    """Whoever may write to the cache can put a pipe there: no worker waits at it for ever."""
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    cache, name = cache_in(Path()), file_of().digest + suffix
    KINDS[kind](Path(name))
    with pytest.raises(UsageError, match=rf"{name} can't be used \("):
        get(cache, [file_of()], Coordinator(CONTENT))


def test_a_refusal_is_passed_on(tmp_path: Path) -> None:
    """If the coordinator refuses, that is the result."""

    async def refuse(*_: object) -> Finish:
        return Finish("failed", "refused: no")

    cache = cache_in(tmp_path)
    assert asyncio.run(cache.get([file_of()], refuse)) == Finish("failed", "refused: no")


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """A part that is a link, which somebody else has put there, is not written through."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    cache = cache_in(tmp_path / "cache")
    (tmp_path / "cache" / f"{file_of().digest}.part").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="can't be used"):
        get(cache, [file_of()], Coordinator(CONTENT))
    assert elsewhere.read_bytes() == b""


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file, and what is free; later it goes on with what has come."""
    cache = cache_in(tmp_path)

    plain, written = os.pwrite, list[int]()

    def nearly_full(handle: int, content: Buffer, offset: int) -> int:
        if memoryview(content).nbytes < PIECE // 3:  # the signature of a lock
            return plain(handle, content, offset)
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(plain(handle, memoryview(content)[: PIECE // 3], offset))
        return written[0]

    monkeypatch.setattr(os, "pwrite", nearly_full)
    name = rf"{file_of().digest}\.part can't be used"
    free = r"No space left on device: [\d,]+ bytes are free there\); make room"
    with pytest.raises(UsageError, match=rf"{name} \({free}.*set XDG_CACHE_HOME"):
        get(cache, [file_of()], Coordinator(CONTENT))
    assert not cache.path(file_of()).exists()
    monkeypatch.undo()
    sender = Coordinator(CONTENT)
    assert get(cache_in(tmp_path), [file_of()], sender) is None
    assert sender.num_bytes == len(CONTENT) - written[0]
    assert cache.path(file_of()).read_bytes() == CONTENT


def test_a_cache_that_can_not_be_made(tmp_path: Path) -> None:
    """A file in the way is told."""
    (tmp_path / "files").write_text("")
    with pytest.raises(UsageError, match="can't be used"):
        cache_in(tmp_path / "files")
