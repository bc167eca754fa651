"""The report as JUnit XML, for CI viewers: one suite per contract, one test case per invariant.

A falsified clause is a `<failure>`, or `<skipped>` if the failure is accepted. An inconclusive
clause is an `<error>`, and only with `--allow-inconclusive` is it `<skipped>`: viewers show a suite
with skipped cases in green, and a check that compared nothing must never look green.

The file has no failures and no errors exactly if the exit code is 0. So an interrupted run, a run
without a selected clause, and an undecided gate each add a test case with an error. A clause that
the configuration excludes, with a reason and a last day, is `<skipped>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import entrenar_py
from entrenar_py.check.contract import Invariant, Position
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Excluded, Report
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict


def render(report: Report, *, allow_inconclusive: bool) -> str:
    """Return the XML document with its declaration. All text is escaped for XML 1.0."""
    suite = Element("testsuite", name=escaping.exact(report.contract.name))
    _add_properties(suite, report)
    inconclusive = "skipped" if allow_inconclusive else "error"
    for entry in report.entries:
        _add_case(suite, report, entry, inconclusive)
    for excluded in report.excluded:
        _add_excluded(suite, report, excluded)
    if report.incomplete:
        name = "interrupted" if report.interrupted else "nothing selected"
        _add_alarm(suite, report, name, report.incomplete, "error")
    if report.gate_open:
        message = evidence.one_line(report.gate_open)
        _add_alarm(suite, report, "gate undecided", message, inconclusive)
    root = Element("testsuites", name="entrenar-check")
    root.append(suite)
    for element in (root, suite):
        _count(element, suite, report.elapsed_s)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _add_properties(suite: Element, report: Report) -> None:
    facts = [
        ("system", report.system),
        ("seed", str(report.seed)),
        ("contract_version", report.contract.version),
        ("contract_digest", report.contract.digest),
        ("entrenar-py", entrenar_py.__version__),
        ("command", report.command),
        *([("configuration", report.configuration.told)] if report.configuration else []),
        *_not_applying(report),
        *evidence.flatten(report.environment),
    ]
    properties = SubElement(suite, "properties")
    for name, value in dict(facts).items():
        SubElement(properties, "property", name=name, value=escaping.exact(value))


def _not_applying(report: Report) -> Iterator[tuple[str, str]]:
    ids = [skipped.invariant.id for skipped in report.not_applying]
    if ids:
        yield "not_applying", " ".join(ids)
    for skipped in report.not_applying:
        clause = skipped.invariant
        yield evidence.one_line(f"not_applying {clause.id} {clause.name}"), skipped.reason


def _case(
    suite: Element, report: Report, clause: Invariant, elapsed_s: float, at: Position
) -> Element:
    """Add a test case for `clause` to `suite`, without a result, and return it.

    `at` is the line that the test case points to.
    """
    return SubElement(
        suite,
        "testcase",
        classname=escaping.exact(report.contract.name),
        name=evidence.one_line(f"{clause.id} {clause.name}"),
        time=f"{elapsed_s:.3f}",
        file=escaping.exact(at.file),
        line=str(at.line),
    )


def _add_excluded(suite: Element, report: Report, excluded: Excluded) -> None:
    case = _case(suite, report, excluded.invariant, 0.0, excluded.invariant.position)
    message = evidence.one_line(f"excluded {excluded.why}")
    SubElement(case, "skipped", type="excluded", message=message)


def _add_case(suite: Element, report: Report, entry: Entry, inconclusive: str) -> None:
    finding = entry.finding
    at = evidence.place(report, entry)
    case = _case(suite, report, entry.invariant, entry.elapsed_s, at)
    if entry.verdict is not Verdict.HELD:
        tag = "failure" if entry.verdict is Verdict.FALSIFIED else inconclusive
        tag = "skipped" if entry.is_accepted else tag
        message = evidence.one_line(finding.reason)
        result = SubElement(case, tag, type=str(entry.verdict), message=message)
        result.text = "\n".join(evidence.detail_lines(report, entry))
    SubElement(case, "system-out").text = "\n".join(
        [
            f"{finding.compared} comparisons in {entry.num_scenarios} scenarios of the contract "
            f"and {entry.num_explored} explored",
            *(f"note: {evidence.one_line(note)}" for note in finding.notes),
            *filter(None, [evidence.one_line(evidence.bound(entry.invariant))]),
        ]
    )


def _add_alarm(suite: Element, report: Report, name: str, message: str, tag: str) -> None:
    classname = escaping.exact(report.contract.name)
    case = SubElement(suite, "testcase", classname=classname, name=name, time="0.000")
    SubElement(case, tag, type=name, message=evidence.one_line(message))


def _count(element: Element, suite: Element, elapsed_s: float) -> None:
    results = Counter(result.tag for result in suite.iterfind("testcase/*"))
    element.set("tests", str(len(suite.findall("testcase"))))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(results[tag]))
    element.set("time", f"{elapsed_s:.3f}")
