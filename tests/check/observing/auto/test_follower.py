"""The follower, without a script."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.observing.auto.follower import Follower
from entrenar_py.check.observing.auto.recorder import Recorder
from entrenar_py.check.rank_files import notes
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Shard
from tests.check.observing import recording


def test_a_step_of_what_no_pass_knew_is_noted(folder: Path) -> None:
    """An optimizer that gets its tensors when it steps is named where nothing was recorded."""
    (folder / notes.ASKED).touch()
    follower = Follower(Settings(steps=2))
    follower.before_step(torch.optim.Adagrad([torch.zeros(1)]), (None,), {})
    assert "Adagrad stepped tensors that were added to it after the" in notes.why_nothing(folder)


@pytest.mark.usefixtures("folder")
def test_a_step_with_gradients_of_zero_begins_nothing() -> None:
    """torch.distributed.checkpoint makes optimizer state by such a step, before training begins."""
    follower = Follower(Settings())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adagrad(model.parameters())
    follower.built(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    follower.before_step(optimizer, (None,), {})
    assert follower.observation is None
    follower.step_ended()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    follower.before_step(optimizer, (None,), {})
    assert follower._recorder is not None
    follower._recorder.withdraw()


def test_a_closure_that_makes_the_first_pass_is_seen() -> None:
    """An optimizer's hooks are too late if the observation begins in its step: it is told."""
    follower = Follower(Settings())
    optimizer = torch.optim.Adagrad([torch.zeros(1)])
    ran: list[bool] = []

    class Ran:
        @staticmethod
        def closure_ran(_: torch.optim.Optimizer, *, again: bool) -> None:
            ran.append(again)

    def closure() -> float:
        follower._recorder = Ran()  # type: ignore[assignment]
        return 1.0

    _, named = follower.before_step(optimizer, (optimizer, closure), {})
    assert (named["closure"](), named["closure"]()) == (1.0, 1.0)
    assert ran == [False, True]


def test_an_error_of_a_hook_ends_the_observation() -> None:
    """A hook of the recorder fails once, tells why, and raises nothing in the script."""
    recorder, told = Recorder.__new__(Recorder), list[str]()
    recorder._is_off, recorder._tell_why = False, told.append
    for _ in range(2):
        recorder._after_forward(torch.nn.Linear(1, 1), (), None)  # lacks everything that it needs
    assert len(told) == 1
    assert "the observation failed (AttributeError: " in told[0]


def recorded(follower: Follower, folder: Path) -> RankTrace:
    """End the observation, and return the record of the rank."""
    recorder = follower._recorder
    assert recorder is not None
    recorder.close()
    return recording.recorded(folder)


def test_an_optimizer_of_copies_is_the_outer_one(folder: Path) -> None:
    """DiLoCo's steps a copy of the model, which requires gradients and is never called."""
    follower, model = Follower(Settings()), torch.nn.Linear(3, 2)
    shared = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for optimizer in (outer, inner):
        follower.built(optimizer)
    follower.forward(model, (torch.ones(4, 3),))
    assert follower._recorder is not None
    assert follower._recorder.optimizers == (inner,)
    follower.step_begins(outer)
    assert recorded(follower, folder).outer == {"rule": "nesterov", "lr": 0.7, "momentum": 0.9}


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_second_optimizer_begins_a_new_phase(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """The steps before it are the record; a script that creates one in each step has none."""
    follower, model = Follower(Settings()), torch.nn.Linear(3, 2)
    monkeypatch.setattr(follower._ending, "leave", sys.exit)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    follower.built(first)
    for _ in range(num_steps):
        follower.forward(model, (torch.ones(4, 3),))
        model(torch.ones(4, 3)).sum().backward()
        first.step()
    if num_steps > 1:
        with pytest.raises(SystemExit):
            follower.step_begins(second)
    else:
        follower.step_begins(second)
    record = recording.recorded(folder)
    where = "before step 2, where a new optimizer (SGD) begins to step the model"
    assert (record.is_limited, record.limited_where) == ((num_steps > 1), where * (num_steps > 1))
    assert ("in step 1 a new optimizer (SGD) steps" in record.problem) == (num_steps == 1)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.usefixtures("folder")
def test_a_model_that_waits_for_its_turn(is_copy: bool) -> None:
    """It is frozen while another one trains; a frozen copy of that is an outer optimizer's."""
    follower, first = Follower(Settings()), torch.nn.Linear(3, 2)
    second = copy.deepcopy(first) if is_copy else torch.nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters()) for model in (first, second)]
    for optimizer in optimizers:
        follower.built(optimizer)
    second.requires_grad_(False)
    follower.forward(first, (torch.ones(4, 3),))
    assert follower._recorder is not None
    assert follower._recorder.optimizers == tuple(optimizers[: 1 if is_copy else 2])


def test_the_first_batch_of_a_model_whose_copies_are_stepped(folder: Path) -> None:
    """Its forward pass comes before anything shows that it is trained."""
    follower, model = Follower(Settings()), torch.nn.Linear(3, 2)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    follower.built(optimizer)
    rows = torch.arange(12.0).reshape(4, 3)
    follower.forward(model, (rows,))
    loss = model(rows).sum()
    follower.backward_begins(loss, is_plain=True)
    loss.backward()
    follower.backward_ended()
    follower.step_begins(optimizer)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad
    optimizer.step()
    (shard,) = [e for e in recorded(follower, folder).events if isinstance(e, Shard)]
    assert (shard.weight, len(shard.ids), shard.unknown) == (4.0, 4, "")
