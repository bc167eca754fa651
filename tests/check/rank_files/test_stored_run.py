"""A run known only by its ranks' files: put together, and judged by what they show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import judgement
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.rank_files.rank_file import RankFile
from entrenar_py.shared import trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses.traces import run

STEPS = 4
RATE = 0.1


def own_run(world_size: int = 2) -> trace.Trace:
    """Return a run whose ranks compute one shard each."""
    return run(
        Scenario(
            system="textbook",
            workload="linear",
            world_size=world_size,
            seed=0,
            num_shards=world_size,
            num_samples=8,
            batch_size=4,
            num_steps=STEPS,
            learning_rate=RATE,
        )
    )


def write(
    folder: Path,
    *ranks: int,
    of: trace.Trace,
    closed: Iterable[int] = (0, 1),
    problem: str = "",
    extra: tuple[trace.Event, ...] = (),
) -> Path:
    """Write the files of these ranks of a run, as `observe` does."""
    for rank in ranks:
        file = RankFile(folder, header(rank, of.scenario.world_size))
        for event in of.events:
            if isinstance(event, trace.Start | trace.Shard | trace.Update) and event.rank == rank:
                micro = replace(event, shard=0) if isinstance(event, trace.Shard) else event
                file.append([micro])
        file.append([one for one in extra if getattr(one, "rank", None) == rank])
        file.close(problem)
        if rank not in closed:  # as where the process was killed before it could
            (path,) = folder.glob(f"{rank:05}-{file.life:03}.rank.jsonl")
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    return folder


def header(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": world_size,
        "pid": 1,
        "num_samples": 8,
        "versions": {"torch": "2.13"},
        "optimizer": "SGD",
        "groups": [{"lr": RATE}],
    }


def found(check: str, *paths: Path) -> Finding:
    """Return the finding of the check on the runs in `paths`."""
    traces = judgement.load_stored(paths)
    clause = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))
    planned = (own_run().scenario,)
    task = Task(invariant=clause, check=CHECKS[check], planned=planned)
    (entry,) = judgement.judge_stored([task], traces)
    return entry.finding


@pytest.mark.parametrize("check", ["replica_identity", "coverage", "parity"])
def test_whole_runs_are_held(tmp_path: Path, check: str) -> None:
    """Runs of two workers and of one, given as folders, are compared and held."""
    two = write(tmp_path / "two", 0, 1, of=own_run())
    one = write(tmp_path / "one", 0, of=own_run(1))
    finding = found(check, two, one)
    assert (finding.verdict, finding.compared > 0) == (Verdict.HELD, True), finding.reason


def test_what_it_was(tmp_path: Path) -> None:
    """The scenario is what the files show, and the environment is what they recorded."""
    ((folder, read),) = judgement.load_stored([write(tmp_path / "run", 0, 1, of=own_run())]).items()
    assert folder == tmp_path / "run"
    own = read.scenario
    assert (own.system, own.world_size, own.num_steps, own.batch_size) == ("command", 2, STEPS, 4)
    assert (own.learning_rate, own.faults, own.stops) == (RATE, (), ())
    assert read.environment == {"torch": "2.13"}
    assert read.end.status == "completed"


def test_files_by_a_pattern(tmp_path: Path) -> None:
    """The files of a folder are one run; a pattern may match the files of several."""
    write(tmp_path / "two", 0, 1, of=own_run())
    write(tmp_path / "one", 0, of=own_run(1))
    found = judgement.load_stored([tmp_path / "*" / "*.rank.jsonl"])
    assert {folder.name: one.scenario.world_size for folder, one in found.items()} == {
        "one": 1,
        "two": 2,
    }


def test_a_drifting_rank_is_caught(tmp_path: Path) -> None:
    """A rank that drifts is found by step and rank, as in any run."""
    right = own_run()
    events = tuple(
        replace(one, weights=right.of(trace.Update)[0].weights)
        if isinstance(one, trace.Update) and (one.rank, one.step) == (1, 2)
        else one
        for one in right.events
    )
    wrong = write(tmp_path / "run", 0, 1, of=replace(right, events=events))
    finding = found("replica_identity", wrong)
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    assert (finding.counterexample.step, finding.counterexample.rank) == (2, 1)


def test_ranks_that_are_brought_together_now_and_then(tmp_path: Path) -> None:
    """A run with outer synchronisations promises agreement after each round, not each step."""
    met = tuple(trace.Synchronised(step=STEPS - 1, rank=rank, weights={}) for rank in (0, 1))
    (alone,) = judgement.load_stored([write(tmp_path / "alone", 0, 1, of=own_run())]).values()
    (outer,) = judgement.load_stored(
        [write(tmp_path / "outer", 0, 1, of=own_run(), extra=met)]
    ).values()
    assert (alone.promises, outer.promises) == ((), ("rounds",))


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    """A run with one rank missing is inconclusive, even if the others agree."""
    finding = found("replica_identity", write(tmp_path / "run", 0, of=own_run()))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no file of rank 1: give the files of all ranks" in finding.reason


def test_runs_mixed_in_one_folder(tmp_path: Path) -> None:
    """Two runs are not taken for one."""
    write(tmp_path / "run", 0, 1, of=own_run())
    finding = found("replica_identity", write(tmp_path / "run", 0, of=own_run(1)))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "files of runs with 1, 2 workers: keep each run in a folder of its own" in finding.reason


def test_how_it_ended(tmp_path: Path) -> None:
    """A rank that never closed, one that failed, and one that halted give different endings."""
    right = own_run()
    behind = tuple(
        one
        for one in right.events
        if not (isinstance(one, trace.Update) and one.rank == 1 and one.step == STEPS - 1)
    )
    cut = write(tmp_path / "cut", 0, 1, of=replace(right, events=behind), closed=[0])
    failed = write(tmp_path / "failed", 0, 1, of=right, problem="ValueError: no")
    fault = {"kind": "non_finite_gradient", "step": STEPS, "rank": 1, "value": "nan"}
    injected = trace.Injected(fault=fault, step=STEPS, rank=1, shard=0)
    halted = write(tmp_path / "nan", 0, 1, of=right, problem="ValueError: NaN", extra=(injected,))
    hung = write(tmp_path / "hung", 0, 1, of=right, closed=[0])
    ends = {
        path.name: one.end
        for path, one in judgement.load_stored([cut, failed, halted, hung]).items()
    }
    assert {name: end.status for name, end in ends.items()} == {
        "cut": "failed",
        "failed": "failed",
        "nan": "halted",
        "hung": "completed",  # all steps were made: only taking it down hung
    }
    assert "the files end with rank 0 after 4 steps, rank 1 after 3 steps" in ends["cut"].reason
    assert ends["failed"].reason == "it ended with ValueError: no"
    (nan,) = judgement.load_stored([halted]).values()
    assert [one.kind for one in nan.scenario.faults] == ["non_finite_gradient"]


def test_a_file_that_no_rank_wrote(tmp_path: Path) -> None:
    """An invalid file is refused by name and line, and nothing is judged."""
    (tmp_path / "00000-000.rank.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=r"rank.jsonl:1: kind=None, version=None: give a rank's"):
        judgement.load_stored([tmp_path])
