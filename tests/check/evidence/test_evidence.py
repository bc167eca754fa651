"""The functions on traces that several judges share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.faults import NEEDED, ON_THE_WAY, Fault
from entrenar_py.shared.trace import Shard, Start, TensorRecord, Update, record_tensor
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.traces import hand_written, scenario, values
from tests.check.evidence.test_closeness import found, sketched

FINITE = st.floats(-1e3, 1e3, width=32)


def update(step: int, rank: int, loss: float = 1.0) -> Update:
    """Return an update with default values for fields that don't matter."""
    return Update(
        step=step,
        rank=rank,
        loss=loss,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights={},
    )


def shard(step: int, number: int, rank: int = 0) -> Shard:
    """Return a shard of one sample."""
    return Shard(
        step=step,
        epoch=0,
        rank=rank,
        shard=number,
        ids=(number,),
        loss_sum=1.0,
        weight=1.0,
        finite=True,
    )


def test_failed_runs_are_left_out_with_their_reason() -> None:
    """A crashed run is counted as missing, and its reason is given once."""
    tally = Tally("F-XX-001")
    good, bad = traces.run(scenario()), traces.failed(scenario())
    assert evidence.usable([good, bad, bad], tally) == [good]
    assert tally.missing == [
        "reference with 3 workers did not run to an end: RuntimeError: out of luck"
    ]


def _somewhere(kind: str) -> Fault:
    """Return a fault of that kind in step 1."""
    given = {"rank": 1, "seconds": 2.0, "at": "Commit", "step": 1}
    return Fault(kind=kind, **{name: given[name] for name in NEEDED[kind]})  # type: ignore[arg-type]


def test_a_planted_value_is_no_change_of_membership() -> None:
    """A planted value makes a run another training; a change of members does not."""
    nan = Fault(kind="non_finite_loss", step=1, value="nan")
    moved = tuple(_somewhere(kind) for kind in ("restart", *ON_THE_WAY))
    for faults, is_same in (
        ((), True),
        ((traces.leave(1, 2), traces.join(1, 3)), True),
        (moved, True),
        ((traces.leave(1, 2), nan), False),
    ):
        run = hand_written(subject=scenario(faults=faults))
        assert evidence.is_as_trained(run) is is_same


def test_of_two_updates_the_last_counts() -> None:
    """If a rank has two updates of a step, the last one counts."""
    trace = hand_written(update(1, 0), update(0, 1), update(0, 0, loss=5.0), update(0, 0, loss=2.0))
    by_step = list(evidence.ranks_by_step(trace))
    assert [(step, sorted(by_rank)) for step, by_rank in by_step] == [(0, [0, 1]), (1, [0])]
    assert evidence.any_rank(by_step[0][1]).loss == 2.0


def test_shards_of_committed_steps_in_order() -> None:
    """Shards are sorted by number; those of a step without an update are left out."""
    trace = hand_written(shard(0, 2), shard(0, 0, rank=1), shard(0, 1), shard(1, 0), update(0, 0))
    assert {step: [s.shard for s in part] for step, part in evidence.shards(trace).items()} == {
        0: [0, 1, 2]
    }


def test_the_first_value_that_is_not_finite() -> None:
    """The first non-finite value is named by tensor and element, if values were recorded."""
    tensors = {"a": TensorRecord("x"), "b": values(1, 2), "c": values(1, -math.inf, math.nan)}
    assert evidence.non_finite(tensors) == ("c", 1)
    assert evidence.non_finite({"a": TensorRecord("x"), "b": values(1, 2)}) is None


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [
        (values(1, 2, 3), values(1, 2, 4), {"element": 2}),
        (values(1, 2), values(1, 2, 3), {"expected": "2 elements of float32"}),
        (values(1, 2), values(1, 2, dtype="float64"), {"got": "2 elements of float64"}),
        (values(), values(1), {"expected": "0 elements of float32"}),
        (values(0.0), values(-0.0), {"element": 0, "got": "-0.0"}),
        (values(1), TensorRecord("other"), {"got": "other"}),
        (values(1), TensorRecord("edited", values(1).data), {"got": "edited"}),
        (TensorRecord("empty", ""), TensorRecord("edited", ""), {"got": "edited"}),
    ],
)
def test_the_first_difference(
    expected: TensorRecord, got: TensorRecord, place: dict[str, object]
) -> None:
    """A difference names the element if values are known, else the sizes, else the digests."""
    tally = Tally("F-XX-001")
    closeness.compare_exact(tally, {"w": expected}, {"w": got}, "differ", step=1)
    shown = found(tally)
    assert shown.tensor == "w"
    assert {name: getattr(shown, name) for name in place} == place


@given(st.lists(FINITE, min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 31))
def test_any_flipped_bit_is_found(numbers: list[float], at: int, bit: int) -> None:
    """One flipped bit in one element is found, and names that element."""
    at %= len(numbers)
    array = np.array(numbers, np.float32)
    flipped = array.copy()
    flipped.view(np.uint32)[at] ^= np.uint32(1 << bit)
    tally = Tally("F-XX-001")
    right, wrong = {"w": values(*numbers)}, {"w": record_tensor(flipped, values=True)}
    closeness.compare_exact(tally, right, wrong, "differ")
    assert found(tally).element == at


def test_equal_tensors_count_and_missing_ones_are_named() -> None:
    """Each tensor is one comparison; a tensor on one side only is a difference."""
    tally = Tally("F-XX-001")
    closeness.compare_exact(tally, {"a": values(1), "b": values(2)}, {"a": values(1)}, "differ")
    assert tally.compared == 2
    assert found(tally).tensor == "b"
    closeness.compare_exact(other := Tally("F-XX-001"), {}, {"c": values(1)}, "differ")
    assert found(other).message == "differ: only got holds c"


def test_a_sketch_shows_that_an_element_is_not_finite() -> None:
    """By its norm; the element is unknown."""
    assert evidence.non_finite({"v": sketched(1), "w": sketched(math.nan)}) == ("w", None)


def test_passes_that_are_followed_from_within() -> None:
    """The first pass of each life of a rank, where a model is sharded; no other pass."""
    trace = traces.run(scenario(workload="linear", world_size=2, num_steps=4))
    assert evidence.passes_begun_late(trace) == set()
    first = {rank: one.shard for one in reversed(trace.of(Shard)) for rank in (one.rank,)}.values()
    again = [replace(start, step=2) for start in trace.of(Start)]
    place = next(n for n, e in enumerate(trace.events) if isinstance(e, Shard) and e.step == 2)
    events = (*trace.events[:place], *again, *trace.events[place:])
    bare = (replace(event, gradient={}) if isinstance(event, Shard) else event for event in events)
    sharded = traces.was(replace(trace, events=(*bare,)), shared=True)
    assert evidence.passes_begun_late(sharded) == {(s, n) for s in (0, 2) for n in first}
    whole = traces.was(replace(trace, events=events), shared=True)
    assert evidence.passes_begun_late(whole) == set()
