"""The report as one self-contained HTML page, to print or mail.

Text from a contract is escaped, and the page's own policy forbids scripts and requests. Runs that
reported losses are drawn, counterexamples first: the loss at each step, and the distance from the
run with one worker. `Curves` keeps only these numbers of judged runs, not whole traces.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

import entrenar_py
from entrenar_py.check.evidence import any_rank, updates, with_losses
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Report
from entrenar_py.shared import mutants
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.html_page import Line, Points, chart
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Tensors, Trace
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict
from entrenar_py.shared.wording import counted

# Fields in which runs of the same training may differ; all other fields must be equal.
_FREE = (
    *("system", "world_size", "num_shards", "backends", "faults", "stops", "repeat", "mutant"),
    *("detail", "accumulation"),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curves of one run: its losses, and its distances from the run with one worker.

    - `training`: a text that is equal for curves that may be drawn together.
    - `distances`: for each step, the largest absolute difference of any weight on any rank
      (`of_weights`), or of the loss if the traces kept no values. It is empty if the run was not
      compared with a run on one worker.
    - `strange`: the first step with a loss that is not finite. Such losses are not in `losses`.
    """

    scenario: Scenario
    training: str
    losses: Points
    distances: Points = ()
    of_weights: bool = False
    strange: int | None = None


class Curves:
    """Collects the curves of all training runs that are judged."""

    def __init__(self) -> None:
        self._found: dict[Scenario, Curve] = {}

    @property
    def found(self) -> tuple[Curve, ...]:
        """One curve for each run, in the order in which the runs were judged."""
        return tuple(self._found.values())

    def see(self, traces: Sequence[Trace]) -> None:
        """Add the curves of the judged run, `traces[0]`, and of the runs it was compared with."""
        for trace in traces:
            key = trace.scenario
            curve = self._found.get(key) or _curve(trace)
            if curve is None:
                continue
            self._found[key] = curve
            if trace is traces[0] and not curve.distances:
                alone = _alone(curve, traces[1:])
                if alone is not None:
                    distances, of_weights = _distances(alone, trace)
                    self._found[key] = replace(curve, distances=distances, of_weights=of_weights)


def training(scenario: Scenario) -> str:
    """Return a text that is equal for runs that should end with the same weights."""
    fields = scenario.to_dict()
    return json.dumps({name: fields[name] for name in fields if name not in _FREE}, sort_keys=True)


def _curve(trace: Trace) -> Curve | None:
    losses = _losses(trace)
    if not losses:
        return None
    strange = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
    return Curve(
        scenario=trace.scenario,
        training=training(trace.scenario),
        losses=_finite(losses),
        strange=strange,
    )


def _alone(curve: Curve, others: Sequence[Trace]) -> Trace | None:
    """Return the run of the same training on one worker, without faults or stops, or None."""
    if curve.scenario.world_size == 1:
        return None
    for other in others:
        calm = not (other.scenario.faults or other.scenario.stops)
        if other.scenario.world_size == 1 and calm and training(other.scenario) == curve.training:
            return other
    return None


def _losses(trace: Trace) -> dict[int, float]:
    steps = updates(with_losses(trace.standing))
    reported = {step: any_rank(by_rank).loss for step, by_rank in sorted(steps.items())}
    return {step: loss for step, loss in reported.items() if loss is not None}


def _distances(alone: Trace, trace: Trace) -> tuple[Points, bool]:
    expected = updates(alone)
    distances: dict[int, float] = {}
    for step, by_rank in sorted(updates(trace).items()):
        if step in expected:
            alone_update = any_rank(expected[step])
            apart = [_largest(alone_update.weights, update.weights) for update in by_rank.values()]
            if None in apart:
                return _loss_distances(alone, trace), False
            distances[step] = max(value for value in apart if value is not None)
    return _finite(distances), True


def _loss_distances(alone: Trace, trace: Trace) -> Points:
    expected, got = _losses(alone), _losses(trace)
    return _finite({step: abs(got[step] - expected[step]) for step in got if step in expected})


def _largest(expected: Tensors, got: Tensors) -> float | None:
    """Return the largest absolute difference of two elements; None if values can't be compared."""
    largest = 0.0
    for name in expected.keys() | got.keys():
        left, right = expected.get(name), got.get(name)
        if left is None or right is None:
            return None
        if left.digest == right.digest:
            continue
        a, b = left.values(), right.values()
        if a is None or b is None or a.size != b.size:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            largest = max(largest, float(np.abs(a.astype(np.float64) - b).max()))
    return largest


def _finite(values: dict[int, float]) -> Points:
    return tuple((step, value) for step, value in values.items() if math.isfinite(value))


TRAININGS_MAX = 6
LINES_MAX = 6


def section(report: Report) -> Iterator[str]:
    """Yield the HTML of the section on losses and distances; nothing if there are no curves."""
    groups = _groups(report)
    if not groups:
        return
    broken = _broken(report)
    drawn = sorted(groups.values(), key=lambda curves: _rank(curves, broken))[:TRAININGS_MAX]
    yield "<section><h2>Runs</h2>"
    yield (
        f"<p>{counted(len(report.curves), 'run')} of {counted(len(groups), 'training')} reported "
        f"losses. Drawn: {counted(len(drawn), 'training')}, trainings with falsified runs first, "
        "then trainings with the most different numbers of workers.</p>"
    )
    for curves in drawn:
        yield from _group(_chosen(curves, broken), broken)
    yield "</section>"


def _group(curves: Sequence[Curve], broken: frozenset[Scenario]) -> Iterator[str]:
    heading = evidence.describe_scenario(json.loads(curves[0].training))
    yield f"<h3>{escaping.html(evidence.one_line(heading))}</h3>"
    yield '<div class="charts">'
    if any(curve.losses for curve in curves):  # no chart if no loss was finite
        lines = [_line(curves, curve, curve.losses, broken) for curve in curves]
        yield chart("Loss", "loss", lines)
    compared = [curve for curve in curves if curve.distances]
    apart = [curve for curve in compared if any(value for _, value in curve.distances)]
    if apart:
        lines = [_line(curves, curve, curve.distances, broken) for curve in apart]
        yield chart("Distance from the run with one worker", _unit(apart), lines, log=True)
    yield "</div>"
    if not compared:
        yield "<p>None was compared with a run of the same training on one worker.</p>"
    elif len(apart) < len(compared):
        same = (_label(curve, broken) for curve in compared if curve not in apart)
        names = ", ".join(map(escaping.html, same))
        yield f"<p>No distance from the run with one worker at any step: {names}.</p>"


def _line(
    curves: Sequence[Curve], curve: Curve, points: Points, broken: frozenset[Scenario]
) -> Line:
    return Line(label=_label(curve, broken), points=points, colour=curves.index(curve))


def _unit(curves: Sequence[Curve]) -> str:
    if all(curve.of_weights for curve in curves):
        return "max |w − w₁|"
    if not any(curve.of_weights for curve in curves):
        return "|loss − loss₁|"
    return "of weights, or else of losses"


def _groups(report: Report) -> dict[str, list[Curve]]:
    groups: dict[str, list[Curve]] = defaultdict(list)
    for curve in report.curves:
        groups[curve.training].append(curve)
    return groups


def _broken(report: Report) -> frozenset[Scenario]:
    counterexamples = [entry.finding.counterexample for entry in report.entries]
    return frozenset(
        Scenario.from_dict(example.scenario)
        for example in counterexamples
        if example is not None and example.scenario is not None
    )


def _rank(curves: Sequence[Curve], broken: frozenset[Scenario]) -> tuple[int, int, int]:
    sizes = {curve.scenario.world_size for curve in curves}
    steps = max(len(curve.losses) for curve in curves)
    return -sum(curve.scenario in broken for curve in curves), -len(sizes), -steps


def _chosen(curves: Sequence[Curve], broken: frozenset[Scenario]) -> list[Curve]:
    first: dict[tuple[str, int], Curve] = {}
    for curve in sorted(curves, key=lambda curve: (_disturbed(curve), not curve.distances)):
        first.setdefault((curve.scenario.system, curve.scenario.world_size), curve)
    counterexamples = [curve for curve in curves if curve.scenario in broken]
    kept = list(dict.fromkeys([*counterexamples, *first.values()]))[:LINES_MAX]
    return sorted(kept, key=lambda curve: (curve.scenario.world_size, curve.scenario.system))


def _disturbed(curve: Curve) -> bool:
    scenario = curve.scenario
    return bool(scenario.faults or scenario.stops or scenario.mutant)


def _label(curve: Curve, broken: frozenset[Scenario]) -> str:
    scenario = curve.scenario
    parts = [f"{scenario.system}, {counted(scenario.world_size, 'worker')}"]
    parts += ["counterexample"] if scenario in broken else []
    parts += [fault.kind for fault in scenario.faults]
    parts += ["stopped and resumed"] if scenario.stops else []
    parts += [f"mutant {scenario.mutant}"] if scenario.mutant else []
    parts += [f"not finite at step {curve.strange}"] if curve.strange is not None else []
    return evidence.one_line(", ".join(parts))


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
    yield from html_page.begin(evidence.one_line(f"{name}: {report.verdict}"))
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
    yield from section(report)
    yield from _planted(report.ranked)
    yield from _environment(report)
    yield f"<footer>entrenar-check {entrenar_py.__version__}</footer>\n{html_page.END}"


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
    """Yield the HTML of a table of planted bugs, each with the clauses that it must break."""
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
    return escaping.html(text)
