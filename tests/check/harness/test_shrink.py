"""Shrinking gives ever simpler falsified scenarios, bounded, and leaves fixed fields alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.check.harness import falsify
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict

LARGE = Scenario(
    system="reference",
    workload="mlp",
    world_size=6,
    seed=77,
    num_shards=9,
    num_samples=40,
    num_steps=8,
    accumulation=4,
    optimizer="adamw",
    schedule="cosine",
    warmup_steps=2,
    dropout=0.5,
    weight_decay=0.1,
    clip_norm=1.0,
    stops=(2, 5),
    faults=(Fault(kind="leave", rank=1, step=3), Fault(kind="leave", rank=4, step=6)),
)


Claim = Callable[[Scenario], bool]


def broken_if(claim: Claim, tried: list[Scenario]) -> Callable[[Scenario], Finding]:
    """Return an attempt that falsifies exactly the scenarios for which `claim` holds."""

    def attempt(scenario: Scenario) -> Finding:
        tried.append(scenario)
        verdict = Verdict.FALSIFIED if claim(scenario) else Verdict.HELD
        return Finding(invariant="F", verdict=verdict, compared=1)

    return attempt


def smallest(claim: Claim, **options: Any) -> tuple[Scenario, list[Scenario]]:
    """Return the last scenario to which LARGE is shrunk, and all that were tried."""
    tried: list[Scenario] = []
    *_, (scenario, finding) = falsify.shrink(LARGE, broken_if(claim, tried), **options)
    assert finding.verdict is Verdict.FALSIFIED
    assert claim(scenario)
    return scenario, tried


def test_everything_that_does_not_matter_goes() -> None:
    """A break that needs two workers and a stop keeps only those, and records values."""
    found, tried = smallest(lambda one: one.world_size >= 2 and bool(one.stops))
    assert (found.world_size, found.num_steps, found.num_samples) == (2, 2, 2)
    assert (found.workload, found.optimizer, found.schedule) == ("linear", "sgd", "constant")
    assert (found.accumulation, found.warmup_steps, found.dropout) == (1, 0, 0.0)
    assert (found.clip_norm, found.weight_decay, found.seed) == (None, 0.0, 0)
    assert (found.faults, found.stops, found.detail) == ((), (1,), "values")
    assert len(set(tried)) == len(tried) <= falsify.MAX_RUNS + 1


def test_faults_come_earlier() -> None:
    """A fault that matters moves to an early step and a low rank, so that the rest can shrink."""
    found, _ = smallest(lambda one: any(fault.kind == "leave" for fault in one.faults))
    assert [(fault.step, fault.rank) for fault in found.faults] == [(0, 0)]
    assert (found.world_size, found.num_steps) == (1, 1)


def test_nothing_simpler() -> None:
    """If no simpler scenario breaks, none is yielded, within MAX_RUNS attempts."""
    tried: list[Scenario] = []
    assert list(falsify.shrink(LARGE, broken_if(lambda one: False, tried))) == []
    assert len(tried) <= falsify.MAX_RUNS + 1


def test_values_already_recorded() -> None:
    """A scenario that records values is not run again."""
    tried: list[Scenario] = []
    valued = LARGE.with_(detail="values")
    list(falsify.shrink(valued, broken_if(lambda one: False, tried)))
    assert valued not in tried


def test_fixed_stays() -> None:
    """A fixed number of workers is not reduced."""
    found, tried = smallest(lambda one: True, fixed=("world_size",))
    assert {one.world_size for one in tried} == {6}
    assert found.num_steps == 1


@settings(max_examples=30, deadline=None)
@given(
    least=st.fixed_dictionaries(
        {"num_steps": st.integers(1, 8), "num_samples": st.integers(1, 40)}
    ),
    optimizer=st.sampled_from(("sgd", "momentum", "adamw")),
)
def test_deterministic(least: dict[str, int], optimizer: str) -> None:
    """The same break shrinks the same way, and each step is simpler than the one before."""

    def claim(one: Scenario) -> bool:
        sizes = all(getattr(one, name) >= value for name, value in least.items())
        return (sizes and one.optimizer == optimizer) or one == LARGE

    def run() -> list[Scenario]:
        return [one for one, _ in falsify.shrink(LARGE, broken_if(claim, []))]

    chain = run()
    assert chain == run()
    assert len(set(chain)) == len(chain)
