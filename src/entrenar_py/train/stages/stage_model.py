"""A stage of a model: it has some of the model's blocks, and loads only their weights.

The model's own forward pass runs in each stage. It skips the blocks of other stages, uses the
received hidden states at the stage's first block, and ends after the stage's last block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from entrenar_py.shared import wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic.tensors import Batch, DropFunction, Tensors
from entrenar_py.train.model import blocks, masks, model, precision, workload
from entrenar_py.train.model.masks import Masks
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import LENGTHS, Finetuning
from entrenar_py.train.stages.cut import Cut

PROBED = (1, 2, 3, 4)  # token ids that every vocabulary has
HIDDEN_DIMS = 3  # rows, tokens, features


class Skipped(nn.Module):
    """Replaces a block of another stage; blocks of some models return a tuple."""

    def __init__(self, block: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # read by some models
        self.returns_tuple = returns_tuple

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """Return `hidden`."""
        return (hidden,) if self.returns_tuple else hidden


class Table(nn.Module):
    """Replaces the token embedding, which another stage has; all its rows are 0."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        # Models read its device; other code, such as rotary positions, reads its dtype.
        self.register_buffer("weight", torch.empty(0, dtype=table.weight.dtype), persistent=False)
        self.weight: Tensor
        self.fill = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states [n, t, d], all 0, for tokens int64 [n, t]."""
        shape = (*tokens.shape, self.embedding_dim)
        return torch.full(shape, self.fill, dtype=self.weight.dtype, device=tokens.device)


class Head(nn.Module):
    """Replaces the head, which another stage has."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden`."""
        return hidden


class Reached(Exception):
    """Raised when the last block of a stage has computed `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def shorten(module: nn.Module, own: range) -> None:
    """Remove everything from `module` that a stage with the blocks `own` doesn't need.

    The other blocks are removed, the token embedding except in the first stage, and the head except
    in the last stage. An embedding that is tied to the head stays with it. Raises UsageError for a
    model without a list of blocks.
    """
    _place, layers = blocks.place_of(module)
    is_first, is_last = own.start == 0, own.stop == len(layers)
    for index in range(len(layers)):
        if index not in own:
            layers[index] = Skipped(layers[index])
    model = cast("Any", module)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = model.config.get_text_config().tie_word_embeddings and head is not None
    if not is_last and head is not None:
        model.set_output_embeddings(Head())
    if not is_first and not (is_last and is_tied):
        model.set_input_embeddings(Table(table))


class _InTuples(Exception):
    """Raised when a stage's first block got a part of the hidden states: blocks return tuples."""


class Stage:
    """The forward pass through one stage of `module`, which `shorten` has cut to the blocks `own`.

    The first block gets the hidden states passed to `receive`. A forward pass raises Reached in
    every stage except the last.
    """

    def __init__(self, module: nn.Module, own: range, products: torch.dtype) -> None:
        """Run the stage on four tokens, with matrix products in the dtype `products`."""
        layers = blocks.of(module)
        self.own, self.is_first, self.is_last = own, own.start == 0, own.stop == len(layers)
        self._received: tuple[Tensor, int] | None = None
        if not self.is_first:
            layers[own.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.is_last:
            layers[own.stop - 1].register_forward_hook(self._leave)
        place = next(module.parameters()).device
        tokens = torch.tensor([PROBED], device=place)
        with in_evaluation(module), precision.applied(products, place):
            try:
                _require_runs(module, own, tokens)
            except _InTuples:
                for block in layers:
                    if isinstance(block, Skipped):
                        block.returns_tuple = True
                _require_runs(module, own, tokens)
            _require_separate(module, self, tokens)

    def receive(self, hidden: Tensor | None, first_draw: int = 0) -> None:
        """Let the next passes begin with `hidden`, [n, t, d], and draw from `first_draw` on."""
        self._received = None if hidden is None else (hidden, first_draw)

    def _enter(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = inputs[0] if inputs else named["hidden_states"]
        if own.dim() < HIDDEN_DIMS:
            raise _InTuples
        _require_hidden(own)
        hidden, first_draw = self._received or (_example(own), 0)
        drawing = masks.entered()
        if drawing is not None:
            drawing.go_on_at(first_draw)
        return with_hidden(inputs, named, hidden)

    def _leave(self, _: nn.Module, __: object, output: Any) -> None:
        hidden = hidden_of(output)
        _require_hidden(hidden)
        raise Reached(hidden)


def _require_runs(module: nn.Module, own: range, tokens: Tensor) -> None:
    """Run a stage on `tokens`. Raises UsageError if it needs something from an earlier stage.

    In some models blocks share the keys and values of an earlier block.
    """
    try:
        output_of(module, tokens)
    except (UsageError, _InTuples, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # foreign model code may raise anything
        named = type(blocks.decoder_of(module)).__name__
        part, problem = wording.spanned("block", own), f"{type(error).__name__}: {error}".strip()
        raise UsageError(
            f"strategy=layer_pipeline: {part} of {named} can't run on hidden states alone "
            f"({problem}); cut the model elsewhere, or use coordinator and workers without stages"
        ) from error


def _require_hidden(hidden: Tensor) -> None:
    """Raise UsageError unless `hidden` is [n, t, d]."""
    if hidden.dim() != HIDDEN_DIMS:
        raise UsageError(
            f"strategy=layer_pipeline: hidden states between blocks have {hidden.dim()} dims, and "
            "only [rows, tokens, width] can be passed on; use coordinator and workers without "
            "stages"
        )


def _require_used(module: nn.Module, products: torch.dtype) -> None:
    """Raise UsageError if a stage is to train a tensor outside blocks that it doesn't use.

    The cut goes by the order in which a model registers its parts. Some, as OPT, register the norm
    after the blocks before them. Inside blocks, an expert without tokens is not used either.
    """
    place, _ = blocks.place_of(module)
    outside = {
        name: one
        for name, one in module.named_parameters()
        if one.requires_grad and not name.startswith(f"{place}.")
    }
    if not outside:
        return
    where = next(module.parameters()).device
    with in_evaluation(module), precision.applied(products, where), torch.enable_grad():
        output = output_of(module, torch.tensor([PROBED], device=where)).sum()
    gradients: Sequence[Tensor | None] = [None] * len(outside)
    if output.requires_grad:
        gradients = torch.autograd.grad(output, list(outside.values()), allow_unused=True)
    for name, gradient in zip(outside, gradients, strict=True):
        if gradient is None:
            raise UsageError(
                f"strategy=layer_pipeline: {type(blocks.decoder_of(module)).__name__} registers "
                f"{name} on the wrong side of its blocks: the stage that is to train it does not "
                "use it; use method: lora, with targets within blocks, or coordinator and workers "
                "without stages"
            )


def unlike_at_the_end(module: nn.Module, products: torch.dtype) -> Tensor:
    """Return the outputs [2, 4, d] for two rows that differ only in the last token."""
    place = next(module.parameters()).device
    tokens = torch.tensor([PROBED, (*PROBED[:-1], PROBED[-1] + 1)], device=place)
    with in_evaluation(module), precision.applied(products, place):
        return output_of(module, tokens)


def with_hidden(
    inputs: tuple[Any, ...], named: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with `hidden` in place of its hidden states."""
    if inputs:
        return (hidden, *inputs[1:]), named
    return inputs, {**named, "hidden_states": hidden}


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in the output of a block."""
    return cast("Tensor", output[0] if isinstance(output, tuple) else output)


def _example(hidden: Tensor) -> Tensor:
    """Return example values in the shape of `hidden`, [n, t, d]: no earlier stage has sent any.

    Rows are the same except for their last token.
    """
    num_rows, *shape = hidden.shape
    row = torch.linspace(-1, 1, shape[0] * shape[1], device=hidden.device).sin().reshape(shape)
    values = row.repeat(num_rows, 1, 1)
    values[:, -1] += torch.arange(num_rows, device=hidden.device)[:, None]
    return values.to(hidden)


def _require_separate(module: nn.Module, stage: Stage, tokens: Tensor) -> None:
    """Raise UsageError if blocks of a later stage use embeddings that they aren't sent.

    The stage runs twice on `tokens`, int64 [n, t], with different values instead of the embeddings.
    """
    table = cast("Any", module).get_input_embeddings()
    if stage.is_first or not isinstance(table, Table):
        return
    seen = []
    for fill in (0.0, 1.0):
        table.fill = fill
        seen.append(output_of(module, tokens))
    table.fill = 0.0
    if not torch.equal(*seen):
        named = type(blocks.decoder_of(module)).__name__
        raise UsageError(
            f"strategy=layer_pipeline: blocks of {named} read the embeddings of "
            "tokens and the hidden states, so it can't be cut; use coordinator and workers "
            "without stages"
        )


def output_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the output of a stage for `tokens`: hidden states, or logits in the last stage."""
    try:
        logits: Tensor = module(input_ids=tokens, use_cache=False).logits
    except Reached as reached:
        return reached.hidden
    return logits


@dataclass(frozen=True)
class Received:
    """Hidden states [n, t, d] from the previous stage; the next draw has the number `draws`."""

    hidden: Tensor
    draws: int


class StageWorkload(Finetuning):
    """One stage of a model. `output_of` computes hidden states, or in the last stage the loss."""

    def __init__(self, module: nn.Module, stage: Stage, samples: Samples, **options: Any) -> None:
        """Start from the arguments of `Finetuning`; `stage` runs `module`."""
        self.stage = stage
        super().__init__(module, samples, **options)

    def _has_drawn(self) -> bool:
        """Return whether this stage draws random numbers by key, in a forward pass on an example.

        Raises UsageError for a model that draws from torch's own generator, because that
        generator's state depends on all previous layers.
        """
        batch = self.objective.example((False, False), LENGTHS)
        before, masks = torch.get_rng_state(), Masks(torch.zeros(2, dtype=torch.int32))
        formats = self.formats(torch.device("cpu"))
        with contextlib.suppress(Reached), torch.no_grad(), formats, masks:
            self.objective(*batch)
        if not torch.equal(before, torch.get_rng_state()):
            named = type(blocks.decoder_of(self.module)).__name__
            raise UsageError(
                f"strategy=layer_pipeline: {named} draws random numbers that don't follow "
                "from a shard and a layer alone, so stages can't draw the same numbers; "
                "use a model without them"
            )
        return masks.num_drawn > 0

    @property
    def width(self) -> int:
        """The size of the last dim of hidden states."""
        return width_of(self.module)

    def hidden_shape(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape of the hidden states of the samples `ids`."""
        if not ids:
            return 0, 0, self.width
        num_rows, length = self.rows(ids)[0].shape
        return num_rows, length, self.width

    def output_of(
        self,
        tensors: Tensors,
        batch: Batch,
        received: Received | None,
        *,
        drop: DropFunction,
        place: torch.device,
    ) -> tuple[Tensor, int]:
        """Return hidden states [n, t, d], or the last stage's summed loss; and the next draw.

        `received` is None in the first stage. `received` and `tensors` are on the device `place`.
        While a graph is captured, everything is float32.
        """
        assert (received is None) == self.stage.is_first, "all other stages receive something"
        self.seed(drop)
        if received is not None:
            self.stage.receive(received.hidden, received.draws)
        objective = partial(functional_call, self.objective, workload.named(tensors, batch))
        masks = self.masks(place)
        try:
            with self.formats_of(batch, place), masks:
                output: Tensor = objective(tuple(one.to(place) for one in batch))
        except Reached as reached:
            output = reached.hidden
        finally:
            self.stage.receive(None)
        first = 0 if received is None else received.draws
        return output, masks.num_drawn if isinstance(masks, Masks) else first


def width_of(module: nn.Module) -> int:
    """Return the size of the last dim of a model's hidden states."""
    return int(cast("Any", module).config.get_text_config().hidden_size)


def hidden_bytes_max(width: int, samples: Samples, plan: TrainingPlan) -> int:
    """Return the largest size, in bytes, of one shard's hidden states."""
    longest = int(np.diff(samples.starts).max())
    num_rows = -(-plan.batch_size // plan.num_shards)
    return 4 * num_rows * -(-longest // LENGTHS) * LENGTHS * width


def load_stage(prepared: Prepared, cut: Cut, number: int) -> StageWorkload:
    """Return stage `number` as a workload, after loading its part of the checkpoint.

    Raises UsageError for a checkpoint that can't be used, or a model that can't be cut.
    """
    own, settings = cut.stages[number], prepared.settings
    module = model.part(
        settings,
        prepared.pad_token,
        partial(shorten, own=own),
        {spec.name for spec in cut.specs[number]},
        unties=number < len(cut.stages) - 1,
    )
    products = precision.of_products(settings)
    stage = Stage(module, own, products)
    _require_used(module, products)
    if settings.task != "classify":  # a model that looks ahead does so in one of its stages
        model.require_blind(settings, unlike_at_the_end(module, products))
    return StageWorkload(
        module,
        stage,
        prepared.train,
        pad_token=prepared.pad_token,
        class_weights=prepared.class_weights,
        products=products,
    )
