"""The ring, simulated and over TCP: equal bits on all ranks and in all runs, near the tree's."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar_py.shared import faults, systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import LIE_PLACES, RING_PLACES, STRANGERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Injected, Tensors, Trace
from tests import traces
from tests.systems import stars

REAL, SIMULATED = "ring", "ring_simulated"
# The messages between workers; if one of these links breaks, the coordinator is still connected.
BETWEEN = ("Partial", "Average")
LIES = [(value, at) for value, said in LIE_PLACES.items() for at in said if at in RING_PLACES]
BREAKS = ("kill", "cut", "half_open", "duplicate", "truncate", "flip")


def subject(system: str, block_bytes: int, **changes: object) -> Scenario:
    """Return a run of three workers with 604 bytes of parameters, in blocks, with values."""
    options = {"block_bytes": block_bytes, **(stars.SOON if system == REAL else {})}
    usual = {"workload": "mlp", "width": 1, "options": options, "detail": "values"}
    return stars.subject(system, **{**usual, **changes})


def require_near(one: list[Tensors], other: list[Tensors]) -> None:
    """Assert that two runs differ by no more than another order of addition explains."""
    for mine, theirs in zip(one, other, strict=True):
        for name, tensor in mine.items():
            ours, reference = tensor.values(), theirs[name].values()
            assert ours is not None
            assert reference is not None
            assert np.allclose(ours, reference, rtol=0, atol=1e-5), name


def digests(trace: Trace) -> list[dict[str, str]]:
    """Return the digests of the weights after each step."""
    return [{name: one.digest for name, one in held.items()} for held in stars.held(trace)]


@pytest.mark.parametrize("system", [REAL, SIMULATED])
@pytest.mark.parametrize("block_bytes", [40, 160, 2**20])
def test_a_calm_run_loses_nobody(system: str, block_bytes: int) -> None:
    """All blocks go around, every replica has the same bits, and so has another run."""
    scenario = subject(system, block_bytes)
    trace = traces.run(scenario)
    assert stars.changes(trace) == []
    require_near(stars.held(trace), stars.expected(scenario))
    again = traces.run(scenario.with_(repeat=1))
    assert digests(again) == digests(trace)


def test_simulated_and_real_have_the_same_bits() -> None:
    """The order of the ring does not depend on time."""
    assert digests(traces.run(subject(REAL, 160))) == digests(traces.run(subject(SIMULATED, 160)))


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_any_number_of_workers(world_size: int) -> None:
    """One worker adds as the tree does; several are near it."""
    scenario = subject(SIMULATED, 40, world_size=world_size)
    trace = traces.run(scenario)
    assert stars.changes(trace) == []
    require_near(stars.held(trace), stars.expected(scenario))
    assert trace.promises == ("draws",)


@pytest.mark.parametrize("at", RING_PLACES)
@pytest.mark.parametrize("kind", BREAKS)
def test_what_breaks_a_connection(kind: str, at: str) -> None:
    """The round starts again, with or without worker 1, and nothing is lost."""
    scenario = subject(SIMULATED, 160, faults=(Fault(kind=kind, step=2, rank=1, at=at),))
    trace = traces.run(scenario)
    require_near(stars.held(trace), stars.expected(scenario))
    assert trace.of(Injected)
    if at in BETWEEN and kind != "kill":
        assert stars.changes(trace) == []


def test_what_breaks_is_tried() -> None:
    """The tests above cover every fault that breaks a connection or a process."""
    assert set(BREAKS) < set(faults.ON_THE_WAY)


def require_lied(trace: Trace, value: str, at: str) -> None:
    """Assert that a lie to the coordinator loses the worker, and one to a worker the link."""
    assert [one.fault["value"] for one in trace.of(Injected)] == [value]
    require_near(stars.held(trace), stars.expected(trace.scenario))
    if at in BETWEEN or (value, at) == (
        "twice",
        "Staged",
    ):  # Staged may be sent again in each round
        assert stars.changes(trace) == []
    else:
        stars.require_back(trace)


@pytest.mark.parametrize(("value", "at"), LIES)
def test_a_lie_is_found_out(value: str, at: str) -> None:
    """Every lie is detected, and the step is reduced again without it."""
    fault = Fault(kind="lie", step=2, rank=1, at=at, value=value)
    require_lied(traces.run(subject(SIMULATED, 160, faults=(fault,))), value, at)


@pytest.mark.parametrize("value", ["old_step", "too_long", "twice"])
def test_a_lie_of_a_real_worker(value: str) -> None:
    """A real worker lies to the next process of the ring."""
    fault = Fault(kind="lie", step=2, rank=1, at="Partial", value=value)
    require_lied(traces.run(subject(REAL, 160, faults=(fault,))), value, "Partial")


@pytest.mark.parametrize("value", STRANGERS)
def test_strangers_are_turned_away(value: str) -> None:
    """Strangers of every kind do not affect the ring."""
    rank = 1 if value == "taken_rank" else None
    fault = Fault(kind="stranger", step=2, rank=rank, value=value)
    stars.require_turned_away(traces.run(subject(SIMULATED, 160, faults=(fault,))))


@pytest.mark.parametrize(
    ("system", "at"), [(SIMULATED, "TreeNode"), (REAL, "TreeNode"), ("mesh_simulated", "Partial")]
)
def test_what_is_not_said_there_is_no_place(system: str, at: str) -> None:
    """A fault at a message that the topology does not send is refused."""
    fault = Fault(kind="cut", step=2, rank=1, at=at)
    with pytest.raises(UsageError, match=f"fault cut at='{at}' on system {system}: allowed are"):
        systems.require_possible(stars.subject(system, options={}, faults=(fault,)))


@pytest.mark.parametrize("at", ["Computed", "Average", "Commit"])
def test_a_worker_that_is_killed_for_real(at: str) -> None:
    """The others go on, the worker comes back, and the run ends near the undisturbed one."""
    scenario = subject(REAL, 160, faults=(Fault(kind="kill", step=2, rank=1, at=at),))
    trace = traces.run(scenario)
    require_near(stars.held(trace), stars.expected(scenario))
    assert (3, 1, "joined") in stars.changes(trace)
