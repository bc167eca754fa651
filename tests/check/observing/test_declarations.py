"""Declarations to `observe`: names and patterns are resolved, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entrenar_py.check.observing import declarations
from entrenar_py.check.observing.declarations import Declarations
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.shared.errors import UsageError

NAMES = ("wte.weight", "blocks.0.up.weight", "blocks.0.lora_A", "norm.weight")


BUFFERS = ("norm.running_mean", "norm.running_var")


def declared(layout: Layout | None = None, **given: Any) -> Declarations:
    """Return the declarations of a model with NAMES and BUFFERS."""
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
        ({"frozen": ("wte.weights",)}, "no parameter of the model is named so; did you mean 'wte."),
        ({"frozen": ("!nrm.weight",)}, "did you mean 'norm.weight'"),
        ({"frozen": ("encoder.*",)}, "its names are wte.weight"),
        ({"synchronised_buffers": "norm.weight"}, "no buffer of the model is named so"),
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
    assert made.facts() == {
        "clip_norm": 0.5,
        "reduction": "bfloat16",
        "loss_over": "micro-batch",
    }
    usual = {"clip_norm": None, "reduction": "", "loss_over": ""}
    assert declared(clip_norm=float("inf")).facts() == usual
