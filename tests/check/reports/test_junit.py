"""The JUnit report, as a CI viewer reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

import entrenar_py
from entrenar_py.check.reports import junit
from entrenar_py.check.reports.report import Report


def test_full_report(
    full: Report, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file equals the golden one."""
    monkeypatch.setattr(entrenar_py, "__version__", "0.0.0")
    golden("junit.xml", junit.render(full, allow_inconclusive=False))


@given(data=st.data(), allow_inconclusive=st.booleans())
def test_suite_is_green_exactly_when_the_exit_code_is_0(
    data: DataObject, any_report: SearchStrategy[Report], allow_inconclusive: bool
) -> None:
    """Any text gives well-formed XML; failures and errors agree with the exit code."""
    report = data.draw(any_report)
    root = ElementTree.fromstring(junit.render(report, allow_inconclusive=allow_inconclusive))
    suite = root.find("testsuite")
    assert suite is not None
    red = len(suite.findall("testcase/failure")) + len(suite.findall("testcase/error"))
    assert (red == 0) == (report.exit_code(allow_inconclusive=allow_inconclusive) == 0)
    for element in (root, suite):
        assert int(element.get("failures", "")) + int(element.get("errors", "")) == red
        assert int(element.get("skipped", "")) == len(suite.findall("testcase/skipped"))
        assert int(element.get("tests", "")) == len(suite.findall("testcase"))


def test_inconclusive_is_skipped_only_when_allowed(full: Report) -> None:
    """An inconclusive result is an error by default, skipped under --allow-inconclusive."""
    strict = ElementTree.fromstring(junit.render(full, allow_inconclusive=False))
    allowed = ElementTree.fromstring(junit.render(full, allow_inconclusive=True))
    assert [e.get("message") for e in strict.iter("error")] == ["the trace has no shard events"]
    assert [e.get("message") for e in allowed.iter("skipped")] == ["the trace has no shard events"]
    assert not list(allowed.iter("error"))


@pytest.mark.parametrize("interrupted", [True, False])
def test_run_without_results_is_an_error(full: Report, interrupted: bool) -> None:
    """A run that was interrupted at once, or that selected nothing, has an error."""
    empty = replace(full, entries=(), interrupted=interrupted)
    root = ElementTree.fromstring(junit.render(empty, allow_inconclusive=True))
    kinds = [error.get("type") for error in root.iter("error")]
    assert kinds == ["interrupted" if interrupted else "nothing selected"]
