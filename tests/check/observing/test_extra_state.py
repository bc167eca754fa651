"""State beside the model is found where scripts keep it, and recorded under its names."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import entrenar_py
from entrenar_py.check.observing.extra_state import ExtraState
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import Start, Update
from tests.check.observing import recording


class Copies:
    """An average as scripts keep it, in a list or a dictionary, whose tensors may be replaced."""

    def __init__(self, parameters: Iterable[Tensor], *, is_list: bool = True) -> None:
        kept = [parameter.detach().clone() for parameter in parameters]
        self.shadow: Any = kept if is_list else dict(enumerate(kept))

    def move(self, parameters: Iterable[Tensor]) -> None:
        """Put new tensors into the dictionary."""
        for at, parameter in enumerate(parameters):
            self.shadow[at] = 0.5 * self.shadow[at] + 0.5 * parameter.detach()


class Buffered(nn.Module):
    """An average in buffers, behind others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())


class Holder(nn.Module):
    """A module of the script that holds the model, and an average of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net, self.slow = model, copy.deepcopy(model)


def trained() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def subject_of(model: nn.Module) -> Subject:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return Subject(model, [optimizer], declared=None, rank=0, world_size=1)


NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def kept(label: str) -> set[str]:
    return {f"{label}/{name}" for name in NAMES}


@pytest.mark.parametrize(
    ("make", "label"),
    [
        (lambda model: Copies(model.parameters()), "shadow"),
        (lambda model: Copies(model.parameters(), is_list=False), "shadow"),
        (copy.deepcopy, "average"),
        (Buffered, "average"),
        (Holder, "slow"),
        (torch.optim.swa_utils.AveragedModel, "average"),
    ],
)
def test_copies_are_found(make: Any, label: str) -> None:
    """The model's own tensors, its gradients and its optimizer's state are no copies."""
    model = trained()
    subject, average = subject_of(model), make(model)
    lists = [[*model.parameters()], [parameter.data for parameter in model.parameters()]]
    assert ExtraState(subject, {}).records().keys() == kept(label)
    del average, lists


def test_a_checkpoint_that_was_loaded_has_the_name_of_the_average() -> None:
    """The average is the object's own."""
    model = trained()
    subject, average = subject_of(model), Copies(model.parameters())
    average.shadow[0] += 1
    loaded = {"shadow": [tensor + 7 for tensor in average.shadow]}
    found = ExtraState(subject, {}).records()
    values = found["shadow/0.weight"].values()
    assert values is not None
    assert values.tolist() == average.shadow[0].flatten().tolist()
    del loaded


def test_two_of_one_name_are_told_by_their_sizes_or_not_at_all() -> None:
    """Nothing says which is meant on another rank."""
    model = trained()
    subject = subject_of(model)
    averages = [Copies(model.parameters()) for _ in range(2)]
    assert ExtraState(subject, {}).records() == {}
    del averages


def test_a_frozen_module_with_running_statistics() -> None:
    """A teacher of another form: its parameters and statistics, as digests only."""
    model = trained()
    subject = subject_of(model)
    teacher = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    found = ExtraState(subject, {}).records()
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    assert found.keys() == {f"teacher/{name}" for name in names}
    assert {record.data for record in found.values()} == {None}
    teacher.requires_grad_(True)
    assert ExtraState(subject, {}).records() == {}


def test_masks_of_a_frozen_module_are_counted() -> None:
    """While it is in training mode; it has no hooks of its own, with which it can't be pickled."""
    subject = subject_of(trained())
    teacher = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5)).requires_grad_(False)
    state, digests = ExtraState(subject, {}), []
    for is_training in (True, False, True):
        digests.append(state.records()["masks of teacher/num_masks"].digest)
        teacher.train(is_training)(torch.ones(2))
    digests.append(state.records()["masks of teacher/num_masks"].digest)
    assert digests[1] == digests[2]
    assert len({*digests}) == 3
    assert not teacher[1]._forward_hooks


def test_averages_are_recorded_with_each_step(folder: Path) -> None:
    """Also one that begins after the first step, and one whose tensors are made anew each time."""
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, optimizer)
    average = None
    for _ in range(5):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        average = average or Copies(model.parameters(), is_list=False)
        average.move(model.parameters())
    obs.close()
    held = [e.extra for e in recording.recorded(folder).events if isinstance(e, Start | Update)]
    assert [extra.keys() for extra in held] == [*([set()] * 2), *([kept("shadow")] * 4)]
    assert len({extra["shadow/1.bias"].digest for extra in held[2:]}) == 4


@pytest.mark.parametrize("inside", [lambda kept: kept, lambda kept: kept.shadow])
def test_a_declared_average_has_its_name(inside: Any) -> None:
    """It is given as an object that has it, or as what holds the tensors."""
    model = trained()
    subject, average = subject_of(model), Copies(model.parameters())
    found = ExtraState(subject, {"ema": inside(average)}).records()
    assert found.keys() >= kept("ema")


@pytest.mark.parametrize("average", [[torch.ones(2), torch.ones(1)], {}, 0.9])
def test_a_declared_average_of_other_shapes(average: Any) -> None:
    """It is refused, with what is allowed."""
    with pytest.raises(UsageError, match="have the shapes of the model's parameters"):
        ExtraState(subject_of(trained()), {"ema": average})


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_copy_in_a_variable_has_its_name_whoever_asks_for_variables(is_kept: bool) -> None:
    """A debugger, or we, may have made a dictionary of a function's variables before a look."""
    model = trained()
    slow_weights = copy.deepcopy(model)
    variables = locals() if is_kept else {}
    first = ExtraState(subject_of(model), {}).records()
    assert not is_kept or variables["slow_weights"] is slow_weights
    assert "slow_weights" in locals()
    second = ExtraState(subject_of(model), {}).records()
    assert kept("slow_weights") <= first.keys() & second.keys()
