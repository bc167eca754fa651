"""The report on the terminal.

The report needs no colour (a verdict is a word) and fits in 80 columns. In a pipe no line is
wrapped, so that ids, paths and commands can be extracted. The findings, and a last line with the
exit code and its reason, should fit on one screen. The rest is printed only if `verbose`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from entrenar_py.check.contract import Invariant
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import EXIT_FALSIFIED, EXIT_HELD, Ending, Entry, Report, rank
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict, inconclusive
from entrenar_py.shared.wording import counted

# Verdict -> its word and colour. Bad verdicts are in capitals, so that they stand out without
# colour.
_WORDS = {
    Verdict.FALSIFIED: ("FALSIFIED", "bold red"),
    Verdict.INCONCLUSIVE: ("INCONCLUSIVE", "bold yellow"),
    Verdict.HELD: ("held", "green"),
}
_NOT_APPLIED, _ADVICE = ("not applied", "dim"), ("ADVICE", "bold yellow")
_ENDING_STYLES = {EXIT_HELD: "bold green", EXIT_FALSIFIED: "bold red"}
_NUMBERS = ("compared", "runs", "s")  # columns that a narrow terminal leaves out, from the last on
_GAP_CHARS = 2
_LABEL_CHARS = 12
_ID_CHARS_MAX = 28  # leaves room for the name in 80 columns; a longer id is folded, never cut
_NAME_CHARS_MIN = 12
_PIPE_CHARS_MAX = 100_000
_NAMED_MAX = 5  # clauses in front of a reason; more follow it, on a line of their own
_COMPARED_WIDEST = 999_999  # the width of a column is fixed before its numbers are known


@dataclass(frozen=True, kw_only=True)
class Style:
    """How much is printed: `quiet` omits clauses that held.

    `verbose` adds rows, notes and places.
    """

    quiet: bool = False
    verbose: bool = False


def begin(
    reports: Sequence[Report], console: Console, *, style: Style, foreseen: Sequence[str] = ()
) -> None:
    """Print what is known before the first verdict: contracts, configuration, `foreseen` lines."""
    if style.quiet:
        return
    names: dict[str, list[str]] = {}
    for report in reports:
        about = f"system {report.system}, seed {report.seed}"
        names.setdefault(about, []).append(f"{report.contract.name} {report.contract.version}")
    for about, contracts in names.items():
        _line(console, f"{', '.join(contracts)}, {about}", style="bold")
    for configuration in dict.fromkeys(report.configuration for report in reports):
        if configuration is not None:
            told = configuration.told if style.verbose else configuration.sources
            _line(console, f"configured: {told}", style="dim")
    for line in foreseen:
        _line(console, line)


class Rows:
    """A table that gets a row for each clause as soon as its verdict is known.

    Only the first verdict on a clause is printed.
    """

    def __init__(self, console: Console, clauses: Sequence[Invariant]) -> None:
        self._console = console
        self._seen: set[str] = set()
        widest = [
            Entry(
                invariant=clause,
                finding=inconclusive(clause.id, "", compared=_COMPARED_WIDEST),
                num_scenarios=10,
                num_explored=0,
                elapsed_s=100.0,
            )
            for clause in clauses
        ]
        self._columns = _columns(console, [_cells(console, entry) for entry in widest])

    def show(self, entry: Entry) -> None:
        """Print the row of `entry` unless its clause already has a row."""
        if entry.invariant.id in self._seen:
            return
        table = _table(self._columns, header=not self._seen, name=self._name_chars())
        self._seen.add(entry.invariant.id)
        cells = _cells(self._console, entry)
        table.add_row(*(cells[title] for title in self._columns))
        print_table(self._console, table)

    def _name_chars(self) -> int:
        others = sum(width + _GAP_CHARS for title, width in self._columns.items())
        left = self._console.width - others + self._columns["name"] + _GAP_CHARS
        return left if self._console.is_terminal else self._columns["name"]


def render(
    reports: Sequence[Report],
    console: Console,
    *,
    style: Style,
    ending: Ending | None,
    streamed: bool = False,
    after: str = "",
) -> None:
    """Print the reports of one call: findings, worst first, clauses that held, and the `ending`.

    A finding that several clauses share is printed once. If verdicts were `streamed`, their rows
    are not printed again. `ending` is None if the run could not be finished; `after` is the command
    to run next.
    """
    if style.verbose and not streamed:
        for report in reports:
            if report.entries:
                _print_entries(console, report.ranked)
    pairs = sorted(
        ((report, entry) for report in reports for entry in report.entries),
        key=lambda pair: rank(pair[1]),
    )
    _print_findings(console, pairs, style)
    held = [entry for _, entry in pairs if entry.verdict is Verdict.HELD]
    if held and not style.quiet and not style.verbose:
        named = (f"{entry.invariant.id} {entry.invariant.name}" for entry in held)
        _line(console, f"held: {', '.join(named)}")
    if not style.verbose:
        _print_open(console, [entry for _, entry in pairs])
    if style.verbose:
        _print_notes(console, reports)
    _gap(console, style)
    _print_left_out(console, reports, style)
    _print_summary(console, reports, style)
    _print_replays(console, reports)
    for report in reports:
        _line(console, _gate_text(report))
    if ending is not None:
        told = f"{ending}; next: {after}" if after else str(ending)
        _line(console, told, style=_ENDING_STYLES.get(ending.code, "bold yellow"))


def print_table(console: Console, table: Table) -> None:
    """Print `table`, and set its width: folded on a terminal, one line per row in a pipe."""
    if not console.is_terminal:
        endless = console.options.update(max_width=_PIPE_CHARS_MAX)
        table.width = console.measure(table, options=endless).maximum
    console.print(table, crop=False)


def _print_entries(console: Console, entries: Sequence[Entry]) -> None:
    cells = [_cells(console, entry) for entry in entries]
    columns = _columns(console, cells)
    table = _table(columns, header=True, name=None)  # the name gets the rest of the width
    for row in cells:
        table.add_row(*(row[title] for title in columns))
    print_table(console, table)


def _table(columns: Mapping[str, int], *, header: bool, name: int | None) -> Table:
    """Return a table with columns of these widths. `name` replaces the width of the name column."""
    table = Table(
        box=None,
        padding=(0, _GAP_CHARS, 0, 0),
        pad_edge=False,
        show_header=header,
        header_style="bold",
    )
    for title, width in columns.items():
        table.add_column(
            title,
            width=name if title == "name" else width,
            overflow="fold",
            justify="right" if title in _NUMBERS else "left",
        )
    return table


def _word(entry: Entry) -> tuple[str, str]:
    judged = _ADVICE if entry.advice else _WORDS[entry.verdict]
    return judged if entry.finding.applies else _NOT_APPLIED


def _cells(console: Console, entry: Entry) -> dict[str, Text]:
    """Return column title -> cell for an entry."""
    clause, (word, style) = entry.invariant, _word(entry)
    return {
        "verdict": Text(word, style=style),
        "id": Text(_fit(console, evidence.one_line(clause.id))),
        "name": Text(_fit(console, evidence.one_line(clause.name))),
        "sev": Text(clause.severity),
        "compared": Text(f"{entry.finding.compared:,}"),
        "runs": Text(f"{entry.num_scenarios}+{entry.num_explored}"),
        "s": Text(f"{entry.elapsed_s:.1f}"),
    }


def _columns(console: Console, rows: list[dict[str, Text]]) -> dict[str, int]:
    """Return title -> width in characters of each column that is shown.

    A narrow terminal shows fewer columns of numbers, so that the name stays readable. In a pipe all
    columns have their full width.
    """
    widths = {title: max(len(title), *(row[title].cell_len for row in rows)) for title in rows[0]}
    if not console.is_terminal:
        return widths
    widths["id"] = min(widths["id"], _ID_CHARS_MAX)
    widths["name"] = min(widths["name"], _NAME_CHARS_MIN)
    for title in reversed(_NUMBERS):
        if sum(widths.values()) + _GAP_CHARS * (len(widths) - 1) > console.width:
            del widths[title]
    return widths


def _print_findings(console: Console, pairs: Sequence[tuple[Report, Entry]], style: Style) -> None:
    """Print what did not hold, each finding once.

    If the report is not verbose, only what is falsified is printed, and advice is only named if a
    clause is falsified and not accepted.
    """
    if not style.verbose:
        pairs = [pair for pair in pairs if pair[1].verdict is Verdict.FALSIFIED]
    advised = [entry.invariant.id for _, entry in pairs if entry.advice]
    if style.verbose or all(entry.is_accepted for _, entry in pairs):
        advised = []
    alike = evidence.alike([entry for _, entry in pairs])
    for why, entries in alike.items():
        _gap(console, style)
        _print_alike(console, why, entries)
    together = {id(entry) for entries in alike.values() for entry in entries}
    shown = (pair for pair in pairs if not (advised and pair[1].advice))
    apart = evidence.findings([pair for pair in shown if id(pair[1]) not in together])
    for number, same in enumerate(apart):
        _gap(console, style)
        # The first finding is often the cause of the following ones.
        _print_evidence(console, same, verbose=style.verbose, guesses=number == 0)
    if advised:
        _line(console, f"advice: {', '.join(advised)} (-v says why)")


def _print_open(console: Console, entries: Sequence[Entry]) -> None:
    """Print the inconclusive clauses: each reason once, with its clauses."""
    word, style = _WORDS[Verdict.INCONCLUSIVE]
    for reason, same in evidence.alike(entries, whole=False).items():
        if len(same) > _NAMED_MAX:
            _print_alike(console, reason, same)
            continue
        ids = ", ".join(evidence.one_line(entry.invariant.id) for entry in same)
        _reasoned(console, f"{ids} {word}", reason, style)


def _gap(console: Console, style: Style) -> None:
    # A verbose report doesn't fit on a screen anyway.
    if style.verbose:
        _line(console, "")


def _print_alike(console: Console, reason: str, entries: list[Entry]) -> None:
    word, style = _WORDS[Verdict.INCONCLUSIVE]
    _line(console, f"{len(entries)} clauses {word}: {reason}", style=style)
    _labelled(console, "clauses", ", ".join(entry.invariant.id for entry in entries))


def _print_evidence(
    console: Console, same: Sequence[tuple[Report, Entry]], *, verbose: bool, guesses: bool
) -> None:
    """Print the finding that these entries share: the ids of all, and the evidence of the first.

    A brief report shows possible causes only with `guesses`.
    """
    report, entry = same[0]
    word, style = _word(entry)
    ids = ", ".join(evidence.one_line(other.invariant.id) for _, other in same)
    _reasoned(console, f"{ids} {word}", entry.finding.reason, style)
    rows = evidence.describe(report, entry) if verbose else evidence.briefly(report, entry)
    if verbose and (script := evidence.script_line(report, entry)):
        rows.append(("script", script))
    for label, value in rows:
        if verbose or guesses or label != "could mean":
            _labelled(console, label, value)


def _reasoned(console: Console, heading: str, reason: str, style: str) -> None:
    lines = _wrap(console, f"{heading}: {evidence.one_line(reason)}", indent=2)
    for number, line in enumerate(lines):
        text = Text(line)
        if number == 0:
            text.stylize(style, 0, len(heading))
        console.print(text, soft_wrap=True)


def _print_left_out(console: Console, reports: Sequence[Report], style: Style) -> None:
    """Print what was not tested: clauses left out, and placeholders that a command lacks."""
    for report in reports:
        for line in report.left_out if style.verbose else report.left_out_by_choice:
            _line(console, line)
    ids: dict[str, list[str]] = {}  # placeholder -> the clauses that could use it
    for report in reports:
        for entry in report.entries:
            for name in entry.untried:
                ids.setdefault(name, []).append(entry.invariant.id)
    names: dict[tuple[str, ...], list[str]] = {}
    for name, clauses in ids.items():
        names.setdefault(tuple(clauses), []).append(f"{{{name}}}")
    if names and style.verbose:
        told = (f"{' '.join(some)} ({', '.join(clauses)})" for clauses, some in names.items())
        _line(console, f"not tried, as the command lacks: {'; '.join(told)}")
    elif names and not style.quiet and not _is_broken(reports):  # what is broken comes first
        alone = (name for some in names.values() for name in some)
        _line(console, f"not tried, as the command lacks: {' '.join(alone)}")


def _print_notes(console: Console, reports: Sequence[Report]) -> None:
    notes = evidence.all_notes(reports)
    for line in ["", *notes] if notes else []:
        _line(console, line)


def _print_summary(console: Console, reports: Sequence[Report], style: Style) -> None:
    if style.verbose:
        for environment in dict.fromkeys(map(_environment, reports)):
            _line(console, f"ran on {environment}", style="dim")
        for command in dict.fromkeys(report.command for report in reports):
            _command(console, f"repeat with: {command}")
    for report in reports:
        if not report.entries and not report.interrupted:
            _line(console, report.incomplete, style="bold")
    entries = [entry for report in reports for entry in report.entries]
    advised = sum(entry.advice for entry in entries)
    verdicts = [entry.verdict for entry in entries if not entry.advice]
    numbers = [(verdicts.count(one), one.value) for one in _WORDS] + [(advised, "advice")]
    counts = ", ".join(f"{number} {what}" for number, what in numbers if number)
    if accepted := [e.invariant.id for e in entries if e.is_accepted and not e.advice]:
        counts += f" ({', '.join(accepted)} accepted)"
    compared = sum(report.num_compared for report in reports)
    seconds = sum(report.elapsed_s for report in reports)
    work = f"{compared:,} comparisons{_seen(reports)}, {seconds:.1f} s"
    more = "" if style.quiet or style.verbose else _hidden(reports)
    _line(console, f"{counts or 'no verdicts'}: {work}{more}")


def _is_broken(reports: Sequence[Report]) -> bool:
    entries = (entry for report in reports for entry in report.entries)
    return any(e.verdict is Verdict.FALSIFIED and not e.is_accepted for e in entries)


def _hidden(reports: Sequence[Report]) -> str:
    outside = sum(left.outside for report in reports for left in report.not_applying)
    parts = ((len(evidence.all_notes(reports)), "note"), (outside, "clause"))
    told = [counted(number, noun) for number, noun in parts if number]
    applied = " not applied" if outside else ""
    return f"; -v shows {' and '.join(told)}{applied}" if told else ""


def _environment(report: Report) -> str:
    facts = evidence.flatten(report.environment)
    return ", ".join(f"{name} {value}" for name, value in facts) or "nothing recorded"


def _seen(reports: Sequence[Report]) -> str:
    """Return where the comparisons were made; "" for a command, since its runs were listed."""
    stored = [report.num_traces for report in reports if report.num_traces is not None]
    if stored:
        return f" in {counted(max(stored), 'stored trace')}"
    entries = [entry for report in reports for entry in report.entries]
    if all(report.system == OBSERVED for report in reports):
        return ""
    planned = sum(entry.num_scenarios for entry in entries)
    explored = sum(entry.num_explored for entry in entries)
    return f" in {planned} planned + {explored} explored scenarios"


def _gate_text(report: Report) -> str:
    """Return the gate's line. The clauses that don't apply are listed above it."""
    gate = report.contract.gate
    if gate is None:
        return f"gate: {report.contract.name} has none"
    title = f"gate {gate.id} {report.gate_size}"
    if report.gate_passed:
        return f"{title}: passed"
    word = "NOT PASSED" if report.gate_broken else "UNDECIDED"
    return f"{title}: {word}: {report.gate_why}"


def _print_replays(console: Console, reports: Sequence[Report]) -> None:
    commands = [report.replay_command(entry) for report in reports for entry in report.ranked]
    for command in commands:
        if command is not None:
            _command(console, f"replay with: {command}")


def _line(console: Console, text: str, *, style: str = "") -> None:
    for line in _wrap(console, evidence.one_line(text), indent=2):
        console.print(Text(line, style=style), soft_wrap=True)


def _command(console: Console, text: str) -> None:
    # The text is meant to be copied, so no line is broken and no space is dropped.
    console.print(Text(_fit(console, escaping.exact(text))), soft_wrap=True)


def _labelled(console: Console, label: str, value: str) -> None:
    for line in _wrap(console, f"  {label:<{_LABEL_CHARS}}{value}", indent=2 + _LABEL_CHARS):
        console.print(Text(line), soft_wrap=True)


def _wrap(console: Console, text: str, *, indent: int) -> list[str]:
    """Return `text` as lines of the terminal's width, later ones indented; one line in a pipe."""
    text = _fit(console, text)
    if not console.is_terminal:
        return [text]
    wrapped = textwrap.wrap(
        text, width=console.width, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return wrapped or [""]


def _fit(console: Console, text: str) -> str:
    encoding = console.encoding
    return escaping.text(text).encode(encoding, "backslashreplace").decode(encoding)
