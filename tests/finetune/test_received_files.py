"""The cache of fetched files: verified, gone on with, shared, and told when it can't be written."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from entrenar_py.errors import SystemFailure, UsageError
from entrenar_py.finetune.package import File
from entrenar_py.finetune.received_files import ReceivedFiles
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.package import Part

CONTENT = bytes(range(256)) * 40
PIECE = 1000


def file_of(content: bytes = CONTENT, name: str = "model.safetensors") -> File:
    """Return the file with this content."""
    return File(name, len(content), hashlib.sha256(content).hexdigest())


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
        cache = ReceivedFiles(tmp_path, lambda text: None)
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
        get(ReceivedFiles(tmp_path, lambda text: None), [file_of()], first)
    there = (tmp_path / f"{file_of().digest}.part").stat().st_size
    assert there == 5 * PIECE
    second, told = Coordinator(CONTENT), list[str]()
    assert get(ReceivedFiles(tmp_path, told.append), [file_of()], second) is None
    assert second.num_bytes == len(CONTENT) - there
    assert told == [f"fetches 1 files, {len(CONTENT)} bytes, of which {there} are here"]


def test_a_worker_killed_before_the_last_step(tmp_path: Path) -> None:
    """A file that came completely and was not renamed is not fetched again."""
    (tmp_path / f"{file_of().digest}.part").write_bytes(CONTENT)
    sender = Coordinator(CONTENT)
    cache = ReceivedFiles(tmp_path, lambda text: None)
    assert get(cache, [file_of()], sender) is None
    assert (sender.num_bytes, cache.path(file_of()).read_bytes()) == (0, CONTENT)


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"x" + CONTENT[1:], CONTENT + b"x"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    """A file of another content is found by its hash, told, and fetched again."""
    told, sender = list[str](), Coordinator(CONTENT)
    cache = ReceivedFiles(tmp_path, told.append)
    cache.path(file_of()).write_bytes(damage)
    assert get(cache, [file_of()], sender) is None
    assert cache.path(file_of()).read_bytes() == CONTENT
    assert told[0] == f"model.safetensors in {tmp_path} is damaged: it is fetched again"


@pytest.mark.parametrize("part", [b"x" * 2000, b"x" * len(CONTENT), b"x" * 99_999])
def test_a_damaged_part_is_found_at_the_end(tmp_path: Path, part: bytes) -> None:
    """What a part begins with is hashed, too: if it was wrong, all of it comes once more."""
    (tmp_path / f"{file_of().digest}.part").write_bytes(part)
    cache = ReceivedFiles(tmp_path, lambda text: None)
    assert get(cache, [file_of()], Coordinator(CONTENT)) is None
    assert cache.path(file_of()).read_bytes() == CONTENT


def test_a_coordinator_that_sends_other_bytes(tmp_path: Path) -> None:
    """After the second time the worker gives up, and keeps nothing of it."""
    sender = Coordinator(CONTENT)
    sender.contents[file_of().digest] = b"y" * len(CONTENT)
    cache = ReceivedFiles(tmp_path, lambda text: None)
    with pytest.raises(SystemFailure, match="sends other bytes than those of SHA-256"):
        get(cache, [file_of()], sender)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_two_workers_share_a_cache(tmp_path: Path) -> None:
    """While one fetches a file the other waits, and then finds it: each byte comes once."""

    async def story() -> None:
        told = list[str]()
        sender = Coordinator(CONTENT, b"second")
        caches = [ReceivedFiles(tmp_path, told.append) for _ in range(2)]
        files = [file_of(), file_of(b"second", "config.json")]
        got = await asyncio.gather(*(cache.get(files, sender.fetch) for cache in caches))
        assert got == [None, None]
        assert sender.num_bytes == len(CONTENT) + len(b"second")
        assert any("another worker of this host" in text for text in told)

    asyncio.run(story())


def test_a_file_that_another_one_finished(tmp_path: Path) -> None:
    """A worker that waits for a lock goes on as soon as it is free."""

    async def story() -> None:
        cache, sender = ReceivedFiles(tmp_path, lambda text: None), Coordinator(CONTENT)
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


def test_a_refusal_is_passed_on(tmp_path: Path) -> None:
    """If the coordinator refuses, that is the result."""

    async def refuse(*_: object) -> Finish:
        return Finish("failed", "refused: no")

    cache = ReceivedFiles(tmp_path, lambda text: None)
    assert asyncio.run(cache.get([file_of()], refuse)) == Finish("failed", "refused: no")


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """A part that is a link, which somebody else has put there, is not written through."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    cache = ReceivedFiles(tmp_path / "cache", lambda text: None)
    (tmp_path / "cache" / f"{file_of().digest}.part").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="can't be used"):
        get(cache, [file_of()], Coordinator(CONTENT))
    assert elsewhere.read_bytes() == b""


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the folder and what to do; what has come is kept."""
    cache = ReceivedFiles(tmp_path, lambda text: None)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UsageError, match=r"No space left on device.*set XDG_CACHE_HOME"):
        get(cache, [file_of()], Coordinator(CONTENT))


def test_a_cache_that_can_not_be_made(tmp_path: Path) -> None:
    """A file in the way is told."""
    (tmp_path / "files").write_text("")
    with pytest.raises(UsageError, match="can't be used"):
        ReceivedFiles(tmp_path / "files", lambda text: None)
