"""A distillation's loss and its gradient, of rows of logits that are drawn from the seed.

Options: `pairs` (rows), `vocabulary`, `top_k`, `alpha`, `temperatures` (the same rows are
computed at each), and `spread`, the standard deviation of the logits. With `alike` the student's
are the teacher's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.distill import loss, teacher
from entrenar_py.train.distill.loss import Taught

ROWS = 200  # of an event
_TARGETS = 7  # every so many rows' target is the teacher's first token


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a scenario. Raises UsageError for a value that is not possible."""

    pairs: int = 100
    vocabulary: int = 24
    top_k: int = 6
    alpha: float = 0.5
    temperatures: tuple[float, ...] = (2.0,)
    spread: float = 2.0
    alike: bool = False

    def __post_init__(self) -> None:
        for name in ("pairs", "vocabulary", "top_k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"options {name}={value!r}: use a whole number >= 1", field=name)
        if self.top_k > self.vocabulary:
            raise UsageError(
                f"options top_k={self.top_k}: use at most vocabulary={self.vocabulary}",
                field="top_k",
            )
        for name, value, most in (("alpha", self.alpha, 1), ("spread", self.spread, 1e6)):
            if type(value) not in (int, float) or not 0 <= value <= most:
                allowed = f"a number from 0 to {most:g}"
                raise UsageError(f"options {name}={value!r}: use {allowed}", field=name)
        for value in self.temperatures:
            if type(value) not in (int, float) or not 0 < value <= 1e6:
                raise UsageError(
                    f"options temperatures={value!r}: use a number > 0, at most 1e6",
                    field="temperatures",
                )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        """Return what `options` ask for."""
        arguments = dict(options)
        temperatures = arguments.pop("temperatures", (2.0,))
        if not isinstance(temperatures, list | tuple) or not temperatures:
            raise UsageError(
                f"options temperatures={temperatures!r}: use a list of numbers > 0",
                field="temperatures",
            )
        return cls(**arguments, temperatures=tuple(temperatures))


def run(scenario: Scenario) -> trace.Trace:
    """Record Softened events. Raises UsageError for options that are not possible."""
    recorder = Recorder(scenario)
    for event in _events(scenario, Request.of(scenario.options)):
        recorder.emit(event)
    return recorder.finish(status="completed")


def _events(scenario: Scenario, request: Request) -> Iterator[trace.Softened]:
    draw = scenario.rng("logits")
    for start in range(0, request.pairs, ROWS):
        shape = min(ROWS, request.pairs - start), request.vocabulary
        both = [torch.from_numpy(draw.normal(0, request.spread, shape)).float() for _ in range(2)]
        targets = torch.from_numpy(draw.integers(request.vocabulary, size=shape[0]))
        targets[::_TARGETS] = both[1].argmax(-1)[::_TARGETS]
        for temperature in request.temperatures:
            student = both[1] if request.alike else both[0]
            yield measured(student, both[1], targets, request, temperature)


def measured(
    student: Tensor, taught: Tensor, targets: Tensor, request: Request, temperature: float
) -> trace.Softened:
    """Return what the trainer makes of logits [n, vocabulary], and of targets [n].

    The head is the identity, and its products exact: the last hidden states are the logits.
    """
    size, form = request.vocabulary, torch.float32
    kept = teacher.kept_of(taught.clone(), top_k=request.top_k, known=size, stored=form)
    tokens, head = kept.tokens.long(), torch.eye(request.vocabulary)
    mix = loss.Mix(request.alpha, temperature, request.top_k < request.vocabulary)
    hidden = student.clone().requires_grad_()
    rows = Taught(targets, tokens, kept.log_probabilities, kept.rest)
    whole = loss.of_hidden(hidden, head, rows, mix)
    (gradient,) = torch.autograd.grad(whole, hidden)
    with torch.no_grad():
        losses = []
        for n in range(len(student)):
            one = slice(n, n + 1)
            of_row = Taught(*(part[one] for part in rows))
            losses.append(float(loss.of_hidden(student[one], head, of_row, mix)))
    return trace.Softened(
        alpha=float(request.alpha),
        temperature=float(temperature),
        vocabulary=request.vocabulary,
        top_k=request.top_k,
        student=_flat(student),
        teacher=_flat(taught),
        targets=tuple(targets.tolist()),
        tokens=tuple(tokens.flatten().tolist()),
        log_probabilities=_flat(kept.log_probabilities),
        rest=_flat(kept.rest.exp()),
        losses=tuple(losses),
        gradients=_flat(gradient),
    )


def _flat(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.flatten().tolist())
