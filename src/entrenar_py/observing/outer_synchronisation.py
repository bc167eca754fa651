"""The synchronisations of ranks that otherwise train independently (local SGD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import tensors
from entrenar_py.observing.subject import Subject


class OuterSynchronisations:
    """Counts the collectives of synchronisations, and separately those of the steps in between."""

    def __init__(self) -> None:
        self._begun: int | None = None
        self._stepped: int | None = None

    def stepped(self) -> None:
        """Note that the rank has made a step; counting begins with its first."""
        self._stepped = num_collectives()
        self._begun = self._stepped if self._begun is None else self._begun

    def event(
        self,
        subject: Subject,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, Tensor],
        step: int,
    ) -> trace.Synchronised:
        """Return the record of a synchronisation after `step`, and count anew from here.

        `weights` are the tensors that the outer `optimizer` updates, by name.
        """
        names = {tensor: name for name, tensor in weights.items()}
        begun, stepped, now = self._begun, self._stepped, num_collectives()
        self._begun = self._stepped = now
        return trace.Synchronised(
            step=step,
            rank=subject.rank,
            weights=subject.record(subject.parameters),
            optimizer=subject.record(dict(tensors.optimizer_state(optimizer, names))),
            buffers=subject.buffer_records(),
            collectives=_difference(stepped, now),
            collectives_alone=_difference(begun, stepped),
        )


def num_collectives() -> int | None:
    """Return how many collectives this process has called; None if its backend counts none."""
    if not torch.distributed.is_initialized():
        return None
    group: Any = torch.distributed.group.WORLD  # torch's stubs lack the method
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
