"""What is noted of a user's steps, and is no counterexample."""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.check.clauses import step_rule
from entrenar_py.shared.trace import Start, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import summed, trace_of

RUN = trace_of([summed(step) for step in range(3)])


def notes(trace: Trace) -> list[str]:
    """Return what is noted of a run."""
    tally = Tally("F-TI-008")
    step_rule.tell_notes(tally, trace)
    return tally.notes


def test_an_ordinary_run_has_no_notes() -> None:
    """Nothing edited, no schedule, no decay."""
    assert notes(RUN) == []


def test_a_schedule_that_moves_too_far_is_noted() -> None:
    """Two positions a step, with two workers."""
    events = tuple(
        replace(event, schedule=2 * event.step) if isinstance(event, Update) else event
        for event in RUN.events
    )
    (note,) = notes(replace(RUN, events=events))
    assert "the schedule moves 2 positions in each step (world_size or accumulation)" in note


def test_decay_of_some_flat_tensors_is_noted() -> None:
    """Of two biases only one is decayed."""
    facts = {"decayed": ("a",), "trainable": ("a", "b"), "shapes": {"a": (6,), "b": (4,)}}
    (note,) = notes(traces.altered(RUN, Start, {}, **facts))
    assert note.startswith("weight decay acts on a, which has one dimension")
