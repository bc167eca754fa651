"""Scripts without their line: right ones with no alarm, and whether they exit with 0; broken ones
never held.

`python -m tests.check.command.auto_twins [--jobs N] [WORD ...]` tries those whose names have all
words, N at a time, as a part of `make twins`. The exit code is 1 if one is judged wrongly.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from entrenar_py.check.evidence import run_names
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict
from falsification.twins import Twin
from tests.check.command import scripts, side_by_side, twins

OF_INTEGRATIONS = ("accelerate_loop.py", "trainer.py", "lightning_module.py")
# Beginnings of the names of bugs that only what a line says makes visible: a declaration
# (`clip_norm=`, `frozen=`, `tied=`), a call (`obs.halted`), or the loader (`sampler=`), with whose
# workers it is looked at.
DECLARED = (
    "NAN-AFTER-REDUCE: each rank sees",
    "advice: gradients are changed after obs.reduced()",
    "augmentation: every epoch is seeded alike",
    "a loader without end, whose workers",
    "clip_norm:",
    "declared frozen:",
    "each rank clips its shards by their norm",
    "reduce_dtype: float32 declared",
    "tied:",
    "workers that live on",
)
ADVICE = "finiteness"  # unless a contract is named
# Knobs that the harness turns itself: ends of their runs' names -> words of what they find.
KNOBS = {
    "common": "with the same random numbers for all samples",
    "ordered": "with one order of samples",
    "mirrored": "with the same samples on all ranks",
    "merged": "-merged-of-",
    "replayed": "-replayed-of-",
    "short-epochs": "with epochs of two steps",
    "longer": "with more steps",
    "reordered": "in another order",
}
KINDS = ("found", "open", "undeclared", "left alone", "exit 0", "exit 4")
# Bugs that a line leaves open, since it says that samples are drawn with replacement, or comes
# after the checkpoint was read.
FOUND_WITHOUT = (
    "positions are drawn with replacement, from the seed again",
    "a resume takes the training for finished",
)


def right() -> list[Twin]:
    """Return every example, unchanged."""
    names = sorted(path.name for path in scripts.EXAMPLES.glob("*.py"))
    return [
        Twin(
            name=f"as it is: {name}",
            script=name,
            turned=tuple(scripts.KNOBS) if name == "knobs.py" else (),
        )
        for name in names
        if name not in OF_INTEGRATIONS
    ]


def undecided(found: dict[str, Finding]) -> list[str]:
    """Return why a right script's exit code is 4, not 0: a line per clause, but for advice."""
    return [
        f"{name}: {finding.reason}"
        for name, finding in found.items()
        if finding.verdict is Verdict.INCONCLUSIVE and finding.applies and name != ADVICE
    ]


def told(twin: Twin, found: dict[str, Finding]) -> str:
    """Return one of `KINDS`, or what is wrong about the findings."""
    is_open = twin.verdict != "falsified" and twin.name not in FOUND_WITHOUT
    if not twin.check or is_open:
        broken = [f"{name}: {one.reason}" for name, one in found.items() if twins.is_broken(one)]
        right = "exit 4" if undecided(found) else "exit 0"
        return "; ".join(broken) or ("left alone" if twin.check else right)
    finding = found[twin.check]
    if finding.verdict is Verdict.HELD and twin.name.startswith(DECLARED):
        return "undeclared"
    if finding.verdict is Verdict.HELD:
        return f"held wrongly, with {finding.compared} comparisons"
    return "open" if finding.verdict is Verdict.INCONCLUSIVE else "found"


def knobs(kind: str, finding: Finding | None, runs: Path) -> list[tuple[str, str]]:
    """Return the knobs that were turned for a right script, or by which a bug was found."""
    if kind in ("exit 0", "exit 4"):
        names = [file.stem for file in runs.glob("*.jsonl")]
        return [(knob, "right") for knob in KNOBS if any(f"-{knob}" in name for name in names)]
    if kind != "found" or finding is None or finding.counterexample is None:
        return []
    scenario = finding.counterexample.scenario
    run = "" if scenario is None else run_names.of(Scenario.from_dict(scenario))
    text = finding.reason + run
    return [(knob, "found") for knob, words in KNOBS.items() if words in text]


def tried(twin: Twin) -> tuple[str, list[str], list[tuple[str, str]]]:
    """Return how a script is judged, in a word, the lines that say so, and the knobs it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = twins.findings(twin, Path(folder), witnesses=True, auto=True)
        how = told(twin, found)
        turned = knobs(how, found.get(twin.check), Path(folder) / "runs")
    kind = how if how in KINDS else "WRONG"
    lines = [f"{kind:10} {time.monotonic() - started:5.1f} s  {twin.script}: {twin.name}"]
    if kind == "WRONG":
        lines.append(f"           {how}")
    elif kind == "open":
        lines.append(f"           {found[twin.check].reason[:200]}")
    elif kind == "exit 4":
        lines += [f"           {line[:200]}" for line in undecided(found)]
    return kind, lines, turned


def main() -> int:
    """Print a line or two for each script, and how many bugs are found without a line."""
    words, jobs = twins.words_and_jobs()
    chosen = [one for one in (*right(), *twins.every()) if all(word in one.name for word in words)]
    counts: Counter[str] = Counter()
    by_knob: Counter[tuple[str, str]] = Counter()
    for kind, lines, turned in side_by_side.results(tried, chosen, jobs):
        counts[kind] += 1
        by_knob.update(turned)
        print(*lines, sep="\n", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for knob in KNOBS:
        by, on = by_knob[knob, "found"], by_knob[knob, "right"]
        print(f"{knob}: {by} bugs found by it, turned for {on} right scripts")
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
