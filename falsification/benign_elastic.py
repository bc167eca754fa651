"""Correct variants of elastic training: no check may report any of these."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from torch import Tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.train.elastic.exchange import Exchange, Sum
from entrenar_py.train.elastic.membership import Generation, Membership

from .elastic import EXCHANGE, KILLED, MEMBERSHIP, REPLACED, scenario

_watch, _next, _start = Membership._watch, Membership._next, Exchange.start
_LATE_S, _SLOW_S = 0.15, 0.02


def hears_late(self: Membership, number: int, interrupted: threading.Event) -> None:
    """Lets ranks hear of the end of a generation one after the other, the last rank first."""
    heard = threading.Event()
    _watch(self, number, heard)
    time.sleep(_LATE_S * (self._num_seats - 1 - self.seat))
    interrupted.set()


def is_slow(self: Exchange, rows: Tensor) -> Sum:
    """Lets the rank with the last micro-batches send its gradients later than the others."""
    if self.shards.start:
        time.sleep(_SLOW_S)
    return _start(self, rows)


def dies_at_the_door(self: Membership, number: int, deadline_s: float) -> Generation:
    """Kills the second process of rank 1 when it has asked to be let in."""
    if (self.seat, self.incarnation) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return _next(self, number, deadline_s)


_TRIED = tuple(f"F-EL-{number:03}" for number in range(1, 7))
_AUDITED = {"deadline_s": 16.0, "audit_share": 1.0}


def _variant(name: str, summary: str, plants: dict[str, Any], **changes: Any) -> Variant:
    return Variant(
        name=name,
        summary=summary,
        plants=plants,
        scenario=scenario(*changes.pop("faults", REPLACED), **changes),
        tried=(*_TRIED, "F-EL-007") if "options" in changes else _TRIED,
    )


VARIANTS = (
    _variant(
        "elastic-heard-late",
        "ranks hear of a death at different times, the last rank first",
        {f"{MEMBERSHIP}.Membership._watch": hears_late},
    ),
    _variant(
        "elastic-slow-ranks",
        "all ranks but the first send their gradients late",
        {f"{EXCHANGE}.Exchange.start": is_slow},
    ),
    _variant("elastic-long-deadline", "ranks wait ten minutes", {}, deadline_s=600.0),
    _variant(
        "elastic-dies-at-the-door",
        "a process that would join dies after it has asked, and none comes for it",
        {f"{MEMBERSHIP}.Membership._next": dies_at_the_door},
    ),
    _variant("elastic-nobody-joins", "a rank dies, and nobody comes for it", {}, faults=(KILLED,)),
    _variant(
        "elastic-audited-late",
        "all micro-batches are audited, and all ranks but the first are slow",
        {f"{EXCHANGE}.Exchange.start": is_slow},
        options=_AUDITED,
    ),
)
