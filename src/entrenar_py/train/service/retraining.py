"""Replay of a ledger: its plan is trained again in this process, comparing weights at every step.

One process can repeat a run with any number of workers: on one kind of device, the sum of the
gradients has the same bits for every number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from entrenar_py import compute as backends
from entrenar_py.shared import process, trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import OF_USERS, TrainingPlan
from entrenar_py.shared.systems import AUTO
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import files, printing
from entrenar_py.train.reference import Trainer
from entrenar_py.train.service import exit_codes
from entrenar_py.train.service.ledger_account import Account, weights_digest

FINETUNING = "finetune"  # the workload made from a checkpoint and rows

# The parts of the environment that decide how kernels round.
_ROUNDING = ("torch", "numpy", "wgpu")


def replay(account: Account, path: Path) -> int:
    """Repeat the training run of the ledger at `path` and compare; return the exit code.

    `account` is the ledger's account. Raises UsageError for a plan with faults, a mutant, or a
    user's own trainer.
    """
    if account.plan.workload == FINETUNING:
        raise UsageError(
            f"ledger {path}: of a fine-tuning; its checkpoint and rows are not in it, so nothing "
            "can replay it; judge it with `entrenar-check --judge`"
        )
    record = account.plan.to_dict()
    for name in ("stops", "repeat"):  # fields of a scenario that change no bit
        record.pop(name, None)
    try:
        plan = TrainingPlan.from_dict(record)
    except UsageError:  # a scenario has fields that a trainer doesn't read
        plan = None
    if plan is None or plan.workload in OF_USERS:
        raise UsageError(
            f"ledger {path}: not written by `entrenar coordinator` (it belongs to your own "
            "trainer or model, or to a plan with faults); judge it with `entrenar-check --judge`"
        )
    if not account.weights:
        return _inconclusive("no step was made in it: there is nothing to compare")
    if len(account.backends) > 1 or AUTO in account.backends:
        names = ", ".join(sorted(account.backends))
        return _inconclusive(
            f"computed on {names}: kernels round differently, so no one device can repeat it"
        )
    (name,) = account.backends
    try:
        device = backends.open_backend(name).device
    except BackendUnavailable as error:
        return _inconclusive(f"computed on {name}, which this machine doesn't have: {error}")
    difference = _difference(account, plan, path, name)
    if difference is None:
        num_steps = len(account.weights)
        printing.say(
            f"verified: trained again on {name} ({device}), {num_steps} steps, the same bits"
        )
        return exit_codes.DONE
    if (explained := _explanation(account, name, device)) is not None:
        return _inconclusive(f"{difference}; but {explained}, which may round differently")
    printing.say(f"different: {difference}")
    return exit_codes.WRONG


def _difference(account: Account, plan: TrainingPlan, path: Path, backend: str) -> str | None:
    """Return the first difference between the ledger and the retraining, or None."""
    last = max(account.weights)
    step = -1
    for step, update in enumerate(_updates(plan, backend, last + 1)):
        theirs = account.weights.get(step)  # None in a ledger that starts from a checkpoint
        if theirs is not None and theirs != weights_digest(update.weights, update.buffers):
            return _first_tensor(path, update)
    if step < last:
        return f"training again halts in step {step + 1}, but the ledger goes on"
    if account.halt is not None and account.halt.step > last:
        again = len(list(_updates(plan, backend, last + 2)))
        if again > last + 1:
            return f"the ledger halts in step {account.halt.step}, but training again does not"
    return None


def _updates(plan: TrainingPlan, backend: str, num_steps: int) -> Iterator[trace.Update]:
    """Yield the Update of each of the first `num_steps`, trained on one worker, up to a halt."""
    torch.set_num_threads(1)  # the split of a sum over threads is part of its order
    trainer = Trainer(plan.with_(world_size=1, backends=(backend,), options={}))
    for step in range(num_steps):
        if not trainer.step(step):
            return
        yield next(one for one in trainer.recorder.drain() if isinstance(one, trace.Update))


def _first_tensor(path: Path, again: trace.Update) -> str:
    """Return the first tensor in which the ledger differs from the retrained Update `again`."""
    with files.open_file(path) as file:
        theirs = next(
            event
            for event in ledger.Reader(file, path)
            if isinstance(event, trace.Update) and event.step == again.step
        )
    for name, ours in {**again.weights, **again.buffers}.items():
        record = {**theirs.weights, **theirs.buffers}.get(name)
        if record is None or record.digest != ours.digest:
            digest = "nothing" if record is None else record.digest
            where = f"step {again.step}, tensor {name}"
            return f"{where}: training again gives {ours.digest}, but the ledger has {digest}"
    return f"step {again.step}: the ledger holds tensors that the model doesn't have"


def _explanation(account: Account, backend: str, device: str) -> str | None:
    """Return a difference from the ledger's machine that affects rounding.

    The result is None if none is known.
    """
    others = {other for _, other in account.devices} - {device}
    if others:
        return f"it was computed on {', '.join(sorted(others))}, and this machine has {device}"
    here = process.environment()
    for name in _ROUNDING:
        there = account.environment.get(name)
        if there is not None and name in here and there != here[name]:
            return f"it was recorded with {name} {there}, and this machine has {here[name]}"
    return None


def _inconclusive(reason: str) -> int:
    printing.say(f"inconclusive: {reason}")
    return exit_codes.INCONCLUSIVE
