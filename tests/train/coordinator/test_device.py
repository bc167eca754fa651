"""A worker on a device that computes ahead has the bits of a worker that doesn't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from entrenar_py.compute import on_torch
from entrenar_py.compute.on_torch import CpuBackend, ResidentStep
from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.replicas import Worker
from tests.systems import by_hand, stars

NUM_STEPS = 4


class Device(ResidentStep):
    """A GPU made of the CPU: it has its own weights, and results only when they are waited for."""

    def __init__(self, workload: Any, tensors: dict[str, torch.Tensor], scale: float) -> None:
        self.log: list[str] = []
        self._of, self._scale_of = workload, scale
        self._there = [s.name for s in workload.specs if s.role == "trainable"]
        self._given = tensors
        self._sizes = [tensors[name].numel() for name in self._there]
        self.weights = torch.full((sum(self._sizes),), float("nan"))
        self._is_current = False

    @property
    def failures(self) -> Any:
        return nullcontext

    def upload(self) -> None:
        if not self._is_current:
            self.weights.copy_(torch.cat([self._given[n].detach().flatten() for n in self._there]))
        self._is_current = True

    def changed_buffers(self) -> None:
        pass

    def __call__(self, ids: Sequence[int], drop: Any) -> Any:
        self.upload()
        self.log.append("computed at once")
        return self._computed_with(self.weights.clone(), ids, drop)

    def begin(self, ids: Sequence[int]) -> on_torch.Begun:
        self.upload()
        self.log.append("begun")
        loss, gradients = self._computed_with(self.weights.clone(), ids, lambda tensor: tensor)

        def wait() -> Any:
            self.log.append("waited")
            return loss, [gradient.copy() for gradient in gradients]

        return on_torch.Begun(torch.cat([torch.tensor(g).flatten() for g in gradients]), wait)

    def _computed_with(self, weights: torch.Tensor, ids: Sequence[int], drop: Any) -> Any:
        parts = zip(self._there, torch.split(weights, self._sizes), strict=True)
        shaped = {
            name: part.view(self._given[name].shape).clone().requires_grad_()
            for name, part in parts
        }
        tensors = {**self._given, **shaped}
        return self._of.gradients(tensors, ids, drop=drop, scale=self._scale_of)


class Gpu(CpuBackend):
    """The backend of `Device`."""

    def stepper(self, workload: Any, tensors: Any, *, scale: float) -> Any:
        return Device(workload, tensors, scale)


def met(*, on_device: bool) -> by_hand.Hands:
    """Return a server and one worker before the first step."""
    subject = stars.subject(
        "parameter_server",
        world_size=1,
        num_shards=4,
        num_steps=NUM_STEPS,
        optimizer="adamw",
        clip_norm=1e-3,
        weight_decay=0.1,
        workload="linear",
    )
    return by_hand.met(subject, backend=Gpu("gpu") if on_device else on_torch.open_cpu())


def trained(*, on_device: bool, shards: Callable[[int], list[tuple[int, ...]]]) -> by_hand.Hands:
    """Return the hands of a run in which one worker gets the `shards` of each step in parts."""
    hands = met(on_device=on_device)
    for step in range(NUM_STEPS):
        for part in shards(step):
            by_hand.deliver(hands, 0, step, part)
        by_hand.make(hands, step)
    return hands


def updates(hands: by_hand.Hands) -> list[trace.Update]:
    return hands.server.recorder.of(trace.Update)


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param(lambda step: [(0, 1, 2, 3)], id="all at once"),
        pytest.param(lambda step: [(0, 1), (2, 3)], id="in two parts"),
        pytest.param(
            lambda step: [(step % 4,), (*range(step % 4),), (*range(step % 4 + 1, 4),)],
            id="others than were begun",
        ),
    ],
)
def test_a_worker_that_computes_ahead_has_the_bits_of_one_that_does_not(
    shards: Callable[[int], list[tuple[int, ...]]],
) -> None:
    """Norms, weights and moments are those of the host in each step, and of the server."""
    ours = trained(on_device=True, shards=lambda s: [one for one in shards(s) if one])
    theirs = trained(on_device=False, shards=lambda s: [one for one in shards(s) if one])
    assert isinstance(ours.members[0].worker, Worker)
    assert ours.members[0].worker.on_device is not None
    assert updates(ours) == updates(theirs)
    assert len(updates(ours)) == NUM_STEPS
    state = ours.server.replicas.state(ours.server.replica)
    assert state == ours.members[0].replicas.state(ours.members[0].worker)


def test_the_first_shard_is_begun_before_the_step_is_recorded() -> None:
    """It is begun after the norm of the clipped gradient, and waited for in the next step."""
    hands = trained(on_device=True, shards=lambda step: [(0, 1), (2, 3)])
    device = hands.members[0].worker.replica.resident
    assert isinstance(device, Device)
    assert device.log.count("begun") == device.log.count("waited") > NUM_STEPS
    assert "computed at once" not in device.log
    # The first shard of a step is begun at the end of the step before, and the next one with it.
    assert device.log[:8] == ["begun", "begun", "waited", "waited"] * 2
    assert device.log[8:12] == ["begun", "begun", "waited", "waited"]
    assert Member is type(hands.members[0])


def test_a_worker_with_all_shards_takes_the_step_before_it_reads_the_last_gradient() -> None:
    """It has the sum itself, and begins the next step without the coordinator's average."""
    hands = trained(on_device=True, shards=lambda step: [(0, 1, 2, 3)])
    device = hands.members[0].worker.replica.resident
    assert isinstance(device, Device)
    # The epoch's last step has empty shards.
    full = 8 * (NUM_STEPS - 1)
    assert device.log[:full] == ["begun", *["begun", "waited"] * (4 * NUM_STEPS)][:full]


def test_an_average_that_differs_from_the_one_used_is_refused() -> None:
    """The worker must not go on from weights that differ from the coordinator's."""
    hands = met(on_device=True)
    by_hand.deliver(hands, 0, 0, (0, 1, 2, 3))
    by_hand.average(hands, 0, 0)
    member = hands.members[0]
    member.held.vector[0] += 1
    with pytest.raises(ProtocolError, match=r"Average of step 0: it differs"):
        member.make_held(0)
