"""Scores of a model on samples: its loss, for classes their confusion matrix, for pairs margins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from numpy.typing import NDArray
from torch import Tensor, nn

from entrenar_py.train.model import precision, preference, stock
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.model.workload import Rows

_BATCH = 32
_LOGITS_MAX = 2**26  # in memory at a time: 256 MiB in float32


@dataclass(frozen=True)
class Scores:
    """The mean loss over tokens or samples with a total of `weight`, and the confusion matrix.

    `confusion[i, j]` is the number of samples of class i that were classified as j. It is int64
    [classes, classes], empty without classes. For pairs, `num_right` is the number of pairs in
    which the chosen side has the higher reward, and `margin` is the mean difference of the rewards,
    chosen minus rejected; both are None otherwise.
    """

    loss: float
    weight: int
    labels: tuple[str, ...]
    confusion: NDArray[np.int64]
    num_right: int | None = None
    margin: float | None = None

    def recall(self, label: int) -> float:
        """Return the fraction of the class's samples that were classified so; NaN if none."""
        return _share(self.confusion[label, label], self.confusion[label].sum())

    def precision(self, label: int) -> float:
        """Return the fraction of samples classified as `label` that belong there; NaN if none."""
        return _share(self.confusion[label, label], self.confusion[:, label].sum())

    def f1(self, label: int) -> float:
        """Return the harmonic mean of recall and precision; NaN if the class never occurs."""
        found = self.confusion[label, label]
        return _share(2 * found, self.confusion[label].sum() + self.confusion[:, label].sum())

    @property
    def accuracy(self) -> float:
        """The fraction of samples classified, or pairs ranked, correctly; NaN for next tokens."""
        if self.num_right is not None:
            return _share(self.num_right, self.weight)
        return _share(int(np.trace(self.confusion)), int(self.confusion.sum()))

    @property
    def are_of_tokens(self) -> bool:
        """True for next tokens, False for classes and pairs."""
        return not self.labels and self.margin is None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss of next tokens; infinite if float64 can't hold it."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.loss))

    def lines(self) -> Iterator[str]:
        """Yield the scores as lines of text."""
        if self.margin is not None:
            yield f"loss {self.loss:.4f}, {self.num_right} of {self.weight} right"
            yield f"mean margin {self.margin:.4f}"
            return
        if not self.labels:
            yield f"loss {self.loss:.4f} a token, perplexity {self.perplexity:.2f}"
            yield f"{self.weight} tokens"
            return
        right = int(np.trace(self.confusion))
        yield f"loss {self.loss:.4f}, {right} of {self.weight} right"
        for number, label in enumerate(self.labels):
            found, all_of_it = self.confusion[number, number], self.confusion[number].sum()
            yield (
                f"{label}: recall {_told(self.recall(number))} ({found} of {all_of_it}), "
                f"precision {_told(self.precision(number))}, F1 {_told(self.f1(number))}"
            )


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def _told(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.3f}"


# (tokens, mask) -> logits; None if another rank has them
Logits = Callable[[Tensor, Tensor], Tensor | None]


class Examination:
    """Samples to score a model on, in batches with logits that fit into memory.

    The totals of a batch are float64 [2 + classes^2]: the summed loss, its weight, and the
    confusion matrix. For pairs, they are float64 [4]: the summed loss, the number of pairs, how
    many chosen sides have the higher reward, and the sum of the margins. Totals of several batches
    can be added. All classes have the same weight.
    """

    def __init__(
        self,
        samples: Samples,
        module: nn.Module,
        *,
        settings: Settings,
        pad_token: int,
        multiple: int = 1,
    ) -> None:
        """Rows are padded to a multiple of `multiple` tokens."""
        self._found, self._labels = samples, settings.classes.labels
        self._module, self._preference = module, settings.preference
        self._rows = Rows(samples.rows, pad_token)
        self._rows.multiple = multiple
        self._num_rows = _BATCH if self._labels else _num_rows(module, samples)
        self.totals_size = 4 if samples.are_pairs else 2 + len(self._labels) ** 2

    def __len__(self) -> int:
        return -(-len(self._found.rows) // self._num_rows)

    def totals(
        self, number: int, logits_of: Logits, device: torch.device
    ) -> NDArray[np.float64] | None:
        """Return the totals of batch `number`; None if another rank has the logits.

        `logits_of` gets tokens and mask, int64 [n, t], on `device`, and returns None on such a
        rank.
        """
        tokens, mask, targets = (one.to(device) for one in self._batch(number))
        logits = logits_of(tokens, mask)
        if not self._found.are_pairs:
            return None if logits is None else self._totals(logits, targets)
        policy = _completions(logits, targets)
        del logits  # the reference's logits need their memory
        with stock.without_adapters(self._module):
            reference = _completions(logits_of(tokens, mask), targets)
        if policy is None or reference is None:
            return None
        return self._totals_of_pairs(policy, reference)

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and mask, int64 [n, t], and targets: classes [n], or tokens [n, t]."""
        begin = number * self._num_rows
        ids = range(begin, min(begin + self._num_rows, len(self._found.rows)))
        tokens, mask, targets = self._rows.batch(ids)
        if self._labels:
            targets = torch.from_numpy(self._found.labels[list(ids)].astype(np.int64))
        return tokens, mask, targets

    def _totals_of_pairs(self, policy: Tensor, reference: Tensor) -> NDArray[np.float64]:
        """Return the totals from the log-probabilities of the sides' completions, [2 n] each."""
        sides = preference.SIDES
        margins = preference.margins(
            policy.view(-1, sides), reference.view(-1, sides), self._preference.beta
        )
        losses = preference.losses(margins, self._preference.label_smoothing)
        sums = (losses.sum(), losses.new_tensor(len(losses)), (margins > 0).sum(), margins.sum())
        return np.array([float(one) for one in sums])

    def _totals(self, logits: Tensor, targets: Tensor) -> NDArray[np.float64]:
        """Return the totals of a batch: `logits` are [n, classes] or [n, t, vocabulary]."""
        logits = logits.float()
        size = len(self._labels)
        confusion = np.zeros((size, size))
        if self._labels:
            taken = logits.argmax(-1).tolist()
            np.add.at(confusion, (targets.tolist(), taken), 1)
        else:
            logits, targets = logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
        weight = int((targets != IGNORED).sum())
        return np.array([loss, weight, *confusion.flat])

    def scores(self, totals: NDArray[np.float64]) -> Scores:
        """Return the scores that follow from the sum of all batches' totals."""
        size, weight = len(self._labels), int(totals[1])
        if self._found.are_pairs:
            return _scores_of_pairs(totals)
        confusion = totals[2:].astype(np.int64).reshape(size, size)
        return Scores(float(totals[0]) / max(weight, 1), weight, self._labels, confusion)


def _scores_of_pairs(totals: NDArray[np.float64]) -> Scores:
    loss, weight, num_right, margin = totals
    number = max(weight, 1)
    none = np.zeros((0, 0), np.int64)
    return Scores(
        loss=float(loss / number),
        weight=int(weight),
        labels=(),
        confusion=none,
        num_right=int(num_right),
        margin=float(margin / number),
    )


def _completions(logits: Tensor | None, targets: Tensor) -> Tensor | None:
    """Return the log-probability of each row's completion, float32 [n], from logits [n, t, v]."""
    if logits is None:
        return None
    rows = zip(logits, targets, strict=True)  # one at a time: float32 logits may be a copy
    found = [preference.completions(own[None, :-1], aim[None, 1:]) for own, aim in rows]
    return torch.cat(found)


def _num_rows(module: nn.Module, samples: Samples) -> int:
    """Return how many rows can have their logits, [t, vocabulary] each, in memory.

    Both rows of a pair are in one batch.
    """
    vocabulary: int = cast("Any", module).config.get_text_config().vocab_size
    most = max(1, min(_BATCH, _LOGITS_MAX // (max(samples.longest, 1) * vocabulary)))
    return -(-most // preference.SIDES) * preference.SIDES if samples.are_pairs else most


def scores(
    module: nn.Module,
    samples: Samples,
    *,
    settings: Settings,
    pad_token: int,
    go_on: Callable[[], None] = lambda: None,
) -> Scores:
    """Return the scores of `module`, computed in evaluation mode.

    Matrix products have the dtype that `settings` give. `go_on` is called before each batch; an
    exception that it raises ends the evaluation.
    """
    examination = Examination(samples, module, settings=settings, pad_token=pad_token)
    device = next(module.parameters()).device

    def logits_of(tokens: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = module(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return found

    totals = np.zeros(examination.totals_size)
    with in_evaluation(module), precision.applied(precision.of_products(settings), device):
        for number in range(len(examination)):
            go_on()
            found = examination.totals(number, logits_of, device)
            assert found is not None, "the logits are here"
            totals += found
    return examination.scores(totals)
