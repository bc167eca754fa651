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
from entrenar_py.check.contract.rules import RULES, UNREADABLE
from entrenar_py.check.contract.validation import Validation
from entrenar_py.check.reports import validation as report
from entrenar_py.shared.errors import ContractError, UsageError
from tests.check.contract.known import NOTHING
from tests.check.contract.validation.mutated import mutated
from tests.check.contract.validation.written import CLAUSES, KERNEL, validated, written

DATA = Path(__file__).parents[1] / "data"
SCHEMA = Path(__file__).parents[4] / "docs" / "validation-schema-v2.json"
TEXTS = (KERNEL, CLAUSES, (DATA / "foreign-trainer-v1.yaml").read_text(encoding="utf-8"))
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
    assert all(1 <= one.at.line <= last for one in judged.findings), seed
    assert all(map(str.isprintable, (*report.lines(found), *report.verdicts(found)))), seed
    return found


def test_every_rule_but_one_can_be_suppressed(tmp_path: Path) -> None:
    """With every rule suppressed, only unreadable parts of a broken contract still count."""
    data = mutated(yaml.safe_load(KERNEL), random.Random(3), num_changes=20)
    path = written(tmp_path, yaml.safe_dump(data))
    names = [rule.id for rule in RULES if rule.id != UNREADABLE]
    validation.require_suppressible(names)
    found = validated(path, *names)
    assert {one.rule.id for one in found.findings if not one.suppressed} <= {UNREADABLE}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("AUDIT-01", "--suppress AUDIT-01: no such rule: did you mean 'AUDIT-0"),
        ("PV-VAL-001", "--suppress PV-VAL-001: can't be suppressed; correct what it reports"),
    ],
)
def test_what_can_not_be_suppressed(rule: str, message: str) -> None:
    """An unknown rule is refused by name, and so is that on files that can't be read."""
    with pytest.raises(UsageError) as refusal:
        validation.require_suppressible(["SCHEMA-001", rule])
    assert message in str(refusal.value)


def test_the_verdict_is_of_what_is_left(tmp_path: Path) -> None:
    """A contract is valid if all its errors are suppressed; under strict, warnings are errors."""
    text = KERNEL.replace("[a paper]", "[]").replace(", if_fails: no division", "")
    path = written(tmp_path, text)
    assert not validated(path).is_valid
    found = validated(path, "SCHEMA-001")
    assert found.is_valid
    assert [one.suppressed for one in found.findings if one.rule.id == "SCHEMA-001"] == [True]
    assert not validated(path, "SCHEMA-001", strict=True).is_valid
    assert validated(path, "SCHEMA-001", "SCHEMA-009", strict=True).is_valid


def test_what_can_not_be_read_is_never_valid(tmp_path: Path) -> None:
    """If the rule on an unreadable part is suppressed, the reader reports the error itself."""
    path = written(tmp_path, KERNEL.replace("1 within eps", "''"))
    for suppressed, rule in (((), "SCHEMA-008"), (("SCHEMA-008",), "PV-VAL-001")):
        found = validated(path, *suppressed)
        errors = [one for one in found.findings if one.level == "error" and not one.suppressed]
        assert [one.rule.id for one in errors] == [rule]
        assert not found.is_valid
