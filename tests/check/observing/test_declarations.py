"""The declarations of a script, and what is noticed of its parameters at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from entrenar_py.check.observing import declarations
from entrenar_py.check.observing.declarations import Declarations
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.shared.errors import UsageError

NAMES = ("wte.weight", "blocks.0.up.weight", "blocks.0.lora_A", "norm.weight")


BUFFERS = ("norm.running_mean", "norm.running_var")


def declared(layout: Layout | None = None, **given: Any) -> Declarations:
    usual = dict.fromkeys(("frozen", "clip_norm", "reduce_dtype", "loss_over"))
    return declarations.declarations_of(
        NAMES, BUFFERS, layout, **{**usual, "synchronised_buffers": (), **given}
    )


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("wte.weight",), {"wte.weight"}),
        ("blocks", {"blocks.0.up.weight", "blocks.0.lora_A"}),
        (["_orig_mod.norm"], {"norm.weight"}),
        (("*", "!*.lora_?", "!norm"), {"wte.weight", "blocks.0.up.weight"}),
        (("*.weight", "!wte"), {"blocks.0.up.weight", "norm.weight"}),
        ((), set()),
    ],
)
def test_patterns(patterns: Any, wanted: set[str]) -> None:
    """A pattern is a name, a module's name, or has wildcards; `!` takes names out again."""
    names = {name: name for name in NAMES}
    assert set(declared(frozen=patterns).frozen_of(names) or ()) == wanted


def test_a_name_of_a_shared_tensor() -> None:
    """A tensor is frozen by any of its names, and recorded under the first."""
    names = {"wte.weight": "wte.weight", "head.weight": "wte.weight"}
    made = Declarations(frozen=("head",))
    assert made.frozen_of(names) == ("wte.weight",)
    assert declared().frozen_of(names) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"frozen": ("wte.weights",)},
            "the model has no parameter with this name; did you mean 'wte.",
        ),
        ({"frozen": ("!nrm.weight",)}, "did you mean 'norm.weight'"),
        ({"frozen": ("encoder.*",)}, "its names are wte.weight"),
        ({"synchronised_buffers": "norm.weight"}, "the model has no buffer with this name"),
        ({"averages": [1]}, "give averages of the weights by names without a slash"),
        ({"averages": {"a/b": 1}}, "give averages of the weights by names without a slash"),
        ({"frozen": (3,)}, "give names or patterns"),
        ({"frozen": 3}, "give names or patterns"),
        ({"clip_norm": 0.0}, "a number above 0; or None"),
        ({"clip_norm": True}, "clip_norm=True"),
        ({"clip_norm": "one"}, "clip_norm='one'"),
        ({"reduce_dtype": "bf16"}, "use one of torch.float32, torch.bfloat16, torch.float16"),
        ({"loss_over": "rank"}, "use one of 'batch', 'micro-batch'"),
        ({"loss_over": ["batch"]}, "loss_over=['batch']"),
        ({"layout": Layout(axes={}, tied=(("wte.weight", "haed"),))}, "tied: 'haed'"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    """What can't be meant is refused, with the nearest names."""
    with pytest.raises(UsageError) as caught:
        declared(**given)
    assert words in str(caught.value)


def test_stages_may_lack_names() -> None:
    """A stage of a pipeline has some of the parameters only: another one has the others."""
    layout = Layout(axes={"pp": 2}, tied=(("wte.weight", "head.weight"),))
    assert declared(layout, frozen="head").frozen_of({"wte.weight": "wte.weight"}) == ()


def test_synchronised_buffers() -> None:
    """Patterns of buffers stand for buffers."""
    made = declared(synchronised_buffers=("*.running_m*",))
    assert made.synchronised_of(BUFFERS) == ("norm.running_mean",)


def test_facts() -> None:
    """Numbers are numbers, and number formats are known by their names."""
    made = declared(
        clip_norm=torch.tensor(0.5), reduce_dtype=torch.bfloat16, loss_over="micro-batch"
    )
    assert made.facts() == {"clip_norm": 0.5, "reduction": "bfloat16", "loss_over": "micro-batch"}
    usual = {"clip_norm": None, "reduction": "", "loss_over": ""}
    assert declared(clip_norm=float("inf")).facts() == usual


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
