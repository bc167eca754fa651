"""Bugs in elastic training: what is lost, repeated or torn when ranks die and join, or unseen."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.elastic import exchange, trainer, transfer
from entrenar_py.train.elastic.audit import Audit
from entrenar_py.train.elastic.membership import Generation, Membership, Roll
from entrenar_py.train.elastic.trainer import ElasticTrainer

AUDIT = "entrenar_py.train.elastic.audit"
TRAINER = "entrenar_py.train.elastic.trainer"
EXCHANGE = "entrenar_py.train.elastic.exchange"
MEMBERSHIP = "entrenar_py.train.elastic.membership"

_agree, _share, _add_nodes = Membership.agree, exchange.share, exchange.add_nodes
_commit, _fold = ElasticTrainer.commit, ElasticTrainer.fold
_seed_of, _broadcast = trainer._seed_of, transfer.broadcast
_exchange = Audit._exchange

_NEVER_S = 5.0
_own: list[range] = []  # this process's micro-batches
_started: WeakKeyDictionary[ElasticTrainer, int] = WeakKeyDictionary()
_before: list[dict[str, Tensor]] = []  # the weights before this process's last commit


def scenario(*faults: Fault, deadline_s: float = 16.0, **changes: Any) -> Scenario:
    """Return a run of three ranks, with eight micro-batches in a step."""
    usual: dict[str, Any] = {
        "system": "elastic",
        "workload": "linear",
        "world_size": 3,
        "seed": 0,
        "num_shards": 8,
        "num_steps": 8,
        "learning_rate": 0.01,
        "faults": faults,
        "options": {"deadline_s": deadline_s},
    }
    return Scenario(**{**usual, **changes})


KILLED = Fault(kind="kill", rank=1, step=1, at="Exchange")
REPLACED = (KILLED, Fault(kind="join", rank=1, step=3))
WRONG = Fault(kind="corrupt_gradient", rank=1, step=1, shard=3, value="0.5")
_TOLD = scenario(KILLED)


# --- what is computed, and with which random numbers ----------------------------------------------


def as_if_nobody_died(micro_batches: int, *, rank: int, world_size: int) -> range:
    """Lets two of three ranks keep their micro-batches when rank 1 is dead."""
    if world_size == _TOLD.world_size - 1:
        rank, world_size = rank + (rank >= 1), _TOLD.world_size
    return _share(micro_batches, rank=rank, world_size=world_size)


def adds_what_is_there(rows: Tensor, spans: Iterable[range]) -> Tensor:
    """Adds as many rows as there are, along no tree if some are missing."""
    spans = list(spans)
    if all(left.stop == right.start for left, right in pairwise(spans)):
        return _add_nodes(rows, spans)
    return rows.sum(0)


def counted_from_its_own(self: ElasticTrainer, batches: Any) -> Any:
    """Remembers where the rank's share starts, for `seeded_by_place`."""
    _own[:] = [self.shards]
    return _fold(self, batches)


def seeded_by_place(seed: int, step: int, shard: int) -> int:
    """Seeds a micro-batch by its place in the rank's share, not in the global batch."""
    return _seed_of(seed, step, shard - _own[0].start)


# --- commits --------------------------------------------------------------------------------------


def schedule_moves(self: ElasticTrainer) -> bool:
    """Advances the schedule also if the step is not committed, and will be repeated."""
    committed = _commit(self)
    if not committed:
        for each in self._schedulers:
            each.step()
    return committed


def newcomer_steps_twice(self: ElasticTrainer) -> bool:
    """Makes the first step of a rank that joined twice."""
    if self._reduced and self.step and _started.setdefault(self, self.step) == self.step:
        self._optimizer.step()
    _started.setdefault(self, self.step)
    return _commit(self)


def half_a_step(self: ElasticTrainer) -> bool:
    """Gives a step up if another rank dies during it, after the optimizer has made it."""
    if not self._reduced or self.step != KILLED.step or self.world_size < _TOLD.world_size:
        return _commit(self)
    self._optimizer.step()
    end = time.monotonic() + _NEVER_S
    while not self._members.interrupted and time.monotonic() < end:
        time.sleep(0.001)
    self._open = self._reduced = False
    self._regroup()
    return False


# --- audits ---------------------------------------------------------------------------------------


def with_itself(self: Audit, wait: Any) -> dict[int, dict[str, str]]:
    """Compares a micro-batch's gradients with themselves, not with what another rank computed."""
    found = _exchange(self, wait)
    return {shard: dict.fromkeys(said, min(said.values())) for shard, said in found.items()}


# --- the state that newcomers get -----------------------------------------------------------------


def remembers(self: ElasticTrainer) -> bool:
    """Keeps the weights before each commit, for `serves_what_it_remembers`."""
    _before[:] = [{name: one.clone() for name, one in self._tensors().items()}]
    return _commit(self)


def serves_what_it_remembers(own: Any, group: Any, **given: Any) -> Any:
    """Sends the weights from before the last commit, with the number of the step after it."""
    if own is not None and _before:
        step, _, states = own
        own = (step, _before[0], states)
    return _broadcast(own, group, **given)


# --- who trains -----------------------------------------------------------------------------------


def of_its_own(self: Membership, step: int, **given: Any) -> Generation:
    """Lets rank 2 take itself for the only one that is left, and the others go on without it."""
    agreed = _agree(self, step, **given)
    if not agreed.number:
        return agreed
    members = tuple(one for one in agreed.members if (one[0] == 2) == (self.seat == 2))
    return replace(agreed, members=members, source=0, behind=())


def tells_nobody(self: Roll, seat: int, *, by_itself: bool = False) -> None:
    """Says nothing of a death."""


VARIANTS = (
    Variant(
        name="elastic-dead-left-out",
        summary="the ranks that are left keep their micro-batches, and nobody computes the others",
        source="classic (world size read once)",
        plants={
            f"{EXCHANGE}.share": as_if_nobody_died,
            f"{EXCHANGE}.add_nodes": adds_what_is_there,
        },
        scenario=_TOLD,
        invariants=("F-EL-001", "F-EL-002"),
        place={"step": 1},
    ),
    Variant(
        name="elastic-draws-by-place",
        summary="dropout is seeded by a micro-batch's place in its rank's share",
        source="classic (a generator's state by rank)",
        plants={
            f"{TRAINER}.ElasticTrainer.fold": counted_from_its_own,
            f"{TRAINER}._seed_of": seeded_by_place,
        },
        scenario=_TOLD,
        invariants=("F-EL-001", "F-EL-002"),
        place={"step": 0},
    ),
    Variant(
        name="elastic-schedule-moves-on-repeat",
        summary="a step that is repeated has advanced the schedule already",
        source="classic (scheduler.step outside of the commit)",
        plants={f"{TRAINER}.ElasticTrainer.commit": schedule_moves},
        scenario=_TOLD,
        invariants=("F-EL-001",),
        place={"step": 1, "rank": 0, "expected": "2", "got": "3"},
    ),
    Variant(
        name="elastic-newcomer-steps-twice",
        summary="the first step of a rank that joined is made twice",
        source="classic (a newcomer replays the step that it was sent the state of)",
        plants={f"{TRAINER}.ElasticTrainer.commit": newcomer_steps_twice},
        scenario=scenario(*REPLACED),
        invariants=("F-EL-001",),
        # It asks before step 3, and rank 0 makes room before step 5.
        place={"step": 5, "rank": 1, "tensor": "first.weight"},
    ),
    Variant(
        name="elastic-served-before-commit",
        summary="a rank that joins gets the weights from before the last commit",
        source="classic (a snapshot with the number of the step after it)",
        plants={
            f"{TRAINER}.ElasticTrainer.commit": remembers,
            f"{TRAINER}.broadcast": serves_what_it_remembers,
        },
        scenario=scenario(*REPLACED),
        invariants=("F-EL-004",),
        place={"step": 4, "rank": 1, "tensor": "first.weight"},
    ),
    Variant(
        name="elastic-group-of-its-own",
        summary="when a rank has died, one of the others takes itself for the only one left",
        source="classic (split brain)",
        plants={f"{MEMBERSHIP}.Membership.agree": of_its_own},
        scenario=scenario(KILLED, world_size=4),
        invariants=("F-EL-003",),
        place={"step": 1, "rank": 2},
    ),
    Variant(
        name="elastic-death-not-told",
        summary="nobody says that a rank has died: the others wait for it",
        source="classic (failure detection by timeout)",
        plants={f"{MEMBERSHIP}.Roll.bury": tells_nobody},
        scenario=scenario(KILLED, deadline_s=4.0),
        invariants=("F-EL-005",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="elastic-half-step-kept",
        summary="a rank that hears of a death in a step keeps its weights, but not its number",
        source="classic (an exception between optimizer.step and the count)",
        plants={f"{TRAINER}.ElasticTrainer.commit": half_a_step},
        scenario=scenario(replace(KILLED, at="Stepping")),
        invariants=("F-EL-006",),
        place={"step": 0, "rank": 0, "tensor": "first.weight"},
    ),
    Variant(
        name="elastic-audit-of-itself",
        summary="an audit compares a rank's gradients with themselves",
        source="classic (redundant execution on the same chip)",
        plants={f"{AUDIT}.Audit._exchange": with_itself},
        scenario=scenario(WRONG, options={"deadline_s": 16.0, "audit_share": 1.0}),
        invariants=("F-EL-007",),
        place={"step": 1, "rank": 1},
    ),
)
