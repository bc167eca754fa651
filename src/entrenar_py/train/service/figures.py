"""What a run tells its listeners, in words and numbers for people."""

from __future__ import annotations

import math

from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.service.run_events import Scored, StepMade

CLASSES_SHOWN = 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


def summary(step: StepMade) -> str:
    """Return one step in a line: loss, pace, workers, traffic, times, and who delivered last."""
    parts = [] if math.isnan(step.loss) else [f"loss {step.loss:.6g}"]
    if step.steps_per_s is not None:
        parts.append(f"{digits(step.steps_per_s)} steps/s")
    parts.append(f"workers {','.join(map(str, step.workers))}")
    parts += traffic(step)
    if step.exchange_ms is not None:
        parts.append(f"exchange {digits(step.exchange_ms)} ms")
    if step.reduce_ms is not None:
        parts.append(f"reduce {digits(step.reduce_ms)} ms")
    longest = max(step.waits_ms, key=step.waits_ms.__getitem__, default=None)
    if longest is not None and len(step.waits_ms) > 1:
        waited_ms = step.waits_ms[longest]
        parts.append(f"worker {longest} waited {digits(waited_ms)} ms")
    if step.idle_share is not None:
        parts.append(f"idle {step.idle_share:.0%}")
    if step.last is not None:
        parts.append(f"last worker {step.last.rank}, {digits(step.last.behind_ms)} ms behind")
    return "  ".join(parts)


def traffic(step: StepMade) -> list[str]:
    """Return the coordinator's traffic of a step as one text; none if there is no coordinator."""
    if step.bytes_in is None or step.bytes_out is None:
        return []
    return [f"in {size(step.bytes_in)} out {size(step.bytes_out)}"]


def scored(scores: Scored) -> str:
    """Return scores in a line: loss, perplexity or accuracy, and those of the first classes."""
    parts = [f"loss {scores.loss:.4f}"]
    if scores.perplexity is not None:
        parts.append(f"perplexity {scores.perplexity:.4g}")
    if scores.accuracy is not None:
        parts.append(f"accuracy {scores.accuracy:.3f}")
    for one in scores.classes[:CLASSES_SHOWN]:
        figures = {"recall": one.recall, "precision": one.precision, "F1": one.f1}
        told = [f"{name} {'-' if x is None else f'{x:.3f}'}" for name, x in figures.items()]
        parts.append(f"{escaping.line(one.label)} {' '.join(told)}")
    if len(scores.classes) > CLASSES_SHOWN:
        parts.append(f"and {len(scores.classes) - CLASSES_SHOWN} more classes")
    return ", ".join(parts)


def digits(number: float) -> str:
    """Format `number` with three digits, or more before the point, and never an exponent."""
    return f"{number:.3g}" if 1e-4 <= abs(number) < 999.5 else f"{number:.0f}"


def size(num_bytes: float) -> str:
    """Format `num_bytes` in decimal units, with three digits."""
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:  # from there on three digits are 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Format `seconds` as h:mm:ss."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
