"""A run as one self-contained HTML page: curves, scores, settings, versions, the ledger's digest.

No scripts and no requests. What comes from files, such as the names of classes, is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from entrenar_py.shared import process
from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.html_page import Line, Points, chart
from entrenar_py.shared.trace.writer import Mark
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.finetune import timeline
from entrenar_py.train.finetune.history import History
from entrenar_py.train.model.settings import Settings

FILE = "report.html"  # in the output folder
CLASSES_MAX = 40  # in the tables
CURVES_MAX = 6  # classes in a chart
_BADGES = {"completed": "held", "stopped": "inconclusive"}
_PACKAGES = ("transformers", "peft", "tokenizers", "safetensors", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: `status` with its `reason`, after `made` steps of `num_steps`.

    `ledger` is the last line of its ledger, None without one. `num_rows` counts rows that were
    trained on and rows that were evaluated on. `digest` is that of the trained tensors.
    """

    status: str
    reason: str
    made: int
    num_steps: int
    num_rows: tuple[int, int]
    ledger: Mark | None
    digest: str


def render(settings: Settings, outcome: Outcome, history: History) -> str:
    """Return the HTML document, with a line end."""
    return "\n".join(_document(settings, outcome, history)) + "\n"


def _document(settings: Settings, outcome: Outcome, history: History) -> Iterator[str]:
    name = f"{settings.method} of {settings.model.name}, task {settings.task}"
    yield from html_page.begin(f"{name}: {outcome.status}")
    badge = _BADGES.get(outcome.status, "falsified")
    status = f'<span class="verdict {badge}">{_text(outcome.status)}</span>'
    yield f"<header><h1>{_text(name)} {status}</h1>"
    if outcome.reason:
        yield f"<p>{_text(outcome.reason)}</p>"
    yield from _facts(_summary(settings, outcome))
    yield "</header>"
    yield from _curves(history)
    if history.evaluations:
        last = max(history.evaluations)
        yield from _scores(last, history.evaluations[last])
    yield from timeline.draw(history.passes, settings.training.num_shards)
    yield from _alerts(history)
    yield "<section><h2>Settings</h2>"
    yield from _facts(_flat(asdict(settings)))
    yield "</section><section><h2>Versions</h2>"
    yield from _facts([*process.environment().items(), *_versions()])
    yield f"</section>\n{html_page.END}"


def _summary(settings: Settings, outcome: Outcome) -> Iterator[tuple[str, str]]:
    trained, evaluated = outcome.num_rows
    yield "steps", f"{outcome.made:,} of {outcome.num_steps:,}"
    yield "rows", f"{trained:,} to train on, {evaluated:,} to evaluate on"
    yield "output", str(settings.output)
    yield "weights", f"{outcome.digest} (digest of what was trained)"
    if outcome.ledger is not None:
        lines = f"{outcome.ledger.line:,} lines, the last with digest {outcome.ledger.chain}"
        yield "ledger", f"{lines}; entrenar ledger verify {settings.output / 'ledger.jsonl'}"


# --- curves ---------------------------------------------------------------------------------------


def _curves(history: History) -> Iterator[str]:
    scored = dict(sorted(history.evaluations.items()))
    trained = Line(
        label="training (mean of each stretch)", points=_points(history.losses), colour=0
    )
    validated = Line(
        label="validation",
        points=_points({made: one["loss"] for made, one in scored.items()}),
        colour=1,
    )
    norms = {made: norm for made, norm in history.norms.items() if norm > 0}
    norm = Line(label="largest of each stretch, not clipped", points=_points(norms), colour=0)
    yield '<section><h2>Curves</h2><div class="charts">'
    yield from _chart("Loss", "loss", [trained, validated])
    yield from _chart("Norm of the gradient", "L2 norm", [norm], log=True)
    yield from _chart("Perplexity", "perplexity", [_line("validation", 1, scored, "perplexity")])
    yield from _chart("F1 of each class", "F1", [*_of_classes(scored)])
    yield "</div></section>"


def _chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False) -> Iterator[str]:
    drawn = [line for line in lines if line.points]
    if drawn:
        yield chart(title, unit, drawn, log=log)


def _line(label: str, colour: int, scored: Mapping[int, Mapping[str, Any]], key: str) -> Line:
    found = {made: one.get(key) for made, one in scored.items()}
    known = {made: value for made, value in found.items() if isinstance(value, int | float)}
    return Line(label=label, points=_points(known), colour=colour)


def _of_classes(scored: Mapping[int, Mapping[str, Any]]) -> Iterator[Line]:
    last = scored[max(scored)]["classes"] if scored else []
    for number, one in enumerate(last[:CURVES_MAX]):
        found = {made: scores["classes"][number] for made, scores in scored.items()}
        yield _line(str(one["label"]), number, found, "f1")


def _points(values: Mapping[int, float]) -> Points:
    return tuple((made, value) for made, value in sorted(values.items()) if math.isfinite(value))


# --- tables ---------------------------------------------------------------------------------------


def _scores(made: int, scores: Mapping[str, Any]) -> Iterator[str]:
    yield f"<section><h2>Validation after step {made:,}</h2>"
    facts = {"loss": scores["loss"], "perplexity": scores["perplexity"]}
    facts["accuracy"] = scores["accuracy"]
    yield from _facts((name, f"{value:.4f}") for name, value in facts.items() if value is not None)
    classes = scores["classes"][:CLASSES_MAX]
    if classes:
        columns = ("class", "recall", "precision", "F1")
        rows = [[one["label"], *(_share(one[key]) for key in _KEYS)] for one in classes]
        yield from _table(columns, rows)
        yield "<h3>Confusion: rows of a class (down), and what they were taken for (across)</h3>"
        labels = [one["label"] for one in classes]
        counts = [row[:CLASSES_MAX] for row in scores["confusion"][:CLASSES_MAX]]
        yield from _table(
            ("", *labels),
            [[label, *map(str, row)] for label, row in zip(labels, counts, strict=True)],
        )
        left = len(scores["classes"]) - len(classes)
        if left:
            yield f"<p>{left} more classes are in metrics.jsonl.</p>"
    yield "</section>"


_KEYS = ("recall", "precision", "f1")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th{_side(place)}>{_text(name)}</th>" for place, name in enumerate(columns))
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = (f"<td{_side(place)}>{_text(cell)}</td>" for place, cell in enumerate(row))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _side(place: int) -> str:
    return ' class="number"' if place else ""


def _alerts(history: History) -> Iterator[str]:
    total = sum(history.num_alerts.values())
    if not total:
        return
    counts = ", ".join(f"{number} {name}" for name, number in history.num_alerts.items())
    yield f"<section><h2>Alerts</h2><p>{_text(counts)}</p><ul>"
    yield from (f"<li>{_text(text)}</li>" for text in history.alerts)
    yield "</ul>"
    if total > len(history.alerts):
        yield f"<p>These are the last {len(history.alerts)}; metrics.jsonl has all.</p>"
    yield "</section>"


def _facts(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "<dl>"
    yield from (f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in rows)
    yield "</dl>"


def _flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and value of each setting, one in a section as `section.name`."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield f"{before}{name}", shown


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _text(text: str) -> str:
    return escaping.html(escaping.line(text))
