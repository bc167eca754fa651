"""The protocol in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.applicant import Fetcher
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Buffer, Decoder, Encoder
from entrenar_py.train.wire.messages import MESSAGES, Message
from entrenar_py.train.wire.terms import PIECE_BYTES, Package, Part, Run, Timing
from entrenar_py.train.wire_io.injections import Fate, Guest, Meddle, Meddling, unmeddled
from entrenar_py.train.wire_io.simulated_links import LATENCY_S
from entrenar_py.train.wire_io.simulation import Later, Simulation, Timeline
from tests.train.wire_io.fakes import COMPLETED, SECRET, FakeMember, FakeServer, run_of


def test_in_order() -> None:
    """Actions run by time, and those for the same time in the order of scheduling."""
    timeline, done = Timeline(), list[str]()
    timeline.later(2.0, lambda: done.append("second"))
    timeline.later(1.0, lambda: done.append("first"))
    timeline.later(2.0, lambda: done.append("third"))
    while timeline.has_until(5.0):
        timeline.next()
    assert (done, timeline.clock()) == (["first", "second", "third"], 2.0)


def test_work_takes_its_time_one_piece_after_the_other() -> None:
    """Results come in the order in which the work was given."""
    timeline, told = Timeline(), list[tuple[int, float]]()
    later = Later(timeline, random.Random(0), (0.5, 1.0), lambda action: action())
    for number in range(3):
        later.run(partial(int, number), lambda got: told.append((got, timeline.now)))
    assert told == []
    while timeline.has_until(10.0):
        timeline.next()
    assert [number for number, _ in told] == [0, 1, 2]
    times = [0.0, *(when for _, when in told)]
    assert all(0.5 <= after - before <= 1.0 for before, after in pairwise(times))


def test_what_is_forgotten_is_not_told() -> None:
    """A result that was forgotten is not reported; a later one is."""
    timeline, told = Timeline(), list[str]()
    later = Later(timeline, random.Random(0), (0.5, 1.0), lambda action: action())
    later.run(lambda: "old", told.append)
    later.forget()
    later.run(lambda: "new", told.append)
    while timeline.has_until(10.0):
        timeline.next()
    assert told == ["new"]


TIMING = Timing()


class Told(FakeServer):
    """Also remembers every message, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, Message]] = []

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        self.heard.append((rank, message))


def simulate(
    run: Run, *, seed: int = 0, meddle: Meddle = unmeddled, ranks: tuple[int, ...] = (0, 1)
) -> tuple[Simulation, Told, list[FakeMember]]:
    """Return a simulation with its workers started, the server's hands, and the workers'."""
    hands, members = Told(), list[FakeMember]()

    def member() -> FakeMember:
        members.append(FakeMember())
        return members[-1]

    simulation = Simulation(
        run, hands, member, seed=seed, meddle=meddle, timing=TIMING, secret=SECRET
    )
    for rank in ranks:
        simulation.start(rank, "cpu")
    return simulation, hands, members


def once(fate: Fate, kind: str, seconds: float = 0.0, rank: int = 1, nth: int = 0) -> Meddle:
    """`fate` befalls the first message of `kind` from or to `rank`, or that after `nth` others."""
    passed = 0

    def meddle(whose: int | None, up: bool, message: Message) -> Meddling | None:
        nonlocal passed
        if whose != rank or type(message).__name__ != kind:
            return None
        passed += 1
        return Meddling(fate, seconds) if passed == nth + 1 else None

    return meddle


def test_a_run_to_its_end() -> None:
    """All make every step, and finish."""
    simulation, hands, members = simulate(run_of())
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert hands.made == members[0].made == members[1].made == [0, 1, 2]
    assert [node.end.finished for node in simulation.nodes] == [COMPLETED, COMPLETED]
    assert [node.alive for node in simulation.nodes] == [False, False]


def test_audits_are_done_in_the_order_that_the_machine_wants() -> None:
    """Copies are kept, compared once complete, and each audit ends once."""
    simulation, hands, _ = simulate(run_of(num_blocks=2, audited=lambda step: [1, 3]))
    assert simulation.run(until_s=1000.0) == COMPLETED
    steps = [(one.step, one.shard, one.copy, one.culprit) for one in hands.concluded]
    assert sorted(steps) == [(step, shard, 0, None) for step in range(3) for shard in (1, 3)]
    assert hands.copies == {}
    assert hands.made == [0, 1, 2]


def test_the_same_seed_is_the_same_run() -> None:
    """Message by message, to the last tick."""

    def story(seed: int) -> tuple[Any, ...]:
        simulation, hands, _ = simulate(
            run_of(num_steps=20), seed=seed, meddle=once(Fate.CUT, "TreeNode")
        )
        simulation.run(until_s=1000.0)
        return simulation.now, hands.heard, hands.told, hands.made

    assert story(3) == story(3)
    other = story(4)
    assert other[:2] != story(3)[:2]
    assert other[-1] == story(3)[-1]


def test_a_run_that_never_ends_fails() -> None:
    """A run that waits for a worker for ever fails at the limit."""
    simulation, _, _ = simulate(run_of(), ranks=(0,))
    finish = simulation.run(until_s=50.0)
    assert finish.status == "failed"
    assert finish.reason == "not finished after 50 s of virtual time"


def test_who_gathers_too_long_fails() -> None:
    """`gather_s` ends first, and the workers are told."""
    simulation, _, _ = simulate(run_of(), ranks=(0,))
    finish = simulation.run(until_s=10_000.0)
    assert finish.status == "failed"
    assert "step 0 has waited 300 s for workers; present are [0]" in finish.reason
    assert simulation.nodes[0].end.finished == finish


def test_a_worker_that_is_frozen_freezes_no_more() -> None:
    """What came during a long freeze is handled before what comes after a short one within it."""

    def meddle(rank: int | None, up: bool, message: Message) -> Meddling | None:
        kind = type(message).__name__
        is_long = (rank, up, kind) == (1, False, "Welcome")
        return Meddling(Fate.FREEZE, 20.0 if is_long else 0.1) if rank == 1 else None

    simulation, hands, members = simulate(run_of(), meddle=meddle)
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert not [told for told in hands.told if "left" in told]
    assert members[1].made == [0, 1, 2]


def test_later_is_later() -> None:
    """A worker that starts during the run takes part from then on."""
    simulation, hands, _ = simulate(run_of(num_steps=5, awaited={0: [0], 3: [1]}), ranks=(0,))

    def start() -> None:
        simulation.start(1, "cpu")

    simulation.later(60.0, start)
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert simulation.now > 60.0
    assert hands.told == ["0 joined", "1 joined"]


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        *((kind, 0) for kind in ("TreeNode", "Computed", "Staged", "Average", "Commit")),
        *(("TreeNode", 1), ("TreeNode", 3), ("TreeNode", 5), ("Average", 1), ("Average", 2)),
    ],
)
@pytest.mark.parametrize("fate", [one for one in Fate if one is not Fate.KILL])
def test_a_fate_is_survived(fate: Fate, kind: str, nth: int) -> None:
    """With any fault in one message every step is made once, and both workers finish.

    A worker sends two nodes in each of three blocks, so it is also lost between blocks.
    """
    run = run_of(num_blocks=3, awaited={0: [0, 1], 1: [0, 1], 2: [0, 1]})
    simulation, hands, members = simulate(run, meddle=once(fate, kind, 40.0, nth=nth))
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert hands.made == members[0].made == members[1].made == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        ("Loaded", 0),
        ("TreeNode", 0),
        ("TreeNode", 3),
        ("Average", 0),
        ("Average", 1),
        ("Applied", 0),
    ],
)
def test_who_is_killed_stays_dead(kind: str, nth: int) -> None:
    """The other worker does all the work."""
    run, fate = run_of(num_blocks=2), once(Fate.KILL, kind, nth=nth)
    simulation, hands, members = simulate(run, meddle=fate)
    finish = simulation.run(until_s=1000.0)
    assert not simulation.nodes[1].alive
    assert hands.made == members[0].made
    if kind == "Loaded":  # it was awaited, and never came
        assert "present are [0]" in finish.reason
    else:
        assert finish == COMPLETED
        assert any(one.startswith("1 left: ") for one in hands.told)


KINDS = sorted(kind.__name__ for kind in MESSAGES.values())


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            st.sampled_from([fate for fate in Fate if fate is not Fate.KILL]),
            st.sampled_from(KINDS),
            st.sampled_from([0.5, 40.0]),
            st.integers(0, 1),
            st.integers(0, 5),
        ),
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_any_fates_are_survived(
    seed: int, fates: list[tuple[Fate, str, float, int, int]], num_blocks: int
) -> None:
    """With any faults in any messages the run ends, and every step was made once."""
    meddles: list[Callable[..., Meddling | None]] = [once(*fate) for fate in fates]

    def meddle(rank: int | None, up: bool, message: Message) -> Meddling | None:
        return next(filter(None, (one(rank, up, message) for one in meddles)), None)

    simulation, hands, members = simulate(
        run_of(awaited={}, num_blocks=num_blocks), seed=seed, meddle=meddle
    )
    assert simulation.run(until_s=10_000.0) == COMPLETED
    assert hands.made == [0, 1, 2]
    assert any(member.made == [0, 1, 2] for member in members)


def test_who_speaks_to_a_coordinator_that_died_is_not_heard() -> None:
    """A client's bytes to the old coordinator are lost; the run goes on."""
    simulation, _, _ = simulate(run_of())
    simulation.visit(Guest(lambda _: bytes(100)))
    last_word_s = 2 * LATENCY_S[1]
    hands = Told()
    simulation.later(0.75 * last_word_s, lambda: simulation.restart(run_of(), hands))
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert hands.made == [0, 1, 2]


class Late(Guest):
    """A client that fetches files, and checks them. `there` has the bytes of each that came."""

    def __init__(self, files: dict[str, bytes], there: dict[str, int]) -> None:
        super().__init__(lambda challenge: b"")
        self.there, self.finished = there, False
        parts = [Part(file, len(files[file]), there[file]) for file in files]
        self._files = files
        self._machine = Fetcher(
            "up",
            "1" * 32,
            secret=SECRET,
            backend="cpu",
            package=next(iter(files)),
            parts=parts,
            timing=TIMING,
            patience_s=1000.0,
            now=0.0,
        )
        self._encoder = Encoder()
        self._stream = Decoder(lambda kind: 2**21, direction=FROM_COORDINATOR)

    def heard(self, data: bytes) -> list[bytes]:
        """Take bytes from the coordinator; return what to send, in one piece, so in order."""
        said = list[bytes]()
        for received in self._stream.feed(data):
            if self.finished:
                break
            for effect in self._machine.receive(received.message):
                match effect:
                    case do.Send(_, message):
                        said.append(b"".join(self._encoder.encode(message)))
                    case do.Secure(_, key):
                        self._encoder.key = self._stream.key = key
                    case do.Store(file, offset):
                        content = bytes(received.payload)
                        assert offset == self.there[file]
                        assert content == self._files[file][offset : offset + PIECE_BYTES]
                        self.there[file] += len(content)
                    case do.Finish(status):
                        self.finished = status == "completed"
        return [b"".join(said)] if said else []


@pytest.mark.parametrize("seed", range(5))
def test_files_are_fetched_while_others_train(seed: int) -> None:
    """A late worker's pieces come between the messages of steps, whatever befalls a worker."""
    files = {f"{n:064x}": bytes([n]) * size for n, size in enumerate((50, 3 * PIECE_BYTES + 1))}
    sizes = {file: len(content) for file, content in files.items()}
    run = run_of(num_steps=40, package=Package(next(iter(files)), sizes))
    simulation, hands, members = simulate(run, seed=seed, meddle=once(Fate.CUT, "TreeNode"))
    hands.files = files
    guest = Late(files, dict.fromkeys(files, 0))
    simulation.later(0.2, lambda: simulation.visit(guest))
    assert simulation.run(until_s=1000.0) == COMPLETED
    assert guest.finished
    assert guest.there == sizes
    assert hands.made == list(range(40))
    assert len(members) == 2
