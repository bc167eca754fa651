"""Scores the model that ranks have together, on the validation rows, while it is trained.

Training waits meanwhile, since no rank need have room for a second model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from entrenar_py.train.finetune.strategies.step import Shards
from entrenar_py.train.finetune.strategies.strategy import Strategy
from entrenar_py.train.model.evaluation import Examination, Scores
from entrenar_py.train.model.modes import in_evaluation
from entrenar_py.train.model.prepared import Prepared


class Scoring:
    """Scores every `evaluate_every` steps, and at the end, if there are validation rows."""

    def __init__(self, prepared: Prepared, strategy: Strategy, shards: Shards) -> None:
        self._every = prepared.settings.evaluate_every
        self._strategy, self._workload = strategy, shards.workload
        self._examination: Examination | None = None
        if prepared.validation is not None:
            self._examination = Examination(
                prepared.validation,
                shards.workload.module,
                settings=prepared.settings,
                pad_token=prepared.pad_token,
                multiple=shards.workload.row_multiple,
            )

    def is_due(self, made: int) -> bool:
        """Return whether to score after `made` steps that are not the last."""
        return self._examination is not None and made % self._every == 0

    def scores(self) -> Scores | None:
        """Return the scores, the same on all ranks; None without rows. All ranks must call it."""
        if (examination := self._examination) is None:
            return None
        device, rank, size = self._strategy.device, dist.get_rank(), dist.get_world_size()
        if not self._strategy.shares_rows:
            rank, size = 0, 1
        totals = torch.zeros(examination.totals_size, dtype=torch.float64)
        with in_evaluation(self._workload.objective), self._workload.formats(device):
            for begin in range(0, len(examination), size):
                # A forward pass may be a collective: ranks without a batch repeat the first one.
                is_real = begin + rank < len(examination)
                batch = examination.batch(begin + rank if is_real else 0)
                tokens, mask, targets = (one.to(device) for one in batch)
                logits = self._strategy.logits(tokens, mask)
                if is_real and logits is not None:
                    totals += torch.from_numpy(examination.totals(logits, targets))
        totals = totals.to(device)
        dist.all_reduce(totals)
        return examination.scores(totals.cpu().numpy())
