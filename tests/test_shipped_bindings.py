"""The shipped bindings: each is valid, and each detects the bugs that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import Contract, Invariant, Vocabulary
from entrenar_py.check.harness import plan, runner
from entrenar_py.shared import mutants, package_data, scenario
from entrenar_py.shared.verdict import Verdict

OURS = Vocabulary(checks=checks.terms(), mutants=mutants.names)
FILES = package_data.all_bindings()


def _statements(path: Path) -> str:
    """Return a contract with every statement that the bindings at `path` name, without content."""
    named: dict[str, list[str]] = {"clause": [], "test": [], "obligation": [], "equation": []}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["bindings"]:
        (kind,) = named.keys() & entry.keys()
        if entry[kind] not in named[kind]:
            named[kind].append(entry[kind])
    return yaml.safe_dump(
        {
            "metadata": {"version": "1", "references": ["a book"]},
            "equations": {name: {"formula": "f"} for name in named["equation"]},
            "proof_obligations": [
                {"property": name, "formal": "f"} for name in named["obligation"]
            ],
            "falsification_tests": [
                {"id": name, "rule": "a sentence", "prediction": "p", "if_fails": "i"}
                for name in named["test"]
            ],
            "clauses": [{"id": name, "invariant": "i"} for name in named["clause"]],
            "qa_gate": {"id": "G"},
        }
    )


def bound(path: Path, folder: Path) -> Contract:
    """Return that contract under the bindings at `path`, without their digests."""
    stem = path.name.removesuffix(".bindings.yaml")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.startswith("    statement:"))
    (folder / f"{stem}.bindings.yaml").write_text(kept, encoding="utf-8")
    (folder / f"{stem}.yaml").write_text(_statements(path), encoding="utf-8")
    return contract.load(folder / f"{stem}.yaml", vocabulary=OURS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_every_binding_can_be_run(path: Path, tmp_path: Path) -> None:
    """Checks, kinds and mutants exist, scenarios are possible, and each names its wording."""
    loaded = bound(path, tmp_path)
    assert loaded.invariants
    assert all(one.binding is not None for one in loaded.invariants)
    plan.require_runnable(loaded.invariants)
    divided, _ = plan.divide(loaded.invariants, plan.Plan())
    assert len(divided) == len(loaded.invariants)
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["bindings"]
    assert all(isinstance(one.get("statement"), str) for one in entries)
    assert not [problem for problem in loaded.problems if "wider" in problem.message]


def _planted(folder: Path) -> Iterator[tuple[Invariant, str]]:
    seen = set()
    for path in FILES:
        for clause in bound(path, folder).invariants:
            for mutant in clause.mutants:
                tried = (clause.check, mutant, str(clause.scenarios), clause.tolerance)
                if tried not in seen:
                    seen.add(tried)
                    yield clause, mutant


def test_what_is_bound_would_find_the_bugs_that_it_names(tmp_path: Path) -> None:
    """Each mutant of a binding breaks its clause in one of the clause's own scenarios."""
    runs, num = runner.Runner(), 0
    for clause, mutant in _planted(tmp_path):
        check = checks.bind(clause)
        assert check is not None
        planned = [one for record in clause.scenarios for one in scenario.expand(record)]
        found = [
            runs.try_scenario(clause, check, one.with_(mutant=mutant)).verdict for one in planned
        ]
        assert Verdict.FALSIFIED in found, (clause.id, mutant, found)
        num += 1
    assert num >= 8


def test_shipped_contracts_are_not_bound_by_those_of_the_same_name() -> None:
    """A shipped contract of the same name has other sentences, and binds by itself."""
    for path in package_data.shipped_contracts():
        loaded = contract.load(path, vocabulary=OURS)
        assert not [one.id for one in loaded.invariants if one.binding is not None]
