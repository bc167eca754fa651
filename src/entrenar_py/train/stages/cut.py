"""The cut of a model into stages: the blocks, tensors, files and worker places of each stage.

A stage has consecutive blocks of the model, and therefore a consecutive part of the flat vector of
all trainable tensors. The coordinator adds and updates the vector of the whole model; no block of
the wire protocol contains elements of two stages. A model that orders its trainable tensors
differently is refused. So is a model that ties a trained embedding to its head, because two stages
would then train the same tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, cast

from blake3 import blake3
from torch import nn

from entrenar_py.shared import wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.blocks import Blocks, num_blocks
from entrenar_py.train.arithmetic.tensors import TensorSpec
from entrenar_py.train.model import blocks
from entrenar_py.train.model.settings import Settings, StagePlan
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.terms import Run, Terms


class StageBlocks:
    """The division of the whole model's vector into blocks, and no block spans two stages.

    It has the interface of `Blocks`.
    """

    def __init__(self, num_elements: Sequence[int]) -> None:
        self._stages = [Blocks(number, num_blocks(number, 1)) for number in num_elements]
        self.of_stage: list[range] = []
        self._starts: list[int] = []
        self.count = start = 0
        for number, part in zip(num_elements, self._stages, strict=True):
            self.of_stage.append(range(self.count, self.count + part.count))
            self._starts.append(start)
            self.count += part.count
            start += number

    def part(self, block: int) -> slice:
        """Return the slice of the vector that `block` covers."""
        stage, own = self._place(block)
        part = self._stages[stage].part(own)
        return slice(part.start + self._starts[stage], part.stop + self._starts[stage])

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on the wire, in bytes."""
        stage, own = self._place(block)
        return self._stages[stage].num_bytes(own)

    @property
    def num_bytes_max(self) -> int:
        """The length of the longest block on the wire, in bytes."""
        return max(stage.num_bytes_max for stage in self._stages)

    def order(self) -> range:
        """Return the blocks in sending order: from the vector's end."""
        return range(self.count - 1, -1, -1)

    def stage_of(self, block: int) -> int:
        """Return the stage that `block` belongs to."""
        return self._place(block)[0]

    def _place(self, block: int) -> tuple[int, int]:
        for stage, own in enumerate(self.of_stage):
            if block in own:
                return stage, block - own.start
        raise IndexError(f"block {block} of {self.count}")


class OwnBlocks:
    """The blocks of one stage, numbered as in the whole model; `part` is in the stage's vector."""

    def __init__(self, every: StageBlocks, stage: int) -> None:
        self._every, self._own = every, every.of_stage[stage]
        self._start = every.part(self._own.start).start
        self.count = self._own.stop

    def part(self, block: int) -> slice:
        """Return the slice of the stage's vector that `block` covers."""
        part = self._every.part(block)
        return slice(part.start - self._start, part.stop - self._start)

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on the wire, in bytes.

        The length is 0 if the block belongs to a different stage.
        """
        return self._every.num_bytes(block) if block in self._own else 0

    def order(self) -> range:
        """Return the blocks in sending order: from the vector's end."""
        return self._own[::-1]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The stages of a model in order; `stages` has the blocks of each.

    `specs` has the trainable tensors of each stage, in the order of the whole model. `ranks` has
    the ranks of each stage. `names` has the name of the worker that each rank is reserved for, ""
    for any worker. `backends` has the kind of backend that each stage needs, None for any.
    """

    stages: tuple[range, ...]
    specs: tuple[tuple[TensorSpec, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()
    backends: tuple[str | None, ...] = ()

    @cached_property
    def blocks(self) -> StageBlocks:
        """The blocks in which gradients and weights are sent."""
        return StageBlocks([sum(prod(spec.shape) for spec in own) for own in self.specs])

    @property
    def places(self) -> Places:
        """The ranks, stages and backends in the format of the wire protocol."""
        return Places(self.ranks, tuple(self.blocks.of_stage), self.backends, self.names)

    def stage_of_rank(self, rank: int) -> int:
        """Return the stage of `rank`."""
        return self.places.stage_of(rank)

    def plan(self) -> tuple[StagePlan, ...]:
        """Return the stages in the format of the settings."""
        return tuple(
            StagePlan(
                layers=(own.start, own.stop),
                worker=tuple(name for name in (self.names[rank] for rank in ranks) if name),
                backend=backend,
            )
            for own, ranks, backend in zip(self.stages, self.ranks, self.backends, strict=True)
        )

    def rank_of(self, name: str) -> int:
        """Return the rank of the worker called `name`. Raises UsageError if it has no place."""
        if name not in self.names or not name:
            known = ", ".join(one for one in self.names if one)
            advice = f"they have {known}; use one of these" if known else "leave it out"
            raise UsageError(
                f"--id {name}: no stage of the run has a worker of that name; {advice}"
            )
        return self.names.index(name)

    def lines(self) -> Iterator[str]:
        """Yield a line for each stage."""
        for stage, (own, ranks) in enumerate(zip(self.stages, self.ranks, strict=True)):
            names = [self.names[rank] or f"rank {rank}" for rank in ranks]
            needed = f" on {self.backends[stage]}" if self.backends[stage] else ""
            yield f"stage {stage}: {wording.spanned('block', own)}, {', '.join(names)}{needed}"

    def terms(self, plain: Terms) -> Terms:
        """Return the terms of a run with these stages.

        `plain` has the terms of the same run as a star.
        """
        stages = [[own.start, own.stop] for own in self.stages]
        text = json.dumps([plain.manifest, stages, self.ranks])
        return replace(plain, manifest=str(blake3(text.encode()).hexdigest(16)))

    def placed(self, run: Run) -> Run:
        """Return `run` with the ranks of these stages."""
        number = self.places.num_ranks
        return replace(run, places=self.places, world_size=number, num_awaited=number)


def specs_of(module: nn.Module, stages: Sequence[range]) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the trainable tensors of each stage of `module`, which may be on the meta device.

    Raises UsageError if a tensor doesn't belong to exactly one stage, or is out of order.
    """
    place, _ = blocks.place_of(module)
    _require_untied(module)
    specs: list[list[TensorSpec]] = [[] for _ in stages]
    order: list[int] = []
    is_after = False
    for name, tensor in module.named_parameters():
        is_after = is_after or name.startswith(f"{place}.")
        if tensor.requires_grad:
            stage = _stage_of(name, f"{place}.", stages, is_after)
            order.append(stage)
            spec = TensorSpec(name, tuple(tensor.shape), "trainable", decayed=tensor.dim() > 1)
            specs[stage].append(spec)
    if order != sorted(order):
        raise UsageError(
            f"strategy=layer_pipeline: {type(module).__name__} lists trained weights that follow "
            "its blocks before them, so the parts of stages are not consecutive; use method: "
            "lora, with targets within blocks"
        )
    for stage, own in enumerate(specs):
        if not own:
            part = wording.spanned("block", stages[stage])
            raise UsageError(
                f"stages: stage {stage} has nothing to train in {part}; use lora.targets within "
                "its blocks, or fewer stages",
                field=f"stages.{stage}.layers",
            )
    return tuple(map(tuple, specs))


def _require_untied(module: nn.Module) -> None:
    """Raise UsageError if a trained embedding would be shared by the first and the last stage."""
    model = cast("Any", module)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(table, "weight", None)
    if weight is not None and weight.requires_grad and weight is getattr(head, "weight", None):
        raise UsageError(
            f"strategy=layer_pipeline with method: full: {type(module).__name__} uses its table of "
            "tokens as its head, too (tie_word_embeddings), and the first and the last stage would "
            "both train it; use method: lora"
        )


def _stage_of(name: str, prefix: str, stages: Sequence[range], is_after: bool) -> int:
    """Return the stage of the tensor `name`; `is_after`: it is registered after the blocks."""
    if name.startswith(prefix):
        index = int(name.removeprefix(prefix).partition(".")[0])
        return next(stage for stage, own in enumerate(stages) if index in own)
    return len(stages) - 1 if is_after else 0


def of(settings: Settings, module: nn.Module) -> Cut:
    """Return the cut that `settings` describe; `module` is the model, perhaps without weights.

    Raises UsageError if the stages don't fit the model, or if a stage has no trainable tensor.
    """
    number = len(blocks.of(module))
    planned = settings.stages or equal(number, settings.num_workers)
    stages = tuple(range(*stage.layers) for stage in planned)
    require_end(stages, number)
    ranks, at = list[tuple[int, ...]](), 0
    for stage in planned:
        count = max(1, len(stage.worker))
        ranks.append(tuple(range(at, at + count)))
        at += count
    return Cut(
        stages=stages,
        specs=specs_of(module, stages),
        ranks=tuple(ranks),
        names=tuple(name for stage in planned for name in (stage.worker or ("",))),
        backends=tuple(stage.backend for stage in planned),
    )


def require_end(stages: Sequence[range], number: int) -> None:
    """Raise UsageError if consecutive `stages` don't end at the last of `number` blocks."""
    if stages[-1].stop == number:
        return
    last = next((i for i, own in enumerate(stages) if own.stop > number), len(stages) - 1)
    own = stages[last]
    advice = f"use layers: [{own.start}, {number}]"
    if own.start >= number:
        advice = "leave it out"
    elif last < len(stages) - 1:
        advice += ", and leave out what comes after it"
    raise UsageError(
        f"stages[{last}] layers={[own.start, own.stop]}: the model has {number} blocks, 0 to "
        f"{number - 1}; {advice}",
        field=f"stages.{last}.layers",
    )


def equal(num_blocks: int, num_stages: int) -> tuple[StagePlan, ...]:
    """Return stages with the same number of blocks; if needed, the first ones have one more.

    Raises UsageError if there are more stages than blocks.
    """
    if num_stages > num_blocks:
        raise UsageError(
            f"workers={num_stages} with strategy: layer_pipeline: the model has {num_blocks} "
            f"blocks, so a stage would have none; use workers <= {num_blocks}",
            field="workers",
        )
    parts = sharding.cut(range(num_blocks), num_stages)
    return tuple(StagePlan(layers=(part[0], part[-1] + 1)) for part in parts)


INDEX = "model.safetensors.index.json"


def read_index(text: str | bytes) -> dict[str, Any]:
    """Return the content of INDEX. Raises UsageError if it doesn't name a file for each weight."""
    try:
        index = json_text.load(text)
        weights = index["weight_map"].items()
        is_known = all(isinstance(one, str) for pair in weights for one in pair)
    except (AttributeError, KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        raise UsageError(f"{INDEX} can't be read: it has no weight_map of names; copy it again")
    found: dict[str, Any] = index
    return found


def files_of_stage(index: Mapping[str, Any], stack: str, own: range) -> set[str]:
    """Return the names of the files with weights of the blocks `own`, or of no block.

    `index` is the content of INDEX. `stack` is the last part of the name of the list of blocks.
    """
    block = re.compile(rf"(?:^|\.){re.escape(stack)}\.(\d{{1,9}})\.")
    needed = set[str]()
    for name, file in index["weight_map"].items():
        found = block.search(name)
        if found is None or int(found[1]) in own:
            needed.add(file)
    return needed


def narrowed(index: Mapping[str, Any], files: set[str]) -> str:
    """Return the content of INDEX for a folder with only these `files` of weights."""
    weights = {name: file for name, file in index["weight_map"].items() if file in files}
    return json.dumps({**index, "weight_map": weights})
