"""Operands without a gradient: what is heard of them, and how those of several ranks are joined."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from entrenar_py.check.observing import replayed_batches
from entrenar_py.check.observing.replayed_batches import (
    ROWS,
    Giving,
    Keeping,
    Named,
    joined_operands,
)


def operands(rows: int, **tensors: Tensor) -> dict[str, Tensor]:
    """Return the operands of an operation, whose operand with a gradient has so many rows."""
    return {ROWS: torch.tensor(rows), **tensors}


def one(own: dict[str, Tensor], *ranks: dict[str, Tensor]) -> Tensor:
    """Return what takes the place of the first operand."""
    changed = joined_operands(own, ranks)
    assert changed is not None
    return next(tensor for name, tensor in changed.items() if name != ROWS)


def test_rows_of_all_ranks_take_the_place_of_own_ones() -> None:
    """Rows of other contents are samples; equal ones are, where as many others have gradients."""
    first, second = torch.zeros(3), torch.ones(3)
    assert one(operands(6, x=first), operands(3, x=first), operands(3, x=second)).tolist() == [
        *first.tolist(),
        *second.tolist(),
    ]
    assert len(one(operands(0, x=first), operands(0, x=first), operands(0, x=second))) == 6
    assert len(one(operands(6, x=first), operands(3, x=first), operands(3, x=first))) == 6
    assert len(one(operands(0, x=first), operands(0, x=first), operands(0, x=first))) == 3


def test_a_number_by_which_a_loss_is_weighted_is_the_mean() -> None:
    """Gradients are linear in it; by a number that divides they aren't, and it is left."""
    own, ranks = torch.tensor(5.0), (torch.tensor(1.0), torch.tensor(3.0))
    means = [{"mul 1": number, ROWS: torch.tensor(0)} for number in ranks]
    assert one({"mul 1": own, ROWS: torch.tensor(0)}, *means) == 2
    counts = [{"div 1": number, ROWS: torch.tensor(0)} for number in ranks]
    assert one({"div 1": own, ROWS: torch.tensor(0)}, *counts) == 5


def test_another_operation_is_not_replaced() -> None:
    """What doesn't fit is left to the comparison."""
    assert joined_operands(operands(0, x=torch.ones(1)), [operands(0, y=torch.ones(1))] * 2) is None


def test_what_a_loss_takes_beside_the_model_is_that_of_all_ranks(tmp_path: Path) -> None:
    """One worker's gradient is the mean of the ranks', though its own rows are other ones."""
    net = nn.Linear(2, 1)
    rows = torch.arange(8.0).view(2, 2, 2)
    gains = torch.tensor([[1.0, 2.0], [-3.0, 5.0]])

    def gradient(x: Tensor, gain: Tensor) -> Tensor:
        net.zero_grad()
        (net(x).squeeze(1) * gain).mean().backward()
        assert net.weight.grad is not None
        return net.weight.grad.clone()

    due = torch.zeros(1, 2)
    for rank in range(2):
        with replayed_batches.OperandsMode(Keeping(tmp_path, rank).operands):
            due += gradient(rows[rank], gains[rank]) / 2
    giving = Giving(tmp_path, 2, in_turn=False)
    with replayed_batches.OperandsMode(giving.operands):
        assert torch.allclose(gradient(torch.zeros(2, 2), torch.zeros(2)), due)


def test_changes_in_place_and_passes_without_gradients_are_not_heard() -> None:
    """What is written to is the script's own, and nothing follows from the rest."""
    heard: list[str] = []

    def change(own: dict[str, Tensor]) -> Named:
        heard.extend(name for name in own if name != ROWS)
        return own

    net = nn.Linear(2, 1)
    with replayed_batches.OperandsMode(change):
        with torch.no_grad():
            net(torch.ones(1, 2))
        out = torch.zeros(1, 1)
        out += net(torch.ones(1, 2))
        out.sum().backward()  # type: ignore[no-untyped-call]
    assert heard == ["linear 0"]


def test_what_no_gradient_follows_from_goes_on_with_more_rows() -> None:
    """It has one rank's rows, and meets those of all; other sizes fail as they would."""

    def change(own: dict[str, Tensor]) -> Named:
        return own

    own, given = torch.arange(3.0), torch.zeros(6)
    with replayed_batches.OperandsMode(change, 2):
        with torch.no_grad():
            assert (own - given).tolist() == [0, 1, 2, 0, 1, 2]
        labels = torch.ones(3, dtype=torch.int64)
        assert nn.functional.cross_entropy(torch.zeros(6, 2), labels) == math.log(2)
        with pytest.raises(RuntimeError, match="must match"):
            own + torch.zeros(5)
    with replayed_batches.OperandsMode(change), pytest.raises(RuntimeError, match="must match"):
        own + given


def test_a_loss_is_heard_once_with_the_operations_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have looked it up before operations are heard, as its first pass begins."""
    monkeypatch.setattr(replayed_batches, "_CURRENT", [Keeping(tmp_path, 0)])
    heard = replayed_batches._scored(nn.functional.mse_loss, replayed_batches._LOSSES_HEARD)
    score, target = nn.Linear(2, 1)(torch.ones(3, 2)), torch.zeros(3, 1)
    heard(score, target)
    with replayed_batches.OperandsMode(lambda own: own):
        heard(score, target)
        with torch.overrides._pop_mode_temporarily():
            heard(score, target)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b'["target"') == 2
