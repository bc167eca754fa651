"""The averaging coordinator without sockets, driven by the bytes of the description."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.upstream import terms as wire
from entrenar_py.train.upstream.averager import IGNORED_MAX
from entrenar_py.train.upstream.frames import WHOLE
from entrenar_py.train.wire import effects as do
from tests.train.upstream import original as send
from tests.train.upstream.averaging import FRAME_BYTES_MAX, PATIENCE, Office

SHUTDOWN = (7,)
NAN = float("nan")


# --- a run --------------------------------------------------------------------------------------


def test_a_run_from_join_to_shutdown() -> None:
    """Both workers are accepted, get a shard a step, its average, and the end."""
    office = Office()
    office.join("a", "b")
    assert office.heard("a") == [(2, 0, 2), (3, 0, 0, 5)]
    assert office.heard("b") == [(2, 1, 2), (3, 0, 5, 10)]
    office.say("a", send.gradient(0, 0, [1.0, 3.0], loss=1.0, correct=4, total=5))
    assert office.heard("a") == []
    office.say("b", send.gradient(0, 1, [4.0, 6.0], loss=2.0, correct=1, total=5))
    for peer, shard in (("a", (3, 1, 0, 5)), ("b", (3, 1, 5, 10))):
        assert office.heard(peer) == [(5, 0, (2.5, 4.5), 1.5), shard]
    for worker, peer in enumerate("ab"):
        office.say(peer, send.gradient(1, worker, [1.0, 2.0], total=5))
    for peer in "ab":
        assert office.heard(peer) == [(5, 1, (1.0, 2.0), 0.5), SHUTDOWN]
        assert office.closed[peer] == "the run is complete"
    assert office.end.finished == do.Finish("completed")
    first, second = office.effects(wire.MadeStep)
    assert first == wire.MadeStep(0, (0, 1), (WHOLE,), 10, 1.5, 5, 10)
    assert second.step == 1


def test_averages_are_weighted_by_total() -> None:
    """`total` weighs gradients and losses; a shard without samples that count has no part."""
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("a", send.gradient(0, 0, [1.0], loss=1.0, total=1))
    office.say("b", send.gradient(0, 1, [5.0], loss=3.0, total=3))
    assert office.heard("a")[2:] == [(5, 0, (4.0,), 2.5), SHUTDOWN]
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("a", send.gradient(0, 0, [7.0], loss=7.0, total=0))
    office.say("b", send.gradient(0, 1, [5.0], loss=3.0, total=3))
    assert office.heard("a")[2:] == [(5, 0, (5.0,), 3.0), SHUTDOWN]


@pytest.mark.parametrize("total", [6, 2**63, 2**64 - 1])
def test_a_shard_has_no_more_samples_than_were_assigned(total: int) -> None:
    """A `total` above the shard's samples would outweigh the others, and break the ledger."""
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("a", send.gradient(0, 0, [7.0], total=total))
    assert f"total={total} of a shard with 5 samples: use at most 5" in office.closed["a"]


def test_no_sample_counts() -> None:
    """An average over nothing is not defined: the run halts."""
    office = Office()
    office.join("a", "b")
    for worker, peer in enumerate("ab"):
        office.say(peer, send.gradient(0, worker, [7.0], total=0))
    assert office.end.finished is not None
    assert office.end.finished.status == "halted"
    assert "every total is 0" in office.end.finished.reason
    assert office.heard("a")[2:] == [SHUTDOWN]


@given(data=st.data())
def test_any_order_gives_the_same_bits(data: st.DataObject) -> None:
    """The average is that of the shards in order, whichever worker had them, whoever came first."""
    num_shards = data.draw(st.integers(1, 7))
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    gradients = [data.draw(st.lists(floats, min_size=3, max_size=3)) for _ in range(num_shards)]
    size = 2**20  # samples in a shard
    totals = [data.draw(st.integers(1, size)) for _ in range(num_shards)]

    def average(num_workers: int, draw: Any) -> bytes:
        office = Office(
            num_steps=1,
            num_samples=num_shards * size,
            num_shards=num_shards,
            world_size=num_workers,
        )
        peers = list(range(num_workers))
        office.join(*peers)
        waiting = {peer: office.heard(peer)[1:] for peer in peers}
        while not office.end.finished:
            peer = draw([one for one, shards in waiting.items() if shards])
            _, step, start, _ = waiting[peer].pop(0)
            shard = start // size
            office.say(peer, send.gradient(step, peer, gradients[shard], total=totals[shard]))
            if not office.end.finished:
                waiting[peer] += office.heard(peer)
        answer = next(one for one in office.heard(peers[0]) if one[0] == 5)
        return struct.pack("<3f", *answer[2])

    drawn = average(
        data.draw(st.integers(1, num_shards)), lambda peers: data.draw(st.sampled_from(peers))
    )
    assert drawn == average(1, lambda peers: peers[0])
    exact = np.average(np.array(gradients, np.float64), axis=0, weights=totals)
    scale = np.average(np.abs(np.array(gradients, np.float64)), axis=0, weights=totals)
    got = np.frombuffer(drawn, "<f4").astype(np.float64)
    assert np.all(np.abs(got - exact) <= 2.0**-24 * np.abs(exact) + 2.0**-48 * scale + 2.0**-149)


def test_one_worker_gets_its_own_bits() -> None:
    """The mean of one gradient is that gradient: signs of zero and subnormal numbers stay."""
    values = [-0.0, 2.0**-149, 3.4e38, 0.1]
    office = Office(world_size=1, num_steps=1, num_samples=2**28 + 1)
    office.join("a")
    office.say("a", send.gradient(0, 0, values, total=2**28 + 1))
    (answer,) = (one for one in office.heard("a") if one[0] == 5)
    assert struct.pack("<4f", *answer[2]) == struct.pack("<4f", *values)


def test_batches_walk_through_the_samples() -> None:
    """A step takes the next samples; the last batch of an epoch is short, with fewer shards."""
    office = Office(num_samples=7, batch_size=3, num_shards=2, world_size=1, num_steps=4)
    office.join("a")
    seen: list[tuple[int, ...]] = []
    for _ in range(7):
        seen += [one[1:] for one in office.heard("a") if one[0] == 3]
        office.say("a", send.gradient(seen[-1][0], 0, [1.0]))
    assert seen == [(0, 0, 2), (0, 2, 3), (1, 3, 5), (1, 5, 6), (2, 6, 7), (3, 0, 2), (3, 2, 3)]
    assert office.end.finished == do.Finish("completed")


def test_one_byte_at_a_time() -> None:
    """A worker may send its bytes one by one."""
    office = Office(world_size=1, num_steps=1)
    office.connect("a")
    office.say("a", send.join(), piece=1)
    office.say("a", send.heartbeat(), send.gradient(0, 0, [1.0, 2.0], total=3), piece=1)
    assert office.heard("a")[2:] == [(5, 0, (1.0, 2.0), 0.5), SHUTDOWN]


def test_heartbeats_come_any_time() -> None:
    """They have no answer, and no effect but that the worker lives."""
    office = Office()
    office.join("a")
    office.say("a", send.heartbeat())
    office.join("b")
    office.heard("a")
    office.say("a", send.heartbeat())
    office.say("a", send.gradient(0, 0, [1.0]), send.heartbeat())
    assert office.heard("a") == []
    assert not office.closed


# --- blocks -------------------------------------------------------------------------------------


def test_blocks_and_components_are_averaged_one_by_one() -> None:
    """Each is answered once all shards have it; with `components` they end the step."""
    office = Office(components=(0, 2), num_samples=3)
    office.join("a", "b")
    for peer in "ab":
        office.heard(peer)
    for number in (1, 0):
        office.say("a", send.block(0, 0, number, 2, [1, 2], [3.0, 3.0, 6.0]))
        assert office.heard("b") == []
        office.say("b", send.block(0, 1, number, 2, [1, 2], [6.0, 0.0, 3.0]))
        # 2 samples of 3 are in the first shard.
        for peer in "ab":
            assert office.heard(peer) == [(9, 0, number, (1, 2), (4.0, 2.0, 5.0))]
    for component in (2, 0):
        for worker, peer in enumerate("ab"):
            office.say(peer, send.non_block(0, worker, component, [float(component)]))
    assert office.heard("a") == [(11, 0, 2, (2.0,)), (11, 0, 0, (0.0,)), (3, 1, 0, 2)]
    (made,) = office.effects(wire.MadeStep)
    assert (made.loss, made.correct, made.total) == (None, None, None)
    assert [str(part) for part in made.parts] == [
        "block 0",
        "block 1",
        "component 0",
        "component 2",
    ]


def test_a_payload_ends_a_step_with_blocks() -> None:
    """Without `components` a GradientPayload ends the shard, and may hold the rest or nothing."""
    office = Office(num_steps=1)
    office.join("a", "b")
    for worker, peer in enumerate("ab"):
        office.say(peer, send.block(0, worker, 0, 1, [2], [1.0, 2.0]))
        office.say(peer, send.non_block(0, worker, 7, [3.0]))
    assert office.heard("a")[2:] == [(9, 0, 0, (2,), (1.0, 2.0)), (11, 0, 7, (3.0,))]
    for worker, peer in enumerate("ab"):
        office.say(peer, send.gradient(0, worker, [], loss=2.0, total=5))
    assert office.heard("a") == [(5, 0, (), 2.0), SHUTDOWN]


def test_a_worker_is_answered_in_its_own_layout() -> None:
    """Who counts component sizes with a u32, as the original program does, gets a u32."""
    office = Office(components=(), num_steps=1)
    office.join("a", "b")
    office.say("a", send.block(0, 0, 0, 1, [1, 1], [1.0, 2.0], count="<I"))
    office.say("b", send.block(0, 1, 0, 1, [1, 1], [1.0, 2.0], count="<Q"))
    average = (9, 0, 0, (1, 1), (1.0, 2.0))
    assert office.heard("a", count="<I")[2:] == [average, SHUTDOWN]
    assert office.heard("b", count="<Q")[2:] == [average, SHUTDOWN]


def test_a_worker_that_died_among_its_blocks() -> None:
    """Averages that went out stay; what else it delivered is void, and comes from another."""
    office = Office(components=(7,), num_steps=1, world_size=3, num_shards=2, num_awaited=2)
    office.join("a", "b")
    office.say("a", send.block(0, 0, 1, 2, [1], [2.0]))
    office.say("b", send.block(0, 1, 1, 2, [1], [4.0]))
    office.say("b", send.block(0, 1, 0, 2, [1], [9.0]))
    office.end.lost("b", "died")
    office.join("c")
    assert office.heard("c") == [(2, 1, 3), (3, 0, 5, 10)]
    office.say("c", send.block(0, 1, 1, 2, [1], [99.0]))
    assert office.heard("c") == [(9, 0, 1, (1,), (3.0,))], "the average that the others have"
    office.say("c", send.block(0, 1, 0, 2, [1], [6.0]), send.non_block(0, 1, 7, [1.0]))
    office.say("a", send.block(0, 0, 0, 2, [1], [2.0]), send.non_block(0, 0, 7, [1.0]))
    rest = [(9, 0, 0, (1,), (4.0,)), (11, 0, 7, (1.0,)), SHUTDOWN]
    assert office.heard("a")[2:] == [(9, 0, 1, (1,), (3.0,)), *rest]
    assert office.heard("c") == rest


# --- who dies, and who comes --------------------------------------------------------------------


def test_a_dead_workers_shard_goes_to_another() -> None:
    """The average is what it would have been, also if the one that takes over was done."""
    for order in itertools.permutations("ab"):
        office = Office(num_steps=1)
        office.join("a", "b")
        for step in order:
            if step == "a":
                office.say("a", send.gradient(0, 0, [1.0], total=5))
            else:
                office.end.lost("b", "died")
        assert office.heard("a")[1:] == [(3, 0, 0, 5), (3, 0, 5, 10)]
        office.say("a", send.gradient(0, 0, [2.0], total=5))
        assert office.heard("a") == [(5, 0, (1.5,), 0.5), SHUTDOWN]
        assert office.effects(do.Left) == [do.Left(1, 0, "died")]


def test_what_a_dead_worker_delivered_counts() -> None:
    """A whole shard stays, though its worker is gone."""
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("b", send.gradient(0, 1, [3.0]))
    office.end.lost("b", "died")
    office.say("a", send.gradient(0, 0, [1.0]))
    assert office.heard("a")[2:] == [(5, 0, (2.0,), 0.5), SHUTDOWN]


def test_all_workers_die() -> None:
    """The step waits for others; without any for `gather_s` the run fails."""
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("a", send.gradient(0, 0, [1.0]))
    for peer in "ab":
        office.end.lost(peer, "died")
    office.pass_time(PATIENCE.gather_s - 1)
    office.join("c")
    assert office.heard("c") == [(2, 0, 2), (3, 0, 5, 10)]
    office.pass_time(2)
    assert not office.effects(do.Finish)
    office.end.lost("c", "died")
    office.pass_time(PATIENCE.gather_s)
    (finish,) = office.effects(do.Finish)
    assert finish.status == "failed"
    assert "step 0 has waited 300 s for workers; 0 are present" in finish.reason


def test_too_few_workers_ever() -> None:
    """A run that never has enough of them fails, and tells those that are there."""
    office = Office()
    office.join("a")
    office.pass_time(PATIENCE.gather_s)
    assert office.heard("a") == [(2, 0, 2), SHUTDOWN]
    assert office.end.finished is not None
    assert office.end.finished.status == "failed"


def test_a_join_in_the_middle() -> None:
    """Who joins during a step takes part in the next one, and gets no average of this one."""
    office = Office(world_size=3, num_awaited=2, num_shards=3, num_steps=3)
    office.join("a", "b")
    office.say("a", send.gradient(0, 0, [1.0]))
    office.join("c")
    assert office.heard("c") == [(2, 2, 3)]
    office.say("b", send.gradient(0, 1, [1.0]))
    office.say("a", send.gradient(0, 0, [1.0]))
    assert office.heard("c") == [(3, 1, 7, 10)]
    assert office.heard("a")[-2:] == [(5, 0, (1.0,), 0.5), (3, 1, 0, 4)]
    assert [one.late for one in office.effects(wire.Enlist)] == [False, False, True]


def test_a_join_too_late_or_too_many() -> None:
    """All places are taken, or the configuration allows none after the first step's begin."""
    office = Office()
    office.join("a", "b", "c")
    assert "all 2 places are taken" in office.closed["c"]
    assert office.heard("c") == []
    office = Office(late_joins=False)
    office.join("a", "b")
    office.end.lost("a", "died")
    office.join("c")
    assert "admits no late workers" in office.closed["c"]


def test_who_takes_too_long() -> None:
    """A shard has its time; a worker that beats may not fall silent; others may."""
    office = Office()
    office.join("a", "b")
    office.say("a", send.heartbeat())
    office.pass_time(PATIENCE.dead_after_s)
    assert office.closed == {"a": "silent for 30.0 s"}
    office.pass_time(PATIENCE.shard_s - PATIENCE.dead_after_s)
    assert office.closed["b"] == "600 s over one shard"


def test_bytes_of_a_shard_are_signs_of_life() -> None:
    """A worker that sends a long gradient slowly is not silent."""
    office = Office(num_steps=1, world_size=1)
    office.join("a")
    office.say("a", send.heartbeat())
    data = send.gradient(0, 0, [1.0] * 8)
    for at in range(0, len(data), 10):
        office.pass_time(PATIENCE.dead_after_s - 1)
        office.say("a", data[at : at + 10])
    assert office.heard("a")[-1] == SHUTDOWN


def test_a_stranger_has_to_join_in_time() -> None:
    """Bytes do not prolong it."""
    office = Office()
    office.connect("s")
    for byte in send.join()[:5]:
        office.pass_time(PATIENCE.hello_s / 5)
        office.say("s", bytes([byte]))
    assert office.closed == {"s": "no JoinRequest in time"}


# --- what is not right --------------------------------------------------------------------------

ILLEGAL: dict[str, tuple[bytes, str]] = {
    "a second join": (send.join(), "JoinRequest from a connection that is computing"),
    "another's worker_id": (send.gradient(0, 1, [1.0]), "worker_id=1: it was accepted as"),
    "a step ahead": (send.gradient(1, 0, [1.0]), "GradientPayload of step 1: the run is at step 0"),
    "more correct than samples": (
        send.gradient(0, 0, [1.0], correct=6, total=5),
        "correct=6 of total=5",
    ),
    "no gradient": (send.gradient(0, 0, []), "the shard has no gradient at all"),
    "a message of the coordinator": (send.averaged(0, [1.0], 0.5), "AveragedGradient is not"),
    "the end": (send.SHUTDOWN, "Shutdown is not allowed now"),
    "a block past the last": (send.block(0, 0, 2, 2, [1], [1.0]), "block=2 of num_blocks=2"),
    "no blocks": (send.block(0, 0, 0, 0, [1], [1.0]), "block=0 of num_blocks=0"),
    "too many blocks": (send.block(0, 0, 0, 2**32 - 1, [1], [1.0]), "at most 65536"),
    "too long": (struct.pack(">I", FRAME_BYTES_MAX + 1), "length=1048577"),
    "garbage": (b"\x00\x00\x00\x09garbage!!", "tag=0x67"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_is_illegal_ends_its_connection_alone(case: str) -> None:
    """The others go on, and the shard is computed by another."""
    data, said = ILLEGAL[case]
    office = Office(num_steps=1)
    office.join("a", "b")
    office.say("a", data)
    assert said in office.closed["a"]
    office.say("b", send.gradient(0, 1, [3.0]))
    office.say("b", send.gradient(0, 1, [1.0]))
    assert office.heard("b")[-2:] == [(5, 0, (2.0,), 0.5), SHUTDOWN]


STRANGE = {
    "a gradient": send.gradient(0, 0, [1.0]),
    "a heartbeat": send.heartbeat(),
    "a long frame": struct.pack(">I", 5000),
    "a request of another protocol": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_stranger_may_only_join(case: str) -> None:
    """Anything else ends the connection, before the run and in a step."""
    office = Office()
    office.connect("s")
    office.say("s", STRANGE[case])
    assert "s" in office.closed
    assert office.heard("s") == []
    office.join("a", "b")
    office.connect("t")
    office.say("t", STRANGE[case])
    assert "t" in office.closed
    assert not {"a", "b"} & office.closed.keys()


def test_a_payload_that_nobody_asked_for() -> None:
    """Before the first shard is assigned there is nothing to deliver."""
    office = Office()
    office.join("a")
    office.say("a", send.gradient(0, 0, [1.0]))
    assert "no shard of it was assigned to this worker" in office.closed["a"]


def test_what_comes_twice_counts_once() -> None:
    """Within a step and after it: it is ignored, and its gradients are not kept."""
    office = Office(num_steps=3)
    office.join("a", "b")
    once = send.gradient(0, 0, [1.0])
    office.say("a", once, once)
    office.say("b", send.gradient(0, 1, [3.0]))
    assert office.heard("a")[2:] == [(5, 0, (2.0,), 0.5), (3, 1, 0, 5)]
    office.say("a", once, send.gradient(1, 0, [1.0]), once)
    office.say("b", send.gradient(1, 1, [3.0]))
    assert office.heard("a") == [(5, 1, (2.0,), 0.5), (3, 2, 0, 5)]
    assert not office.closed


def test_a_block_that_comes_twice_counts_once() -> None:
    """Before its shard is complete, too."""
    office = Office(components=(), num_steps=1)
    office.join("a", "b")
    office.say("a", *2 * [send.block(0, 0, 0, 2, [1], [1.0])])
    office.say("a", send.block(0, 0, 0, 2, [1], [99.0]))
    office.say("b", send.block(0, 1, 0, 2, [1], [3.0]))
    assert office.heard("a")[2:] == [(9, 0, 0, (1,), (2.0,))]


def test_nobody_may_repeat_for_ever() -> None:
    """After so many messages that were not due, the worker is thrown out."""
    office = Office()
    office.join("a", "b")
    once = send.gradient(0, 0, [1.0])
    office.say("a", once, *IGNORED_MAX * [once])
    assert not office.closed
    office.say("a", once)
    assert "this is the 65th repeated or late message" in office.closed["a"]


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (
            [send.gradient(0, 0, [1.0, 2.0])],
            [send.gradient(0, 1, [1.0])],
            "the gradient: gradients=1 of components []: the first ones had 2",
        ),
        (
            [send.block(0, 0, 0, 2, [1, 2], [1.0] * 3)],
            [send.block(0, 1, 0, 2, [2, 1], [1.0] * 3)],
            "block 0: gradients=3 of components [2, 1]",
        ),
        (
            [send.block(0, 0, 0, 2, [1], [1.0])],
            [send.block(0, 1, 0, 3, [1], [1.0])],
            "num_blocks=3: it was 2 before",
        ),
        (
            [send.non_block(0, 0, 0, [1.0]), send.gradient(0, 0, [])],
            [send.gradient(0, 1, [1.0])],
            "the gradient: gradients=1",
        ),
        (
            [send.non_block(0, 0, 0, [1.0]), send.gradient(0, 0, [1.0])],
            [send.gradient(0, 1, [1.0])],
            "ends a shard that lacks component 0",
        ),
        (
            [send.gradient(0, 0, [1.0])],
            [send.non_block(0, 1, 0, [1.0])],
            "component 0: no gradient of this run has this part",
        ),
        (
            [send.block(0, 0, 0, 2, [1], [1.0])],
            [send.block(0, 1, 0, 2, [1], [1.0]), send.gradient(0, 1, [1.0])],
            "ends a shard that lacks block 1",
        ),
    ],
)
def test_gradients_that_do_not_fit_together(
    first: list[bytes], other: list[bytes], said: str
) -> None:
    """Lengths, components and parts are those that came first; other ones end their connection."""
    office = Office()
    office.join("a", "b")
    office.say("a", *first)
    office.say("b", *other)
    assert said in office.closed["b"]
    assert "a" not in office.closed


def test_a_worker_that_ends_without_what_it_began() -> None:
    """What came before the first shard was complete must be in that shard's layout, too."""
    office = Office()
    office.join("a", "b")
    office.say("a", send.non_block(0, 0, 0, [1.0]))
    office.say("b", send.gradient(0, 1, [1.0]))
    office.say("a", send.gradient(0, 0, [1.0]))
    assert "ends a shard that has component 0, unlike others" in office.closed["a"]


def test_only_the_components_of_the_configuration() -> None:
    """With `components` no other ones may come, and no GradientPayload."""
    for data, said in (
        (send.non_block(0, 0, 1, [1.0]), "component=1: use one of (0,)"),
        (send.gradient(0, 0, [1.0]), "with `components` in the configuration"),
    ):
        office = Office(components=(0,))
        office.join("a", "b")
        office.say("a", data)
        assert said in office.closed["a"]


def test_a_gradient_has_its_bound() -> None:
    """All parts of a shard together may take so much, and are refused before they are read."""
    office = Office(gradient_bytes_max=20)
    office.join("a", "b")
    office.say("a", send.block(0, 0, 0, 4, [4], [1.0] * 4))
    begun = send.block(0, 0, 1, 4, [2], [1.0] * 2)
    office.say("a", begun[:-8])
    assert (
        "block 1: with it the shard's gradient has 24 bytes; gradient_bytes_max is 20"
        in (office.closed["a"])
    )


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (send.gradient(0, 0, [1.0, NAN]), "non-finite gradients[1]=nan in the gradient of step 0"),
        (send.gradient(0, 0, [float("-inf")]), "gradients[0]=-inf"),
        (send.gradient(0, 0, [1.0], loss=NAN), "non-finite loss=nan with the gradient of step 0"),
        (send.block(0, 0, 3, 4, [2], [1.0, NAN]), "gradients[1]=nan in block 3 of step 0"),
        (send.non_block(0, 0, 1, [NAN]), "gradients[0]=nan in component 1"),
    ],
)
def test_what_is_not_finite_halts_the_run(data: bytes, said: str) -> None:
    """No average of it goes out, and everyone is told that the run is over."""
    office = Office()
    office.join("a", "b")
    office.say("a", data)
    assert office.end.finished is not None
    assert office.end.finished.status == "halted"
    assert said in office.end.finished.reason
    assert "worker 0 ('a')" in office.end.finished.reason
    for peer in "ab":
        assert office.heard(peer)[2:] == [SHUTDOWN]
        assert peer in office.closed


def test_stopping_after_the_step() -> None:
    """The step in work is finished, and its average sent, before the end is told."""
    office = Office(num_steps=5)
    office.join("a", "b")
    office.end.stop("enough", at_once=False)
    assert office.end.finished is None
    for worker, peer in enumerate("ab"):
        office.say(peer, send.gradient(0, worker, [1.0]))
    assert office.heard("a")[2:] == [(5, 0, (1.0,), 0.5), SHUTDOWN]
    assert office.end.finished == do.Finish("stopped", "enough")


def test_stopping_at_once() -> None:
    """The step in work is given up; so it is if its last worker dies."""
    office = Office()
    office.join("a", "b")
    office.end.stop("enough", at_once=True)
    assert office.heard("a")[2:] == [SHUTDOWN]
    office = Office()
    office.join("a", "b")
    office.end.stop("enough", at_once=False)
    for peer in "ab":
        office.end.lost(peer, "died")
    assert office.end.finished == do.Finish("stopped", "enough")


def test_after_the_end() -> None:
    """Nothing more is read or sent, and connections are closed."""
    office = Office(num_steps=1)
    office.join("a", "b")
    for worker, peer in enumerate("ab"):
        office.say(peer, send.gradient(0, worker, [1.0]))
    office.connect("late")
    assert office.closed["late"] == "the run is over"
    office.say("a", send.gradient(0, 0, [1.0]))
    office.pass_time(10_000)
    office.end.lost("a", "gone")
    assert office.end.finished == do.Finish("completed")
