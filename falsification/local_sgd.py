"""Bugs in local SGD: workers that step alone, and an outer optimizer.

A round has two steps. The first outer step comes after step 1. The last round is step 4 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.workers import Outer
from entrenar_py.systems.torch import local_sgd
from entrenar_py.systems.torch.local_sgd import Worker
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite
from entrenar_py.train.arithmetic import sharding

from .subjects import textbook

LOCAL = "entrenar_py.systems.torch.local_sgd"
DILOCO = "Douillard et al. 2023, arXiv:2311.08105"
_pseudo_gradient, _average = local_sgd.pseudo_gradient, local_sgd.average
_outer_step, _go_on = local_sgd.outer_step, local_sgd.go_on_from_outer
_welcome, _load, _clip = local_sgd.welcome, local_sgd.load, local_sgd.clip


def local(**changes: Any) -> Scenario:
    """Return a run of two workers with AdamW: 8 samples divide equally among two, not three."""
    usual: dict[str, Any] = {
        "system": "local_sgd",
        "world_size": 2,
        "num_steps": 5,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "options": {"inner_steps": 2},
    }
    return textbook(**{**usual, **changes})


# --- which samples ----------------------------------------------------------------------------


def shuffled_by_each(worker: Worker) -> list[sharding.Ids]:
    """Gives each worker its part of another order."""
    scenario, now = worker.rank.scenario, worker.round
    rng = scenario.rng("order", now.position.epoch, worker.rank.worker)
    ids = sharding.batch(
        sharding.order(scenario.num_samples, rng), now.position, scenario.batch_size
    )
    local = sharding.cut(ids, len(now.members))[now.members.index(worker.rank.worker)]
    return sharding.cut(local, scenario.accumulation)


# --- the outer step ---------------------------------------------------------------------------


def towards_the_start(worker: Worker) -> list[Tensor]:
    """Returns the pseudo-gradient with the wrong sign: inner minus outer."""
    return [-one for one in _pseudo_gradient(worker)]


def from_where_it_is_already(worker: Worker) -> list[Tensor]:
    """Copies the outer weights to the worker first, so that the pseudo-gradient is zero."""
    _go_on(worker)
    return _pseudo_gradient(worker)


def plain_momentum(rule: Outer, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Uses heavy-ball momentum instead of Nesterov's."""
    return torch.optim.SGD(weights, lr=rule.outer_learning_rate, momentum=rule.outer_momentum)


def over_all_there_ever_were(tensors: Sequence[Tensor], worker: Worker) -> list[Tensor] | None:
    """Divides by the number of workers at the start of the run."""
    share = len(worker.rank.workers) / worker.rank.scenario.world_size
    mean = _average(tensors, worker)
    return None if mean is None else [one * share for one in mean]


def mean_of_means(tensors: Sequence[Tensor], worker: Worker) -> list[Tensor] | None:
    """Gives every worker the same weight, however many samples it had."""
    worker.round.weight = 1.0
    return _average(tensors, worker)


def stepped_before_the_mean(worker: Worker) -> bool:
    """Makes the outer step by each worker's own pseudo-gradient, then averages weights."""
    with torch.no_grad():
        _outer_step(worker, _pseudo_gradient(worker))
        mean = _average(list(worker.outer.values()), worker)
        assert mean is not None
        for outer, value in zip(worker.outer.values(), mean, strict=True):
            outer.copy_(value)
        _go_on(worker)
    now = worker.round
    now.members, now.begun, now.weight = worker.rank.workers, now.step, 0.0
    return True


def stays_where_it_is(worker: Worker) -> None:
    """Continues from the worker's own weights, as if there had been no outer step."""


def forgets_its_moments(worker: Worker) -> None:
    """Continues with a new inner optimizer."""
    _go_on(worker)
    worker.inner.state.clear()


# --- when -------------------------------------------------------------------------------------


def whole_rounds_alone(worker: Worker) -> bool:
    """Leaves out the outer step of a short last round."""
    now = worker.round
    return now.step > now.begun and now.step % worker.rule.inner_steps == 0


def gradients_averaged(worker: Worker) -> None:
    """Averages the gradient of every inner step, as a synchronous trainer does."""
    for parameter in worker.trained.values():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= worker.rank.world_size
    _clip(worker)


# --- joining again ----------------------------------------------------------------------------


def welcomed_without_momentum(worker: Worker, state: dict[str, Any]) -> None:
    """Gives a joining worker the outer weights without their momentum."""
    _welcome(worker, {**state, "momentum": {}})


def goes_on_with_its_lost_round(worker: Worker, state: dict[str, Any]) -> None:
    """Lets a worker that rejoins keep its own weights of the round in which it died."""
    _welcome(worker, state)
    path = local_sgd.checkpoint(worker.rank)
    if path.exists():
        worker.model.load_state_dict(torch.load(path, weights_only=True)["model"])


def loaded_without_momentum(worker: Worker) -> bool:
    """Resumes from a checkpoint with a new outer optimizer."""
    found = _load(worker)
    worker.outer_optimizer.state.clear()
    return found


# --- what is not finite -----------------------------------------------------------------------


def finds_nothing(self: FiniteGuard, rank: int) -> NotFinite | None:
    """Reports every value as finite."""
    self._flags.clear()
    return None


_BACK = (Fault(kind="leave", rank=1, step=1), Fault(kind="join", rank=1, step=3))
_NAN = Fault(kind="non_finite_gradient", rank=1, step=2, value="nan")
_ONE = {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
_AS_SGD = local(world_size=3, optimizer="sgd", learning_rate=0.05, options=_ONE)

VARIANTS = (
    Variant(
        name="pseudo-gradient-sign",
        summary="the pseudo-gradient is inner minus outer weights: the outer step undoes the round",
        source="classic (sign of an outer gradient)",
        plants={f"{LOCAL}.pseudo_gradient": towards_the_start},
        scenario=local(),
        invariants=("F-LS-003",),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="delta-of-nothing",
        summary="the outer weights are copied in before the difference from them is computed",
        source="classic (order of two copies)",
        plants={f"{LOCAL}.pseudo_gradient": from_where_it_is_already},
        scenario=_AS_SGD,
        invariants=("F-LS-003", "F-LS-004"),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="outer-heavy-ball",
        summary="the outer optimizer has plain momentum, not Nesterov's",
        source=f"classic; {DILOCO}, table of outer optimizers",
        plants={f"{LOCAL}.outer_optimizer_of": plain_momentum},
        scenario=local(),
        invariants=("F-LS-003",),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="divided-by-the-dead",
        summary="the mean divides by all workers of the run, although one has died",
        source="classic (elastic training)",
        plants={f"{LOCAL}.average": over_all_there_ever_were},
        scenario=local(world_size=3, faults=(_BACK[0],)),
        invariants=("F-LS-003",),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="workers-count-alike",
        summary="the pseudo-gradients are averaged without the weight of their samples",
        source="McMahan et al. 2017, arXiv:1602.05629, algorithm 1 (weighted by samples)",
        plants={f"{LOCAL}.average": mean_of_means},
        scenario=_AS_SGD,
        invariants=("F-LS-003", "F-LS-004"),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="outer-step-before-mean",
        summary="each worker takes the outer step with its own delta; then weights are averaged",
        source="classic (two lines swapped)",
        plants={f"{LOCAL}.synchronise": stepped_before_the_mean},
        scenario=local(),
        invariants=("F-LS-001", "F-LS-003"),
        place={"step": 1, "tensor": "hidden1.weight/momentum_buffer"},
    ),
    Variant(
        name="inner-weights-kept",
        summary="after the outer step each worker continues from its own weights",
        source="classic (weights not reset after averaging)",
        plants={f"{LOCAL}.go_on_from_outer": stays_where_it_is},
        scenario=local(),
        invariants=("F-LS-001", "F-LS-003"),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="inner-moments-reset",
        summary="the inner AdamW starts every round without state",
        source=f"{DILOCO}, section 2: each worker keeps its own",
        plants={f"{LOCAL}.go_on_from_outer": forgets_its_moments},
        scenario=local(),
        invariants=("F-LS-007",),
        place={"step": 2, "rank": 0},
    ),
    Variant(
        name="last-round-not-reduced",
        summary="a short last round is never synchronised",
        source="classic (the remainder of a loop)",
        plants={f"{LOCAL}.is_due": whole_rounds_alone},
        scenario=local(),
        invariants=("F-LS-002",),
        place={"step": 4},
    ),
    Variant(
        name="gradients-averaged-too",
        summary="gradients are all-reduced in every inner step: rounds save no communication",
        source="classic (DistributedDataParallel left around the model)",
        plants={f"{LOCAL}.clip": gradients_averaged},
        scenario=local(),
        invariants=("F-LS-002",),
        place={"step": 1},
    ),
    Variant(
        name="joined-without-outer-momentum",
        summary="a worker that rejoins gets the outer weights, but no outer momentum",
        source="classic (elastic training)",
        plants={f"{LOCAL}.welcome": welcomed_without_momentum},
        scenario=local(faults=_BACK),
        invariants=("F-LS-001", "F-LS-003"),
        place={"step": 3, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="lost-round-used",
        summary="a worker that rejoins continues from the round in which it died",
        source="classic (a straggler's stale result)",
        plants={f"{LOCAL}.welcome": goes_on_with_its_lost_round},
        scenario=local(faults=_BACK),
        invariants=("F-LS-001",),
        place={"step": 2, "rank": 1},
    ),
    Variant(
        name="resumed-without-outer-momentum",
        summary="a run resumes from its checkpoint with a new outer optimizer",
        source="classic (state of one of two optimizers not saved)",
        plants={f"{LOCAL}.load": loaded_without_momentum},
        scenario=local(stops=(3,)),
        invariants=("F-LS-003", "F-LS-008"),
        place={"step": 3, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="shuffled-by-each-worker",
        summary="each worker shuffles separately: some samples are drawn twice, others never",
        source="classic (a sampler's seed that differs between ranks)",
        plants={f"{LOCAL}.samples": shuffled_by_each},
        scenario=local(),
        invariants=("F-LS-006",),
        place={"step": 0, "rank": 1},
    ),
    Variant(
        name="alone-without-guard",
        summary="nothing tests a worker's round for NaN, and the mean spreads it",
        source="classic (the guard stands where gradients are reduced, and there is none)",
        plants={"entrenar_py.systems.torch.steps.FiniteGuard.found": finds_nothing},
        scenario=local(faults=(_NAN,)),
        invariants=("F-LS-005",),
        place={"step": 2, "rank": 1},
    ),
)
