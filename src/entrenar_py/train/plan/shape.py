"""The model of a run without its weights: what it counts, and how a micro-batch is rehearsed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.compute import draws, nf4
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, masks, model, precision
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.plan import rehearsal
from entrenar_py.train.plan.rehearsal import META, Rehearsal

FLOAT_BYTES = 4
# What a model of others raises on tensors without values; RuntimeError is torch's own.
_UNFORESEEN = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError)
_SCALES = 256  # of NF4, that share a scale
_NF4 = "_is_planned_in_nf4"  # the mark of a layer whose weights are kept so


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of a model that one rank holds.

    With `tensor` > 1 each layer that can be cut is shared by so many ranks. With `blocks` given,
    only so many of the model's blocks are held. Without `has_table` another rank has the table of
    tokens, and without `has_head` what comes after the last block. A table that is tied to the head
    is held with either.
    """

    tensor: int = 1
    blocks: int | None = None
    has_table: bool = True
    has_head: bool = True


WHOLE = Cut()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a rank's part of the model.

    `frozen_bytes` are held in the run's format. `trained` counts elements, which are float32.
    `largest_block_bytes` are the weights of the largest block, `outside_bytes` those of no block.
    """

    frozen_bytes: int
    trained: int
    largest_block_bytes: int
    outside_bytes: int

    @property
    def weight_bytes(self) -> int:
        """All weights, trained ones included."""
        return self.frozen_bytes + FLOAT_BYTES * self.trained


@dataclass(frozen=True)
class Shape:
    """The model that `settings` name, on torch's meta device."""

    settings: Settings
    _parts: dict[tuple[Cut, bool], nn.Module] = field(default_factory=dict)
    _works: dict[str, Finetuning] = field(default_factory=dict)
    _rehearsed: dict[tuple[Any, ...], Rehearsal] = field(default_factory=dict)

    @cached_property
    def whole(self) -> nn.Module:
        """The whole model with its adapters."""
        whole = model.shape(self.settings)
        if self.settings.method == "qlora":
            for name in precision.packed(whole):
                setattr(whole.get_submodule(name), _NF4, "lora_" not in name)
        return whole

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters, adapters included."""
        return _num_elements(self.whole)

    @property
    def config(self) -> Any:
        """The configuration of the part that reads text."""
        return cast("Any", self.whole).config.get_text_config()

    @property
    def num_blocks(self) -> int:
        """The number of the model's blocks."""
        return len(_stack(self.whole))

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """The model's blocks, in order."""
        yield from _stack(self.whole)

    def block_counts(self) -> list[Counts]:
        """Return the numbers of each block."""
        found = []
        for block in self.blocks:
            trained = sum(p.numel() for p in block.parameters() if p.requires_grad)
            size = self._bytes(block)
            frozen = size - FLOAT_BYTES * trained
            found.append(
                Counts(
                    frozen_bytes=frozen, trained=trained, largest_block_bytes=size, outside_bytes=0
                )
            )
        return found

    def counts(self, cut: Cut = WHOLE) -> Counts:
        """Return the numbers of a part of the model."""
        part = self._part(cut)
        blocks = [self._bytes(block) for block in _stack(part)]
        elsewhere = _elsewhere(part, cut)
        others = {*elsewhere, *self._of_other_ends(part, cut)}
        trained = sum(p.numel() for p in part.parameters() if p.requires_grad and p not in others)
        everything = self._bytes(part) - sum(p.numel() * p.element_size() for p in elsewhere)
        return Counts(
            frozen_bytes=everything - FLOAT_BYTES * trained,
            trained=trained,
            largest_block_bytes=max(blocks, default=0),
            outside_bytes=everything - sum(blocks),
        )

    def _of_other_ends(self, part: nn.Module, cut: Cut) -> Iterator[nn.Parameter]:
        """Yield what stands before or after the blocks of `part`, and another rank trains.

        Tables and heads are left out.
        """
        model = cast("Any", part)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        known = {one for end in ends if end is not None for one in end.parameters()}
        is_here, module = cut.has_table, part
        for name in self._path:
            for other, child in module.named_children():
                if other == name:
                    is_here = cut.has_head
                elif not is_here:
                    yield from (one for one in child.parameters() if one not in known)
            is_here, module = cut.has_table, module.get_submodule(name)

    @cached_property
    def _path(self) -> list[str]:
        """The names on the way to the model's blocks."""
        stack = _stack(self.whole)
        names = (name for name, module in self.whole.named_modules() if module is stack)
        return next(names, "").split(".")

    def cuts_into(self, size: int) -> str:
        """Return why the model's layers can't be shared by `size` ranks, "" if they can."""
        return blocks.problem_of_sharing(self.whole, size)

    def rehearsed(
        self, *, rows: int, length: int, kind: str, recompute: bool, cut: Cut = WHOLE
    ) -> Rehearsal:
        """Return what a micro-batch of `rows` x `length` tokens takes on a device of a `kind`."""
        key = rows, length, kind, recompute, cut
        if key not in self._rehearsed:
            part = self._part(cut, recompute=recompute)
            self._rehearsed[key] = self._rehearse(rows, length, kind, part, cut.has_head)
        return self._rehearsed[key]

    def _rehearse(
        self, rows: int, length: int, kind: str, part: nn.Module, has_head: bool
    ) -> Rehearsal:
        samples = _samples(rows, length)
        for one in (self.whole, part):
            cast("Any", one).config.pad_token_id = 0
        tensors = {name: one for name, one in part.named_parameters() if one.requires_grad}
        try:
            work = self._work(part, kind)
            batch = [one.to(META) for one in work.with_samples(samples).batch(range(rows))]
            drop = draws.Keyed(torch.zeros(2, dtype=torch.int32, device=META))

            def loss() -> Tensor:
                return work.loss_of(tensors, batch, linear=F.linear, drop=drop)

            def hidden() -> Tensor:
                found = blocks.decoder_of(part)(input_ids=batch[0], use_cache=False)
                return cast("Tensor", found.last_hidden_state)

            step = rehearsal.rehearse(
                loss if has_head else hidden,
                [*tensors.values()],
                module=part,
                kind=kind,
                products=precision.of_products(self.settings),
            )
        except _UNFORESEEN as error:
            told = " ".join(str(error).split())
            raise UsageError(
                f"model={self.settings.model}: its memory can't be foreseen without weights "
                f"({type(error).__name__}: {told})"
            ) from error
        return replace(step, peak=step.peak + self._decoded_bytes(part))

    def _work(self, part: nn.Module, kind: str) -> Finetuning:
        """Return a workload on `part`. Only the whole model is tried, which takes some passes."""
        if kind not in self._works:
            labels = self.settings.classes.labels if self.settings.task == "classify" else ()
            with rehearsal.answered(kind):
                self._works[kind] = Finetuning(
                    self.whole,
                    _samples(1, 1),
                    pad_token=0,
                    class_weights=(1.0,) * len(labels),
                    products=precision.of_products(self.settings),
                )
        return self._works[kind].of_part(part)

    def _part(self, cut: Cut, *, recompute: bool = False) -> nn.Module:
        if cut == WHOLE and not recompute:
            return self.whole
        key = cut, recompute
        if key not in self._parts:
            self._parts[key] = _cut(self.whole, cut)
            if recompute:
                with contextlib.suppress(UsageError):  # of a model without blocks
                    masks.recompute(self._parts[key])
        return self._parts[key]

    def _bytes(self, module: nn.Module) -> int:
        """Return the bytes of a module's weights, of which some may be in NF4."""
        whole = sum(one.numel() * one.element_size() for one in module.parameters())
        spared = sum(one.numel() * one.element_size() for one in self._packed(module))
        return whole - spared + sum(_nf4_bytes(one.numel()) for one in self._packed(module))

    def _decoded_bytes(self, part: nn.Module) -> int:
        """Return the bytes of the largest weight in NF4, decoded for its product."""
        width = precision.of_products(self.settings).itemsize
        return width * max((one.numel() for one in self._packed(part)), default=0)

    def _packed(self, module: nn.Module) -> Iterator[Tensor]:
        """Yield the weights that are kept in NF4."""
        for layer in module.modules():
            if getattr(layer, _NF4, False):
                yield cast("Tensor", layer.weight)


def _samples(rows: int, length: int) -> Samples:
    """Return rows of one length, in which every token is to be predicted."""
    return Samples(
        tokens=np.ones(rows * length, np.int32),
        is_target=np.ones(rows * length, np.bool_),
        starts=np.arange(rows + 1, dtype=np.int64) * length,
        labels=np.zeros(rows, np.int32),
    )


def _elsewhere(part: nn.Module, cut: Cut) -> list[nn.Parameter]:
    """Return the table or the head of `part` that another rank has.

    If they are tied, a rank with either has both.
    """
    model = cast("Any", part)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [set() if end is None else set(end.parameters()) for end in (table, head)]
    if ends[0] & ends[1]:
        return [] if cut.has_table or cut.has_head else [*ends[0]]
    away = [
        end for end, is_here in zip(ends, (cut.has_table, cut.has_head), strict=True) if not is_here
    ]
    return [parameter for end in away for parameter in end]


def _stack(module: nn.Module) -> nn.ModuleList:
    """Return the model's blocks: of all lists of alike modules, the one that weighs most."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part)]
    alike = [one for one in lists if len({type(block) for block in one}) == 1]
    return max(alike, key=_num_elements, default=nn.ModuleList())


def _num_elements(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _nf4_bytes(number: int) -> int:
    """Return the bytes of weights in NF4: 4 bits each, and scales that are quantised in turn."""
    scales = -(-number // nf4.BLOCK)
    return -(-number // 2) + scales + FLOAT_BYTES * -(-scales // _SCALES)


def _cut(whole: nn.Module, cut: Cut) -> nn.Module:
    """Return a copy of the model in which only a rank's part is left."""
    # Some layers keep what their last pass computed, which can't be copied with its history.
    held = [one for module in whole.modules() for one in vars(module).values()]
    kept = {id(one): one.detach() for one in held if isinstance(one, torch.Tensor)}
    part = copy.deepcopy(whole, kept)
    if cut.blocks is not None:
        blocks = _stack(part)
        del blocks[cut.blocks :]
        cast("Any", part).config.get_text_config().num_hidden_layers = cut.blocks
    for layer, how in _cuttable(part):
        _narrow(layer, how, cut.tensor)
    return part


def _cuttable(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers that ranks share, and how they are cut."""
    plan = blocks.plan_of(module)
    for name, how in plan.styles.items():
        yield plan.decoder.get_submodule(name), how


def _narrow(layer: nn.Module, how: str, size: int) -> None:
    """Cut a linear layer and its adapter: of the two factors one is cut, the other is whole."""
    axis = 0 if how == blocks.COLUMNS else 1
    for name, tensor in layer.named_parameters():
        whole = "lora_A" if how == blocks.COLUMNS else "lora_B"
        if whole in name or (tensor.dim() == 1 and how == blocks.ROWS):
            continue
        parts = list(tensor.shape)
        parts[axis] = -(-parts[axis] // size)
        tensor.data = torch.empty(parts, dtype=tensor.dtype, device=META)
