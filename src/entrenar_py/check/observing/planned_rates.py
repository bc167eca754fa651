"""Learning rates of another run, with which the steps of this one are made.

A script that has the size of a worker's batch may rightly derive its learning rate, or the length
of its schedule, from the number of workers. One worker that loads the batches of all would then be
another training. Its steps are made with the rates of the run on several workers, so that the rest
can be compared, and with what else a schedule may change (the momentum of a cycle). The harness
writes to a file by step the first group's rate, those of tensors that have others, and constants by
the first tensor of a group. What the script has set is put back after each step: a schedule may go
on from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entrenar_py.check.observing import RATES
from entrenar_py.check.observing.subject import Subject


class PlannedRates:
    """Sets the planned rates of each step of a single optimizer. Of several the order counts."""

    def __init__(self, subject: Subject) -> None:
        file = os.environ.get(RATES) if len(subject.optimizers) == 1 else None
        self._rates = json.loads(Path(file).read_text("utf-8")) if file else {}
        self._subject = subject
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def begin_step(self, number: int) -> None:
        """Set the rates planned for step `number`, if each group has one."""
        self.end_step()
        if str(number) not in self._rates:
            return
        first, others, constants = self._rates[str(number)]
        for group in self._groups():
            if (rate := self._rate(group, first, others)) is None:
                self.end_step()
                return
            self._own.append((group, {**group}))
            own = group["lr"]
            group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate
            for key, value in constants.get(self._names(group)[0], {}).items():
                if key in group and not isinstance(group[key], Tensor):
                    group[key] = tuple(value) if isinstance(value, list) else value

    def end_step(self) -> None:
        """Put back what the script has set."""
        for group, own in self._own:
            group.update(own)
        self._own = []

    def _groups(self) -> list[dict[str, Any]]:
        return self._subject.optimizers[0].param_groups

    def _rate(
        self, group: Mapping[str, Any], first: float, others: Mapping[str, float]
    ) -> float | None:
        """Return the rate of a group's tensors; None if they have several, or none of their own."""
        rates = {others.get(name, first) for name in self._names(group)}
        return rates.pop() if len(rates) == 1 and "lr" in group else None

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [name for p in group["params"] for name in self._subject.names_of(p)]
