"""A run as one self-contained HTML page: curves, scores, settings, versions, the ledger's digest.

It has no scripts and makes no requests. Text from files, such as names of classes, is escaped.

Curves are read back from the metrics, and show the whole run, however often it was resumed. Long
runs are thinned out while they are read, so that memory does not grow with the number of steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

from entrenar_py.shared import process
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.html_page import Line, Points, chart
from entrenar_py.shared.trace.writer import Mark
from entrenar_py.shared.untrusted import escaping, files, json_text
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.pipeline import Timed

_WIDTH, _ROW, _LEFT, _BOTTOM = 900, 26, 80, 30
PASSES_MAX = 2_000  # more passes are not drawn


def passes_of(record: Mapping[str, Any]) -> dict[int, list[Timed]]:
    """Return each rank's forward and backward passes in a metrics record; {} if it is malformed."""
    passes = dict[int, list[Timed]]()
    given = record.get("passes_us")
    for rank, times in given.items() if isinstance(given, dict) else ():
        if not rank.isdecimal() or not isinstance(times, list):
            return {}
        if not all(type(one) is int for one in times):
            return {}
        try:
            passes[int(rank)] = pipeline.decode(times)
        except ProtocolError:
            return {}
    return passes


def draw_passes(passes: Mapping[int, Sequence[Timed]], num_shards: int) -> Iterator[str]:
    """Yield a drawing of `passes` by rank, and a sentence on the time that stages waited."""
    every = [timed for of_rank in passes.values() for timed in of_rank]
    idle = pipeline.idle_share(passes)
    if idle is None or len(every) > PASSES_MAX:
        return
    start, end = min(timed.began for timed in every), max(timed.ended for timed in every)
    height = _ROW * len(passes) + _BOTTOM
    yield '<section><h2>Passes of the last step</h2><div class="wide">'
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="passes of each rank">'
    for row, (rank, of_rank) in enumerate(sorted(passes.items())):
        top = _ROW * row
        yield f'<text x="0" y="{top + 17}">rank {rank}</text>'
        yield from (_pass_box(timed, start, end, top) for timed in of_rank)
    span_ms = (end - start) / 1e3
    yield f'<text x="{_LEFT}" y="{height - 8}">0</text>'
    yield f'<text x="{_WIDTH}" y="{height - 8}" text-anchor="end">{span_ms:.1f} ms</text>'
    yield "</svg></div>"
    expected = (len(passes) - 1) / (num_shards + len(passes) - 1)
    text = (
        f"Dark: forward passes; in the last stage the backward pass, too. Light: backward passes. "
        f"{idle:.1%} of the time stages waited; equal stages that wait for nothing else do so for "
        f"(P - 1) / (S + P - 1) = {expected:.1%}, of P = {len(passes)} stages and S = {num_shards} "
        "shards."
    )
    yield f"<p>{escaping.html(text)}</p></section>"


def _pass_box(timed: Timed, start: int, end: int, top: int) -> str:
    scale = (_WIDTH - _LEFT) / (end - start)
    left = _LEFT + scale * (timed.began - start)
    width = max(1.0, scale * (timed.ended - timed.began))
    opacity = 0.9 if timed.is_forward else 0.4
    kind = "forward" if timed.is_forward else "backward"
    took_ms = (timed.ended - timed.began) / 1e3
    return (
        f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" '
        f'fill="currentColor" fill-opacity="{opacity}">'
        f"<title>shard {timed.shard}, {kind}: {took_ms:.1f} ms</title></rect>"
    )


POINTS_MAX = 400  # points of a curve
NOTES_MAX = 100
BEGINNINGS = ("listening", "began")  # a coordinator's run, and one of torchrun's ranks
ALERTS = ("spike", "halted", "left", "not_saved", "not_scored", "not_kept", "gap", "unchecked")


@dataclass
class History:
    """The measurements of a run, by the number of steps that were completed.

    Steps are grouped into stretches of equal length: `losses` are their means, `norms` their
    maxima. `alerts` has the texts of the last NOTES_MAX notes that are alerts; `num_alerts` counts
    all alerts by name. `evaluations` are records of `run_events.Scored`, by step. `passes` has the
    times of each rank's passes in the last step of a layer pipeline.
    """

    num_steps: int
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    num_alerts: Counter[str] = field(default_factory=Counter)
    passes: dict[int, list[Timed]] = field(default_factory=dict)
    _sums: dict[int, tuple[float, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def take(self, record: dict[str, Any]) -> None:
        """Add a record of the metrics. A record that is not one of `run_events` is ignored."""
        what, step = record.get("what"), record.get("step")
        if type(step) is not int:
            return
        if what == "step":
            self._take_step(step + 1, record)
        elif what == "evaluation" and _is_finite(record.get("loss")):
            self.evaluations[step] = record
        elif what in ALERTS and isinstance(record.get("text"), str):
            self.num_alerts[what] += 1
            self.alerts = [*self.alerts, record["text"]][-NOTES_MAX:]

    def _take_step(self, made: int, record: dict[str, Any]) -> None:
        length = -(-self.num_steps // POINTS_MAX) or 1
        place = min(-(-made // length) * length, self.num_steps)  # the end of the step's stretch
        self.passes = passes_of(record)
        loss, norm = record.get("loss"), record.get("grad_norm")
        if _is_finite(loss):
            total, count = self._sums[place]
            self._sums[place] = total + loss, count + 1
            self.losses[place] = (total + loss) / (count + 1)
        if _is_finite(norm):
            self.norms[place] = max(norm, self.norms.get(place, 0.0))


def read_history(path: Path, *, num_steps: int) -> History:
    """Return the history in the metrics at `path`, since the run last began at step 0.

    Raises OSError if the file can't be read. Incomplete lines are ignored.
    """
    history = History(num_steps)
    with files.open_file(path) as file:
        for line in files.lines(file):
            try:
                record = json_text.load(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            if record.get("what") in BEGINNINGS and record.get("step") == 0:
                history = History(num_steps)
            history.take(record)
    return history


def _is_finite(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


FILE = "report.html"  # in the output folder
CLASSES_MAX = 40  # classes in a table
CURVES_MAX = 6  # classes in a chart
_BADGES = {"completed": "held", "stopped": "inconclusive"}
_PACKAGES = ("transformers", "peft", "tokenizers", "safetensors", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run: `status` with its `reason`, after `made` steps of `num_steps`.

    `ledger` is the last line of its ledger, None without one. `num_rows` has the numbers of
    training rows and of validation rows. `digest` is the digest of the trained tensors.
    """

    status: str
    reason: str
    made: int
    num_steps: int
    num_rows: tuple[int, int]
    ledger: Mark | None
    digest: str


def render(settings: Settings, outcome: Outcome, history: History) -> str:
    """Return the HTML document, with a final line end."""
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
    yield from draw_passes(history.passes, settings.training.num_shards)
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
    yield "weights", f"{outcome.digest} (digest of the trained weights)"
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
        points=_points({step: score["loss"] for step, score in scored.items()}),
        colour=1,
    )
    norms = {step: norm for step, norm in history.norms.items() if norm > 0}
    norm = Line(label="largest of each stretch, not clipped", points=_points(norms), colour=0)
    yield '<section><h2>Curves</h2><div class="charts">'
    yield from _chart("Loss", "loss", [trained, validated])
    yield from _chart("Norm of the gradient", "L2 norm", [norm], log=True)
    yield from _chart("Perplexity", "perplexity", [_line("validation", 1, scored, "perplexity")])
    if any("margin" in one for one in scored.values()):
        accuracy = _line("validation", 1, scored, "accuracy")
        yield from _chart("Pairs with the higher reward for the chosen side", "share", [accuracy])
        yield from _chart("Mean margin", "reward", [_line("validation", 1, scored, "margin")])
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
    facts |= {"accuracy": scores["accuracy"], "margin": scores.get("margin")}
    yield from _facts((name, f"{value:.4f}") for name, value in facts.items() if value is not None)
    classes = scores["classes"][:CLASSES_MAX]
    if classes:
        columns = ("class", "recall", "precision", "F1")
        rows = [[row["label"], *(_share(row[key]) for key in _KEYS)] for row in classes]
        yield from _table(columns, rows)
        yield "<h3>Confusion: true class (down) and predicted class (across)</h3>"
        labels = [row["label"] for row in classes]
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
