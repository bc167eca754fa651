"""An hour of training in one simulated run, with a fault every few steps: a part of `make soak`.

`python -m tests.systems.soak_hour` draws the faults from `--seed`. Recorded events are examined as
they come and then dropped, so that any memory that grows is a leak.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import pytest

from entrenar_py import systems
from entrenar_py.shared import faults
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Event, Injected, Membership, Shard, Update
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulation import SimulatedTransport
from entrenar_py.train.wire.effects import Effect, Gather
from entrenar_py.train.wire_io import simulation
from entrenar_py.train.wire_io.simulation import Simulation
from falsification import schedules
from tests.falsification.test_schedules import table
from tests.systems.stars import SIMULATED

NUM_STEPS = 1_000
HOUR_S = 3_600.0
COMPUTING_S = (0.2, 2.0)  # of a shard: a step takes some seconds
CALM_STEPS = 10  # before the end, in which absent workers come back
FAULT_EVERY = (3, 6)  # steps
LOOK_EVERY = 50  # steps
# Between two examinations the workers present and the messages in flight differ. A connection or a
# replica leaked with each fault would add up to 200 of them.
GROWTH_BYTES_MAX = 2**18
KIB = 2**10
# Strangers that are never entitled, whichever workers are present.
UNINVITED = [one for one in faults.STRANGERS if one not in ("taken_rank", "one_too_many")]


def draw(seed: int, num_steps: int = NUM_STEPS) -> Scenario:
    """Draw a run of four workers with any survivable faults; some workers leave for a while."""
    rng = random.Random(seed)
    scenario = Scenario(
        system=SIMULATED,
        workload="linear",
        world_size=4,
        seed=seed,
        num_shards=8,
        num_samples=100,
        batch_size=16,
        num_steps=num_steps,
        optimizer="momentum",
    )
    drawn: list[Fault] = []
    step = rng.randint(*FAULT_EVERY)
    while step < num_steps - CALM_STEPS:
        drawn += _trouble(rng, step, rng.randrange(scenario.world_size))
        step += rng.randint(*FAULT_EVERY)
    return scenario.with_(faults=tuple(drawn))


def _trouble(rng: random.Random, step: int, rank: int) -> list[Fault]:
    kind = rng.choice((*faults.ON_THE_WAY, "leave", "restart", "lie", "stranger"))
    if kind == "leave":
        back = step + rng.randrange(1, FAULT_EVERY[0])
        return [
            Fault(kind="leave", step=step, rank=rank),
            Fault(kind="join", step=back, rank=rank),
        ]
    if kind == "restart":
        return [Fault(kind="restart", step=step, at=rng.choice(faults.PLACES))]
    if kind == "lie":
        value = rng.choice(tuple(faults.LIES))
        at = rng.choice([one for one in faults.LIE_PLACES[value] if one in faults.PLACES])
        return [Fault(kind="lie", step=step, rank=rank, at=at, value=value)]
    if kind == "stranger":
        return [Fault(kind="stranger", step=step, value=rng.choice(UNINVITED))]
    seconds = rng.choice(schedules.SECONDS) if "seconds" in faults.NEEDED[kind] else None
    at = rng.choice(faults.PLACES)
    return [Fault(kind=kind, step=step, rank=rank, at=at, seconds=seconds)]


@dataclass
class Seen:
    """The part of a run that was examined so far."""

    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_rejoins: int = 0
    made: bytearray = field(default_factory=bytearray)  # 1 for each step; it does not grow
    wrong: list[str] = field(default_factory=list)
    bytes_held: list[int] = field(default_factory=list)
    num_open: dict[str, int] = field(default_factory=dict)  # before the last step


class Hour(ScenarioRun):
    """Examines the record of a run every LOOK_EVERY steps, and drops it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, SimulatedTransport)
        self.seen = Seen(made=bytearray(scenario.num_steps))
        calm = systems.run(schedules.undisturbed(scenario))
        self._calm_weights = {one.step: one.weights for one in calm.of(Update)}
        self._calm_ids = {(one.step, one.shard): one.ids for one in calm.of(Shard)}

    @property
    def simulation(self) -> Simulation:
        """The simulation that is running."""
        assert isinstance(self.transport, SimulatedTransport)
        return self.transport.simulation

    def notify(self, effect: Effect) -> None:
        super().notify(effect)
        if isinstance(effect, Gather):
            self._gathered(effect.step)

    def _gathered(self, step: int) -> None:
        if step % LOOK_EVERY == 0 or step == self.scenario.num_steps:
            self._look()
        if step == self.scenario.num_steps - 1:
            end = self.simulation.coordinator
            self.seen.num_open = {
                "connections": len(self.simulation._connections),
                "streams": len(end._connections),
                "peers": len(end.machine.peers),
                "workers": len(self.simulation.nodes),
            }

    def _look(self) -> None:
        for event in self.server.recorder.drain():
            self.judge(event)
        gc.collect()
        self.seen.bytes_held.append(tracemalloc.get_traced_memory()[0])

    def judge(self, event: Event) -> None:
        """Check that each step has the undisturbed bits, and each shard its own samples."""
        seen = self.seen
        match event:
            case Update(step=step, rank=rank):
                seen.made[step] = 1
                if event.weights != self._calm_weights[step]:
                    seen.wrong.append(f"step {step}: worker {rank} holds other weights")
            case Shard(step=step, shard=shard):
                if event.ids != self._calm_ids[step, shard]:
                    seen.wrong.append(f"step {step}: shard {shard} is of other samples")
            case Injected():
                seen.struck[event.fault["kind"], event.fault.get("at", "")] += 1
            case Admission() if event.let_in:
                seen.wrong.append(f"the stranger {event.case} was let in")
            case Membership(change="joined"):
                seen.num_rejoins += 1


def soak(scenario: Scenario) -> tuple[Hour, float]:
    """Run and examine `scenario`; return the examiner, and the virtual seconds that passed.

    `seen.wrong` has the complaints.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "COMPUTING_S", COMPUTING_S)
        tracemalloc.start()
        try:
            star = Hour(scenario)
            left = star.train()
        finally:
            tracemalloc.stop()
    seen, end = star.seen, left.end
    for event in left.events:  # the events after the last examination
        star.judge(event)
    if end.status != "completed":
        seen.wrong.append(f"it ended {end.status}: {end.reason}")
    if 0 in seen.made:
        seen.wrong.append(f"step {seen.made.index(0)} was never made")
    if set(seen.num_open.values()) != {scenario.world_size}:
        seen.wrong.append(f"with {scenario.world_size} workers there are {seen.num_open}")
    first, *_, last = seen.bytes_held[1:]
    if last - first > GROWTH_BYTES_MAX:
        seen.wrong.append(f"memory has grown from {first} to {last} bytes")
    return star, star.simulation.now


def main() -> int:
    """Run one hour; return 1 if anything is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems.soak_hour")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    star, virtual_s = soak(draw(options.seed))
    seen = star.seen
    if virtual_s < HOUR_S:
        seen.wrong.append(f"that was no hour: {virtual_s:.0f} s")
    print(table(seen.struck))
    print(
        f"{sum(seen.made)} steps in {virtual_s:.0f} s of virtual time "
        f"({time.monotonic() - began:.0f} s of real time), {seen.struck.total()} faults struck, "
        f"{seen.num_rejoins} came back; before the last step {seen.num_open}"
    )
    held = [seen.bytes_held[1], max(seen.bytes_held), seen.bytes_held[-1]]
    print("held, KiB: {} at first, {} at most, {} at the end".format(*(h // KIB for h in held)))
    for complaint in seen.wrong[:10]:
        print(f"WRONG (seed {options.seed}): {complaint}")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
