"""Verdicts while a command's runs are made: as soon as they are known, and of which runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check import cli
from entrenar_py.check.command import judging
from entrenar_py.check.command.run_settings import Run, RunSettings, Turn
from entrenar_py.check.evidence import run_names
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared import package_data
from entrenar_py.shared import trace as trace_file
from entrenar_py.shared.trace import End, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.conftest import shipped_invariants

COPIES, SAMPLES, NAN = "F-DP-001", "F-DP-002", "F-DP-003"
TASKS = judging.tasks([shipped_invariants()[name] for name in (COPIES, SAMPLES, NAN)])
PLAIN = RunSettings(world_size=3, seed=0)
AGAIN = replace(PLAIN, repeat=1)
POISONED = replace(PLAIN, faults=(traces.leave(1, 2),))
TURNED = replace(PLAIN, turn=Turn("permute", "1"))


def trained(**changes: Any) -> Trace:
    """Return the trace of a script's run."""
    ran = traces.run(traces.scenario())
    subject = ran.scenario.with_(workload="own", system="command", **changes)
    return replace(ran, scenario=subject, promises=())


def drifted() -> Trace:
    """Return a run in which rank 1 has weights of its own after step 2."""
    trace = trained()
    update = traces.one(trace, Update, step=2, rank=1)
    other = next(iter(update.weights.values()))
    weights = {name: replace(other, digest="0" * 32) for name in update.weights}
    return traces.altered(trace, Update, {"step": 2, "rank": 1}, weights=weights)


def failed(trace: Trace) -> Trace:
    return replace(trace, events=(*trace.events[:-1], End(status="failed", reason="ValueError: 9")))


def recorded(*made: tuple[str, RunSettings, Trace]) -> Iterator[tuple[Path, Run]]:
    """Yield the runs, each with the settings of those after it."""
    for number, (name, settings, trace) in enumerate(made):
        ahead = tuple(later[1] for later in made[number + 1 :])
        yield Path(f"runs/{name}.jsonl"), Run(settings=settings, trace=trace, ahead=ahead)


def timeline(*made: tuple[str, RunSettings, Trace]) -> list[tuple[int, str, Verdict]]:
    """Return the verdicts, each with how many runs had been made by then."""
    runs: dict[Path, Run] = {}
    entries: Iterator[Entry] = judging.verdicts_as_known(TASKS, recorded(*made), runs)
    return [(len(runs), entry.invariant.id, entry.verdict) for entry in entries]


def test_a_verdict_comes_with_the_last_run_that_it_is_about() -> None:
    """A clause that judges runs with knobs waits for them; others come before."""
    plain, again = ("3-workers", PLAIN, trained()), ("3-workers-again", AGAIN, trained(repeat=1))
    turned = ("3-workers-permute-1", TURNED, trained())
    assert timeline(plain, again, turned) == [
        (2, SAMPLES, Verdict.HELD),
        (2, NAN, Verdict.HELD),
        (3, COPIES, Verdict.HELD),
    ]


def test_a_break_is_told_at_once_and_again_of_all_runs() -> None:
    """After the plain runs a falsified clause waits no longer."""
    plain, again = ("3-workers", PLAIN, trained()), ("3-workers-again", AGAIN, trained(repeat=1))
    turned = ("3-workers-permute-1", TURNED, drifted())
    last = ("3-workers-permute-2", replace(TURNED, turn=Turn("permute", "2")), drifted())
    told = [
        (num, verdict)
        for num, name, verdict in timeline(plain, again, turned, last)
        if name == COPIES
    ]
    assert told == [(3, Verdict.FALSIFIED), (4, Verdict.FALSIFIED)]


def test_a_run_that_is_tried_counts_only_if_it_shows_an_error(tmp_path: Path) -> None:
    """It may lack what the others have: then it is dropped, with its file."""
    for trace, kept in ((failed(trained()), []), (drifted(), ["2", "4"])):
        files = [tmp_path / "2", tmp_path / "4"]
        for file in files:
            file.touch()
        wide = replace(PLAIN, world_size=4)
        made = [Run(settings=PLAIN, trace=trained(), ahead=(wide,))]
        made.append(Run(settings=wide, trace=trace, is_tried=True))
        runs: dict[Path, Run] = {}
        entries = list(judging.verdicts_as_known(TASKS, zip(files, made, strict=True), runs))
        first = next(entry.verdict for entry in entries if entry.invariant.id == COPIES)
        assert first is (Verdict.FALSIFIED if kept else Verdict.HELD)
        assert [file.name for file in runs] == (kept or ["2"])
        assert files[1].exists() is bool(kept)


def test_after_an_interrupt_what_is_falsified_is_told() -> None:
    """The other clauses need all runs."""

    def interrupted() -> Iterator[tuple[Path, Run]]:
        yield Path("3-workers.jsonl"), Run(settings=PLAIN, trace=drifted(), ahead=(AGAIN,))
        raise KeyboardInterrupt

    entries = judging.verdicts_as_known(TASKS, interrupted(), {})
    entry = next(entries)
    assert (entry.invariant.id, entry.verdict) == (COPIES, Verdict.FALSIFIED)
    with pytest.raises(KeyboardInterrupt):
        next(entries)


@pytest.mark.parametrize(
    ("name", "settings", "verdict"),
    [
        ("1-worker", replace(PLAIN, world_size=1), Verdict.HELD),
        ("3-workers-permute-1", TURNED, Verdict.HELD),
        ("3-workers-resumed", replace(PLAIN, stops=(2,)), Verdict.HELD),
        ("3-workers-again", replace(PLAIN, world_size=2), Verdict.INCONCLUSIVE),
    ],
)
def test_a_verdict_stands_without_a_failed_run_of_others(
    name: str, settings: RunSettings, verdict: Verdict
) -> None:
    """A failed run that was made for other checks is only noted."""
    runs = dict(recorded(("3-workers", PLAIN, trained()), (name, settings, failed(trained()))))
    (entry,) = judging.judge(TASKS[:1], runs)
    assert entry.verdict is verdict
    noted = any(note.startswith("not judged: the run on") for note in entry.finding.notes)
    assert noted is (verdict is Verdict.HELD)


def test_ranks_are_compared_in_a_resumed_run_too() -> None:
    """Ranks may part by what they restore, also where a resume can't be compared."""
    stopped = replace(PLAIN, stops=(2,))
    runs = dict(
        recorded(("3-workers", PLAIN, trained()), ("3-workers-resumed", stopped, drifted()))
    )
    (entry,) = judging.judge(TASKS[:1], runs)
    assert entry.verdict is Verdict.FALSIFIED
    assert "3-workers-resumed" in entry.finding.reason


def test_reasons_name_runs() -> None:
    """A reason begins with the cause, and ends with the names of the runs."""
    runs = dict(recorded(("3-workers", PLAIN, drifted()), ("3-workers-again", AGAIN, trained())))
    (entry,) = judging.judge(TASKS[:1], runs)
    assert entry.finding.reason.startswith("rank 1 and rank 0 hold different weights")
    assert entry.finding.reason.endswith(" [3-workers]")


def test_a_clause_about_what_a_script_has_not_does_not_apply() -> None:
    """No run is missing then: what was seen is the reason. A run that failed shows nothing."""
    tasks = judging.tasks([shipped_invariants()["F-TI-003"]])
    bare = trained()
    bare = replace(bare, traits=replace(bare.traits, saves="nothing"))
    (entry,) = judging.judge(tasks, dict(recorded(("3-workers", PLAIN, bare))))
    assert (entry.finding.applies, entry.untried) == (False, ())
    assert entry.finding.reason.startswith("the script writes no checkpoint")
    (entry,) = judging.judge(tasks, dict(recorded(("3-workers", PLAIN, failed(bare)))))
    assert entry.finding.applies


@pytest.mark.parametrize("name", ["F-TI-002", "F-TI-003", "F-DP-006"])
def test_a_failed_base_is_the_reason(name: str) -> None:
    """If the first run failed, no placeholder is told for those that were not launched after it."""
    tasks = judging.tasks([shipped_invariants()[name]])
    (entry,) = judging.judge(tasks, dict(recorded(("3-workers", PLAIN, failed(trained())))))
    told = " ".join((entry.finding.reason, *entry.finding.notes))
    assert "the run on 3 workers failed: ValueError: 9" in told
    assert "{workdir}" not in told
    assert "--world-size" not in told


@pytest.mark.parametrize(
    ("name", "why"), [("F-TI-003", "the command needs {workdir}"), ("F-DP-006", "--world-size")]
)
def test_a_run_that_was_not_planned_is_told(name: str, why: str) -> None:
    """If the first run completed, what the command lacks is the reason."""
    tasks = judging.tasks([shipped_invariants()[name]])
    (entry,) = judging.judge(tasks, dict(recorded(("3-workers", PLAIN, trained()))))
    assert why in entry.finding.reason


def of_a_command(folder: Path, *extra: tuple[str, RunSettings, Trace]) -> dict[Path, Run]:
    """Return runs as a command leaves them, and save their traces in `folder`."""
    alone = [one for one in extra if one[1].world_size == 1]
    again = ("3-workers-again", AGAIN, trained(repeat=1))
    others = [one for one in extra if one not in alone]
    made = [("3-workers", PLAIN, trained()), *alone, again, *others]
    runs = {
        folder / f"{name}.jsonl": Run(settings=settings, trace=run) for name, settings, run in made
    }
    for file, run in runs.items():
        trace_file.save(run.trace, file)
    return runs


def with_permuted(**changes: Any) -> Trace:
    """Return the run whose samples were to come in another order; it did nothing of the kind."""
    run = trained(**changes)
    told = run_names.with_turned(run.scenario, knob="permute", value="1", usual="0")
    return replace(run, scenario=told)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        (("1-worker", replace(PLAIN, world_size=1), failed(trained(world_size=1))),),
        (("3-workers-permute-1", TURNED, with_permuted()),),
        (("3-workers-resumed", replace(PLAIN, stops=(2,)), trained(stops=(2,))),),
        (
            ("3-workers-permute-1", TURNED, with_permuted()),
            ("3-workers-resumed", replace(TURNED, stops=(2,)), with_permuted(stops=(2,))),
        ),
        (("3-workers-nan", POISONED, failed(trained(faults=POISONED.faults))),),
    ],
    ids=["plain", "failed-model", "turned", "resumed", "turned-and-resumed", "killed"],
)
def test_stored_runs_of_a_command_get_its_verdicts(
    tmp_path: Path, extra: tuple[tuple[str, RunSettings, Trace], ...]
) -> None:
    """--judge of the folder that a command left says what the command said, of each clause."""
    folder = tmp_path / "runs"
    folder.mkdir()
    ran = of_a_command(folder, *extra)
    told: dict[str, tuple[str, str]] = {}
    for name in package_data.FOR_SCRIPTS:
        report = tmp_path / "report.json"
        contract = str(package_data.contract_path(name))
        cli.main(["--contract", contract, "--json", str(report), "--judge", str(folder)])
        told |= {
            one["id"]: (one["verdict"], one["reason"])
            for one in json.loads(report.read_text())["results"]
        }
    entries = judging.judge(judging.tasks([*shipped_invariants().values()]), ran)
    said = {
        entry.invariant.id: (entry.verdict.value, entry.finding.reason)
        for entry in entries
        if entry.invariant.id in told
    }
    assert len(said) > 9
    assert told == said
