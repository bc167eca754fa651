"""The default scenarios have the properties that reveal bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from entrenar_py.check.clauses import plans
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.scenario import Scenario
from tests.check.clauses import traces

Plan = Callable[[Invariant], list[Scenario]]
PLANS: tuple[Plan, ...] = (
    plans.training,
    plans.movement,
    plans.epochs,
    plans.non_finite,
    plans.parity,
    plans.departures,
    plans.stops,
    plans.random_streams,
    plans.step_rules,
)
CLAUSE = traces.clause("parity")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_sizes_divide_nothing(plan: Plan) -> None:
    """Several workers, unequal shards, and more steps than one epoch where data order matters."""
    for subject in plan(CLAUSE):
        assert subject.world_size > 1
        assert subject.batch_size % subject.num_shards
        assert subject.batch_size % subject.world_size
        assert subject.num_steps >= 2


@pytest.mark.parametrize("plan", [plans.training, plans.epochs, plans.stops, plans.random_streams])
def test_more_than_one_epoch(plan: Plan) -> None:
    """Plans that concern the order of the data go through at least two epochs."""
    for subject in plan(CLAUSE):
        per_epoch = -(-subject.num_samples // subject.batch_size)
        assert subject.num_steps >= 2 * per_epoch


def test_parity_hides_no_constant_factor() -> None:
    """Plain SGD without clipping at accumulation 1, 2 and 4; clipping active; past step 100."""
    subjects = plans.parity(CLAUSE)
    plain = [s for s in subjects if s.optimizer == "sgd" and s.clip_norm is None]
    assert {s.accumulation for s in plain} >= {1, 2, 4}
    assert any(s.clip_norm for s in subjects)
    assert any(s.num_steps > 100 for s in subjects)
    assert any(s.dropout for s in subjects)


def test_stops_in_the_middle_of_an_epoch() -> None:
    """Each run stops twice or more, once inside epoch 1, with state in optimizer and schedule."""
    for subject in plans.stops(CLAUSE):
        per_epoch = -(-subject.num_samples // subject.batch_size)
        assert len(subject.stops) >= 2
        assert any(stop // per_epoch == 1 and stop % per_epoch for stop in subject.stops)
        assert subject.optimizer != "sgd"
        assert subject.schedule != "constant"


def test_every_kind_of_non_finite_value() -> None:
    """NaN and both infinities, in gradient and loss, a huge finite value, and no fault."""
    faults = [subject.faults for subject in plans.non_finite(CLAUSE)]
    assert () in faults
    assert {(f.kind, f.value) for group in faults for f in group} >= {
        ("non_finite_gradient", "nan"),
        ("non_finite_gradient", "inf"),
        ("non_finite_gradient", "-inf"),
        ("non_finite_loss", "nan"),
        ("huge_gradient", "1e38"),
    }


def test_departures_leave_and_return() -> None:
    """Workers leave, and one comes back."""
    kinds = [[fault.kind for fault in s.faults] for s in plans.departures(CLAUSE)]
    assert ["leave"] in kinds
    assert any("join" in group for group in kinds)


def test_clipping_is_off_active_and_idle() -> None:
    """Every schedule; no limit on the norm, one far below it and one far above."""
    subjects = plans.step_rules(CLAUSE)
    assert {s.schedule for s in subjects} == {"constant", "linear", "cosine"}
    limits = [s.clip_norm for s in subjects]
    assert None in limits
    assert min(limit for limit in limits if limit) < 0.1 < 10 < max(x for x in limits if x)
