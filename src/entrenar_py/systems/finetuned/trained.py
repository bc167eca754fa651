"""A fine-tuning as `entrenar finetune` makes it, over the simulated star, and what became of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.finetuned import frozen, nf4, outputs, samples_seen, small
from entrenar_py.systems.finetuned.asked import Asked
from entrenar_py.systems.finetuned.samples_seen import Watched
from entrenar_py.systems.finetuned.small import Made
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulated import SimulatedTransport
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.wire.terms import Run


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says, and record the facts that its option `facts` names.

    Raises UsageError without the extra `finetune`.
    """
    asked = Asked.of(scenario)
    with small.quiet(), tempfile.TemporaryDirectory() as folder:
        made = small.make(Path(folder), scenario, asked)
        prepared = preparation.prepare(made.settings, Path(folder, "cache"))
        workload = prepared.workload(Watched)
        assert isinstance(workload, Watched), "it was asked for"
        training = _Training(scenario, workload, made)
        first = training.server.initial()
        begin = list(outputs.adapters("start", made, asked, first))
        done = training.train()
        if done.end.status != "completed":
            return done
        events = (*begin, *training.frozen, *_facts(asked, made, prepared, training, done))
    return replace(done, events=(*done.events[:-1], *events, done.events[-1]))


class _Training(ScenarioRun):
    """A run that records the weights that aren't trained whenever its workers are started."""

    def __init__(self, scenario: Scenario, workload: Watched, made: Made) -> None:
        super().__init__(scenario, SimulatedTransport, workload)
        self.workload = workload
        self.frozen = [frozen.of_files(made.settings.model)]

    def begin(self, run: Run) -> None:
        """See `ScenarioRun`."""
        self.watch(f"before step {run.first_step}")
        super().begin(run)

    def watch(self, when: str) -> None:
        """Record the weights that aren't trained."""
        self.frozen.append(frozen.of_module(self.workload.module, when))


def _facts(
    asked: Asked, made: Made, prepared: Prepared, training: _Training, done: Trace
) -> Iterator[trace.Event]:
    """Yield what the scenario asks for beside the training."""
    training.watch("after the training")
    yield training.frozen.pop()
    final = {name: array.copy() for name, array in training.server.replica.replica.arrays.items()}
    if "samples" in asked.facts:
        yield from samples_seen.events(made, prepared, training.workload)
    if asked.method == "qlora":
        yield from nf4.events(made, training.workload.module)
    if {"outputs", "merged"} & set(asked.facts):
        yield outputs.written(made, prepared, training.workload.module, final)
    if "merged" in asked.facts:
        yield from outputs.merged(made, asked, prepared, final)
    if "gradients" in asked.facts:
        shapes = {name: array.shape for name, array in final.items()}
        yield from Textbook(made, asked, shapes).steps(done)
