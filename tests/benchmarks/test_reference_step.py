"""The cost of a step of the reference trainer, against one without digests and torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train import reference

NUM_STEPS = 50
ROUNDS = 40
SCENARIO = Scenario(
    system="reference",
    workload="linear",
    world_size=4,
    num_shards=4,
    seed=0,
    num_samples=800,  # no short batch in all the steps
    batch_size=16,
    num_steps=NUM_STEPS,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As `systems.run` has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainings() -> Callable[[], str]:
    """Each call is one training on a trainer that was built before."""
    trainers = iter([reference.Trainer(SCENARIO) for _ in range(ROUNDS + 1)])
    return lambda: next(trainers).train()


def test_digests(beside: Callable[..., list[float]], say: Callable[[str], None]) -> None:
    """A training with all its digests against the same one that computes none."""
    no_digest = trace.TensorRecord("")
    bare = trainings()

    def without_digests() -> None:
        with patch.object(trace, "record_tensor", lambda tensor, *, values: no_digest):
            bare()

    seconds = beside(
        "reference step with digests / without",
        ours=trainings(),
        peer=without_digests,
        rounds=ROUNDS,
    )
    rate = NUM_STEPS / min(seconds)
    say(f"reference steps with digests, linear, 4 workers: {rate:,.0f}/s (goal 3,000/s)")


def test_torch_alone(beside: Callable[..., list[float]]) -> None:
    """A training against the forward and backward passes in it, and nothing else."""
    x, y = torch.rand(4, 1), torch.rand(4, 1)
    replicas = [(torch.rand(1, 1), torch.rand(1)) for _ in range(SCENARIO.world_size)]
    for weight, bias in replicas:
        weight.requires_grad_()
        bias.requires_grad_()

    def passes() -> None:
        for _ in range(NUM_STEPS):
            for weight, bias in replicas:
                loss = F.mse_loss(F.linear(x, weight, bias), y, reduction="sum")
                torch.autograd.grad(loss, (weight, bias))

    beside(
        "reference step with digests / torch forward and backward alone",
        ours=trainings(),
        peer=passes,
        rounds=ROUNDS,
    )
