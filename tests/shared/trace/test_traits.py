"""A run's traits in the header of its trace, and their counterparts in earlier releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared import systems, trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Traits, ledger
from entrenar_py.shared.trace.traits import CHOICES, USUAL

OWN = Scenario(system="mine", workload="own", world_size=1, seed=0)
END = trace.End(status="completed")


def written(path: Path, scenario: Scenario, traits: dict[str, Any] | None) -> Path:
    """Write the file of a run with these traits in its header, or without traits."""
    first = {**ledger.header(ledger.Head(plan=scenario, environment={})), "traits": traits}
    if traits is None:
        del first["traits"]
    line, chain = ledger.dump_line("", first)
    last, _ = ledger.dump_line(chain, {"kind": "end", "status": "completed", "reason": ""})
    path.write_text(f"{line}\n{last}\n", encoding="utf-8")
    return path


def test_they_come_back_from_a_file(tmp_path: Path) -> None:
    """All traits come back with their types. Default ones are not written."""
    traits = Traits(topology="ring", shared=True, betas=(0.8, 0.9), eps=1e-6, clipping="other")
    run = trace.Trace(scenario=OWN, environment={}, promises=(), events=(END,), traits=traits)
    trace.save(run, tmp_path / "run.jsonl")
    assert trace.load(tmp_path / "run.jsonl") == run
    assert Traits.from_dict(json.loads(json.dumps(traits.to_dict()))) == traits
    assert USUAL.to_dict() == {}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those(name: str) -> None:
    """The message names the trait, the value and what is allowed."""
    with pytest.raises(UsageError, match=f"trait {name}='purple': allowed are"):
        Traits.from_dict({name: "purple"})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"drop_lats": True}, "drop_last"),
        ({"drop_last": 1}, "trait drop_last=1: use true or false"),
        ({"betas": [0.9]}, "trait betas="),
        ({"momentum": "much"}, "trait momentum='much'"),
        (3, "use a mapping"),
    ],
)
def test_what_is_no_trait_is_refused(record: Any, message: str, tmp_path: Path) -> None:
    """An unknown or wrong trait is refused by name, in a file with its line."""
    with pytest.raises(UsageError, match=message):
        Traits.from_dict(record)
    with pytest.raises(TraceError, match="1: not a header"):
        trace.load(written(tmp_path / "run.jsonl", OWN, record))


def test_what_earlier_releases_kept_in_options(tmp_path: Path) -> None:
    """Options that earlier releases observed in a user's trainer are read as traits."""
    facts = {"drop_last": True, "rule": "other", "betas": [0.8, 0.9], "compressed": "float16"}
    told = OWN.with_(options={**facts, "inner_steps": 3})
    headers: tuple[dict[str, Any] | None, ...] = (None, {})
    for traits in headers:
        run = trace.load(written(tmp_path / "run.jsonl", told, traits))
        assert run.scenario == OWN.with_(options={"inner_steps": 3})
        assert run.traits == Traits.from_dict(facts)


@pytest.mark.parametrize("name", [name for name, one in systems.SYSTEMS.items() if one.trains])
def test_what_the_systems_of_earlier_releases_were(name: str, tmp_path: Path) -> None:
    """A trace without traits has those of its system, and keeps all its options."""
    options: dict[str, Any] = {"schedule": "gpipe"} if name == "pipeline_parallel" else {}
    if "updates" in systems.SYSTEMS[name].options:
        options = {"updates": "server"}
    scenario = OWN.with_(system=name, workload="mlp", options=options)
    run = trace.load(written(tmp_path / "run.jsonl", scenario, None))
    assert (run.scenario, run.traits) == (scenario, systems.traits_of(scenario))
