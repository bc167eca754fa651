"""Simulated pipelines with random faults: `python -m tests.train.stages.soak NUM [FIRST]`.

Each seed is one run: its stages, schedule and faults follow from it. Prints the seeds of the runs
that did not end as undisturbed ones do.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.train.stages import trials


def main(num: int, first: int = 0) -> int:
    """Run the seeds from `first` on; return how many runs went wrong."""
    since, wrong, struck, rounds = time.monotonic(), list[int](), Counter[str](), 0
    for seed in range(first, first + num):
        trial = trials.seeded(seed)
        try:
            trial.require_undisturbed()
        except AssertionError as error:
            wrong.append(seed)
            print(f"seed {seed}, {trial.strikes}: {error}", flush=True)
        struck.update(str(fate) for at, (fate, _) in trial.strikes.items() if at < len(trial.said))
        rounds += trial.witness.rounds
    seconds = time.monotonic() - since
    print(f"{num} runs, {rounds} rounds, {struck.total()} faults {dict(struck)}, {seconds:.0f} s")
    print(f"wrong: {wrong or 'none'}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
