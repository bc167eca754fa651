"""The places of faults in trainers whose ranks share batches."""

from __future__ import annotations

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import ranks

SCENARIO = Scenario(
    system="tensor_parallel", workload="mlp", world_size=4, seed=0, num_shards=8, accumulation=2
)
NAN = Fault(kind="non_finite_gradient", step=0, value="nan", shard=6)
LOSS = Fault(kind="non_finite_loss", step=0, value="nan", shard=1)
RANK = Fault(kind="non_finite_gradient", step=0, value="nan", rank=3)


PAIRS = ranks.Arrangement(micro_batches=2, group_size=2)
STAGES = ranks.Arrangement(micro_batches=2, group_size=2, in_stages=True)


def struck(fault: Fault, arranged: ranks.Arrangement) -> list[tuple[int | None, int | None]]:
    """Return the ranks that the fault strikes, and their micro-batches."""
    placed = ranks.placed_faults(SCENARIO, fault, range(4), arranged)
    return [(one.rank, one.shard) for one in placed]


def test_a_shard_is_struck_on_all_who_compute_it() -> None:
    """A shard's fault strikes its micro-batch on all ranks of the group, or on the named rank."""
    assert struck(NAN, PAIRS) == [(2, 1), (3, 1)]
    assert struck(RANK, PAIRS) == [(3, None)]
    assert struck(NAN, ranks.Arrangement(micro_batches=2)) == [(3, 0)]


def test_in_stages_it_strikes_where_the_tensor_or_the_loss_is() -> None:
    """The first rank of a group has the first tensor, the last rank has the loss."""
    assert struck(NAN, STAGES) == [(2, None)]
    assert struck(LOSS, STAGES) == [(1, None)]
    named = Fault(**{**RANK.to_dict(), "tensor": "output.bias"})
    assert struck(named, STAGES) == [(2, None), (3, None)]
