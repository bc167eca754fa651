"""Scores of a model on samples: its loss, and for classes the confusion of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from entrenar_py.tuning.samples import Samples
from entrenar_py.tuning.workload import IGNORED, Rows

_BATCH = 32


@dataclass(frozen=True)
class Scores:
    """The mean loss over `weight` tokens or samples. `confusion[i, j]`: class i was taken for j.

    `confusion` is int64 [classes, classes], empty without classes.
    """

    loss: float
    weight: int
    labels: tuple[str, ...]
    confusion: NDArray[np.int64]

    def recall(self, label: int) -> float:
        """Return the share of the class's samples that were taken for it; NaN if it has none."""
        return _share(self.confusion[label, label], self.confusion[label].sum())

    def precision(self, label: int) -> float:
        """Return the share of samples taken for the class that are of it; NaN if there are none."""
        return _share(self.confusion[label, label], self.confusion[:, label].sum())

    def lines(self) -> Iterator[str]:
        """Yield the scores in words, a line each."""
        if not self.labels:
            yield f"loss {self.loss:.4f} a token, perplexity {math.exp(self.loss):.2f}"
            yield f"{self.weight} tokens"
            return
        right = int(np.trace(self.confusion))
        yield f"loss {self.loss:.4f}, {right} of {self.weight} right"
        for number, label in enumerate(self.labels):
            found, all_of_it = self.confusion[number, number], self.confusion[number].sum()
            yield (
                f"{label}: recall {self.recall(number):.3f} ({found} of {all_of_it}), "
                f"precision {self.precision(number):.3f}"
            )


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def scores(module: nn.Module, found: Samples, *, labels: Sequence[str], pad_token: int) -> Scores:
    """Return the scores of `module` in evaluation mode. All classes have the same weight."""
    rows = Rows(found, pad_token)
    device = next(module.parameters()).device
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    total, weight, was_training = 0.0, 0, module.training
    module.eval()
    with torch.no_grad():
        for begin in range(0, len(found), _BATCH):
            ids = range(begin, min(begin + _BATCH, len(found)))
            tokens, mask, targets = (one.to(device) for one in rows.batch(ids))
            logits = module(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float()
            if labels:
                targets = torch.from_numpy(found.labels[list(ids)].astype(np.int64)).to(device)
                taken = logits.argmax(-1)
                for due, got in zip(targets.tolist(), taken.tolist(), strict=True):
                    confusion[due, got] += 1
            else:
                logits, targets = logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(
                logits, targets, ignore_index=IGNORED, reduction="sum"
            )
            total += loss.item()
            weight += int((targets != IGNORED).sum())
    module.train(was_training)
    return Scores(total / max(weight, 1), weight, tuple(labels), confusion)
