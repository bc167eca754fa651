"""The system `distilled`."""

from __future__ import annotations

from entrenar_py import systems
from entrenar_py.check.clauses import distillation
from entrenar_py.shared.trace import Shard, Sharded, TeacherRow, TurnedAway
from falsification.distillation import distilled
from tests import extras

extras.require("peft")


def test_what_a_run_records() -> None:
    """Rows of all targets, both goes of the stage, and a refusal of each wrong shard."""
    done = systems.run(distilled("samples", "refusals", num_steps=1))
    assert done.end.status == "completed"
    assert len(done.of(Shard)) == 4
    at_once, stopped, resumed = done.of(Sharded)
    assert (stopped.complete, len(stopped.digests), stopped.due) == (False, 1, 3)
    assert at_once.digests == resumed.digests
    assert len({(one.sample, one.position) for one in done.of(TeacherRow)}) > 12
    kinds = {one.what: one.error_kind for one in done.of(TurnedAway)}
    assert list(kinds.items()) == list(distillation.REFUSALS.items())
