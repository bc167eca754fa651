"""The workloads as chains of torch layers compute the same function as their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules
from entrenar_py.train.coordinator import models

NAMES = ("linear", "mlp", "decoder", "decoder_full")


def scenario(name: str) -> Scenario:
    """Return a scenario with twelve samples."""
    return Scenario(
        system="tensor_parallel",
        workload=name,
        world_size=1,
        seed=3,
        num_samples=12,
        batch_size=5,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_workload_s(name: str) -> None:
    """Equal tensors give an equal loss, and padding rows add nothing to it."""
    subject = scenario(name)
    workload, model = models.model_of(subject), modules.build(subject)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert set(tensors) == {spec.name for spec in workload.specs}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {spec.name for spec in workload.specs if spec.role == "trainable"}
    ids = [7, 2, 11]
    expected = workload.loss_of(tensors, workload.batch(ids), linear=F.linear, drop=lambda x: x)
    data = modules.Data(subject, torch.device("cpu"))
    for num_rows in (3, 5):
        got = model(*data.batch(ids, num_rows))
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["mlp", "decoder_full"])
def test_stages_one_after_the_other_are_the_model(name: str) -> None:
    """Stages with their own units compute the model, with the shapes that `example` returns."""
    subject = scenario(name)
    whole, data = modules.build(subject), modules.Data(subject, torch.device("cpu"))
    x, targets = data.batch([1, 5], 2)
    expected = whole(x, targets)
    for unit in range(modules.num_units(subject)):
        assert x.shape == data.example(unit, 2).shape
        x = modules.build(subject, [unit])(x)
    assert whole.loss_sum(x, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_who_has_no_samples_has_a_loss_of_nothing() -> None:
    """Without samples the loss and the gradients are zero, and exist."""
    for name in NAMES:
        subject = scenario(name)
        model, data = (
            modules.build(subject),
            modules.Data(subject, torch.device("cpu")),
        )
        loss = model(*data.batch([], 1))
        loss.backward()
        assert loss.item() == 0.0
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
