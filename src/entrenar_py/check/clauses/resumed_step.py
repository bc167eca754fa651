"""Explain a first step after a resume that differs although all that was recorded was restored.

Weights, optimizer state, rates and the gradient are then those of the run without stops. What is
left are copies of the weights that an optimizer steps, and constants that it was made with.
"""

from __future__ import annotations

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes.resumes import Resume, resumes
from entrenar_py.check.evidence import closeness, step_sums
from entrenar_py.shared.trace import Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally


def compare(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare the weights after each resume's first step, where nothing recorded explains them."""
    expected, made = evidence.updates(straight), evidence.updates(trace)
    for resume in resumes(trace):
        start = resume.start
        model, update = (steps.get(start.step, {}).get(start.rank) for steps in (expected, made))
        if model is None or update is None or not _rests_on_the_same(resume, model, update):
            continue
        message = (
            f"rank {start.rank} resumed at step {start.step} with the weights and the optimizer "
            "state that it had, its gradient and rate are right, and the step is another one"
        )
        place = evidence.place(trace, update)
        words = _cause(resume, update)
        closeness.compare_exact(tally, model.weights, update.weights, message, words=words, **place)


def _rests_on_the_same(resume: Resume, model: Update, update: Update) -> bool:
    before, start = resume.before, resume.start
    pairs = [(model.gradient, update.gradient)]
    if before is not None:
        pairs += [(before.weights, start.weights), (before.optimizer, start.optimizer)]
    known = (
        before is not None
        and bool(model.gradient)
        and closeness.first_unlike_rates(model, update) is None
    )
    return known and all(_digests(left) == _digests(right) for left, right in pairs)


def _digests(tensors: Tensors) -> dict[str, str]:
    return {name: record.digest for name, record in tensors.items()}


def _cause(resume: Resume, update: Update) -> str:
    """Return what was not restored: copies, if the weights went back to those of the beginning."""
    first = resume.begun.get(resume.start.rank)
    general = (
        "what the optimizer was made with (decay, momentum), or copies of the weights that it "
        "steps, were not restored"
    )
    held = [resume.start.weights, update.weights, {} if first is None else first.weights]
    known = [vectors for vectors in map(evidence.vectors, held) if vectors is not None]
    sizes = [{name: vector.size for name, vector in vectors.items()} for vectors in known]
    if len(known) < len(held) or any(other != sizes[0] for other in sizes):
        return general
    was, came, begun = (step_sums.joined(vectors, vectors.keys()) for vectors in known)
    if not np.linalg.norm(came - begun) < np.linalg.norm(came - was):  # so for NaN, too
        return general
    return (
        "it went back to nearly what it was before the first step: the optimizer steps copies of "
        "the weights, which were made before the checkpoint was read"
    )
