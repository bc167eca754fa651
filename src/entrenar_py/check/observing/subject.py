"""The observed tensors: a model's parameters and buffers, and its optimizers' state.

Each has the name of its parameter or buffer in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import flat_parameters, surroundings, tensors
from entrenar_py.check.observing.flat_parameters import Part
from entrenar_py.check.observing.sketches import Sketches
from entrenar_py.check.rank_files.layout import Layout, Piece, plain
from entrenar_py.shared import trace

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Buffers:
    """The buffers of a model that are recorded.

    A buffer that a forward pass changes (such as BatchNorm's running statistics) rightly differs
    between ranks. Such a buffer is local: its copies on different ranks are not compared, unless it
    is `synchronised`. Changes are detected by comparing values, since writes through `.data` don't
    change a tensor's version. Buffers are looked up by name each time, since a script may replace
    them. If a script calls only parts of the model, it is unknown which buffers are local.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._called = False
        self._local: set[str] = set()
        # Gets the names of all buffers, and returns the names of those that the script declares
        # synchronised.
        self.synchronised: Callable[[Iterable[str]], Collection[str]] = lambda _: ()

    def before_forward(self) -> None:
        """Copy the buffers that a forward pass may change."""
        self._before = {
            name: tensors.local(buffer).clone()
            for name, buffer in self._all().items()
            if name not in self._local
        }

    def after_forward(self) -> list[str] | None:
        """Return the names of buffers that this pass was the first to change.

        If there are none, return [] after the model's first pass, and None after later passes.
        """
        first, buffers = not self._called, self._all()
        synced = _synchronised(self._model).union(self.synchronised(buffers))
        changed = [
            name
            for name, buffer in buffers.items()
            if name not in self._local | synced and not _same(self._before.get(name), buffer)
        ]
        self._local.update(changed)
        self._called = True
        return changed if changed or first else None

    def held(self) -> dict[str, Tensor]:
        """Return name -> buffer, without local buffers that are never saved, such as caches."""
        unsaved = self._local & _unsaved(self._model)
        return {name: buffer for name, buffer in self._all().items() if name not in unsaved}

    def names(self) -> list[str]:
        """Return the names of all buffers that can be recorded."""
        return [*self._all()]

    def _all(self) -> dict[str, Tensor]:
        """Return name -> buffer, of buffers that are dense, and neither lazy nor quantised."""
        return {
            tensors.plain_name(name): buffer
            for name, buffer in self._model.named_buffers()
            if type(buffer) in (Tensor, DTensor)
            and buffer.dtype in (*_FLOATS, *_WHOLE)
            and buffer.layout is torch.strided
            and not buffer.is_meta
        }


def _unsaved(model: nn.Module) -> set[str]:
    return {
        tensors.plain_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _same(before: Tensor | None, buffer: Tensor) -> bool:
    """Return whether a buffer still has its previous values; NaN counts as equal to NaN."""
    now = tensors.local(buffer)
    if before is None or (before.dtype, before.device, before.shape) != (
        *(now.dtype, now.device, now.shape),
    ):
        return False
    both_nan = before.isnan() & now.isnan()
    return bool(((before == now) | both_nan).all())


def _synchronised(model: nn.Module) -> set[str]:
    """Return the names of buffers that a forward pass changes in the same way on all ranks.

    These are the buffers of each SyncBatchNorm with a process group of all ranks.
    """
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            group = module.process_group
            if group is None or dist.get_world_size(group) == dist.get_world_size():
                names |= {tensors.plain_name(name) for name, _ in module.named_buffers(path)}
    return names


class Subject:
    """A model without wrappers, and its optimizers.

    - `parameters`: name -> parameter; `trained` has the trainable ones among these, and those that
      an optimizer steps and that were trainable before: the networks of a GAN are frozen in turns.
      A wrapper or a script may replace parameters during training; `look_up` updates both.
    - `buffers`: the buffers of the model, and which of them depend on this rank's samples.
    - `layout`: the arrangement of the ranks; None if it is unknown.
    - `pieces`: name -> piece, for each recorded tensor that this rank has only in part.
    - `values`: tensors are recorded with their values; otherwise as sketches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        declared: Layout | None,
        rank: int,
        world_size: int,
    ) -> None:
        self.model, self.optimizers = tensors.unwrapped(model), optimizers
        self.rank, self.world_size, self._declared = rank, world_size, declared
        self.buffers = Buffers(self.model)
        self.parameters: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}
        self._names: dict[Tensor, list[str]] = {}
        self.pieces: dict[str, Piece] = {}
        self._told: dict[str, Any] = {}
        self._sketches = Sketches()
        # DeepSpeed's optimizer, which makes an observed optimizer step partitions; None if there is
        # none.
        self.zero = flat_parameters.zero_optimizer(self.model)
        tensors.reshard(self.model)
        self.look_up()

    def look_up(self) -> bool:
        """Look up the parameters by name.

        Return whether they, or which are trained, have changed.

        While whole parameters temporarily replace sharded ones, the known pieces are kept.
        """
        parts = flat_parameters.parts_of(self.model)
        current: dict[str, Tensor] = dict(flat_parameters.not_flat(self.model))
        current |= {name: part.owner for name, part in parts.items()}
        kept = self._stepped_before() if self._has_same(current) else set[str]()
        trained = {name: p for name, p in current.items() if p.requires_grad or name in kept}
        if self.parameters and not self._are_others(current, trained):
            return False
        self.parameters = current
        self.is_fully_sharded = flat_parameters.is_fully_sharded(self.model)
        self.trained = trained
        self._copies = tensors.stepped_copies(trained, self._groups())
        self._parts = parts
        self._names = {}
        for held in (current, self._copies):
            for name, p in held.items():
                self._names.setdefault(p, []).append(name)
        self.layout = self._layout()
        self.shapes = {name: tuple(p.shape) for name, p in current.items()}
        self.shapes |= {name: part.shape for name, part in parts.items()}
        self.values = sum(map(math.prod, self.shapes.values())) <= tensors.VALUES_MAX
        placed = {name: tensors.piece_of(p) for name, p in current.items()}
        placed |= {name: part.piece for name, part in parts.items()}
        self.pieces = {name: piece for name, piece in placed.items() if piece is not None}
        return True

    def _are_others(self, current: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> bool:
        if self._has_same(current):
            return trained.keys() != self.trained.keys()
        return not any(
            isinstance(before, DTensor) and not isinstance(current.get(name), DTensor)
            for name, before in self.parameters.items()
        )

    def _has_same(self, current: Mapping[str, Tensor]) -> bool:
        return current.keys() == self.parameters.keys() and all(
            current[name] is before for name, before in self.parameters.items()
        )

    def _stepped_before(self) -> set[str]:
        """Return the names of the parameters that were trained and that an optimizer steps."""
        stepped = {name for p in self._stepped() for name in self.names_of(p)}
        return stepped & self.trained.keys()

    def start(self, step: int, progress: Mapping[str, int]) -> trace.Start:
        """Return the record of this rank's state before `step`."""
        groups = [group for group in self._groups() if group.get("weight_decay")]
        decayed = {parameter for group in groups for parameter in group["params"]}
        return trace.Start(
            step=step,
            rank=self.rank,
            trainable=tuple(name for name, p in self.parameters.items() if p.requires_grad),
            frozen=tuple(name for name, p in self.parameters.items() if not p.requires_grad),
            decayed=tuple(name for name, p in self.parameters.items() if p in decayed),
            resumed=step > 0,
            progress=progress,
            weights=self.record(self.parameters),
            optimizer=self.optimizer_state(),
            buffers=self.buffer_records(),
            shapes=self.shapes,
        )

    def update(
        self,
        step: int,
        gradient: trace.Tensors,
        grad_norm: float | None,
        applied_norm: float | None,
    ) -> trace.Update:
        """Return the record of this rank's state after `step`, which has applied `gradient`."""
        rate, rates = self.rates()
        return trace.Update(
            step=step,
            rank=self.rank,
            loss=None,
            weight=0.0,  # known when the files of all ranks are assembled
            learning_rate=rate,
            rates=rates,
            finite=tensors.is_finite(self.own_weights().values()),
            gradient=gradient,
            grad_norm=grad_norm,
            applied_norm=applied_norm,
            weights=self.record(self.parameters),
            optimizer=self.optimizer_state(),
            buffers=self.buffer_records(),
        )

    def record(self, named: Mapping[str, Tensor | None], *, exact: bool = True) -> trace.Tensors:
        """Return name -> record of this rank's part of each tensor, with values or a sketch.

        Without `exact`, the digest of a sketched tensor is that of its sketch. Tensors are left out
        if they are terms of a sum that was not reduced, or if this rank has another piece of them
        than the one in `pieces`. If the rank has the whole tensor, the piece in `pieces` is
        recorded.
        """
        own_parts = self._held(named)
        if self.values:
            return {name: tensors.record(tensor, values=True) for name, tensor in own_parts.items()}
        return self._sketches.records(own_parts, self.pieces, exact=exact)

    def digest(self, name: str, gradient: Tensor) -> str:
        """Return the digest of a gradient's record; "" if it can't be recorded."""
        records = self.record({name: gradient}, exact=False)
        return records[name].digest if name in records else ""

    def _held(self, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return name -> this rank's part of the tensor, for tensors that can be recorded."""
        own_parts = {}
        for name, tensor in named.items():
            if tensor is None or tensors.is_partial(tensor):
                continue
            if (part := self._parts.get(name.partition("/")[0])) is not None:
                own_parts[name] = tensors.in_numbers(_own(part, tensor).detach())
                continue
            own, expected = tensors.piece_of(tensor), self.pieces.get(name)
            if own == expected:
                own_parts[name] = tensors.local(tensor)
            elif own is None and expected is not None and tuple(tensor.shape) == expected.whole:
                own_parts[name] = tensors.local(tensor)[expected.place].contiguous()
        return own_parts

    def optimizer_state(self) -> trace.Tensors:
        """Return `parameter/key` -> record, of the optimizers' state."""
        state: dict[str, Tensor | None] = {}
        for optimizer in self.optimizers:
            state |= tensors.optimizer_state(optimizer, self._names)
        self._place(state)
        if self.values:
            return self.record(state)
        return self._sketches.digests(self._held(state))

    def buffer_records(self) -> trace.Tensors:
        """Return name -> record of this rank's part of the buffer.

        Floating-point buffers have sketches instead of values if they have more than VALUES_MAX
        elements in all. Buffers of integers or bools are left out if they have more than that.
        """
        buffers = self.buffers.held()
        self._place(buffers)
        held = self._held(buffers)
        floats = {name: buffer for name, buffer in held.items() if buffer.is_floating_point()}
        whole = {name: buffer for name, buffer in held.items() if name not in floats}
        if _are_few(floats):
            records = {**self.record({name: buffers[name] for name in floats})}
        else:
            records = {**self._sketches.records(floats, self.pieces, exact=True)}
        if _are_few(whole):
            records |= {name: tensors.record(b, values=True) for name, b in whole.items()}
        return records

    def record_placed(self, named: Mapping[str, Tensor]) -> trace.Tensors:
        """Return records of tensors outside the model, and remember this rank's pieces of them."""
        self._place(named)
        return self.record(named)

    def digests(self, named: Mapping[str, Tensor]) -> trace.Tensors:
        """Return records of this rank's part of tensors, with only the digest of all bits."""
        self._place(named)
        return self._sketches.digests(self._held(named))

    def _place(self, named: Mapping[str, Tensor | None]) -> None:
        """Remember which pieces this rank has of tensors other than parameters."""
        for name, tensor in named.items():
            part = self._parts.get(name.partition("/")[0])
            if tensor is None:
                piece = None
            elif part is None:
                piece = tensors.piece_of(tensor)
            else:
                piece = part.piece if part.fits(tensor) else None
            if piece is not None:
                self.pieces.setdefault(name, piece)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return name -> gradient (or None) of each trained parameter."""
        return {
            name: self._parts[name].gradient() if name in self._parts else p.grad
            for name, p in self.trained.items()
        }

    def own_weights(self) -> dict[str, Tensor]:
        """Return name -> this rank's part of the parameter, without a copy."""
        return {
            name: self._parts[name].weights() if name in self._parts else tensors.local(p)
            for name, p in self.parameters.items()
        }

    def applied_gradients(self) -> dict[str, Tensor | None]:
        """Return `gradients`, with those of stepped copies for parameters that have copies."""
        own = {name: copy.grad for name, copy in self._copies.items() if copy.grad is not None}
        return self.gradients() | own

    def has_gradients(self) -> bool:
        """Return whether any trained parameter has a gradient that is not all zeros.

        Always True with DeepSpeed's optimizer, because this has no gradients before the last pass
        of a step, and the script clears none.
        """
        return self.zero is not None or any(
            gradient is not None and tensors.local(gradient).any()
            for gradient in self.gradients().values()
        )

    def stepped_by(self, index: int, *, alone: bool) -> list[str]:
        """Return the names of the parameters that optimizer `index` steps.

        With `alone`, also those that no optimizer steps.
        """
        stepped = [*map(self._tensors_of, self.optimizers)]
        return [
            name
            for name, p in self.trained.items()
            if p in stepped[index] or (alone and not any(p in own for own in stepped))
        ]

    def step_by(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Use `optimizer`, which steps the same parameters, instead of optimizer `index`."""
        before = self.optimizers
        self.optimizers = (*before[:index], optimizer, *before[index + 1 :])

    def in_step_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of the parameters in the partitions that `optimizer` steps now."""
        current = tensors.stepped_by(optimizer)
        return [name for name, p in self.trained.items() if p in current]

    @property
    def is_stepped_as_copies(self) -> bool:
        """Whether optimizers step other tensors instead of some parameters of the model."""
        return self.is_written_back and not self._stepped() <= {*self.parameters.values()}

    @property
    def is_written_back(self) -> bool:
        """Whether the script writes some of the model's parameters after the optimizers' steps.

        Then the optimizers step copies of these parameters, or other ranks step them (ZeRO-1).
        """
        return not self._stepped().issuperset(self.trained.values())

    def _stepped(self) -> set[Tensor]:
        return {parameter for opt in self.optimizers for parameter in self._tensors_of(opt)}

    def first_held(self) -> str:
        """Return the first trained parameter that isn't empty in this rank's piece.

        If there is none, return the first trained parameter.
        """
        mine = (n for n in self.trained if n in self.pieces and 0 not in self.pieces[n].shape)
        return next(mine, next(iter(self.trained)))

    def names_of(self, parameter: Tensor) -> Sequence[str]:
        """Return the names of a tensor that an optimizer steps; a flat tensor has several."""
        return self._names.get(parameter, ())

    def rates(self) -> tuple[float, dict[str, float]]:
        """Return the first group's learning rate, and name -> rate where a parameter's differs."""
        groups = self._groups()
        first = tensors.rate_of(groups[0])
        rates = {
            name: tensors.rate_of(group)
            for group in groups
            for p in group["params"]
            for name in self._names.get(p, ())
        }
        return first, {name: rate for name, rate in rates.items() if rate != first}

    def rules(self, step: int, constants: Sequence[Mapping[str, Any]]) -> list[trace.Ruled]:
        """Return the rules by which optimizers step.

        `constants` are the constants of their parameter groups, in order.
        """
        kinds = [tensors.rule(opt) for opt in self.optimizers for _ in opt.param_groups]
        return [
            trace.Ruled(
                step=step,
                rank=self.rank,
                rule=kind,
                names=tuple(name for p in group["params"] for name in self._names.get(p, ())),
                constants=told,
                derived=derived,
            )
            for (kind, derived), group, told in zip(kinds, self._groups(), constants, strict=True)
        ]

    def news(self) -> Mapping[str, Any] | None:
        """Return changes of layout and pieces since the last call; None if there are none."""
        if self.layout is None:
            return None
        layout: dict[str, Any] = {
            "axes": list(map(list, self.layout.axes.items())),
            "tied": list(map(list, self.layout.tied)),
        }
        placed = {name: piece.to_list() for name, piece in self.pieces.items()}
        fresh = {name: piece for name, piece in placed.items() if self._told.get(name) != piece}
        if not fresh and self._told.get("axes") == layout["axes"]:
            return None
        self._told.update(fresh | layout)
        return {**layout, "pieces": fresh}

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in self._groups_of(optimizer)]

    def steps_partitions(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether DeepSpeed's optimizer makes `optimizer` step partitions, one by one."""
        return self.zero is not None and self.zero.optimizer is optimizer

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        is_inside = self.steps_partitions(optimizer)
        return flat_parameters.zero_groups(self.zero) if is_inside else optimizer.param_groups

    def _tensors_of(self, optimizer: torch.optim.Optimizer) -> set[Tensor]:
        if self.steps_partitions(optimizer):
            return {*flat_parameters.zero_partitions(self.zero)}
        return tensors.stepped_by(optimizer)

    def _layout(self) -> Layout | None:
        """Return the declared layout, or the one that the parameters' meshes show, or None."""
        declared = self._declared
        if declared is not None and declared.axes:
            return declared
        shown = flat_parameters.layout_of(self.model, self.world_size)
        shown = shown or surroundings.read_off(self.model, self.world_size)
        if declared is None:
            return shown
        return replace(declared, axes=(shown or plain(self.world_size)).axes)


def _own(part: Part, tensor: Tensor) -> Tensor:
    if tensor is part.owner:
        return part.weights()
    return part.of(tensor) if part.fits(tensor) else tensor


def _are_few(buffers: Mapping[str, Tensor]) -> bool:
    return sum(buffer.numel() for buffer in buffers.values()) <= tensors.VALUES_MAX
