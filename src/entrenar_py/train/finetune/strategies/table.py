"""The strategies, by the names that a configuration has, and what each needs of model and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.finetune.strategies.fsdp import FullySharded
from entrenar_py.train.finetune.strategies.pipeline_parallel import PipelineParallel
from entrenar_py.train.finetune.strategies.replicated import Canonical, Replicated
from entrenar_py.train.finetune.strategies.step import Shards
from entrenar_py.train.finetune.strategies.strategy import Strategy
from entrenar_py.train.finetune.strategies.tensor_parallel import SequenceParallel, TensorParallel
from entrenar_py.train.model import blocks, layer_plan
from entrenar_py.train.model.settings import BY_SHARDS
from entrenar_py.train.model.workload import Finetuning

STRATEGIES: Mapping[str, Callable[[Shards], Strategy]] = {
    "ddp": Replicated,
    "ddp_canonical": Canonical,
    "fsdp": FullySharded,
    "tensor_parallel": TensorParallel,
    "sequence_parallel": SequenceParallel,
    "pipeline_parallel": PipelineParallel,
}


def require_possible(
    strategy: str, workload: Finetuning, scenario: Scenario, world_size: int
) -> None:
    """Raise UsageError unless `world_size` ranks can train `workload` by `strategy`."""
    if strategy in BY_SHARDS and world_size > scenario.num_shards:
        raise UsageError(
            f"strategy={strategy} with {world_size} ranks: training.num_shards="
            f"{scenario.num_shards} leaves ranks without a shard; use num_shards >= {world_size}, "
            "or fewer ranks"
        )
    if strategy == "ddp_canonical" and world_size & (world_size - 1):
        raise UsageError(
            f"strategy=ddp_canonical with {world_size} ranks: ranks share a tree evenly; start 1, "
            "2, 4, 8 ... ranks"
        )
    if strategy == "fsdp":
        blocks.of(workload.module)
    if strategy in ("tensor_parallel", "sequence_parallel"):
        problem = layer_plan.problem(workload.module, world_size)
        if problem:
            raise UsageError(
                f"strategy={strategy} with {world_size} ranks: {problem}; use ddp, ddp_canonical, "
                "fsdp or pipeline_parallel"
            )
    if strategy == "sequence_parallel":
        blocks.of(workload.module)
    if strategy == "pipeline_parallel":
        num_blocks = len(blocks.of(workload.module))
        if num_blocks < world_size:
            raise UsageError(
                f"strategy=pipeline_parallel with {world_size} ranks: the model has {num_blocks} "
                f"blocks, and each rank needs one; use {num_blocks} ranks or fewer"
            )
        if scenario.num_shards < world_size:
            raise UsageError(
                f"strategy=pipeline_parallel with {world_size} ranks: training.num_shards="
                f"{scenario.num_shards} leaves stages idle; use num_shards >= {world_size}"
            )
