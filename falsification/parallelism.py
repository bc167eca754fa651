"""Bugs of trainers that divide a model over ranks or stages, also in adapters and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules, pipeline_parallel, tensor_parallel
from entrenar_py.train.arithmetic import sharding

TENSOR = "entrenar_py.systems.torch.tensor_parallel"
PIPELINE = "entrenar_py.systems.torch.pipeline_parallel"
LAYERS = "entrenar_py.systems.torch.modules"
CHECKPOINT = "entrenar_py.systems.torch.whole_checkpoint"
STYLES = "torch.distributed.tensor.parallel"

_add_terms, _build, _reduce = (
    tensor_parallel.add_terms,
    modules.build,
    pipeline_parallel.reduce,
)

CLIP_NORM = 0.05  # far below the norms of these gradients


def parallel(**changes: Any) -> Scenario:
    """Return a run of a model cut over two ranks, with one batch of six lines and plain SGD."""
    usual: dict[str, Any] = {
        "system": "tensor_parallel",
        "workload": "decoder_full",
        "world_size": 2,
        "seed": 0,
        "num_samples": 6,
        "batch_size": 6,
        "num_steps": 1,
        "num_shards": 4,
        "detail": "values",
    }
    return Scenario(**{**usual, **changes})


def pipeline(**changes: Any) -> Scenario:
    """Return the same run in two stages."""
    return parallel(**{"system": "pipeline_parallel", **changes})


def is_copied(parameter: nn.Parameter) -> bool:
    """Return whether all ranks of a group have the whole parameter."""
    return not (isinstance(parameter, DTensor) and parameter.placements[0].is_shard())


def clip_copies_on_rank_0(
    trainable: Iterable[nn.Parameter], clip_norm: float | None, group: dist.ProcessGroup
) -> None:
    """Scales replicated parameters on the first rank only, which alone counts them in the norm."""
    assert clip_norm is not None
    factor = clip_norm / float(tensor_parallel.norm_l2(trainable, group))
    for parameter in trainable:
        if dist.get_rank(group) == 0 or not is_copied(parameter):
            tensor_parallel.local_gradient(parameter).mul_(factor)


def count_copies(trainable: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """Adds the squares of all ranks, which counts replicated parameters several times."""
    gradients = map(tensor_parallel.local_gradient, trainable)
    squares = torch.stack([one.double().square().sum() for one in gradients]).sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def leave_partial(
    self: Any, input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: DeviceMesh
) -> DTensor:
    """Takes each rank's partial gradient of the input for the whole gradient."""
    entered = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    def take_part(gradient: Tensor) -> Tensor:
        assert isinstance(gradient, DTensor)
        part = gradient.to_local()
        return DTensor.from_local(part, mesh, [Replicate()], run_check=False)

    if entered.requires_grad:
        entered.register_hook(take_part)  # type: ignore[no-untyped-call]
    return entered


def average_terms(gradient: Tensor) -> Tensor:
    """Divides the sum by the number of ranks."""
    return _add_terms(gradient) / dist.get_world_size()


def keep_apart(stage: pipeline_parallel.Pipeline, trainable: Mapping[str, nn.Parameter]) -> None:
    """Does not add the gradients of the tied tensor's copies."""


def divide_in_every_stage(stage: pipeline_parallel.Pipeline, weight: float) -> None:
    """Divides by the number of micro-batches once more for each later stage."""
    for parameter in stage.trainable().values():
        if parameter.grad is not None:
            parameter.grad.div_(stage.size ** (stage.size - 1 - stage.index))
    _reduce(stage, weight)


def draw_adapters_anew(scenario: Scenario, units: Iterable[int] | None = None) -> modules.Layers:
    """Draws the adapters' A from each rank's own generator, after the weights were loaded."""
    model = _build(scenario, units)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_a"):
            nn.init.uniform_(parameter.data, -0.3, 0.3)
    return model


def local_name(name: str) -> str:
    """Numbers the blocks of each stage from 0."""
    return name.replace("blocks.1.", "blocks.0.") if dist.get_rank() == 1 else name


def cut_by_world_size(ids: sharding.Ids, mesh: DeviceMesh, place: int) -> sharding.Ids:
    """Cuts the batch into as many parts as ranks, not groups, and gives each group one."""
    return sharding.cut(ids, dist.get_world_size())[place]


def embed_on_all(self: Any, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Does not cut the largest tensor, the embedding."""
    assert isinstance(module.weight, nn.Parameter)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate()]))


VARIANTS = (
    Variant(
        name="clip-tp-rank",
        summary="parameters that all ranks of a group hold are clipped on its first rank alone",
        source="DeepSpeed #1801 (BLOOM-176B)",
        plants={f"{TENSOR}.clip": clip_copies_on_rank_0},
        scenario=parallel(clip_norm=CLIP_NORM),
        invariants=("F-PAR-002",),
        place={"step": 0, "rank": 1, "tensor": "blocks.0.attention_norm.weight"},
    ),
    Variant(
        name="clip-count",
        summary="the norm counts replicated tensors once per rank",
        source="Megatron-LM #5916, #7452; PyTorch #88955",
        plants={f"{TENSOR}.norm_l2": count_copies},
        scenario=parallel(clip_norm=CLIP_NORM),
        invariants=("F-PAR-003",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="tp-partial",
        summary="a column-parallel layer returns its input's gradient without adding the parts",
        source="torchtitan #4054; Megatron-LM 5fffdfc737",
        plants={f"{STYLES}.ColwiseParallel._prepare_input_fn": leave_partial},
        scenario=parallel(),
        invariants=("F-PAR-001",),
        place={"step": 0, "rank": 0, "tensor": "embedding.weight"},
    ),
    Variant(
        name="sp-ln-avg",
        summary="gradients of norms are averaged over the parts of a sequence, not added",
        source="gpt-neox #1259",
        plants={f"{TENSOR}.add_terms": average_terms},
        scenario=parallel(system="sequence_parallel"),
        invariants=("F-PAR-001",),
        place={"step": 0, "rank": 0, "tensor": "blocks.0.attention_norm.weight"},
    ),
    Variant(
        name="tied-pp",
        summary="the copies of a tied embedding in the first and the last stage diverge",
        source="Megatron-LM #844",
        plants={f"{PIPELINE}.add_copies": keep_apart},
        scenario=pipeline(),
        invariants=("F-PAR-002",),
        place={"step": 0, "rank": 1, "tensor": "embedding.weight"},
    ),
    Variant(
        name="pp-gas-pow",
        summary="every stage divides by the number of micro-batches again",
        source="DeepSpeed #8154",
        plants={f"{PIPELINE}.reduce": divide_in_every_stage},
        scenario=pipeline(),
        invariants=("F-PAR-001",),
        place={"step": 0, "rank": 0, "tensor": "embedding.weight"},
    ),
    Variant(
        name="lora-rankinit-groups",
        summary="every group of ranks draws different adapters",
        source="Megatron-Bridge #5396",
        plants={f"{LAYERS}.build": draw_adapters_anew},
        scenario=parallel(workload="decoder", world_size=4),
        invariants=("F-PAR-002",),
        place={"step": -1, "rank": 2, "tensor": "blocks.0.attention.q.lora_a"},
    ),
    Variant(
        name="ckpt-reshard-name",
        summary="a stage loads its layers under stage-local numbers",
        source="Megatron-LM #7452 (finding 12)",
        plants={f"{CHECKPOINT}.global_name": local_name},
        scenario=pipeline(num_samples=12, num_steps=2, stops=(1,)),
        invariants=("F-PAR-004",),
        place={"step": 1},
    ),
    Variant(
        name="dispatch-dp",
        summary="a batch is cut into as many parts as there are ranks, not groups of ranks",
        source="verl #4697",
        plants={f"{TENSOR}.local_batch": cut_by_world_size},
        scenario=parallel(world_size=4),
        invariants=("F-PAR-005",),
        place={"step": 0},
    ),
    Variant(
        name="embedding-on-all",
        summary="every rank of a group holds the whole embedding",
        source="classic",
        plants={f"{STYLES}.RowwiseParallel._partition_embedding_fn": embed_on_all},
        scenario=parallel(),
        invariants=("F-PAR-006",),
        place={"rank": 0},
    ),
)
