"""The losses of a model, as modules: of a classifier, and of a causal language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.train.arithmetic.tensors import Batch
from entrenar_py.train.model import fused_loss, packing

IGNORED = -100  # the target that cross entropy leaves out
PLACES = 64  # places with a target are filled up to a multiple of this: few shapes are compiled
_UNPACKED = 3  # tensors of a batch of a language model; packed rows have their positions, too


class Objective(nn.Module, ABC):
    """A loss of the model `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the model's logits, [n, t, vocabulary] or [n, classes]; both are int64 [n, t]."""
        found: Tensor = self.module(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return found

    @property
    @abstractmethod
    def is_static(self) -> bool:
        """See `Workload`."""

    @abstractmethod
    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return on what the operations depend."""

    @abstractmethod
    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""


class ClassObjective(Objective):
    """The weighted cross entropy of a classifier."""

    def __init__(self, module: nn.Module, weights: Sequence[float]) -> None:
        super().__init__(module)
        self.register_buffer(
            "weights", torch.tensor(weights, dtype=torch.float32), persistent=False
        )

    is_static = False  # the mask is looked at on the host

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return on what the operations depend: if it is one row, and if there is padding."""
        return len(batch[0]) == 1, not batch[1].all()

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        is_alone, is_padded = kind
        tokens = torch.ones(1 if is_alone else 2, length, dtype=torch.int64)
        mask = tokens.clone()
        mask[:, -1] = 0 if is_padded else 1
        return tokens, mask, torch.zeros(len(tokens), dtype=torch.int64)

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, 0-d float32: tokens and mask [n, t], classes [n]."""
        logits = self.logits(tokens, mask).float()
        weights = cast("Tensor", self.weights)
        return F.cross_entropy(logits, targets, weight=weights, reduction="sum")


class NextTokens(Objective):
    """A loss of a causal language model's next tokens.

    No mask is given: rows are filled up at their end, where no token with a target looks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._head = [fused_loss.head_of(module)]  # in a list: its weights are the module's

    @property
    def head(self) -> nn.Linear | None:
        """The layer that makes the logits; None if more than it makes them."""
        return self._head[0]

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return on what the operations depend: if it is one row, and if rows are packed."""
        return len(batch[0]) == 1, len(batch) > _UNPACKED

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        is_alone, is_packed = kind
        tokens = torch.ones(1 if is_alone else 2, length, dtype=torch.int64)
        places = torch.arange(PLACES).clamp(max=tokens.numel() - 1)
        batch = tokens, places, torch.ones_like(places)
        positions = torch.arange(length).expand_as(tokens) // 2
        return (*batch, positions) if is_packed else batch

    @property
    def is_static(self) -> bool:
        """See `Workload`."""
        return self.head is not None

    def logits_of(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the logits of all tokens: [n * t, vocabulary]."""
        named = {} if positions is None else {"position_ids": positions}
        logits: Tensor = self.module(input_ids=tokens, use_cache=False, **named).logits
        return logits.flatten(0, 1)

    def fused_head(self, tokens: Tensor) -> nn.Linear | None:
        """Return the head if the loss of `tokens` is fused with its product, else None."""
        # A graph is captured of plain operations, with tensors of another class.
        return self.head if type(tokens) is Tensor else None

    def hidden_of(
        self, tokens: Tensor, places: Tensor, positions: Tensor | None, head: nn.Linear
    ) -> Tensor:
        """Return what `head` takes at `places`: [m, d]. Packed rows have `positions`, [n, t]."""
        rows = packing.one_sample_a_row() if positions is None else nullcontext()
        with rows, fused_loss.replaced_by_identity(head):
            hidden = self.logits_of(tokens, positions)
        return fused_loss.select(hidden, places)


class TokenObjective(NextTokens):
    """The cross entropy of a causal language model."""

    def forward(
        self, tokens: Tensor, places: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, 0-d float32: tokens [n, t], places and their targets [m].

        Packed rows have `positions`, [n, t].
        """
        head = self.fused_head(tokens)
        if head is None:
            logits = self.logits_of(tokens, positions).index_select(0, places).float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        hidden = self.hidden_of(tokens, places, positions, head)
        return fused_loss.cross_entropy(hidden, head.weight, targets)
