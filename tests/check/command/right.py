"""`make right`: many runs of right scripts, with several seeds and 1 to 4 workers: no alarm.

`python -m tests.check.command.right [NUM_RUNS [FIRST]] [--jobs N]` tries the cases from number
FIRST on, N at a time, until they have made NUM_RUNS runs. The cases come in a fixed order: every
script with its own number of workers, then with others, then all of that with the next seed. The
exit code is 1 after an alarm, or if a script could not be run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from entrenar_py.shared import trace
from entrenar_py.shared.verdict import Finding, Verdict
from falsification import twins as scripts_of_users
from falsification.twins import Twin
from tests.check.command import scripts, side_by_side, twins

NUM_RUNS = 500
DEADLINE_S = 300.0  # a run takes seconds; a machine that does other things needs more
_THREE = (("torch.randn(32, 4)", "torch.randn(24, 4)"), ("GLOBAL_BATCH = 8", "GLOBAL_BATCH = 6"))
_SNAPSHOT = ("--total-steps", "{steps}", "--snapshot-dir", "{workdir}")
_ALL_KNOBS = tuple(scripts.KNOBS)
# Script -> the numbers of workers for which it is right, its own first, and the knobs to turn.
_EXAMPLES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "accumulation.py": ((2, 1), ()),
    "ddp.py": ((2, 1, 4), ()),
    "ema.py": ((2, 1, 4), ()),
    "experts.py": ((2, 1, 4), ()),
    "fsdp.py": ((2, 1, 4), ()),
    "knobs.py": ((2, 1, 4), _ALL_KNOBS),
    "lora.py": ((2, 1, 4), ()),
    "plain_loop.py": ((2, 1, 4, 3), ()),
    "resume.py": ((2, 1, 4), ()),
    "tensor_parallel.py": ((4, 2, 1), ()),
    "uneven.py": ((2, 1, 4, 3), ()),
}
_OF_THREE = ("ddp.py", "fsdp.py")  # right for three workers with other sizes
# The guard that the twins of resumes do without.
_GUARD = (
    (
        "            optimizer.step()\n",
        "            assert all(p.grad.isfinite().all() for p in whole.parameters())\n"
        "            optimizer.step()\n",
    ),
)
_FAMILIES = (
    *("benign", "declared", "presupposed", "chaos", "explained", "foreign", "random", "styles"),
    "scalers",
)
_TWINS = (
    # A script without a backward pass has no gradient in which a NaN could be planted.
    *(twin for twin in scripts_of_users.right(*_FAMILIES) if twin.file != "per_sample.py"),
    *(
        Twin(name=f"right: {script}", script=script, changes=changes, arguments=arguments)
        for script, changes, arguments in (
            ("resumes/nanogpt.py", (), ("{steps}", "{workdir}")),
            ("resumes/folders.py", _GUARD, ("{steps}", "{workdir}")),
            ("resumes/snapshot.py", (), _SNAPSHOT),
            ("rounds/diloco.py", (), ("{steps}",)),
            ("rounds/stages.py", (), ()),
        )
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A right script with a number of workers and a seed."""

    twin: Twin
    seed: int

    @property
    def name(self) -> str:
        """The script, the number of workers and the seed, in words."""
        return f"{self.twin.name}, {self.twin.world_size} workers, seed {self.seed}"


def cases() -> Iterator[Case]:
    """Yield right scripts without end, in a fixed order: seed by seed, all scripts with each."""
    examples = [
        Twin(name=name, script=name, turned=turned, world_size=world_size)
        for place in range(4)
        for name, (world_sizes, turned) in _EXAMPLES.items()
        for world_size in world_sizes[place : place + 1]
    ]
    examples += [
        Twin(name=f"{name} of six", script=name, changes=_THREE, world_size=3) for name in _OF_THREE
    ]
    for seed in count():
        for twin in (*examples, *_TWINS):
            yield Case(twin=seeded(twin, seed), seed=seed)


def seeded(twin: Twin, seed: int) -> Twin:
    """Return `twin` with another seed wherever its script seeds a generator with a number."""
    text = twin.changed()
    shift = 1000 * seed
    text = re.sub(
        r"(\bmanual_seed\(|\brandom\.seed\(|^SEED = |^SEED, STEPS = )(\d+)",
        lambda found: f"{found[1]}{int(found[2]) + shift}",
        text,
        flags=re.MULTILINE,
    )
    return replace(twin, text=text, changes=())


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A case that has been run."""

    case: Case
    seconds: float
    num_runs: int
    unrun: list[str]  # why runs failed
    found: dict[str, Finding]

    @property
    def alarms(self) -> list[str]:
        """What is reported of the script, by check."""
        broken = [(name, one) for name, one in self.found.items() if twins.is_broken(one)]
        return [f"{name}: {one.reason}" for name, one in broken]

    @property
    def outcome(self) -> str:
        """`ok`, `ALARM` or `NOT RUN`."""
        return "ALARM" if self.alarms else "NOT RUN" if self.unrun else "ok"


def tried(case: Case) -> Tried:
    """Run a case."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = twins.findings(case.twin, Path(folder), witnesses=True, deadline_s=DEADLINE_S)
        runs = [trace.load(file) for file in sorted((Path(folder) / "runs").glob("*.jsonl"))]
    return Tried(
        case=case,
        seconds=time.monotonic() - started,
        num_runs=len(runs),
        unrun=[run.end.reason for run in runs if run.end.status == "failed"],
        found=found,
    )


def main() -> int:
    """Print a line for each case, and how many runs, cases and alarms there were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("num_runs", nargs="?", type=int, default=NUM_RUNS)
    parser.add_argument("first", nargs="?", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    began, num_runs, outcomes = time.monotonic(), 0, Counter[str]()
    verdicts: Counter[Verdict] = Counter()
    chosen = islice(cases(), options.first, None)
    for number, one in enumerate(
        side_by_side.results(tried, chosen, options.jobs), start=options.first
    ):
        num_runs += one.num_runs
        verdicts.update(finding.verdict for finding in one.found.values())
        outcomes[one.outcome] += 1
        figures = f"{number:4} {one.num_runs:3} runs {one.seconds:6.1f} s"
        print(f"{one.outcome:7} {figures}  {one.case.name}", flush=True)
        for line in (*one.alarms, *one.unrun):
            print(f"        {line}", flush=True)
        if num_runs >= options.num_runs:
            break
    minutes = (time.monotonic() - began) / 60
    shown = ", ".join(f"{number} {verdict.value}" for verdict, number in sorted(verdicts.items()))
    print(f"{num_runs} runs of {outcomes.total()} cases in {minutes:.1f} minutes: {shown}")
    print(f"{outcomes['ALARM']} alarms, {outcomes['NOT RUN']} cases with a run that failed")
    return int(outcomes["ok"] < outcomes.total())


if __name__ == "__main__":
    sys.exit(main())
