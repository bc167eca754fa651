"""One worker is given the batches of several, and the operands that its gradients follow from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from entrenar_py.check.observing import BATCHES, BATCHES_KEPT, FOLDER, replayed_batches
from entrenar_py.check.observing.replayed_batches import (
    ROWS,
    Giving,
    Keeping,
    Named,
    joined_operands,
)

BATCHES_OF_RANKS = [torch.arange(6).view(3, 2) + 10 * rank for rank in range(2)]
MASK = torch.ones(2, 2, dtype=torch.bool)


@pytest.fixture(autouse=True)
def unheard_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations would be heard for the life of this process."""
    monkeypatch.setattr(replayed_batches, "begin_operands", lambda *_: None)


def kept(folder: Path, *given: tuple[Tensor, ...]) -> None:
    """Keep a pass for each of `given`, one rank after the other in turn."""
    for number, inputs in enumerate(given):
        x, y = inputs[0], inputs[0].sum(1).bfloat16()
        assert len(y) == len(x)  # y lies beside the inputs
        Keeping(folder, number % 2).passes((inputs, {}))


def test_the_rows_of_all_ranks(tmp_path: Path) -> None:
    """They are joined; what has other dimensions is the same on all ranks."""
    kept(tmp_path, (BATCHES_OF_RANKS[0], MASK), (BATCHES_OF_RANKS[1], MASK))
    x, mask = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bool)
    y = torch.zeros(3, dtype=torch.bfloat16)
    Giving(tmp_path, 2, in_turn=False).passes(((x,), {"mask": mask}))
    assert x.tolist() == [*BATCHES_OF_RANKS[0].tolist(), *BATCHES_OF_RANKS[1].tolist()]
    assert mask.all()
    assert y.tolist() == x.sum(1).tolist()


def test_as_many_micro_batches_as_all_ranks_have(tmp_path: Path) -> None:
    """They come in turn, as long as there are some."""
    kept(tmp_path, (BATCHES_OF_RANKS[0],), (BATCHES_OF_RANKS[1],))
    giving = Giving(tmp_path, 2, in_turn=True)
    given = [torch.zeros(3, 2, dtype=torch.int64) for _ in range(3)]
    for x in given:
        giving.passes(((x,), {}))
    assert [x.tolist() for x in given] == [
        BATCHES_OF_RANKS[0].tolist(),
        BATCHES_OF_RANKS[1].tolist(),
        [[0, 0]] * 3,
    ]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (
            [(BATCHES_OF_RANKS[0],), (BATCHES_OF_RANKS[1][:2],)],
            (BATCHES_OF_RANKS[0].clone(),),
        ),  # ranks have other numbers of rows
        (
            [(BATCHES_OF_RANKS[0][:1],), (BATCHES_OF_RANKS[1][:1],)],
            (BATCHES_OF_RANKS[0][:1].clone(),),
        ),
        (
            [(BATCHES_OF_RANKS[0],), (BATCHES_OF_RANKS[1],)],
            (BATCHES_OF_RANKS[0].clone(), MASK.clone()),
        ),
    ],
)
def test_what_can_t_be_given(
    tmp_path: Path, given: list[tuple[Tensor, ...]], own: tuple[Tensor, ...]
) -> None:
    """The script fails then, and nothing is compared."""
    kept(tmp_path, *given)
    with pytest.raises(LookupError):
        Giving(tmp_path, 2, in_turn=False).passes((own, {}))


def test_a_target_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that hears operands has torch call a loss again; a script may have got it before."""
    for name in replayed_batches._LOSSES:  # which are replaced in this process
        monkeypatch.setattr(functional, name, getattr(functional, name))
    monkeypatch.setattr(replayed_batches, "_LOSSES_HEARD", replayed_batches._Losses())
    monkeypatch.setattr(replayed_batches, "_CURRENT", [])
    monkeypatch.setenv(BATCHES, BATCHES_KEPT)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    before = functional.cross_entropy
    keeping = replayed_batches.begin(0)
    assert keeping is not None
    scores, targets = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2])
    with replayed_batches.OperandsMode(keeping.operands):
        before(scores, targets)
        functional.cross_entropy(scores, targets)
    functional.cross_entropy(scores, targets)
    assert len(replayed_batches._read(tmp_path / "00000.batches")["target"]) == 3


def test_too_much_is_not_kept(tmp_path: Path) -> None:
    """A rank's file is small."""
    keeping = Keeping(tmp_path, 0)
    for _ in range(3):
        keeping.passes(((torch.zeros(2**21),), {}))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2**24 + 1000


def test_tensors_without_bytes_are_left_alone(tmp_path: Path) -> None:
    """A script that takes gradients of each sample by `torch.func` goes on."""
    keeping = Keeping(tmp_path, 0)

    def halved(x: Tensor) -> Tensor:
        keeping.passes(((x,), {}))
        return x / 2

    assert (
        torch.func.vmap(halved)(BATCHES_OF_RANKS[0]).tolist() == (BATCHES_OF_RANKS[0] / 2).tolist()
    )
    keeping.passes(((torch.empty(3, device="meta"),), {"y": torch.eye(2).to_sparse()}))


def test_a_pass_that_began_before_the_record_is_kept_as_it_ends(tmp_path: Path) -> None:
    """Its inputs are known by then; those that one worker's module was called with are changed."""
    for rank in range(2):
        keeping = Keeping(tmp_path, rank)
        keeping.passes(((), {}))
        for _ in range(2):
            keeping.passed(((BATCHES_OF_RANKS[rank],), {}))
    x = torch.zeros(3, 2, dtype=torch.int64)
    giving = Giving(tmp_path, 2, in_turn=False)
    giving.called = (x,), {}
    giving.passes(((), {}))
    assert x.tolist() == [*BATCHES_OF_RANKS[0].tolist(), *BATCHES_OF_RANKS[1].tolist()]


def test_an_input_by_which_a_penalty_takes_a_gradient(tmp_path: Path) -> None:
    """It is replaced as others are, and still requires its gradient."""
    kept(tmp_path, *((rows.float().requires_grad_(True),) for rows in BATCHES_OF_RANKS))
    x = torch.zeros(3, 2, requires_grad=True)
    Giving(tmp_path, 2, in_turn=False).passes(((x,), {}))
    assert x.tolist() == [*BATCHES_OF_RANKS[0].tolist(), *BATCHES_OF_RANKS[1].tolist()]
    (slope,) = torch.autograd.grad(x.square().sum(), x)
    assert torch.equal(slope, 2 * x)


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
