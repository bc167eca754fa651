"""Links of simulated processes, and what stars and meshes of many workers need of them."""

from __future__ import annotations

import pytest

from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.simulated_links import Card, Lane, Network
from tests.benchmarks.scale import Cluster, simulate


def test_messages_wait_for_each_other() -> None:
    """A message begins when the one before it has passed, and both are counted."""
    lane, network = Lane(), Network(bytes_s=100.0, message_s=0.5)
    begins = [lane.occupy(now, 50, network.seconds(50)) for now in (0.0, 0.2, 9.0)]
    assert begins == [0.0, 1.0, 9.0]
    assert (lane.messages, lane.bytes) == (3, 150)


def test_a_blocked_lane_keeps_messages_back() -> None:
    """What was sent meanwhile passes when the lane is open again; the other lane is open."""
    card = Card()
    card.block(out=True, until=5.0)
    card.block(out=True, until=4.0)
    assert card.out.occupy(1.0, 10, 0.0) == 5.0
    assert card.into.occupy(1.0, 10, 0.0) == 1.0
    assert card.blocked_until == 5.0


def test_an_end_of_a_stream_takes_no_time() -> None:
    """It has no bytes, and does not count as a message."""
    lane, network = Lane(), Network(bytes_s=1.0, message_s=1.0)
    lane.occupy(0.0, 0, network.seconds(0))
    assert (lane.free_at, lane.messages) == (0.0, 0)


ELEMENTS = 4096
OVERHEAD_BYTES_MAX = 1500  # of a worker's messages of one step, with its events


def test_the_link_of_a_stars_coordinator_is_the_bottleneck() -> None:
    """A step takes as long as all sums into that link, and then all averages out of it."""
    workers, bytes_s = 64, 1e6
    outcome = simulate(
        Cluster(
            trainer="parameter_server",
            workers=workers,
            steps=4,
            elements=ELEMENTS,
            network=Network(bytes_s=bytes_s),
        )
    )
    assert (outcome.status, outcome.digest) == ("completed", "same")
    for num_bytes in outcome.coordinator_bytes:
        overhead_bytes = num_bytes - workers * 4 * ELEMENTS
        assert 0 < overhead_bytes < workers * OVERHEAD_BYTES_MAX
    assert 7 * workers <= outcome.messages < 8 * workers  # the rest are heartbeats
    # The bytes are those of one step, and the time is that of the median one, rounded.
    transfers_s = sum(outcome.coordinator_bytes) / bytes_s - 1e-3
    assert transfers_s < outcome.step_s < transfers_s + 0.1  # computing takes 0.05 s, and latency


def test_every_link_of_a_mesh_carries_the_vector_twice() -> None:
    """A worker sends (n - 1) / n of the vector as sums, and its own part to n - 1 others."""
    workers, bytes_s = 16, 1e6
    outcome = simulate(
        Cluster(
            trainer="mesh",
            workers=workers,
            steps=4,
            elements=ELEMENTS,
            network=Network(bytes_s=bytes_s),
        )
    )
    assert (outcome.status, outcome.digest) == ("completed", "same")
    payload_bytes = 2 * (workers - 1) / workers * 4 * ELEMENTS
    for num_bytes in outcome.worker_bytes:
        overhead_bytes = num_bytes - payload_bytes
        assert 0 < overhead_bytes < workers * 2 * 250 + OVERHEAD_BYTES_MAX
    assert max(outcome.coordinator_bytes) < workers * OVERHEAD_BYTES_MAX
    assert sum(outcome.worker_bytes) / 2 / bytes_s < outcome.step_s


@pytest.mark.parametrize(
    ("trainer", "workers", "silent", "losses_s"),
    [
        ("parameter_server", 64, False, 8.0),
        ("mesh", 16, True, 1.0),
        pytest.param("parameter_server", 64, True, 1.0, marks=pytest.mark.by_hand),
        pytest.param("mesh", 16, False, 8.0, marks=pytest.mark.by_hand),
    ],
)
def test_workers_come_and_go(trainer: str, workers: int, silent: bool, losses_s: float) -> None:
    """The weights have the bits of one worker, whoever dies and joins; the run ends.

    A machine that fails silently holds up a step until it counts as dead.
    """
    outcome = simulate(
        Cluster(
            trainer=trainer,
            workers=workers,
            steps=30,
            elements=64,
            network=Network(bytes_s=1e6, message_s=1e-4),
            change=60 * losses_s / workers,
            silent=silent,
            timing=Timing(heartbeat_s=0.5, dead_after_s=3.0),
        )
    )
    assert (outcome.status, outcome.digest) == ("completed", "same")
    assert outcome.lost > 1
    assert outcome.joined > 1
