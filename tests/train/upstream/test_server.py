"""The averaging coordinator over loopback TCP, with workers that don't use its codec."""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.upstream.server import AveragingServer
from entrenar_py.train.upstream.terms import Patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire_io import door
from tests.train.upstream import original as send
from tests.train.upstream.averaging import run_of
from tests.train.upstream.original_worker import Hall, OriginalWorker, hall, mean_of_samples
from tests.train.upstream.test_averaging_end import STRANGE

COMPLETED = do.Finish("completed")


def departures(place: Hall) -> list[str]:
    """Return why workers left."""
    return [one.reason for one in place.effects if isinstance(one, do.Left)]


def train(place: Hall, num_workers: int) -> list[list[tuple[Any, ...]]]:
    """Return what each of `num_workers` hears of averages until the end."""
    with ThreadPoolExecutor(num_workers) as threads:
        workers = [place.worker(f"w{n}") for n in range(num_workers)]
        return list(threads.map(lambda one: one.train(mean_of_samples), workers))


def test_runs_have_the_same_bits_for_any_number_of_workers() -> None:
    """One to four workers, of four shards: everyone hears the same averages."""
    runs = []
    for num_workers in (1, 2, 3, 4):
        with hall(num_samples=23, num_steps=3, num_shards=4, world_size=num_workers) as place:
            heard = train(place, num_workers)
            assert place.end() == COMPLETED
        assert all(one == heard[0] for one in heard)
        runs.append(heard[0])
    assert all(one == runs[0] for one in runs)
    ids = np.arange(23)
    for step, values, loss in runs[0]:
        exact = [np.mean(np.sin(ids + step)), np.mean(ids), 0.0]
        np.testing.assert_allclose(values, exact, rtol=1e-6)
        assert loss == 0.5


def test_a_worker_that_dies_does_not_change_the_bits() -> None:
    """It dies with a shard, in the middle of a frame; another one takes the shard."""
    with hall(num_samples=23, num_steps=3, num_shards=4, world_size=2) as place:
        undisturbed = train(place, 2)[0]
    with hall(num_samples=23, num_steps=3, num_shards=4, world_size=2) as place:
        alive, dies = place.worker(), place.worker()
        step, start, end = dies.hear()[1:]
        data = send.gradient(step, dies.worker, mean_of_samples(step, start, end))
        dies.say(data[: len(data) // 2])
        dies.close()
        assert alive.train(mean_of_samples) == undisturbed
        assert place.end() == COMPLETED
    assert departures(place)[0] == "closed by the other end"


def test_one_byte_at_a_time() -> None:
    """Each byte of a worker comes in a packet of its own."""
    with hall(world_size=1, num_steps=1) as place:
        slow = place.worker(joins=False)
        data = send.join() + send.heartbeat() + send.gradient(0, 0, [1.0, 2.0], total=10)
        for byte in data[:20]:
            slow.say(bytes([byte]))
        for start, end in pairwise([*range(20, len(data), 1), len(data)]):
            slow.say(data[start:end])
            if end == len(send.join()):  # a shard has to be assigned before it is delivered
                assert [slow.hear()[0], slow.hear()[0]] == [2, 3]
        assert slow.hear() == (5, 0, (1.0, 2.0), 0.5)
        assert slow.hear() == (7,)
        slow.close()
        assert place.end() == COMPLETED


NUM_LARGE = 2**21  # floats: 8 MiB, more than the kernel keeps for a connection


def large(step: int, worker: int) -> bytes:
    """Return the frame of a large gradient."""
    values = np.full(NUM_LARGE, step + worker, "<f4").tobytes()
    body = b"\x04" + struct.pack("<QIQ", step, worker, NUM_LARGE) + values
    return send.frame(body + struct.pack("<fQQ", 0.5, 0, 1))


def large_average(worker: OriginalWorker) -> np.ndarray[Any, Any]:
    """Return the gradient of the AveragedGradient that comes next."""
    data = worker.hear_bytes()
    assert data[0] == 5
    return np.frombuffer(data[17:-4], "<f4")


def test_a_slow_reader_holds_up_nobody_else() -> None:
    """Who reads gets the average; who doesn't gets it later, though the run is over by then."""
    with hall(num_steps=1) as place:
        quick, slow = place.worker(), place.worker()
        for worker in (quick, slow):
            assert worker.hear()[0] == 3
            worker.say(large(0, worker.worker))
        assert np.all(large_average(quick) == 0.5)
        assert quick.hear() == (7,)
        quick.close()
        assert np.all(large_average(slow) == 0.5)
        assert slow.hear() == (7,)
        slow.close()
        assert place.end() == COMPLETED


def test_a_frame_beyond_the_original_cap() -> None:
    """With a larger `frame_bytes_max` a frame may have more than 100 MB."""
    count = 26_000_000
    with hall(world_size=1, num_steps=1, frame_bytes_max=2**27) as place:
        worker = place.worker()
        assert worker.hear()[0] == 3
        values = np.arange(count, dtype="<f4")
        head = b"\x04" + struct.pack("<QIQ", 0, 0, count)
        length = len(head) + values.nbytes + 20
        assert length > 100_000_000
        worker.say(struct.pack(">I", length) + head)
        worker.socket.sendall(values.data)
        worker.say(struct.pack("<fQQ", 0.5, 0, 1))
        assert large_average(worker).tobytes() == values.tobytes()
        worker.close()


# --- attacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STRANGE)
def test_a_stranger_is_sent_away(case: str) -> None:
    """The run goes on as if it had not come."""
    with hall(num_steps=2) as place:
        first = place.worker()
        stranger = place.worker(joins=False)
        stranger.say(STRANGE[case])
        assert stranger.is_closed()
        second = place.worker()
        with ThreadPoolExecutor(2) as threads:
            heard = list(threads.map(lambda one: one.train(mean_of_samples), (first, second)))
        assert heard[0] == heard[1]
        assert place.end() == COMPLETED


def test_more_connections_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that say nothing can't keep a worker out."""
    monkeypatch.setattr(
        "entrenar_py.train.upstream.server.Door",
        lambda *given, **more: door.Door(*given, strangers_max=8, **more),
    )
    with hall(world_size=1, num_steps=1, hello_s=2.0) as place:
        for _ in range(50):
            place.worker(joins=False)
        worker = place.worker()
        assert len(worker.train(mean_of_samples)) == 1
        worker.close()
        assert place.end() == COMPLETED
    assert place.strangers[0] > 0


def test_what_a_member_may_do_wrong() -> None:
    """A worker that joined and then sends a count of 2^62 loses its connection, and no one else."""
    with hall(num_steps=1, num_shards=2) as place:
        good, bad = place.worker(), place.worker()
        assert bad.hear()[0] == 3
        head = b"\x04" + struct.pack("<QIQ", 0, bad.worker, 2**62)
        bad.say(send.frame(head + bytes(20)))
        assert bad.is_closed()
        assert len(good.train(mean_of_samples)) == 1
        good.close()
        assert place.end() == COMPLETED
    assert "gradients=4611686018427387904" in departures(place)[0]


def test_nobody_comes() -> None:
    """A run without workers ends after `gather_s`."""
    with hall(gather_s=0.2) as place:
        assert place.end().status == "failed"


def test_who_says_nothing_is_given_up() -> None:
    """A worker that has beaten and falls silent, and one that takes too long, lose their shards."""
    with hall(num_steps=1, dead_after_s=0.3, shard_s=0.6, world_size=3) as place:
        beats, hangs, works = (place.worker() for _ in range(3))
        beats.say(send.heartbeat())
        assert len(works.train(mean_of_samples)) == 1
        works.close()
        assert place.end() == COMPLETED
        hangs.close()
        beats.close()
    assert any("silent for" in reason for reason in departures(place))
    assert any("over one shard" in reason for reason in departures(place))


def test_it_listens_on_loopback_alone() -> None:
    """Another address needs to be said to be insecure."""
    with pytest.raises(UsageError, match=r"this wire has no authentication.*or say --insecure"):
        listening("0.0.0.0", insecure=False)
    listening("0.0.0.0", insecure=True)


def listening(host: str, *, insecure: bool) -> None:
    """Listen at `host`, and stop."""

    async def listen() -> None:
        server = AveragingServer(run_of(), patience=Patience(), frame_bytes_max=2**12)
        await server.listen(host, 0, insecure=insecure)
        server.stop("the test", at_once=True)
        await server.finish()

    asyncio.run(listen())


def test_a_bug_ends_the_run_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the coordinator is raised by `finish`, and hangs nobody."""

    def broken(*given: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("entrenar_py.train.upstream.server.weighted_mean", broken)
    with hall(world_size=1) as place:
        worker = place.worker()
        assert worker.hear()[0] == 3
        worker.say(send.gradient(0, 0, [1.0]))
        with pytest.raises(RuntimeError, match="planted"):
            place.end()
        assert worker.is_closed()
