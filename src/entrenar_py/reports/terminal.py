"""The report on the terminal, and the progress line of a run.

It needs no colour (a verdict is a word) and fits in 80 columns. In a pipe no line is wrapped, so
that ids, paths and commands can be cut out of it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from entrenar_py.contract import Invariant
from entrenar_py.reports import evidence
from entrenar_py.reports.report import Entry, Report
from entrenar_py.untrusted import escaping
from entrenar_py.verdict import Verdict, inconclusive
from entrenar_py.wording import counted

# Word and colour of each verdict. Bad verdicts are in capitals, to be found without colour.
_WORDS = {
    Verdict.FALSIFIED: ("FALSIFIED", "bold red"),
    Verdict.INCONCLUSIVE: ("INCONCLUSIVE", "bold yellow"),
    Verdict.HELD: ("held", "green"),
}
_NUMBERS = ("compared", "runs", "s")  # columns left out on a narrow terminal, the last one first
_GAP_CHARS = 2
_LABEL_CHARS = 12
_ID_CHARS_MAX = 28  # leaves room for the name in 80 columns; a longer id is folded, never cut
_NAME_CHARS_MIN = 12
_PIPE_CHARS_MAX = 100_000
_COMPARED_WIDEST = 999_999  # the width of a column must be known before its numbers are


def begin(report: Report, console: Console, *, foreseen: Sequence[str] = (), quiet: bool) -> None:
    """Print what is known before the first verdict: contract, configuration, runs `foreseen`."""
    if quiet:
        return
    name = f"{report.contract.name} {report.contract.version}"
    _line(console, f"{name}, system {report.system}, seed {report.seed}", style="bold")
    if report.configuration is not None:
        _line(console, f"configured: {report.configuration.told}", style="dim")
    for line in foreseen:
        _line(console, line)


class Rows:
    """Prints a row for each clause as its verdict becomes known, below the titles of the columns.

    The first verdict on a clause is printed, except one that `quiet` leaves out.
    """

    def __init__(self, console: Console, clauses: Sequence[Invariant], *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
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
        """Print the row of `entry`, if it is the first of its clause."""
        if entry.invariant.id in self._seen or (self._quiet and entry.verdict is Verdict.HELD):
            return
        table = _table(self._columns, header=not self._seen, name=self._name_chars())
        self._seen.add(entry.invariant.id)
        cells = _cells(self._console, entry)
        table.add_row(*(cells[title] for title in self._columns))
        print_table(self._console, table)

    def _name_chars(self) -> int:
        """Return the width of the name's column: what others leave of a terminal's."""
        others = sum(width + _GAP_CHARS for title, width in self._columns.items())
        left = self._console.width - others + self._columns["name"] + _GAP_CHARS
        return left if self._console.is_terminal else self._columns["name"]


def render(report: Report, console: Console, *, quiet: bool, begun: bool = False) -> None:
    """Print the report to `console`, worst verdict first, with the replay commands last.

    `quiet` leaves out clauses that held, the notes and the environment. If the report was `begun`,
    its head and rows have been printed.
    """
    shown = [e for e in report.ranked if not quiet or e.verdict is not Verdict.HELD]
    if not begun:
        begin(report, console, quiet=quiet)
    if shown and not begun:
        _print_entries(console, shown)
    alike = evidence.alike(shown)
    for why, entries in alike.items():
        _print_alike(console, why, entries)
    together = {id(entry) for entries in alike.values() for entry in entries}
    for entry in shown:
        if entry.verdict is not Verdict.HELD and id(entry) not in together:
            _print_evidence(console, report, entry)
    if not quiet:
        _print_notes(console, report)
    if shown:
        _line(console, "")
    _print_summary(console, report, quiet=quiet)
    _print_replays(console, report)


class Progress:
    """Shows the progress of a run on one line while the context is open, on a terminal only.

    Prints nothing in a pipe or a file. When the context closes, the line is removed.
    """

    def __init__(self, console: Console) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[what]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, what="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, invariant_id: str, done: int, planned: int, what: str) -> None:
        """Show that `done` of `planned` (0: unknown) pieces of work on an invariant are done.

        `what` describes the work in progress.
        """
        self._bar.update(
            self._task,
            description=evidence.one_line(invariant_id),
            completed=done,
            total=planned or None,
            what=evidence.one_line(what),
        )


def print_table(console: Console, table: Table) -> None:
    """Print `table`, folded on a terminal, and with one line a row in a pipe.

    Sets the width of `table`.
    """
    if not console.is_terminal:
        endless = console.options.update(max_width=_PIPE_CHARS_MAX)
        table.width = console.measure(table, options=endless).maximum
    console.print(table, crop=False)


def _print_entries(console: Console, entries: list[Entry]) -> None:
    cells = [_cells(console, entry) for entry in entries]
    columns = _columns(console, cells)
    table = _table(columns, header=True, name=None)  # the name takes what is left
    for row in cells:
        table.add_row(*(row[title] for title in columns))
    print_table(console, table)


def _table(columns: Mapping[str, int], *, header: bool, name: int | None) -> Table:
    """Return a table with these widths of columns, `name` being that of the name's."""
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


def _cells(console: Console, entry: Entry) -> dict[str, Text]:
    """Return the cells of an entry by column title."""
    clause, (word, style) = entry.invariant, _WORDS[entry.verdict]
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

    A narrow terminal shows fewer columns of numbers, to keep the name readable. In a pipe all
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


def _print_alike(console: Console, why: str, entries: list[Entry]) -> None:
    """Print one paragraph for clauses that share a reason, such as having no check."""
    word, style = _WORDS[Verdict.INCONCLUSIVE]
    _line(console, "")
    _line(console, f"{len(entries)} clauses {word}: {why}", style=style)
    _labelled(console, "clauses", ", ".join(entry.invariant.id for entry in entries))


def _print_evidence(console: Console, report: Report, entry: Entry) -> None:
    word, style = _WORDS[entry.verdict]
    heading = f"{evidence.one_line(entry.invariant.id)} {word}"
    reason = _wrap(console, f"{heading}: {evidence.one_line(entry.finding.reason)}", indent=2)
    _line(console, "")
    for number, line in enumerate(reason):
        text = Text(line)
        if number == 0:
            text.stylize(style, 0, len(heading))
        console.print(text, soft_wrap=True)
    for label, value in evidence.describe(report, entry):
        _labelled(console, label, value)


def _print_notes(console: Console, report: Report) -> None:
    noted = evidence.all_notes(report)
    if noted:
        _line(console, "")
    for line in noted:
        _line(console, line)


def _print_summary(console: Console, report: Report, *, quiet: bool) -> None:
    if not quiet:
        facts = ", ".join(f"{name} {value}" for name, value in evidence.flatten(report.environment))
        _line(console, f"ran on {facts}" if facts else "ran on: nothing recorded", style="dim")
        _command(console, f"repeat with: {report.command}")
    for line in report.left_out:
        _line(console, evidence.one_line(line))
    if report.interrupted:
        _line(console, "interrupted: this is what is known so far", style="bold yellow")
    elif not report.entries:
        why = report.incomplete if not report.contract.invariants else ""
        why = why or "nothing selected: no clause of the contract was checked"
        _line(console, why, style="bold")
    counts = ", ".join(f"{num} {verdict}" for verdict, num in report.counts.items() if num)
    if accepted := [entry.invariant.id for entry in report.entries if entry.is_accepted]:
        counts += f" ({', '.join(accepted)} accepted)"
    _, style = _WORDS[report.verdict]
    work = f"{report.num_compared:,} comparisons in {_seen(report)}, {report.elapsed_s:.1f} s"
    _line(console, f"{counts or 'no verdicts'}: {work}", style=style)
    _line(console, _gate_text(report))


def _seen(report: Report) -> str:
    if report.num_traces is not None:
        return counted(report.num_traces, "stored trace")
    planned = sum(entry.num_scenarios for entry in report.entries)
    explored = sum(entry.num_explored for entry in report.entries)
    return f"{planned} planned + {explored} explored scenarios"


def _gate_text(report: Report) -> str:
    gate = report.contract.gate
    if gate is None:
        return "gate: the contract has none"
    title = f"gate {gate.id} ({gate.name})"
    if report.gate_passed:
        return f"{title}: passed"
    word = "NOT PASSED" if report.gate_broken else "UNDECIDED"
    return f"{title}: {word}: {report.gate_why}"


def _print_replays(console: Console, report: Report) -> None:
    commands = [report.replay_command(entry) for entry in report.ranked]
    saved = [command for command in commands if command is not None]
    if saved:
        _line(console, "")
        _line(console, "replay with:", style="bold")
    for command in saved:
        _command(console, command)


def _line(console: Console, text: str, *, style: str = "") -> None:
    for line in _wrap(console, evidence.one_line(text), indent=2):
        console.print(Text(line, style=style), soft_wrap=True)


def _command(console: Console, text: str) -> None:
    """Print a command as it is, to be copied: no line is broken, no space is dropped."""
    console.print(Text(_fit(console, escaping.exact(text))), soft_wrap=True)


def _labelled(console: Console, label: str, value: str) -> None:
    for line in _wrap(console, f"  {label:<{_LABEL_CHARS}}{value}", indent=2 + _LABEL_CHARS):
        console.print(Text(line), soft_wrap=True)


def _wrap(console: Console, text: str, *, indent: int) -> list[str]:
    """Return `text` in lines of the terminal's width, later ones indented; one line in a pipe."""
    text = _fit(console, text)
    if not console.is_terminal:
        return [text]
    wrapped = textwrap.wrap(
        text, width=console.width, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return wrapped or [""]


def _fit(console: Console, text: str) -> str:
    """Return `text` with the characters that the console's encoding lacks as escapes."""
    encoding = console.encoding
    return escaping.text(text).encode(encoding, "backslashreplace").decode(encoding)
