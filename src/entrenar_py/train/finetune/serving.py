"""`entrenar coordinator` with a configuration that fine-tunes: other machines' workers compute.

Such a file has a `model`; one for a model of the trainer's own has a `workload`. A file with both
is refused, by line.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.config.tree import MapNode
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import export, foresight, rows_read, settings_file, stage_problems
from entrenar_py.train.finetune import task as tasks
from entrenar_py.train.finetune.offered_files import OfferedFiles
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.settings import LAYER_PIPELINE, Serving, Settings
from entrenar_py.train.service import address, config, config_keys, coordinator
from entrenar_py.train.service.config import Checkpoint, Config
from entrenar_py.train.stages import coordinated, cut, staged_run
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.server import PipelineServer
from entrenar_py.train.wire.pipeline_peers import PipelineCoordinator
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import sockets

SECTION = "coordinator"
OF_THE_TRAINER = "workload"  # the key of a run of one of its own models
_FORM = "a configuration is a mapping (model, task, output, data, coordinator, ...)"
_FINETUNING = ("model", "task", "data", "output", SECTION)

T = TypeVar("T")


def is_finetuning(path: Path) -> bool:
    """Return whether the configuration at `path` fine-tunes a checkpoint.

    Raises ContractError, with each line, for one that mixes that with a model of the trainer's own.
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
                f"{key} is of a configuration that fine-tunes a checkpoint, and {OF_THE_TRAINER} "
                f"(line {root.keys[OF_THE_TRAINER].line}) of one that trains a model of the "
                "trainer's own; leave out either",
            )
    for key in _misplaced(root) if named else ():
        problems.error(
            root.keys[key],
            f"{key} stands in the section `{SECTION}:` of such a file; move it there",
        )
    problems.settle(strict=True)
    return bool(named)


def _misplaced(root: MapNode) -> Iterator[str]:
    known = [field.name for field in settings_file.fields_of(Settings)]
    for key in root.fields:
        if key in config_keys.SERVICE and key not in known and OF_THE_TRAINER not in root.fields:
            yield key


def run(path: Path, *, resume: bool, halt_on_spike: bool, tensorboard: Path | None = None) -> int:
    """Serve the fine-tuning that the file at `path` describes; return the exit code.

    `halt_on_spike` and `tensorboard` are as in `coordinator.Task`. Raises ContractError, UsageError
    or CheckpointError for a problem found before the run begins, and SystemFailure if the ledger,
    the last checkpoint or the output can't be written.
    """
    settings, service = _Reader(path).both()
    export.require_own(settings)
    coordinator.require_intended(settings.output / tasks.CHECKPOINT, resume=resume)
    prepared = preparing.prepare(settings)
    settings = prepared.settings
    rows_read.say(prepared)
    foresight.remark(path, prepared)  # but not at memory: what workers have is not known here
    is_pipeline = settings.strategy == LAYER_PIPELINE
    workload = coordinated.workload(prepared) if is_pipeline else student.workload(prepared)
    rows_read.say_teacher(workload)
    rows_read.say_warnings()
    stages = cut_of(path, settings, workload.module) if is_pipeline else None
    planned = prepared if stages is None else _planned(prepared, stages)
    offered = OfferedFiles(planned)
    printing.say(f"workers get {len(offered.package.sizes)} files, {offered.num_bytes} bytes")
    output = export.make_folder(prepared)
    scenario = preparing.scenario(settings, workload)
    if share := service.section.audit_share:
        scenario = scenario.with_(options={**scenario.options, "audit_share": share})
    if stages is not None:
        scenario = staged_run.scenario(scenario)
        for line in staged_run.lines(stages):
            printing.say(line)
    served = Config(
        scenario=scenario,
        listen=service.listen,
        secret=service.secret,
        context=service.context,
        wait_for=service.section.wait_for,
        timing=service.timing,
        checkpoint=Checkpoint(
            path=output / tasks.CHECKPOINT, every_steps=settings.checkpoint_every
        ),
        metrics=output / tasks.METRICS,
        ledger=output / tasks.LEDGER,
    )
    with tasks.opened(
        prepared,
        workload,
        scenario=scenario,
        device=torch.device("cpu"),
        halt_on_spike=halt_on_spike,
        tensorboard=tensorboard,
    ) as task:
        offering = replace(task, package=offered.package, piece=offered.read)
        if stages is not None:
            make_server = partial(PipelineServer, cut=stages)
            offering = replace(offering, make_server=make_server, machine=PipelineCoordinator)
        return coordinator.serve(served, offering, resume=resume)


def cut_of(path: Path, settings: Settings, module: nn.Module) -> Cut:
    """Return the stages of `module` that the configuration at `path` asks for.

    Raises ContractError, with the line, for stages that don't fit the model.
    """
    try:
        return cut.of(settings, module)
    except UsageError as error:
        problems = Problems()
        root = settings_file.read(path, problems)
        if root is None:
            raise
        problems.error(stage_problems.place(root, error.field or "strategy"), str(error))
        problems.settle(strict=True)
        raise


def _planned(prepared: Prepared, stages: Cut) -> Prepared:
    """Return the run with its stages in its settings, which workers read."""
    return replace(prepared, settings=replace(prepared.settings, stages=stages.plan()))


@dataclass(frozen=True, kw_only=True)
class _Service:
    """The section, read: address, secret and certificates instead of their texts and paths."""

    section: Serving
    listen: address.Address
    secret: bytes = field(repr=False)
    context: ssl.SSLContext | None
    timing: Timing


class _Reader:
    """Reads the section for other machines. Every problem is told with its place."""

    def __init__(self, path: Path) -> None:
        self._settings = settings_file.load(path)
        self._problems = Problems()
        root = settings_file.read(path, self._problems)
        assert root is not None, "it has just been loaded"
        self._root = root

    def both(self) -> tuple[Settings, _Service]:
        """Return the settings and their section. Raises ContractError with all problems."""
        settings, section = self._settings, self._settings.coordinator
        if section is None:
            self._problems.error(
                self._root.at,
                f"{SECTION} is missing: the section says where workers connect (secret_file, "
                "listen, wait_for, ...); give it, or train on this machine by `entrenar finetune`",
            )
            self._problems.settle(strict=True)
        assert section is not None, "without it there is a problem"
        if settings.strategy not in (None, LAYER_PIPELINE):
            self._error("strategy: it is for ranks of torchrun; leave it out", "strategy")
        if settings.strategy == LAYER_PIPELINE and section.audit_share:
            self._error(
                f"audit_share={section.audit_share:g} with strategy: {LAYER_PIPELINE}: a stage has "
                "no second worker to compare with; leave it out",
                *(SECTION, "audit_share"),
            )
        if section.wait_for > settings.num_workers:
            self._error(
                f"wait_for={section.wait_for}: workers is {settings.num_workers}; wait for no more",
                *(SECTION, "wait_for"),
            )
        listen = self._read(lambda: address.parse(section.listen, port_min=0), "listen")
        secret = self._read(lambda: config.secret(section.secret_file), "secret_file")
        timing = self._read(lambda: Timing(**asdict(section.timing)), "timing")
        context = None
        if (given := section.tls) is not None:
            make = partial(sockets.server_context, cert=given.cert, key=given.key, ca=given.ca)
            context = self._read(make, "tls")
        self._problems.settle(strict=True)
        assert listen is not None, "what can't be read is a problem"
        assert secret is not None, "what can't be read is a problem"
        assert timing is not None, "what can't be read is a problem"
        return settings, _Service(
            section=section, listen=listen, secret=secret, context=context, timing=timing
        )

    def _read(self, read: Callable[[], T], key: str) -> T | None:
        try:
            return read()
        except UsageError as error:
            self._error(str(error), SECTION, key)
            return None

    def _error(self, message: str, *keys: str) -> None:
        self._problems.error(settings_file.innermost(self._root, keys).at, message)
