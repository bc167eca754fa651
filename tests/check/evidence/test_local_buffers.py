"""Buffers that follow from a rank's own samples: between ranks, in two runs, and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from entrenar_py.check.causes import rank_statistics
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence import local_buffers
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.trace import Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.traces import values


def run(*buffers: Sequence[float], gradient: float = 1.0, alone: bool = False) -> Trace:
    """Return a run of as many ranks as there are `buffers`, each with a rank's values by step."""
    events: list[Start | Shard | Update] = []
    for rank, own in enumerate(buffers):
        events.append(Start(step=0, rank=rank, weights={"w": values(1.0)}, trainable=("w",)))
        for step, value in enumerate(own):
            events += [
                Shard(
                    step=step,
                    epoch=0,
                    rank=rank,
                    shard=rank,
                    ids=(2 * step, 2 * step + 1) if alone else (2 * step + rank,),
                    loss_sum=None,
                    weight=1.0,
                    finite=True,
                ),
                Update(
                    step=step,
                    rank=rank,
                    loss=None,
                    weight=2.0,
                    learning_rate=0.1,
                    finite=True,
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
    local_buffers.tell(tally, run([1, 2, 3], [4, 5, 6]))
    assert tally.missing == []
    assert "mean" in tally.notes[0]
    assert 'synchronised_buffers=("mean",)' in tally.notes[0]


def test_what_ranks_stop_to_agree_on() -> None:
    """A buffer that agreed in several steps, and then differs, is reported."""
    tally = Tally("F-DP-001")
    local_buffers.tell(tally, run([1, 2, 3], [1, 2, 4]))
    assert "mean agreed on all ranks until step 2" in tally.missing[0]


def test_the_lowest_rank_in_two_runs() -> None:
    """Only the lowest rank's buffers must be the same in two runs."""
    tally = Tally("F-TI-007")
    local_buffers.compare(tally, run([1, 2], [4, 5]), run([1, 2], [4, 6]), "two runs differ")
    assert (tally.compared, tally.broken) == (2, None)
    local_buffers.compare(tally, run([1, 2], [4, 5]), run([1, 3], [4, 5]), "two runs differ")
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.tensor) == (1, "mean")


def test_statistics_with_an_effect() -> None:
    """Runs that divide a batch otherwise can't be compared if statistics change the results."""
    trace, model = run([1, 2], [4, 5]), run([2, 3], alone=True)
    compared = Compared(runs=Runs(trace), model=model, trace=trace)
    assert rank_statistics.lacking(compared) == ""
    other = replace(compared, trace=run([1, 2], [4, 5], gradient=2.0))
    assert "follow from the samples of a rank (mean)" in rank_statistics.lacking(other)
    assert rank_statistics.lacking(replace(other, model=other.trace)) == ""
