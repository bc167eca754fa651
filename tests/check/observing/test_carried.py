"""State that a model returns and is given again is no part of a sample."""

from __future__ import annotations

import torch

from entrenar_py.check.observing.contents import Carried


def test_returned_state_is_left_out() -> None:
    """It is known by its storage: a script detaches it, or takes a part of it."""
    carried, words = Carried(), torch.arange(6).reshape(2, 3)
    memory = torch.zeros(2, 4)
    assert carried.fresh((words, memory)) == (words, memory)
    grown = torch.ones(2, 4, requires_grad=True) * 2
    carried.note((words, memory), (torch.tensor(1.0), [grown]))
    fresh = carried.fresh((words, [grown.detach()[:, 1:]]))
    assert [tensor is words for tensor in fresh] == [True]


def test_what_was_given_is_no_state() -> None:
    """A model may hand on its batch, which is a part of the data set."""
    carried, data = Carried(), torch.randn(8, 3)
    carried.note((data[:4], data[4:, 0]), {"features": data[:4], "loss": torch.tensor(1.0)})
    inputs = data[4:], torch.ones(4)
    assert carried.fresh(inputs) is inputs


def test_inputs_are_kept_if_nothing_else_is_left() -> None:
    """A discriminator is given what another pass has made."""
    carried, made = Carried(), torch.randn(4, 3)
    carried.note((torch.randn(4, 2),), made)
    assert carried.fresh((made,)) == (made,)


def test_storage_that_is_used_again_is_new() -> None:
    """A batch may lie where a state has been that is no more."""
    carried = Carried()
    for _ in range(4):
        inputs = torch.randn(4, 2), torch.randn(4, 3)
        assert carried.fresh(inputs) is inputs
        carried.note(inputs, torch.randn(4, 3))
        del inputs
