"""The samples that a resumed run draws are told from those of the run without stops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from entrenar_py.check.causes import resumed_data
from entrenar_py.shared.trace import Shard, Start, Trace
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.traces import scenario, was

SUBJECT = scenario(system="command", workload="own", world_size=1, num_steps=4)
EPOCHS = (0, 0, 0, 1)
STRAIGHT = ((0, 1), (2, 3), (4, 5), (6, 7))


def run(batches: Sequence[tuple[int, ...]], *, resumed: bool = False) -> Trace:
    """Return a run whose steps have the samples `batches`, and which may be resumed at step 1."""
    shards = [
        Shard(
            step=step,
            epoch=EPOCHS[step],
            rank=0,
            shard=0,
            ids=ids,
            loss_sum=1.0,
            weight=1.0,
            finite=True,
        )
        for step, ids in enumerate(batches)
    ]
    again = [Start(step=1, rank=0, weights={}, resumed=True)] if resumed else []
    return traces.hand_written(shards[0], *again, *shards[1:], subject=SUBJECT)


AGAIN = ": samples 0 again, which this epoch had in step 0"
OTHERS = ": samples {}, which the run without stops doesn't draw there"


@pytest.mark.parametrize(
    ("ids", "epochs", "words"),
    [
        pytest.param((4, 3), "told", ": the rest of the epoch comes in another order", id="rest"),
        pytest.param((0, 3), "told", AGAIN, id="again"),
        pytest.param((6, 3), "told", OTHERS.format(6), id="of the next epoch"),
        pytest.param((4, 9), "told", OTHERS.format(9), id="of no epoch"),
        pytest.param((4, 3), "untold", OTHERS.format(4), id="rest of an unknown epoch"),
        pytest.param((0, 3), "untold", OTHERS.format(0), id="past of an unknown epoch"),
        pytest.param((3,), "told", ": without samples 2", id="left out"),
        pytest.param((3, 2), "told", "", id="in another order"),
        pytest.param((4, 5), "told", ": step 1 has the samples of step 2", id="goes on elsewhere"),
    ],
)
def test_other_samples_are_placed(ids: tuple[int, ...], epochs: str, words: str) -> None:
    """An order is blamed only for samples of the epoch's rest."""
    straight = was(run(STRAIGHT), epochs=epochs)
    tally = Tally("")
    resumed_data.compare(tally, straight, run((STRAIGHT[0], ids), resumed=True))
    assert tally.broken is not None
    message = tally.broken.message
    assert message.removeprefix("after the resume other samples are drawn") in (
        words,
        words or ", in another order, or by another rank",
    )
