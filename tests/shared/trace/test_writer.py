"""A ledger that grows: readable at any time, continued after any death, never forked."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared import trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.scenario import Scenario, TrainingPlan
from entrenar_py.shared.trace import ledger, writer
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.writer import Standing

SCENARIO = Scenario(system="parameter_server", workload="linear", world_size=2, seed=0)
HEAD = Head(plan=SCENARIO, environment={"torch": "x"})
STARTS = [trace.Start(step=0, rank=rank, weights={}) for rank in (0, 1)]
LEFT = trace.Membership(step=3, rank=1, change="left", reason="cable cut")
END = trace.End(status="completed")


def written(path: Path, *events: trace.Event) -> Path:
    """Write a ledger with these events, and leave it as its writer's death would."""
    one = writer.create(path, HEAD)
    one.append(events)
    one.close()
    return path


def events(path: Path) -> list[trace.Event]:
    """Return the events of a ledger that may not be over."""
    with path.open("rb") as file:
        return list(ledger.Reader(file, path))


def test_it_is_the_file_that_save_writes(tmp_path: Path) -> None:
    """The file equals that of `save` byte for byte, in however many pieces it is written."""
    one = writer.create(tmp_path / "a", HEAD)
    for event in (*STARTS, LEFT, END):
        one.append([event])
    one.sync()
    one.close()
    whole = trace.Trace(
        scenario=SCENARIO, environment={"torch": "x"}, promises=(), events=(*STARTS, LEFT, END)
    )
    trace.save(whole, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_event_has_a_field_of_the_lines_own() -> None:
    """No event has a field `kind` or `chain`, so no line has a key twice."""
    for event in trace.EVENTS.values():
        assert not {"kind", "chain"} & {field.name for field in fields(event)}


def test_it_can_be_read_while_it_grows(tmp_path: Path) -> None:
    """Readers see everything up to the last append."""
    one = writer.create(tmp_path / "l", HEAD)
    one.append(STARTS)
    assert events(tmp_path / "l") == STARTS
    one.append([LEFT])
    assert events(tmp_path / "l") == [*STARTS, LEFT]
    one.close()


def test_where_it_stands(tmp_path: Path) -> None:
    """The standing has the ranks present, the step, and whether the run is over."""
    one, standing = writer.reopen(written(tmp_path / "l", *STARTS, LEFT), HEAD)
    assert standing == Standing(present=(0,), step=3, end=None)
    one.append([END])
    one.close()
    one, standing = writer.reopen(tmp_path / "l", HEAD)
    assert standing == Standing(step=3, end=END)
    one.close()


@given(data=st.data())
def test_killed_at_any_byte(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whole lines stay, a partial one is removed, and new lines continue the chain."""
    path = written(tmp_path_factory.mktemp("ledger") / "l", *STARTS, LEFT)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    one, _ = writer.reopen(path, HEAD)
    one.append([END])
    one.close()
    whole_lines = content[:cut].count(b"\n")
    expected = [*STARTS, LEFT][: max(whole_lines - 1, 0)]
    assert trace.load(path).events == (*expected, END)


def test_a_line_that_was_cut_is_found(tmp_path: Path) -> None:
    """A plain reader reports a partial line by number, with the likely cause."""
    path = written(tmp_path / "l", *STARTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"l:3: .* it is incomplete: its writer may have been"):
        events(path)


def test_there_is_none_yet(tmp_path: Path) -> None:
    """A resumed run without a ledger creates one."""
    one, standing = writer.reopen(tmp_path / "l", HEAD)
    one.append([END])
    one.close()
    assert standing == Standing(is_new=True)
    assert trace.load(tmp_path / "l").events == (END,)


GAP = trace.Gap(step=3, lines=7, digest="0" * 32, reason="lost")


def test_a_new_one_after_a_checkpoint_has_its_gap_at_once(tmp_path: Path) -> None:
    """A process that dies as soon as the file is there leaves one that the next continues."""
    one, standing = writer.reopen(tmp_path / "l", HEAD, since=GAP)
    one.close()
    assert standing == Standing(is_new=True)
    one, standing = writer.reopen(tmp_path / "l", HEAD, since=GAP)
    one.append([END])
    one.close()
    assert not standing.is_new
    assert trace.load(tmp_path / "l").events == (GAP, END)
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


@pytest.mark.parametrize("number", range(4))
def test_its_maker_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """In any of the calls that make it: it is there as a whole, or not at all."""
    left = [number]

    def dies(call: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return call(*arguments)

        return changed

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(writer.Writer, "write", dies(writer.Writer.write))
        patch.setattr(os, "fsync", dies(os.fsync))
        patch.setattr(Path, "replace", dies(Path.replace))
        writer.reopen(tmp_path / "l", HEAD, since=GAP)
    one, standing = writer.reopen(tmp_path / "l", HEAD, since=GAP)
    one.append([END])
    one.close()
    assert standing.is_new == (number < 3)
    assert trace.load(tmp_path / "l").events == (GAP, END)


def test_an_old_one_is_not_overwritten(tmp_path: Path) -> None:
    """A run that starts anew neither overwrites a ledger nor appends to it."""
    before = written(tmp_path / "l", *STARTS).read_bytes()
    with pytest.raises(UsageError, match="it already exists; continue with --resume"):
        writer.create(tmp_path / "l", HEAD)
    assert (tmp_path / "l").read_bytes() == before


def test_one_that_was_edited_is_not_gone_on_with(tmp_path: Path) -> None:
    """An edited ledger is refused with the line, and left unchanged."""
    path = written(tmp_path / "l", *STARTS, LEFT)
    edited = path.read_bytes().replace(b"cable", b"table")
    path.write_bytes(edited)
    with pytest.raises(TraceError, match="l:4: chain digest"):
        writer.reopen(path, HEAD)
    assert path.read_bytes() == edited


def test_one_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    """A ledger of another scenario is refused with the field that differs."""
    other = Head(plan=SCENARIO.with_(seed=1), environment={})
    with pytest.raises(TraceError, match="by a run with seed=0, but this run has seed=1"):
        writer.reopen(written(tmp_path / "l"), other)


def test_a_production_run_is_described_by_its_plan(tmp_path: Path) -> None:
    """Its ledger says nothing of a harness, and is judged as a run of its trainer."""
    plan = TrainingPlan.from_dict(SCENARIO.to_dict())
    one = writer.create(tmp_path / "l", replace(HEAD, plan=plan))
    one.append([END])
    one.close()
    header = (tmp_path / "l").read_text(encoding="utf-8").partition("\n")[0]
    assert not [name for name in ("mutant", "system", "faults", "stops") if name in header]
    assert trace.load(tmp_path / "l").scenario == SCENARIO


def test_a_run_goes_on_with_more_workers_where_they_change_no_bit(tmp_path: Path) -> None:
    """Its ledger is continued; that of another trainer is not."""
    plan = TrainingPlan.from_dict(SCENARIO.to_dict())
    more = plan.with_(world_size=4)
    assert more.run_digest == plan.run_digest != plan.with_(seed=1).run_digest
    writer.reopen(written(tmp_path / "l"), replace(HEAD, plan=more))[0].close()
    ddp = plan.with_(trainer="ddp")
    assert ddp.run_digest == ddp.digest
    writer.create(tmp_path / "m", replace(HEAD, plan=ddp)).close()
    with pytest.raises(TraceError, match="with world_size=2, but this run has world_size=4"):
        writer.reopen(tmp_path / "m", replace(HEAD, plan=ddp.with_(world_size=4)))


def test_a_ledger_of_an_earlier_release_is_gone_on_with(tmp_path: Path) -> None:
    """It begins with a scenario, and is refused if that had more than a plan."""
    plan = TrainingPlan.from_dict(SCENARIO.to_dict())
    writer.reopen(written(tmp_path / "l"), replace(HEAD, plan=plan))[0].close()
    writer.create(tmp_path / "m", replace(HEAD, plan=SCENARIO.with_(mutant="m"))).close()
    with pytest.raises(TraceError, match="with mutant='m', but this run has mutant=None"):
        writer.reopen(tmp_path / "m", replace(HEAD, plan=plan))


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    """A second writer is refused while the first is open."""
    first = writer.create(tmp_path / "l", HEAD)
    with pytest.raises(UsageError, match="another process is writing it; stop that first"):
        writer.reopen(tmp_path / "l", HEAD)
    first.close()
    second, _ = writer.reopen(tmp_path / "l", HEAD)
    second.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger can be written without a lock, too."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    writer.create(tmp_path / "l", HEAD).close()
    writer.reopen(tmp_path / "l", HEAD)[0].close()


def test_a_folder_that_can_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders have no sync the ledger is created; after a failure no file is left."""
    number = errno.EINVAL

    def fail(_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fail)
    writer.create(tmp_path / "l", HEAD).close()
    number = errno.EIO
    with pytest.raises(OSError, match="no"):
        writer.create(tmp_path / "other", HEAD)
    assert not (tmp_path / "other").exists()


def test_where_none_can_be_written(tmp_path: Path) -> None:
    """The message quotes the operating system's."""
    with pytest.raises(UsageError, match=r"can't be made \(No such file or directory\)"):
        writer.create(tmp_path / "absent" / "l", HEAD)
    with pytest.raises(UsageError, match=r"can't be made \(No such file or directory\)"):
        writer.reopen(tmp_path / "absent" / "l", HEAD, since=GAP)
    with pytest.raises(UsageError, match=r"can't be written \(Is a directory\)"):
        writer.reopen(tmp_path, HEAD)


def test_every_line_is_json(tmp_path: Path) -> None:
    """Every line is JSON that other tools can read."""
    path = written(tmp_path / "l", *STARTS, LEFT, END)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["trace", "start", "start", "membership", "end"]
