"""`entrenar coordinator` with a fine-tuning configuration: workers on other machines compute.

A configuration that fine-tunes has a `model`; one for a model of the trainer's own has a
`workload`. A file with both is refused, by line.

The files that workers need are hashed when a run begins, and read piece by piece when a worker
requests one. A file that has changed since then is refused, not sent.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import files, printing
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.topology import Topology
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import foresight, outputs, package, settings_file, task
from entrenar_py.train.finetune.package import Contents, File
from entrenar_py.train.model import model_folder, preparation, samples
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import LAYER_PIPELINE, Keep, Serving, Settings
from entrenar_py.train.service import address, config, coordinator
from entrenar_py.train.service.config import Checkpoint, Config
from entrenar_py.train.stages import cut, server
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.server import PipelineServer
from entrenar_py.train.wire.messages import Piece
from entrenar_py.train.wire.pipeline_peers import PipelineCoordinator
from entrenar_py.train.wire.terms import PIECE_BYTES, Package, Timing
from entrenar_py.train.wire_io import sockets

_Stamp: TypeAlias = tuple[int, int, int]  # inode, bytes, nanoseconds of the last change


class OfferedFiles:
    """The files that one run offers; `package` describes them for the protocol."""

    def __init__(self, prepared: Prepared) -> None:
        """Hash all files. Raises UsageError if one can't be read."""
        settings = prepared.settings
        self._places: dict[str, tuple[Path, _Stamp]] = {}  # digest -> file, state when hashed
        model = [self._hashed(settings.model / name) for name in checkpoint_files(settings)]
        kept = samples.keep_chosen(prepared.train, preparation.cache())
        contents = Contents(
            settings=shared_settings(settings),
            class_weights=prepared.class_weights,
            samples=self._hashed(kept),
            model=model,
        )
        self._list = package.dump(contents)
        self._digest = hashlib.sha256(self._list).hexdigest()
        self.num_bytes = sum(file.num_bytes for file in contents.files())
        sizes = {file.digest: file.num_bytes for file in contents.files()}
        self.package = Package(self._digest, {**sizes, self._digest: len(self._list)})

    def read(self, piece: Piece) -> bytes | str:
        """Return the bytes of `piece`, or a text that says why they can't be read. Thread-safe."""
        if piece.file == self._digest:
            return self._list
        path, stamp = self._places[piece.file]
        try:
            with files.open_file(path) as file:
                if _stamp(file.fileno()) != stamp:
                    return f"{path.name} was changed since the run began; start the run again"
                return os.pread(file.fileno(), PIECE_BYTES, piece.offset)
        except OSError as error:
            return f"{path.name} can't be read by the coordinator ({error.strerror or error})"

    def _hashed(self, path: Path) -> File:
        try:
            with files.open_file(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                stamp = _stamp(file.fileno())
        except OSError as error:
            raise UsageError(
                f"{path}: can't be read ({error.strerror or error}); workers need it"
            ) from error
        self._places[digest] = path, stamp
        return File(path.name, stamp[1], digest)


def _stamp(handle: int) -> _Stamp:
    status = os.fstat(handle)
    return status.st_ino, status.st_size, status.st_mtime_ns


def checkpoint_files(settings: Settings) -> list[str]:
    """Return the names of the checkpoint's files that a worker needs, in order.

    If the folder has several sets of weights, only the set that is loaded counts.
    """
    folder = settings.model
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    names = [
        name
        for name in names
        if package.may_be_named(name, with_code=settings.trust_remote_code)
        and (folder / name).stat().st_size
    ]
    loaded = model_folder.weight_files(folder)
    left_out = {name for name in names if name.endswith(package.WEIGHTS)}.difference(loaded)
    if model_folder.WHOLE in loaded:
        left_out.add(model_folder.INDEX)
    return [name for name in names if name not in left_out]


def shared_settings(settings: Settings) -> dict[str, object]:
    """Return the settings that a worker needs, as a record without paths of this machine.

    Settings for the coordinator alone have their defaults: a worker has no rows to evaluate on.
    """
    plain = replace(
        settings,
        coordinator=None,
        workers=Settings.workers,
        evaluate_every=Settings.evaluate_every,
        keep=Keep(),
        # a worker gets these values with the run's state
        lora=replace(settings.lora, start_from=None),
    )
    record = settings_file.to_record(plain)
    return {**record, "model": "model", "output": "output", "data": _data(record["data"])}


def _data(record: dict[str, object]) -> dict[str, object]:
    left_out = ("validation", "validation_share", "on_error", "on_long")
    return {key: value for key, value in record.items() if key not in left_out} | {
        "train": "rows.jsonl"
    }


SECTION = "coordinator"
OF_THE_TRAINER = "workload"  # the key that a run of the trainer's own models has
_FORM = "a configuration is a mapping (model, task, output, data, coordinator, ...)"
_FINETUNING = ("model", "task", "data", "output")

T = TypeVar("T")


def is_finetuning(path: Path) -> bool:
    """Return whether the configuration at `path` fine-tunes a checkpoint.

    Raises ContractError, with each line, if it also describes a model of the trainer's own.
    """
    problems = Problems()
    root = composer.load(path, problems, form=_FORM)
    if root is None:
        problems.settle(strict=True)
        return False
    named = [key for key in _FINETUNING if key in root.fields]
    if named and OF_THE_TRAINER in root.fields:
        for key in named:
            problems.error(
                root.keys[key],
                f"{key} belongs to a configuration that fine-tunes a checkpoint, and "
                f"{OF_THE_TRAINER} (line {root.keys[OF_THE_TRAINER].line}) to one that trains a "
                "built-in model; leave out one of them",
            )
    for key in (own.name for own in settings_file.fields_of(Serving) if own.name in root.fields):
        place = f"{key} stands in the section `{SECTION}:`; move it there"
        problems.error(root.keys[key], place)
    problems.settle(strict=True)
    return OF_THE_TRAINER not in root.fields


def run(path: Path, *, resume: bool, halt_on_spike: bool, tensorboard: Path | None = None) -> int:
    """Serve the fine-tuning run that the file at `path` describes; return the exit code.

    `halt_on_spike` and `tensorboard` are as in `coordinator.Task`. Raises ContractError, UsageError
    or CheckpointError for a problem found before the run begins, and SystemFailure if the ledger,
    the last checkpoint or the output can't be written.
    """
    settings, service = _both(path)
    kind = topology.BY_NAME[service.section.topology]
    require_star(kind, halt_on_spike=halt_on_spike)
    outputs.require_own(settings)
    coordinator.require_intended(
        settings.output / task.CHECKPOINT, resume=resume, other="another `output:`"
    )
    prepared = preparation.prepare(settings, day=student.day_of(settings))
    settings = prepared.settings
    foresight.say_rows(prepared)
    foresight.remark(path, prepared)  # memory is not checked: the workers' memory is not known here
    is_pipeline = settings.strategy == LAYER_PIPELINE
    workload = server.workload_of(prepared) if is_pipeline else student.workload(prepared)
    foresight.say_teacher(workload)
    foresight.say_warnings()
    stages = cut_of(path, settings, workload.module) if is_pipeline else None
    planned = settings if stages is None else replace(settings, stages=stages.plan())
    offered = OfferedFiles(replace(prepared, settings=planned))  # workers read stages from it
    printing.say(f"workers get {len(offered.package.sizes)} files, {offered.num_bytes} bytes")
    output = outputs.make_folder(prepared)
    plan = preparation.plan_of(settings, workload)
    plan = plan.with_(trainer=kind.trainer)
    if share := service.section.audit_share:
        plan = plan.with_(options={**plan.options, "audit_share": share})
    if stages is not None:
        plan = server.plan_of_stages(plan)
        for line in stages.lines():
            printing.say(line)
    served = service.configured(
        plan,
        checkpoint=Checkpoint(path=output / task.CHECKPOINT, every_steps=settings.checkpoint_every),
        metrics=output / task.METRICS,
        ledger=output / task.LEDGER,
    )
    with task.opened(
        prepared,
        workload,
        plan=plan,
        device=torch.device("cpu"),
        halt_on_spike=halt_on_spike,
        tensorboard=tensorboard,
    ) as finetuning:
        offering = replace(finetuning, package=offered.package, piece=offered.read)
        if stages is not None:
            make_server = partial(PipelineServer, cut=stages)
            offering = replace(offering, make_server=make_server, machine=PipelineCoordinator)
        return coordinator.serve(served, offering, resume=resume)


def cut_of(path: Path, settings: Settings, module: nn.Module) -> Cut:
    """Return the stages of `module` that the configuration at `path` describes.

    Raises ContractError, with the line, for stages that don't fit the model.
    """
    try:
        return cut.of(settings, module)
    except UsageError as error:
        problems = Problems()
        root = settings_file.read(path, problems)
        if root is None:
            raise
        problems.error(
            settings_file.innermost(root, (error.field or "strategy").split(".")).at, str(error)
        )
        problems.settle(strict=True)
        raise


def require_star(kind: Topology, *, halt_on_spike: bool) -> None:
    """Raise UsageError if the run is to halt at a spike, and its coordinator can't."""
    if halt_on_spike and kind is not topology.STAR:
        raise UsageError(
            "--halt-on-spike with topology=mesh: its workers make a step before the coordinator "
            "knows the gradient's norm; use topology: star"
        )


@dataclass(frozen=True, kw_only=True)
class Service:
    """The section `coordinator` after reading: secret and certificates instead of paths."""

    section: Serving
    listen: address.Address
    secret: bytes = field(repr=False)
    context: ssl.SSLContext | None
    timing: Timing

    def configured(self, plan: TrainingPlan, **files: Any) -> Config:
        """Return the coordinator's settings for a run of `plan`, which writes `files`."""
        return Config(
            plan=plan,
            listen=self.listen,
            secret=self.secret,
            context=self.context,
            wait_for=self.section.wait_for,
            timing=self.timing,
            **files,
        )


def _both(path: Path) -> tuple[Settings, Service]:
    """Return the settings and the section. Raises ContractError with all problems."""
    settings, problems = settings_file.load(path), Problems()
    root = settings_file.read(path, problems)
    assert root is not None, "it has just been loaded"

    def refuse(message: str, *keys: str) -> None:
        problems.error(settings_file.innermost(root, keys).at, message)

    section = settings.coordinator
    if section is None:
        refuse(
            f"{SECTION} is missing: the section says where workers connect (secret_file, "
            "listen, wait_for, ...); give it, or train on this machine by `entrenar finetune`"
        )
        problems.settle(strict=True)
    assert section is not None, "without it there is a problem"
    if settings.strategy not in (None, LAYER_PIPELINE):
        refuse("strategy: it is for ranks of torchrun; leave it out", "strategy")
    if settings.strategy == LAYER_PIPELINE and section.audit_share:
        refuse(
            f"audit_share={section.audit_share:g} with strategy: {LAYER_PIPELINE}: a stage has "
            "no second worker to compare with; leave it out",
            *(SECTION, "audit_share"),
        )
    if settings.strategy == LAYER_PIPELINE and section.topology != "star":
        refuse(
            f"topology={section.topology} with strategy: {LAYER_PIPELINE}: stages have a topology "
            "of their own; leave it out",
            *(SECTION, "topology"),
        )
    if section.topology == "mesh" and "evaluate_every" in root.fields:
        refuse(
            "evaluate_every with topology: mesh: the coordinator has the weights when they are "
            "saved, and evaluates them at the end; leave it out",
            "evaluate_every",
        )
    service = connected(section, root, problems, num_workers=settings.num_workers, key="workers")
    problems.settle(strict=True)
    assert service is not None, "what can't be read is a problem"
    return settings, service


def connected(
    section: Serving, root: MapNode, problems: Problems, *, num_workers: int, key: str
) -> Service | None:
    """Return the connections that `section` allows; None after reporting what can't be used.

    `num_workers` is the number of workers that the file allows by `key`.
    """

    def refuse(message: str, name: str) -> None:
        problems.error(settings_file.innermost(root, (SECTION, name)).at, message)

    def attempt(read: Callable[[], T], name: str) -> T | None:
        try:
            return read()
        except UsageError as error:
            refuse(str(error), name)
            return None

    if section.wait_for > num_workers:
        refuse(
            f"wait_for={section.wait_for}: {key} is {num_workers}; use that number or less",
            "wait_for",
        )
    if section.topology == "mesh" and section.audit_share:
        refuse(
            f"audit_share={section.audit_share:g} with topology: mesh: no gradient passes the "
            "coordinator there; leave it out, or use topology: star",
            "audit_share",
        )
    listen = attempt(lambda: address.parse(section.listen, port_min=0), "listen")
    secret = attempt(lambda: config.secret(section.secret_file), "secret_file")
    timing = attempt(lambda: Timing(**asdict(section.timing)), "timing")
    context = None
    if (given := section.tls) is not None:
        make = partial(sockets.server_context, cert=given.cert, key=given.key, ca=given.ca)
        context = attempt(make, "tls")
    if listen is None or secret is None or timing is None:
        return None
    return Service(section=section, listen=listen, secret=secret, context=context, timing=timing)
