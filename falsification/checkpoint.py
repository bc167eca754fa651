"""Bugs in saving a checkpoint, and in resuming from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as loop
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train import reference as trainer
from entrenar_py.train.arithmetic import checkpoint, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator import replicas

from .subjects import REFERENCE, REPLICAS, TEXTBOOK, TRAINING, reference, textbook, visit

_load_file, _group_of = checkpoint.load, checkpoint.group_of
_save, _load, _load_optimizer = (
    loop.save,
    loop.load,
    loop.load_optimizer,
)
_progress, _stop_and_resume = replicas.Replicas.progress, trainer.Trainer._stop_and_resume

# Weights before the latest step, as `remembering` saw them: rank -> name -> value.
_before: dict[int, dict[str, torch.Tensor]] = {}


def epoch_start(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Loads everything but the position within the epoch."""
    arrays, progress = _load_file(path)
    return arrays, {**progress, "offset": 0}


def by_iteration(path: Path, setup: Setup, replicas: list[Replica]) -> sharding.Position:
    """Skips iterations times micro-batch size samples, without counting accumulation."""
    position = _load(path, setup, replicas)
    return sharding.Position(position.epoch, position.offset // setup.scenario.accumulation)


def prefetched(path: Path, setup: Setup, replicas: list[Replica]) -> sharding.Position:
    """Resumes after the batch that the loader had fetched and training had not used."""
    position = _load(path, setup, replicas)
    offset = position.offset + setup.scenario.batch_size
    return sharding.Position(position.epoch, offset)


def reshuffled(self: trainer.Trainer, step: int) -> None:
    """Draws the epoch's order again on resume, from another state of the generator."""
    _stop_and_resume(self, step)
    rng = self.plan.rng("order", self.position.epoch, self.position.offset)
    self._visit = self.position.epoch, sharding.order(self.plan.num_samples, rng)


def since_resume(self: trainer.Trainer, step: int) -> dict[str, Any]:
    """Counts the samples since the last resume, not since the epoch began."""
    base = getattr(self, "resumed_at", 0)
    return {**_progress(self, step), "offset": self.position.offset - base}


def resumed_at(self: trainer.Trainer, step: int) -> None:
    """Notes the offset of the resume, from which `since_resume` counts."""
    _stop_and_resume(self, step)
    vars(self)["resumed_at"] = self.position.offset


def shifted(arrays: Mapping[str, NDArray[Any]], group: str) -> dict[str, NDArray[Any]]:
    """Reads the moments with another alignment than that of writing."""
    found = _group_of(arrays, group)
    return {name: np.roll(a, 3) for name, a in found.items()} if group == "optimizer" else found


def fresh_moments(replica: Replica, arrays: dict[str, Array]) -> None:
    """Does not restore the optimizer."""


def fresh_count(replica: Replica, arrays: dict[str, Array]) -> None:
    """Restores the moments but not the count of steps."""
    zeroed = {n: a * 0 if n.endswith("/step") else a for n, a in arrays.items()}
    _load_optimizer(replica, zeroed)


def fresh_schedule(replica: Replica, schedule_step: int) -> None:
    """Starts the schedule over."""


def stale_buffers(path: Path, replicas: list[Replica], position: sharding.Position) -> None:
    """Saves the registered buffer, which out-of-place updates no longer change."""
    first = replicas[0]
    registered = {**first.tensors, "running_mean": torch.zeros(64)}
    _save(path, [replace(first, tensors=registered), *replicas[1:]], position)


def remembering(replica: Replica) -> None:
    """Steps, and keeps the weights from before the step for `one_step_old`."""
    _before[replica.rank] = {n: t.detach().clone() for n, t in replica.tensors.items()}
    replica.optimizer.step()


def one_step_old(path: Path, replicas: list[Replica], position: sharding.Position) -> None:
    """Saves the weights from before the latest step."""
    first = replicas[0]
    _save(path, [replace(first, tensors=_before[first.rank]), *replicas[1:]], position)


def rank_0s(states: dict[str, str], rank: int) -> dict[str, Any]:
    """Gives every rank the random state of rank 0."""
    return _restored_rng(states, 0)


_restored_rng = loop.restored_rng

# Epoch 1 is steps 3, 4 and 5, on samples 0-7, 8-15 and 16-20 of its order.
_MID_EPOCH = reference(stops=(4,), num_steps=6)
_TWICE = reference(stops=(4, 5), num_steps=6)
_STATEFUL = textbook(stops=(4,), num_steps=6, optimizer="momentum", schedule="linear")
_ADAM = textbook(stops=(4,), num_steps=6, optimizer="adamw", learning_rate=0.01)
_ACCUMULATED = textbook(
    world_size=1, stops=(2,), num_steps=4, num_samples=32, batch_size=8, accumulation=2
)


def _moved(expected: list[int], got: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(expected) ^ set(got)))


_EPOCH_1 = visit(_MID_EPOCH, epoch=1)

VARIANTS = (
    Variant(
        name="position-lost",
        summary="a resume starts the epoch over",
        source="classic",
        plants={f"{TRAINING}.checkpoint.load": epoch_start},
        scenario=_MID_EPOCH,
        invariants=("F-TI-003",),
        # Shard 0 of step 4 is samples 8-9 of the order, and 0-1 once the place is lost.
        place={
            "step": 4,
            "rank": 0,
            "shard": 0,
            "sample_ids": _moved(_EPOCH_1[8:10], _EPOCH_1[0:2]),
        },
    ),
    Variant(
        name="resume-rng",
        summary="the order is drawn again from the mid-epoch generator, then n are skipped",
        source="transgenic #59, accelerate #4233",
        plants={f"{REFERENCE}.Trainer._stop_and_resume": reshuffled},
        scenario=_MID_EPOCH,
        invariants=("F-TI-003",),
        place={"step": 4, "rank": 0, "shard": 0},
    ),
    Variant(
        name="gas-resume",
        summary="the resume offset ignores accumulation",
        source="gpt-neox d6f571b2",
        plants={f"{TEXTBOOK}.load": by_iteration},
        scenario=_ACCUMULATED,
        invariants=("F-DP-002",),
        # Offset 16 / 2 = 8: samples 8-15 again, the first micro-batch of four first.
        place={
            "step": 2,
            "rank": 0,
            "shard": 0,
            "sample_ids": tuple(visit(_ACCUMULATED)[8:12]),
        },
    ),
    Variant(
        name="prefetch-skipped",
        summary="the saved position is the prefetching loader's, one batch ahead",
        source="classic (prefetch)",
        plants={f"{TEXTBOOK}.load": prefetched},
        scenario=_ACCUMULATED.with_(num_steps=5),
        invariants=("F-DP-002",),
        # Steps 0 and 1, then samples 24-31 in step 2: the epoch ends there without 16-23.
        place={"step": 2, "sample_ids": tuple(sorted(visit(_ACCUMULATED)[16:24]))},
    ),
    Variant(
        name="second-resume",
        summary="the position counts from the last resume, so the second resume goes back",
        source="torchtitan #3908",
        plants={
            f"{REPLICAS}.Replicas.progress": since_resume,
            f"{REFERENCE}.Trainer._stop_and_resume": resumed_at,
        },
        scenario=_TWICE,
        invariants=("F-TI-003",),
        # Right until step 5, whose shard 0 is sample 16 of the order and becomes 8-9.
        place={
            "step": 5,
            "rank": 0,
            "shard": 0,
            "sample_ids": _moved(_EPOCH_1[16:17], _EPOCH_1[8:10]),
        },
    ),
    Variant(
        name="ckpt-pad",
        summary="moments are read with a different alignment from the one they were written with",
        source="DeepSpeed #5105",
        plants={f"{TRAINING}.checkpoint.group_of": shifted},
        scenario=_MID_EPOCH.with_(optimizer="momentum"),
        invariants=("F-TI-002",),
        place={"step": 4, "rank": 0, "tensor": "momentum"},
    ),
    Variant(
        name="moments-lost",
        summary="the optimizer starts empty after a resume",
        source="classic",
        plants={f"{TEXTBOOK}.load_optimizer": fresh_moments},
        scenario=_STATEFUL,
        invariants=("F-TI-002",),
        place={"step": 4, "rank": 0, "tensor": "0/momentum_buffer"},
    ),
    Variant(
        name="adam-count-lost",
        summary="Adam's count of steps, and with it the bias correction, starts over",
        source="torchtitan #275",
        plants={f"{TEXTBOOK}.load_optimizer": fresh_count},
        scenario=_ADAM,
        invariants=("F-TI-002",),
        place={"step": 4, "rank": 0, "tensor": "0/step"},
    ),
    Variant(
        name="sched-lost",
        summary="the schedule starts over after a resume",
        source="torchtitan #275, nanotron 4cc62ae8",
        plants={f"{TEXTBOOK}.load_schedule": fresh_schedule},
        scenario=_STATEFUL,
        invariants=("F-TI-003", "F-TI-002", "F-TI-008"),
        place={"step": 4, "rank": 0},
    ),
    Variant(
        name="buf-reassign",
        summary="a buffer updated out of place is saved as it was registered",
        source="torchtitan #1226",
        plants={f"{TEXTBOOK}.save": stale_buffers},
        scenario=_STATEFUL,
        invariants=("F-TI-002",),
        place={"step": 4, "rank": 0, "tensor": "running_mean"},
    ),
    Variant(
        name="weights-one-step-old",
        summary="the checkpoint holds the weights of one step earlier",
        source="classic (asynchronous save)",
        plants={
            f"{TEXTBOOK}.optimizer_step": remembering,
            f"{TEXTBOOK}.save": one_step_old,
        },
        scenario=_STATEFUL,
        invariants=("F-TI-002",),
        place={"step": 4, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="rng-restore",
        summary="every rank restores the random state of rank 0",
        source="Megatron-LM #6858",
        plants={f"{TEXTBOOK}.restored_rng": rank_0s},
        scenario=textbook(stops=(1,), dropout=0.2),
        invariants=("F-TI-005", "F-TI-003"),
        place={"step": 1, "rank": 1, "shard": 1},
    ),
)
