"""The record of a run that only averages: what it tells, and a ledger that can't be written."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.shared.trace.ledger import Reader
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.train.service import ledger_account
from entrenar_py.train.service.averaging_record import AveragingRecord, new_ledger
from entrenar_py.train.service.run_events import Happening, Noted
from entrenar_py.train.wire import effects as do
from tests.train.upstream.averaging import run_of


class FullDisk(Writer):
    """A ledger that can't be written any more."""

    def append(self, events: object) -> None:
        raise OSError(28, "No space left on device")


def test_a_ledger_that_can_not_be_written_ends_the_run(tmp_path: Path) -> None:
    """It is told once, and the run is given up."""
    ledger = new_ledger(tmp_path / "l.jsonl", run_of())
    ledger.__class__ = FullDisk
    record = AveragingRecord(run_of(), ledger=ledger, listeners=())
    given_up: list[str] = []
    record.give_up = given_up.append
    record.notify(do.Left(0, 1, "died"))
    record.notify(do.Left(1, 1, "died"))
    record.close()
    assert given_up == ["the ledger can't be written (No space left on device)"]
    assert record.broken == given_up[0]


def test_everything_is_told_without_a_ledger() -> None:
    """Listeners hear who left and how the run ended."""
    heard: list[Happening] = []
    record = AveragingRecord(run_of(), ledger=None, listeners=[heard.append])
    record.notify(do.Left(0, 1, "died"))
    record.notify(do.Finish("failed", "nobody came"))
    record.close()
    assert heard == [
        Noted(what="left", step=0, text="worker 0 left in step 1: died"),
        Noted(what="failed", step=0, text="nobody came"),
    ]


def test_a_ledger_begins_with_the_run(tmp_path: Path) -> None:
    """Its scenario has the sizes of the configuration, and no trainer."""
    run = run_of(num_samples=30, batch_size=20, num_shards=5)
    new_ledger(tmp_path / "l.jsonl", run).close()
    with (tmp_path / "l.jsonl").open("rb") as file:
        scenario = Reader(file, tmp_path / "l.jsonl").head.scenario
    assert (scenario.workload, scenario.world_size, scenario.num_shards) == ("own", 2, 5)
    assert (scenario.num_samples, scenario.batch_size, scenario.num_steps) == (30, 20, 2)


def test_an_event_that_no_ledger_holds_ends_the_run(tmp_path: Path) -> None:
    """It is not written, and the ledger stays whole."""
    path = tmp_path / "l.jsonl"
    record = AveragingRecord(run_of(), ledger=new_ledger(path, run_of()), listeners=())
    given_up: list[str] = []
    record.give_up = given_up.append
    record.notify(do.Left(0, 2**63, "died"))
    record.close()
    assert given_up == [
        "the ledger can't be written (membership step=9223372036854775808: use a whole number of "
        "at most 63 bits)"
    ]
    assert ledger_account.read(path).num_lines == 1
