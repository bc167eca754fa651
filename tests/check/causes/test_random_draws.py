"""Comparisons presuppose that nothing is drawn by rank; streams of scripts that must differ do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from entrenar_py.check.causes import random_draws
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import randomness
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Drawn, End, Event, Shard, Trace, Traits
from entrenar_py.shared.verdict import Counterexample, Tally
from tests import traces
from tests.traces import broken


def shard(rank: int, ids: Sequence[int], *, moved: float = 0.0, size: float = 2.0) -> Shard:
    """Return a micro-batch of step 0, whose samples are given to the model `moved` away."""
    numbers = tuple((size, 1.0 + moved, 0.5 * id_) for id_ in ids)
    return traces.shard(0, rank, ids=tuple(ids), loss_sum=None, contents=numbers)


def drawn(rank: int, before: str, after: str, where: str = "batch", **fields: Any) -> Drawn:
    usual = {"step": 0, "part": rank, "generator": "torch", "micro_batch": 0}
    return Drawn(rank=rank, before=before, after=after, where=where, **{**usual, **fields})


def run(world_size: int, *events: Event, dropout: float = 0.0) -> Trace:
    scenario = Scenario(
        system="command",
        workload="own",
        world_size=world_size,
        seed=0,
        num_shards=world_size,
        num_samples=4,
        batch_size=4,
        num_steps=1,
        dropout=dropout,
    )
    events = (*events, End(status="completed"))
    return Trace(scenario=scenario, environment={}, promises=(), events=events)


ALONE, TWO = [shard(0, (0, 1, 2, 3))], [shard(0, (0, 2)), shard(1, (1, 3))]


class Differing(Compared):
    """Two runs that differ by more than rounding."""

    @cached_property
    def difference(self) -> Counterexample:
        return Counterexample(message="the gradient differs")


def compared(alone: Sequence[Event], two: Sequence[Event], world_size: int = 1) -> Compared:
    model, trace = run(world_size, *alone), run(2, *two)
    return Differing(runs=Runs(trace), model=model, trace=trace)


def test_a_sample_with_other_contents_is_named() -> None:
    """Rounding is allowed, and nothing is said of tensors of other sizes (padding)."""
    other = [shard(0, (0, 2)), shard(1, (1, 3), moved=0.01)]
    assert "sample 1 of step 0" in random_draws.other_contents(compared(ALONE, other))
    numbers = drawn(1, "a", "b", "loader", generator="numpy", worker=0)
    why = random_draws.other_contents(compared(ALONE, [*other, numbers]))
    assert "as the data set is read (augmentation), from numpy's generator" in why
    for events in (TWO, [TWO[0], shard(1, (1, 3), moved=1e-7)], [TWO[0], shard(1, (1, 3), size=3)]):
        assert random_draws.other_contents(compared(ALONE, events)) == ""


def test_a_collator_may_sort_its_batch() -> None:
    """The rows of a step are the same in another order, padded otherwise; or one is another."""
    rows = {id_: (3.0, 1.0 + id_, 0.5 * id_) for id_ in range(4)}

    def sorted_by_length(rank: int, ids: Sequence[int], *, size: float, moved: float) -> Shard:
        contents = tuple((size, rows[id_][1] + moved, rows[id_][2]) for id_ in sorted(ids))
        return replace(shard(rank, ids), contents=contents)

    alone = [sorted_by_length(0, (3, 1, 0, 2), size=4.0, moved=0.0)]
    for size in (3.0, 4.0):
        first = sorted_by_length(0, (3, 0), size=size, moved=0.0)
        second = sorted_by_length(1, (1, 2), size=4.0, moved=0.0)
        assert random_draws.other_contents(compared(alone, [first, second])) == ""
        noisy = sorted_by_length(1, (1, 2), size=4.0, moved=0.01)
        assert "sample" in random_draws.other_contents(compared(alone, [first, noisy]))
        fewer = [first, sorted_by_length(1, (2,), size=4.0, moved=0.0)]
        assert "sample" in random_draws.other_contents(compared(alone, fewer)), "other samples"
    unknown = sorted_by_length(1, (1, 2), size=4.0, moved=math.nan)
    assert "sample" in random_draws.other_contents(compared(alone, [first, unknown]))


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "gradient", "step"])
def test_equal_states_are_not_enough_for_another_split(where: str) -> None:
    """Masks of half of a batch may leave a generator as masks of the whole of it do."""
    alone = [*ALONE, drawn(0, "a", "b", where)]
    two = [*TWO, drawn(0, "a", "b", where), drawn(1, "a", "b", where)]
    why = random_draws.drawn_by_rank(compared(alone, two))
    assert random_draws.PLACES[where] in why
    assert "torch's generator" in why
    assert random_draws.drawn_by_rank(compared(two, two, world_size=2)) == ""
    agreeing = Compared(runs=Runs(run(2, *two)), model=run(1, *alone), trace=run(2, *two))
    assert random_draws.drawn_by_rank(agreeing) == "", "draws without effect"


def test_numbers_for_the_whole_batch() -> None:
    """Drawn alike on all ranks before the forward pass they are compared, if contents agree."""
    alone = [*ALONE, drawn(0, "a", "b")]
    assert random_draws.drawn_by_rank(
        compared(alone, [*TWO, drawn(0, "a", "b"), drawn(1, "a", "b")])
    ) == ("")
    for other in (drawn(1, "a", "c"), drawn(1, "x", "y"), shard(1, ())):
        two = [*TWO, drawn(0, "a", "b"), other]
        assert bool(random_draws.drawn_by_rank(compared(alone, two))) is (other.kind == "drawn")


def test_what_only_changes_the_contents_is_seen_by_them() -> None:
    """Augmentation and evaluation by rank are no obstacle where contents are equal."""
    two = [*TWO, drawn(0, "a", "b", "loader"), drawn(1, "x", "y", "between")]
    assert random_draws.drawn_by_rank(compared(ALONE, two)) == ""
    bare = [replace(one, contents=()) for one in TWO]
    assert "between two steps" in random_draws.drawn_by_rank(compared(ALONE, [*bare, *two[2:]]))


def judged(
    two: Sequence[Event], alone: Sequence[Event] = (), dropout: float = 0.0, **traits: Any
) -> Tally:
    tally = Tally("F-TI-005")
    trace = replace(run(2, *two, dropout=dropout), traits=Traits(**traits))
    randomness.judge_streams(tally, trace, run(1, *alone) if alone else None)
    return tally


def test_ranks_that_draw_the_same_for_other_samples() -> None:
    """It is a bug where a worker alone draws more numbers for more samples."""
    two = [*TWO, drawn(0, "a", "b"), drawn(1, "a", "b")]
    found = broken(judged(two, [*ALONE, drawn(0, "a", "c")]))
    assert (found.step, found.rank) == (0, 1)
    assert "the same random numbers as rank 0" in found.message
    assert judged(two, [*ALONE, drawn(0, "a", "b")]).broken is None, "for the whole batch"
    assert judged(two).broken is None, "unknown"
    seeded = [*TWO, drawn(0, "a", "b"), drawn(1, "a", "d")]
    assert judged(seeded, [*ALONE, drawn(0, "a", "c")]).broken is None, "seeded there, by rank"
    same_part = [*TWO, drawn(0, "a", "b"), drawn(1, "a", "b", part=0)]
    assert judged(same_part, [*ALONE, drawn(0, "a", "c")]).broken is None
    apart = judged([*TWO, drawn(0, "a", "b"), drawn(1, "x", "y")])
    assert (apart.broken, apart.compared) == (None, 1)


def test_ranks_that_share_their_samples_draw_the_same() -> None:
    """Ranks of a model cut by hand need one mask; without known samples nobody knows."""
    forward = [drawn(0, "a", "b", "forward"), drawn(1, "a", "b", "forward")]
    shared = [shard(0, (0, 1)), shard(1, (0, 1))]
    assert judged([*shared, *forward], dropout=0.1).broken is None
    own_data = [shared[0], shard(1, (0, 1), moved=0.5)]
    assert judged([*own_data, *forward], dropout=0.1).broken is not None, "other data"
    bare = [*(replace(one, ids=(), contents=()) for one in shared), *forward]
    assert judged(bare, dropout=0.1).broken is not None, "each rank is to have samples of its own"
    guessed = judged(bare, dropout=0.1, arranged="guessed")
    assert guessed.broken is None
    assert any("their samples are not known" in why for why in guessed.missing)
    four = [shard(rank, (rank // 2,)) for rank in range(4)]
    masks = [drawn(rank, "a", "bccd"[rank], "forward") for rank in range(4)]
    assert judged([*four, *masks], dropout=0.1).broken is not None, "ranks 1 and 2"


def test_a_generator_that_is_seeded_alike_later() -> None:
    """Ranks that drew numbers of their own draw the same once an evaluation has seeded them."""
    own = [drawn(0, "a", "b"), drawn(1, "x", "y")]
    alike = [drawn(rank, "p", "q", step=2) for rank in range(2)]
    two = [*TWO, *(replace(one, step=2) for one in TWO), *own]
    found = broken(judged([*two, *alike]))
    assert (found.step, found.rank) == (2, 1)
    assert "in step 0 each rank drew its own" in found.message
    assert "generator of its own" in found.message
    of_batch = [drawn(rank, "a", "b") for rank in range(2)]
    assert judged([*two[:4], *of_batch, *alike]).broken is None, "alike from the beginning"


def test_a_state_that_comes_again() -> None:
    """A rank that draws a sample's numbers again for others has a generator seeded again."""
    own = [drawn(0, "a", "b"), drawn(1, "x", "y")]
    again = [replace(one, step=2) for one in own]
    other = [replace(shard(rank, (4 + rank, 6 + rank)), step=2) for rank in range(2)]
    found = broken(judged([*TWO, *other, *own, *again]))
    assert (found.step, found.rank) == (2, 0)
    assert "in step 2 as in step 0" in found.message
    same = [replace(one, step=2) for one in TWO]
    assert judged([*TWO, *same, *own, *again]).broken is None, "drawn from the sample's number"
    once = [drawn(rank, "a", "b", step=step) for step in (0, 2) for rank in range(2)]
    assert judged([*TWO, *other, *once]).broken is None, "a number of the whole batch"


def test_dropout_is_for_samples() -> None:
    """Its masks must differ between ranks and passes, and no rank may leave it out."""
    forward = [drawn(0, "a", "b", "forward"), drawn(1, "a", "b", "forward")]
    assert judged([*TWO, *forward], dropout=0.1).broken is not None
    shared = judged([*TWO, *forward])
    assert shared.broken is None
    assert any("right for a number that the whole batch shares" in note for note in shared.notes)
    again = [forward[0], drawn(0, "a", "b", "forward", step=1)]
    found = broken(judged([*TWO, *again], dropout=0.1))
    assert "seeded again" in found.message


@pytest.mark.parametrize(("before", "step"), [(("b", "c"), 0), (("x", "y"), 1)])
def test_masks_of_other_lengths(before: tuple[str, str], step: int) -> None:
    """Ranks that began in one state draw one stream, though they seldom end in one state."""
    two = [*TWO, drawn(0, "a", "b", "forward"), drawn(1, "a", "c", "forward")]
    two += [drawn(r, before[r], "d", "forward", step=1) for r in range(2)]
    found = broken(judged(two, dropout=0.1))
    assert (found.step, found.rank) == (step, 1)


def test_the_beginning_of_equal_draws_is_sought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of ranks that draws alike in many steps is walked back once, and one worker's run."""
    walked: list[str] = []
    for name in ("_begin_alike", "_states"):
        plain = getattr(randomness, name)

        def counted(*given: Any, name: str = name, plain: Any = plain) -> Any:
            walked.append(name)
            return plain(*given)

        monkeypatch.setattr(randomness, name, counted)
    states = "abcdefgh"
    two = [
        drawn(rank, states[step], states[step + 1], step=step)
        for step in range(6)
        for rank in (0, 1)
    ]
    tally = judged([*TWO, *two], [*ALONE, drawn(0, "a", "z")])
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.rank) == (0, 1)
    assert sorted(walked) == ["_begin_alike", "_states", "_states"]


def test_workers_of_a_loader() -> None:
    """Two workers, or epochs, with one state that draw for other samples are a bug."""
    first = drawn(0, "a", "b", "loader", worker=0, ids=(0,))
    for other in (
        drawn(0, "a", "b", "loader", worker=1, ids=(2,)),
        drawn(0, "a", "b", "loader", worker=0, ids=(2,), step=2),
    ):
        found = broken(judged([*TWO, first, other]))
        assert "worker_init_fn" in found.message
    for other in (
        drawn(0, "a", "c", "loader", worker=1, ids=(2,)),  # seeded anew for each sample
        drawn(0, "a", "b", "loader", worker=0, ids=(0,), step=2),  # the same samples again
        drawn(1, "a", "b", "loader", worker=0, ids=(1,)),  # another rank: for the batch, perhaps
    ):
        assert judged([*TWO, first, other]).broken is None


def test_layers_that_are_computed_again() -> None:
    """Their masks must be those of the forward pass."""
    found = broken(judged([*TWO, drawn(1, "a", "b", "recomputed", step=2)], dropout=0.1))
    assert (found.step, found.rank) == (2, 1)
    assert "recomputed" in found.message


def test_evaluation_mode() -> None:
    """Dropout is off on all ranks or on none; where all stop training with it, nobody knows."""
    later = [replace(one, step=1) for one in TWO]
    apart = modes([*TWO, replace(later[0], evaluating=True), later[1]], dropout=0.1)
    assert apart.broken is not None
    assert (apart.broken.step, apart.broken.rank) == (1, 0)
    assert "call model.train() after model.eval()" in apart.broken.message
    off = [replace(one, evaluating=True) for one in later]
    both = modes([*TWO, *off], dropout=0.1)
    assert both.broken is None
    assert both.missing == [
        "the model is in evaluation mode from step 1 on, with dropout off: call model.train() "
        "after model.eval()"
    ]
    left = broken(modes([*TWO, *(replace(one, evaluated=True) for one in off)], dropout=0.1))
    assert (left.step, left.rank) == (1, 0)
    assert "as the evaluation before it left it" in left.message
    always = modes([*off, *(replace(one, step=2) for one in off)], dropout=0.1)
    assert (always.broken, always.missing) == (None, [])
    assert modes([*TWO, *off]).missing == [], "nothing depends on the mode"


def modes(two: Sequence[Event], dropout: float = 0.0) -> Tally:
    tally = Tally("F-TI-005")
    randomness.modes_alike(tally, run(2, *two, dropout=dropout))
    return tally
