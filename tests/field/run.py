"""`make field`: training scripts of others, as they are published: are all verdicts explained?

`python -m tests.field.run [WORDS ...] [--clones DIR] [--keep DIR] [--record]` tries the recipes
whose names have one of the words, or all. `--trials WORD` tries the one of that name, or all whose
names have the word, and `--clauses IDS` judges these clauses alone. `--clones` (or FIELD_CLONES) is
a folder with a clone `owner+name` of each repository; without it they are cloned. `--keep` keeps
scripts, runs and reports. `--record` writes the results that docs/field.md shows; what was recorded
of other clauses stays. The exit code is 1 if a verdict is not as its recipe says, or if a
reproduction doesn't show its finding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.field import recipes, sources
from tests.field.recipe import HERE, Recipe, Trial, result_path

REPRODUCTION_S = 300
ABSENT, ADVICE = "not applied", "advice"
# These need backends, models or a promise of our own trainers: no script has what they are about.
FOR_NO_SCRIPT = ("F-DP-004", "F-HET-001", "F-HET-002", "F-TI-006", "F-WGPU-001")
Clauses = Mapping[str, Mapping[str, Any]]


def judged(
    recipe: Recipe, trial: Trial, folder: Path, reports: Path, clauses: str
) -> dict[str, Any]:
    """Run entrenar-check on the script in `folder`; return what came out.

    Only `clauses`, ids with commas between, are judged, or all if it is empty.
    """
    options = [*(word for name in trial.contracts for word in ("--contract", name))]
    options += [] if trial.configuration else ["--no-config"]
    options += ["--auto"] if trial.auto else []
    options += [
        "--json",
        str(reports / "{contract}.json"),
        "--trace-dir",
        str(reports / "{contract}"),
    ]
    options += [*trial.options, *(("--only", clauses) if clauses else ())]
    words = (sys.executable, "-m", "entrenar_py.check.cli", *options)
    begun = time.monotonic()
    with Path(reports, "output.txt").open("w", encoding="utf-8") as output:
        ended = subprocess.run(
            [*words, "--", *trial.command],
            cwd=folder,
            env=environment(recipe, trial),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - begun
    written = [json.loads(path.read_text("utf-8")) for path in sorted(reports.glob("*.json"))]
    found = {
        result["id"]: {
            "verdict": ADVICE if is_advice(result) else result["verdict"],
            "compared": result["compared"],
            "reason": result["reason"].replace(str(reports), "reports"),
        }
        for report in written
        for result in report["results"]
    }
    for one in found.values():  # a clause that is asked for by its name
        if one["reason"].startswith(f"{ABSENT}: "):
            one |= {"verdict": ABSENT, "reason": one["reason"].removeprefix(f"{ABSENT}: ")}
    found |= {
        clause: {"verdict": ABSENT, "compared": 0, "reason": why}
        for report in written
        for clause, why in report["why_not_applying"].items()
        if clause not in FOR_NO_SCRIPT
    }
    return {"seconds": round(seconds), "exit_code": ended.returncode, "clauses": found}


def is_advice(result: Mapping[str, Any]) -> bool:
    """Return whether a broken clause is only advice, as no contract was named."""
    return str(result["accepted"]).startswith(ADVICE)


def environment(recipe: Recipe, trial: Trial) -> dict[str, str]:
    """Return the environment of a trial: our Python first, one thread a rank, GPUs or none."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    hidden = {} if trial.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, **hidden, **recipe.environment}


def differences(trial: Trial, clauses: Clauses) -> list[str]:
    """Return what differs between the verdicts of a trial and those that its recipe explains."""
    expected = {one.clause: one for one in trial.expected}
    found = [] if clauses else ["no clause was judged"]
    for clause, result in clauses.items():
        known = expected.get(clause)
        verdict, reason = result["verdict"], result["reason"]
        if known is None and verdict not in ("held", ABSENT):
            found.append(f"{clause} {verdict}, unexplained: {reason}")
        elif known is not None and verdict != known.verdict:
            found.append(f"{clause} {verdict}, not {known.verdict}: {reason}")
        elif known is not None and known.words not in reason:
            found.append(f"{clause} {verdict}, but not for {known.words!r}: {reason}")
    absent = [one for one in expected if one not in clauses]
    return [*found, *(f"{clause} was not judged" for clause in absent)]


def reproduced(recipe: Recipe, trial: Trial, folder: Path) -> list[str]:
    """Run the reproductions of a trial; return those that don't show their finding."""
    failed = []
    own = environment(recipe, trial)
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), own.get("PYTHONPATH"))))
    for name in sorted({one.reproduction for one in trial.expected if one.reproduction}):
        told = subprocess.run(
            [sys.executable, str(HERE / "reproductions" / name)],
            cwd=folder,
            env=own,
            capture_output=True,
            text=True,
            timeout=REPRODUCTION_S,
            check=False,
        )
        said = told.stdout.strip().splitlines()[-1:] or told.stderr.strip().splitlines()[-1:]
        print(f"  {name}: {''.join(said)}", flush=True)
        failed += [f"{name} exits {told.returncode}"] if told.returncode else []
    return failed


def machine(trial: Trial) -> str:
    """Return the devices that a trial runs on. Raises Unavailable if there are too few GPUs."""
    import torch

    if not trial.gpus:
        return f"{platform.machine()} CPU"
    if torch.cuda.device_count() < trial.gpus:
        raise sources.Unavailable(f"needs {trial.gpus} GPUs, has {torch.cuda.device_count()}")
    return f"{trial.gpus} x {torch.cuda.get_device_name(0)}"


def tried(recipe: Recipe, options: argparse.Namespace, kept: Path) -> tuple[list[str], list[str]]:
    """Try a recipe; return what was wrong, and what could not be run."""
    wrong, not_run = [], []
    named = [one for one in recipe.trials if one.name == options.trials]
    for trial in named or [one for one in recipe.trials if options.trials in one.name]:
        if options.gpus_only and not trial.gpus:
            continue
        clauses = "" if "--only" in trial.options else options.clauses
        looked_at = of_clauses(trial, clauses)
        title = f"{recipe.name}, {trial.name}"
        root = kept / recipe.name / trial.name.replace(" ", "-")
        shutil.rmtree(root, ignore_errors=True)
        try:
            versions = sources.versions(recipe)
            device = machine(trial)
            folder = sources.place(recipe, trial, root / "script", clones=options.clones)
        except sources.Unavailable as reason:
            not_run.append(f"{title}: {reason}")
            print(f"NOT RUN {not_run[-1]}", flush=True)
            continue
        (root / "reports").mkdir()
        outcome = judged(recipe, trial, folder, root / "reports", clauses)
        found = differences(looked_at, outcome["clauses"]) + reproduced(recipe, looked_at, folder)
        ended = f"exit {outcome['exit_code']}, {outcome['seconds']} s"
        print(f"{'WRONG' if found else 'as expected':11s} {title}, {ended}")
        print("".join(f"  {one}\n" for one in found), end="", flush=True)
        wrong += [f"{title}: {one}" for one in found]
        if options.record and not found:
            whole = {**outcome, "versions": versions, "device": device}
            record(recipe, trial, whole, is_whole=not clauses)
    return wrong, not_run


def of_clauses(trial: Trial, clauses: str) -> Trial:
    """Return `trial` with what is expected of `clauses`, all if that is empty."""
    kept = tuple(one for one in trial.expected if not clauses or one.clause in clauses.split(","))
    return replace(trial, expected=kept)


def record(recipe: Recipe, trial: Trial, outcome: Mapping[str, Any], *, is_whole: bool) -> None:
    """Write what came out of a trial, beside the recipe's other trials on such a machine.

    What was judged of some clauses alone is put into what was recorded of them all.
    """
    path = result_path(recipe, trial.hardware)
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    names = [one.name for one in recipe.trials if one.hardware == trial.hardware]
    if is_whole:
        kept[trial.name] = {"commit": recipe.commit, **outcome}
    elif trial.name in kept:
        kept[trial.name]["clauses"] |= outcome["clauses"]
    text = json.dumps({name: kept[name] for name in names if name in kept}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main(words: Iterable[str]) -> int:
    """Try the recipes that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    clones = os.environ.get("FIELD_CLONES")
    parser.add_argument("--clones", type=Path, default=Path(clones) if clones else None)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--trials", default="", metavar="WORD")
    parser.add_argument("--clauses", default="", metavar="IDS")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--gpus-only", action="store_true", help="no trials on the CPU")
    options = parser.parse_args([*words])
    chosen = [
        one
        for one in recipes.everything()
        if not options.words or any(word in one.name for word in options.words)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        kept = (options.keep or Path(scratch)).resolve()
        ended = [tried(recipe, options, kept) for recipe in chosen]
    wrong = [one for found, _ in ended for one in found]
    not_run = [one for _, found in ended for one in found]
    print(f"{len(chosen)} recipes, {len(wrong)} differences, {len(not_run)} trials not run")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
