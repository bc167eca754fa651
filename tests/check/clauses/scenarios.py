"""Random scenarios that a correct trainer can run, and on which no check may report a finding."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import CHOICES, Scenario

SYSTEMS = ("reference", "textbook")
NUM_STEPS_MAX = 7


@st.composite
def scenarios(draw: DrawFn) -> Scenario:
    """Scenarios of both trainers. The decoder is rare, since its steps are slow."""
    system = draw(st.sampled_from(SYSTEMS))
    workload = draw(st.sampled_from(("linear",) * 4 + ("mlp",) * 4 + ("decoder",)))
    num_samples = draw(st.integers(1, 12 if workload == "decoder" else 40))
    world_size = draw(st.integers(1, min(8, num_samples)))
    num_steps = draw(st.integers(1, 3 if workload == "decoder" else NUM_STEPS_MAX))
    return Scenario(
        system=system,
        workload=workload,
        world_size=world_size,
        seed=draw(st.integers(0, 2**32)),
        num_shards=draw(st.integers(world_size, 12)),
        num_samples=num_samples,
        batch_size=draw(st.integers(1, num_samples)),
        num_steps=num_steps,
        accumulation=draw(st.integers(1, 4)),
        optimizer=draw(st.sampled_from(CHOICES["optimizer"])),
        learning_rate=draw(st.sampled_from((0.001, 0.05, 0.3))),
        weight_decay=draw(st.sampled_from((0.0, 0.1))),
        clip_norm=draw(st.sampled_from((None, 0.05, 1.0, 100.0))),
        schedule=draw(st.sampled_from(CHOICES["schedule"])),
        warmup_steps=draw(st.integers(0, 3)),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.3))),
        width=draw(st.integers(1, 16)),
        faults=draw(faults(world_size, num_steps)),
        stops=draw(stops(num_steps)),
        detail=draw(st.sampled_from(("values", "digests"))),
    )


@st.composite
def stops(draw: DrawFn, num_steps: int) -> tuple[int, ...]:
    """Up to three stops in order."""
    places = st.sets(st.integers(1, num_steps - 1), max_size=3) if num_steps > 1 else st.just(set())
    return tuple(sorted(draw(places)))


@st.composite
def faults(draw: DrawFn, world_size: int, num_steps: int) -> tuple[Fault, ...]:
    """Workers that leave and come back, or one value that halts the run, or nothing."""
    kind = draw(st.sampled_from(("none", "none", "membership", "non_finite")))
    if kind == "none":
        return ()
    if kind == "membership":
        return draw(departures(world_size, num_steps))
    fault = Fault(
        kind=draw(st.sampled_from(("non_finite_gradient", "non_finite_loss"))),
        step=draw(st.integers(0, num_steps - 1)),
        rank=draw(st.integers(0, world_size - 1)),
        value=draw(st.sampled_from(("nan", "inf", "-inf"))),
    )
    return (fault,)


@st.composite
def departures(draw: DrawFn, world_size: int, num_steps: int) -> tuple[Fault, ...]:
    """Workers other than rank 0 that leave once, and may come back once."""
    found: list[Fault] = []
    for rank in range(1, world_size):
        if not draw(st.booleans()):
            continue
        step = draw(st.integers(0, num_steps - 1))
        found.append(Fault(kind="leave", rank=rank, step=step))
        if step + 1 < num_steps and draw(st.booleans()):
            back = draw(st.integers(step + 1, num_steps - 1))
            found.append(Fault(kind="join", rank=rank, step=back))
    return tuple(found)
