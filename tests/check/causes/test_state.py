"""Optimizer state that is sharded, lost, or recorded by some ranks only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import coupled_samples, state
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import step_rule
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.trace import Noticed, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally, Verdict
from tests import traces
from tests.check.clauses.micro_batch_traces import SHAPES, summed, times, trace_of
from tests.traces import altered, falsified, left_open, one, records, scenario, values

SUBJECT = scenario(optimizer="momentum")
BAD = values(1.0, 2.0)


def sharing(*held: Tensors) -> Trace:
    """Return a run of one step after which each rank holds this optimizer state."""
    subject = scenario(world_size=len(held), optimizer="momentum")
    weights = {"w": values(1.0)}
    updates = [
        traces.update(0, rank, weights=weights, optimizer=tensors)
        for rank, tensors in enumerate(held)
    ]
    return traces.hand_written(*updates, subject=subject)


A, B, C, D = ({name: values(1.0)} for name in "abcd")


@pytest.mark.parametrize(
    "held",
    [
        pytest.param((A, B), id="two halves"),
        pytest.param((A, B, C), id="three thirds"),
        pytest.param((A | C, B | C), id="halves beside a common tensor"),
        pytest.param((A, A, B, B), id="halves, each held twice"),
    ],
)
def test_sharded_optimizer_state(held: tuple[Tensors, ...]) -> None:
    """With ZeRO-1, each rank keeps its own tensors' state, and shared tensors are compared."""
    finding = traces.held("replica_identity", sharing(*held))
    assert finding.notes == (
        "optimizer state is sharded over ranks: only what two of them hold was compared",
    )


@pytest.mark.parametrize(
    ("held", "rank", "tensor"),
    [
        pytest.param((A | B, A), 1, "b", id="lost by one of two"),
        pytest.param((A | B, A, A), 0, "b", id="held by one that holds all"),
        pytest.param((A | B, B | C, D), 2, "b", id="lost by one of three"),
        pytest.param((A | C, B | {"c": BAD}), 1, "c", id="a common tensor differs"),
        pytest.param((A, {"a": BAD}, B, B), 1, "a", id="a half that is held twice differs"),
    ],
)
def test_sharding_excuses_no_loss(held: tuple[Tensors, ...], rank: int, tensor: str) -> None:
    """A tensor that one rank lacks and all others hold was lost; two that differ are found."""
    found = falsified("replica_identity", sharing(*held))
    assert (found.rank, found.tensor) == (rank, tensor)


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_what_one_rank_never_recorded(part: str) -> None:
    """State that only some ranks record is missing, not different, for both clauses."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 1}, **{part: {}})
    for check in ("replica_identity", "optimizer_state"):
        finding = traces.judge(check, [trace])
        asked = check == "replica_identity" or part == "optimizer"
        assert finding.verdict is (Verdict.INCONCLUSIVE if asked else Verdict.HELD)
        assert finding.reason == (
            f"rank 1 recorded no {part} in step 0 and later: record Update.{part}" if asked else ""
        )


@pytest.mark.parametrize("check", ["replica_identity", "optimizer_state"])
def test_a_first_step_that_was_skipped(check: str) -> None:
    """State recorded after other steps, but not after a rank's first, was not made in it."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 0, "rank": 1}, optimizer={})
    found = falsified(check, trace)
    assert (found.step, found.rank) == (0, 1)


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer"])
def test_a_blind_rank_hides_no_other(part: str) -> None:
    """Two ranks that differ are found, even if the third recorded no weights."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 2}, weights={})
    name = next(iter(getattr(one(trace, Update, step=3, rank=1), part)))
    apart = altered(trace, Update, {"step": 3, "rank": 1}, **traces.swapping(part, name, BAD))
    found = falsified("replica_identity", apart)
    assert (found.step, found.rank) == (3, 1)


def test_ranks_that_lack_the_same_are_told_together() -> None:
    """Ranks with the same gap share one reason, with the first step."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 1}, weights={})
    finding = traces.judge("replica_identity", [altered(trace, Update, {"rank": 2}, weights={})])
    assert finding.reason == (
        "ranks 1, 2 recorded no weights in step 0 and later: record Update.weights"
    )


def test_state_that_no_rank_has_after_some_step() -> None:
    """Buffers recorded after some steps must be recorded after every step."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 4}, buffers={})
    assert (
        left_open("replica_identity", trace)
        == "ranks 0, 1, 2 recorded no buffers in step 4: record Update.buffers"
    )


# --- culprit --------------------------------------------------------------------------------------
# Which of two ranks is wrong, and why.


RIGHT = [summed(step) for step in range(3)]


def apart(**changes: Any) -> Trace:
    """Return a run in which rank 0's update of step 1 has `changes`."""
    other = records({name: np.full(size, 0.5) for name, size in SHAPES.items()})
    return traces.altered(
        trace_of(RIGHT), Update, {"step": 1, "rank": 0}, **{"weights": other, **changes}
    )


def test_the_gradient_decides() -> None:
    """A rank that applied its own samples' gradient is wrong, even if it is the lower one."""
    blame = state.blame_of(apart(gradient=records(summed(1, ranks=[0]))), 1, "a", 0, 1)
    assert blame.rank == 0
    assert blame.words == (
        "the gradient that rank 0 applied is the gradient of its own samples alone"
    )


def test_gradients_that_differ_by_a_factor_do_not_decide() -> None:
    """The factor is told, with both ranks."""
    blame = state.blame_of(apart(gradient=records(times(2, summed(1)))), 1, "a", 0, 1)
    assert blame.rank is None
    assert blame.words.startswith(
        "rank 1 applied a different gradient from rank 0: it is half as large"
    )


def test_rates_that_differ_are_told() -> None:
    """Neither rank is known to be right."""
    blame = state.blame_of(apart(learning_rate=0.2), 1, "a", 0, 1)
    assert blame == state.Blame(words="the learning rate is 0.1 on rank 1, 0.2 on rank 0")


def test_an_edit_decides() -> None:
    """A weight that only one rank changed outside of the optimizer is wrong there."""
    blame = state.blame_of(apart(edited=records({"a": np.ones(6)})), 1, "a", 0, 1)
    assert blame.rank == 0


def test_the_rule_decides() -> None:
    """Of two updates from equal gradients, the one that follows from them is right."""
    trace = trace_of(RIGHT)
    moved = {name: 1 - np.float32(0.1) * summed(0)[name] for name in SHAPES}
    trace = traces.altered(trace, Update, {"step": 0, "rank": 1}, weights=records(moved))
    blame = state.blame_of(trace, 0, "a", 0, 1)
    assert blame.rank == 0
    assert "rank 0's update does not follow from its gradient" in blame.words


def test_both_ranks_are_named_if_nothing_decides() -> None:
    """The place has both; with three ranks it has the minority."""
    finding = traces.judge("replica_identity", [apart()])
    assert traces.broken(finding).place().startswith("step 1, rank 1 or 0, tensor a[0]")
    assert replace(traces.broken(finding), or_rank=None, index=(2, 3)).place() == (
        "step 1, rank 1, tensor a[2, 3]"
    )


# --- first weights --------------------------------------------------------------------------------
# Weights before the first step: NaN falsifies, odd numbers are reported, zeros are noted.


def begun(*, num_steps: int = 1, optimizer: str = "sgd", **noticed: Any) -> Trace:
    """Return a run of one worker that noticed something of its matrices a and b."""
    weights = {"a": values(1.0, 2.0), "b": values(0.0, 0.0)}
    shapes = {"a": (1, 2), "b": (2, 1), "c": (3,)}
    held = [weights] * (num_steps + 1)
    start, *steps = traces.reaching(held, trainable=("a", "b"), shapes=shapes)
    seen = Noticed(step=0, rank=0, **noticed)
    subject = traces.scenario(world_size=1, optimizer=optimizer)
    return traces.hand_written(start, seen, *steps, subject=subject)


@pytest.mark.parametrize("look", ["nan", "inf"])
def test_weights_that_are_not_finite(look: str) -> None:
    """A run that trains from a NaN breaks F-DP-003 before its first step."""
    trace = begun(peculiar={"a": look})
    found = falsified("finiteness", trace)
    assert (found.step, found.rank, found.tensor) == (-1, 0, "a")
    tally = Tally("F-DP-003")
    state.judge_first_weights(tally, [begun(num_steps=0, peculiar={"a": look})])
    assert tally.broken is None
    assert "before the first step (a on rank 0)" in tally.missing[0]


@pytest.mark.parametrize(
    ("peculiar", "missing", "note"),
    [
        ({"b": "zero"}, "", "zero before the first step: b"),
        ({"a": "zero", "b": "zero"}, "all matrices are zero before the first step (a, b)", ""),
        ({"a": "uninitialised"}, "a look uninitialised on rank 0", ""),
        ({}, "", ""),
    ],
)
def test_peculiar_weights(peculiar: dict[str, str], missing: str, note: str) -> None:
    """One zero matrix may be right; all of them, or numbers of no initialisation, are reported."""
    tally = Tally("F-TI-005")
    state.tell_peculiar(tally, begun(peculiar=peculiar))
    assert tally.broken is None
    assert [reason[: len(missing)] for reason in tally.missing] == ([missing] if missing else [])
    assert tally.notes == ([note] if note else [])


def test_weights_after_a_resume() -> None:
    """A run that resumes has trained: its weights are not judged as first ones."""
    trace = begun(peculiar={"a": "uninitialised"})
    tally = Tally("F-TI-005")
    state.tell_peculiar(tally, altered(trace, Noticed, {}, step=3))
    assert tally.missing == []


@pytest.mark.parametrize(
    ("noticed", "optimizer", "words"),
    [
        ({"doubled": ("a",)}, "sgd", "it occurs twice in the optimizer's parameters"),
        ({"doubled": ("a", "b"), "shared": (("a", "b"),)}, "adamw", "in the same memory"),
        ({"doubled": ("a", "b"), "shared": (("a", "b"),)}, "sgd", ""),
    ],
)
def test_stepped_twice(noticed: dict[str, Any], optimizer: str, words: str) -> None:
    """A tensor that is stepped twice is an error, but for two parameters under plain SGD."""
    tally = Tally("F-TI-008")
    twice = step_rule.judge_doubled(tally, begun(optimizer=optimizer, **noticed))
    assert twice == set(noticed["doubled"])
    assert (tally.broken is not None) == bool(words)
    assert words in (tally.broken.message if tally.broken else "")


# --- local buffers --------------------------------------------------------------------------------
# Buffers that follow from a rank's own samples: between ranks, in two runs, and after a resume.


def run(*buffers: Sequence[float], gradient: float = 1.0, alone: bool = False) -> Trace:
    """Return a run of as many ranks as there are `buffers`, each with a rank's values by step."""
    events: list[Start | Shard | Update] = []
    for rank, own in enumerate(buffers):
        events.append(Start(step=0, rank=rank, weights={"w": values(1.0)}, trainable=("w",)))
        for step, value in enumerate(own):
            events += [
                traces.shard(
                    step,
                    rank,
                    shard=rank,
                    ids=(2 * step, 2 * step + 1) if alone else (2 * step + rank,),
                    loss_sum=None,
                ),
                traces.update(
                    step,
                    rank,
                    loss=None,
                    weight=2.0,
                    weights={"w": values(1.0 - step)},
                    local={"mean": values(value)},
                    gradient={"w": values(gradient)},
                ),
            ]
    subject = traces.scenario(
        system="command", workload="own", world_size=len(buffers), num_samples=8, batch_size=2
    )
    return traces.hand_written(*events, subject=subject)


def test_what_is_not_compared_is_named() -> None:
    """A note names the buffers in which ranks may differ."""
    tally = Tally("F-DP-001")
    state.tell_local_buffers(tally, run([1, 2, 3], [4, 5, 6]))
    assert tally.missing == []
    assert "mean" in tally.notes[0]
    assert 'synchronised_buffers=("mean",)' in tally.notes[0]


def test_what_ranks_stop_to_agree_on() -> None:
    """A buffer that agreed in several steps, and then differs, is reported."""
    tally = Tally("F-DP-001")
    state.tell_local_buffers(tally, run([1, 2, 3], [1, 2, 4]))
    assert "mean agreed on all ranks until step 2" in tally.missing[0]
    tally = Tally("F-DP-001")  # as in a module that is frozen at first
    state.tell_local_buffers(tally, run([1, 1, 1, 2], [1, 1, 1, 3]))
    assert tally.missing == []


def test_the_lowest_rank_in_two_runs() -> None:
    """Only the lowest rank's buffers must be the same in two runs."""
    tally = Tally("F-TI-007")
    state.compare_local_buffers(tally, run([1, 2], [4, 5]), run([1, 2], [4, 6]), "two runs differ")
    assert (tally.compared, tally.broken) == (2, None)
    state.compare_local_buffers(tally, run([1, 2], [4, 5]), run([1, 3], [4, 5]), "two runs differ")
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.tensor) == (1, "mean")


def test_statistics_with_an_effect() -> None:
    """Runs that divide a batch otherwise can't be compared if statistics change the results."""
    trace, model = run([1, 2], [4, 5]), run([2, 3], alone=True)
    compared = Compared(runs=Runs(trace), model=model, trace=trace)
    assert coupled_samples.other_statistics(compared) == ""
    other = replace(compared, trace=run([1, 2], [4, 5], gradient=2.0))
    assert "depend on the samples of a rank (mean)" in coupled_samples.other_statistics(other)
    assert coupled_samples.other_statistics(replace(other, model=other.trace)) == ""
