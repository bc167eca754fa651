"""Correct ways to train that differ from the tutorial's are recorded correctly."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import entrenar_py
from entrenar_py.check.observing import FAULTS, FOLDER
from entrenar_py.check.rank_files import assembly, whole_model
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import E, Event, Ruled, Shard, Start, Update
from tests.check.observing.recording import begun

TOO_LARGE = 2.0**127


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that a rank records to."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    torch.manual_seed(0)  # of a hundred starts one has a gradient that TOO_LARGE leaves finite
    return tmp_path


def read(folder: Path) -> tuple[RankTrace, list[Event]]:
    """Return the record of the only life of the only rank, and its events."""
    (rank,), problems = assembly.load(folder)
    assert not problems
    return rank, assembly.ordered([rank])


def of(kind: type[E], folder: Path) -> list[E]:
    """Return the events of one kind, of the only life of the only rank."""
    return [event for event in read(folder)[1] if isinstance(event, kind)]


def backward(model: nn.Module, *, scale: float = 1.0, sample: int = 9) -> None:
    """Run a backward pass of a loss that is not zero."""
    loss = (model(torch.tensor([[float(sample)]])) + 1).square().mean()
    (scale * loss).backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_that_unscales(folder: Path) -> None:
    """For a fused optimizer with scaled or infinite gradients, the applied ones are recorded."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE)
    obs = entrenar_py.observe(model, optimizer)
    applied = []
    for step in range(2):
        backward(model, scale=float(scaler.scale(torch.tensor(1.0))))
        assert model.weight.grad is not None
        applied.append(model.weight.grad.item() / 4)
        scaler.step(optimizer)
        scaler.update(4.0)
        optimizer.zero_grad()
        assert step or not torch.tensor(applied).isfinite().all(), "the first is to overflow"
    obs.close()
    skipped, made = of(Update, folder)
    assert not skipped.gradient
    got = made.gradient["weight"].values()
    assert got is not None
    assert got.item() == pytest.approx(applied[1])
    assert all(one.finite for one in read(folder)[1] if isinstance(one, Shard))


def test_a_step_that_makes_optimizer_state_is_none(folder: Path) -> None:
    """torch.distributed.checkpoint steps with gradients of zero, to have moments to load."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    steps(model, optimizer, 1)
    obs.close()
    (made,) = of(Update, folder)
    assert made.learning_rate == 0.01
    assert set(made.gradient) == {"weight", "bias"}


def test_gradients_that_are_cleared_behind_the_forward_pass(folder: Path) -> None:
    """A step that a scaler skipped is one step, and a loss reported ahead belongs to the next step.

    The same holds for two skipped steps in a row.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(4):
        obs.samples([step])
        loss = (model(torch.tensor([[9.0]])) + 1).square().mean()
        obs.loss(float(step), 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(TOO_LARGE if step == 0 else 1.0)
    obs.close()
    told = [(one.step, one.ids, one.loss_sum, one.finite) for one in of(Shard, folder)]
    assert told == [(step, (step,), step, True) for step in range(4)]
    assert [bool(one.gradient) for one in of(Update, folder)] == [False, False, True, True]


@pytest.mark.parametrize("again", [True, False])
def test_a_second_look_at_the_same_samples(folder: Path, again: bool) -> None:
    """In sharpness-aware minimisation only the second gradient of the same samples counts.

    Gradients cleared between different samples are lost, and stay a finding.
    """
    model, optimizer, obs = begun()
    obs.samples([5])
    backward(model)
    optimizer.zero_grad()
    if not again:
        obs.samples([6])
    backward(model, sample=3)
    optimizer.step()
    obs.close()
    shards = of(Shard, folder)
    assert [one.ids for one in shards] == ([(5,)] if again else [(5,), (6,)])
    assert shards[-1].gradient == of(Update, folder)[0].gradient


@pytest.mark.parametrize("clears", [True, False])
def test_an_attack_in_evaluation_mode_between_steps(folder: Path, clears: bool) -> None:
    """It is no part of the next step, unless that step applies its gradients."""
    model, optimizer, obs = begun()
    for step in range(2):
        obs.samples([step])
        model.train()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        model.eval()
        optimizer.zero_grad()
        backward(model, sample=3)
        if clears:
            optimizer.zero_grad()
    obs.samples([2])
    model.train()
    backward(model)
    optimizer.step()
    obs.close()
    told = [(one.step, one.ids, one.evaluating) for one in of(Shard, folder)]
    trained = [(step, (step,), False) for step in range(3)]
    attack = [] if clears else [(2, (), True)]
    assert told == [*trained[:2], *attack, *trained[2:]]


def test_a_value_that_is_planted_in_an_attack(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planted again in the next pass, as the attack trains nothing."""
    fault = {"kind": "non_finite_gradient", "step": 1, "value": "nan"}
    monkeypatch.setenv(FAULTS, json.dumps([fault]))
    model, optimizer, obs = begun()
    found = []
    for step in range(3):
        for trains in (False, True):
            model.train(trains)
            if trains:
                obs.samples([step])
            optimizer.zero_grad()
            backward(model, sample=9 if trains else 3)
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            if not all(gradient.isfinite().all() for gradient in gradients):
                found.append((step, trains))
        optimizer.step()
    obs.close()
    assert found[:2] == [(1, False), (1, True)]


@pytest.mark.parametrize("is_probe", [True, False])
def test_gradients_that_are_dropped_now_and_then(folder: Path, is_probe: bool) -> None:
    """An overflow is a skipped step, though an earlier step had dropped finite gradients.

    It is none if the step before dropped its first gradient as well: then each step has a probe.
    """
    model, optimizer, obs = begun()
    numbers = itertools.count()

    def accumulate(scale: float = 1.0) -> None:
        obs.samples([next(numbers)])
        optimizer.zero_grad()
        backward(model, scale=scale)

    accumulate()
    for _ in range(2):
        if is_probe:
            accumulate()
        accumulate()
        optimizer.step()
    accumulate(scale=float("inf"))
    accumulate()
    optimizer.step()
    obs.close()
    gradients = [bool(one.gradient) for one in of(Update, folder)]
    assert gradients == [True, True, *([] if is_probe else [False]), True]


class Climber(torch.optim.Optimizer):
    """A sharpness-aware optimizer, which has another one step and is not called as a whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"reach": 0.1})
        self.inside = torch.optim.SGD(self.param_groups, lr=0.25)
        self.param_groups = self.inside.param_groups
        self.home: list[torch.Tensor] = []

    def moved(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def climb(self) -> None:
        """Move weights along their gradient."""
        self.home = [p.clone() for p in self.moved()]
        for p in self.moved():
            p.add_(p.grad, alpha=0.01)  # type: ignore[arg-type]

    @torch.no_grad()
    def go_home(self) -> None:
        """Move weights back."""
        for p, home in zip(self.moved(), self.home, strict=True):
            p.copy_(home)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("returns", [True, False])
def test_a_wrapper_whose_inside_steps(folder: Path, clears: bool, returns: bool) -> None:
    """The step is that of the optimizer inside, and what a climb leaves undone is told."""
    model = nn.Linear(1, 1)
    optimizer = Climber(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.inside, 1, 0.5)
    obs = entrenar_py.observe(model, optimizer)
    for _ in range(2):
        backward(model)
        optimizer.climb()
        if clears:
            optimizer.zero_grad()
        backward(model)
        if returns:
            optimizer.go_home()
        optimizer.inside.step()
        optimizer.zero_grad()
        schedule.step()
    obs.close()
    made = of(Update, folder)
    rules = {one.rule for one in read(folder)[1] if isinstance(one, Ruled)}
    both = ("bias", "weight")
    assert [one.climbed for one in made] == [() if returns else both] * 2
    assert [one.mixed for one in made] == [() if clears else both] * 2
    assert read(folder)[0].inner
    assert [(one.learning_rate, one.schedule) for one in made] == [(0.25, 0), (0.125, 1)]
    assert rules == {"SGD"}


def test_weights_that_are_kept_in_bounds_after_a_step(folder: Path) -> None:
    """A bound moves a weight before the step's first pass, maybe uphill: that is no climb."""
    model, optimizer, obs = begun()
    for _ in range(2):
        for _ in range(2):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.add_(1.0)  # the loss grows with it
    obs.close()
    made = of(Update, folder)
    assert [(one.climbed, one.mixed) for one in made] == [((), ())] * 2
    assert [[*one.edited] for one in made] == [[], ["weight"]]


def test_a_pass_with_weights_that_are_put_in_for_it(folder: Path) -> None:
    """An evaluation with other weights than the last step left is recorded as one."""
    model, optimizer, obs = begun()
    steps(model, optimizer, 1)
    for other in (0.0, 1.0):
        kept = model.weight.detach().clone()
        model.weight.data += other
        with torch.no_grad():
            model(torch.ones(1, 1))
        model.weight.data.copy_(kept)
        steps(model, optimizer, 1)
    obs.close()
    assert [shard.swapped for shard in of(Shard, folder)] == [False, False, True]


def test_a_wrapper_that_steps_as_a_whole(folder: Path) -> None:
    """It may put weights back within its step, before its inside moves them."""
    model = nn.Linear(1, 1)

    class Whole(Climber):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.climb()
            self.zero_grad()
            closure()
            self.go_home()
            self.inside.step()

    optimizer = Whole(model.parameters())
    obs = entrenar_py.observe(model, optimizer)
    backward(model)
    optimizer.step(lambda: backward(model))
    obs.close()
    (update,) = of(Update, folder)
    assert (update.climbed, update.mixed) == ((), ())
    assert update.weights["weight"].values() == pytest.approx(model.weight.detach().numpy()[0])


def test_what_is_unfrozen_later(folder: Path) -> None:
    """A parameter that is unfrozen later has gradients from then on, and isn't declared frozen."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    for part in (model[0], model[1]):
        part.requires_grad_(False)
    model, optimizer, obs = begun(model)
    steps(model, optimizer, 1)
    model[1].requires_grad_(True)
    steps(model, optimizer, 1)
    obs.close()
    (start,) = of(Start, folder)
    assert (start.trainable, start.frozen) == (("2.weight", "2.bias"), ("0.weight", "0.bias"))
    assert [next(iter(one.gradient)) for one in of(Update, folder)] == ["2.weight", "1.weight"]


@pytest.mark.parametrize("from_the_start", [True, False])
def test_networks_that_are_frozen_in_turns(folder: Path, from_the_start: bool) -> None:
    """A GAN freezes one network while the other trains: passes of both are recorded."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    obs = entrenar_py.observe(model, optimizers)
    if not from_the_start:
        model(torch.ones(1, 1))
    for _ in range(2):
        for part, other, optimizer in zip(model, reversed(model), optimizers, strict=False):
            part.requires_grad_(True)
            other.requires_grad_(False)
            backward(model[1] if part is model[1] else nn.Sequential(*model))
            optimizer.step()
            optimizer.zero_grad()
    obs.close()
    first, second = ("0.weight", "0.bias"), ("1.weight", "1.bias")
    assert [tuple(shard.gradient) for shard in of(Shard, folder)] == [first, second] * 2
    assert [tuple(one.gradient) for one in of(Update, folder)] == [first + second] * 2
    (start,) = of(Start, folder)
    assert (start.trainable, start.frozen) == (first if from_the_start else first + second, ())


def test_rates_of_groups(folder: Path) -> None:
    """Each step has the rates of tensors that differ from the first group's rate."""
    model = nn.Linear(1, 1)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    obs = entrenar_py.observe(model, optimizer)
    steps(model, optimizer, 1)
    optimizer.param_groups[1]["lr"] = 0.5
    steps(model, optimizer, 1)
    obs.close()
    assert [one.rates for one in of(Update, folder)] == [{"bias": 0.0}, {}]
    assert [one.rate_of("weight") for one in of(Update, folder)] == [0.5, 0.5]


class AdamW(torch.optim.SGD):
    """An optimizer of another library, with the same name."""


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda group: group.update(lr=0.5, extra=1), False),
        (lambda group: group.update(momentum=0.5), True),
    ],
)
def test_constants_that_change(
    folder: Path, change: Callable[[dict[str, object]], None], changed: bool
) -> None:
    """If constants change, as in a cycle of momentum, the rule is unknown; a rate may change."""
    model = nn.Linear(1, 1)
    optimizer = AdamW(model.parameters(), lr=0.1, momentum=0.9)
    obs = entrenar_py.observe(model, optimizer)
    steps(model, optimizer, 1)
    change(optimizer.param_groups[0])
    steps(model, optimizer, 1)
    obs.close()
    rank, _ = read(folder)
    assert rank.changed is changed
    assert rank.header["optimizer"] == f"{__name__}.AdamW", "and no rule is known for this one"


def test_two_models_at_once(folder: Path) -> None:
    """Two models observed at the same time are not two lives of one training.

    Two that are observed one after the other are.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for begins in (0, 2, 1):
        assert assembly.load(folder)[1] == [], "the second goes on where the first has ended"
        obs = entrenar_py.observe(model, optimizer, step=begins)
        steps(model, optimizer, 2)
        obs.close()
    (problem,) = assembly.load(folder)[1]
    assert "called observe() again, from step 1 on, after 4 steps" in problem


class Agent(nn.Module):
    """A model whose methods are called, and which has no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.actor, self.critic = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 1)

    def value(self, seen: torch.Tensor) -> Any:
        """Return the value of some rows, with what an actor does."""
        hidden = self.network(seen)
        return self.critic(hidden) + self.actor(hidden).sum()


def test_a_model_without_a_forward_pass(folder: Path) -> None:
    """Its samples are the rows of what is called of it first, in training. Others are inside."""
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
    obs = entrenar_py.observe(agent, optimizer)
    for _ in range(2):
        with torch.no_grad():
            agent.value(torch.rand(5, 2))
        agent.value(torch.rand(3, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    obs.close()
    rank, events = read(folder)
    assert rank.header["samples"] == "content"
    assert [len(event.ids) for event in events if isinstance(event, Shard)] == [3, 3]
    assert not torch.nn.modules.module._global_forward_pre_hooks


class Checkpointed(nn.Module):
    """A model with parts that are computed again by a nested pass in the backward pass.

    One part is used twice, and one is not checkpointed.
    """

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(1, 1) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output for one sample."""
        again = partial(checkpoint, use_reentrant=self.reentrant)
        first, second, third, last = self.parts
        return last(again(third, second(again(second, again(first, x.requires_grad_())))))


@pytest.mark.parametrize("reentrant", [True, False])
def test_passes_within_a_backward_pass(folder: Path, reentrant: bool) -> None:
    """With reentrant checkpoints a pass and its nested passes are one micro-batch, in any order."""
    model, optimizer, obs = begun(Checkpointed(reentrant=reentrant))
    for step in range(4):
        obs.samples([step])
        backward(model, sample=step)
        if step % 2:  # of two micro-batches each
            optimizer.step()
            optimizer.zero_grad()
    obs.close()
    shards = of(Shard, folder)
    assert [(one.step, one.shard, one.ids) for one in shards] == [
        (step // 2, step % 2, (step,)) for step in range(4)
    ]
    for step, update in enumerate(of(Update, folder)):
        summed = whole_model.total(one.gradient for one in shards if one.step == step)
        assert summed.keys() == update.gradient.keys() == dict(model.named_parameters()).keys()
        for name, record in update.gradient.items():
            got, due = record.values(), summed[name].values()
            assert got is not None
            assert due is not None
            np.testing.assert_allclose(got, due, rtol=1e-5, atol=1e-6)


def test_gradients_that_are_reduced_by_hand(folder: Path) -> None:
    """After reduction by hand, another rank's NaN shows in the gradients, and the step is skipped.

    That is recorded at the end of the run, too, and if the script reports it.
    """
    model, optimizer, obs = begun()
    for step in range(4):
        obs.samples([step])
        optimizer.zero_grad()
        backward(model)
        if step in (0, 3):
            assert model.weight.grad is not None
            model.weight.grad += torch.nan  # as all_reduce would
        elif step == 1:
            obs.skipped()
        else:
            optimizer.step()
    obs.close()
    shards = of(Shard, folder)
    assert [(one.step, one.ids) for one in shards] == [(step, (step,)) for step in range(4)]
    assert [bool(one.gradient) for one in of(Update, folder)] == [False, False, True, False]


class Reducing(torch.optim.SGD):
    """An optimizer that changes the gradients in its step, as one that reduces them does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2
        return super().step(closure)


def test_an_optimizer_whose_step_calls_another_of_it(folder: Path) -> None:
    """Hooks that torch calls twice in a step record it once, with the gradients applied."""
    model = nn.Linear(1, 1)
    optimizer = Reducing(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optimizer)
    applied = []
    for _ in range(2):
        backward(model)
        optimizer.step()
        assert model.weight.grad is not None
        applied.append(model.weight.grad.item())
        optimizer.zero_grad()
    obs.close()
    got = [update.gradient["weight"].values() for update in of(Update, folder)]
    assert [one.item() for one in got if one is not None] == applied


def test_hooks_of_the_script_come_before_ours(folder: Path) -> None:
    """A hook that is set after `observe` and changes gradients or weights is seen."""
    model, optimizer, obs = begun()

    def double(*_: object) -> None:
        assert model.weight.grad is not None
        model.weight.grad *= 2

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(lambda *_: model.bias.data.fill_(3.0))
    backward(model)
    assert model.weight.grad is not None
    gradient = model.weight.grad.item()
    optimizer.step()
    obs.close()
    (update,) = of(Update, folder)
    values = update.gradient["weight"].values(), update.weights["bias"].values()
    assert [one.item() for one in values if one is not None] == [2 * gradient, 3.0]


def test_masters_that_an_optimizer_steps(folder: Path) -> None:
    """State, rates and gradients of copies are recorded under the parameters' names."""
    model = nn.Linear(1, 1).bfloat16()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01, momentum=0.9)
    obs = entrenar_py.observe(model, optimizer)
    (model(torch.ones(1, 1).bfloat16()) + 1).square().mean().backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.float() / 3
    optimizer.step()
    obs.close()
    rank, events = read(folder)
    assert rank.copies
    (update,) = [event for event in events if isinstance(event, Update)]
    got, held = update.gradient["weight"], update.optimizer["weight/momentum_buffer"]
    assert got.digest == held.digest


def test_gradients_of_each_sample_by_a_transform(folder: Path) -> None:
    """A model that `torch.func` calls computes with wrappers of tensors, which are left alone."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, optimizer)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, parameters, (sample,))
        return output.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    for _ in range(2):
        found = each(dict(model.named_parameters()), torch.ones(3, 2))
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].sum(0)
        optimizer.step()
    obs.close()
    assert [update.step for update in of(Update, folder)] == [0, 1]
