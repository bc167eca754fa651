"""What a script trains, found without a line."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from entrenar_py.check.observing import surroundings


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


def joined_outside_and_within() -> tuple[bool, bool]:
    """Return whether a wrapped model is joined outside of torch's context, and within."""
    own = nn.Linear(2, 2)
    model = DistributedDataParallel(own)
    outside = surroundings.are_joined(own)
    with model.join():
        return outside, surroundings.are_joined(own)


def test_a_wrapped_model_is_joined_within_torchs_context(tmp_path: Path) -> None:
    """In `model.join()`, ranks may have fewer batches than others."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # The wrapper must go before the group. If it is the last to hold it, it waits for the
        # group's threads with Python's lock held, and these may wait for the lock.
        assert joined_outside_and_within() == (False, True)
    finally:
        dist.destroy_process_group()


def test_a_container_of_models_is_none_of_them() -> None:
    """Nothing calls it as a whole if its models take turns; one that is called stays whole."""
    critic, maker = (nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))
    both = nn.ModuleDict({"critic": critic, "maker": maker})
    optimizers = [torch.optim.SGD(one.parameters()) for one in (critic, maker)]
    found = surroundings.model_of(critic, optimizers)
    assert found is not None
    assert [*found.children()] == [critic, maker]
    del both


def test_schedules_that_another_one_has_are_parts_of_it() -> None:
    """A warm-up and the decay after it are one schedule; two of their own are unknown."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts: list[lr_scheduler.LRScheduler] = [lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    assert surroundings.schedule_of([optimizer]) is None
    whole = lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])
    assert surroundings.schedule_of([optimizer]) is whole
