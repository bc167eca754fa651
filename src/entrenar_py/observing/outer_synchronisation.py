"""What a rank that steps alone shows of the times it is brought together with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import tensors
from entrenar_py.observing.subject import Subject


class Together:
    """Counts collectives apart: those called between steps, and those after the last of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begun: int | None = None
        self._stepped: int | None = None

    def stepped(self) -> None:
        """The rank has made a step; counting begins with its first."""
        self._stepped = num_collectives()
        self._begun = self._stepped if self._begun is None else self._begun

    def event(
        self,
        subject: Subject,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        step: int,
    ) -> trace.Synchronised:
        """The rank was brought together with the others after `step`, and goes on from here."""
        names = {tensor: name for name, tensor in weights.items()}
        now = num_collectives()
        collectives = _difference(self._stepped, now), _difference(self._begun, self._stepped)
        self._begun = self._stepped = now
        return trace.Synchronised(
            step=step,
            rank=self._rank,
            weights=subject.record(subject.parameters),
            optimizer=subject.record(dict(tensors.optimizer_state(optimizer, names))),
            buffers=subject.buffers(buffers),
            collectives=collectives[0],
            collectives_alone=collectives[1],
        )


def num_collectives() -> int | None:
    """How many collectives this process has called in its group, where its backend counts them."""
    if not torch.distributed.is_initialized():
        return None
    group: Any = torch.distributed.group.WORLD  # torch's stubs lack the method
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
