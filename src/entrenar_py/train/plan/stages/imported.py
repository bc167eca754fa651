"""Writes a configuration of stages from an earlier framework's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from entrenar_py.shared import scenario
from entrenar_py.train.model.settings import LAYER_PIPELINE, StagePlan
from entrenar_py.train.plan.stages import plan_text
from entrenar_py.train.plan.stages.old_configuration import OldConfiguration
from entrenar_py.train.plan.stages.old_plan_problems import LOCAL
from entrenar_py.train.service.address import Address


def lines(
    old: OldConfiguration,
    *,
    source: Path,
    model: Path,
    task: str,
    data: Path,
    output: Path,
    secret: Path,
) -> Iterator[str]:
    """Yield the lines of a configuration that `entrenar coordinator` accepts."""
    yield f"# Made from {source} by `entrenar pipeline import`. Start it by"
    yield "#   entrenar coordinator run.yaml"
    yield "# and each worker, which takes its --backend and --listen-port from the old file, by"
    for command in _commands(old, secret):
        yield f"#   {command}"
    yield f"model: {plan_text.scalar(str(model))}"
    yield f"task: {task}"
    yield f"output: {plan_text.scalar(str(output))}"
    yield f"strategy: {LAYER_PIPELINE}"
    yield f"data: {{train: {plan_text.scalar(str(data))}}}"
    yield from plan_text.section(_stages(old))
    yield "coordinator:"
    yield f"  listen: {plan_text.scalar(str(old.coordinator))}"
    yield f"  secret_file: {plan_text.scalar(str(secret))}"


def _stages(old: OldConfiguration) -> list[StagePlan]:
    """Return the stages; one on the coordinator's machine has no device in the old file."""
    kinds = {worker.number: scenario.backend_kind(worker.device) for worker in old.workers}
    found = []
    for stage in old.stages:
        assert stage.layers is not None, "what can't be read is a problem"
        kind = None if stage.number == LOCAL else kinds[stage.number]  # type: ignore[index]
        found.append(StagePlan(layers=stage.layers, worker=(stage.name,), backend=kind))
    return found


def _commands(old: OldConfiguration, secret: Path) -> Iterator[str]:
    """Yield the command of each worker, and the machine on which it is to be started."""
    by_number = {worker.number: worker for worker in old.workers}
    for stage in old.stages:
        where, options, host = "the coordinator's machine", "", old.coordinator.host
        if _is_any(host):
            host = "127.0.0.1" if stage.number == LOCAL else "HOST"
        if stage.number != LOCAL:
            worker = by_number[stage.number]  # type: ignore[index]
            where = " ".join(dict.fromkeys(worker.hosts))
            options = f" --backend {worker.device}"
            if worker.port is not None:
                options += f" --listen-port {worker.port}"
        address, file = Address(host, old.coordinator.port), shlex.quote(str(secret))
        yield (
            f"entrenar worker --coordinator {address} --secret-file {file} --id {stage.name}"
            f"{options}   (on {where})"
        )


def _is_any(host: str) -> bool:
    """Return whether `host` stands for all addresses of a machine, to which none connects."""
    return host in ("0.0.0.0", "::")
