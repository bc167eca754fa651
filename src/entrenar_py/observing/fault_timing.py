"""When what is planned to go wrong strikes this rank: once, in its step and micro-batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from entrenar_py import trace
from entrenar_py.faults import Fault
from entrenar_py.observing import FAULTS, fault_injection
from entrenar_py.observing.subject import Subject


class Strikes:
    """The faults that this process was told of, and which of them have struck.

    `place` gives the step and the micro-batch that this rank is in.
    """

    def __init__(
        self,
        rank: int,
        place: Callable[[], tuple[int, int]],
        write: Callable[[Sequence[trace.Event]], None],
    ) -> None:
        self._rank, self._place, self._write = rank, place, write
        self._faults = [Fault.from_dict(one) for one in json.loads(os.environ.get(FAULTS, "[]"))]
        self._struck: set[Fault] = set()

    def hooks(self, subject: Subject) -> list[Any]:
        """Those that make values wrong in `subject`, as far as they are this rank's."""
        return [
            handle
            for one in self._faults
            if one.kind in fault_injection.HOOKS
            and one.rank in (None, self._rank)
            and subject.trained
            and one.tensor in (None, *subject.trained)  # else it is in another stage
            for handle in fault_injection.HOOKS[one.kind](subject, one, self._strikes)
        ]

    def perhaps_die(self) -> None:
        """Kills this process if that is planned here."""
        here = (self._rank, self._place()[0])
        for fault in self._faults:
            if fault.kind == "leave" and (fault.rank, fault.step) == here:
                fault_injection.die(fault, self._write)

    def _strikes(self, fault: Fault) -> bool:
        """Whether `fault` is of this micro-batch, a shard being one of this rank, of this step, and
        has not struck before: now it has, and that is noted.
        """
        step, shard = self._place()
        if fault.step != step or fault.shard not in (None, shard) or fault in self._struck:
            return False
        self._struck.add(fault)
        fields = fault.to_dict()
        self._write([trace.Injected(fault=fields, step=step, rank=self._rank, shard=shard)])
        return True
