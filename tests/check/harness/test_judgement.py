"""Stored traces are judged together with their baselines, by the clauses they are evidence for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check.command import judging
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import judgement
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared import trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Verdict
from tests.traces import altered


def scenario(**changes: Any) -> Scenario:
    """Return a scenario with two workers and four steps."""
    usual = {"system": "reference", "workload": "linear", "world_size": 2, "seed": 0}
    return Scenario(**{**usual, "num_steps": 4, **changes})


def run(**changes: Any) -> Trace:
    return systems.run(scenario(**changes))


def judged(name: str, *traces: Trace, planned: tuple[Scenario, ...] = (scenario(),)) -> Entry:
    clause = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))
    task = Task(invariant=clause, check=checks.CHECKS.get(name), planned=planned)
    files = {Path(f"{number}.jsonl"): one for number, one in enumerate(traces)}
    (entry,) = judgement.judge_stored([task], files)
    return entry


def own(**changes: Any) -> Trace:
    """Return the trace of `scenario` as that of a user's own trainer."""
    ran = run(**{name: value for name, value in changes.items() if name != "mutant"})
    theirs = ran.scenario.with_(system="mine", workload="own", mutant=changes.get("mutant"))
    return replace(ran, scenario=theirs, promises=())


def edited(one: Trace, kind: type[trace.Shard | trace.Update], **changes: Any) -> Trace:
    return altered(one, kind, {"rank": 1}, **changes)


def test_planned_and_others() -> None:
    """Planned runs and all other training runs count. None counts as explored."""
    entry = judged("replica_identity", run(), run(seed=1), run(system="textbook"))
    assert (entry.verdict, entry.num_scenarios, entry.num_explored) == (Verdict.HELD, 3, 0)


def test_a_run_by_others_is_a_training_run() -> None:
    """A run of an unknown system is judged like any trainer's."""
    theirs = replace(run(), scenario=scenario(system="their own"))
    assert judged("replica_identity", theirs).verdict is Verdict.HELD


def test_a_folder_has_files_beside_the_traces(tmp_path: Path) -> None:
    """Ranks write what they saved, and what a run is compared by, beside their traces."""
    trace.save(run(), tmp_path / "run.jsonl")
    for name in ("saves-42.jsonl", "00000-000.borders.jsonl", "00000-000.lines.jsonl"):
        (tmp_path / name).write_text("{}\n", encoding="utf-8")
    assert [*judgement.load_stored([tmp_path])] == [tmp_path / "run.jsonl"]


def test_beside_its_family() -> None:
    """A stored run is compared with its original baselines, if they are stored, too."""
    alone = judged("determinism", run())
    assert alone.verdict is Verdict.INCONCLUSIVE
    assert alone.finding.reason.startswith("no scenario was run twice: record a second run")
    assert judged("determinism", run(), run(repeat=1)).verdict is Verdict.HELD


CLIP = {"knob": "clip", "value": "0.5", "usual": "1e9", "beside": {}}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (3, "option pair 3: use a mapping of knob, value, usual, beside"),
        ({"knob": "clip"}, "option pair without value, usual, beside"),
        ({**CLIP, "value": 0.5}, "option pair value=0.5: use text"),
        ({**CLIP, "value": "much"}, "value='much' of knob clip: use a number > 0, as text"),
        ({**CLIP, "usual": "nan"}, "usual='nan' of knob clip: use a number > 0, as text"),
        ({**CLIP, "knob": "accumulation"}, "value='0.5' of knob accumulation: use a whole number"),
        ({**CLIP, "beside": ["loss_scale"]}, "option pair beside=['loss_scale']: use a mapping"),
        ({**CLIP, "besides": {}}, "option pair key='besides': did you mean 'beside'?"),
    ],
)
def test_a_malformed_pair(tmp_path: Path, pair: object, words: str) -> None:
    """A malformed pair is refused with its file, its value and the allowed ones."""
    theirs, file = own(), tmp_path / "run.jsonl"
    odd = replace(theirs, scenario=theirs.scenario.with_(options={"pair": pair}))
    trace.save(odd, file)
    with pytest.raises(TraceError) as caught:
        judgement.load_stored([file])
    assert str(caught.value).startswith(f"trace file {file}: scenario: option pair")
    assert words in str(caught.value)


def test_a_malformed_seed_of_the_network(tmp_path: Path) -> None:
    """A network seed that is not a whole number is refused with its file."""
    file = tmp_path / "run.jsonl"
    odd = scenario(system="ring", options={"network_seed": "x"})
    trace.save(replace(run(), scenario=odd), file)
    with pytest.raises(TraceError, match=r"run\.jsonl: scenario: network_seed='x': use a whole"):
        judgement.load_stored([file])


def test_the_nearest_other_trace_is_put_beside() -> None:
    """If a baseline is missing, the reason names the fields in which the nearest trace differs.

    A copy of the trace itself does not count.
    """
    entry = judged("determinism", run(), run(repeat=1, seed=7))
    assert entry.finding.reason.endswith("the nearest other trace differs in seed (7, needed 0)")
    assert judged("determinism", run(), run()).verdict is Verdict.INCONCLUSIVE
    alone = own(detail="values", world_size=1, num_shards=1)
    assert judged("parity", own(detail="values"), alone).verdict is Verdict.HELD


def test_what_differs_in_detail_alone_is_of_the_family() -> None:
    """A run recorded with values is the baseline of one recorded without."""
    entry = judged("parity", own(), own(world_size=1, detail="values"))
    assert (entry.verdict, entry.finding.reason) == (Verdict.HELD, "")


@pytest.mark.parametrize("label", ["broken-one", None])
def test_no_trace_is_judged_by_another_experiment(label: str | None) -> None:
    """A run with another mutant appears in the reason, but is not used as a baseline."""
    label_of_other = None if label else "broken-one"
    alone = own(world_size=1, mutant=label)
    losses = [replace(one, loss=(one.loss or 0.0) * 1.5) for one in alone.of(trace.Update)]
    kept = [one for one in alone.events if not isinstance(one, trace.Update)]
    entry = judged("parity", own(mutant=label_of_other), replace(alone, events=(*losses, *kept)))
    assert entry.verdict is Verdict.INCONCLUSIVE
    near = f"the nearest other trace differs in mutant ({label}, needed {label_of_other})"
    assert near in entry.finding.reason


def test_no_trace_is_its_own_baseline() -> None:
    """A run whose scenario is a repetition is not compared with itself."""
    assert judged("determinism", run(repeat=1)).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("ranks", [{1}, {0, 1}])
def test_a_blind_trace_is_not_hidden_by_a_good_one(ranks: set[int]) -> None:
    """The reason names the file of the trace that lacks a fact, on one rank or on all."""
    good, blind = own(), own(seed=9)
    entry = judged(
        "replica_identity",
        good,
        altered(
            blind, trace.Start | trace.Update, {"rank": lambda rank: rank in ranks}, weights={}
        ),
    )
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert entry.finding.reason.startswith("1.jsonl: rank")
    assert "recorded no weights" in entry.finding.reason
    assert judged("replica_identity", good, own(seed=9)).verdict is Verdict.HELD


def test_a_blind_pair_is_not_hidden_by_a_good_one() -> None:
    """A pair that lacks a fact is reported although another pair holds."""
    pairs = [
        replace(own(seed=seed, world_size=world_size), promises=("bitwise",))
        for seed in (0, 9)
        for world_size in (1, 2)
    ]
    assert judged("worker_count", *pairs).verdict is Verdict.HELD
    pairs[3] = edited(pairs[3], trace.Update, weights={})
    entry = judged("worker_count", *pairs)
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert entry.finding.reason.startswith("2.jsonl (with 3.jsonl): only one run recorded")


def test_a_baseline_is_not_asked_for_what_it_is_beside() -> None:
    """A missing weight is reported for the pair, not for the baseline alone."""
    pair = own(detail="values"), own(detail="values", world_size=1)
    assert judged("weighting", *pair).verdict is Verdict.HELD
    entry = judged("weighting", edited(pair[0], trace.Shard, weight=0.0), pair[1])
    assert entry.finding.reason.startswith("0.jsonl (with 1.jsonl): ")


def test_runs_with_nothing_to_compare_are_passed_over() -> None:
    """One worker has no replica. If no run has one, the reason names the files, at most a few."""
    alone = [own(seed=seed, world_size=1) for seed in range(5)]
    assert judged("replica_identity", *alone, own()).verdict is Verdict.HELD
    reason = judged("replica_identity", *alone).finding.reason
    files = "0.jsonl, 1.jsonl, 2.jsonl, and 2 more: no two workers of one run were recorded"
    assert reason.startswith(files)
    assert judged("replica_identity", alone[0]).finding.reason.startswith("no two workers")


def test_a_break_names_its_file() -> None:
    """The reason names the file that broke the clause."""
    broken = edited(own(seed=1), trace.Update, weights={"weight": trace.TensorRecord("0" * 32)})
    reason = judged("replica_identity", own(), broken).finding.reason
    assert reason.startswith("1.jsonl: rank 1 and rank 0 hold different weights")


def test_probes_say_that_they_are() -> None:
    """A training trace is no evidence for a probe, and the reason says what to run."""
    entry = judged("matmul", run(), planned=(scenario(system="matmul", world_size=1),))
    assert "--only F-X and without --judge" in entry.finding.reason


def test_two_traces_of_one_scenario() -> None:
    """Both are judged. The sound one does not hide the broken one, in either order."""
    sound = run()
    update = sound.of(trace.Update)[-1]
    drifted = replace(update, weights={"weight": trace.TensorRecord("0" * 32)})
    events = tuple(drifted if event is update else event for event in sound.events)
    for pair in ((replace(sound, events=events), sound), (sound, replace(sound, events=events))):
        assert judged("replica_identity", *pair).verdict is Verdict.FALSIFIED


def test_probes_are_left_to_their_clauses() -> None:
    """A matrix product is no evidence on replicas, not even missing evidence."""
    product = run(system="matmul", world_size=1)
    entry = judged("replica_identity", product)
    assert entry.finding.reason == "c.yaml:3:5: no run of it was seen: nothing was compared"
    assert judged("replica_identity", run(), product).verdict is Verdict.HELD


def test_failed_runs_count() -> None:
    """A failed run always counts, planned or not."""
    failed = replace(run(seed=3), events=(trace.End(status="failed", reason="it crashed"),))
    entry = judged("replica_identity", run(), failed)
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert "it crashed" in entry.finding.reason


def test_uncovered() -> None:
    """A clause without a check is inconclusive."""
    assert judged("no such check", run()).verdict is Verdict.INCONCLUSIVE


def test_load(tmp_path: Path) -> None:
    """Files load in the order given, folders in the order of names, without other files."""
    folder = tmp_path / "t"
    for name, seed in (("b.jsonl", 1), ("a.jsonl", 0), ("notes.txt", 2)):
        trace.save(run(seed=seed), folder / name)
    loaded = judgement.load_stored([folder / "notes.txt", folder])
    assert [one.scenario.seed for one in loaded.values()] == [2, 0, 1]
    assert list(loaded) == [folder / name for name in ("notes.txt", "a.jsonl", "b.jsonl")]
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"none: holds no \*.jsonl file; give one that does"):
        judgement.load_stored([tmp_path / "none"])
    with pytest.raises(TraceError, match="gone"):
        judgement.load_stored([tmp_path / "gone"])


def test_environment() -> None:
    """Facts on which all traces agree are given once, differing ones as a list."""
    one, two = (replace(run(), environment={"torch": v, "python": "3"}) for v in ("1", "2"))
    more = replace(one, environment={"python": "3", "gpu": "a"})
    assert judgement.environment([one, two, one, more]) == {
        "torch": ["1", "2"],
        "python": "3",
        "gpu": "a",
    }


def test_a_pattern_that_no_shell_has_filled_in(tmp_path: Path) -> None:
    """A pattern loads the files that match. Without a match it is refused, as a missing file is."""
    for seed in (0, 1):
        trace.save(run(seed=seed), tmp_path / f"run-{seed}.jsonl")
    found = judgement.load_stored([tmp_path / "run-*.jsonl", tmp_path / "run-1.jsonl"])
    assert [path.name for path in found] == ["run-0.jsonl", "run-1.jsonl"]
    with pytest.raises(UsageError, match="no such file; give a trace"):
        judgement.load_stored([tmp_path / "absent-*.jsonl"])
    with pytest.raises(TraceError, match="can't be read"):
        judgement.load_stored([tmp_path / "absent.jsonl"])
    odd = tmp_path / "run[1].jsonl"  # a name is a name, whatever is in it
    trace.save(run(), odd)
    assert list(judgement.load_stored([odd])) == [odd]


@pytest.mark.parametrize("is_command", [False, True])
def test_who_wants_to_hear_of_judgements(is_command: bool) -> None:
    """The listener gets each trace once, with those it is compared with."""
    clause = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))
    task = Task(invariant=clause, check=checks.CHECKS["parity"], planned=(scenario(),))
    traces = {Path(f"{size}.jsonl"): run(world_size=size) for size in (2, 1)}
    heard: list[list[int]] = []

    def hear(told: Sequence[Trace]) -> None:
        heard.append([one.scenario.world_size for one in told])

    if is_command:
        made = {
            file: Run(settings=RunSettings(world_size=one.scenario.world_size, seed=0), trace=one)
            for file, one in traces.items()
        }
        entries = judging.judge([task], made, on_judged=hear)
    else:
        entries = judgement.judge_stored([task], traces, on_judged=hear)
    assert [entry.verdict for entry in entries] == [Verdict.HELD]
    assert heard == [[2, 1], [1]]
