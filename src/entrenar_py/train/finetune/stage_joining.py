"""Joins a layer pipeline: a worker learns the stages, then loads the one that it gets.

Of the checkpoint's weights it fetches only the files with blocks of its stage.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from entrenar_py.shared import wording
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import files as own_files
from entrenar_py.train.arithmetic.blocks import Layout
from entrenar_py.train.finetune import received_run
from entrenar_py.train.finetune.package import WEIGHTS, Contents, File
from entrenar_py.train.finetune.received_files import ReceivedFiles
from entrenar_py.train.model import blocks, model
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.service import worker
from entrenar_py.train.service.worker import Stay
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_files, stage_loading
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.member import StageMember
from entrenar_py.train.stages.stage_hands import StageHands
from entrenar_py.train.stages.stage_workload import hidden_bytes_max, width_of
from entrenar_py.train.wire.effects import Effect, Finish, Send
from entrenar_py.train.wire.messages import Loaded
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import Terms, Timing
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.queries import Source, Told
from entrenar_py.train.wire_io.tcp import PipelineClient

INDEX_BYTES_MAX = 2**26  # a weight's name and its file's take some 150


async def obtain(
    listed: Contents, files: ReceivedFiles, source: Source, given: argparse.Namespace
) -> StageJoining | Finish:
    """Return what joins the run; a Finish if its files can't be had.

    Raises UsageError for an `--id` that the plan does not have, and a model of another content.
    """
    small = [file for file in listed.model if not file.name.endswith(WEIGHTS)]
    if given.model is not None:
        await asyncio.to_thread(received_run.require_same, given.model, small)
    wanted = [*(() if given.model else small), listed.samples]
    finish = await files.get(wanted, partial(queries.fetch, source))
    if finish is not None:
        return finish
    return await asyncio.to_thread(StageJoining.of, listed, files, source, given)


@dataclass(frozen=True, kw_only=True)
class StageJoining:
    """Joins one run.

    `stack` is the name of the list of the model's blocks, and `width` the size of its hidden
    states.
    """

    listed: Contents
    files: ReceivedFiles
    source: Source
    own: Path | None  # this machine's copy of the checkpoint
    prepared: Prepared
    cut: Cut
    stack: str
    width: int
    manifest: str
    rank: int | None

    @classmethod
    def of(
        cls, listed: Contents, files: ReceivedFiles, source: Source, given: argparse.Namespace
    ) -> StageJoining:
        """Return what joins the run that `listed` describes, by the model's configuration."""
        settings = received_run.settings_of(listed)
        with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
            folder = Path(name)
            small = [file for file in listed.model if not file.name.endswith(WEIGHTS)]
            received_run.link(small, files, folder, given.model)
            settings = replace(settings, model=folder)
            train = received_run.rows(listed, files, settings)
            prepared = received_run.prepared(listed, train, settings)
            module = model.shape(settings)
        cut = cutting.of(settings, module)
        specs = [spec for own in cut.specs for spec in own]
        rank = given.rank if given.id is None else cut.rank_of(given.id)
        return cls(
            listed=listed,
            files=files,
            source=source,
            own=given.model,
            prepared=prepared,
            cut=cut,
            stack=blocks.place_of(module)[0].rpartition(".")[2],
            width=width_of(module),
            manifest=Layout(tuple(specs)).digest,
            rank=rank,
        )

    def client(self, told: Told, stay: Stay) -> PipelineClient:
        """Return the client for the run that the coordinator described."""
        scenario = worker.scenario_of(told)
        terms = self.cut.terms(
            Terms(run=scenario.digest, manifest=self.manifest, data=self.prepared.train.digest)
        )
        hands = StageHands(
            self.cut,
            partial(self._member, scenario, terms, stay),
            hidden_bytes=hidden_bytes_max(self.width, self.prepared.train, scenario),
        )
        machine = PipelineWorker(
            terms,
            places=self.cut.places,
            secret=stay.secret,
            backend=stay.backend.name,
            rank=self.rank,
            timing=Timing(heartbeat_s=told.heartbeat_s, dead_after_s=told.dead_after_s),
        )
        return PipelineClient(
            machine,
            hands,
            alone=stay.alone,
            notify=partial(_loaded, machine, stay),
            door_context=stay.door_context(),
            listen_port=stay.given.listen_port or 0,
        )

    def _member(self, scenario: Scenario, terms: Terms, stay: Stay, stage: int) -> StageMember:
        """Load `stage`, in a thread; its files are fetched if they are not here."""
        own = self.cut.stages[stage]
        stay.tell(f"loads stage {stage}: {wording.spanned('block', own)}")
        with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
            folder = self._checkpoint(own, Path(name))
            prepared = replace(
                self.prepared, settings=replace(self.prepared.settings, model=folder)
            )
            workload = stage_loading.load(prepared, self.cut, stage)
        return StageMember(
            scenario,
            stay.backend,
            workload,
            terms=terms,
            every=self.cut.blocks,
            stage=stage,
            attempts=stay.attempts,
        )

    def _checkpoint(self, own: range, folder: Path) -> Path:
        """Put links to the files that a stage needs into `folder`, and return it."""
        weights = {file.name for file in self.listed.model if file.name.endswith(WEIGHTS)}
        index = next((one for one in self.listed.model if one.name == stage_files.INDEX), None)
        narrowed: str | None = None
        if index is not None:
            place = self.files.path(index) if self.own is None else self.own / index.name
            content = stage_files.read(own_files.read(place, bytes_max=INDEX_BYTES_MAX))
            weights &= stage_files.of_stage(content, self.stack, own)
            narrowed = stage_files.narrowed(content, weights)
        wanted = [
            file
            for file in self.listed.model
            if file.name in weights or not file.name.endswith(WEIGHTS)
        ]
        of_weights = [file for file in wanted if file.name in weights]
        if self.own is None:
            self._fetch(of_weights)
        else:
            received_run.require_same(self.own, of_weights)
        linked = [file for file in wanted if file is not index]
        received_run.link(linked, self.files, folder, self.own)
        if narrowed is not None:
            (folder / stage_files.INDEX).write_text(narrowed, "utf-8")
        return folder

    def _fetch(self, wanted: Sequence[File]) -> None:
        """Fetch files in this thread. Raises SystemFailure if the coordinator refuses them."""
        finish = asyncio.run(self.files.get(wanted, partial(queries.fetch, self.source)))
        if finish is not None:
            raise SystemFailure(f"the stage's files can't be fetched: {finish.reason}")


def _loaded(machine: PipelineWorker, stay: Stay, effect: Effect) -> None:
    """Print this worker's rank once it has loaded its stage."""
    if isinstance(effect, Send) and isinstance(effect.message, Loaded) and machine.rank is not None:
        stay.tell_rank(machine.rank, effect.message.step)
