"""The JSON report and its schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

import entrenar_py
from entrenar_py.check.reports import json_format
from entrenar_py.check.reports.report import Report

SCHEMA = Path(__file__).parents[3] / "docs" / "report-schema-v1.json"


@pytest.fixture(scope="session")
def validator() -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_full_report(
    full: Report, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file equals the golden one."""
    monkeypatch.setattr(entrenar_py, "__version__", "0.0.0")
    text = json.dumps(json_format.dump(full, allow_inconclusive=False), indent=2, allow_nan=False)
    golden("report.json", text + "\n")


@given(data=st.data())
def test_any_report_fits_the_schema(
    data: DataObject, any_report: SearchStrategy[Report], validator: Any
) -> None:
    """Any report is strict JSON in UTF-8 and valid against the published schema."""
    record = json_format.dump(data.draw(any_report), allow_inconclusive=False)
    json.dumps(record, allow_nan=False, ensure_ascii=False).encode("utf-8")
    validator.validate(record)


@pytest.mark.parametrize(
    ("key", "value"),
    [("schema", "entrenar-check-report/2"), ("verdict", "passed"), ("extra", 1), ("seed", None)],
)
def test_schema_refuses_what_is_not_agreed(
    full: Report, validator: Any, key: str, value: object
) -> None:
    """Another version, an unknown verdict or key, and a missing value are refused."""
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**json_format.dump(full, allow_inconclusive=False), key: value})


def test_schema_refuses_held_without_evidence(full: Report, validator: Any) -> None:
    """A result that held without a comparison is refused."""
    record = json_format.dump(full, allow_inconclusive=False)
    record["results"][0]["compared"] = 0
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(record)


def test_values_that_json_lacks_become_text(full: Report) -> None:
    """A number that is not finite, a path and a lone surrogate can be read back."""
    strange: dict[Any, object] = {
        "loss": float("nan"),
        "home": Path("/a"),
        "bytes": "\udc80",
        3: (True, None),
    }
    record = json_format.dump(replace(full, environment=strange), allow_inconclusive=False)
    assert record["environment"] == {
        "loss": "nan",
        "home": "/a",
        "bytes": r"\udc80",
        "3": [True, None],
    }
