"""A fine-tuning by stages in virtual time: its options, its record, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check.clauses import CHECKS, fine_tuning
from entrenar_py.check.harness import companions
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Tally
from entrenar_py.train.coordinator.member import Member
from tests.conftest import has_peft

pytestmark = pytest.mark.skipif(not has_peft(), reason="the extra `finetune` is not installed")
TEXT = {"task": "text", "family": "llama"}


def staged(*, options: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    usual: dict[str, Any] = {"num_steps": 1, "options": {**TEXT, **(options or {})}}
    return fine_tuning.planned_stages(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cuts": [[[0, 1], [1, 2]], [[0, 2]]]}, "blocks of 1 workers, not 2"),
        ({"cuts": [[[0, 1], [1, 1]]]}, "has no stage from block 1 on"),
        ({"blocks": 4, "cuts": [[[0, 1], [2, 4]]]}, "has no stage from block 1 on"),
        ({"cuts": [[[0, 1], [1, 2], [0, 1]]]}, "has no stage from block 2 on"),
        ({"cuts": [[0, 1]]}, "use lists of [first, stop] for each worker"),
        ({"cuts": [[[0, 1], [1, 3]]]}, "the model has 2 blocks"),
        ({"cuts": "12"}, "use lists of [first, stop] for each worker"),
        ({"blocks": 0}, "options blocks=0: use a whole number >= 1"),
        ({"facts": ["merged"]}, "options facts='merged' with stages: allowed is gradients"),
        ({"recompute": "all"}, "options recompute='all': allowed are none, blocks"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], problem: str) -> None:
    end = systems.run(staged(options=changes)).end
    assert end.status == "failed"
    assert problem in end.reason


def test_workers_to_spare_are_copies() -> None:
    done = systems.run(staged(world_size=3))
    assert done.end.status == "completed", done.end.reason
    assert {event.rank for event in done.of(trace.Update)} == {0, 1, 2}
    assert {event.rank for event in done.of(trace.Shard)} == {2}  # alone in the last stage


def test_shards_of_a_void_round_are_not_recorded() -> None:
    """The last stage has delivered its own when another one's delivery breaks off."""
    fault = Fault(kind="cut", step=0, rank=0, at="Summed")
    done = systems.run(staged(faults=(fault,)))
    assert [event.shard for event in done.of(trace.Shard)] == [0, 1, 2, 3]


def test_a_worker_with_other_weights_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has moved them by itself; when it comes back it is sent the right ones."""
    plain, struck = Member.make_held, list[int]()

    def moved(self: Member, step: int) -> None:
        if self.rank == 1 and not struck:
            struck.append(step)
            self.held.vector[0] += 1e-3
        plain(self, step)

    right = systems.run(staged(num_steps=2))
    monkeypatch.setattr(Member, "make_held", moved)
    done = systems.run(staged(num_steps=2))
    assert done.end.status == "completed", done.end.reason
    (left,) = [one for one in done.of(trace.Membership) if one.change == "left"]
    assert "rank 1 holds different weights from those that it was sent" in (left.reason or "")
    weights = [
        {update.step: update.weights for update in run.of(trace.Update)} for run in (right, done)
    ]
    assert weights[0] == weights[1]


def test_another_number_of_workers_has_other_places() -> None:
    scenario = staged(options={"cuts": [[[0, 1], [1, 2]]]})
    assert companions.plain(scenario, world_size=1).options == TEXT
    assert companions.plain(scenario).options == scenario.options


def broken(single: Trace, done: Trace) -> tuple[str, int | None]:
    """Return the first difference from one process and its step; ("", None) without any."""
    tally = Tally("F-LP-001")
    fine_tuning._compare_with_one_process(tally, single, done)
    assert tally.compared
    assert tally.missing == []
    return ("", None) if tally.broken is None else (tally.broken.message, tally.broken.step)


def test_each_difference_is_told() -> None:
    """A shard that is lost, and a step that was not made."""
    done = systems.run(staged(num_steps=2))
    (need,) = CHECKS["one_process"].needs
    (alone,) = companions.of([need], done.scenario).of(need)
    single = systems.run(alone)
    assert broken(single, done) == ("", None)

    def without(kind: type[trace.Event], **place: int) -> Trace:
        kept = [
            event
            for event in done.events
            if not isinstance(event, kind)
            or any(getattr(event, name) != value for name, value in place.items())
        ]
        return replace(done, events=tuple(kept))

    lost = "step 1 was made of shards [0, 1, 2], and not of [0, 1, 2, 3]"
    assert broken(single, without(trace.Shard, step=1, shard=3)) == (lost, 1)
    gone = "step 1 was made of shards [], and not of [0, 1, 2, 3]"
    assert broken(single, without(trace.Shard, step=1)) == (gone, 1)
    short = "stages give different bits from one process: steps [1] are in only one run"
    assert broken(single, without(trace.Update, step=1)) == (short, 1)
