"""The report as one self-contained HTML page, to print or mail: no scripts, no requests.

Text from a contract is escaped, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import entrenar_py
from entrenar_py.check.reports import drawn_runs, evidence
from entrenar_py.check.reports.report import Entry, Report
from entrenar_py.shared import mutants
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import document
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict

_WORDS = {
    Verdict.FALSIFIED: "FALSIFIED",
    Verdict.INCONCLUSIVE: "INCONCLUSIVE",
    Verdict.HELD: "held",
}


def render(report: Report) -> str:
    """Return the HTML document, with a line end."""
    return "\n".join(_document(report)) + "\n"


def _document(report: Report) -> Iterator[str]:
    contract = report.contract
    name = f"{contract.name} {contract.version}"
    yield from document.begin(evidence.one_line(f"{name}: {report.verdict}"))
    yield f"<header><h1>{_text(name)} {_badge(report.verdict)}</h1>"
    yield f"<p>{_text(_summary(report))}</p>"
    if report.incomplete:
        yield f"<p><strong>{_text(report.incomplete)}</strong></p>"
    yield f"<p>{_text(evidence.gate(report) or 'The contract has no gate.')}</p>"
    for line in report.left_out:
        yield f"<p>{_text(line)}</p>"
    if report.configuration is not None:
        yield f"<p>Configured: {_text(report.configuration.told)}</p>"
    yield f"<p>Repeat with</p><pre>{_long(report.command)}</pre></header>"
    if report.entries:
        yield from _verdicts(report)
        yield "<section><h2>Evidence</h2>"
        for entry in report.ranked:
            yield from _evidence(report, entry)
        yield "</section>"
    yield from drawn_runs.section(report)
    yield from _planted(report.ranked)
    yield from _environment(report)
    yield f"<footer>entrenar-check {entrenar_py.__version__}</footer>\n{document.END}"


def _summary(report: Report) -> str:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in report.counts.items() if number)
    summary = f"{counts or 'no verdicts'}; {report.num_compared:,} comparisons"
    if report.num_traces is not None:
        summary += f" in {report.num_traces:,} stored traces"
    return f"System {report.system}, seed {report.seed}: {summary}, {report.elapsed_s:.1f} s"


def _verdicts(report: Report) -> Iterator[str]:
    titles = ("verdict", "id", "name", "severity", "compared", "runs", "s")
    yield '<section><h2>Verdicts</h2><div class="wide"><table><thead><tr>'
    yield "".join(f"<th{_side(number)}>{title}</th>" for number, title in enumerate(titles))
    yield "</tr></thead><tbody>"
    for entry in report.ranked:
        clause, place = entry.invariant, report.entries.index(entry)
        cells = (
            _badge(entry.verdict),
            f'<a href="#e{place}">{_text(clause.id)}</a>',
            _text(clause.name),
            clause.severity,
            f"{entry.finding.compared:,}",
            f"{entry.num_scenarios}+{entry.num_explored}",
            f"{entry.elapsed_s:.1f}",
        )
        row = "".join(f"<td{_side(number)}>{cell}</td>" for number, cell in enumerate(cells))
        yield f"<tr>{row}</tr>"
    yield "</tbody></table></div></section>"


def _side(number: int) -> str:
    return ' class="number"' if number >= 4 else ' class="name"' if number == 1 else ""


def _evidence(report: Report, entry: Entry) -> Iterator[str]:
    clause, finding = entry.invariant, entry.finding
    heading = f"{_text(f'{clause.id} {clause.name}')} {_badge(entry.verdict)}"
    yield f'<article id="e{report.entries.index(entry)}"><h3>{heading}</h3>'
    yield f"<p>{_text(clause.statement)}</p><dl>"
    rows = [("reason", finding.reason)] if finding.reason else []
    rows += evidence.describe(report, entry)
    runs = f"{entry.num_scenarios:,} runs planned, {entry.num_explored:,} explored"
    if report.num_traces is not None:
        runs = f"{entry.num_scenarios:,} stored traces"
    rows.append(("comparisons", f"{finding.compared:,} in {runs}"))
    rows += [("note", note) for note in finding.notes]
    for label, text in rows:
        yield f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>"
    command = report.replay_command(entry)
    if command is not None:
        yield f"<dt>replay</dt><dd><pre>{_long(command)}</pre></dd>"
    yield "</dl></article>"


def _planted(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield as HTML a table of planted bugs, each with the clause that it must break."""
    try:
        known = mutants.catalogue()
    except UsageError:  # the package was installed without the planted bugs
        return
    rows = [
        (entry.invariant.id, name, known[name].summary, known[name].source)
        for entry in entries
        for name in entry.invariant.mutants
        if name in known
    ]
    if not rows:
        return
    yield (
        "<section><h2>Kill matrix</h2><p>Planted bugs that must falsify these clauses, each at the "
        "planted place. None was planted for this report: <code>entrenar-check --mutants</code> "
        'plants them all, and prints what kills each.</p><div class="wide"><table><thead><tr>'
        "<th>clause</th><th>mutant</th><th>bug</th><th>source</th></tr></thead><tbody>"
    )
    for row in rows:
        clause, name, *rest = map(_text, row)
        cells = f'<td class="name">{clause}</td><td class="name">{name}</td>'
        yield f"<tr>{cells}{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
    yield "</tbody></table></div></section>"


def _environment(report: Report) -> Iterator[str]:
    yield "<section><h2>Environment</h2><dl>"
    contract = report.contract
    rows = [("contract", f"{contract.path}"), ("contract digest", contract.digest)]
    for label, text in [*rows, *evidence.flatten(report.environment)]:
        yield f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>"
    yield "</dl></section>"


def _badge(verdict: Verdict) -> str:
    return f'<span class="verdict {verdict}">{_WORDS[verdict]}</span>'


def _text(text: str) -> str:
    return escaping.html(evidence.one_line(text))


def _long(text: str) -> str:
    """Return a command as HTML, not cut."""
    return escaping.html(text)
