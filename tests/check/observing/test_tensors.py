"""Tensors of odd formats, as a trace keeps them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from entrenar_py.check.observing import tensors
from entrenar_py.check.rank_files import rank_file

HEADER = {"kind": "rank", "version": rank_file.VERSION, "rank": 0, "world_size": 1}


def test_tensors_are_read_as_dense_real_numbers() -> None:
    """A sparse gradient is read as the dense one, a complex parameter as pairs of numbers."""
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert tensors.local(dense.to_sparse()).equal(dense)
    pair = torch.tensor([1.0 + 2.0j])
    assert tensors.local(pair).tolist() == [[1.0, 2.0]]
    assert tensors.is_finite([dense.to_sparse(), pair])
    assert not tensors.is_finite([pair * float("nan")])
    record = tensors.record(pair, values=True)
    assert (record.dtype, record.size) == ("float32", 2)


@pytest.mark.parametrize(
    "group",
    [
        {"lr": 0.1, "eps": (None, 1e-3)},  # torch's Adafactor
        {"lr": None, "weight_decay": None},  # transformers' Adafactor
        {"rates": {"a": 1.0}, "names": ("a", "b"), "nested": ((1, 2), 3)},
        {"lr": torch.tensor(0.1), "bounds": torch.zeros(3), "count": 2**80},
    ],
)
def test_parameter_groups_of_any_optimizer_can_be_written(group: dict[str, Any]) -> None:
    """Whatever an optimizer keeps in its groups, the header of its file can be read back."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.param_groups = [{"params": [], **group}]
    written = json.loads(json.dumps(tensors.groups([optimizer])))
    read = rank_file.require_header({**HEADER, "groups": written}, "header")
    assert read["groups"] == written
    assert tensors.rate_of(optimizer.param_groups[0]) == pytest.approx(
        0.1 if group.get("lr") is not None else 0.0
    )


class Wrapper(torch.optim.Optimizer):
    """An optimizer that keeps no hooks of its own, as torch's PostLocalSGDOptimizer."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optim = inside
        self.param_groups = inside.param_groups


def test_an_optimizer_without_hooks_is_looked_into() -> None:
    """What steps inside of it has the hooks."""
    inside = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert tensors.unwrapped_optimizer(Wrapper(inside)) is inside


class Container(torch.optim.Optimizer):
    """An optimizer that steps those in its list, and gives itself groups of its own."""

    def __init__(self, listed: list[torch.optim.Optimizer]) -> None:
        self.optimizers = listed
        super().__init__([p for one in listed for g in one.param_groups for p in g["params"]], {})


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another, with its groups, and then changes weights itself."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(1)], {})
        self.optimizers = [inside]
        self.param_groups = inside.param_groups


def test_a_container_steps_by_those_in_its_list() -> None:
    """Rates and state are theirs. One that shares the groups of another steps itself."""
    listed: list[torch.optim.Optimizer] = [torch.optim.SGD([torch.zeros(1)]) for _ in range(2)]
    container, lookahead = Container(listed), Lookahead(listed[0])
    assert tensors.stepping(container) == listed
    assert tensors.inner_optimizers(container) == listed
    assert tensors.stepping(lookahead) == [lookahead]
    container.add_param_group({"params": [torch.zeros(1)]})
    assert tensors.stepping(container) == [container]


@pytest.mark.parametrize(
    ("layer", "dropout"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), 0.1),
        (nn.Sequential(nn.Dropout1d(0.3), nn.AlphaDropout(0.2)), 0.3),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.2), 0.2),
        (nn.MultiheadAttention(4, 2, dropout=0.4), 0.4),
        (nn.Linear(2, 2), 0.0),
    ],
)
def test_dropout_of_layers_and_inside_of_them(layer: nn.Module, dropout: float) -> None:
    """Recurrent layers and attention have a number, and no layer for it."""
    assert tensors.facts(layer, ())["dropout"] == dropout
