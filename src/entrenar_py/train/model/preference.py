"""Direct preference optimisation: the loss of pairs, and their workload.

Rafailov et al., arXiv:2305.18290, equation 7. A side's reward is beta times the log-probability of
its completion, minus beta times the log-probability that the reference gives it. A pair's margin m
is the reward of its chosen side minus the reward of its rejected side, and its loss is -log
sigmoid(m). With a label smoothing of e, the sides are taken to be exchanged in a fraction e of all
rows: (1 - e) (-log sigmoid(m)) + e (-log sigmoid(-m)).

The reference is the model without its adapters. It computes in the same step, without a gradient:
its weights are in memory anyway, and a worker needs nothing but the rows. Dropout is off in it, so
that a pair's reference is the same in every step.

A log-probability is a sum over the tokens of a completion, in one row. So the two rows of a pair,
and a batch of pairs, have the same bits on any worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.train.arithmetic.tensors import Batch
from entrenar_py.train.model import masks, objectives, settings, stock
from entrenar_py.train.model.objectives import IGNORED, PLACES, NextTokens, Objective
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import Finetuning, following

SIDES = 2  # rows of a pair: the chosen side, then the rejected one


def margins(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return the reward of each pair's chosen side minus the reward of its rejected side, [n].

    Both arguments are log-probabilities of the sides' completions, [n, 2].
    """
    rewards = beta * (policy - reference)
    return rewards[:, 0] - rewards[:, 1]


def losses(pair_margins: Tensor, label_smoothing: float) -> Tensor:
    """Return the loss of each pair, [n], from its margin, [n]."""
    # log sigmoid(m) and log sigmoid(-m). A softmax is what every device has a kernel for.
    both = torch.stack([pair_margins, torch.zeros_like(pair_margins)], -1).log_softmax(-1)
    return -(1 - label_smoothing) * both[:, 0] - label_smoothing * both[:, 1]


def completions(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed log-probability of each row's targets, float32 [n].

    `logits` is [n, m, vocabulary], and `targets` int64 [n, m], IGNORED where there is none.
    """
    entropies = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -entropies.view(targets.shape).sum(1)


class PreferenceObjective(NextTokens):
    """The summed loss of a batch of pairs, as a module."""

    def __init__(self, module: nn.Module, preference: settings.Preference) -> None:
        super().__init__(module)
        self._preference = preference

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return what the operations depend on: nothing, since a pair has two rows."""
        return False, False

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of one pair with rows of `length` tokens."""
        tokens = torch.ones(SIDES, length, dtype=torch.int64)
        columns = torch.arange(PLACES).clamp(max=length - 1)
        places = columns + length * torch.arange(SIDES)[:, None]
        return tokens, places, torch.ones_like(places)

    def forward(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of a result of `DirectPreference.batch`, 0-d float32."""
        reference = self.reference(tokens, places, targets)
        policy = self.log_probabilities(tokens, places, targets)
        pair_margins = margins(
            policy.view(-1, SIDES), reference.view(-1, SIDES), self._preference.beta
        )
        return losses(pair_margins, self._preference.label_smoothing).sum()

    def reference(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Return the reference's log-probability of each row's completion, float32 [2 n]."""
        drops_nothing = masks.Masks(None) if masks.entered() is not None else nullcontext()
        with torch.no_grad(), stock.without_adapters(self.module), drops_nothing:
            return self.log_probabilities(tokens, places, targets)

    def log_probabilities(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each row's completion, float32 [2 n]."""
        head = self.fused_head(tokens)
        if head is None:
            logits = self.logits_of(tokens, None).index_select(0, places.flatten())
            return completions(logits.view(*targets.shape, -1), targets)
        hidden = self.hidden_of(tokens, places.flatten(), None, head).view(*targets.shape, -1)
        rows = zip(hidden, targets, strict=True)
        sums = [
            objectives.cross_entropy(own, head.weight, wanted, fused=self.is_fused, weighted=True)
            for own, wanted in rows
        ]
        return -torch.stack(sums)


class DirectPreference(Finetuning):
    """The workload of `module`, which learns to prefer the chosen side of each pair."""

    def __init__(
        self, module: nn.Module, pairs: Samples, *, preference: settings.Preference, **options: Any
    ) -> None:
        """Take the arguments of `Finetuning`, and the settings of the loss."""
        self.preference = preference
        super().__init__(module, pairs, **options)

    def new_objective(self, class_weights: Sequence[float]) -> Objective:
        """Return the module that computes the summed loss of a batch."""
        return PreferenceObjective(self.module, self.preference)

    @property
    def decisive(self) -> dict[str, Any]:
        """See `Tuned`."""
        return {
            "preference.beta": self.preference.beta,
            "preference.label_smoothing": self.preference.label_smoothing,
        }

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the tensors that the loss is a function of, all int64, with two rows for a pair.

        These are: tokens [2 n, t]; places with a target [2 n, m], as indices into 2 n * t; and
        these targets [2 n, m], padded with IGNORED.
        """
        tokens, _, targets = self.rows([SIDES * i + side for i in ids for side in range(SIDES)])
        after = following(targets)
        num_rows, length = tokens.shape
        counts = (after != IGNORED).sum(1)
        width = -(-int(counts.max()) // PLACES) * PLACES
        # The last place of a row never has a target, so padding points there.
        columns = torch.full((num_rows, width), length - 1)
        wanted = torch.full((num_rows, width), IGNORED)
        for row, count in enumerate(counts.tolist()):
            own = (after[row] != IGNORED).nonzero().flatten()
            columns[row, :count], wanted[row, :count] = own, after[row, own]
        return tokens, columns + length * torch.arange(num_rows)[:, None], wanted
