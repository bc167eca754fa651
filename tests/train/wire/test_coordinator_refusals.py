"""The machine of the coordinator: which peers it disconnects, without harm to the others."""

from __future__ import annotations

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import (
    MESSAGES,
    Applied,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Refuse,
    Shutdown,
    Staged,
)
from entrenar_py.train.wire.phases import ALWAYS, PeerPhase, Stage
from tests.train.wire.samples import SAMPLES
from tests.train.wire.situations import WORKERS_MAY_SAY, alone, computed, link_of, node, reach
from tests.train.wire.star import SECRET, Link, Star, Station, closes, closing, run_of

BAD = NonFinite(step=0, shard=0, tensor="w", element=1, loss=1.0, ids=(1,))
ALL = computed(0, 1, 2, 3)

ILLEGAL = [
    (phase, kind)
    for phase, legal in WORKERS_MAY_SAY.items()
    for kind in MESSAGES.values()
    if kind not in legal and (kind not in ALWAYS or phase is PeerPhase.CHALLENGED)
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_ends_that_connection_only(phase: PeerPhase, kind: type[Message]) -> None:
    """Any message that the table does not list ends its connection, and the run completes."""
    star, link = reach(phase)
    effects = star.say_above(link, SAMPLES[kind][0])
    reason = f"{kind.__name__} from a peer that is {phase}"
    assert [one for one in effects if isinstance(one, do.Close)] == [do.Close(link.peer, reason)]
    assert len(star.links) == 2
    assert star.finish().status == "completed"


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (PeerPhase.LOADING, Loaded(step=0)),
        (PeerPhase.COMPUTING, node(step=0)),
        (PeerPhase.COMPUTING, computed(0)),
        (PeerPhase.COMPUTING, BAD),
        (PeerPhase.STAGING, Staged(step=2, round=0)),
        (PeerPhase.APPLYING, Applied(step=0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_step_is_refused(phase: PeerPhase, said: Message) -> None:
    """A message of an earlier or later step ends its connection."""
    star, link = reach(phase)
    assert star.coordinator.step == 1
    close = closing(star.say_above(link, said))
    assert "the run is at step 1" in close.reason
    assert star.finish().status == "completed"


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([node(block=1)], "its shards were not assigned, or came before"),
        ([ALL, node(block=2)], "TreeNode block=2: it comes when block 3 is whole"),
        ([ALL, node(block=2**63 - 1)], "it comes when block 9223372036854775808 is whole"),
        ([ALL, node()], "TreeNode block=0: it comes when block 1 is whole"),
        ([ALL, node(level=1, block=1), node()], "TreeNode block=0: it comes when block 1 is whole"),
        ([ALL, node(block=1), node(block=1)], "its shards were not assigned, or came before"),
        (
            [ALL, node(0, 0, 4, 1)],
            "TreeNode block=1 level=0 index=4: its shards were not assigned, or came before",
        ),
        ([ALL, node(0, 2, 1, 1)], "its shards were not assigned, or came before"),
        ([ALL, node(0, 0, 2**63 - 1, 1)], "its shards were not assigned, or came before"),
        ([ALL, node(0, 0, 0, 1), node(0, 0, 0, 1)], "its shards were not assigned, or came before"),
        ([ALL, node(0, 1, 0, 1), node(0, 0, 1, 1)], "its shards were not assigned, or came before"),
        ([ALL, node(0, 0, 3, 1), node(block=1)], "its shards were not assigned, or came before"),
        ([computed(0, 1)], "not the next assignment, or already reported"),
        ([computed(0, 1, 2, 3, 3)], "not the next assignment, or already reported"),
        ([computed()], "not the next assignment, or already reported"),
        ([ALL, ALL], "not the next assignment, or already reported"),
        ([ALL, node(block=1), ALL], "not the next assignment, or already reported"),
    ],
)
def test_a_delivery_is_what_was_asked_for(said: list[Message], complaint: str) -> None:
    """`Computed` with the assigned shards, then each of their nodes once per block."""
    star, link = alone(num_blocks=2)
    for one in said[:-1]:
        assert not closes(star.say_above(link, one), link)
    close = closing(star.say_above(link, said[-1]))
    assert complaint in close.reason
    link.down.clear()  # an average, for what the worker itself never said
    assert star.finish().status == "completed"


@pytest.mark.parametrize("level", [3, 4, 2**62])
def test_a_node_above_the_root_is_refused(level: int) -> None:
    """A tree over four shards ends at level 2."""
    star, link = alone()
    star.say_above(link, ALL)
    assert closes(star.say_above(link, node(level=level)), link)


def _owes_two_deliveries() -> tuple[Star, Link]:
    """Return a star of two workers: one is lost, and the other has its shards, too."""
    star = Star(run_of(awaited={0: (0, 1)}))
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    star.cut(second)
    assert star.coordinator.peers[first.peer].assigned == [(0, 1), (2, 3)]
    return star, first


def test_a_node_is_of_one_delivery() -> None:
    """Deliveries count as a whole, so a node must not span two of them."""
    star, link = _owes_two_deliveries()
    star.say_above(link, computed(0, 1))
    assert closes(star.say_above(link, node()), link)


def test_deliveries_come_one_after_the_other() -> None:
    """Nodes of a delivery are due when the previous one is complete."""
    for early in (node(level=1, index=1), computed(2, 3)):
        star, link = _owes_two_deliveries()
        star.say_above(link, computed(0, 1))
        assert closes(star.say_above(link, early), link)


def test_a_worker_halts_the_run_for_its_own_shards_only() -> None:
    """A report about another worker's shard is refused."""
    star = Star(run_of(awaited={0: (0, 1)}))
    link = link_of(star.arrive())
    star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    said = NonFinite(step=0, shard=3, tensor=None, element=None, loss=1.0, ids=())
    assert closes(star.say_above(link, said), link)
    assert star.finished is None


def test_who_leaves_is_not_an_error() -> None:
    """The reason is recorded, and its shards go to others."""
    star, link = reach(PeerPhase.COMPUTING)
    effects = star.say_above(link, Leave(reason="asked to"))
    assert effects[:2] == [
        do.Close(link.peer, "left: asked to"),
        do.Left(2, 1, "left: asked to"),
    ]
    assert star.finish().status == "completed"


def test_a_stranger_is_refused_and_sent_away() -> None:
    """It gets the reason, its connection ends, and no rank is used."""
    star = Star(run_of())
    station = star.arrive(secret=SECRET + b"!")
    star.deliver()
    refusal = do.Send(0, Refuse(reason="wrong secret", retry=False))
    assert star.effects[1:] == [refusal, do.Close(0, "refused: wrong secret")]
    assert station.finished == do.Finish("failed", "refused: wrong secret")
    assert star.coordinator.peers == {}


def test_the_dead_are_not_heard() -> None:
    """Messages that arrive after their connection ended are ignored."""
    star, link = alone()
    star.cut(link)
    assert star.coordinator.receive(link.peer, node(), star.now) == []
    assert star.coordinator.lost(link.peer, "again", star.now) == []
    star.coordinator.heard(link.peer, star.now)
    assert link.peer not in star.coordinator.peers


# --- again and again ------------------------------------------------------------------------------


def _breaks(star: Star, station: Station, shard: int) -> list[do.Effect]:
    """Return the effects when `station` joins and delivers a shard that it was not assigned."""
    if station.link is None:
        star.connect(station)
    star.until(lambda: bool(station.jobs))
    return star.say_above(link_of(station), computed(shard))


def test_who_is_thrown_out_is_told_why() -> None:
    """It may come back; a peer that is not a member gets no reason."""
    star, link = alone()
    effects = star.say_above(link, computed(7))
    reason = "thrown out: Computed shards=(7,): not the next assignment, or already reported"
    assert effects[0] == do.Send(link.peer, Refuse(reason=reason, retry=True))
    assert star.finish().status == "completed"


def test_a_run_that_only_throws_out_ends() -> None:
    """It fails if a worker is thrown out repeatedly for one reason.

    Numbers in the reason don't matter. A step in between would reset the count. The other workers
    are told why.
    """
    star = Star(run_of())
    station = star.arrive()
    for shard in (7, 8):
        assert star.coordinator.stage is not Stage.OVER
        _breaks(star, station, shard)
        star.deliver()
    told, _, finish = _breaks(star, station, 9)
    problem = (
        "worker 0 was thrown out 3 times before step 0 was made, each time for the same reason: "
        "Computed shards=(9,): not the next assignment, or already reported"
    )
    assert isinstance(told, do.Send)
    assert told.message == Shutdown(problem=problem)
    assert finish == do.Finish("failed", problem)


def test_a_step_in_between_is_progress() -> None:
    """A worker may be thrown out any number of times if steps are made."""
    star = Star(run_of(num_steps=3))
    station = star.arrive()
    for step in range(3):
        for _ in range(2):
            _breaks(star, station, 7)
            star.deliver()
        if station.link is None:
            star.connect(station)
        star.until(lambda step=step: star.coordinator.step > step)  # type: ignore[misc]
    assert star.finish().status == "completed"
