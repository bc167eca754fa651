"""Clauses of elastic training, on a run of two ranks that is written by hand from its oracle.

Rank 1 dies in step 1, which rank 0 then makes alone; another process of rank 1 joins before step 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS, elastic
from entrenar_py.check.evidence.needs import ORACLE, Runs
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Event, Grouped, Halt, Injected, Shard, Start, Trace, Update
from tests import traces
from tests.traces import falsified, held, left_open

KILL = Fault(kind="kill", rank=1, step=1, at="Exchange")
SUBJECT = elastic.plan_scenario(KILL, world_size=2, num_shards=4, num_steps=5)
NAMES = [name for name, check in CHECKS.items() if check.id.startswith("F-EL")]
Change = Callable[[list[Event]], list[Event]]


def oracle() -> Trace:
    """Return the run of the plain loop."""
    ((scenario,),) = companions.of((ORACLE,), SUBJECT).beside.values()
    return traces.run(scenario)


def grouped(generation: int, step: int, rank: int, **fields: Any) -> Grouped:
    """Return the beginning of a stay, with the state before `step`."""
    before = next((one for one in oracle().of(Update) if one.step == step - 1), None)
    state = before or oracle().of(Start)[0]
    usual: dict[str, Any] = {
        "process": 1,
        "members": (0, 1),
        "received": False,
        "waited_s": None,
        "weights": state.weights,
        "optimizer": state.optimizer,
        "extra": state.extra,
        "progress": {"schedule": step},
    }
    fields = {**usual, **fields}
    return Grouped(generation=generation, step=step, rank=rank, **fields)


def computed(step: int, rank: int, shards: Sequence[int]) -> Iterator[Shard]:
    """Yield the records of micro-batches."""
    for shard in oracle().of(Shard):
        if shard.step == step and shard.shard in shards:
            yield replace(shard, rank=rank)


def made(step: int, rank: int, shards: Sequence[int]) -> Iterator[Event]:
    """Yield the records of micro-batches, and of the step that is made of them."""
    yield from computed(step, rank, shards)
    yield next(replace(one, rank=rank) for one in oracle().of(Update) if one.step == step)


def rank_0() -> Iterator[Event]:
    yield grouped(0, 0, 0)
    yield from made(0, 0, (0, 1))
    yield from computed(1, 0, (0, 1))
    yield grouped(1, 1, 0, members=(0,), waited_s=0.1)
    for step in (1, 2):
        yield from made(step, 0, range(4))
    yield grouped(2, 3, 0, waited_s=0.1)
    for step in (3, 4):
        yield from made(step, 0, (0, 1))


def rank_1() -> Iterator[Event]:
    yield grouped(0, 0, 1, received=True)
    yield from made(0, 1, (2, 3))
    yield from computed(1, 1, (2,))
    yield Injected(fault=KILL.to_dict(), step=1, rank=1)
    yield grouped(2, 3, 1, process=2, received=True)
    for step in (3, 4):
        yield from made(step, 1, (2, 3))


def runs(change: Change = list, scenario: Any = SUBJECT) -> Runs[Trace]:
    """Return the run with a change, and the oracle."""
    run = traces.hand_written(*change([*rank_0(), *rank_1()]), subject=scenario)
    return Runs(run, {ORACLE: (oracle(),)})


def altered(kind: type[Event], rank: int, at: int, /, **fields: Any) -> Change:
    """Return a change of fields of the last such event."""

    def change(events: list[Event]) -> list[Event]:
        found = [
            place
            for place, event in enumerate(events)
            if isinstance(event, kind)
            and (getattr(event, "rank", None), getattr(event, "step", None)) == (rank, at)
        ]
        event = events[found[-1]]
        events[found[-1]] = replace(event, **fields)
        return events

    return change


def of_step(step: int, part: str) -> Any:
    """Return a part of the oracle's state after `step`."""
    return next(getattr(one, part) for one in oracle().of(Update) if one.step == step)


def without(kind: type[Event], rank: int, step: int) -> Change:
    """Return a change that leaves the last such event out."""

    def change(events: list[Event]) -> list[Event]:
        found = [one for one in events if isinstance(one, kind)]
        last = [one for one in found if (one.rank, one.step) == (rank, step)][-1]  # type: ignore[attr-defined]
        return [one for one in events if one is not last]

    return change


@pytest.mark.parametrize("name", NAMES)
def test_held(name: str) -> None:
    """The run is right, and each clause has something to compare."""
    assert held(name, runs()).compared


@pytest.mark.parametrize("name", NAMES)
def test_without_the_oracle(name: str) -> None:
    assert "no run of the plain loop" in left_open(name, Runs(runs().base))


def struck(step: int, rank: int) -> Injected:
    """Return the record of a gradient that a fault changed."""
    fault = Fault(kind="corrupt_gradient", rank=rank, step=step, shard=2, value="0.5")
    return Injected(fault=fault.to_dict(), step=step, rank=rank, shard=2, tensor="first.weight")


def torn() -> dict[str, Any]:
    """Return a state of which only the weights are a step ahead."""
    return {"weights": of_step(0, "weights")}


@pytest.mark.parametrize(
    ("name", "change", "message", "place"),
    [
        (
            "elastic_trajectory",
            altered(Update, 1, 3, schedule=5),
            "the schedule is not where",
            (3, 1, None),
        ),
        (
            "elastic_trajectory",
            altered(Update, 1, 4, optimizer={}),
            "optimizer differ from the undisturbed run: only expected holds",
            (4, 1, "first.weight.step"),
        ),
        (
            "elastic_trajectory",
            altered(Update, 0, 2, learning_rate=1.0),
            "the learning rate is not",
            (2, 0, None),
        ),
        ("elastic_trajectory", without(Update, 0, 2), "2", (2, None, None)),
        ("elastic_samples", without(Shard, 0, 2), "with micro-batch 3 in it 0 times", (2, None, 3)),
        (
            "elastic_samples",
            altered(Shard, 1, 3, shard=1),
            "computed micro-batch 1 of step 3 with other samples",
            (3, 1, 1),
        ),
        (
            "elastic_samples",
            altered(Shard, 1, 1, draws="others"),
            "with other random numbers",
            (1, 1, 2),
        ),
        ("elastic_samples", altered(Shard, 1, 3, shard=4), "which does not exist", (3, 1, 4)),
        (
            "elastic_together",
            altered(Grouped, 1, 3, members=(1,)),
            "rank 1 trains in generation 2 with ranks 1, and rank 0 with others",
            (3, 1, None),
        ),
        (
            "elastic_together",
            altered(Grouped, 0, 1, members=(1,)),
            "not with itself",
            (1, 0, None),
        ),
        (
            "elastic_together",
            altered(Grouped, 1, 3, step=2),
            "but not from the step of rank 0",
            (2, 1, None),
        ),
        (
            "elastic_together",
            without(Update, 0, 1),
            "rank 0 committed step 2, but step 1 was its next",
            (2, 0, None),
        ),
        (
            "elastic_together",
            without(Update, 0, 4),
            "rank 0 ended without step 4, though nothing struck it",
            (4, 0, None),
        ),
        (
            "elastic_joins",
            altered(Grouped, 1, 3, weights={}),
            "what rank 1 received in generation 2: weights differ",
            (2, 1, "first.weight"),
        ),
        (
            "elastic_joins",
            altered(Grouped, 1, 3, progress={"schedule": 2}),
            "the schedule is not where",
            (2, 1, None),
        ),
        (
            "elastic_joins",
            altered(Grouped, 1, 3, step=7),
            "the undisturbed run has no such step",
            (6, 1, None),
        ),
        (
            "elastic_service",
            altered(Grouped, 0, 1, extra={}),
            "what rank 0 went on with in generation 1: averages differ",
            (0, 0, "first.weight"),
        ),
        ("elastic_waits", altered(Grouped, 0, 1, waited_s=4.5), "after 4.5 s", (1, 0, None)),
        (
            "elastic_audits",
            lambda events: [*events, Halt(step=3, rank=0, reason="it computes wrong bits")],
            "rank 0 computed right bits, and was blamed",
            (3, 0, None),
        ),
        (
            "elastic_audits",
            lambda events: [*events, struck(4, 1), struck(3, 1)],
            "rank 1 computed wrong bits, and was not found",
            (4, 1, None),
        ),
        (
            "elastic_audits",
            lambda events: [*events, struck(3, 1), Halt(step=4, rank=1, reason="too late")],
            "rank 1 computed wrong bits, and was found later",
            (3, 1, None),
        ),
    ],
)
def test_falsified(
    name: str, change: Change, message: str, place: tuple[int, int | None, object]
) -> None:
    """The finding names the step, the rank, and the tensor or the micro-batch."""
    found = falsified(name, runs(change))
    assert message in found.message
    step, rank, what = place
    assert (found.step, found.rank) == (step, rank)
    assert what in (found.tensor, found.shard)


def test_a_half_made_step_is_found_by_one_clause() -> None:
    """A rank that goes on with stepped weights, and its old number, received nothing."""
    change = altered(Grouped, 0, 1, weights=of_step(1, "weights"))
    assert falsified("elastic_service", runs(change)).tensor == "first.weight"
    held("elastic_joins", runs(change))


def test_partners_that_go_on_without_a_step() -> None:
    """One commits a step, and another one of its generation repeats it in the next."""

    def change(events: list[Event]) -> list[Event]:
        at = next(n for n, one in enumerate(events) if isinstance(one, Injected))
        return [*events[:at], *made(1, 1, (3,)), *events[at:]]

    # Its process ends there: the step is made again without it.
    held("elastic_together", runs(change))

    def goes_on(events: list[Event]) -> list[Event]:
        kept = [one for one in change(events) if not isinstance(one, Injected)]
        return altered(Grouped, 1, 3, process=1)(kept)

    found = falsified("elastic_together", runs(goes_on))
    assert found.message.startswith(
        "rank 1 committed step 1, and rank 0, which was in generation 0"
    )
    assert (found.step, found.rank) == (1, 0)


def test_groups_that_train_apart() -> None:
    """A rank goes on alone after a death, and the others do the same without it."""

    def change(events: list[Event]) -> list[Event]:
        alone = [grouped(1, 1, 2, members=(2,)), *made(1, 2, range(4)), *made(2, 2, range(4))]
        return [
            *altered(Grouped, 0, 1, generation=2)(altered(Grouped, 0, 3, generation=3)(events)),
            *alone,
        ]

    def later(events: list[Event]) -> list[Event]:
        return [*altered(Grouped, 1, 3, generation=3)(change(events))]

    found = falsified("elastic_together", runs(later))
    assert found.message.startswith("rank 2 committed step 1 and went on, and so did rank 0")
    assert (found.step, found.rank) == (1, 2)


def test_a_rank_that_an_audit_ends() -> None:
    """It ends without the last steps, in another generation than it was struck in."""

    def change(events: list[Event]) -> list[Event]:
        kept = without(Update, 1, 4)([*events, struck(4, 1)])
        return [*kept, grouped(3, 4, 1, process=2), Halt(step=4, rank=1, reason="wrong bits")]

    held("elastic_audits", runs(change))
    held("elastic_together", runs(change))


def test_without_audits_nobody_can_be_found() -> None:
    found = left_open("elastic_audits", runs(list, SUBJECT.with_(options={"audit_share": 0.5})))
    assert "not all micro-batches of any run were audited" in found


def test_a_silent_rank_is_waited_for() -> None:
    """If a rank is frozen, the others wait longer, and its own time doesn't count."""
    freeze = Fault(kind="freeze", rank=1, step=1, at="Forward", seconds=30.0)
    scenario = SUBJECT.with_(faults=(freeze,))
    late = altered(Grouped, 0, 1, waited_s=19.0)
    held("elastic_waits", runs(late, scenario))
    too_late = altered(Grouped, 0, 1, waited_s=21.0)
    assert falsified("elastic_waits", runs(too_late, scenario)).got == "21"


def test_without_a_deadline_there_is_no_bound() -> None:
    assert "no deadline_s" in left_open("elastic_waits", runs(list, SUBJECT.with_(options={})))
