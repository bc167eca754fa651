"""Where faults strike in trainers whose ranks share batches."""

from __future__ import annotations

from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.systems import torch_ranks

SCENARIO = Scenario(
    system="tensor_parallel", workload="mlp", world_size=4, seed=0, num_shards=8, accumulation=2
)
NAN = Fault(kind="non_finite_gradient", step=0, value="nan", shard=6)
LOSS = Fault(kind="non_finite_loss", step=0, value="nan", shard=1)
RANK = Fault(kind="non_finite_gradient", step=0, value="nan", rank=3)


def pairs(scenario: Scenario, world_size: int) -> int:
    """Two ranks compute a batch."""
    return 2


def test_a_shard_is_struck_on_all_who_compute_it() -> None:
    """In the micro-batch that has its first sample; a rank that is named is struck alone."""
    shards = torch_ranks._place(pairs, SCENARIO, NAN, range(4))
    assert [(one.rank, one.shard) for one in shards] == [(2, 1), (3, 1)]
    assert [one.rank for one in torch_ranks._place(pairs, SCENARIO, RANK, range(4))] == [3]
    alone = torch_ranks._place(lambda *_: 1, SCENARIO, NAN, range(4))
    assert [(one.rank, one.shard) for one in alone] == [(3, 0)]


def test_in_stages_it_strikes_where_the_tensor_or_the_loss_is() -> None:
    """Of a group's ranks the first has the first tensor, the last the loss."""
    place = torch_ranks._place_in_stages
    assert [one.rank for one in place(pairs, SCENARIO, NAN, range(4))] == [2]
    assert [one.rank for one in place(pairs, SCENARIO, LOSS, range(4))] == [1]
    named = Fault(**{**RANK.to_dict(), "tensor": "output.bias"})
    assert [one.rank for one in place(pairs, SCENARIO, named, range(4))] == [2, 3]
