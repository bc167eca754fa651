"""The measurements of a reduction are correct: errors by hand, bytes at both ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from entrenar_py import systems
from entrenar_py.shared.faults import PLACES, RING_PLACES, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.trace import Reduced, Start, Traffic, Update
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.coordinator import recorder

LENGTH = recorder.PIECE + 5  # more than one piece of the recomputation
IDS = (2, 0, 5)  # with the weights 3, 1 and 3
TCP = ("parameter_server", "mesh", "ring")


@pytest.fixture(scope="module")
def model() -> GivenVectors:
    """Return six vectors."""
    return GivenVectors(6, length=LENGTH, data=np.random.default_rng(3))


@pytest.fixture(scope="module")
def terms(model: GivenVectors) -> Array:
    """Return the terms of IDS, float64 [3, LENGTH]."""
    drawn = [model.pieces(one)(LENGTH) for one in IDS]
    return np.stack(drawn).astype(np.float64)


@pytest.mark.parametrize("element", [0, 7, LENGTH - 1])
def test_the_element_that_is_off_is_found(model: GivenVectors, terms: Array, element: int) -> None:
    """Its error is counted in roundings of the terms' mean size; others are within half of one."""
    mean = (terms.sum(axis=0) / 7).astype(np.float32)
    right = recorder.reduced(0, 1, mean, model, IDS)
    assert 0 < right.roundings <= 1
    size = np.abs(terms[:, element]).sum() / 7
    mean[element] += np.float32(1_000 * size * 2.0**-24)
    wrong = recorder.reduced(0, 1, mean, model, IDS)
    assert wrong.element == element
    assert wrong.roundings == pytest.approx(1_000, rel=0.01)
    assert wrong.error == pytest.approx(1_000 * size * 2.0**-24, rel=0.01)
    assert (wrong.step, wrong.rank, wrong.num_elements) == (0, 1, LENGTH)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_off_by_all(model: GivenVectors, terms: Array, value: float) -> None:
    """A value that is not finite has an infinite error, and its element is named."""
    mean = (terms.sum(axis=0) / 7).astype(np.float32)
    mean[9] = value
    found = recorder.reduced(0, 0, mean, model, IDS)
    assert (found.roundings, found.element) == (np.inf, 9)


def vectors(system: str, **changes: Any) -> Scenario:
    """Return a run of two workers and a few blocks."""
    usual: dict[str, Any] = {
        "workload": "vectors",
        "world_size": 2,
        "width": 101,
        "num_steps": 2,
        "options": {"block_bytes": 100},
    }
    return Scenario(system=system, seed=0, **{**usual, **changes})


@pytest.mark.parametrize("system", [*TCP, *(f"{name}_simulated" for name in TCP)])
def test_whatever_one_sends_another_gets(system: str) -> None:
    """Bytes sent and received are equal for each kind, to the coordinator and between workers."""
    run = systems.run(vectors(system))
    assert run.end.status == "completed", run.end.reason
    total: Counter[tuple[str, bool, str, str]] = Counter()
    for one in run.of(Traffic):
        if one.message not in (*PLACES, *RING_PLACES):
            continue  # heartbeats and farewells may be in flight when the run ends
        over_coordinator = one.rank is None or one.peer == "coordinator"
        up = (one.rank is None) == (one.direction == "got")
        way = "up" if up else "down"
        key = (one.message, over_coordinator, way if over_coordinator else "", one.direction)
        total[key] += one.bytes
    assert {message for message, *_ in total} == set(SYSTEMS[system].places)
    for (message, over, way, direction), num_bytes in total.items():
        other = {"sent": "got", "got": "sent"}[direction]
        assert total[message, over, way, other] == num_bytes, (message, over, way)


@pytest.mark.parametrize("system", ["mesh_simulated", "reference"])
def test_only_known_vectors_are_measured(system: str) -> None:
    """Only vectors with a known mean are measured, and a system without messages has no traffic."""
    run = systems.run(vectors(system, workload="linear", width=16, options={}))
    assert run.of(Update)
    assert not run.of(Reduced)
    assert not run.of(Traffic)


def test_a_run_that_takes_too_long_is_ended() -> None:
    """The run fails after its deadline, and the reason names the time.

    That is shorter than any process takes to start: it counts from when a worker has begun.
    """
    fault = Fault(kind="half_open", step=0, rank=1, at="Computed")
    options = {"heartbeat_s": 10.0, "dead_after_s": 30.0, "deadline_s": 0.01}
    run = systems.run(vectors("ring", faults=(fault,), options=options), every_fault=False)
    assert (run.end.status, run.end.reason) == ("failed", "not finished after 0.01 s")
    assert run.of(Start)


@pytest.mark.parametrize(
    ("system", "option", "value", "advice"),
    [
        ("ring", "deadline_s", 0, "use a number of seconds > 0"),
        ("mesh", "deadline_s", "soon", "use a number of seconds > 0"),
        ("parameter_server", "socket_bytes", 0, "use a whole number, 1 to 1073741824"),
        ("mesh", "socket_bytes", 2.5, "use a whole number, 1 to 1073741824"),
        ("ring_simulated", "network_seed", "other", "use a whole number"),
    ],
)
def test_options_that_make_no_sense(system: str, option: str, value: object, advice: str) -> None:
    """Impossible options are named before a worker is started."""
    run = systems.run(vectors(system, options={option: value}))
    assert run.end.status == "failed"
    assert f"{option}={value!r}: {advice}" in run.end.reason


def test_another_network_is_the_same_training() -> None:
    """Other delays change the order of events, and no bit."""
    options = {"block_bytes": 100}
    subject = vectors("mesh_simulated", world_size=5, options=options)
    other = subject.with_(options={**options, "network_seed": 1})
    held = [
        {(one.step, one.rank): one for one in systems.run(each).of(Update)}
        for each in (subject, other)
    ]
    assert held[0] == held[1]
    assert list(held[0]) != list(held[1])
