"""Averages over the original system's wire, under schedules of arrivals, deaths and repetitions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.upstream import frames as say
from entrenar_py.train.upstream.averager import Averager
from entrenar_py.train.upstream.frames import WHOLE, Decoder, Part, WireMessage, encode
from entrenar_py.train.upstream.server import AveragingEnd
from entrenar_py.train.upstream.terms import AveragingRun, Patience
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer

Vector = NDArray[np.float32]
Outcome = TypeVar("Outcome")

NUM_ELEMENTS = 7
NUM_BLOCKS, COMPONENTS = 2, (0,)
BYTES_MAX = 2**12
TURNS_MAX = 10_000  # longer than any of these runs
DIFFERENT = "different"
_CANCELLING = (2.0**90, -(2.0**90))
_AVERAGES = (say.AveragedGradient, say.AveragedBlock, say.AveragedNonBlock)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The course of a run. `order` selects the next worker to deliver, among workers with a shard.

    In step `dies_in`, the worker with the last place dies before it has delivered everything; if
    `returns`, another worker then joins. If `repeats`, each worker repeats earlier deliveries, also
    within the step. This is only used where no worker has two shards of a step, because gradients
    don't name their shard. The last shard of step `poisoned` has a NaN.
    """

    order: Callable[[Sequence[int], random.Random], int]
    in_blocks: bool = False
    num_workers: int | None = None
    dies_in: int | None = None
    returns: bool = False
    repeats: bool = False
    poisoned: int | None = None


def _first(peers: Sequence[int], rng: random.Random) -> int:
    return min(peers)


def _last(peers: Sequence[int], rng: random.Random) -> int:
    return max(peers)


def _any(peers: Sequence[int], rng: random.Random) -> int:
    return rng.choice(list(peers))


SCHEDULES: Mapping[str, Schedule] = {
    "in order": Schedule(order=_first),
    "backwards": Schedule(order=_last),
    "in any order": Schedule(order=_any),
    "one worker": Schedule(order=_first, num_workers=1),
    "every message comes twice": Schedule(order=_any, repeats=True),
    "a worker dies": Schedule(order=_first, dies_in=1),
    "a worker dies and another comes": Schedule(order=_last, dies_in=1, returns=True),
    "blocks in order": Schedule(order=_first, in_blocks=True),
    "blocks in any order": Schedule(order=_any, in_blocks=True),
    "a worker dies among its blocks": Schedule(order=_last, in_blocks=True, dies_in=1),
    "a NaN": Schedule(order=_any, poisoned=1),
    "a NaN in a block": Schedule(order=_any, in_blocks=True, poisoned=1),
}


def run(scenario: Scenario) -> trace.Trace:
    """Record a Heard event for each schedule, step and part.

    The scenario's seed determines the gradients and the order of deliveries.
    """
    recorder = Recorder(scenario)
    for case, schedule in SCHEDULES.items():
        if schedule.repeats and scenario.num_shards > scenario.world_size:
            continue
        played = _Play(scenario, schedule, random.Random(f"{scenario.seed} {case}"))
        played.play()
        for event in played.events(case):
            recorder.emit(event)
    return recorder.finish(status="completed")


class _AtOnce:
    """Does all work when it is requested."""

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        done(work())

    def forget(self) -> None:
        """Nothing is pending."""


@dataclass
class _Worker:
    """A worker: its pending deliveries, its last delivery, and the averages that it received."""

    decoder: Decoder
    due: list[bytes] = field(default_factory=list)
    before: list[bytes] = field(default_factory=list)
    place: int = -1
    heard: dict[tuple[int, Part], bytes] = field(default_factory=dict)


class _Play:
    """One run under a schedule."""

    def __init__(self, scenario: Scenario, schedule: Schedule, rng: random.Random) -> None:
        self._schedule, self._rng = schedule, rng
        world_size = schedule.num_workers or scenario.world_size
        self._run = AveragingRun(
            num_samples=scenario.num_samples,
            num_steps=scenario.num_steps,
            world_size=world_size,
            num_shards=scenario.num_shards,
            batch_size=scenario.batch_size,
            num_awaited=world_size,
            gradient_bytes_max=BYTES_MAX,
            components=COMPONENTS if schedule.in_blocks else None,
            late_joins=True,
        )
        self._terms = _Terms(self._run, scenario.seed, poisoned=schedule.poisoned)
        self._workers: dict[int, _Worker] = {}
        self._everyone: list[_Worker] = []
        self._died = False
        machine = Averager(self._run, patience=Patience(), now=0.0)
        self._end = AveragingEnd(
            *(machine, self, lambda: 0.0, _AtOnce()), frame_bytes_max=BYTES_MAX
        )

    # --- the network, as the coordinator's end sees it --------------------------------------------

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        """Pass a message to a worker."""
        assert isinstance(peer, int)
        worker = self._workers[peer]
        for received in worker.decoder.feed(b"".join(buffers)):
            self._hear(worker, received.message, bytes(received.gradients or b""))

    def admit(self, peer: Peer) -> None:
        """Do nothing, because all workers have places."""

    def close(self, peer: Peer, reason: str) -> None:
        """End a connection."""
        assert isinstance(peer, int)
        self._workers.pop(peer, None)

    # --- the workers ------------------------------------------------------------------------------

    def play(self) -> None:
        """Let the workers deliver until the run is over, or nothing is left to deliver."""
        for peer in range(self._run.world_size):
            self._join(peer)
        for _ in range(TURNS_MAX):
            busy = [peer for peer, worker in self._workers.items() if worker.due]
            if self._end.finished is not None or not busy:
                return
            peer = self._schedule.order(busy, self._rng)
            if self._is_to_die(peer):
                self._die(peer)
            else:
                self._say(peer, self._workers[peer].due.pop(0))
        raise AssertionError(f"no end after {TURNS_MAX} messages")

    def _join(self, peer: int) -> None:
        def room(message: WireMessage, num_bytes: int) -> memoryview:
            return memoryview(bytearray(num_bytes))

        kinds = tuple(say.WIRE_MESSAGES.values())
        worker = _Worker(Decoder(bytes_max=BYTES_MAX, kinds=kinds, room=room))
        self._workers[peer] = worker
        self._everyone.append(worker)
        self._end.connected(peer, "")
        self._say(peer, _frame(say.JoinRequest(node_id=str(peer), gpu_count=1, backend="cpu")))

    def _say(self, peer: int, frame: bytes) -> None:
        while frame:
            place = self._end.buffer(peer)
            if place is None:
                return
            num_bytes = min(len(frame), place.nbytes)
            place[:num_bytes] = frame[:num_bytes]
            frame = frame[num_bytes:]
            self._end.filled(peer, num_bytes)

    def _hear(self, worker: _Worker, message: WireMessage, gradients: bytes) -> None:
        if isinstance(message, say.JoinAccepted):
            worker.place = message.worker_id
        elif isinstance(message, say.ShardAssignment):
            frames = self._terms.frames(worker.place, message, in_blocks=self._schedule.in_blocks)
            if self._schedule.in_blocks:
                self._rng.shuffle(frames)
            if self._schedule.repeats:
                worker.due += [*worker.before, *frames, *frames]
            else:
                worker.due += frames
            worker.before = frames
        elif isinstance(message, _AVERAGES):
            worker.heard[message.step, _part_of(message)] = gradients

    def _is_to_die(self, peer: int) -> bool:
        last = self._workers[peer].place == self._run.world_size - 1
        in_step = self._end.machine.step == self._schedule.dies_in
        begun = len(self._workers[peer].due) < len(COMPONENTS) + NUM_BLOCKS
        return not self._died and last and in_step and (begun or not self._schedule.in_blocks)

    def _die(self, peer: int) -> None:
        self._died = True
        del self._workers[peer]
        self._end.lost(peer, "died")
        if self._schedule.returns:
            self._join(len(self._everyone))

    # --- the averages that workers received -------------------------------------------------------

    def events(self, case: str) -> Iterator[trace.Heard]:
        """Yield the averages that workers received, of all parts and steps up to a poisoned one."""
        last = self._schedule.poisoned
        for step in range(self._run.num_steps if last is None else last + 1):
            for part in _parts(in_blocks=self._schedule.in_blocks):
                if step != last or self._terms.is_poisoned(step, part):
                    yield self._heard(case, step, part)

    def _heard(self, case: str, step: int, part: Part) -> trace.Heard:
        heard = {w.heard[step, part] for w in self._everyone if (step, part) in w.heard}
        poisoned = self._terms.is_poisoned(step, part)
        digest, roundings, element = None, None, None
        if len(heard) > 1:
            digest = DIFFERENT
        elif heard:
            (values,) = heard
            digest = str(blake3(values).hexdigest(16))
            if not poisoned:
                roundings, element = self._terms.roundings(step, part, values)
        return trace.Heard(
            case=case,
            step=step,
            part=str(part),
            digest=digest,
            poisoned=poisoned,
            roundings=roundings,
            element=element,
        )


class _Terms:
    """The gradients of all shards, drawn from a seed, and their weights."""

    def __init__(self, run: AveragingRun, seed: int, *, poisoned: int | None) -> None:
        self._run, self._seed, self._poisoned = run, seed, poisoned

    def is_poisoned(self, step: int, part: Part) -> bool:
        """Return whether a term of `part` is not finite; only the last part can have one."""
        return step == self._poisoned and part in (WHOLE, _parts(in_blocks=True)[-1])

    def vector(self, step: int, shard: int, part: Part) -> Vector:
        """Return the gradient of a shard: numbers of very different sizes.

        The first elements of shards 0 and 1 cancel each other, so that any different order of
        additions loses bits of the rest.
        """
        rng = np.random.default_rng([self._seed, step, shard, *part])
        sizes = rng.integers(-30, 30, NUM_ELEMENTS)
        values = np.ldexp(rng.standard_normal(NUM_ELEMENTS), sizes).astype(np.float32)
        if shard < len(_CANCELLING) and len(self._run.shards(step)) > 1:
            values[0] = _CANCELLING[shard] * self.weight(step, 1 - shard, part)
        if self.is_poisoned(step, part) and shard == len(self._run.shards(step)) - 1:
            values[NUM_ELEMENTS // 2] = np.nan
        return values

    def weight(self, step: int, shard: int, part: Part) -> int:
        """Return the weight of a shard in the average of `part`."""
        return self.total(step, shard) if part == WHOLE else len(self._run.shards(step)[shard])

    def total(self, step: int, shard: int) -> int:
        """Return the number of samples that count in a shard, at least half of all."""
        samples = len(self._run.shards(step)[shard])
        rng = np.random.default_rng([self._seed, step, shard])
        return int(rng.integers(-(-samples // 2), samples, endpoint=True))

    def frames(
        self, worker: int, assignment: say.ShardAssignment, *, in_blocks: bool
    ) -> list[bytes]:
        """Return the frames that a worker delivers for its assigned shard."""
        step = assignment.step
        shard = [ids.start for ids in self._run.shards(step)].index(assignment.start)
        return [
            _frame(
                _upload(part, worker, step, self.total(step, shard)),
                self.vector(step, shard, part).tobytes(),
            )
            for part in _parts(in_blocks=in_blocks)
        ]

    def roundings(self, step: int, part: Part, values: bytes) -> tuple[float, int]:
        """Return an average's largest deviation from the mean (`_roundings`), and its index."""
        shards = self._run.shards(step)
        weights = [self.weight(step, shard, part) for shard in range(len(shards))]
        vectors = [self.vector(step, shard, part) for shard in range(len(shards))]
        errors = [
            _roundings(
                Fraction(float(got)),
                [Fraction(float(v[i])) * w for v, w in zip(vectors, weights, strict=True)],
                sum(weights),
            )
            for i, got in enumerate(np.frombuffer(values, "<f4"))
        ]
        worst = max(range(len(errors)), key=errors.__getitem__)
        return errors[worst], worst


def _roundings(got: Fraction, products: Sequence[Fraction], total: int) -> float:
    """Return |got - mean|, divided by the error of float64 sums that are rounded to float32."""
    mean = sum(products, Fraction()) / total
    sizes = sum(map(abs, products), Fraction()) / total
    in_float64 = (len(products).bit_length() + 3) * sizes / 2**53
    allowed = (abs(mean) + in_float64) / 2**24 + in_float64 + Fraction(1, 2**150)
    return float(abs(got - mean) / allowed)


def _parts(*, in_blocks: bool) -> list[Part]:
    if not in_blocks:
        return [WHOLE]
    blocks = [Part(say.BlockGradient.tag, number) for number in range(NUM_BLOCKS)]
    return [*blocks, *(Part(say.NonBlock.tag, number) for number in COMPONENTS)]


def _upload(part: Part, worker: int, step: int, total: int) -> WireMessage:
    if part == WHOLE:
        return say.GradientPayload(
            step=step, worker_id=worker, gradients=NUM_ELEMENTS, loss=0.5, correct=0, total=total
        )
    if part.tag == say.BlockGradient.tag:
        return say.BlockGradient(
            step=step,
            worker_id=worker,
            block=part.number,
            num_blocks=NUM_BLOCKS,
            component_sizes=(1, NUM_ELEMENTS - 1),
            gradients=NUM_ELEMENTS,
        )
    return say.NonBlock(step=step, worker_id=worker, component=part.number, gradients=NUM_ELEMENTS)


def _part_of(message: WireMessage) -> Part:
    if isinstance(message, say.AveragedBlock):
        return Part(say.BlockGradient.tag, message.block)
    if isinstance(message, say.AveragedNonBlock):
        return Part(say.NonBlock.tag, message.component)
    return WHOLE


def _frame(message: WireMessage, gradients: bytes = b"") -> bytes:
    return b"".join(encode(message, gradients))
