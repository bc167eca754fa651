"""The section of the HTML report that draws runs: which are chosen, and their labels."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.curves import Curve
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.page.charts import Line, Points, chart
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted

TRAININGS_MAX = 6
LINES_MAX = 6


def section(report: Report) -> Iterator[str]:
    """Yield the section on losses and distances as HTML; nothing if no run was recorded."""
    groups = _groups(report)
    if not groups:
        return
    broken = _broken(report)
    drawn = sorted(groups.values(), key=lambda curves: _rank(curves, broken))[:TRAININGS_MAX]
    yield "<section><h2>Runs</h2>"
    yield (
        f"<p>{counted(len(report.curves), 'run')} of {counted(len(groups), 'training')} "
        f"reported losses. Drawn: {counted(len(drawn), 'training')}, those of falsified runs "
        "first, then those run with the most numbers of workers.</p>"
    )
    for curves in drawn:
        yield from _group(_chosen(curves, broken), broken)
    yield "</section>"


def _group(curves: Sequence[Curve], broken: frozenset[Scenario]) -> Iterator[str]:
    heading = evidence.describe_scenario(json.loads(curves[0].training))
    yield f"<h3>{escaping.html(evidence.one_line(heading))}</h3>"
    yield '<div class="charts">'
    if any(curve.losses for curve in curves):  # none where no loss was finite
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
    """Return the line of a curve, in the same colour in every chart of these `curves`."""
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
    """Return the scenarios of the counterexamples."""
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
    """Return at most LINES_MAX curves: counterexamples, then one for each system and world size."""
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
