"""Strategy `pipeline_parallel`: each rank has some blocks, and shards pass through them one by one.

The schedule is torch's 1F1B, with the shards of a step as its micro-batches. All shards have the
same shape: rows are padded to the longest row of the step, shards to the same number of rows.

The model's own forward pass runs in each stage. It skips the blocks of other stages, takes the
received hidden states at its first block, and ends after its last block.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.finetune.strategies import strategy
from entrenar_py.train.finetune.strategies.optimizers import gradient_of
from entrenar_py.train.finetune.strategies.strategy import (
    Arrays,
    Shards,
    Step,
    Strategy,
    ValueOf,
    together,
)
from entrenar_py.train.model import blocks, objectives
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.settings import BY_SHARDS
from entrenar_py.train.stages.stage_model import Reached, Skipped, hidden_of, with_hidden


class Ends:
    """The modules of a model before and after its blocks, found by running it on `tokens`.

    `before` and `after` are sets of parameters. `dtypes` has the dtype of each block's output, and
    `width` is the size of its last dimension.
    """

    def __init__(self, module: nn.Module, blocks: nn.ModuleList, tokens: Tensor) -> None:
        self.before, self.after = set[nn.Parameter](), set[nn.Parameter]()
        self.dtypes: list[torch.dtype] = []
        self.width = 0
        self.returns_tuples = False  # True if blocks do
        self._found = self.before
        inside = {layer for block in blocks for layer in block.modules()}
        hooks = [
            layer.register_forward_pre_hook(self._note)
            for layer in module.modules()
            if layer not in inside and next(layer.parameters(recurse=False), None) is not None
        ]
        hooks += [block.register_forward_hook(self._passed) for block in blocks]
        try:
            module(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self.dtypes) != len(blocks):
            raise UsageError(
                f"strategy=pipeline_parallel: {type(module).__name__} does not run its "
                f"{len(blocks)} blocks once each; use {' or '.join(BY_SHARDS)}"
            )

    def _note(self, layer: nn.Module, _: object) -> None:
        self._found.update(layer.parameters(recurse=False))

    def _passed(self, _: nn.Module, __: object, output: Any) -> None:
        hidden = hidden_of(output)
        self.returns_tuples = isinstance(output, tuple)
        self.dtypes.append(hidden.dtype)
        self.width = hidden.shape[-1]
        self._found = self.after


class Stage(nn.Module):
    """The blocks `own` of a model. `decoder` is the model without its head.

    Called with tokens, int64 [n, t], in the first stage, and with hidden states [n, t, d] in
    others.
    """

    def __init__(
        self, decoder: nn.Module, blocks: nn.ModuleList, own: range, *, returns_tuples: bool
    ) -> None:
        super().__init__()
        self._decoder, self._is_first = decoder, own.start == 0
        self._embedding_width = cast("Any", decoder).get_input_embeddings().weight.shape[1]
        self._is_last = own.stop == len(blocks)
        self._received: Tensor | None = None
        for index, block in enumerate(blocks):
            if index not in own:
                blocks[index] = Skipped(block, returns_tuple=returns_tuples)
        if not self._is_first:
            blocks[own.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self._is_last:
            blocks[own.stop - 1].register_forward_hook(_leave)

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        """Return hidden states [n, t, d]: after this stage's blocks, or the model's last ones.

        `named` has a mask or positions, [n, t].
        """
        if self._is_first:
            named["input_ids"] = x
        else:  # what the model computes before its blocks is not used
            self._received = x
            named["inputs_embeds"] = x.new_zeros(*x.shape[:2], self._embedding_width)
        try:
            output = self._decoder(**named, use_cache=False)
        except Reached as reached:
            return reached.hidden
        finally:
            self._received = None
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _enter(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_hidden(inputs, named, self._received)


def _leave(_: nn.Module, __: object, output: Any) -> None:
    raise Reached(hidden_of(output))


_Shape = tuple[int, int]  # rows of a shard, and tokens of a row


class PipelineParallel(Strategy):
    """One stage of the model on each rank."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        workload, module = shards.workload, shards.workload.module
        layers = blocks.of(module)
        cuts = [range(c[0], c[-1] + 1) for c in sharding.cut(range(len(layers)), self._size)]
        names = {parameter: name for name, parameter in module.named_parameters()}
        tokens = strategy.probe_tokens()
        with strategy.filled(module):
            place = next(module.parameters()).device
            before = strategy.reference_of(workload, place)
            with in_evaluation(module), workload.formats(place):
                ends = Ends(module, layers, tokens.to(place))
                self._head = _Head(workload.objective, module)
            self._dtypes = [ends.dtypes[cut.stop - 1] for cut in cuts]
            self._width = ends.width
            stage = Stage(
                *(blocks.decoder_of(module), layers, cuts[self._rank]),
                returns_tuples=ends.returns_tuples,
            )
            self._keep(module, ends)
            workload.objective.to(self.device)
            self._stage = _Drawing(stage, shards, self._rank)
            together(lambda: self._require_same(before, tokens))
        self.trainable = {
            names[parameter]: parameter
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        together(lambda: self._require_trainable(cuts[self._rank]))
        self._copied = self._find_copies()
        self._schedule: tuple[_Shape, Any] | None = None

    def _keep(self, module: nn.Module, ends: Ends) -> None:
        """Freeze parameters that other ranks use, and free the embedding and head where unused."""
        is_first, is_last = self._rank == 0, self._rank == self._size - 1
        here = (ends.before if is_first else set()) | (ends.after if is_last else set())
        for parameter in [p for p in module.parameters() if p in ends.before | ends.after]:
            if parameter not in here:
                parameter.requires_grad_(False)
        tables = [cast("Any", module).get_input_embeddings()]
        if not self._shards.workload.has_classes:
            tables.append(self._head.layer)
        for table in tables:
            if table.weight not in here:
                table.weight.data = table.weight.data.new_empty(0)

    def _require_trainable(self, own: range) -> None:
        if not self.trainable:
            raise UsageError(
                f"strategy=pipeline_parallel: rank {self._rank} has nothing to train in blocks "
                f"{own.start} to {own.stop - 1}; use lora.targets within blocks, or fewer ranks"
            )

    def _find_copies(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups of ranks that train copies of the same tensor, by the tensor's name."""
        everyone: list[list[str]] = [[] for _ in range(self._size)]
        dist.all_gather_object(everyone, list(self.trainable))
        holders: dict[str, list[int]] = {}
        for rank, names in enumerate(everyone):
            for name in names:
                holders.setdefault(name, []).append(rank)
        copied = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._first_of = {name: ranks[0] for name, ranks in copied.items()}
        return {name: dist.new_group(ranks) for name, ranks in copied.items()}

    def _require_same(self, before: strategy.Reference, tokens: Tensor) -> None:
        """Raise UsageError on the last rank if the stages together compute other logits.

        `before` are the logits of the whole model.
        """
        workload = self._shards.workload
        with in_evaluation(workload.module), workload.formats(self.device):
            hidden = self._passed(tokens.to(self.device))
            if hidden is None:
                return
            after = self._head.logits(hidden)
        after = after[:, -1] if before.logits.dim() == 2 else after
        kind = type(workload.module).__name__
        strategy.require_same_logits(before, after.float().cpu(), "pipeline_parallel", kind)

    def _passed(self, tokens: Tensor, **named: Tensor) -> Tensor | None:
        """Pass rows of tokens, int64 [n, t], through all stages, in evaluation mode.

        Returns the last hidden states [n, t, d] on the last rank, None on others.
        """
        x = tokens
        if self._rank:
            shape, dtype = (*tokens.shape, self._width), self._dtypes[self._rank - 1]
            x = torch.empty(shape, dtype=dtype, device=self.device)
            waiting = dist.irecv(x, self._rank - 1)
            assert waiting is not None, "this rank is of the group"
            waiting.wait()
        hidden: Tensor = self._stage.stage(x, **named)
        if self._rank == self._size - 1:
            return hidden
        dist.send(hidden.contiguous(), self._rank + 1)
        return None

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Implement `Strategy.logits`. While a stage computes, the one before has the next rows."""
        hidden = self._passed(tokens, attention_mask=mask)
        if hidden is None:
            return None
        workload = self._shards.workload
        if workload.has_classes:
            rows = torch.arange(len(tokens), device=self.device)
            hidden = hidden[rows, _ends(tokens, workload.pad_token)]
        return self._head.logits(hidden)

    # --- a step -----------------------------------------------------------------------------------

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        for parameter in self.trainable.values():
            parameter.grad = None
        tokens, others, targets = self._batch(step)
        named: Any = {name: one.to(self.device) for name, one in others.items()}
        shape = (tokens.shape[0] // len(step.shards), tokens.shape[1])
        schedule = self._scheduled(shape, len(step.shards))
        self._stage.begin(step)
        is_first, is_last = self._rank == 0, self._rank == self._size - 1
        losses_here: list[Tensor] = []
        with self._shards.workload.formats(self.device):
            schedule.step(
                *([tokens.to(self.device)] if is_first else []),
                target=targets.to(self.device) if is_last else None,
                losses=losses_here if is_last else None,
                **named,
            )
        self._shards.workload.warn_once()
        for parameter in self.trainable.values():
            gradient_of(parameter).div_(step.weight)
        for name, group in self._copied.items():
            if name in self.trainable:
                dist.all_reduce(gradient_of(self.trainable[name]), group=group)
        losses = self._shards.zeros()
        if is_last:
            losses += torch.stack([loss.detach() for loss in losses_here]).to(losses)
        return losses

    def _batch(self, step: Step) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return tokens [S * n, t], other inputs of blocks, and targets, shard after shard.

        Targets are tokens, [S * n, t], or classes and the places of rows' ends, [S * n, 2].
        """
        workload = self._shards.workload
        parts = [workload.rows(part or step.shards[0][:1]) for part in step.shards]
        shape = (max(len(own[0]) for own in parts), max(own[0].shape[1] for own in parts))
        tokens = torch.cat([_filled(own[0], shape, workload.pad_token) for own in parts])
        targets = torch.cat(
            [
                _filled(own[2] if part else torch.full_like(own[2], IGNORED), shape, IGNORED)
                for part, own in zip(step.shards, parts, strict=True)
            ]
        )
        if workload.is_packed:
            positions = torch.cat([_continued(own[1], shape) for own in parts])
            return tokens, {"position_ids": positions}, targets
        if not workload.has_classes:
            return tokens, {}, targets
        ends = _ends(tokens, workload.pad_token)
        classes = torch.full((len(tokens),), IGNORED)
        for shard, part in enumerate(step.shards):
            start = shard * shape[0]
            classes[start : start + len(part)] = workload.classes(part)
        # A padding row sees its own tokens, since a softmax over nothing would be NaN.
        masks = torch.cat([_filled(own[1], shape, 0) for own in parts])
        masks[masks.sum(1) == 0] = 1
        return tokens, {"attention_mask": masks}, torch.stack([classes, ends], dim=1)

    def _scheduled(self, shape: _Shape, num_shards: int) -> Schedule1F1B | ScheduleGPipe:
        """Return the schedule for shards of `shape`. torch's schedules have fixed buffers."""
        if self._schedule is None or self._schedule[0] != shape:
            is_first = self._rank == 0
            received = torch.empty(shape, dtype=torch.int64, device="meta")
            received = received if is_first else self._hidden(shape, self._rank - 1)
            stage = PipelineStage(
                self._stage,
                self._rank,
                self._size,
                self.device,
                input_args=(received,),
                output_args=(self._hidden(shape, self._rank),),
            )
            kind = Schedule1F1B if self._size > 1 else ScheduleGPipe
            schedule = kind(stage, num_shards, loss_fn=self._head.loss, scale_grads=False)
            self._schedule = shape, schedule
        return cast("Schedule1F1B", self._schedule[1])

    def _hidden(self, shape: _Shape, rank: int) -> Tensor:
        dtype, of_meta = self._dtypes[rank], torch.device("meta")
        return torch.empty((*shape, self._width), dtype=dtype, device=of_meta, requires_grad=True)

    # --- the state --------------------------------------------------------------------------------

    def squares(self) -> Tensor:
        """Implement `Strategy.squares`. Of several copies, only the first counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, parameter in self.trainable.items():
            if self._first_of.get(name, self._rank) == self._rank:
                total += gradient_of(parameter).double().square().sum()
        dist.all_reduce(total)
        return total

    def whole(self, value_of: ValueOf) -> Arrays:
        """Implement `Strategy.whole`."""
        own = {
            name: value_of(parameter).detach().float().cpu().numpy().copy()
            for name, parameter in self.trainable.items()
        }
        everyone: list[Any] | None = [None] * self._size if self._rank == 0 else None
        dist.gather_object(own, everyone)
        return {name: array for part in everyone or () for name, array in part.items()}


def _ends(tokens: Tensor, pad_token: int) -> Tensor:
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places * (tokens != pad_token)).argmax(-1)


def _filled(rows: Tensor, shape: _Shape, value: int) -> Tensor:
    return F.pad(rows, (0, shape[1] - rows.shape[1], 0, shape[0] - len(rows)), value=value)


def _continued(positions: Tensor, shape: _Shape) -> Tensor:
    """Return positions of packed rows, padded to `shape`.

    In each row, padding counts as one more sample.
    """
    whole = torch.arange(shape[1]).repeat(shape[0], 1)
    whole[: len(positions), : positions.shape[1]] = positions
    whole[: len(positions), positions.shape[1] :] -= positions.shape[1]
    return whole


class _Drawing(nn.Module):
    """A stage that draws each shard's random numbers from a stream for the shard and the stage."""

    def __init__(self, stage: Stage, shards: Shards, rank: int) -> None:
        super().__init__()
        self.stage, self._shards, self._rank = stage, shards, rank
        self._step: Step | None = None
        self._shard = 0

    def begin(self, step: Step) -> None:
        self._step, self._shard = step, 0

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        assert self._step is not None, "begin was called"
        drop = self._shards.drop(self._step, self._shard, self._rank)
        self._shards.workload.seed(drop)
        self._shard += 1
        with self._shards.workload.masks(x.device):
            hidden: Tensor = self.stage(x, **named)
        return hidden


class _Head:
    """The model's last layer and the loss, as functions of the last hidden states [n, t, d]."""

    def __init__(self, objective: nn.Module, module: nn.Module) -> None:
        base = cast("Any", module)
        self._objective = objective
        self._is_product = False
        if self._weights is None:
            self.layer = base.get_output_embeddings()
            self._is_product = objectives.head_of(module) is not None
            return
        base = base.get_base_model() if hasattr(base, "peft_config") else base
        if not hasattr(base, "score"):
            raise UsageError(
                f"strategy=pipeline_parallel: {type(base).__name__} has no layer `score` after its "
                f"last block; use {' or '.join(BY_SHARDS)}"
            )
        self.layer = base.score

    @property
    def _weights(self) -> Tensor | None:
        # Not kept here: moving the objective to a device replaces its buffers.
        return getattr(self._objective, "weights", None)

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer(hidden)
        return found

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a shard, 0-d float32."""
        if self._weights is not None:
            classes, ends = targets.unbind(1)
            rows = torch.arange(len(hidden), device=hidden.device)
            logits = self.layer(hidden[rows, ends.clamp(min=0)]).float()
            return F.cross_entropy(
                logits, classes, weight=self._weights, ignore_index=IGNORED, reduction="sum"
            )
        wanted = F.pad(targets[:, 1:], (0, 1), value=IGNORED).flatten()
        places = (wanted != IGNORED).nonzero().flatten()
        hidden, wanted = hidden.flatten(0, 1).index_select(0, places), wanted[places]
        if self._is_product:
            return objectives.cross_entropy(hidden, self.layer.weight, wanted)
        return F.cross_entropy(self.layer(hidden).float(), wanted, reduction="sum")
