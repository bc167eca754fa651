"""Fine-tuning as in `entrenar finetune`, over the simulated star, and records of its results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.finetuned import records, small_run, textbook
from entrenar_py.systems.finetuned.records import Watched, WatchedPairs
from entrenar_py.systems.finetuned.small_run import Fixture, Request
from entrenar_py.systems.finetuned.textbook import PairTextbook, Textbook
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulation import SimulatedTransport
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.wire.terms import Run


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says, and record the facts that its option `facts` names.

    Raises UsageError without the extra `finetune`.
    """
    request = Request.of(scenario)
    with small_run.quiet(), tempfile.TemporaryDirectory() as folder:
        fixture = small_run.make(Path(folder), scenario, request)
        prepared = preparation.prepare(fixture.settings, Path(folder, "cache"))
        is_of_pairs = request.task == "preference"
        workload = prepared.workload(WatchedPairs if is_of_pairs else Watched)
        assert isinstance(workload, Watched), "it was asked for"
        training = _Training(scenario, workload, fixture)
        first = training.server.replicas.initial()
        begin = list(textbook.adapters("start", fixture, request, first))
        done = training.train()
        if done.end.status != "completed":
            return done
        events = (*begin, *training.frozen, *_facts(request, fixture, prepared, training, done))
    return replace(done, events=(*done.events[:-1], *events, done.events[-1]))


class _Training(ScenarioRun):
    """A run that records the untrained weights whenever its workers are started."""

    def __init__(self, scenario: Scenario, workload: Watched, fixture: Fixture) -> None:
        super().__init__(scenario, SimulatedTransport, workload)
        self.workload = workload
        self.frozen = [records.of_files(fixture.settings.model)]

    def begin(self, run: Run) -> None:
        """See `ScenarioRun`."""
        self.watch(f"before step {run.first_step}")
        super().begin(run)

    def watch(self, when: str) -> None:
        """Record the current untrained weights under the label `when`."""
        self.frozen.append(records.of_module(self.workload.module, when))


def _facts(
    request: Request, fixture: Fixture, prepared: Prepared, training: _Training, done: Trace
) -> Iterator[trace.Event]:
    """Yield the facts that the scenario requests in addition to the training run."""
    training.watch("after the training")
    yield training.frozen.pop()
    final = {name: array.copy() for name, array in training.server.replica.replica.arrays.items()}
    if "samples" in request.facts and isinstance(training.workload, WatchedPairs):
        yield from records.pair_events(fixture, prepared, training.workload)
    elif "samples" in request.facts:
        yield from records.sample_events(fixture, prepared, training.workload)
    if request.method == "qlora":
        yield from records.nf4_events(fixture, training.workload.module)
    if {"outputs", "merged"} & set(request.facts):
        yield textbook.written(fixture, prepared, training.workload.module, final)
    if "merged" in request.facts:
        yield from textbook.merged(fixture, request, prepared, final)
    if "gradients" in request.facts:
        shapes = {name: array.shape for name, array in final.items()}
        kind = PairTextbook if request.task == "preference" else Textbook
        yield from kind(fixture, request, shapes).steps(done)
