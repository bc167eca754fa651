"""A `GradScaler` multiplies a loss, and divides the gradients: the training is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrenar_py.check.diff import judge
from entrenar_py.check.observing.borders import Borders
from entrenar_py.check.observing.loss_terms import Losses
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, RankBorders, Settings


def run(scale: float, factor: float = 1.0) -> list[RankBorders]:
    """Return the borders of a step with a scaler, in which the loss is wrong by `factor`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Linear(80, 80), nn.Linear(80, 1))
    borders, problems, losses = list[Border](), list[str](), Losses()
    recorder = Borders(net, borders.append, Settings(), failed=problems.append)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    recorder.begin_pass(0, 0)
    loss = net(torch.ones(2, 3)).square().mean() * factor
    losses.scaled(scale, loss)
    scaled = scaler.scale(loss)
    begun = losses.begun(scaled, is_plain=True)
    recorder.loss(begun.value, begun.scale)
    scaled.backward()
    scaler.unscale_(optimizer)
    recorder.before_step(0, [optimizer])
    optimizer.step()
    recorder.after_step()
    assert not problems
    return [RankBorders(rank=0, borders=borders)]


@pytest.mark.parametrize("scale", [2.0**10, 2.0**16])
def test_gradients_are_compared_without_the_scale(scale: float) -> None:
    """Powers of two change no bits. The middle layer is large enough to be a projection."""
    assert judge.judge(run(1.0), run(scale), []).bits is None


def test_a_loss_that_is_twice_as_large_is_no_scale() -> None:
    """What no scaler has multiplied is not divided."""
    found = judge.judge(run(1.0), run(2.0**16, factor=2.0), []).real
    assert found is not None
    assert found.border.kind == border_file.LOSS
