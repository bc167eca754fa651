"""Fine-tuning by a layer pipeline: the protocol and stages of `entrenar coordinator`, simulated.

Each worker loads its stage's blocks from the checkpoint's files, as on a separate machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entrenar_py import compute as backends
from entrenar_py.shared import trace, wording, workers
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.finetuned import records, small_run
from entrenar_py.systems.finetuned.small_run import Fixture, Request
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulation import SimulatedTransport
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import LAYER_PIPELINE, StagePlan
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.member import StageHands, StageMember
from entrenar_py.train.stages.server import PipelineServer, workload_of
from entrenar_py.train.stages.stage_model import hidden_bytes_max, width_of
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import Run

_FACTS = ("gradients",)


def run(scenario: Scenario) -> Trace:
    """Train as `scenario` says; record the weights that stages don't train, and requested facts.

    Raises UsageError without the extra `finetune`, and for stages that don't fit the model.
    """
    request = Request.of(scenario)
    if unknown := set(request.facts) - {*_FACTS}:
        raise UsageError(f"options facts={min(unknown)!r} with stages: allowed is {_FACTS[0]}")
    with small_run.quiet(), tempfile.TemporaryDirectory() as folder:
        fixture = small_run.make(Path(folder), scenario, request)
        prepared = preparation.prepare(
            replace(fixture.settings, strategy=LAYER_PIPELINE), Path(folder, "cache")
        )
        training = _Training(scenario, prepared, request)
        done = training.train()
        if done.end.status != "completed":
            return replace(done, scenario=scenario)
        events: list[trace.Event] = [*training.frozen]
        if request.facts:
            events += _gradients(fixture, request, training, done)
    return replace(done, scenario=scenario, events=(*done.events[:-1], *events, done.events[-1]))


def _gradients(
    fixture: Fixture, request: Request, training: _Training, done: Trace
) -> Iterator[trace.Event]:
    arrays = training.server.replica.replica.arrays
    shapes = {name: array.shape for name, array in arrays.items()}
    return Textbook(fixture, request, shapes).steps(done)


class _Training(ScenarioRun):
    """A run by workers with stages; `frozen` has the weights that each worker doesn't train."""

    worker = PipelineWorker
    server: PipelineServer
    transport: SimulatedTransport

    def __init__(self, scenario: Scenario, prepared: Prepared, request: Request) -> None:
        workload = workload_of(prepared)
        self._prepared, self._module = prepared, workload.module
        self._cuts = [self._cut(part) for part in _parts(scenario, request)]
        options = {**scenario.options, workers.OPTION: workers.SERVER}
        # faults name ranks, so the number of workers must stay the same
        own = scenario.with_(options=options)
        server = PipelineServer(own, cut=self._cuts[0], workload=workload)
        self.frozen = [records.of_files(prepared.settings.model)]
        super().__init__(scenario, SimulatedTransport, server=server)

    def _cut(self, part: tuple[tuple[int, int], ...]) -> Cut:
        """Return the cut in which the worker of each rank has the blocks given by `part`."""
        of_blocks: dict[tuple[int, int], list[str]] = {}
        for rank, own in enumerate(part):
            of_blocks.setdefault(own, []).append(f"worker {rank}")
        stages = tuple(StagePlan(layers=own, worker=tuple(of)) for own, of in of_blocks.items())
        return cutting.of(replace(self._prepared.settings, stages=stages), self._module)

    def run_of(self, first: int, last: int) -> Run:
        """See `ScenarioRun`; each part of a run has its own cut."""
        number = sum(stop <= first for stop in set(self.scenario.stops))
        self.server.cut_by(self._cuts[min(number, len(self._cuts) - 1)])
        return super().run_of(first, last)

    def member(self) -> StageHands:
        """See `ScenarioRun`."""
        cut, samples = self.server.cut, self._prepared.train
        return StageHands(
            cut,
            lambda stage: self._member(cut, stage),
            hidden_bytes=hidden_bytes_max(width_of(self._module), samples, self.scenario),
        )

    def _member(self, cut: Cut, stage: int) -> StageMember:
        workload = stage_model.load_stage(self._prepared, cut, stage)
        own = cut.stages[stage]
        when = f"in {wording.spanned('block', own)}"
        self.frozen.append(records.of_module(workload.module, when))
        return StageMember(
            self.server.plan,
            backends.open_backend("cpu"),
            workload,
            faults=self.scenario.faults,
            every=cut.blocks,
            stage=stage,
            clock=lambda: self.transport.simulation.now,
        )


def _parts(scenario: Scenario, request: Request) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the blocks (first, end) of each rank in each part of the run; some ranks are copies.

    Cuts beyond the run's parts are for the same run with more stops. Raises UsageError for cuts
    with different numbers of workers.
    """
    size = scenario.world_size
    if not request.cuts:
        stages = cutting.equal(request.blocks, min(size, request.blocks))
        copies = sharding.cut(range(size), len(stages))
        return (
            tuple(stage.layers for stage, own in zip(stages, copies, strict=True) for _ in own),
        )
    for part in request.cuts:
        if len(part) != size:
            raise UsageError(f"options cuts: {part} are blocks of {len(part)} workers, not {size}")
    return request.cuts
