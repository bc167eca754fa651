"""A liar replaces only the planned message, once, and by the planned kind of lie."""

from __future__ import annotations

import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.systems.star.lies import Liar
from entrenar_py.train.wire.messages import Computed, Heartbeat, Message, Staged, TreeNode
from entrenar_py.train.wire_io.injections import Said

VECTOR = bytes(range(8))


def node(step: int, index: int = 2) -> TreeNode:
    """Return a node of two shards."""
    return TreeNode(step=step, round=0, block=0, level=1, index=index, loss=1.0, weight=2.0)


def liar(value: str, at: str) -> tuple[Liar, list[Fault]]:
    """Return a liar that must lie in step 2, and the list of its reported lies."""
    planned = [Fault(kind="lie", step=2, rank=1, at=at, value=value)]
    told: list[Fault] = []

    def tell(fault: Fault) -> None:
        planned.remove(fault)
        told.append(fault)

    return Liar(lambda: planned, tell), told


@pytest.mark.parametrize(
    ("value", "message", "said"),
    [
        ("too_long", node(2), [(node(2), VECTOR + bytes(4))]),
        ("not_mine", node(2), [(node(2, index=3), VECTOR)]),
        (
            "not_mine",
            Computed(step=2, shards=(4, 5)),
            [(Computed(step=2, shards=(4, 5, 6)), VECTOR)],
        ),
        ("twice", node(2), [(node(2), VECTOR)] * 2),
    ],
)
def test_what_is_said(value: str, message: Message, said: list[Said]) -> None:
    """The planned message is replaced once; all others are sent unchanged."""
    one, told = liar(value, type(message).__name__)
    others: list[Message] = [Heartbeat(), Staged(step=2, round=0), node(1), node(3)]
    assert [one.speak(other, b"") for other in others] == [[(other, b"")] for other in others]
    assert told == []
    assert one.speak(message, VECTOR) == said
    assert len(told) == 1
    assert one.speak(message, VECTOR) == [(message, VECTOR)]


def test_an_old_step_is_said_again() -> None:
    """The first message of that kind in the step before is sent again, with its payload."""
    one, _ = liar("old_step", "TreeNode")
    for step in range(2):
        one.speak(node(step, index=step), bytes([step]))
        one.speak(node(step, index=7), b"later")
    assert one.speak(node(2), VECTOR) == [(node(1, index=1), b"\x01")]


def test_who_was_not_there_makes_an_old_step_up() -> None:
    """A worker without a message of the step before sends its present one under that step."""
    one, _ = liar("old_step", "Staged")
    assert one.speak(Staged(step=2, round=0), b"") == [(Staged(step=1, round=0), b"")]


def test_records_of_another() -> None:
    """All records of shards and steps get the next rank."""
    shard = trace.Shard(
        step=2, epoch=0, rank=1, shard=0, ids=(3,), loss_sum=1.0, weight=1.0, finite=True
    )
    one, _ = liar("for_another", "Computed")
    ((_, payload),) = one.speak(Computed(step=2, shards=(0,)), trace.dump_events([shard]))
    (told,) = trace.load_events(bytes(payload))
    assert isinstance(told, trace.Shard)
    assert (told.rank, told.ids) == (2, (3,))
