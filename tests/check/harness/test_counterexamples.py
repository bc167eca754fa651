"""Counterexamples on disk: a saved one comes back, an edited one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.harness import counterexamples
from entrenar_py.check.harness.counterexamples import Saved
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict


def found(invariant: str = "F-X-1", *, seed: int = 0) -> Saved:
    """Return a falsified clause with every kind of value in its counterexample."""
    scenario = Scenario(system="reference", workload="linear", world_size=2, seed=seed)
    place = Counterexample(message="it broke", step=1, sample_ids=(1, 2), scenario={"seed": seed})
    finding = Finding(
        invariant=invariant,
        verdict=Verdict.FALSIFIED,
        compared=3,
        reason="it broke",
        counterexample=place,
        notes=("a note",),
    )
    return Saved(invariant=invariant, scenario=scenario, finding=finding)


def test_there_and_back(tmp_path: Path) -> None:
    """The same record comes back from a file that is named after its clause."""
    path = counterexamples.save(found(), tmp_path / "new" / "folder")
    assert path.name.startswith("F-X-1-")
    assert counterexamples.load(path) == found()


@given(invariant=st.text(min_size=1, max_size=20))
def test_any_id_is_a_file_name(tmp_path_factory: pytest.TempPathFactory, invariant: str) -> None:
    """An id in a contract may be any text; the file stays in its folder."""
    folder = tmp_path_factory.mktemp("any") / "c"
    path = counterexamples.save(found(invariant), folder)
    assert path.resolve().parent == folder.resolve()


def edited(change: Any, *, sealed: bool = False) -> str:
    """Save a file with `change` applied to its record; `sealed` recomputes the digest."""
    record: dict[str, Any] = {"schema": counterexamples.VERSION, "invariant": "F-X-1"}
    record |= {"scenario": found().scenario.to_dict(), "finding": found().finding.to_dict()}
    record["digest"] = counterexamples.digest_of(record)
    change(record)
    if sealed:
        del record["digest"]
        record["digest"] = counterexamples.digest_of(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON ("),
        ("[" * 100_000, "not JSON ("),
        ("[]", "schema='list': this release reads entrenar-counterexample/1; give a"),
        ("{}", "schema=None"),
        (edited(lambda record: record.update(schema="x/2")), "schema='x/2'"),
        (edited(lambda record: record["scenario"].update(seed=9)), "it was edited by hand"),
        (edited(lambda record: record.pop("digest")), "it was edited by hand"),
        (edited(lambda record: record.pop("finding"), sealed=True), "not a counterexample"),
        (
            edited(lambda record: record["scenario"].update(world_size=0), sealed=True),
            "not a counterexample (world_size=0",
        ),
        (edited(lambda record: record.update(finding=3), sealed=True), "not a counterexample"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    """A file that is not an unchanged counterexample is refused by name."""
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(TraceError) as refusal:
        counterexamples.load(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counterexamples of exactly this clause: first the working folder's, then the shipped ones."""
    monkeypatch.chdir(tmp_path)
    ours = tmp_path / "shipped" / "falsification"
    monkeypatch.setattr(package_data, "falsification_folder", lambda: ours)
    assert list(counterexamples.known("F-X-1")) == []
    counterexamples.save(found(seed=1))
    counterexamples.save(found("F-X-1-more", seed=2))
    counterexamples.save(found(seed=3), ours / "counterexamples")
    assert [saved.scenario.seed for _, saved in counterexamples.known("F-X-1")] == [1, 3]
    monkeypatch.setattr(package_data, "falsification_folder", lambda: None)
    assert [saved.scenario.seed for _, saved in counterexamples.known("F-X-1")] == [1]
