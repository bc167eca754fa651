"""The record of elastic ranks, whoever of them writes it."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import ledger
from entrenar_py.train.arithmetic import checkpoint, sharding
from entrenar_py.train.arithmetic.tensors import TensorSpec
from entrenar_py.train.finetune.strategies.elastic import SharedRecord
from entrenar_py.train.finetune.strategies.record import Made, State
from entrenar_py.train.finetune.strategies.strategy import Step
from entrenar_py.train.finetune.task import LEDGER, METRICS
from entrenar_py.train.service.measures import Memory, Stopwatch
from tests.train.service.members import plan_of

PLAN = plan_of(num_steps=3, world_size=1, num_shards=1)
SPECS = (TensorSpec("w", (2,), "trainable", decayed=True),)
TENSORS = {"w": np.ones(2, np.float32)}


class Run:
    """A run in one folder, whose ranks come one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.refusals = folder, list[str]()
        self._said: dict[str, str] = {}

    @contextmanager
    def writer(self, *, resume: bool = False) -> Iterator[SharedRecord]:
        """Yield the record of the next process that writes, before it begins."""
        record = SharedRecord(
            *(self.folder, PLAN, SPECS),
            backends={0: "cpu"},
            hardware=["a CPU"],
            tensorboard=None,
        )
        is_first = not self._said
        record.share(
            is_writer=lambda: True,
            begun=lambda: not is_first,
            refuse=self.refusals.append,
            since=lambda text: self._said.setdefault("since", text),
        )
        with closing(record):
            record.open(resume=resume or not is_first, is_compiled=False)
            yield record

    def metrics(self, what: str) -> list[dict[str, object]]:
        """Return the metrics' lines of this name."""
        lines = map(json.loads, (self.folder / METRICS).read_text("utf-8").splitlines())
        return [line for line in lines if line["what"] == what]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run that has not begun."""
    return Run(tmp_path)


def state(step: int) -> State:
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), TENSORS)
    position = sharding.Position(0, 0)
    return State(step=step, position=position, tensors=TENSORS, moments=moments, norms=())


def made(number: int) -> tuple[Step, Made]:
    numbers = {"rate": 0.1, "norm": 1.0, "applied_norm": 1.0, "num_tokens": 10}
    result = Made(
        **numbers,  # type: ignore[arg-type]
        losses=[1.0],
        ranks=[0],
        weights=[1.0],
        spike=None,
        memory=Memory(1, None),
    )
    return Step(number=number, epoch=0, shards=((0,),), weight=1.0), result


def end(record: SharedRecord, step: int) -> None:
    """Save and record the end, as the loop does."""
    record.save(state(step))
    record.finish(step, "completed", "", tensors=TENSORS, events=())


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_checkpoint_that_could_not_be_saved_follows_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    """A successor saves it, or dies after that. The end is the last line again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with run.writer() as record:
        record.begin(state(0))
        for number in range(3):
            record.made(*made(number))
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", full)
            end(record, 3)
    last = record
    for death in range(num_deaths):
        with run.writer() as record:
            record.load_state_dict(last.state_dict())
            record.begin(state(3))
            if death < num_deaths - 1:
                record.save(state(3))
            else:
                end(record, 3)
    events = ledger.load(run.folder / LEDGER).events
    kinds = [one.kind for one in events if one.kind in ("saved", "end")]
    assert kinds == ["end", "saved", "end"]
    assert len(run.metrics("completed")) == 1


def test_a_damaged_ledger_is_refused_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only another writer is waited for, which may be ending."""
    with run.writer() as record:
        record.begin(state(0))
        record.made(*made(0))
    path = run.folder / LEDGER
    path.write_bytes(path.read_bytes().replace(b'"loss":1.0', b'"loss":2.0'))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with run.writer() as record, pytest.raises(TraceError, match="chain digest"):
        record.begin(state(1))
    assert len(run.refusals) == 1


def test_a_step_is_timed_once(run: Run) -> None:
    """A writer that begins again, as ranks change, has recorded its last step before."""
    now = [0.0]
    with run.writer() as record:
        record._watch = Stopwatch(lambda: now[0])
        record.begin(state(0))
        for number in range(3):
            now[0] += 2
            record.made(*made(number))
            now[0] += 1  # for the change
            record.begin(state(number + 1))
    steps = run.metrics("step")
    assert [line["steps_per_s"] for line in steps] == [None, *[pytest.approx(1 / 3)] * 2]
    assert [line["tokens_per_s"] for line in steps] == [None, *[pytest.approx(10 / 3)] * 2]
    assert [line["step_ms"] for line in steps] == [2000, 2000, 2000]
