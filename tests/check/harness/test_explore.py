"""Random scenarios are near their bases, always runnable, bounded, and the same for a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.check.harness import explore
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import require_sizes


def scenario(**changes: Any) -> Scenario:
    """Return a scenario with three workers and five steps."""
    usual = {"system": "reference", "workload": "linear", "world_size": 3, "seed": 5}
    return Scenario(**{**usual, **changes})


def explored(
    bases: list[Scenario], *, seed: int = 0, num: int = 20, **fixed: Any
) -> list[Scenario]:
    """Return every scenario that one search visits."""
    seen: list[Scenario] = []

    def visit(one: Scenario) -> bool:
        seen.append(one)
        return False

    explore.search(bases, seed=seed, num_examples=num, fixed=(), visit=visit)
    return seen


def test_a_seed_means_its_scenarios() -> None:
    """The same seed gives the same scenarios in the same order, another seed gives others."""
    bases = [scenario(), scenario(stops=(2,))]
    first = explored(bases, seed=1)
    assert len(first) == 20
    assert len(set(first)) > 15
    assert explored(bases, seed=1) == first
    assert explored(bases, seed=2) != first
    other = explored([base.with_(seed=6) for base in bases], seed=2)
    assert not set(first) & set(other)


def test_a_search_ends_when_told() -> None:
    """A visit that returns True is the last. Hypothesis repeats and raises nothing."""
    seen: list[Scenario] = []

    def visit(one: Scenario) -> bool:
        seen.append(one)
        return len(seen) == 3

    explore.search([scenario()], seed=0, num_examples=50, fixed=(), visit=visit)
    assert len(seen) == 3


def test_what_a_visit_raises_comes_out() -> None:
    """An interrupt in a visit ends the search at once."""

    def visit(one: Scenario) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore.search([scenario()], seed=0, num_examples=50, fixed=(), visit=visit)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis leaves no cache in the user's working folder."""
    monkeypatch.chdir(tmp_path)
    explored([scenario()])
    assert not list(tmp_path.iterdir())


BASES = [
    scenario(world_size=1),
    scenario(workload="mlp", num_steps=104),
    scenario(stops=(1, 3)),
    scenario(faults=(Fault(kind="leave", rank=2, step=4),)),
    scenario(faults=(Fault(kind="non_finite_gradient", step=1, shard=7, value="nan"),)),
    scenario(
        system="ddp_canonical",
        world_size=2,
        faults=(Fault(kind="non_finite_gradient", step=1, rank=1, value="nan"),),
    ),
    scenario(faults=(Fault(kind="leave", rank=2, step=1), Fault(kind="join", rank=2, step=2))),
]


@pytest.mark.parametrize("base", BASES)
@given(data=st.data())
def test_near_its_base(base: Scenario, data: st.DataObject) -> None:
    """System, backends and faults' kinds stay; sizes, seed and a fault's place change in bounds."""
    near = data.draw(explore.around([base]))
    assert (near.system, near.backends, near.repeat) == (base.system, base.backends, base.repeat)
    assert [fault.kind for fault in near.faults] == [fault.kind for fault in base.faults]
    assert bool(near.stops) == bool(base.stops)
    assert near.seed >= base.seed
    if base.world_size > 1:
        assert near.world_size > 1
    require_sizes(near)
    if base.num_steps > 8:
        assert near.num_steps == base.num_steps
    if len(base.faults) > 1:
        assert near.faults == base.faults


@given(data=st.data(), world_size=st.integers(1, 100))
def test_fixed(data: st.DataObject, world_size: int) -> None:
    """A fixed number of workers stays, however large it is."""
    base = scenario(world_size=world_size, num_shards=100, num_samples=100)
    assert data.draw(explore.around([base], ["world_size"])).world_size == world_size


def test_one_fault_moves() -> None:
    """A single fault is tried at other ranks, steps and shards than the contract's."""
    leaves = explored([BASES[3]])
    assert len({(one.faults[0].rank, one.faults[0].step) for one in leaves}) > 4
    assert len({one.faults[0].shard for one in explored([BASES[4]])}) > 3


def test_a_fault_stays_where_it_can_strike() -> None:
    """A fault with a moved shard loses its rank. One that names a tensor keeps its workload."""
    fault = Fault(kind="non_finite_gradient", step=1, rank=1, shard=3, tensor="bias", value="nan")
    found = explored([scenario(faults=(fault,))])
    assert {(one.faults[0].rank, one.workload) for one in found} == {(None, "linear")}
    for one in found:
        assert systems.run(one).end.status == "halted"
