"""A stage of a model: it has some of the blocks, and loads no weights of the others.

The model's own forward pass runs in each stage. It leaves out the blocks of others, takes the
hidden states that came in at the first block of its own, and ends after the last one of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared import wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, layer_plan, masks, precision
from entrenar_py.train.model.modes import in_evaluation

PROBED = (1, 2, 3, 4)  # tokens that every vocabulary has
HIDDEN_DIMS = 3  # rows, tokens, features


class Skipped(nn.Module):
    """Stands for a block of another stage; blocks of some models return a tuple."""

    def __init__(self, block: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # read by some models
        self.returns_tuple = returns_tuple

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """Return `hidden`."""
        return (hidden,) if self.returns_tuple else hidden


class Table(nn.Module):
    """Stands for the table of tokens, which another stage has: all its rows are 0."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        # Models read its device, and others its format, such as rotary positions.
        self.register_buffer("weight", torch.empty(0, dtype=table.weight.dtype), persistent=False)
        self.weight: Tensor
        self.fill = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states [n, t, d], all the same, for tokens int64 [n, t]."""
        shape = (*tokens.shape, self.embedding_dim)
        return torch.full(shape, self.fill, dtype=self.weight.dtype, device=tokens.device)


class Head(nn.Module):
    """Stands for the head, which another stage has."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden`."""
        return hidden


class Reached(Exception):
    """The last block of a stage has computed `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def shorten(module: nn.Module, own: range) -> None:
    """Remove from `module` what a stage with the blocks `own` does not need.

    That is all other blocks, the table of tokens but in the first stage, and the head but in the
    last one. A table that is tied to the head stays with it. Raises UsageError for a model that has
    no list of blocks.
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
    """A stage's first block was given a part of the hidden states: blocks return tuples."""


class Stage:
    """The way through one stage of `module`, which `shorten` has cut to the blocks `own`.

    Its first block gets what `receive` was given. A forward pass of any stage but the last one
    raises Reached.
    """

    def __init__(self, module: nn.Module, own: range, products: torch.dtype) -> None:
        """Run the stage on four tokens, with products in the format `products`."""
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
        if inputs:
            return (hidden, *inputs[1:]), named
        return inputs, {**named, "hidden_states": hidden}

    def _leave(self, _: nn.Module, __: object, output: Any) -> None:
        hidden = hidden_of(output)
        _require_hidden(hidden)
        raise Reached(hidden)


def _require_runs(module: nn.Module, own: range, tokens: Tensor) -> None:
    """Run a stage on `tokens`. Raises UsageError if its blocks lack something of earlier ones.

    In some models blocks share the keys and values of an earlier block.
    """
    try:
        output_of(module, tokens)
    except (UsageError, _InTuples, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model of others raises what it likes
        named = type(layer_plan.decoder_of(module)).__name__
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


def unlike_at_the_end(module: nn.Module, products: torch.dtype) -> Tensor:
    """Return the outputs [2, 4, d] of two rows of tokens, or of hidden states, that end unlike."""
    place = next(module.parameters()).device
    tokens = torch.tensor([PROBED, (*PROBED[:-1], PROBED[-1] + 1)], device=place)
    with in_evaluation(module), precision.applied(products, place):
        return output_of(module, tokens)


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states among what a block returned."""
    return cast("Tensor", output[0] if isinstance(output, tuple) else output)


def _example(hidden: Tensor) -> Tensor:
    """Return values of the shape of `hidden`, [n, t, d], in place of what none has sent.

    Rows are alike up to their last token.
    """
    num_rows, *shape = hidden.shape
    row = torch.linspace(-1, 1, shape[0] * shape[1], device=hidden.device).sin().reshape(shape)
    values = row.repeat(num_rows, 1, 1)
    values[:, -1] += torch.arange(num_rows, device=hidden.device)[:, None]
    return values.to(hidden)


def _require_separate(module: nn.Module, stage: Stage, tokens: Tensor) -> None:
    """Raise UsageError if blocks of a later stage read more of the embeddings than they are sent.

    The stage runs on `tokens`, int64 [n, t], twice, with other values in the place of embeddings.
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
        named = type(layer_plan.decoder_of(module)).__name__
        raise UsageError(
            f"strategy=layer_pipeline: blocks of {named} read the embeddings of "
            "tokens and the hidden states, so it can't be cut; use coordinator and workers "
            "without stages"
        )


def output_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return what a stage makes of `tokens`: hidden states, or logits in the last one."""
    try:
        logits: Tensor = module(input_ids=tokens, use_cache=False).logits
    except Reached as reached:
        return reached.hidden
    return logits
