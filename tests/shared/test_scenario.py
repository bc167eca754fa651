"""Scenarios: validation, JSON, random streams, expansion of lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import (
    CHOICES,
    DEFAULTS,
    PARTS_MAX,
    Scenario,
    TrainingPlan,
    expand,
)
from tests.shared.trace.samples import nested

USUAL: dict[str, Any] = {"system": "reference", "workload": "linear", "world_size": 2, "seed": 0}
USUAL_SCENARIO = Scenario(**USUAL)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw scenarios, with every field drawn."""
    samples = draw(st.integers(4, 60))
    shards = draw(st.integers(1, 12))
    steps = draw(st.integers(2, 9))
    chosen: dict[str, Any] = {
        name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()
    }
    return Scenario(
        system=draw(st.text(max_size=4)),
        world_size=draw(st.integers(1, min(shards, samples))),
        seed=draw(st.integers(0, 2**70)),
        num_shards=shards,
        num_samples=samples,
        batch_size=draw(st.integers(1, samples)),
        num_steps=steps,
        learning_rate=draw(st.floats(0, 1)),
        clip_norm=draw(st.none() | st.floats(0.01, 9)),
        faults=(Fault(kind="leave", rank=0, step=draw(st.integers(0, steps - 1))),),
        stops=(draw(st.integers(1, steps - 1)),),
        backends=tuple(draw(st.lists(st.sampled_from(("cpu", "wgpu")), min_size=1))),
        options=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3))),
        **chosen,
    )


@given(scenarios())
def test_a_scenario_survives_json(scenario: Scenario) -> None:
    """to_dict, JSON, from_dict: equal, with the same digest and hash."""
    back = Scenario.from_dict(json.loads(json.dumps(scenario.to_dict(), allow_nan=False)))
    assert back == scenario
    assert (back.digest, hash(back)) == (scenario.digest, hash(scenario))


def test_the_digest_sees_every_field() -> None:
    """Two scenarios that differ in one field have different digests."""
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"repeat": 1},
        {"detail": "values"},
        {"mutant": "m"},
        {"options": {"a": 1}},
        {"faults": (Fault(kind="leave", rank=0, step=0),)},
        {"backends": ("cpu", "cpu")},
    ]
    digests = {USUAL_SCENARIO.with_(**change).digest for change in changes}
    assert len(digests | {USUAL_SCENARIO.digest}) == len(changes) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world_size=0: use a whole number >= 1"),
        ({"world_size": True}, "world_size=True: use a whole number"),
        ({"world_size": 1.5}, r"world_size=1\.5: use a whole number"),
        ({"world_size": "2"}, "world_size='2': use a whole number"),
        ({"seed": -1}, "seed=-1: use a whole number >= 0"),
        ({"seed": None}, "seed=None: use a whole number"),
        ({"num_shards": np.int64(3)}, "num_shards=.*3.*: use a whole number"),
        ({"num_shards": 10**18}, f"num_shards=1000000000000000000: use at most {PARTS_MAX}"),
        ({"accumulation": PARTS_MAX + 1}, f"accumulation=65537: use at most {PARTS_MAX}"),
        ({"workload": "resnet"}, "workload='resnet': allowed are linear, mlp, decoder"),
        ({"optimizer": ["sgd"]}, r"optimizer=\['sgd'\]: allowed are sgd, momentum, adamw"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: use a finite number >= 0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf: use a finite number"),
        ({"learning_rate": "0.1"}, r"learning_rate='0\.1': use a finite number"),
        ({"learning_rate": True}, "learning_rate=True: use a finite number"),
        ({"learning_rate": 10**400}, "learning_rate=10*: use a finite number"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1: use a finite number"),
        ({"dropout": 1}, "dropout=1: use a probability below 1"),
        ({"clip_norm": 0}, "clip_norm=0: use a number > 0, or null"),
        ({"clip_norm": "1"}, "clip_norm='1': use a number > 0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan: use a number > 0"),
        ({"clip_norm": float("inf")}, "clip_norm=inf: use a number > 0"),
        ({"world_size": 9, "num_samples": 8, "batch_size": 8}, "use world_size<=8"),
        ({"batch_size": 51}, "batch_size=51 with num_samples=50: use batch_size<=50"),
        ({"world_size": 9}, "world_size=9 with num_shards=8: .* use num_shards>=9"),
        ({"stops": (5,)}, r"stops=\[5\] with num_steps=5: a stop lies between step 1 and step 4"),
        ({"stops": (0,)}, "stop=0: use a whole number >= 1"),
        ({"stops": ("1",)}, "stop='1': use a whole number"),
        ({"stops": (True,)}, "stop=True: use a whole number"),
        ({"system": 3}, "system=3: use the name of a system"),
        ({"mutant": 3}, "mutant=3: use the name of a mutant"),
        ({"backends": ()}, r"backends=\[\]: use a list of one name or more"),
        ({"backends": (1,)}, r"backends=\[1\]: use a list of one name or more"),
        ({"backends": ["cpu"]}, r"backends=\['cpu'\]: use a tuple"),
        ({"stops": 3}, "stops=3: use a tuple"),
        ({"faults": ({"kind": "leave"},)}, "fault {'kind': 'leave'}: use Fault, or Fault.from"),
        ({"options": 3}, "options=3: use a mapping"),
        ({"options": {"magnitude": float("nan")}}, "options=.*: JSON can't hold them"),
        ({"options": {"m": object()}}, "options=.*: JSON can't hold them"),
        ({"options": nested(33)}, "options=.*nested more than 32 levels deep"),
    ],
)
def test_impossible_values_are_refused(change: dict[str, Any], message: str) -> None:
    """Each message gives the value and what is allowed."""
    with pytest.raises(UsageError, match=message):
        USUAL_SCENARIO.with_(**change)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            {"kind": "leave", "rank": 2, "step": 0},
            "fault leave rank=2: the scenario has ranks 0 to 1",
        ),
        (
            {"kind": "leave", "rank": 0, "step": 5},
            "fault leave step=5: the scenario has steps 0 to 4",
        ),
        (
            {"kind": "non_finite_loss", "value": "nan", "step": 1, "shard": 8},
            "shard=8: the scenario has shards 0 to 7",
        ),
    ],
)
def test_faults_must_lie_inside_the_run(place: dict[str, Any], message: str) -> None:
    """A fault on a rank, step or shard that is not there is refused."""
    with pytest.raises(UsageError, match=message):
        USUAL_SCENARIO.with_(faults=(Fault(**place),))


def test_a_plan_has_nothing_of_the_harness() -> None:
    """It comes back from JSON, from a scenario of an earlier release, and as a scenario."""
    scenario = Scenario.from_dict({**USUAL, "system": "mesh"})
    plan = TrainingPlan.from_dict(scenario.to_dict())
    record = json.loads(json.dumps(plan.to_dict()))
    assert not {"system", "faults", "stops", "repeat", "mutant"} & set(record)
    assert TrainingPlan.from_dict(record) == plan
    assert hash(plan) != hash(scenario)
    assert Scenario.of(plan) == scenario == Scenario.of(scenario)
    assert scenario.with_(system="mesh_simulated").trainer == plan.trainer


@pytest.mark.parametrize("used", [{"mutant": "m"}, {"stops": [1]}, {"repeat": 1}])
def test_a_scenario_that_is_more_than_a_plan(used: dict[str, Any]) -> None:
    """What no trainer reads is refused by its name."""
    with pytest.raises(UsageError, match=f"plan key='{next(iter(used))}'"):
        TrainingPlan.from_dict({**USUAL, **used})


@given(st.sampled_from(sorted(Scenario.__dataclass_fields__)), json_values)
def test_any_json_in_any_field_is_a_scenario_or_a_usage_error(name: str, value: Any) -> None:
    """Any JSON gives a scenario that can be written again, or a UsageError, never a TypeError."""
    try:
        scenario = Scenario.from_dict({**USUAL, name: value})
    except UsageError:
        return
    json.dumps(scenario.to_dict(), allow_nan=False)


@given(json_values | st.dictionaries(st.integers() | st.none(), st.integers()))
def test_any_json_is_a_scenario_or_a_usage_error(record: Any) -> None:
    """A file of garbage is refused in one line."""
    with pytest.raises(UsageError, match="scenario"):
        Scenario.from_dict(record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**USUAL, "world": 3}, "scenario key='world': did you mean 'world_size'"),
        ({"system": "reference", "seed": 0}, "scenario without workload, world_size"),
        ({**USUAL, "stops": 3}, "scenario stops=3: use a list"),
        ({**USUAL, "faults": ["leave"]}, "fault 'leave': use a mapping"),
    ],
)
def test_broken_records_are_named(record: Any, message: str) -> None:
    """A broken record is refused with the key, and what to do."""
    with pytest.raises(UsageError, match=message):
        Scenario.from_dict(record)


def test_backends_go_round() -> None:
    """Workers take the backends in turn."""
    scenario = USUAL_SCENARIO.with_(backends=("cpu", "wgpu", "cpu"))
    assert [scenario.backend_of(rank) for rank in range(5)] == ["cpu", "wgpu", "cpu", "cpu", "wgpu"]


def _draw(scenario: Scenario, *stream: str | int) -> int:
    return int(scenario.rng(*stream).integers(2**62))


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    """A stream does not depend on world size, rank, or earlier draws."""
    other = USUAL_SCENARIO.with_(world_size=7, num_steps=9, repeat=3, mutant="m")
    assert _draw(USUAL_SCENARIO, "dropout", 1, 2) == _draw(other, "dropout", 1, 2)
    assert _draw(USUAL_SCENARIO, "dropout", 1, 2) == _draw(USUAL_SCENARIO, "dropout", 1, 2)


def test_different_names_are_different_streams() -> None:
    """Neither the order nor the types of a name's parts collide."""
    names: list[tuple[str | int, ...]] = [(), ("a",), ("a", 1), ("a", "1"), ("a1",), (1, "a")]
    draws = {_draw(USUAL_SCENARIO, *name) for name in names}
    draws.add(_draw(USUAL_SCENARIO.with_(seed=1), "a"))
    assert len(draws) == len(names) + 1


def test_a_stream_keeps_its_bits_between_releases() -> None:
    """Streams never change, as saved counterexamples depend on them."""
    assert USUAL_SCENARIO.rng("order", 0).permutation(6).tolist() == [0, 4, 3, 2, 1, 5]


def test_lists_expand_to_every_combination() -> None:
    """Lists expand to all combinations, list fields stay whole, and defaults fill the rest."""
    record = {"world_size": [1, 2], "seed": [3, 4], "stops": [1, 2], "backends": ["cpu", "wgpu"]}
    found = list(expand(record))
    assert {(s.system, s.workload) for s in found} == {("reference", "linear")}
    assert [(s.world_size, s.seed) for s in found] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert {(s.stops, s.backends) for s in found} == {((1, 2), ("cpu", "wgpu"))}


def test_an_impossible_combination_is_refused() -> None:
    """Every combination is validated."""
    with pytest.raises(UsageError, match="world_size=0"):
        list(expand({"world_size": [1, 0]}))


def test_the_docs_state_the_defaults() -> None:
    """The docs state the default of every field that a contract may leave out."""
    page = Path(__file__).parents[2] / "docs" / "contract-format.md"
    stated = ", ".join(f"{name} `{value}`" for name, value in DEFAULTS.items())
    assert f"Defaults: {stated}." in page.read_text(encoding="utf-8")


def test_the_largest_float_is_a_learning_rate() -> None:
    """The largest finite number is allowed as a learning rate."""
    assert USUAL_SCENARIO.with_(learning_rate=sys.float_info.max)
