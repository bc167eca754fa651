"""Real processes over TCP under random real faults, run after run: `make soak-real`.

`python -m tests.systems.soak_real 300` runs for 300 seconds, and `--replay SEED` makes one run
again. Each run must end on the reference's bits, with no sample lost or drawn twice. This process
must hold no more at the end than at the beginning.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from entrenar_py import systems
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Injected, Membership, Trace
from entrenar_py.systems.star import processes
from falsification import schedules
from tests.falsification.test_schedules import table
from tests.systems.holdings import Holdings, holdings, resident_bytes
from tests.systems.stars import REAL, SOON

SECONDS = 300
# After this many runs all code is loaded, and everything that is kept on purpose exists (workloads,
# compiled expressions, the allocator's arenas).
NUM_WARM = 20
# The memory that the allocator may keep. A trace has some 100 KiB, and five minutes make 200 runs:
# if traces were not freed, they would be more.
RSS_GROWTH_MIB_MAX = 16
# How long a worker that is absent at the end of a run is waited for before it is replaced.
ANSWER_S = 0.5
MIB = 2**20


@dataclass(frozen=True)
class Held:
    """The open resources and the memory of this process while it has no workers."""

    holdings: Holdings
    rss_bytes: int


@dataclass
class Soak:
    """The outcome of all runs: faults struck by (kind, place), ranks that came back, complaints."""

    num_runs: int = 0
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_rejoins: int = 0
    wrong: dict[int, str] = field(default_factory=dict)


def draw(seed: int) -> Scenario:
    """Draw the scenario of `seed`, as for the simulator, but only faults of real processes.

    Its times are shorter: a worker that is silent for one second is given up.
    """
    drawn = schedules.draw(seed, schedules.STAR)
    taken = {"audit_share", "block_bytes", "updates"} & set(drawn.options)
    kept = {name: drawn.options[name] for name in taken}
    befalls = tuple(map(_real, drawn.faults))
    return drawn.with_(system=REAL, faults=befalls, options={**SOON, **kept})


def _real(fault: Fault) -> Fault:
    if fault.seconds is None:
        return fault
    longest = max(schedules.SECONDS)
    return replace(fault, seconds=2.0 if fault.seconds == longest else 0.2)


def attempt(seed: int, soak: Soak) -> None:
    """Run and judge one seed, and add the outcome to `soak`."""
    scenario = draw(seed)
    run = systems.run(scenario, every_fault=False)
    complaint = schedules.judge(run, _calm(scenario))
    soak.num_runs += 1
    soak.struck.update((e.fault["kind"], e.fault.get("at", "")) for e in run.of(Injected))
    soak.num_rejoins += sum(event.change == "joined" for event in run.of(Membership))
    if complaint:
        soak.wrong[seed] = complaint


def _calm(scenario: Scenario) -> Trace:
    return systems.run(schedules.undisturbed(scenario).with_(options={}))


def soak(seconds: float, first_seed: int) -> bool:
    """Make runs for the given time and print the outcome; return whether all was right."""
    total, began = Soak(), time.monotonic()
    seed = first_seed
    while total.num_runs < NUM_WARM:
        attempt(seed, total)
        seed += 1
    before = _held()
    while time.monotonic() - began < seconds:
        attempt(seed, total)
        seed += 1
    after = _held()
    for wrong, complaint in total.wrong.items():
        print(f"seed {wrong}: {complaint}\n  python -m tests.systems.soak_real --replay {wrong}")
    print(table(total.struck))
    print(
        f"{total.num_runs} runs in {time.monotonic() - began:.0f} s from seed {first_seed}, "
        f"{total.struck.total()} faults struck, {total.num_rejoins} came back, "
        f"{len(total.wrong)} wrong"
    )
    grown = _grown(before, after)
    print(f"GROWN: {', '.join(grown)}" if grown else "nothing has grown")
    return not total.wrong and not grown


def _held() -> Held:
    """Return what this process holds after all workers were dismissed."""
    processes.crew().dismiss()
    return Held(holdings(), resident_bytes())


def _grown(before: Held, after: Held) -> list[str]:
    """Print what was held at each time, and return the names of what has grown."""
    rows = [
        ("MiB resident", before.rss_bytes // MIB, after.rss_bytes // MIB, RSS_GROWTH_MIB_MAX),
        *(
            (name, getattr(before.holdings, name), getattr(after.holdings, name), 0)
            for name in ("files", "processes", "threads", "objects")
        ),
    ]
    print(f"{'held without workers':24}{f'after {NUM_WARM} runs':>16}{'at the end':>16}")
    for name, first, last, _ in rows:
        print(f"{name:24}{first:>16}{last:>16}")
    return [name for name, first, last, most in rows if last - first > most]


def replay(seed: int) -> bool:
    """Make one run again and print its scenario and complaints; return whether there are none."""
    total = Soak()
    print(json.dumps(draw(seed).to_dict()))
    attempt(seed, total)
    print(total.wrong.get(seed, "nothing is wrong"))
    return not total.wrong


def main() -> int:
    """Soak for the time on the command line, or replay one seed; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems.soak_real")
    parser.add_argument("seconds", type=float, nargs="?", default=SECONDS, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--replay", type=int, metavar="SEED", help="make one run again")
    options = parser.parse_args()
    processes.ANSWER_S = ANSWER_S
    if options.replay is not None:
        return 0 if replay(options.replay) else 1
    return 0 if soak(options.seconds, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
