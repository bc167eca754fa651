"""Bugs planted in the machines of a pipeline: simulated runs find each, for the right reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.mesh_coordinator import Grouping
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import PeerPhase, Stage
from entrenar_py.train.wire.pipeline_peers import PipelineCoordinator, PipelineWorker
from entrenar_py.train.wire_io.injections import Fate
from tests.train.stages.linear import Plan, alone
from tests.train.stages.stages import LinearStage
from tests.train.stages.test_simulated import Parted
from tests.train.stages.trials import UNTIL_S, Trial, seeded

NUM_SEEDS = 100  # at most, until one goes wrong
THREE = Plan(((0,), (1, 2), (3,)), num_shards=3)
Patch = pytest.MonkeyPatch


def from_seed(first: int) -> Iterator[Trial]:
    """Return runs with random faults, of seeds from `first` on."""
    return map(seeded, range(first, first + NUM_SEEDS))


def late(first: int) -> Iterator[Trial]:
    """Return runs with one late message: number `first`, then the next ones."""
    return (Trial(THREE, 1, {at: (Fate.DELAY, 0.5)}) for at in range(first, first + NUM_SEEDS))


def first_violation(trials: Iterable[Trial]) -> str:
    """Return how the first of `trials` that goes wrong does so; "" if none does."""
    for trial in trials:
        try:
            trial.require_undisturbed()
        except (AssertionError, ArithmeticError, LookupError) as error:
            return f"{type(error).__name__} {error}"
    return ""


def no_new_round(patch: Patch) -> None:
    """A lost worker voids nothing."""
    patch.setattr(PipelineCoordinator, "_start_over", lambda self: None)


def early_commit(patch: Patch) -> None:
    """The coordinator commits when one worker has staged."""
    plain = PipelineCoordinator._next

    def _next(self: Any, now: float) -> list[Effect] | None:
        phases = {member.phase for member in self._members().values()}
        if self.stage is Stage.STAGING and PeerPhase.STAGED in phases and not self._is_void:
            return list(self._commit())
        return plain(self, now)

    patch.setattr(PipelineCoordinator, "_next", _next)


def old_activations(patch: Patch) -> None:
    """A worker counts hidden states and gradients of an old round."""
    plain = PipelineWorker._exchanged

    def _exchanged(self: Any, peer: Any, rank: int, message: Any) -> list[Effect]:
        is_old = self._group is not None and message.round < self._group.round
        current = replace(message, round=self._group.round) if is_old else message
        effects = plain(self, peer, rank, current)
        return [do.Receive(message) if isinstance(one, do.Receive) else one for one in effects]

    patch.setattr(PipelineWorker, "_exchanged", _exchanged)


def lone_step(patch: Patch) -> None:
    """A stage uses its new weights once it holds them, whatever the others do."""
    plain = PipelineWorker._hold

    def _hold(self: Any, message: Any) -> list[Effect]:
        effects = plain(self, message)
        is_whole = any(isinstance(one, do.Send) for one in effects)
        return [*effects, do.Make(self.step)] if is_whole else effects

    patch.setattr(PipelineWorker, "_hold", _hold)


def old_sums(patch: Patch) -> None:
    """The coordinator counts what is announced and summed in an old round."""
    turns = dict(PipelineCoordinator._turns)

    def current(plain: Callable[..., list[Effect]]) -> Callable[..., list[Effect]]:
        def turn(self: Any, peer: Any, member: Any, said: Any, now: float) -> list[Effect]:
            number = self._round if member.assigned else said.round
            effects = plain(self, peer, member, replace(said, round=number), now)
            return [do.Keep(one.rank, said) if isinstance(one, do.Keep) else one for one in effects]

        return turn

    for kind in [one for one in turns if one.__name__ in ("Summed", "TreeNode")]:
        turns[kind] = current(turns[kind])
    patch.setattr(PipelineCoordinator, "_turns", turns)


def arrival_order(patch: Patch) -> None:
    """Sums are added in the order in which they arrive."""

    def root(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
        vectors = [node.vector for node in nodes]
        return reduction.Node(0, 0, sum(vectors[1:], np.copy(vectors[0])), 0.0, 1.0)

    alone(THREE)
    for seed in range(NUM_SEEDS):
        alone(seeded(seed).plan)  # as it is without the bug
    patch.setattr(reduction, "root", root)


def same_number(patch: Patch) -> None:
    """The number of a round stays valid while the run waits for a worker."""

    def _start_over(self: Any) -> None:
        self._group = []
        self._is_void = self.stage in (Stage.COMPUTING, Stage.STAGING)

    patch.setattr(PipelineCoordinator, "_start_over", _start_over)


def lasting_void(patch: Patch) -> None:
    """A loss between two steps voids the next one, too."""

    def _start_over(self: Any) -> None:
        self._group, self._is_void = [], True
        self._round += 1

    def _next(self: Any, now: float) -> list[Effect] | None:
        if self._is_void and self.stage in (Stage.COMPUTING, Stage.STAGING):
            return list(self._gather(self.step, now))
        return Grouping._next(self, now)

    patch.setattr(PipelineCoordinator, "_start_over", _start_over)
    patch.setattr(PipelineCoordinator, "_next", _next)


def empty_stage(patch: Patch) -> None:
    """A step begins though a stage has nobody."""
    patch.setattr(PipelineCoordinator, "_is_complete", Grouping._is_complete)


def kept_weights(patch: Patch) -> None:
    """A worker goes into a new round with blocks of the old one's weights."""
    plain = PipelineWorker._start_round

    def _start_round(self: Any) -> list[Effect]:
        held = set(self._held)
        effects = plain(self)
        self._held |= held
        return effects

    patch.setattr(PipelineWorker, "_start_round", _start_round)


def no_complaints(patch: Patch) -> None:
    """A worker doesn't tell the coordinator of a broken link."""
    patch.setattr(MeshWorker, "_complain", lambda self, rank, reason: [])


def lost_early_tensors(patch: Patch) -> None:
    """A worker drops what comes before its round has begun there."""
    patch.setattr(PipelineWorker, "_postpone", lambda self, peer: [])


def unbound_passes(patch: Patch) -> None:
    """A pass that was asked for in a round that is over takes the present one's tensors."""
    plain = LinearStage.run

    def run(self: Any, asked: do.Pass) -> Any:
        self._bound[asked] = self._round
        return plain(self, asked)

    patch.setattr(LinearStage, "run", run)


def one_place(patch: Patch) -> None:
    """A worker without a place insists on its last one."""
    patch.setattr(PipelineWorker, "_refused", MeshWorker._refused)


HANGS = f"not finished after {UNTIL_S:.0f} s"
PLANTED: list[tuple[Callable[[Patch], None], str, Iterator[Trial]]] = [
    (no_new_round, HANGS, from_seed(0)),
    (early_commit, "was committed, and not all had staged it", from_seed(0)),
    (old_activations, "a tensor of round", from_seed(0)),
    (lone_step, "before its commit", from_seed(0)),
    (old_sums, "a sum of round", from_seed(140)),
    (arrival_order, "not the bits of one process", from_seed(0)),
    (same_number, "accused: Summed shards=(0,): not the next assignment", from_seed(0)),
    (lasting_void, "left: Assign to a worker that is computing", from_seed(100)),
    (empty_stage, "ZeroDivisionError", from_seed(0)),
    (kept_weights, "it was already received", from_seed(0)),
    (no_complaints, HANGS, from_seed(0)),
    (lost_early_tensors, HANGS, late(0)),
    (unbound_passes, "KeyError", from_seed(0)),
    (one_place, "has waited 300 s for workers; not here", from_seed(90)),
]


@pytest.mark.parametrize(
    ("plant", "reason", "trials"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED]
)
def test_a_planted_bug_is_found(
    plant: Callable[[Patch], None], reason: str, trials: Iterator[Trial], monkeypatch: Patch
) -> None:
    """The first run that goes wrong says what the bug breaks."""
    plant(monkeypatch)
    assert reason in first_violation(trials)


def test_forgotten_complaints_are_found(monkeypatch: Patch) -> None:
    """Two workers that never reach each other would begin rounds for ever."""
    plain = Grouping._gather

    def _gather(self: Any, step: int, now: float) -> list[Effect]:
        self._complaints.clear()
        self._num_rounds = 0
        return plain(self, step, now)

    monkeypatch.setattr(Grouping, "_gather", _gather)
    trial = Parted(Plan(((0,), (1,))), seed=3)
    assert "not finished after 5 s" in trial.simulation.run(until_s=5.0).reason
    assert trial.witness.rounds > 100
