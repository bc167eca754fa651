"""Bugs in audits, which find a wrong value of one worker by another, and in what follows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic.blocks import Sums
from entrenar_py.train.coordinator.audits import Copy
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import shard_assignment
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.shard_assignment import Audit, Verdict

from .subjects import COORDINATOR, TRAINING, star

AUDITS = "entrenar_py.train.wire.shard_assignment"
AUDITED = "entrenar_py.train.coordinator.audits"
COPIES = "entrenar_py.train.coordinator.audits"
_verdict, _conclude = shard_assignment.verdict, Coordinator._conclude
_replace, _deliver = Coordinator._replace, Sums.deliver


# --- what is compared -------------------------------------------------------------------------


def none_drawn(scenario: Scenario, step: int) -> Collection[int]:
    """Audits nothing, whatever the option `audit_share` says."""
    return ()


def itself(self: Audit, present: Collection[int], turn: int) -> int | None:
    """Has a worker audit itself."""
    return next(iter((*self.asked, *self.copies, *sorted(present))), None)


def whoever_said_it(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Accepts a value that was sent twice, even by the same worker."""
    return _verdict(range(len(copies)), alike)


def all_alike(copies: Sequence[Copy]) -> list[int]:
    """Takes all copies for equal."""
    return [0 for _ in copies]


def last_block_equals(self: Copy, other: Copy) -> bool:
    """Compares only the last block, which arrives first."""
    mine, theirs = (one.nodes[max(one.nodes)][0].vector for one in (self, other))
    return mine.tobytes() == theirs.tobytes()


# --- what follows -----------------------------------------------------------------------------


def blames_a_witness(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Names one of the workers that agree as the culprit."""
    found = _verdict(copies, alike)
    if found is None or found.culprit is None:
        return found
    return replace(found, culprit=copies[found.copy])


def counts_what_is_wrong(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Names the culprit, and uses the culprit's copy."""
    found = _verdict(copies, alike)
    if found is None or found.culprit is None:
        return found
    return replace(found, copy=copies.index(found.culprit))


def takes_itself_for_a_witness(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Uses the most frequent copy, even if one worker sent it twice."""
    if len(copies) < 3:
        return _verdict(copies, alike)
    copy = max(alike, key=alike.count)
    others = [rank for rank, like in zip(copies, alike, strict=True) if like != copy]
    return Verdict(copy, others[0] if others else None)


def gives_up(self: Coordinator, shard: int, found: Verdict, now: float) -> list[Effect]:
    """Halts the run when an audit names a worker, instead of dropping that worker."""
    if found.culprit is None:
        return _conclude(self, shard, found, now)
    reason = f"worker {found.culprit} computed shard {shard} of step {self.step} wrongly"
    halt = self._halt(do.Stop(self.step, found.culprit, reason, shard=shard))
    return [*self._count_copy(shard, found), *halt]


def keeps_what_it_delivered(
    self: Coordinator, lost: Seen, members: Mapping[Peer, Seen], now: float
) -> list[Effect]:
    """Computes again only what the caught worker had not delivered yet."""
    lost.delivered.clear()
    return _replace(self, lost, members, now)


def delivered_all_the_same(self: Sums, rank: int) -> None:
    """Still uses the deliveries of a caught worker."""
    _deliver(self, rank)


_OWNER = Fault(kind="corrupt_gradient", step=1, rank=1, shard=2, value="0.5")
_LASTING = Fault(kind="corrupt_worker", step=1, rank=1, value="0.5")
_ALL = {"audit_share": 1.0, "block_bytes": 400}
_CALM = star(options=_ALL)
_WRONG = star(options=_ALL, faults=(_OWNER,))

VARIANTS = (
    Variant(
        name="audits-left-out",
        summary="no shard is audited, whatever the configuration says",
        source="classic (a flag that nothing reads)",
        plants={f"{AUDITED}.shards": none_drawn},
        scenario=_CALM,
        invariants=("F-WP-006",),
        place={"step": 0},
    ),
    Variant(
        name="audited-by-itself",
        summary="a shard is computed twice by the same worker",
        source="classic (a common cause)",
        plants={f"{AUDITS}.Audit.second": itself, f"{AUDITS}.verdict": whoever_said_it},
        scenario=_CALM,
        invariants=("F-WP-006",),
        place={"step": 0, "rank": 0, "shard": 0},
    ),
    Variant(
        name="mismatch-ignored",
        summary="copies of a shard count as equal, whatever they contain",
        source="classic (a check that can't fail)",
        plants={f"{COPIES}.alike": all_alike},
        scenario=_WRONG,
        invariants=("F-WP-006",),
        place={"step": 1, "rank": 1, "shard": 2},
    ),
    Variant(
        name="first-block-compared",
        summary="only the first block to arrive of two copies of a shard is compared",
        source="classic (a loop that ends early)",
        plants={f"{COPIES}.Copy.equals": last_block_equals},
        scenario=_WRONG,
        invariants=("F-WP-006",),
        place={"step": 1, "rank": 1, "shard": 2},
    ),
    Variant(
        name="auditor-blamed",
        summary="one of the workers that agree on a shard is dropped",
        source="classic (an inverted condition)",
        plants={f"{AUDITS}.verdict": blames_a_witness},
        scenario=_WRONG,
        invariants=("F-WP-006",),
        place={"step": 1, "rank": 2, "shard": 2},
    ),
    Variant(
        name="itself-for-a-witness",
        summary="a worker that reports the same result twice outvotes another worker",
        source="classic (votes counted, not voters)",
        plants={f"{AUDITS}.verdict": takes_itself_for_a_witness},
        scenario=star(options=_ALL, faults=(replace(_LASTING, rank=0),), world_size=2),
        invariants=("F-WP-006",),
        place={"step": 1, "rank": 1},
    ),
    Variant(
        name="halts-when-somebody-is-caught",
        summary="the caught worker is named, but the others don't continue without it",
        source="classic (safe, but useless)",
        plants={f"{COORDINATOR}.Coordinator._conclude": gives_up},
        scenario=_WRONG,
        invariants=("F-WP-006",),
        place={"step": 1},
    ),
    Variant(
        name="culprits-copy-counted",
        summary="the caught worker is named and dropped, but its copy still counts",
        source="classic (audited after the fact)",
        plants={f"{AUDITS}.verdict": counts_what_is_wrong},
        scenario=_WRONG,
        invariants=("F-WP-006",),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="culprits-other-shards-kept",
        summary="the caught worker is dropped, but its other deliveries of the step still count",
        source="classic (half a clean-up)",
        plants={
            f"{COORDINATOR}.Coordinator._replace": keeps_what_it_delivered,
            f"{TRAINING}.blocks.Sums.forget": delivered_all_the_same,
        },
        scenario=star(options={**_ALL, "audit_share": 0.4}, faults=(_LASTING,)),
        invariants=("F-WP-006",),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
)
