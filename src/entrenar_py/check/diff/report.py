"""What a comparison has shown, as lines for the terminal, as JSON, and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import entrenar_py
from entrenar_py.check.diff import judge, sources
from entrenar_py.check.diff.comparison import EQUAL, REAL, ROUNDING, UNKNOWN, Outcome
from entrenar_py.check.diff.judge import Difference
from entrenar_py.check.rank_files import border_file
from entrenar_py.shared.page import html_page
from entrenar_py.shared.page.html_page import Line, chart
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted, listed

VERSION = 1
_SHOWN = 3  # of what differs outside
_ROWS_MAX, _STEPS_MAX = 80, 60  # of the heat map
# Kinds of values that code between modules computes.
_IN_CODE = (
    *(border_file.INPUT, border_file.INPUT_GRADIENT, border_file.OUTPUT_GRADIENT),
    border_file.LOSS,
)
_WORDS = {
    EQUAL: "equal: all compared bits are the same",
    ROUNDING: "rounding: no difference is larger than rounding makes it",
    REAL: "a real difference: rounding does not explain it",
    UNKNOWN: "can't be told",
}


def lines(outcome: Outcome) -> list[str]:
    """Return about ten lines for the terminal, the verdict first."""
    first, second = outcome.names
    text = [f"{first} and {second}: {_WORDS[outcome.verdict]}"]
    text += [f"reason: {outcome.reason}"] if outcome.reason else []
    difference = outcome.difference
    if difference is not None:
        title = "first real difference" if outcome.verdict == REAL else "first bits that differ"
        text += [f"{title}: {place(difference)}", f"{size(difference)}"]
        text += _began(outcome)
        text += _source(outcome) + _operation(outcome)
    for name, modules in zip(outcome.names, (outcome.only_first, outcome.only_second), strict=True):
        text += [f"only {name} calls {listed(modules, most=_SHOWN)}"] if modules else []
    text += _explained(outcome)
    for title, known in (
        ("differs before", outcome.surroundings),
        ("differs inside", outcome.facts),
    ):
        shown = [f"{name} ({one or '-'} | {other or '-'})" for name, (one, other) in known.items()]
        text += [f"{title}: {listed(shown, most=_SHOWN)}"] if shown else []
    if outcome.judgement is not None:
        text.append(_compared(outcome))
        text += [f"note: {note}" for note in [*outcome.judgement.alignment.notes][:_SHOWN]]
    if outcome.verdict == REAL:
        text += [f"note: {problem}" for problem in outcome.problems]
    return text


def place(difference: Difference) -> str:
    """Return where a difference is: step, rank, phase, module and value."""
    border = difference.border
    micro_batch = f", micro-batch {border.micro_batch}" if border.micro_batch > 0 else ""
    call = f", call {border.call}" if border.call else ""
    where = border.where
    if not where and border.kind in _IN_CODE:
        is_inner = border.name and border.kind != border_file.LOSS
        where = "the model" if is_inner else "the script"
    is_root = border.kind in (border_file.INPUT, border_file.OUTPUT) and not border.name
    inside = f" in {where}" if where and where != border.name and not is_root else ""
    if border.kind == border_file.RATE:
        parameters = [name for name, *_ in differing_settings(difference)]
        more = f" and {len(parameters) - 1} more" if parameters[1:] else ""
        named = f"{border.kind} {border.name}"
        named += f" of {parameters[0]}{more}" if parameters else ""
    elif border.kind == border_file.LOSS:
        named = border.kind
    else:
        named = f"{border.kind} of {border.name or 'the model'}"
    return (
        f"step {border.step}, rank {difference.rank}{micro_batch}, {border.phase}{inside}: "
        f"{named}{call}"
    )


def size(difference: Difference) -> str:
    """Return how large a difference is, compared with rounding."""
    first, second = difference.first, difference.second
    if first is None or second is None:
        only = "B" if first is None else "A"
        return f"only {only} has a value there, with norm {difference.border.scale:.2g}"
    if not math.isfinite(difference.distance):
        if first.shape != second.shape:
            return f"its shapes are {list(first.shape)} and {list(second.shape)}"
        return "it is not the same, exactly or in its infinite values"
    values = [(own, other) for _, own, other in differing_settings(difference)]
    if first.numbers is not None and second.numbers is not None and len(first.numbers) == 1:
        values = values or [(first.numbers[0], second.numbers[0])]
    if values:
        own, other = values[0]
        return (
            f"{own:.8g} and {other:.8g}; rounding makes a difference of {difference.limit:.2g} at "
            "most"
        )
    return (
        f"distance {difference.distance:.2g} at norm {difference.border.scale:.2g}; rounding makes "
        f"{difference.limit:.2g} at most (spread {difference.spread:.2g})"
    )


def differing_settings(difference: Difference) -> list[tuple[str, float, float]]:
    """Return the parameters with different settings and both values, the largest difference first.

    The list is empty for other values, and for a setting of a group.
    """
    first, second = difference.first, difference.second
    if first is None or second is None or difference.border.kind != border_file.RATE:
        return []
    if not first.text or first.numbers is None or second.numbers is None:
        return []
    rows = zip(first.text.split("\n"), first.numbers, second.numbers, strict=False)
    differing = [(name, float(own), float(far)) for name, own, far in rows if own != far]
    return sorted(differing, key=lambda row: -abs(row[1] - row[2]))


def _began(outcome: Outcome) -> list[str]:
    """Return what differences before the first step mean: all later ones may follow from them."""
    difference = outcome.difference
    if outcome.verdict != REAL or difference is None or difference.border.phase != "start":
        return []
    return [
        "they begin with different weights: an initialisation was changed, by the script or by a "
        "library between its versions, or has drawn other numbers",
        "to compare what comes after, let both begin from one checkpoint",
    ]


def _source(outcome: Outcome) -> list[str]:
    source = outcome.source
    if source is None:
        return []
    what = sources.WORDS.get(source.kind, "of a kind that the record doesn't show")
    of = f" ({source.detail})" if source.detail else ""
    at = f"{source.file}:{source.line}" if source.line else "the library"
    text = [f"source: {at}: {what}{of}"]
    if outcome.step_ms is not None:
        usual, ordered = outcome.step_ms
        text.append(
            "torch.use_deterministic_algorithms(True) makes the runs equal: a step takes "
            f"{ordered:.3g} ms in place of {usual:.3g} ms ({ordered / usual:.2f} times)"
        )
    return text


def _operation(outcome: Outcome) -> list[str]:
    culprit, judgement = outcome.culprit, outcome.judgement
    if culprit is None:
        return []
    text = []
    for name, operation, site, caller in (
        (outcome.names[0], culprit.first, culprit.first_site, culprit.first_caller),
        (outcome.names[1], culprit.second, culprit.second_site, culprit.second_caller),
    ):
        at = f" in {culprit.where}" if culprit.where and operation else ""
        at += f" at {site}" if site else ""
        at += f", called at {caller}" if caller else ""
        text.append(f"operation of {name}: {operation or 'none'}{at}")
    is_explained = outcome.facts or outcome.source or (judgement and judgement.explaining)
    if outcome.verdict == REAL and culprit.is_alike and not is_explained:
        text.append(
            "these calls are alike: they get other tensors, such as a mask, a constant or a view"
        )
    return text


def _explained(outcome: Outcome) -> list[str]:
    since: dict[str, int] = {}
    for pair in () if outcome.judgement is None else outcome.judgement.explaining:
        is_generator = pair.first.kind == border_file.GENERATOR
        what = f"the generator {pair.first.name} differs" if is_generator else "the samples differ"
        since.setdefault(what, pair.first.step)
    return [f"before it: {what} since step {step}" for what, step in since.items()]


def _compared(outcome: Outcome) -> str:
    assert outcome.judgement is not None, "something was compared"
    differences = outcome.judgement.differences
    steps = len({one.border.step for one in differences})
    finite = [one.ratio for one in differences if one.first and one.second]
    most = max(finite, default=0.0)
    compared = f"compared: {counted(len(differences), 'value')} of {counted(steps, 'step')}"
    if not outcome.num_disturbed:
        return compared
    return (
        f"{compared}, with {counted(outcome.num_disturbed, 'disturbed run')} of "
        f"{outcome.names[0]}; the largest distance is {most:.2g} of what rounding makes"
    )


# --- JSON -----------------------------------------------------------------------------------------


def record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as values for JSON; numbers that are not finite are null."""
    culprit, judgement = outcome.culprit, outcome.judgement
    differences = () if judgement is None else judgement.differences
    real = None if judgement is None else judgement.real
    if outcome.verdict == REAL:
        real = outcome.difference
    return {
        "version": VERSION,
        "entrenar": entrenar_py.__version__,
        "verdict": outcome.verdict,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "first_real": _place(real),
        "first_bits": None if judgement is None else _place(judgement.bits),
        "operation": None
        if culprit is None
        else {
            "module": culprit.where,
            "first": culprit.first,
            "second": culprit.second,
            "first_site": culprit.first_site,
            "second_site": culprit.second_site,
            "first_caller": culprit.first_caller,
            "second_caller": culprit.second_caller,
        },
        "source": None if outcome.source is None else asdict(outcome.source),
        "step_ms": outcome.step_ms and [*outcome.step_ms],
        "only_first": [*outcome.only_first],
        "only_second": [*outcome.only_second],
        "surroundings": {name: [*both] for name, both in outcome.surroundings.items()},
        "facts": {name: [*both] for name, both in outcome.facts.items()},
        "notes": [] if judgement is None else [*judgement.alignment.notes],
        "problems": [*outcome.problems],
        "num_compared": len(differences),
        "num_disturbed": outcome.num_disturbed,
        "losses": [
            {str(step): _finite(loss) for step, loss in losses.items()} for losses in outcome.losses
        ],
        "ratios": [
            {"module": module, "step": step, "ratio": _finite(ratio)}
            for (module, step), ratio in judge.heat(differences).items()
        ],
    }


def _place(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    border = difference.border
    return {
        "step": border.step,
        "rank": difference.rank,
        "micro_batch": border.micro_batch,
        "phase": border.phase,
        "kind": border.kind,
        "name": border.name,
        "module": border.where or next((row[0] for row in differing_settings(difference)), ""),
        "call": border.call,
        "part": border.part,
        "distance": _finite(difference.distance),
        "spread": _finite(difference.spread),
        "limit": _finite(difference.limit),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


# --- HTML -----------------------------------------------------------------------------------------

_BADGES = {EQUAL: "held", ROUNDING: "held", REAL: "falsified", UNKNOWN: "inconclusive"}
# Colours of the heat map, by the power of ten of the distance over what rounding makes.
_HEAT = ((1.0, "var(--green)"), (10.0, "var(--amber)"), (math.inf, "var(--red)"))


def page(outcome: Outcome) -> str:
    """Return one HTML page, with the first real difference on top."""
    return "\n".join(_document(outcome)) + "\n"


def _document(outcome: Outcome) -> Iterator[str]:
    yield from html_page.begin(f"entrenar-check diff: {outcome.verdict}")
    badge = f'<span class="verdict {_BADGES[outcome.verdict]}">{outcome.verdict}</span>'
    yield f"<header><h1>entrenar-check diff {badge}</h1>"
    yield from (f"<p>{escaping.html(line)}</p>" for line in lines(outcome))
    yield "</header>"
    named = [
        Line(
            label=name,
            points=tuple((s, v) for s, v in losses.items() if math.isfinite(v)),
            colour=n,
        )
        for n, (name, losses) in enumerate(zip(outcome.names, outcome.losses, strict=True))
    ]
    if any(line.points for line in named):
        yield '<section><h2>Losses</h2><div class="charts">'
        yield chart("Loss", "loss", [line for line in named if line.points])
        yield "</div></section>"
    if outcome.judgement is not None and outcome.judgement.differences:
        yield from _heat_map(judge.heat(outcome.judgement.differences))
    yield from _table("Differs before anything ran", outcome, outcome.surroundings)
    yield from _table("Differs inside the processes", outcome, outcome.facts)
    yield f"<footer>entrenar-check {entrenar_py.__version__}</footer>\n{html_page.END}"


def _heat_map(ratios: Mapping[tuple[str, int], float]) -> Iterator[str]:
    modules = [*dict.fromkeys(module for module, _ in ratios)]
    steps = sorted({step for _, step in ratios})[:_STEPS_MAX]
    worst = {module: max(ratios.get((module, step), 0.0) for step in steps) for module in modules}
    kept = {*sorted(modules, key=lambda module: -worst[module])[:_ROWS_MAX]}
    yield (
        "<section><h2>Distance over what rounding makes</h2><p>By module and step; above 1 a "
        f"difference is real. Shown are {len(kept)} of {counted(len(modules), 'module')}.</p>"
        '<div class="wide"><table><thead><tr><th>module</th>'
    )
    yield "".join(f'<th class="number">{step}</th>' for step in steps) + "</tr></thead><tbody>"
    for module in modules:
        if module in kept:
            cells = "".join(_cell(ratios.get((module, step))) for step in steps)
            yield f'<tr><td class="name">{escaping.html(module or "(the script)")}</td>{cells}</tr>'
    yield "</tbody></table></div></section>"


def _cell(ratio: float | None) -> str:
    if ratio is None:
        return "<td></td>"
    colour = next(colour for limit, colour in _HEAT if ratio <= limit)
    shown = (
        "∞"
        if math.isinf(ratio)
        else "0"
        if not ratio
        else f"{ratio:.1e}"
        if ratio > 99
        else f"{ratio:.2g}"
    )
    return f'<td class="number" style="color:{colour}">{shown}</td>'


def _table(title: str, outcome: Outcome, known: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    if not known:
        return
    names = "".join(f"<th>{escaping.html(name)}</th>" for name in outcome.names)
    yield f'<section><h2>{title}</h2><div class="wide"><table><thead><tr><th></th>'
    yield f"{names}</tr></thead><tbody>"
    for name, both in known.items():
        cells = "".join(f"<td>{escaping.html(text or '-')}</td>" for text in both)
        yield f'<tr><td class="name">{escaping.html(name)}</td>{cells}</tr>'
    yield "</tbody></table></div></section>"
