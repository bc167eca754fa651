"""A host that may run for weeks: its memory, ledger, checkpoints and events, and its failures."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.writer import Standing, Writer
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.service.host import Host
from entrenar_py.train.service.run_events import Happening, Noted, StepMade
from entrenar_py.train.wire.effects import Dealt, Finish, Left, Stop
from entrenar_py.train.wire.messages import NonFinite
from tests.train.service.members import Noticed, head_of, host_of, meet, plan_of, record, train

FULL = OSError(errno.ENOSPC, "No space left on device")


class Broken:
    """A ledger on a full disk."""

    path = Path("ledger.jsonl")

    def append(self, events: object) -> None:
        raise FULL

    def sync(self) -> None:
        raise FULL

    def close(self) -> None:
        raise FULL


def notes(heard: list[Happening]) -> list[str]:
    """Return the notes by name."""
    return [one.what for one in heard if isinstance(one, Noted)]


def test_nothing_that_grows_is_kept(tmp_path: Path) -> None:
    """Between two steps all recorded events are in the ledger and none in memory."""
    host = host_of(plan_of())
    record(host, tmp_path / "l")
    hands = meet(host)
    for step in range(4):
        train(hands, [step])
        assert host.server.recorder.drain() == []
        before = (tmp_path / "l").stat().st_size
    host.finish(Finish("completed"))
    assert (tmp_path / "l").stat().st_size > before
    read = trace.load(tmp_path / "l")
    assert [one.step for one in read.of(trace.Update)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(read.of(trace.Shard)) == 4 * host.plan.num_shards
    assert read.end == trace.End(status="completed")


def test_without_a_ledger_nothing_is_kept_either() -> None:
    """Without a ledger recorded events are discarded."""
    host = host_of(plan_of())
    train(meet(host), range(4))
    assert host.server.recorder.drain() == []


def test_every_step_is_told() -> None:
    """Each step is reported with its loss, its workers, and the traffic since the one before."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard)
    host.traffic = lambda: (100 * (1 + len(heard)), 7)
    train(meet(host), range(2))
    first, second = [one for one in heard if isinstance(one, StepMade)]
    assert (first.step, first.num_steps, first.workers) == (0, 4, (0, 1))
    assert (second.bytes_in, second.bytes_out) == (100, 0)
    assert second.loss < first.loss
    assert first.last is not None
    assert notes(heard) == ["joined", "joined"]


def test_who_leaves_is_told_and_recorded(tmp_path: Path) -> None:
    """A departure is in the ledger at once, and survives the death of the process."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard)
    written = record(host, tmp_path / "l")
    meet(host)
    Noticed(host).left(Left(1, 0, "cable cut"))
    assert heard[-1] == Noted(what="left", step=0, text="worker 1 left in step 0: cable cut")
    ledger, standing = _reopened(host, written, tmp_path / "l")
    ledger.close()
    assert standing == Standing(present=(0,), step=0, end=None)


def _reopened(host: Host, written: Writer, path: Path) -> tuple[Writer, Standing]:
    """Reopen the ledger as the next process does, after the end or death of this one."""
    written.close()
    return writer.reopen(path, head_of(host.plan))


def test_a_halt_is_told_and_recorded(tmp_path: Path) -> None:
    """A halt is reported and recorded with its reason."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard)
    record(host, tmp_path / "l")
    said = NonFinite(step=0, shard=0, tensor="w", element=0, loss=1.0, ids=(1,))
    Noticed(host).stop(Stop(0, 1, "because", said))
    host.finish(Finish("halted", "because"))
    assert notes(heard) == ["halted", "halted"]
    read = trace.load(tmp_path / "l")
    assert [one.reason for one in read.of(trace.Halt)] == ["because"]
    assert read.end == trace.End(status="halted", reason="because")


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """Another process restores the state, and ends on the same bits."""
    scenario, path = plan_of(optimizer="adamw"), tmp_path / "c"
    first, straight = host_of(scenario, checkpoint=path), host_of(scenario)
    train(meet(first), range(2))
    first.save(2)
    train(meet(straight), range(4))
    second = host_of(scenario, checkpoint=path)
    assert second.resume() == 2
    train(meet(second, step=2), range(2, 4))
    ours, theirs = second.server, straight.server
    assert ours.replicas.state(ours.replica) == theirs.replicas.state(theirs.replica)


def test_the_state_that_a_run_is_resumed_with_is_shown(tmp_path: Path) -> None:
    """As after the step that made it: what was to be done then may not have been."""
    first = host_of(plan_of(), checkpoint=tmp_path / "c")
    train(meet(first), range(2))
    first.save(2)
    shown = list[int]()
    second = host_of(
        plan_of(), checkpoint=tmp_path / "c", stepped=lambda made, *_: shown.append(made)
    )
    second.resume()
    train(meet(second, step=2), range(2, 4))
    assert shown == [2, 3, 4]


def test_a_state_is_saved_once(tmp_path: Path) -> None:
    """A run that is stopped at a step where it saves anyway writes one checkpoint, not two."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard, checkpoint=tmp_path / "c")
    host.save(0)
    host.save(0)
    assert notes(heard) == ["saved"]


@pytest.mark.parametrize("status", ["failed", "halted"])
def test_a_run_that_can_not_go_on_keeps_its_state(tmp_path: Path, status: str) -> None:
    """A run that failed or was halted saves the steps made until then."""
    host = host_of(plan_of(), checkpoint=tmp_path / "c")
    train(meet(host), range(3))
    host.finish(Finish(status, "because"))
    assert checkpoint.load(tmp_path / "c")[1]["step"] == 3


def test_without_a_place_nothing_is_saved() -> None:
    """Without a checkpoint path saving does nothing."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard)
    host.save(0)
    assert heard == []


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """The message names the field that differs."""
    host = host_of(plan_of(), checkpoint=tmp_path / "c")
    host.save(0)
    other = host_of(plan_of(learning_rate=0.1), checkpoint=tmp_path / "c")
    with pytest.raises(CheckpointError) as caught:
        other.resume()
    assert "saved by a run with learning_rate=0.05, but this run has learning_rate=0.1" in str(
        caught.value
    )


def test_a_checkpoint_that_names_no_run_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a scenario, as of a trainer in one process, is refused."""
    host = host_of(plan_of(), checkpoint=tmp_path / "c")
    checkpoint.save(tmp_path / "c", {}, host.server.replicas.progress(0))
    with pytest.raises(CheckpointError, match="it was saved by a run with trainer=None"):
        host.resume()


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    """A run killed before its first checkpoint starts from the beginning."""
    assert host_of(plan_of(), checkpoint=tmp_path / "c").resume() == 0


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed save is reported, the run goes on, and the next save succeeds."""
    heard: list[Happening] = []
    host = host_of(plan_of(), heard=heard, checkpoint=tmp_path / "c")
    hands = meet(host)
    host.save(0)
    train(hands, [0])

    def fail(*_: object) -> None:
        raise FULL

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", fail)
        host.save(1)
    told = rf"checkpoint {tmp_path}/c: .*No space left on device: [\d,]+ bytes are free there"
    assert re.match(told, str(host.unsaved))
    assert notes(heard)[-2:] == ["saved", "not_saved"]
    assert checkpoint.load(tmp_path / "c")[1]["step"] == 0
    train(hands, [1])
    host.save(2)
    assert host.unsaved is None
    assert checkpoint.load(tmp_path / "c")[1]["step"] == 2


# --- a ledger that can't be written ---------------------------------------------------------------


def test_a_broken_ledger_ends_the_run(tmp_path: Path) -> None:
    """A broken ledger ends the run once, and no checkpoint newer than the ledger is written."""
    reasons: list[str] = []
    host = host_of(plan_of(), checkpoint=tmp_path / "c")
    host.give_up = reasons.append
    host.write_to(Broken(), Standing())  # type: ignore[arg-type]
    train(meet(host), [0])
    host.save(1)
    (reason,) = reasons
    assert reason.startswith("the ledger ledger.jsonl can't be written (No space left on device: ")
    assert reason.endswith(" bytes are free there)")
    assert host.broken == reasons[0]
    assert not (tmp_path / "c").exists()


def test_a_ledger_that_can_not_be_closed_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems write only when a file is closed."""
    host = host_of(plan_of())
    host.write_to(writer.create(tmp_path / "l", head_of(plan_of())), Standing())
    close = Writer.close

    def fails(self: Writer) -> None:
        close(self)
        raise FULL

    monkeypatch.setattr(Writer, "close", fails)
    host.close()
    host.close()
    assert host.ledger_end is None
    assert str(host.broken).startswith("the ledger l can't be written (No space left on device: ")


# --- going on with a ledger -----------------------------------------------------------------------


def test_who_was_there_when_it_died_has_left(tmp_path: Path) -> None:
    """The resumed ledger records the departures of ranks that were present at the death."""
    host = host_of(plan_of())
    written = record(host, tmp_path / "l")
    train(meet(host), range(2))
    again = host_of(plan_of())
    again.write_to(*_reopened(host, written, tmp_path / "l"))
    again.finish(Finish("failed", "nobody came"))
    left = [
        (one.rank, one.step, one.reason) for one in trace.load(tmp_path / "l").of(trace.Membership)
    ]
    assert left == [(rank, 1, "the coordinator died") for rank in (0, 1)]


def test_after_an_end_nobody_was_there(tmp_path: Path) -> None:
    """After an orderly stop no departures are added, and the End event stays in the ledger."""
    host = host_of(plan_of())
    written = record(host, tmp_path / "l")
    train(meet(host), range(2))
    host.finish(Finish("stopped", "by SIGTERM"))
    again = host_of(plan_of())
    again.write_to(*_reopened(host, written, tmp_path / "l"))
    again.finish(Finish("completed"))
    read = trace.load(tmp_path / "l")
    assert read.of(trace.Membership) == []
    assert read.of(trace.End) == [
        trace.End(status="failed", reason="by SIGTERM"),
        trace.End(status="completed"),
    ]


def test_a_run_is_over_once(tmp_path: Path) -> None:
    """Resuming a complete run adds nothing to the ledger."""
    host = host_of(plan_of())
    written = record(host, tmp_path / "l")
    host.finish(Finish("completed"))
    before = (tmp_path / "l").read_bytes()
    again = host_of(plan_of())
    again.write_to(*_reopened(host, written, tmp_path / "l"))
    again.finish(Finish("completed", "it was complete already"))
    assert (tmp_path / "l").read_bytes() == before


def test_a_deal_for_unlike_workers_is_told() -> None:
    """Shares are told if speeds differ; one warning says that there are too few shards."""
    heard: list[Happening] = []
    host = host_of(plan_of(num_shards=3), heard=heard)
    host.notify(Dealt(4, {0: 2, 1: 1}, {0: 0.01, 1: 0.011}))
    assert heard == []
    for step in (5, 6):
        host.notify(Dealt(step, {0: 3, 1: 0}, {0: 0.01, 1: 0.5}))
    assert notes(heard) == ["dealt", "few_shards", "dealt"]
    told = [one.text for one in heard if isinstance(one, Noted)]
    assert (
        told[0] == "shards from step 5 on: 3 to worker 0 (10 ms each), 0 to worker 1 (500 ms each)"
    )
    assert told[1].startswith("num_shards=3 for 2 workers of different speeds")
