"""Correct trainings of language models that are not ours: no check may report any of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entrenar_py.shared.mutants import Variant
from entrenar_py.systems.probes import language_model
from entrenar_py.systems.probes.language_model import BEGIN, IGNORED, Batch, Decoder

from .language_models import SYSTEM, across, trained

_sees, _targets_of, _forward = (
    *(language_model.sees, language_model.targets_of),
    Decoder.forward,
)
_WINDOW = 4
_PLAIN = ("F-LM-001", "F-LM-002", "F-LM-006", "F-LM-007")


def within_window(mask: Tensor, positions: Tensor) -> Tensor:
    """Lets each token see the last few only."""
    length = mask.shape[1]
    near = torch.ones(length, length, dtype=torch.bool).triu(1 - _WINDOW)
    return _sees(mask, positions) & near


def prefix_both_sides(mask: Tensor, positions: Tensor) -> Tensor:
    """Lets the tokens of a prompt, whose targets don't count, see all of the prompt."""
    seen = _sees(mask, positions)
    seen[:, :5, :5] = True
    return seen


def of_completions(given: Batch) -> Tensor:
    """Ignores the targets of a prompt of five tokens."""
    targets = _targets_of(given)
    targets[:, :4] = IGNORED
    return targets


def own_shift(self: Decoder, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Shifts the inputs in the model: each output predicts the token at its own place."""
    return _forward(self, F.pad(ids[:, :-1], (1, 0), value=BEGIN), attention_mask, position_ids)


def own_targets(given: Batch) -> Tensor:
    """Takes the tokens themselves for targets, of a model that shifts its inputs."""
    return given.ids


def zeroed(model: Decoder) -> None:
    """Ties the tables, and has the model begin with layers that add nothing."""
    model.head.weight = model.tokens.weight
    for layer in (model.out, model.narrow):
        torch.nn.init.zeros_(layer.weight)


def reentrant(block: Callable[..., Tensor], *given: Tensor) -> Any:
    """Computes the block again in a backward pass of its own."""
    return checkpoint(block, *given, use_reentrant=True)


def in_parts(model: Decoder, looking: Sequence[Any], given: Batch) -> None:
    """Puts each module of the model into its mode by itself, the model last."""
    for training in (False, True):
        for module in reversed([*model.modules()]):
            module.training = training
        for one in looking if not training else ():
            language_model.loss_of(model, one, given)


VARIANTS = (
    Variant(
        name="lm-window",
        summary="a token attends only to the last few tokens",
        plants={f"{SYSTEM}.sees": within_window},
        scenario=trained(),
        tried=_PLAIN,
    ),
    Variant(
        name="lm-prefix",
        summary="attention within a prompt is bidirectional, and its targets don't count",
        plants={f"{SYSTEM}.sees": prefix_both_sides, f"{SYSTEM}.targets_of": of_completions},
        scenario=trained(),
        tried=_PLAIN,
    ),
    Variant(
        name="lm-shifted-inside",
        summary="the model shifts its inputs, and targets are the tokens themselves",
        plants={f"{SYSTEM}.Decoder.forward": own_shift, f"{SYSTEM}.targets_of": own_targets},
        scenario=trained(),
        tried=_PLAIN,
    ),
    Variant(
        name="lm-zero-layers",
        summary="layers that add nothing before the first step",
        plants={f"{SYSTEM}.tie": zeroed},
        scenario=trained(),
        tried=_PLAIN,
    ),
    Variant(
        name="lm-left-padding",
        summary="rows of different lengths, padded on the left",
        plants={},
        scenario=trained(rows="padded"),
        tried=("F-LM-001", "F-LM-002", "F-LM-003", "F-LM-005"),
    ),
    Variant(
        name="lm-begin-is-target",
        summary="the end of a document predicts the token with which all documents begin",
        plants={f"{SYSTEM}.targets_of": across},
        scenario=trained(rows="packed"),
        tried=("F-LM-001", "F-LM-002", "F-LM-004"),
    ),
    Variant(
        name="lm-masks-again",
        summary="a block is recomputed with its masks in a separate backward pass",
        plants={f"{SYSTEM}.computed_again": reentrant, f"{SYSTEM}.evaluate": in_parts},
        scenario=trained(dropout=0.1),
        tried=("F-LM-008", "F-LM-009"),
    ),
)
