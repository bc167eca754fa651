"""A correct coordinator of the original system's wire that works in another way."""

from __future__ import annotations

from entrenar_py.shared.mutants import Variant
from entrenar_py.train.upstream.averager import Averager
from entrenar_py.train.wire.effects import Effect

from .averaging import AVERAGING, MACHINE

_deal = Averager._deal


def backwards(self: Averager, now: float) -> list[Effect]:
    """Assigns the last shards first."""
    self._queue.reverse()
    return _deal(self, now)


VARIANTS = (
    Variant(
        name="last-shards-first",
        summary="shards are assigned from the last to the first",
        plants={f"{MACHINE}.averager.Averager._deal": backwards},
        scenario=AVERAGING,
        tried=("F-WP-007",),
    ),
)
