"""Joining a run: a worker gets settings and files between the coordinator's offer and its start.

Code of a checkpoint is fetched and run only if this worker's own command line allows it.

In a layer pipeline, a worker first receives the stages, then loads the stage that it is assigned.
Of the checkpoint's weights it fetches only the files with blocks of that stage.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from entrenar_py.shared import wording
from entrenar_py.shared.errors import ContractError, SystemFailure, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import files as own_files
from entrenar_py.train.arithmetic.blocks import Layout
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import package, settings_file
from entrenar_py.train.finetune.package import WEIGHTS, Contents, File, ReceivedFiles
from entrenar_py.train.model import blocks, model, model_folder, preparation, samples
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import LAYER_PIPELINE, Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.service import worker
from entrenar_py.train.service.worker import Joining, Stay
from entrenar_py.train.stages import cut, stage_model
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.member import StageHands, StageMember
from entrenar_py.train.stages.stage_model import hidden_bytes_max, width_of
from entrenar_py.train.wire.effects import Effect, Finish, Send
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Loaded
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import PIECE_BYTES, Part, Terms, Timing
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.queries import Source, Told
from entrenar_py.train.wire_io.tcp import PipelineClient

SETTINGS = "the settings"  # in messages
_ADVICE = "use one release on both ends"


def settings_of(listed: Contents) -> Settings:
    """Return the settings of a run. Raises SystemFailure if they can't be read.

    The model is a name, not a path.
    """
    try:
        return settings_file.of_text(settings_file.to_text(listed.settings), SETTINGS)
    except ContractError as error:
        raise SystemFailure(
            f"the coordinator's settings can't be read: {_ADVICE}\n{error}"
        ) from error


def rows_of(listed: Contents, files: ReceivedFiles, settings: Settings) -> Samples:
    """Return the run's samples, which are among `files`.

    Raises SystemFailure if they are not in the form that a coordinator of this release writes.
    """
    train = samples.read_kept(files.path(listed.samples))
    if train is None or not _fits(train, listed, settings):
        raise SystemFailure(f"the coordinator's rows can't be read: {_ADVICE}")
    return train


def prepared_of(listed: Contents, train: Samples, settings: Settings) -> Prepared:
    """Return the run with its samples and the tokenizer of its checkpoint."""
    return Prepared(
        settings=settings,
        tokenizer=model.tokenizer(settings),
        train=train,
        validation=None,
        class_weights=tuple(listed.class_weights),
    )


def require_same(folder: Path, files: Sequence[File]) -> None:
    """Raise UsageError unless `folder` has all `files` of the run's checkpoint, unchanged."""
    for file in files:
        path = folder / file.name
        try:
            with own_files.open_file(path) as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(
                f"--model {folder}: {file.name} can't be read ({error.strerror or error}), "
                "but is part of the run's checkpoint; leave --model out to fetch it"
            ) from error
        if digest != file.digest:
            raise UsageError(
                f"--model {folder}: not the run's model: {file.name} has SHA-256 {digest}, but "
                f"the run's file has {file.digest}; give the run's checkpoint, or leave --model "
                "out to fetch it"
            )


def link(
    wanted: Iterable[File], files: ReceivedFiles, folder: Path, own: Path | None = None
) -> None:
    """Put links to the `wanted` files into `folder`, under the names of these files.

    The links point to the received `files`, or to the folder `own` if that is given.
    """
    for file in wanted:
        place = files.path(file) if own is None else own / file.name
        (folder / file.name).symlink_to(place.absolute())


def _fits(samples: Samples, listed: Contents, settings: Settings) -> bool:
    num_labels = len(settings.classes.labels) if settings.task == "classify" else 0
    is_of_task = samples.are_pairs == (settings.task == "preference")
    return samples.is_consistent and is_of_task and len(listed.class_weights) == num_labels


INDEX_BYTES_MAX = 2**26  # an entry, with a weight's and a file's name, takes about 150 bytes


async def obtain_stage(
    listed: Contents, files: ReceivedFiles, source: Source, arguments: argparse.Namespace
) -> StageJoining | Finish:
    """Return an object that joins the run, or a Finish if its files can't be fetched.

    Raises UsageError for an `--id` that the plan does not have, and for a model with different
    content.
    """
    small = [file for file in listed.model if not file.name.endswith(WEIGHTS)]
    if arguments.model is not None:
        await asyncio.to_thread(require_same, arguments.model, small)
    wanted = [*(() if arguments.model else small), listed.samples]
    finish = await files.get(wanted, partial(queries.fetch, source))
    if finish is not None:
        return finish
    return await asyncio.to_thread(StageJoining.of, listed, files, source, arguments)


@dataclass(frozen=True, kw_only=True)
class StageJoining:
    """Joins one layer pipeline.

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
        cls, listed: Contents, files: ReceivedFiles, source: Source, arguments: argparse.Namespace
    ) -> StageJoining:
        """Return an object that joins the run of `listed`, from the model's configuration."""
        settings = settings_of(listed)
        with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
            folder = Path(name)
            small = [file for file in listed.model if not file.name.endswith(WEIGHTS)]
            link(small, files, folder, arguments.model)
            settings = replace(settings, model=folder)
            train = rows_of(listed, files, settings)
            prepared = prepared_of(listed, train, settings)
            module = model.shape(settings)
        cut = cutting.of(settings, module)
        specs = [spec for own in cut.specs for spec in own]
        rank = arguments.rank if arguments.id is None else cut.rank_of(arguments.id)
        return cls(
            listed=listed,
            files=files,
            source=source,
            own=arguments.model,
            prepared=prepared,
            cut=cut,
            stack=blocks.place_of(module)[0].rpartition(".")[2],
            width=width_of(module),
            manifest=Layout(tuple(specs)).digest,
            rank=rank,
        )

    def client(self, described: Told, stay: Stay) -> PipelineClient:
        """Return the client for the run that the coordinator described."""
        plan = worker.plan_of(described)
        terms = self.cut.terms(
            Terms(run=plan.digest, manifest=self.manifest, data=self.prepared.train.digest)
        )
        hands = StageHands(
            self.cut,
            partial(self._member, plan, stay),
            hidden_bytes=hidden_bytes_max(self.width, self.prepared.train, plan),
        )
        machine = PipelineWorker(
            terms,
            places=self.cut.places,
            secret=stay.secret,
            backend=stay.backend.name,
            rank=self.rank,
            timing=Timing(heartbeat_s=described.heartbeat_s, dead_after_s=described.dead_after_s),
        )
        return PipelineClient(
            machine,
            hands,
            alone=stay.alone,
            notify=partial(_loaded, machine, stay),
            door_context=stay.door_context(),
            listen_port=stay.given.listen_port or 0,
        )

    def _member(self, plan: TrainingPlan, stay: Stay, stage: int) -> StageMember:
        """Load `stage` in a thread, after fetching its files if they are not here."""
        own = self.cut.stages[stage]
        stay.tell(f"loads stage {stage}: {wording.spanned('block', own)}")
        with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
            folder = self._checkpoint(own, Path(name))
            prepared = replace(
                self.prepared, settings=replace(self.prepared.settings, model=folder)
            )
            workload = stage_model.load_stage(prepared, self.cut, stage)
        return StageMember(
            plan,
            stay.backend,
            workload,
            every=self.cut.blocks,
            stage=stage,
            attempts=stay.attempts,
        )

    def _checkpoint(self, own: range, folder: Path) -> Path:
        """Put links to the files that a stage needs into `folder`, and return it."""
        weights = {file.name for file in self.listed.model if file.name.endswith(WEIGHTS)}
        index = next((one for one in self.listed.model if one.name == cut.INDEX), None)
        narrowed: str | None = None
        if index is not None:
            place = self.files.path(index) if self.own is None else self.own / index.name
            content = cut.read_index(own_files.read(place, bytes_max=INDEX_BYTES_MAX))
            weights &= cut.files_of_stage(content, self.stack, own)
            narrowed = cut.narrowed(content, weights)
        wanted = [
            file
            for file in self.listed.model
            if file.name in weights or not file.name.endswith(WEIGHTS)
        ]
        of_weights = [file for file in wanted if file.name in weights]
        if self.own is None:
            self._fetch(of_weights)
        else:
            require_same(self.own, of_weights)
        linked = [file for file in wanted if file is not index]
        link(linked, self.files, folder, self.own)
        if narrowed is not None:
            (folder / cut.INDEX).write_text(narrowed, "utf-8")
        return folder

    def _fetch(self, wanted: Sequence[File]) -> None:
        finish = asyncio.run(self.files.get(wanted, partial(queries.fetch, self.source)))
        if finish is not None:
            raise SystemFailure(f"the stage's files can't be fetched: {finish.reason}")


def _loaded(machine: PipelineWorker, stay: Stay, effect: Effect) -> None:
    if isinstance(effect, Send) and isinstance(effect.message, Loaded) and machine.rank is not None:
        stay.tell_rank(machine.rank, effect.message.step)


MODEL = "model"

Say = Callable[[str], None]


async def obtain(
    source: Source, arguments: argparse.Namespace, say: Say
) -> Finetuning | Joining | Finish:
    """Return the workload of the run at `source`, or a Finish that says why there is none.

    For a layer pipeline, return an object that joins it, since the stage is known only later.
    Raises UsageError for a model with different content, a cache that can't be written, and code
    that is not allowed, and SystemFailure if the coordinator sends something else than it
    announced.
    """
    listed = await _list(source)
    if isinstance(listed, Finish):
        return listed
    _require_trust(listed, is_trusting=arguments.trust_remote_code)
    if listed.settings.get("strategy") == LAYER_PIPELINE:
        return await obtain_stage(listed, _received(say, source), source, arguments)
    wanted: Sequence[File] = listed.files()
    if arguments.model is not None:
        require_same(arguments.model, listed.model)
        wanted = [listed.samples]
    files = _received(say, source)
    if arguments.id is not None:
        raise UsageError(
            "--id: the run is not a layer pipeline, so no stage has a name; leave it out"
        )
    finish = await files.get(wanted, partial(queries.fetch, source))
    if finish is not None:
        return finish
    if files.num_fetched:
        say(f"fetched {files.num_fetched} bytes, all verified")
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
        own = arguments.model, arguments.logits
        making = asyncio.to_thread(_workload, listed, files, Path(name), *own, ended=ended)
        try:
            return await making
        except asyncio.CancelledError:
            ended.set()  # otherwise a wait for the first shard would outlive this worker
            raise


def _received(say: Say, source: Source) -> ReceivedFiles:
    return ReceivedFiles(preparation.cache() / "files", say, patience_s=source.patience_s)


async def _list(source: Source) -> Contents | Finish:
    """Return the list of the run's files, or a Finish if it can't be fetched."""
    content = b""

    def missing() -> list[Part]:
        return [] if content else [Part(source.package, PIECE_BYTES, 0)]

    def store(digest: str, offset: int, data: Buffer) -> None:
        nonlocal content
        content = bytes(data)

    finish = await queries.fetch(source, missing, store)
    if finish.status != "completed":
        return finish
    if hashlib.sha256(content).hexdigest() != source.package:
        raise SystemFailure("the coordinator's list of files is not the one that it announced")
    return package.parse(content)


def _require_trust(listed: Contents, *, is_trusting: bool) -> None:
    if listed.settings.get("trust_remote_code", False) and not is_trusting:
        raise UsageError(
            "the run's checkpoint comes with Python code (trust_remote_code), which this worker "
            "would fetch and run; give --trust-remote-code if you trust "
            "the person that started the run"
        )


def _workload(
    listed: Contents,
    files: ReceivedFiles,
    folder: Path,
    own: Path | None,
    logits: Path | None,
    ended: threading.Event,
) -> Finetuning:
    """Return the model with its samples. `folder` is not needed after that.

    `own` is this machine's copy of the checkpoint, `logits` its copy of a teacher's shards. Shards
    are waited for until `ended` is set.
    """
    settings = _with_shards(settings_of(listed), logits)
    settings = replace(settings, model=_checkpoint(listed, files, folder) if own is None else own)
    train = rows_of(listed, files, settings)
    model_folder.require_checkpoint(settings.model)
    return student.workload(prepared_of(listed, train, settings), ended=ended)


def _with_shards(settings: Settings, logits: Path | None) -> Settings:
    """Return the settings with this machine's folder of a teacher's shards.

    Raises UsageError if the run needs a folder and none is given, or the reverse.
    """
    if settings.distill is None:
        if logits is not None:
            raise UsageError("--logits: the run has no teacher; leave it out")
        return settings
    if logits is None:
        raise UsageError(
            "the run learns from a teacher's shards, which no coordinator sends: copy them here "
            "(rsync or NFS, also while they are made), and give their folder by --logits"
        )
    return replace(settings, distill=replace(settings.distill, logits=logits))


def _checkpoint(listed: Contents, files: ReceivedFiles, folder: Path) -> Path:
    linked = folder / MODEL
    linked.mkdir()
    link(listed.model, files, linked)
    return linked
