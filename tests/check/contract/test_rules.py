"""The contract loader on invalid files: all problems at once, each with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrenar_py.check import contract
from entrenar_py.check.contract import blocks, layout
from entrenar_py.shared.errors import ContractError
from entrenar_py.shared.scenario import Scenario
from tests.check.contract import known

DATA = Path(__file__).parent / "data"
HEAD = "metadata: {version: 1, references: [a paper]}\n"


def _problems(path: Path) -> list[str]:
    with pytest.raises(ContractError) as caught:
        contract.load(path, vocabulary=known.OURS)
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def _problems_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return _problems(path)


def test_every_error_comes_out_at_once() -> None:
    """One load reports every problem of the file, in the order of its lines."""
    expected = [
        ("2:12:", "version is empty"),
        ("6:14:", "equation average: formula is empty"),
        ("9:14:", "property is empty"),
        ("10:16:", "tolerance is a finite number >= 0, never a formula; given is 'small'"),
        ("13:15:", "severity is one of P0, P1, P2; given is 'P9'"),
        ("14:21:", "tolerance_kind is one of bitwise"),
        ("15:16:", "given is '1/3'"),
        ("16:15:", "critical is true or false; given is 'perhaps'"),
        ("17:12:", "check 'replica_identiy' is unknown; did you mean 'replica_identity'?"),
        ("18:15:", "mutants: 'ddp-bypas' is not a planted bug; did you mean 'ddp-bypass'"),
        ("19:17:", "world_size=0: use a whole number >= 1"),
        ("22:5:", "key 'name' is given twice, on lines 21 and 22"),
        ("23:9:", "id 'X-1' is used twice, on lines 12 and 23"),
        ("25:9:", "id 'X-2' is used twice, on lines 20 and 25"),
        ("27:17:", "prediction is empty"),
        ("29:7:", "id 'X-1' is used twice, on lines 12 and 29"),
        ("30:11:", "qa_gate: checks is text or a list of texts"),
        ("32:9:", "id 'X-2' is used twice, on lines 20 and 32"),
    ]
    found = _problems(DATA / "every-error-v1.yaml")
    assert [line.split(" ")[0] for line in found] == [place for place, _ in expected]
    for line, (place, part) in zip(found, expected, strict=True):
        assert line.startswith(f"{place} error: ")
        assert part in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "invalid YAML"),
        ("a: 1", "no metadata"),
        ("metadata: [1]", "metadata is a mapping"),
        (HEAD + "equations: [1]", "equations is a list of mappings"),
        (HEAD + "equations: {a: ''}", "equation a: formula is empty"),
        (HEAD + "equations: {a: [1]}", "equation a: formula is empty"),
        (HEAD + "falsification_tests: {a: 1}", "falsification_tests is a list of mappings"),
        (HEAD + "falsification_tests: [1]", "falsification_tests is a list of mappings"),
        (HEAD + "falsification_tests: [{rule: R, prediction: p}]", "id is empty"),
        (HEAD + "kani_harnesses: 3", "kani_harnesses is a list of mappings"),
        (HEAD + "qa_gate: [1]", "qa_gate is a mapping"),
        (HEAD + "c: [{id: }]", "id is empty"),
        (HEAD + "c: [{id: [1]}]", "id is empty; give one text"),
        (HEAD + "c: [&a {id: A}]\nd: [*a]", "id 'A' is used twice, on lines 2 and 2"),
        (HEAD + "c: [{id: A}]\ninvariants: {A: {statement: s}}", "id 'A' is used twice"),
        (HEAD + "invariants: {A: {statement: s, scenarios: [{sed: 1}]}}", "clause A: scenarios: "),
        (HEAD + "c: [{id: A, name: {a: 1}}]", "name is text or a list of texts"),
        (HEAD + "c: [{id: A, severity: [P0]}]", "given is a list"),
        (HEAD + "c: [{id: A, tolerance: {a: 1}}]", "given is a mapping"),
        (HEAD + "c: [{id: A, tolerance: true}]", "given is 'true'"),
        (HEAD + "c: [{id: A, tolerance: .nan}]", "given is '.nan'"),
        (HEAD + "c: [{id: A, tolerance: -1}]", "given is '-1'"),
        (HEAD + "c: [{id: A, tolerance: 1" + "0" * 399 + "}]", "given is '1000"),
        (HEAD + "c: [{id: A, scenarios: {seed: 1}}]", "scenarios is a list of mappings"),
        (HEAD + "c: [{id: A, scenarios: [{seed: []}]}]", "a list is empty"),
        (HEAD + "c: [{id: A, scenarios: [{sed: 1}]}]", "scenario key='sed': did you mean 'seed'?"),
        (HEAD + "c: [{id: A, scenarios: [{world_sizes: 3}]}]", "did you mean 'world_size'?"),
        (HEAD + "c: [{id: A, scenarios: [{faults: [{knd: leave}]}]}]", "did you mean 'kind'?"),
        (HEAD + "c: [{id: A, scenarios: [{faults: [{kind: leav}]}]}]", "did you mean 'leave'?"),
        (HEAD + "c: [{id: A, scenarios: [{stops: [a]}]}]", "stop='a': use a whole number"),
    ],
)
def test_a_wrong_shape_is_a_problem(tmp_path: Path, text: str, problem: str) -> None:
    """A value of the wrong type is reported, never a crash."""
    assert any(problem in line for line in _problems_of(tmp_path, text))


@pytest.mark.parametrize("rule", ["A", "named", "mean", "Sums agree", "PO-1"])
def test_a_rule_may_name_clause_equation_or_obligation(tmp_path: Path, rule: str) -> None:
    """Ids, names, equations and properties can all be the target of a test."""
    path = tmp_path / "c.yaml"
    path.write_text(
        HEAD
        + "c: [{id: A, name: named}]\nequations: {mean: {formula: m}}\n"
        + "proof_obligations: [{id: PO-1, property: Sums agree}]\n"
        + f"falsification_tests: [{{id: T, rule: {rule}, prediction: p, if_fails: f}}]\n"
    )
    (test,) = contract.load(path, vocabulary=known.OURS).falsification_tests
    assert test.rule == rule


@pytest.mark.parametrize("key", ["prediction", "claim"])
def test_a_test_may_claim_what_it_predicts(tmp_path: Path, key: str) -> None:
    """`claim` is read as the prediction, and the test is the clause of its contract."""
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + f"falsification_tests: [{{id: F-1, {key}: losses agree, test: t}}]\n")
    loaded = contract.load(path, vocabulary=known.OURS)
    assert [test.prediction for test in loaded.falsification_tests] == ["losses agree"]
    assert [clause.id for clause in loaded.invariants] == ["F-1"]


def test_lists_that_multiply_without_end_are_refused(tmp_path: Path) -> None:
    """The bound is on all scenarios of the contract together."""
    seeds = list(range(99))
    entry = f"{{seed: {seeds}, repeat: {seeds}}}"
    text = HEAD + f"c: [{{id: A, scenarios: [{entry}, {entry}]}}, {{id: B, scenarios: [{entry}]}}]"
    (problem,) = _problems_of(tmp_path, text)
    assert f"over {blocks.SCENARIOS_MAX} scenarios" in problem
    text = f"{HEAD}invariants: {{B: {{statement: s, scenarios: [{entry}, {entry}]}}}}"
    (problem,) = _problems_of(tmp_path, text)
    assert "clause B: scenarios: the contract's lists multiply to over" in problem


def test_a_message_is_one_printable_line(tmp_path: Path) -> None:
    """Line breaks, terminal escapes and long texts from the file don't reach the terminal."""
    text = HEAD + 'c: [{id: "A\\nB\\e[31m", severity: "' + "x" * 5000 + '"}]'
    (problem,) = _problems_of(tmp_path, text)
    assert problem.isprintable()
    assert len(problem) < 600


_SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text("ab1.", max_size=4)
)
_ANY: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("id", "kind", "step")), inner, max_size=3)
    ),
    max_leaves=6,
)
_ENTRIES = st.dictionaries(st.sampled_from(tuple(Scenario.__dataclass_fields__)), _ANY, max_size=4)
_CLAUSES = st.fixed_dictionaries(
    {"id": st.sampled_from("ABC")},
    optional={
        **dict.fromkeys(layout.CLAUSE_KEYS[1:], _ANY),
        "scenarios": st.lists(_ENTRIES, max_size=2) | _ANY,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    blocks=st.dictionaries(st.sampled_from((*layout.RESERVED, "free")), _ANY),
    clauses=st.lists(_CLAUSES, max_size=3),
)
def test_any_values_load_or_are_named(
    tmp_path: Path, blocks: dict[str, Any], clauses: list[Any]
) -> None:
    """Random values under the layout's keys give problems with places, never a crash."""
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**blocks, "clauses": clauses}))
    try:
        lines = contract.load(path, vocabulary=known.OURS).warnings
    except ContractError as error:
        lines = tuple(error.problems)
    assert lines
    assert all(line.startswith(f"{path}:") for line in lines)
