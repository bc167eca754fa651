"""Correct variants of audits: no check may report any of these."""

from __future__ import annotations

from collections.abc import Collection

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator import audits
from entrenar_py.train.wire.shard_assignment import Audit

from .audits import AUDITED, AUDITS
from .subjects import star

_shards = audits.shards


def the_next(self: Audit, present: Collection[int], turn: int) -> int | None:
    """Asks the next rank, the same one in every step."""
    others = sorted(set(present).difference(self.asked, self.copies))
    return next((rank for rank in others if rank > max(self.asked + self.copies)), None) or next(
        iter(others), None
    )


def one_more(scenario: Scenario, step: int) -> Collection[int]:
    """Audits the first shard of each step, too."""
    return sorted({0, *_shards(scenario, step)})


_SOME = star(options={"audit_share": 0.4, "block_bytes": 400}, optimizer="momentum", num_steps=5)
_ALL = {**_SOME.options, "audit_share": 1.0}
_WRONG = Fault(kind="corrupt_gradient", step=1, rank=1, shard=2, value="0.5")
_LEAVING = Fault(kind="leave", rank=1, step=1)
_TRIED = ("F-DP-001", "F-DP-002", "F-DP-005", "F-DP-006", "F-TI-006", "F-TI-007", "F-WP-006")

VARIANTS = (
    Variant(
        name="all-audited",
        summary="every shard is computed by two workers, and a worker is lost",
        plants={},
        scenario=_SOME.with_(options=_ALL, faults=(_LEAVING,), dropout=0.2),
        tried=(*_TRIED, "F-WP-005"),
    ),
    Variant(
        name="audited-by-the-next",
        summary="each worker is audited by the next one in every step",
        plants={f"{AUDITS}.Audit.second": the_next},
        scenario=_SOME.with_(options=_ALL, faults=(_WRONG,)),
        tried=("F-DP-001", "F-DP-002", "F-WP-006"),
    ),
    Variant(
        name="one-more-audited",
        summary="one more shard is audited than configured",
        plants={f"{AUDITED}.shards": one_more},
        scenario=_SOME.with_(faults=(_LEAVING,), world_size=4),
        tried=(*_TRIED, "F-WP-005"),
    ),
)
