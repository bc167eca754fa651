"""`make twins`: try every bug of `falsification.twins` in a script, and the correct scripts.

Real processes, for some minutes. `python -m tests.check.command.twins [--jobs N] [WORD ...]` tries
those whose names have all words, N at a time. The exit code is 1 if a bug is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from entrenar_py.check.command import run_plan
from entrenar_py.shared.verdict import Finding, Verdict
from falsification import left_open, twins
from falsification.twins import Twin
from tests.check.command import scripts, side_by_side, zygote
from tests.check.command.stripped import stripped

WANTED = (
    *("coverage", "determinism", "finiteness", "liveness", "optimizer_state", "parity"),
    *("randomness", "replica_identity", "resume", "step_rule", "weighting"),
)

# Words about scripts whose optimizer keeps no state, or whose state no two workers have.
_STATELESS = ("keeps no state", "no optimizer state of two workers")


def every() -> tuple[Twin, ...]:
    """Return all twins that can be tried here: those of DeepSpeed only where it is installed."""
    return (*twins.every(), *(twins.family("zero") if find_spec("deepspeed") else ()))


def findings(
    twin: Twin,
    folder: Path,
    *,
    witnesses: bool = False,
    auto: bool = False,
    deadline_s: float = scripts.DEADLINE_S,
    launch: run_plan.Launcher = zygote.launch,
    launcher: Sequence[str] = scripts.LAUNCHED,
) -> dict[str, Finding]:
    """Return the findings on the runs of the changed script, by its check or by all checks.

    With `witnesses` all runs of a user's command are made, without it only those to be compared.
    With `auto` the script has no line. `launch` and `launcher` start the ranks.
    """
    text = twin.changed()
    script = folder / "project" / twin.file
    script.parent.mkdir()
    script.write_text(stripped(text) if auto else text)
    wanted = {twin.check} if twin.check else twin.wanted or WANTED
    if twin.world_size == 1:
        launcher = [word.replace("{world_size}", "1") for word in launcher]
    # Pairs are run for parity: other checks see them beside it.
    traces = scripts.record(
        (*scripts.command(script, twin.turned, launcher), *twin.arguments),
        {*wanted, "parity"} if twin.turned else wanted,
        folder / "runs",
        world_sizes=(twin.world_size,),
        source=script.parent,
        launch=launch,
        witnesses=witnesses,
        auto=auto,
        deadline_s=deadline_s,
    )
    return scripts.findings(traces, wanted)


def problem(twin: Twin, found: dict[str, Finding]) -> str:
    """Return the difference from the expected findings, or "" if there is none."""
    if not twin.check:
        return "; ".join(_unexpected(twin, found))
    finding = found[twin.check]
    place = finding.counterexample
    if finding.verdict.value != twin.verdict:
        return f"{finding.verdict.value}: {finding.reason}"
    if place is None:
        return "" if twin.words in finding.reason else f"for another reason: {finding.reason}"
    for name in ("step", "rank", "tensor"):
        due, got = getattr(twin, name), getattr(place, name)
        if due not in (None, got):
            return f"found at {name} {got}, not {due}: {finding.reason}"
    return "" if twin.words in finding.reason else f"for another reason: {finding.reason}"


def _unexpected(twin: Twin, found: dict[str, Finding]) -> Iterator[str]:
    """Yield each clause that a right script doesn't hold, though it applies and nothing says why.

    What the runs were seen not to have is a reason.

    Yield those, too, that are held though `falsification.left_open` says otherwise.
    """
    open_words = left_open.words_of(twin.name)
    for name, finding in found.items():
        words = open_words.get(name)
        if not finding.applies:
            continue
        if finding.verdict is Verdict.HELD:
            if words:
                yield f"{name} is held, and falsification.left_open says: {words}"
        elif is_broken(finding) or (
            words not in finding.reason if words else _applies(twin, name, finding)
        ):
            yield f"{name} {finding.verdict.value}: {finding.reason}"


def _applies(twin: Twin, check: str, finding: Finding) -> bool:
    """Return whether a clause applies to a script. Its user would declare those that don't.

    Some scripts end within their first epoch: what its end would show stays open.
    """
    if finding.reason.startswith(("no run came to the end of an epoch", "no two epochs were seen")):
        return False
    if check == "resume":
        return twin.file == "resume.py" or "{workdir}" in twin.arguments
    if check == "optimizer_state":
        return not any(words in finding.reason for words in _STATELESS)
    return True


def is_broken(finding: Finding) -> bool:
    """Return whether a finding is an alarm."""
    return finding.verdict is Verdict.FALSIFIED


def words_and_jobs() -> tuple[list[str], int]:
    """Return the words of the command line, and how many scripts to try at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    return options.words, options.jobs


def tried(twin: Twin) -> tuple[bool, list[str]]:
    """Return whether a script is judged as it should be, and the lines that say so."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = findings(twin, Path(folder), witnesses=True)
    wrong = problem(twin, found)
    told = found.get(twin.check) if twin.check else None
    place = told.counterexample.place() if told and told.counterexample else "left alone"
    seconds = time.monotonic() - started
    head = f"{'MISSED' if wrong else 'ok':6} {seconds:5.1f} s  {twin.name}"
    return not wrong, [head, f"               {wrong or ' '.join((twin.check, place)).strip()}"]


def main() -> int:
    """Print two lines for each script, and the number with a problem."""
    words, jobs = words_and_jobs()
    chosen = [one for one in every() if all(word in one.name for word in words)]
    missed = 0
    for is_right, lines in side_by_side.results(tried, chosen, jobs):
        missed += not is_right
        print(*lines, sep="\n", flush=True)
    print(f"{len(chosen)} scripts, {missed} not as they should be")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
