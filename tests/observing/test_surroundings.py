"""What a script trains, found without a line."""

from __future__ import annotations

import torch
from torch import nn

from entrenar_py.observing import surroundings


def test_frozen_tensors_that_no_module_has_are_left_out() -> None:
    """A checkpoint may have replaced frozen parameters that an optimizer was given; trained ones
    that no module has are part of what is observed."""
    model = nn.Linear(2, 2)
    replaced = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), replaced])
    assert surroundings.model_of(model, [optimizer]) is model
    replaced.requires_grad_(True)
    both = surroundings.model_of(model, [optimizer])
    assert both is not None
    assert [name for name, _ in both.named_parameters()] == ["0.weight", "0.bias", "1.group0.2"]
