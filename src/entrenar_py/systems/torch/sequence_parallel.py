"""Sequence parallelism: tensor parallelism where each rank holds a part of each sequence.

Ranks hold these parts between the layers that they share. A reduce-scatter and an all-gather
replace each all-reduce of tensor parallelism. The traffic is the same, and norms and residuals take
1/tp of the memory and the time. The training loop is that of `tensor_parallel`.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules, ranks, tensor_parallel
from entrenar_py.systems.torch.ranks import Rank


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    tensor_parallel.degree(scenario, scenario.world_size)
    return ranks.run(scenario, group_size=tensor_parallel.degree)


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step."""
    tensor_parallel.train_with(rank, parallelize)


def parallelize(model: modules.Layers, mesh: DeviceMesh) -> None:
    """Cut `model`, in place, over the ranks of `mesh`.

    A model without sequences is cut as in `tensor_parallel`. A norm's gradient
    on a rank covers only its part of the sequence; `tensor_parallel.add_terms` sums over ranks.
    """
    if not isinstance(model, modules.Decoder):
        tensor_parallel.parallelize(model, mesh)
        return
    part, whole = Shard(1), Replicate()  # of [n, t, d]
    # One gather serves all layers that read the input. Their gradients are added, then scattered.
    gather = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": gather,
            "blocks.*.attention.q": tensor_parallel.AdaptedColwise(),
            "blocks.*.attention.k": ColwiseParallel(),
            "blocks.*.attention.v": tensor_parallel.AdaptedColwise(),
            "blocks.*.attention.o": RowwiseParallel(output_layouts=part),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.mlp": gather,
            "blocks.*.mlp.gate": ColwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=part),
            "norm": SequenceParallel(),
            "head": PrepareModuleInputOutput(
                input_layouts=(part, None),
                desired_input_layouts=(whole, None),
                output_layouts=Shard(-1),
                desired_output_layouts=whole,
            ),
        },
    )
