"""One worker is given what the models and losses of several ranks were given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from entrenar_py.check.observing import BATCHES, BATCHES_KEPT, FOLDER, replayed_batches
from entrenar_py.check.observing.replayed_batches import Giving, Keeping

ROWS = [torch.arange(6).view(3, 2) + 10 * rank for rank in range(2)]
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
    kept(tmp_path, (ROWS[0], MASK), (ROWS[1], MASK))
    x, mask = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bool)
    y = torch.zeros(3, dtype=torch.bfloat16)
    Giving(tmp_path, 2, in_turn=False).passes(((x,), {"mask": mask}))
    assert x.tolist() == [*ROWS[0].tolist(), *ROWS[1].tolist()]
    assert mask.all()
    assert y.tolist() == x.sum(1).tolist()


def test_as_many_micro_batches_as_all_ranks_have(tmp_path: Path) -> None:
    """They come in turn, as long as there are some."""
    kept(tmp_path, (ROWS[0],), (ROWS[1],))
    giving = Giving(tmp_path, 2, in_turn=True)
    given = [torch.zeros(3, 2, dtype=torch.int64) for _ in range(3)]
    for x in given:
        giving.passes(((x,), {}))
    assert [x.tolist() for x in given] == [ROWS[0].tolist(), ROWS[1].tolist(), [[0, 0]] * 3]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ([(ROWS[0],), (ROWS[1][:2],)], (ROWS[0].clone(),)),  # ranks have other numbers of rows
        ([(ROWS[0][:1],), (ROWS[1][:1],)], (ROWS[0][:1].clone(),)),
        ([(ROWS[0],), (ROWS[1],)], (ROWS[0].clone(), MASK.clone())),
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

    assert torch.func.vmap(halved)(ROWS[0]).tolist() == (ROWS[0] / 2).tolist()
    keeping.passes(((torch.empty(3, device="meta"),), {"y": torch.eye(2).to_sparse()}))


def test_a_pass_that_began_before_the_record_is_kept_as_it_ends(tmp_path: Path) -> None:
    """Its inputs are known by then; those that one worker's module was called with are changed."""
    for rank in range(2):
        keeping = Keeping(tmp_path, rank)
        keeping.passes(((), {}))
        for _ in range(2):
            keeping.passed(((ROWS[rank],), {}))
    x = torch.zeros(3, 2, dtype=torch.int64)
    giving = Giving(tmp_path, 2, in_turn=False)
    giving.called = (x,), {}
    giving.passes(((), {}))
    assert x.tolist() == [*ROWS[0].tolist(), *ROWS[1].tolist()]


def test_an_input_by_which_a_penalty_takes_a_gradient(tmp_path: Path) -> None:
    """It is replaced as others are, and still requires its gradient."""
    kept(tmp_path, *((rows.float().requires_grad_(True),) for rows in ROWS))
    x = torch.zeros(3, 2, requires_grad=True)
    Giving(tmp_path, 2, in_turn=False).passes(((x,), {}))
    assert x.tolist() == [*ROWS[0].tolist(), *ROWS[1].tolist()]
    (slope,) = torch.autograd.grad(x.square().sum(), x)
    assert torch.equal(slope, 2 * x)
