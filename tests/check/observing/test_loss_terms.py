"""The terms that a backward pass begins at, as autograd's graph shows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.check.observing import loss_terms
from entrenar_py.check.observing.loss_terms import Begun, Losses

LABELS = torch.tensor([-100, 1, 2, 3, 4, 0])


def outputs() -> Tensor:
    return torch.arange(30.0).reshape(6, 5).requires_grad_()


def begun(loss: Tensor) -> Begun:
    return Losses().begun(loss, is_plain=True)


def _masked(x: Tensor) -> Tensor:
    mask = LABELS >= 0
    return (F.cross_entropy(x, LABELS, reduction="none") * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss_of", "terms"),
    [
        (lambda x: F.cross_entropy(x, LABELS) / 4, ((5.0, 0.05, 4.0, 5.0),)),
        (lambda x: 0.25 * F.cross_entropy(x, LABELS), ((5.0, 0.05, 5.0),)),
        (lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 10, ((5.0, 0.1, 10.0),)),
        (lambda x: F.cross_entropy(x, LABELS, reduction="none").sum(), ((5.0, 1.0),)),
        (
            lambda x: F.cross_entropy(x, LABELS, reduction="sum", label_smoothing=0.1) / 5,
            ((5.0, 0.18, 5.0), (5.0, 0.1 / 25, 5.0)),
        ),
        (lambda x: torch.where(LABELS > 1, x.mean(1), torch.zeros(6)).sum(), ((3.0, 1.0),)),
        (lambda x: torch.where(LABELS > 1, 0.0, x.mean(1)).sum(), ((3.0, 1.0),)),
        (_masked, ((5.0, 0.2, 5.0),)),
        (lambda x: F.mse_loss(x, torch.zeros(6, 5)), ((30.0, 1 / 30, 30.0),)),
        (lambda x: (x - 1).abs().mean(), ((30.0, 1 / 30, 30.0),)),
        (lambda x: (x - 1).abs().mean(1).sum(), ((6.0, 1.0),)),
        (lambda x: x.square().mean().sqrt() / 3, ((0.0, 1 / 3, 3.0),)),
        (lambda x: (2 - x.mean() * 0.5) / 2, ((30.0, -0.25 / 30, 2.0, 30.0),)),
        (lambda x: x.mean().bfloat16().view(1) / 2, ((30.0, 0.5 / 30, 2.0, 30.0),)),
        (
            lambda x: torch.stack([x.mean(), x.sum()]).mean(),
            ((30.0, 0.5 / 30, 2.0, 30.0), (30.0, 0.5, 2.0)),
        ),
        (lambda x: x.mean() + 0.1 * x.sum(), ((30.0, 1 / 30, 30.0), (30.0, 0.1))),
        (lambda x: x.mean() * x.sum(), ((0.0, 1.0),)),
    ],
)
def test_terms_are_divided_as_the_script_divides_them(
    loss_of: Callable[[Tensor], Tensor], terms: tuple[tuple[float, ...], ...]
) -> None:
    """Reductions are found below divisions, products, sums and casts; other nodes end the walk."""
    loss = loss_of(outputs())
    found = begun(loss)
    assert found.value == float(loss.detach())
    assert found.terms == tuple(pytest.approx(term) for term in terms)


def test_a_number_of_the_loss_beside_that_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float, or a number in the script's text, is no count; of two equal ones one is left.

    A mean of losses may be divided by their number, and a single divisor may be any.
    """
    monkeypatch.setattr(loss_terms, "divides_by", lambda number: number == 3)
    monkeypatch.setattr(loss_terms, "may_divide_by", lambda number: number == 5)
    loss = outputs().mean()
    divided = (loss / 2.0**2 / 4, loss / 4 / 4, loss / 3 / 3, loss / 3, loss / 5 / 5)
    counted = [begun(one).terms[0][2:] for one in divided]
    assert counted == [(4.0, 30.0), (4.0, 4.0, 30.0), (3.0, 30.0), (3.0, 30.0), (5.0, 30.0)]
    assert [len(term) for term in begun((loss + outputs().mean()) / 2.0 / 2).terms] == [5, 5]


def test_a_number_that_may_be_one_of_the_loss_leaves_it_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two equal divisors count once if one is the loss's own, and twice if none is."""
    monkeypatch.setattr(loss_terms, "divides_by", lambda number: False)
    monkeypatch.setattr(loss_terms, "may_divide_by", lambda number: None if number == 3 else False)
    loss = outputs().mean()
    assert [len(begun(one).terms) for one in (loss / 3 / 3, loss / 3)] == [0, 1]


def test_weights_of_classes_leave_the_number_of_elements_unknown() -> None:
    """A mean over weighted classes is divided by no number of samples."""
    loss = F.cross_entropy(outputs(), LABELS, weight=torch.arange(1.0, 6.0)) / 2
    assert begun(loss).terms == ((0.0, 0.5, 2.0),)


def test_a_scale_is_taken_out_of_a_loss_and_its_terms() -> None:
    """Before or after other divisions; and a scale under which the loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = Losses()
    loss = outputs().mean()
    for root in (scaler.scale(loss) / 4, scaler.scale(loss / 4)):
        losses.scaled(8.0, loss)
        assert losses.begun(root, is_plain=True) == (
            float(loss.detach() / 4),
            ((30.0, 1 / 120, 4.0, 30.0),),
        )
    half = torch.tensor(60000.0, dtype=torch.float16, requires_grad=True).clone()
    losses.scaled(8.0, half)
    assert losses.begun(scaler.scale(half), is_plain=True).value == 60000.0


def test_a_loss_that_another_scaler_scaled_is_unknown() -> None:
    losses = Losses()
    losses.scaled(8.0, torch.tensor(1.0))
    assert losses.begun(outputs().mean() * 2, is_plain=True).value is None


def test_a_given_gradient_and_a_graph_that_is_gone_have_no_terms() -> None:
    """What nobody can know is not guessed."""
    loss = (outputs() * outputs()).mean() * torch.tensor(2.0)
    assert Losses().begun(loss, is_plain=False) == (float(loss.detach()), ())
    assert begun(torch.tensor(1.0, requires_grad=True)).terms == ()
    other = F.cross_entropy(outputs(), LABELS)
    other.backward()  # type: ignore[no-untyped-call]
    assert begun(other).terms == ()
