"""The system `distilled`, and the probe of a distillation's loss."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check.clauses import teacher_rows
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import Shard, Sharded, Softened, TeacherRow, TurnedAway
from entrenar_py.systems.probes import soft_targets
from falsification.distillation import distilled, soft

pytest.importorskip("peft")


def test_what_a_run_records() -> None:
    """Rows of all targets, both goes of the stage, and a refusal of each wrong shard."""
    done = systems.run(distilled("samples", "refusals", num_steps=1))
    assert done.end.status == "completed"
    assert len(done.of(Shard)) == 4
    at_once, stopped, resumed = done.of(Sharded)
    assert (stopped.complete, len(stopped.digests), stopped.due) == (False, 1, 3)
    assert at_once.digests == resumed.digests
    assert len({(one.sample, one.position) for one in done.of(TeacherRow)}) > 12
    assert [one.what for one in done.of(TurnedAway)] == list(teacher_rows.REFUSALS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 25}, "options top_k=25: use at most vocabulary=24"),
        ({"pairs": 0}, "options pairs=0: use a whole number >= 1"),
        ({"temperatures": []}, r"options temperatures=\[\]: use a list of numbers > 0"),
        ({"alpha": "half"}, "options alpha='half': use a number from 0 to 1"),
        ({"temperatures": [0]}, "options temperatures=0: use a number > 0"),
    ],
)
def test_options_of_the_probe_that_are_none(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        soft_targets.run(soft(**options))


def test_the_probe_computes_the_same_rows_at_each_temperature() -> None:
    one, other = systems.run(soft(pairs=3, temperatures=[1.0, 4.0])).of(Softened)
    assert (one.student, one.teacher, one.tokens) == (other.student, other.teacher, other.tokens)
    assert one.losses != other.losses
