"""DeepSpeed's ZeRO: parameters are pieces of what the optimizer inside steps.

DeepSpeed isn't installed for these tests. What stands in for its optimizers has the attributes
that are read, as DeepSpeed 0.19 has them. The field (`tests/field`) runs DeepSpeed itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from entrenar_py.check.observing import declarations, flat_parameters, step_in_work, surroundings
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared.errors import UsageError


@pytest.fixture(autouse=True)
def second_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of two ranks, of which only this one is there, and a DeepSpeed."""
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Stage2:
    """Has the second half of two groups, of 6 and of 4 elements, stepped group by group."""

    def __init__(self, first: list[Any], second: list[Any]) -> None:
        self.real_dp_process_group = [dist.group.WORLD, dist.group.WORLD]
        self.round_robin_bit16_groups = [first, second]
        whole = [torch.cat([p.detach().float().flatten() for p in g]) for g in (first, second)]
        self.single_partition_of_fp32_groups = [
            flat[len(flat) // 2 :].clone().requires_grad_() for flat in whole
        ]
        self.loss_scale, self.overflow = 4.0, False
        groups = [
            {"params": [flat], "lr": 0.1 * (number + 1), "weight_decay": float(number)}
            for number, flat in enumerate(self.single_partition_of_fp32_groups)
        ]
        self.optimizer = torch.optim.AdamW(groups)

    def step(self) -> None:
        """Step each group alone, as if the optimizer had no other."""
        groups = self.optimizer.param_groups
        for group, flat in zip(groups, self.single_partition_of_fp32_groups, strict=True):
            flat.grad = torch.ones_like(flat)
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            flat.grad = None
        self.optimizer.param_groups = groups


class Engine(nn.Module):
    """A model of two layers in bfloat16: their weights are one group, and their biases another."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).bfloat16()
        layers: list[Any] = [*self.module]
        first, last = layers
        nn.init.constant_(last.weight, 5)
        weights, biases = [first.weight, last.weight], [first.bias, last.bias]
        self.optimizer = Stage2(weights, [*biases, nn.Parameter(torch.zeros(1))])
        self.maps(first.weight, 3, torch.tensor([8.0]))
        self.maps(last.weight, 0, torch.tensor([[4.0, 12.0]]))
        self.maps(last.bias, 0, None)
        first.bias._hp_mapping = None

    def maps(self, parameter: Any, start: int, gradient: Tensor | None) -> None:
        """Say where this rank's part of a parameter begins, and which gradient was reduced.

        None is the answer between two steps.
        """

        def fragment(_: int) -> Tensor:
            if gradient is None:
                raise ValueError("Gradients are only available immediately after backward")
            return gradient

        numel = parameter.numel() - start
        parameter._index_in_param_group = 0
        parameter._hp_mapping = SimpleNamespace(
            lp_fragment_address=SimpleNamespace(start=start, numel=numel),
            get_lp_grad_fragment=fragment,
        )


class Parameter3(nn.Parameter):
    """A parameter at stage 3, empty between passes: rank 1 has the second half of its elements."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ds_shape, self.ds_numel = torch.Size((3,)), 3
        self.ds_process_group = dist.group.WORLD
        self.ds_tensor = torch.tensor([7.0, 0.0])

    def partition_numel(self) -> int:
        """Return the size of a rank's part, with what is added to the last one's."""
        return 2


class Stage3:
    """Has partitions stepped that no group of its optimizer has between two steps."""

    def __init__(self, module: nn.Module) -> None:
        self.fp16_groups = [[module.first], [module.second]]
        self.fp32_partitioned_groups_flat = [
            torch.tensor([3.0, 0.0], requires_grad=True) for _ in range(2)
        ]
        self.sub_group_to_group_id = {0: 0, 1: 0}
        self.grad_position = {id(p): (n, 0, 2) for n, (p,) in enumerate(self.fp16_groups)}
        self.averaged_gradients: dict[int, Any] = {1: [torch.tensor([1.0, 0.0])]}
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, weight_decay=0.1)
        self.optimizer.param_groups[0]["params"] = []
        for parameter in module.parameters():
            parameter._z3_optimizer = self  # type: ignore[attr-defined]

    def get_param_id(self, parameter: Tensor) -> int:
        return id(parameter)

    def get_local_fp32_grad_for_param(self, _: Tensor) -> Tensor:
        """Return a rank's part of the gradient that was reduced last."""
        return torch.tensor([9.0, 0.0])


def _at_stage_3() -> nn.Module:
    module = nn.Module()
    for name in ("first", "second", "frozen"):
        parameter = torch.Tensor._make_subclass(Parameter3, torch.empty(0), name != "frozen")
        Parameter3.__init__(parameter)
        module.register_parameter(name, parameter)
    Stage3(module)
    return module


def _subject(model: nn.Module) -> Subject:
    inside = flat_parameters.zero_optimizer(model).optimizer  # type: ignore[union-attr]
    return Subject(model, [inside], declared=None, rank=1, world_size=2)


def test_the_piece_of_each_parameter_in_groups() -> None:
    """Rank 1 of two has the second half of each group: parts of parameters, and none of some."""
    parts = flat_parameters.parts_of(Engine())
    pieces = {name: part.piece for name, part in parts.items()}
    assert {n: (p.offset, p.shape, p.ranks) for n, p in pieces.items() if p is not None} == {
        "module.0.weight": ((3,), (1,), (0, 1)),
        "module.1.weight": ((0,), (2,), (1,)),
        "module.0.bias": ((2,), (0,), (0,)),
        "module.1.bias": ((0,), (1,), (1,)),
    }
    assert parts["module.1.weight"].weights().tolist() == [5.0, 5.0]
    assert parts["module.1.weight"].weights().dtype is torch.float32


def test_gradients_before_a_step_are_without_the_loss_scale() -> None:
    """They are those that ranks have added; one that isn't there yet is None, and not zero."""
    gradients = {name: part.gradient() for name, part in flat_parameters.parts_of(Engine()).items()}
    shown = {name: None if g is None else g.tolist() for name, g in gradients.items()}
    assert shown == {
        "module.0.weight": [2.0],
        "module.1.weight": [1.0, 3.0],
        "module.0.bias": [],
        "module.1.bias": None,
    }


def test_the_place_of_each_parameter_at_stage_3() -> None:
    """A rank has a part of each parameter, of frozen ones, too: their elements without padding."""
    parts = flat_parameters.parts_of(_at_stage_3())
    assert [part.weights().tolist() for part in parts.values()] == [[3.0], [3.0], [7.0]]
    assert {part.shape for part in parts.values()} == {(3,)}
    pieces = [part.piece for part in parts.values()]
    assert {(p.offset, p.shape, p.ranks) for p in pieces if p} == {((2,), (1,), (0, 1))}
    gradients = [part.gradient() for part in parts.values()]
    assert [g if g is None else g.tolist() for g in gradients] == [None, [9.0], None]


def test_a_gradient_that_no_optimizer_applies() -> None:
    """Each rank has the whole gradient of a parameter in no group; its part of that is recorded."""
    model: Any = _at_stage_3()
    model.frozen.requires_grad_()
    model.frozen.data = torch.zeros(3)
    model.frozen.grad = torch.tensor([1.0, 2.0, 3.0])
    gradient = flat_parameters.parts_of(model)["frozen"].gradient()
    assert gradient is not None
    assert gradient.tolist() == [3.0]


def test_groups_have_their_tensors_between_two_steps() -> None:
    """Rates and names are known of what the optimizer is only given within a step."""
    subject = _subject(_at_stage_3())
    assert [*subject.trained] == ["first", "second"]
    assert subject.stepped_by(0, alone=False) == ["first", "second"]
    assert subject.rates() == (0.1, {})
    assert subject.start(0, {}).decayed == ("first", "second")
    assert not subject.is_written_back


def test_a_step_of_all_groups_is_one() -> None:
    """It begins and ends once; within it the names are those of the group that is stepped."""
    engine = Engine()
    subject, heard = _subject(engine), list[object]()
    inside = engine.optimizer.optimizer
    assert subject.steps_partitions(inside)
    inside.register_step_pre_hook(lambda *_: heard.append(subject.in_step_of(inside)))
    steps = flat_parameters.ZeroSteps(
        engine.optimizer, begins=lambda: heard.append("begins"), ends=heard.append
    )
    engine.optimizer.step()
    weights, biases = (["module.0." + kind, "module.1." + kind] for kind in ("weight", "bias"))
    assert heard == ["begins", weights, biases, False]
    assert subject.rates() == (0.1, dict.fromkeys(biases, 0.2))
    steps.remove()
    engine.optimizer.step()
    assert heard[4:] == [weights, biases]


def test_a_skipped_step_is_told() -> None:
    """DeepSpeed skips a step whose gradients aren't finite, and says so after it."""
    zero, heard = Engine().optimizer, list[bool]()
    flat_parameters.ZeroSteps(zero, begins=lambda: None, ends=heard.append)
    zero.overflow = True
    zero.step()
    assert heard == [True]


def test_ranks_share_the_work_on_one_batch() -> None:
    """All ranks have parts of one training, and compute in the format of the model."""
    engine = Engine()
    layout = flat_parameters.layout_of(engine, 2)
    assert layout is not None
    assert layout.axes == {"fsdp": 2}
    with pytest.raises(UsageError, match="DeepSpeed's ZeRO does not show how all 4 ranks"):
        flat_parameters.layout_of(engine, 4)
    assert flat_parameters.is_fully_sharded(engine)
    assert step_in_work.compression(engine) == "bfloat16"


def test_partitions_are_parts_of_the_model_that_is_called() -> None:
    """The engine is the model of an optimizer that steps nothing but partitions."""
    engine = Engine()
    assert surroundings.model_of(engine, [engine.optimizer.optimizer]) is engine


def test_a_tensor_of_two_modules_has_both_names() -> None:
    """The second name is no parameter of its own."""
    model = _at_stage_3()
    model.register_parameter("again", model.first)  # type: ignore[arg-type]
    assert declarations.shared(model) == (("first", "again"),)


def test_other_models_have_no_partitions() -> None:
    """A model whose attribute `optimizer` is one of torch's is trained as it is."""
    model = nn.Linear(1, 1)
    model.optimizer = torch.optim.SGD(model.parameters())  # type: ignore[assignment]
    assert flat_parameters.zero_optimizer(model) is None
    assert flat_parameters.parts_of(model) == {}
    assert flat_parameters.layout_of(model, 2) is None
