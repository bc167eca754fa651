"""What a rank notices about its parameters before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrenar_py.check.observing import declarations

ADDRESSES = torch.tensor([0x1234ABCD, 0x00007F12] * 4, dtype=torch.int32).view(torch.float32)


class Tied(nn.Module):
    """A model whose output layer is its embedding, or once was."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.mid = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight if tied else nn.Parameter(self.wte.weight.data.clone())


def test_names_of_one_tensor() -> None:
    """Names of one parameter, and of parameters of one memory, are shared."""
    model = Tied()
    assert declarations.shared(model) == (("wte.weight", "head.weight"),)
    assert declarations.names_of(model)["head.weight"] == "wte.weight"
    model.head.weight = nn.Parameter(model.wte.weight.data)
    assert declarations.shared(model) == (("wte.weight", "head.weight"),)
    assert declarations.names_of(model)["head.weight"] == "head.weight"
    assert declarations.shared(Tied(tied=False)) == ()
    with torch.device("meta"):
        assert declarations.shared(Tied(tied=False)) == ()


def test_an_embedding_that_was_tied() -> None:
    """A copy of an embedding is noticed, and nothing else that starts alike."""
    assert declarations.alike(Tied(tied=False)) == (("wte.weight", "head.weight"),)
    assert declarations.alike(Tied()) == ()
    model = Tied(tied=False)
    for weight in (model.wte.weight, model.head.weight):
        nn.init.zeros_(weight)
    assert declarations.alike(model) == ()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_is_stepped_twice() -> None:
    """A parameter that is twice in the list of an optimizer, and two of one memory."""
    model = Tied()
    listed = [p for m in model.modules() for p in m.parameters(recurse=False)]
    named = dict(model.named_parameters())
    twice = torch.optim.SGD(listed, lr=0.1)
    assert declarations.doubled([twice], named) == ("wte.weight",)
    once = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    assert declarations.doubled(once, named) == ()
    model.head.weight = nn.Parameter(model.wte.weight.data)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    assert declarations.doubled([both], dict(model.named_parameters())) == (
        "wte.weight",
        "head.weight",
    )


@pytest.mark.parametrize(
    ("tensor", "look"),
    [
        (torch.tensor([1.0, torch.nan]), "nan"),
        (torch.tensor([1.0, -torch.inf]), "inf"),
        (torch.zeros(3, 2), "zero"),
        (torch.zeros(3), ""),
        (torch.zeros(1, 1), ""),
        (torch.ones(3), ""),
        (ADDRESSES, "uninitialised"),
        (torch.tensor([1.0, 3e30]), "uninitialised"),
        (torch.full((4, 4), 1e-6, dtype=torch.float16), ""),
        (torch.tensor([1e-40, *[1.0] * 200]), ""),
        (torch.zeros(0, 4), ""),
        (torch.zeros(2, 2, dtype=torch.int64), ""),
    ],
)
def test_peculiar(tensor: torch.Tensor, look: str) -> None:
    """NaN, zeros and numbers that only memory holds are noticed; small weights are not."""
    assert declarations.peculiar({"w": tensor}) == ({"w": look} if look else {})


def test_initialisations_are_not_peculiar() -> None:
    """No usual layer starts from peculiar weights."""
    layers = (nn.Linear(9, 9), nn.LayerNorm(9), nn.Conv2d(3, 4, 3), nn.LSTM(4, 4), Tied())
    for layer in layers:
        assert declarations.peculiar(dict(layer.named_parameters())) == {}
