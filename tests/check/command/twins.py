"""`make twins`: try every bug of `falsification.user_*` in a script, and the correct scripts.

Real processes, for some minutes. `python -m tests.check.command.twins [--jobs N] [WORD ...]` tries
those whose names have all words, N at a time. The exit code is 1 if a bug is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from entrenar_py.check.command import run_plan
from entrenar_py.shared.verdict import Finding, Verdict
from falsification import (
    user_advised,
    user_averages,
    user_benign,
    user_brief_lines,
    user_bugs,
    user_catalogued,
    user_chaos,
    user_controlled,
    user_coupled,
    user_declared,
    user_ends,
    user_explained,
    user_fed,
    user_flat,
    user_foreign,
    user_knobs,
    user_language,
    user_language_modes,
    user_large,
    user_left_in,
    user_left_open,
    user_made,
    user_oracles,
    user_own_draws,
    user_pieces,
    user_presupposed,
    user_public,
    user_random,
    user_reported,
    user_resume_styles,
    user_resumes,
    user_reviewed,
    user_rounds,
    user_rules,
    user_samples,
    user_scalers,
    user_styles,
    user_together,
    user_unseeded,
    user_wrapped,
    user_zero,
)
from falsification.user_trainers import TWINS, Twin
from tests.check.command import scripts, side_by_side, zygote
from tests.check.command.stripped import stripped

WANTED = (
    *("coverage", "determinism", "finiteness", "liveness", "optimizer_state", "parity"),
    *("randomness", "replica_identity", "resume", "step_rule", "weighting"),
)

# Words about scripts whose optimizer keeps no state, or whose state no two workers have.
_STATELESS = ("keeps no state", "no optimizer state of two workers")

EVERY: tuple[Twin, ...] = (
    *TWINS,
    *user_advised.BUGS,
    *user_advised.OPEN,
    *user_averages.BUGS,
    *user_brief_lines.BUGS,
    *user_bugs.BUGS,
    *user_catalogued.BUGS,
    *user_chaos.BUGS,
    *user_controlled.BUGS,
    *user_coupled.BUGS,
    *user_declared.BUGS,
    *user_ends.BUGS,
    *user_ends.OPEN,
    *user_explained.BUGS,
    *user_fed.BUGS,
    *user_flat.BUGS,
    *user_foreign.BUGS,
    *user_knobs.BUGS,
    *user_language.BUGS,
    *user_language_modes.BUGS,
    *user_left_in.BUGS,
    *user_made.BUGS,
    *user_oracles.BUGS,
    *user_own_draws.BUGS,
    *user_pieces.BUGS,
    *user_presupposed.BUGS,
    *user_random.BUGS,
    *user_reported.BUGS,
    *user_resume_styles.BUGS,
    *user_resume_styles.BY_ITS_OPTION,
    *user_resume_styles.OPEN,
    *user_resumes.BUGS,
    *user_resumes.OPEN,
    *user_reviewed.BUGS,
    *user_rounds.BUGS,
    *user_rounds.OPEN,
    *user_rules.BUGS,
    *user_samples.BUGS,
    *user_scalers.BUGS,
    *user_styles.BUGS,
    *user_together.BUGS,
    *user_unseeded.BUGS,
    *user_wrapped.BUGS,
    *user_public.BUGS,
    *user_advised.VARIANTS,
    *user_averages.VARIANTS,
    *user_benign.VARIANTS,
    *user_brief_lines.VARIANTS,
    *user_catalogued.VARIANTS,
    *user_chaos.VARIANTS,
    *user_controlled.VARIANTS,
    *user_coupled.VARIANTS,
    *user_declared.VARIANTS,
    *user_ends.VARIANTS,
    *user_explained.VARIANTS,
    *user_fed.VARIANTS,
    *user_flat.VARIANTS,
    *user_foreign.VARIANTS,
    *user_language.VARIANTS,
    *user_language_modes.VARIANTS,
    *user_left_in.VARIANTS,
    *user_made.VARIANTS,
    *user_oracles.VARIANTS,
    *user_own_draws.VARIANTS,
    *user_pieces.VARIANTS,
    *user_presupposed.VARIANTS,
    *user_public.VARIANTS,
    *user_random.VARIANTS,
    *user_reported.VARIANTS,
    *user_reviewed.VARIANTS,
    *user_rules.VARIANTS,
    *user_samples.VARIANTS,
    *user_scalers.VARIANTS,
    *user_styles.VARIANTS,
    *user_together.VARIANTS,
    *user_unseeded.VARIANTS,
    *user_wrapped.VARIANTS,
    *user_scalers.ROUNDED,
    *user_large.TWINS,
    *user_zero.tried(),
)


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
    text = twin.text or (scripts.EXAMPLES / twin.script).read_text()
    for before, after in twin.changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = folder / "project" / twin.script
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

    Yield those, too, that are held though `user_left_open` says otherwise.
    """
    left_open = user_left_open.words_of(twin.name)
    for name, finding in found.items():
        words = left_open.get(name)
        if not finding.applies:
            continue
        if finding.verdict is Verdict.HELD:
            if words:
                yield f"{name} is held, and user_left_open says: {words}"
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
        return twin.script == "resume.py" or "{workdir}" in twin.arguments
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
    chosen = [one for one in EVERY if all(word in one.name for word in words)]
    missed = 0
    for is_right, lines in side_by_side.results(tried, chosen, jobs):
        missed += not is_right
        print(*lines, sep="\n", flush=True)
    print(f"{len(chosen)} scripts, {missed} not as they should be")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
