"""What is observed, by name: a model's parameters and what its optimizers keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrenar_py import trace
from entrenar_py.errors import UsageError
from entrenar_py.observing import dtensors, tensors
from entrenar_py.rank_files import layout
from entrenar_py.rank_files.layout import Layout, Piece


class Subject:
    """The model without what is wrapped around it, and its optimizers.

    Parameters may be replaced by new objects while it is trained: `look_up` finds them anew.
    `pieces` are those of the tensors that this rank holds a part of, as far as they were recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        declared: Layout | None,
        world_size: int,
    ) -> None:
        self.model, self.optimizers = tensors.unwrapped(model), optimizers
        self._declared, self._world_size = declared, world_size
        self.parameters: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self._told: dict[str, Any] = {}
        self.look_up()

    def look_up(self) -> bool:
        """Whether names stand for other objects now than when they were looked up last, or others
        of them are trained.

        Where whole parameters are in the place of pieces, for a while, those are left as known.
        """
        found: dict[str, Tensor] = {
            tensors.plain_name(n): p for n, p in self.model.named_parameters()
        }
        known = [(p, found.get(name)) for name, p in self.parameters.items()]
        trained = {name: p for name, p in found.items() if p.requires_grad}
        same = len(found) == len(known) and all(now is before for before, now in known)
        same = same and trained.keys() == self.trained.keys()
        gathered = any(
            isinstance(before, DTensor) and not isinstance(now, DTensor) for before, now in known
        )
        if known and (same or gathered):
            return False
        self.parameters = found
        self.is_fully_sharded = dtensors.is_fully_sharded(self.model)
        self.trained = trained
        self._names = {p: name for name, p in found.items()}
        self.layout = self._arranged()
        self.values = sum(p.numel() for p in found.values()) <= tensors.VALUES_MAX
        placed = {name: dtensors.piece_of(p) for name, p in found.items()}
        self.pieces = {name: piece for name, piece in placed.items() if piece is not None}
        self._require_values()
        return True

    def start(
        self, step: int, rank: int, progress: Mapping[str, int], buffers: Mapping[str, Tensor]
    ) -> trace.Start:
        """What this rank holds before `step`, and which of it is trained, frozen and decayed."""
        decayed = self.decayed()
        return trace.Start(
            step=step,
            rank=rank,
            trainable=tuple(self.trained),
            frozen=tuple(name for name in self.parameters if name not in self.trained),
            decayed=tuple(name for name, p in self.parameters.items() if p in decayed),
            resumed=step > 0,
            progress=progress,
            weights=self.record(self.parameters),
            optimizer=self.optimizer_state(),
            buffers=self.buffers(buffers),
        )

    def update(
        self, step: int, rank: int, gradient: trace.Tensors, buffers: Mapping[str, Tensor]
    ) -> trace.Update:
        """What it holds after `step`, which was made with `gradient`."""
        rate, rates = self.rates()
        return trace.Update(
            step=step,
            rank=rank,
            loss=None,
            weight=0.0,  # of all ranks together: known when their files are
            learning_rate=rate,
            rates=rates,
            finite=tensors.is_finite(self.parameters.values()),
            gradient=gradient,
            weights=self.record(self.parameters),
            optimizer=self.optimizer_state(),
            buffers=self.buffers(buffers),
        )

    def record(self, named: Mapping[str, Tensor | None]) -> trace.Tensors:
        """What this rank holds of each of these: the model's parameters, or tensors placed as
        those are; what is placed otherwise, or is a term of a sum, is left out as unknown.
        """
        return self._record(named, self.values)

    def _record(self, named: Mapping[str, Tensor | None], values: bool) -> trace.Tensors:
        return {
            name: tensors.record(dtensors.local(tensor), values=values)
            for name, tensor in named.items()
            if tensor is not None
            and not dtensors.is_partial(tensor)
            and dtensors.piece_of(tensor) == self.pieces.get(name)
        }

    def optimizer_state(self) -> trace.Tensors:
        """`parameter/key` -> what the optimizers keep."""
        state: dict[str, Tensor | None] = {}
        for optimizer in self.optimizers:
            state |= tensors.optimizer_state(optimizer, self._names)
        self._place(state)
        return self.record(state)

    def buffers(self, named: Mapping[str, Tensor]) -> trace.Tensors:
        """What this rank holds of buffers; without values where they are larger than models are of
        which these are kept.
        """
        self._place(named)
        small = sum(one.numel() for one in named.values()) <= tensors.VALUES_MAX
        return self._record(named, self.values and small)

    def _place(self, named: Mapping[str, Tensor | None]) -> None:
        """Notes where the pieces of tensors lie that are no parameters."""
        for name, tensor in named.items():
            piece = None if tensor is None else dtensors.piece_of(tensor)
            if piece is not None:
                self.pieces.setdefault(name, piece)

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of each parameter that is trained, as far as there is one."""
        return {name: p.grad for name, p in self.trained.items()}

    def has_gradients(self) -> bool:
        """Whether there is any, and not all are zero."""
        return any(
            one is not None and dtensors.local(one).any() for one in self.gradients().values()
        )

    def stepped_by(self, index: int, *, alone: bool) -> list[str]:
        """The names that an optimizer steps; `alone`: and those that none does, which are
        nobody's.
        """
        held = [{p for g in one.param_groups for p in g["params"]} for one in self.optimizers]
        return [
            name
            for name, p in self.trained.items()
            if p in held[index] or (alone and not any(p in one for one in held))
        ]

    def first_held(self) -> str:
        """The first parameter that is trained and of which this rank holds something of its own;
        else the first.
        """
        mine = (n for n in self.trained if n in self.pieces and 0 not in self.pieces[n].shape)
        return next(mine, next(iter(self.trained)))

    def decayed(self) -> set[Tensor]:
        """The parameters that weight decay acts on."""
        groups = [group for one in self.optimizers for group in one.param_groups]
        return {p for group in groups if group.get("weight_decay") for p in group["params"]}

    def rates(self) -> tuple[float, dict[str, float]]:
        """The learning rate of the first group, and of parameters that have another one their own,
        by name.
        """
        groups = [group for one in self.optimizers for group in one.param_groups]
        first = float(groups[0]["lr"])
        rates = {self._names.get(p): float(g["lr"]) for g in groups for p in g["params"]}
        return first, {n: rate for n, rate in rates.items() if n is not None and rate != first}

    def news(self) -> Mapping[str, Any] | None:
        """What is to be told of layout and pieces and was not told before; None if nothing is."""
        if self.layout is None:
            return None
        told: dict[str, Any] = {
            "axes": list(map(list, self.layout.axes.items())),
            "tied": list(map(list, self.layout.tied)),
        }
        placed = {name: piece.to_list() for name, piece in self.pieces.items()}
        fresh = {name: piece for name, piece in placed.items() if self._told.get(name) != piece}
        if not fresh and self._told.get("axes") == told["axes"]:
            return None
        self._told.update(fresh | told)
        return {**told, "pieces": fresh}

    def _arranged(self) -> Layout | None:
        """As it was declared, else as the parameters' meshes show it; None where nobody says."""
        declared = self._declared
        if declared is not None and declared.axes:
            return declared
        found = dtensors.read_off(self.model, self._world_size)
        if declared is None:
            return found
        return replace(declared, axes=(found or layout.plain(self._world_size)).axes)

    def _require_values(self) -> None:
        if self.pieces and not self.values:
            name, piece = next(iter(self.pieces.items()))
            raise UsageError(
                f"parameter {name} is sharded (rank holds {piece.shape} of {piece.whole}): whole "
                f"tensors are made of the values of pieces, which are kept of models of up to "
                f"{tensors.VALUES_MAX} parameters; observe the trainer with a smaller model"
            )
