"""Copies of audited shards, and the choice of these shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic.reduction import Node
from entrenar_py.train.coordinator import audits
from entrenar_py.train.coordinator.audits import Copies, alike
from entrenar_py.train.wire.effects import Conclude

SCENARIO = Scenario(
    system="parameter_server", workload="linear", world_size=2, seed=0, num_shards=10
)
SUFFERED = trace.Injected(fault={"kind": "corrupt_gradient"}, step=0, rank=1, shard=3)


def node(*values: float, loss: float = 1.0) -> Node:
    """Return a block of a leaf."""
    return Node(0, 3, np.array(values, np.float32), loss, 2.0)


def give(copies: Copies, rank: int, *blocks: Node, events: tuple[trace.Event, ...] = ()) -> None:
    """Deliver a complete copy of shard 3, its last block first."""
    copies.begin(rank, list(events))
    for block in reversed(range(len(blocks))):
        copies.take(rank, block, blocks[block], b"")
    copies.end(rank, 3)


def locate(block: int, place: int) -> tuple[str, int]:
    """Return another tensor for each block."""
    return f"t{block}", place


@pytest.mark.parametrize(
    "other",
    [
        (node(1, 2), node(3, 5)),
        (node(1, 2.0000002), node(3, 4)),
        (node(-0.0, 2), node(3, 4)),
        (node(1, 2, loss=1.5), node(3, 4)),
        (node(1, 2),),
    ],
)
def test_copies_differ_in_any_bit(other: tuple[Node, ...]) -> None:
    """Copies differ by a sign, a loss or a missing block."""
    copies, first = Copies(), (node(1 if other[0].vector[0] else 0.0, 2), node(3, 4))
    give(copies, 0, *first)
    give(copies, 1, *other)
    give(copies, 2, *first)
    assert alike(copies.of(3)) == [0, 1, 0]


def test_a_copy_is_not_compared_with_itself() -> None:
    """Two equal copies need one comparison of each block."""
    copies, first = Copies(), (node(1, 2), node(3, 4))
    give(copies, 0, *first)
    give(copies, 1, *first)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []

        def compared(*both: Any) -> bool:
            seen.append(both)
            return True

        patch.setattr(np, "array_equal", compared)
        assert alike(copies.of(3)) == [0, 0]
    assert len(seen) == 2
    places = zip(seen, reversed(first), strict=True)
    assert all(np.shares_memory(one, block.vector) for (one, _), block in places), "no copies"


def test_what_is_recorded_of_an_audit() -> None:
    """The audit has its workers and the culprit's first difference, next to the valid events."""
    copies, shard = Copies(), trace.Planted(name="of what counts")
    give(copies, 1, node(1, 2), node(3, 5), events=(trace.Planted(name="void"), SUFFERED))
    give(copies, 2, node(1, 2), node(3, 4), events=(shard,))
    give(copies, 0, node(1, 2), node(3, 4))
    chosen, events = copies.conclude(Conclude(0, 3, (0, 1, 1), copy=1, culprit=1), locate)
    assert chosen is not None
    assert (chosen.rank, chosen.nodes[1][0].vector.tolist()) == (2, [3, 4])
    found = trace.Audit(
        step=0, shard=3, ranks=(1, 2, 0), alike=(0, 1, 1), culprit=1, tensor="t1", element=1
    )
    assert events == [SUFFERED, shard, found]
    assert copies.of(3) == []


def test_an_audit_that_nothing_comes_of() -> None:
    """If no copy counts, the injected faults are still recorded."""
    copies = Copies()
    give(copies, 0, node(1))
    give(copies, 1, node(2), events=(trace.Planted(name="void"), SUFFERED))
    chosen, events = copies.conclude(Conclude(0, 3, (0, 1)), locate)
    assert chosen is None
    assert events == [SUFFERED, trace.Audit(step=0, shard=3, ranks=(0, 1), alike=(0, 1))]


def test_another_loss_has_no_tensor() -> None:
    """If only the loss differs, the culprit is named without a tensor."""
    copies = Copies()
    give(copies, 0, node(1))
    give(copies, 1, node(1, loss=7.0))
    _, (found,) = copies.conclude(Conclude(0, 3, (0, 1), copy=0, culprit=1), locate)
    assert isinstance(found, trace.Audit)
    assert (found.culprit, found.tensor, found.element) == (1, None, None)


def test_who_is_gone_takes_its_copies() -> None:
    """A worker that left loses its complete and unfinished copies, and its faults stay recorded."""
    copies = Copies()
    give(copies, 0, node(1))
    give(copies, 1, node(1), events=(SUFFERED, trace.Planted(name="void")))
    copies.begin(1, [SUFFERED])
    assert copies.forget(1) == [SUFFERED, SUFFERED]
    assert [one.rank for one in copies.of(3)] == [0]
    assert copies.forget(1) == []


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.01, 1), (0.25, 2), (0.5, 5), (1, 10)])
def test_as_many_as_asked_for(share: float, count: int) -> None:
    """At least one shard is audited, others in each step, and the same ones in each run."""
    scenario = SCENARIO.with_(options={"audit_share": share})
    drawn = [audits.shards(scenario, step) for step in range(50)]
    assert {len(set(shards)) for shards in drawn} == {count}
    assert drawn == [audits.shards(scenario.with_(world_size=5), step) for step in range(50)]
    if 0 < count < 10:
        assert {shard for shards in drawn for shard in shards} == set(range(10))


@pytest.mark.parametrize("share", [-0.1, 1.1, "1", True, None])
def test_a_share_is_a_share(share: object) -> None:
    """A share is a number from 0 to 1."""
    with pytest.raises(UsageError, match=r"audit_share=.*: use a number from 0 to 1"):
        audits.share_of(SCENARIO.with_(options={"audit_share": share}))
