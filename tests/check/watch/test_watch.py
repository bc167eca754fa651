"""The watch in one process: findings that stop a training, and the report on what is watched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import entrenar_py
from entrenar_py import WatchFinding
from entrenar_py.check.observing import FOLDER
from entrenar_py.check.rank_files import rank_file
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.shared.trace import Update


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same weights in every run.

    In 13 of 400 seeds a model of these tests learns its constant data exactly. Its gradients are
    zero then, and a tensor that does not move is right.
    """
    torch.manual_seed(0)


def train(
    model: nn.Module,
    num_steps: int,
    *,
    trained: Sequence[torch.Tensor] = (),
    spoil: int | None = None,
    rate: float = 0.1,
    **options: Any,
) -> entrenar_py.Observation:
    """Make watched steps; before step `spoil` the first parameter gets a NaN."""
    optimizer = torch.optim.SGD(list(trained) or model.parameters(), lr=rate)
    observation = entrenar_py.observe(model, optimizer, **{"every": 1, "patience": 3, **options})
    for step in range(num_steps):
        model(torch.ones(3, 2)).square().sum().backward()
        with torch.no_grad():
            if step == spoil:
                next(model.parameters()).view(-1)[0] = float("nan")
        optimizer.step()
        model.zero_grad()
    observation.close()
    return observation


def test_a_nan_stops_it() -> None:
    """A NaN raises out of `optimizer.step()`, in the step after which it is there."""
    with pytest.raises(WatchFinding, match="F-DP-003: step 2, tensor weight: rank 0: NaN") as found:
        train(nn.Linear(2, 1), 5, spoil=2)
    assert (found.value.step, found.value.ranks, found.value.tensor) == (2, (0,), "weight")


def test_a_step_that_calls_its_base_class() -> None:
    """torch calls hooks in both steps, that of a class and that of its base class: it is one."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = nn.Linear(2, 1)
    optimizer = Twice(model.parameters(), lr=0.1)
    observation = entrenar_py.observe(model, optimizer, every=1)
    for _ in range(3):
        model(torch.ones(3, 2)).square().sum().backward()
        optimizer.step()
    observation.close()
    assert max(watched.steps for watched in observation.watched()) == 3


def test_a_callback_goes_on() -> None:
    """The callback is called for every watched step that breaks a clause."""
    found: list[WatchFinding] = []
    train(nn.Linear(2, 1), 7, spoil=2, every=2, on_finding=found.append)
    assert [(one.clause, one.step) for one in found] == [("F-DP-003", 3), ("F-DP-003", 5)]


def test_a_parameter_that_the_optimizer_does_not_know() -> None:
    """A parameter with a gradient that is in no optimizer is found not to move."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(WatchFinding, match=r"F-TI-004: step 4, tensor 0\.weight: .*; 2 ten") as one:
        train(model, 9, trained=list(model[1].parameters()))
    assert one.value.ranks == (0,)


def test_updates_that_round_to_nothing() -> None:
    """bfloat16 weights of 1 don't move by a thousandth."""
    layer = nn.Linear(2, 1).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1)
    layer.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
    with pytest.raises(WatchFinding, match=r"tensor weight: .*its updates round to nothing"):
        train(layer, 9, trained=[layer.weight], rate=1e-5)


class LowRank(nn.Module):
    """A frozen layer with a LoRA next to it, whose B is zero, and an unused tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 1).requires_grad_(False)
        self.a = nn.Parameter(torch.ones(1, 2))
        self.b = nn.Parameter(torch.zeros(1, 1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.ones(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, and give the frozen B a gradient that isn't zero."""
        self.b.grad = torch.ones(1, 1)
        low = x @ self.a.t() @ self.b.t() + self.empty.sum() + 0 * self.unused.sum()
        return self.frozen(x) + low  # type: ignore[no-any-return]


def test_what_rightly_stays() -> None:
    """Tensors that rightly stay are not reported.

    These are A while B is zero, frozen tensors, and all tensors at zero gradients or a zero rate.
    """
    model = LowRank()
    trained = [model.a, model.unused, model.empty]
    (_, finiteness, liveness) = train(model, 9, trained=trained).watched()
    assert (finiteness.steps, finiteness.comparisons) == (9, 54)
    # Where all rests by right nothing was looked at, and nothing is said to have been.
    assert (liveness.steps, liveness.comparisons) == (0, 0)
    train(nn.Linear(2, 1), 9, rate=0.0)


@pytest.mark.parametrize(
    ("kind", "rate", "scale"),
    [
        (torch.optim.AdamW, 1e-8, 1.0),  # the end of a schedule to zero
        (torch.optim.SGD, 0.1, 1e-8),  # all is learned
        (torch.optim.Adam, torch.tensor(0.0), 1.0),
    ],
)
def test_steps_too_small_for_float32(kind: Any, rate: Any, scale: float) -> None:
    """Weights of 1 can't move by so little, which is right."""
    norm = nn.LayerNorm(4)
    before = norm.weight.clone()
    optimizer = kind(norm.parameters(), lr=rate)
    observation = entrenar_py.observe(norm, optimizer, every=1, patience=3)
    for _ in range(9):
        (scale * norm(torch.arange(4.0)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    observation.close()
    assert norm.weight.equal(before)


def test_a_sparse_gradient_of_a_parameter_that_the_optimizer_does_not_know() -> None:
    """Its values are looked at."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    entrenar_py.observe(model, optimizer, every=1, patience=3)
    for _ in range(4):
        model(torch.arange(3)).square().sum().backward()
        optimizer.step()
    model(torch.arange(3)).square().sum().backward()
    with pytest.raises(WatchFinding, match=r"F-TI-004: step 4, tensor 0\.weight"):
        optimizer.step()


def test_a_parameter_that_is_pruned() -> None:
    """It is no parameter any more, as the error says."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entrenar_py.observe(model, optimizer, every=1)
    optimizer.step()
    prune.l1_unstructured(model, "weight", amount=1)  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match="parameter weight was removed from the model"):
        optimizer.step()


def test_another_object_in_its_place() -> None:
    """Parameters that a script replaces are watched; other shapes are refused."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entrenar_py.observe(model, optimizer, every=1)
    optimizer.step()
    model.weight = nn.Parameter(torch.full((1, 2), torch.nan))
    with pytest.raises(WatchFinding, match="F-DP-003: step 1, tensor weight"):
        optimizer.step()
    model.weight = nn.Parameter(torch.zeros(1, 3))
    with pytest.raises(UsageError, match="have changed since"):
        optimizer.step()


def test_what_it_says_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The watch reports how often each clause was looked at, and at once what can't be."""
    with caplog.at_level(logging.WARNING):
        identity, finiteness, liveness = train(nn.Linear(2, 1), 7, every=3).watched()
    assert (identity.clause, identity.steps) == ("F-DP-001", 0)
    assert caplog.messages == [f"watch: F-DP-001 (replica_identity): {identity.note}"]
    assert identity.note == "there is only one process, and no other to compare it with"
    assert (finiteness.steps, finiteness.comparisons, finiteness.note) == (2, 4, "")
    assert (liveness.clause, liveness.steps, liveness.comparisons) == ("F-TI-004", 1, 2)
    assert [one.steps for one in train(nn.Linear(2, 1), 2, every=3).watched()] == [0, 0, 0]
    unused = train(nn.Linear(2, 1), 0).watched()
    assert {(one.steps, one.note) for one in unused} == {(0, "no step was made yet")}
    model = nn.Linear(2, 1)
    assert not entrenar_py.observe(model, torch.optim.SGD(model.parameters(), lr=1)).watched()


CONTRACT = """
metadata: {version: "1.0.0", created: 2026-01-01, author: me, description: mine, references: [a]}
clauses:
  - {id: MY-1, name: finite, invariant: no NaN, check: finiteness, tolerance: 0}
  - {id: MY-2, name: covered, invariant: each once, check: coverage}
"""


def test_a_contract_selects(tmp_path: Path) -> None:
    """A contract selects clauses by its own ids; one with no clause to watch is refused."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(CONTRACT)
    with pytest.raises(WatchFinding, match="MY-1: step 0") as found:
        train(nn.Linear(2, 1), 1, spoil=0, contract=mine)
    assert found.value.clause == "MY-1"
    shipped = train(nn.Linear(2, 1), 1, contract="distributed-training-v1")
    assert [one.clause for one in shipped.watched()] == ["F-DP-001", "F-DP-003"]
    (live,) = train(nn.Linear(2, 1), 1, contract="training-integrity-v1.yaml").watched()
    assert live.clause == "F-TI-004"
    with pytest.raises(UsageError, match="no clause that can be watched"):
        train(nn.Linear(2, 1), 1, contract="reduction-v1")
    mine.write_text("clauses: [")
    with pytest.raises(ContractError, match=r"mine\.yaml:2:1"):
        train(nn.Linear(2, 1), 1, contract=mine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: give a number of steps"),
        ({"patience": 0}, "patience=0"),
        ({"every": None, "contract": "x.yaml"}, "give every="),
        ({"every": None}, "give every="),  # patience
        ({"layout": {"tp": 1}}, "every=1 with layout= or tied="),
        ({"contract": "x.yaml"}, "no such file"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    """Invalid arguments are refused before any hook is set."""
    with pytest.raises(UsageError, match=message):
        train(nn.Linear(2, 1), 1, **options)
    with pytest.raises(UsageError, match="no parameters to watch"):
        entrenar_py.observe(nn.ReLU(), torch.optim.SGD([torch.ones(1)], lr=1), every=1)


def test_beside_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded steps include the one in which the watch stopped."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(WatchFinding):
        train(nn.Linear(2, 1), 3, spoil=1)
    (path,) = tmp_path.glob("*.rank.jsonl")
    events = rank_file.load(path).events
    assert [one.step for one in events if isinstance(one, Update)] == [0, 1]
