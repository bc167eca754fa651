"""The faults that are planned for this rank: each strikes once, in its step and micro-batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from entrenar_py import trace
from entrenar_py.faults import Fault
from entrenar_py.observing import FAULTS, fault_injection
from entrenar_py.observing.subject import Subject


class PlannedFaults:
    """The faults that the harness told this process of; each strikes once.

    `place` gives the step and the micro-batch that this rank is in.
    """

    def __init__(
        self,
        rank: int,
        place: Callable[[], tuple[int, int]],
        write: Callable[[Sequence[trace.Event]], None],
    ) -> None:
        self._rank, self._place, self._write = rank, place, write
        planned = json.loads(os.environ.get(FAULTS, "[]"))
        self._faults = [Fault.from_dict(fields) for fields in planned]
        self._struck: set[Fault] = set()

    def hooks(self, subject: Subject) -> list[Any]:
        """Hook this rank's faults that plant values into `subject`; return the hooks."""
        return [
            handle
            for fault in self._faults
            if fault.kind in fault_injection.HOOKS
            and fault.rank in (None, self._rank)
            and subject.trained
            and fault.tensor in (None, *subject.trained)  # else it is in another stage
            for handle in fault_injection.HOOKS[fault.kind](subject, fault, self._strikes)
        ]

    def perhaps_die(self) -> None:
        """Kill this process if a fault plans that for this step."""
        here = (self._rank, self._place()[0])
        for fault in self._faults:
            if fault.kind == "leave" and (fault.rank, fault.step) == here:
                fault_injection.die(fault, self._write)

    def _strikes(self, fault: Fault) -> bool:
        """Return whether `fault` strikes now: in its step and shard, and once; record that then.

        A fault's shard is a micro-batch of this rank.
        """
        step, shard = self._place()
        if fault.step != step or fault.shard not in (None, shard) or fault in self._struck:
            return False
        self._struck.add(fault)
        fields = fault.to_dict()
        self._write([trace.Injected(fault=fields, step=step, rank=self._rank, shard=shard)])
        return True
