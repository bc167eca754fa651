"""The samples of scripts without a line: which ids count."""

from __future__ import annotations

from entrenar_py.check.rank_files import sample_ids
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Shard


def _shard(step: int, ids: tuple[int, ...], rank: int = 0) -> Shard:
    return Shard(
        step=step,
        epoch=0,
        rank=rank,
        shard=0,
        ids=ids,
        loss_sum=None,
        weight=float(len(ids)),
        finite=True,
        draws=None,
        gradient={},
    )


def test_ranks_that_name_samples_differently() -> None:
    """Indices and digests don't go together: no sample has an id, and still counts."""
    ranks = [
        RankTrace(
            life=0,
            header={"rank": rank, "samples": kind},
            events=(_shard(0, (1,), rank),),
            ended=True,
            problem="",
        )
        for rank, kind in enumerate(("index", "content"))
    ]
    (first, second) = sample_ids.agreed(ranks)
    assert [e.ids for r in (first, second) for e in r.events if isinstance(e, Shard)] == [(), ()]
    assert sample_ids.agreed(ranks[:1]) == ranks[:1]
