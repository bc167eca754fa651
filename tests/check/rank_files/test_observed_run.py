"""Scenario, traits and trace of a run, as its ranks' files show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import judgement
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.rank_files import observed_run, rank_file
from entrenar_py.check.rank_files.rank_file import RankFile, RankTrace
from entrenar_py.shared import trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Shard, Start, Synchronised
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import altered, run, undecided, values


def passes(*, kept: tuple[int, ...], step: int = 0) -> list[Event]:
    """Return a step of two passes of four samples, of which those `kept` were applied."""
    shards = [
        traces.shard(
            step,
            shard=number,
            ids=tuple(range(4 * number, 4 * number + 4)),
            weight=4.0,
            gradient={"w": values(1.0)},
        )
        for number in range(2)
    ]
    update = traces.update(
        step,
        loss=None,
        weight=4.0,
        gradient={"w": values(1.0)},
        summed={} if kept == (0, 1) else {"w": kept},
    )
    return [*shards, update]


@pytest.mark.parametrize(("kept", "size"), [((0, 1), 8), ((1,), 4)], ids=["added", "skipped"])
def test_a_batch_that_is_skipped_counts_in_no_step(kept: tuple[int, ...], size: int) -> None:
    """Else a script that leaves a batch out seems to have a batch of two."""
    (first, _, update) = passes(kept=(0, 1), step=1)
    scenario, _ = observed_run.scenario_of([], [*passes(kept=kept), first, update], 1)
    assert scenario.batch_size == size


def test_passes_that_each_step_drops_are_a_part_of_it() -> None:
    """The inner loop of a meta-learner has samples of its own."""
    events = [*passes(kept=(1,)), *passes(kept=(1,), step=1)]
    assert observed_run.scenario_of([], events, 1)[0].batch_size == 8


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        ({}, ""),
        ({"joined": True}, "micro-batch"),
        ({"joined": True, "loss_over": "batch"}, "batch"),
    ],
    ids=["plain", "joined", "declared"],
)
def test_batches_count_as_they_are_where_ranks_join(
    header: dict[str, object], meaning: str
) -> None:
    """torch's `Join` takes the mean over ranks; a line may mean something else."""
    whole = {"rank": 0, "world_size": 1, **header}
    ranks = [RankTrace(life=0, header=whole, events=(), ended=True, problem="")]
    _, traits = observed_run.scenario_of(ranks, passes(kept=(0, 1)), 1)
    assert traits.loss_over == meaning


def test_compression_begins_with_the_first_rank_that_compresses(tmp_path: Path) -> None:
    """Until then gradients are sent as they are."""
    for rank, step in enumerate((3, 2)):
        file = RankFile(tmp_path, {"rank": rank, "world_size": 2})
        file.note("compressed", to="powerSGD_hook", step=step)
        file.close("")
    ranks = [rank_file.load(path) for path in sorted(tmp_path.glob("*.rank.jsonl"))]
    _, traits = observed_run.scenario_of(ranks, passes(kept=(0, 1)), 2)
    assert (traits.compressed, traits.compressed_from) == ("powerSGD_hook", 2)


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


def finding_of(check: str, *paths: Path) -> Finding:
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
    finding = finding_of(check, two, one)
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
    finding_of = judgement.load_stored([tmp_path / "*" / "*.rank.jsonl"])
    assert {folder.name: one.scenario.world_size for folder, one in finding_of.items()} == {
        "one": 1,
        "two": 2,
    }


def test_a_drifting_rank_is_caught(tmp_path: Path) -> None:
    """A rank that drifts is found by step and rank, as in any run."""
    right = own_run()
    wrong = write(
        tmp_path / "run",
        0,
        1,
        of=altered(
            right, trace.Update, {"rank": 1, "step": 2}, weights=right.of(trace.Update)[0].weights
        ),
    )
    finding = finding_of("replica_identity", wrong)
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
    assert "no file of rank 1: give the files of all ranks" in undecided(
        finding_of("replica_identity", write(tmp_path / "run", 0, of=own_run()))
    )


def test_runs_mixed_in_one_folder(tmp_path: Path) -> None:
    """Two runs are not taken for one."""
    write(tmp_path / "run", 0, 1, of=own_run())
    assert "files of runs with 1, 2 workers: keep each run in a folder of its own" in undecided(
        finding_of("replica_identity", write(tmp_path / "run", 0, of=own_run(1)))
    )


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


def drawn(steps: Sequence[Sequence[int]], begin: int = 0) -> list[Start | Shard]:
    """Return the events of a rank that draws these samples, from step `begin` on."""
    shards = [
        traces.shard(begin + number, ids=tuple(ids), loss_sum=None, weight=float(len(ids)))
        for number, ids in enumerate(steps)
    ]
    return [Start(step=begin, rank=0, weights={}), *shards]


def epochs_of(steps: Sequence[Sequence[int]], size: int | None, begin: int = 0) -> list[int] | None:
    """Return the epoch of each step, None if they are unknown."""
    events = evidence.derived_epochs(drawn(steps, begin), None if size is None else range(size))
    if events is None:
        return None
    return [event.epoch for event in events if isinstance(event, Shard)]


@pytest.mark.parametrize("size", [4, None])
def test_epochs_that_are_complete(size: int | None) -> None:
    """An epoch begins when all samples were drawn, those that are known or those of the run."""
    assert epochs_of([[0, 1], [2, 3], [3, 0], [1, 2], [2, 0]], size) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("steps", "size", "begin"),
    [
        pytest.param([[0, 1], [2, 0]], 4, 0, id="an error, or a cut epoch"),
        pytest.param([[0, 1, 2], [3, 0, 1]], 4, 0, id="a batch of two epochs, or padded"),
        pytest.param([[0, 1], [0, 1]], 3, 0, id="a rest that is dropped, or lost"),
        pytest.param([[0, 0]], 4, 0, id="twice in a step"),
        pytest.param([[2, 3], [0, 1]], 4, 2, id="a resume in the middle of an epoch"),
    ],
)
def test_epochs_that_are_not(steps: list[list[int]], size: int, begin: int) -> None:
    """Where a sample that comes again may be wrong, no epoch is made up."""
    assert epochs_of(steps, size, begin) is None


def goes_on(steps: Sequence[Sequence[int]], header: dict[str, Any]) -> bool:
    """Return whether the steps, of four samples, are taken for one pass that never ends."""
    rank = RankTrace(life=0, header=header, events=tuple(drawn(steps)), ended=True, problem="")
    return observed_run.is_endless_pass([rank], rank.events, range(4))


def test_one_pass_of_a_loader_may_go_on_for_ever() -> None:
    """It does if all samples have come before one comes again, and if a loader's indices are known.

    A script that reports samples by itself may have padded its last batch.
    """
    seen = {"samples": "index"}
    assert goes_on([[0, 1, 2], [3, 1, 0]], seen)
    assert not goes_on([[0, 1, 2], [3]], seen)
    assert not goes_on([[0, 1, 2], [1, 0]], seen)
    assert not goes_on([[0, 1, 2], [3, 1, 0]], {})


NESTEROV = {"rule": "nesterov", "lr": 0.7, "momentum": 0.9}


def meeting(rank: int, *steps: int) -> list[Synchronised]:
    """Return the synchronisations of a rank after these steps."""
    return [Synchronised(step=step, rank=rank, weights={}) for step in steps]


def ranks(**rule: Any) -> list[RankTrace]:
    """Return the records of two ranks that were brought together by `rule`."""
    return [
        RankTrace(
            life=0,
            header={"rank": rank, "world_size": 2},
            events=(),
            ended=True,
            problem="",
            outer={**NESTEROV, **rule},
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("steps", "length"),
    [
        ((1, 3, 5), 2),
        ((2, 5, 7), 3),  # the last round is short
        ((0, 2, 4), None),  # rounds of 1, 2, 2 steps
        ((3,), 4),
    ],
)
def test_the_length_of_a_round(steps: tuple[int, ...], length: int | None) -> None:
    """All rounds but the last have one length, or none is known."""
    options, _ = observed_run.outer_step(ranks(), meeting(0, *steps) + meeting(1, *steps))
    assert options.get("inner_steps") == length


def test_ranks_that_meet_at_different_steps() -> None:
    """The length is that of most rounds, and a declared one counts before what is seen."""
    events = meeting(0, 1, 3, 5) + meeting(1, 1, 5)
    assert observed_run.outer_step(ranks(), events)[0]["inner_steps"] == 2
    assert observed_run.outer_step(ranks(inner_steps=4), events)[0]["inner_steps"] == 4


def test_the_rule_of_the_outer_step() -> None:
    """Rate and momentum are options, the kind of momentum is a trait; nothing without a rule."""
    events = meeting(0, 1)
    options, traits = observed_run.outer_step(ranks(rule="momentum"), events)
    assert (options["outer_learning_rate"], options["outer_momentum"]) == (0.7, 0.9)
    assert traits == {"outer": "momentum"}
    options, traits = observed_run.outer_step(ranks(rule="other"), events)
    assert traits == {"outer": "other"}
    assert "outer_learning_rate" not in options
    seen, _ = observed_run.outer_step(ranks(), [])  # an outer optimizer, before weights show rounds
    assert seen == {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    bare = [replace(rank, outer={}) for rank in ranks()]
    assert observed_run.outer_step(bare, []) == ({}, {})


@pytest.mark.parametrize(
    "record",
    [
        {"rule": "unheard of"},
        {"rule": "nesterov"},
        {"rule": "nesterov", "lr": "0.7", "momentum": 0.9},
        {**NESTEROV, "inner_steps": 0},
    ],
)
def test_a_damaged_rule_is_refused(record: dict[str, Any]) -> None:
    """A rule that no rank writes is an error."""
    with pytest.raises(TraceError):
        rank_file._NOTES["outer"](ranks()[0], record)


def test_a_rule_that_changes_is_another_one() -> None:
    """A rate that differs from round to round is no rule that is known."""
    found = rank_file._NOTES["outer"](ranks()[0], {**NESTEROV, "lr": 0.1})
    assert found.outer["rule"] == "other"
