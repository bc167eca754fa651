"""A coordinator's disk fails or loses power: the run goes on from its last checkpoint, bit for bit.

Every moment between two calls that make data durable is tried, with everything that may be left of
un-synced data.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import writer
from entrenar_py.train.service import ledger_account
from entrenar_py.train.service.host import Host
from entrenar_py.train.wire.effects import Finish
from tests.train.service.disk import Cut, Disk, Fate, remains
from tests.train.service.members import head_of, host_of, meet, plan_of, train

STEPS = 3
PLAN = plan_of(num_steps=STEPS)


def trained(folder: Path, disk: Disk | None = None) -> Host:
    """Train in `folder` from its last checkpoint, and save after each step, until the disk fails.

    Raises TraceError for a ledger with which the run can't go on.
    """
    host = host_of(PLAN, checkpoint=folder / "state")
    first = host.resume()
    ledger, standing = writer.reopen(folder / "ledger", head_of(PLAN), since=host.since)
    host.write_to(ledger, standing)
    hands = meet(host, step=first)
    for step in range(first, STEPS):
        train(hands, [step])
        host.save(step + 1)
        if host.broken is not None:
            ledger.close()
            return host
        if disk is not None and host.unsaved is None:
            disk.note()
    host.finish(Finish("completed"))
    return host


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights of an undisturbed run."""
    return trained(tmp_path_factory.mktemp("whole")).digest()


def left(cuts: list[Cut], folder: Path, fates: list[Fate]) -> Iterator[tuple[Path, Cut, Fate]]:
    """Yield a folder for each different thing that the power cuts may leave."""
    known: set[tuple[object, int]] = set()
    for cut in cuts:
        for fate in fates:
            for is_old in (False, True):
                there = folder / str(len(known))
                there.mkdir(exist_ok=True)
                for path in there.iterdir():
                    path.unlink()
                cut.leave(there, fate, is_old=is_old)
                content = tuple(sorted((p.name, p.read_bytes()) for p in there.iterdir()))
                if (content, cut.saved) not in known:
                    known.add((content, cut.saved))
                    yield there, cut, fate


def is_resumed(folder: Path, cut: Cut, whole: str) -> None:
    """Assert that the run goes on in `folder` from the last save, and its ledger is whole."""
    host = host_of(PLAN, checkpoint=folder / "state")
    assert host.resume() >= cut.saved
    assert trained(folder).digest() == whole
    account = ledger_account.read(folder / "ledger")
    assert (list(account.missing()), account.quarrel) == ([], None)


def test_a_power_cut_loses_no_saved_step(tmp_path: Path, whole: str) -> None:
    """Whatever is left of un-synced data, the run goes on from the last save."""
    folder = tmp_path / "run"
    folder.mkdir()
    with Disk(folder).used() as disk:
        trained(folder, disk)
    fates = [Fate.LOST, Fate.WHOLE, Fate.TORN, Fate.ZEROS]
    tried = list(left(disk.cuts, tmp_path, fates))
    assert len(tried) > 4 * STEPS
    assert {cut.saved for _, cut, _ in tried} == set(range(STEPS + 1))
    for there, cut, _ in tried:
        is_resumed(there, cut, whole)


def test_a_hole_in_the_ledger_is_told(tmp_path: Path, whole: str) -> None:
    """If a page is lost and a later one is not, the run doesn't go on with that ledger.

    Without the ledger it goes on from the last save, in a ledger that says what it lacks.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    with Disk(folder).used() as disk:
        trained(folder, disk)
    num_refused = 0
    for there, cut, _ in left(disk.cuts, tmp_path, [Fate.HOLE]):
        try:
            trained(there)
        except TraceError as error:
            assert "ledger" in str(error)  # noqa: PT017
            num_refused += 1
            (there / "ledger").rename(there / "ledger.damaged")
        is_resumed(there, cut, whole)
    assert num_refused > 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("fails_from", range(0, 13, 3))
def test_a_disk_that_fails_and_then_a_power_cut(
    error: int, fails_from: int, tmp_path: Path, whole: str
) -> None:
    """A full, read-only or broken disk ends the run or leaves it without a new checkpoint.

    After a power cut it goes on from the last save that did not fail.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    with Disk(folder, fails_from=fails_from, error=error).used() as disk:
        try:
            host = trained(folder, disk)
        except OSError as failed:
            assert fails_from == 0
            assert failed.errno == error  # noqa: PT017
        else:
            assert "can't be written" in (host.broken or host.unsaved or "")
    for there, cut, _ in left(disk.cuts[-3:], tmp_path, [Fate.LOST, Fate.WHOLE, Fate.TORN]):
        is_resumed(there, cut, whole)


def test_what_remains() -> None:
    """Synced bytes stay, unless the file was truncated and written again."""
    durable, written = b"abcd", b"abcdefgh"
    assert [remains(durable, written, fate) for fate in Fate] == [
        *(b"abcd", b"abcdefgh", b"abcdef", b"abcd\0\0\0\0", b"abcd\0\0gh")
    ]
    assert remains(b"old", b"new!", Fate.TORN) == b"ne"
