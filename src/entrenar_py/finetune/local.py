"""`entrenar finetune`: coordinator and workers on this machine, a process each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from entrenar_py.drivers.processes import Crew
from entrenar_py.errors import UsageError
from entrenar_py.finetune import export, settings_file, worker_process
from entrenar_py.protocol.terms import Timing
from entrenar_py.service import coordinator
from entrenar_py.service.address import Address
from entrenar_py.service.config import Checkpoint, Config
from entrenar_py.service.coordinator import Task
from entrenar_py.training.tensors import Array
from entrenar_py.tuning import evaluation
from entrenar_py.tuning import prepared as preparing
from entrenar_py.tuning.prepared import Prepared
from entrenar_py.tuning.workload import Finetuning
from entrenar_py.untrusted import printing

LOOPBACK = Address("127.0.0.1", 0)
SECRET_BYTES = 32
PRELOADED = ("entrenar_py.finetune.worker_process", "transformers", "peft")


def train(path: Path, *, resume: bool) -> int:
    """Train as the configuration at `path` says; return the exit code.

    Raises ContractError and UsageError for a problem found before the run begins.
    """
    settings = settings_file.load(path)
    prepared = preparing.prepare(settings)
    for what, found in (("train", prepared.train), ("validation", prepared.validation)):
        if found is not None:
            skipped = f", {len(found.skipped)} skipped" if found.skipped else ""
            printing.say(f"{what}: {len(found)} samples{skipped}")
    workload = prepared.workload()
    output = _output(settings.output)
    config = Config(
        scenario=preparing.scenario(settings, workload),
        listen=LOOPBACK,
        secret=secrets.token_bytes(SECRET_BYTES),
        context=None,
        wait_for=settings.workers,
        timing=Timing(),
        checkpoint=Checkpoint(
            path=output / "state.checkpoint", every_steps=settings.checkpoint_every
        ),
        metrics=output / "metrics.jsonl",
        ledger=output / "ledger.jsonl",
    )
    crew = Crew(worker_process.main, preload=PRELOADED, one_job=True)
    task = Task(
        workload=workload,
        listening=partial(_start, crew, path, config),
        completed=partial(_export, prepared, workload),
    )
    try:
        return coordinator.serve(config, task, resume=resume)
    finally:
        crew.dismiss()


def _output(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output={folder}: can't be made ({error.strerror})") from error
    return folder


def _start(crew: Crew, path: Path, config: Config, address: Address) -> None:
    """Start a worker process for each rank."""
    for rank in range(config.scenario.world_size):
        job = {
            "settings": str(path),
            "scenario": config.scenario.to_dict(),
            "rank": rank,
            "host": address.host,
            "port": address.port,
            "secret": config.secret.hex(),
        }
        crew.give(json.dumps(job).encode())


def _export(prepared: Prepared, workload: Finetuning, tensors: Mapping[str, Array]) -> None:
    """Write what was trained to the output folder."""
    folder = export.write(prepared, workload, tensors)
    printing.say(f"written to {folder}")
    if prepared.validation is not None:
        labels = prepared.settings.classes.labels
        found = evaluation.scores(
            workload.module, prepared.validation, labels=labels, pad_token=prepared.pad_token
        )
        for line in found.lines():
            printing.say(f"validation: {line}")
