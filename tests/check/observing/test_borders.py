"""What is recorded at the borders of modules, and what that leaves unchanged."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.diff import judge
from entrenar_py.check.observing.borders import Borders, _common
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, Settings


class Net(nn.Module):
    """Two layers, with an operation of the model itself between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(3, 5), nn.Identity(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)).tanh())
        return out


def recorded(settings: Settings | None = None) -> tuple[list[Border], list[str], Net]:
    """Return the borders of one step, the problems, and the model."""
    torch.manual_seed(0)
    net, borders, problems = Net(), list[Border](), list[str]()
    recorder = Borders(net, borders.append, settings or Settings(), failed=problems.append)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.begin_pass(0, 0)
    loss = net(torch.ones(2, 3)).square().mean()
    recorder.loss(float(loss.detach()), 1.0)
    loss.backward()
    recorder.before_step(0, [optimizer])
    optimizer.step()
    recorder.after_step()
    return borders, problems, net


def test_borders_are_in_the_order_of_execution() -> None:
    """Forward, loss, backward and update follow each other, each with its module."""
    borders, problems, _ = recorded()
    assert not problems
    passed = [(b.kind, b.name) for b in borders if b.phase in ("forward", "backward")]
    forward = [
        (border_file.INPUT, ""),
        (border_file.INPUT, "up"),
        (border_file.OUTPUT, "up"),
        (border_file.INPUT, "act"),
        (border_file.OUTPUT, "act"),
        (border_file.INPUT, "down"),
        (border_file.OUTPUT, "down"),
        (border_file.OUTPUT, ""),
        (border_file.LOSS, "loss"),
    ]
    kinds = (border_file.GENERATOR, border_file.SAMPLES)
    assert [place for place in passed if place[0] not in kinds][: len(forward)] == forward
    backward = [b for b in borders if b.phase == "backward"]
    assert [b.name for b in backward if b.kind == border_file.PARAMETER_GRADIENT][-1] == "up.weight"
    assert {b.kind for b in borders if b.phase == "update"} >= {
        border_file.UPDATE,
        border_file.RATE,
    }


def test_a_difference_is_attributed_to_the_code_that_made_it() -> None:
    """An input comes from the module around, and a gradient from what uses the value."""
    borders, _, _ = recorded()
    where = {(b.kind, b.name): b.where for b in borders}
    assert where[border_file.OUTPUT, "up"] == "up"
    assert where[border_file.INPUT, "down"] == ""
    assert where[border_file.INPUT_GRADIENT, "down"] == "down"
    assert where[border_file.OUTPUT_GRADIENT, "up"] == "act"


def test_noise_changes_last_bits_and_no_generator() -> None:
    """Values move by some eps, and the script's random numbers stay the same."""
    plain, _, _ = recorded()
    disturbed, _, _ = recorded(Settings(noise=1))
    for one, other in zip(plain, disturbed, strict=True):
        if one.kind == border_file.GENERATOR:
            assert one.digest == other.digest
        if one.kind == border_file.OUTPUT and one.numbers is not None:
            assert other.numbers is not None
            assert one.digest != other.digest
            torch.testing.assert_close(
                torch.tensor(one.numbers), torch.tensor(other.numbers), rtol=1e-5, atol=1e-5
            )


def test_operations_have_modules_and_lines() -> None:
    """Those of a backward pass have the line of their forward operation."""
    borders, problems, _ = recorded(Settings(operations=(0, 0)))
    assert not problems
    operations = {b.name: b for b in borders if b.kind == border_file.OPERATION}
    assert operations["addmm"].where == "down"
    assert operations["tanh"].where == operations["tanh_backward"].where == ""
    assert operations["tanh"].site == operations["tanh_backward"].site
    assert "test_borders.py" in operations["tanh"].site


def test_an_operation_of_a_library_has_the_line_that_called_it() -> None:
    """The script's innermost line is known, too; an operation of the script has no caller."""
    of_library: dict[str, Any] = {}
    code = compile("def squared(x):\n    return x.square()", "/site-packages/loss.py", "exec")
    exec(code, of_library)
    net, borders = Net(), list[Border]()
    recorder = Borders(net, borders.append, Settings(operations=(0, 0)), failed=print)
    recorder.begin_pass(0, 0)
    of_library["squared"](net(torch.ones(2, 3))).mean().backward()
    recorder.after_step()
    operations = {b.text.split("(")[0]: b for b in borders if b.kind == border_file.OPERATION}
    assert operations["pow"].site == "/site-packages/loss.py:2"
    assert operations["pow"].caller.startswith(f"{__file__}:")
    assert not operations["mean"].caller


def test_memory_with_any_values_is_no_operation() -> None:
    """A deep copy begins with such memory, which differs in each run."""
    net, borders = Net(), list[Border]()
    recorder = Borders(net, borders.append, Settings(operations=(0, 0)), failed=print)
    recorder.begin_pass(0, 0)
    copy.deepcopy(net(torch.ones(2, 3)).detach())
    torch.ones(2).new_empty(3)
    recorder.after_step()
    names = {b.name for b in borders if b.kind == border_file.OPERATION}
    assert "addmm" in names
    assert not {"set_", "new_empty", "empty"} & names


def test_infinite_elements_of_a_large_tensor_are_compared() -> None:
    """Masks that differ are infinitely apart; with the same mask, the finite elements count."""
    scores = torch.linspace(0, 1, 8192)

    def border(scores: Tensor) -> Border:
        borders = list[Border]()
        recorder = Borders(nn.Identity(), borders.append, Settings(), failed=print)
        return recorder._value(border_file.OUTPUT, "", scores)

    masked = border(scores.clone().index_fill_(0, torch.tensor([3]), -torch.inf))
    other = border(scores.clone().index_fill_(0, torch.tensor([4]), -torch.inf))
    moved = border((scores * 1.5).index_fill_(0, torch.tensor([3]), -torch.inf))
    positive = border(scores.clone().index_fill_(0, torch.tensor([3]), torch.inf))
    for each in (other, positive, border(scores)):
        assert judge.distance(masked, each) == torch.inf
    assert judge.distance(masked, masked) == 0
    assert 0 < judge.distance(masked, moved) < 2 * masked.scale


def test_an_output_without_a_gradient_ends_no_record() -> None:
    """Hooks of a function's output get None if the loss uses only another output."""

    class Both(torch.autograd.Function):  # as what torch.compile makes of a model
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            return x.sum(), x * 2

        @staticmethod
        def backward(ctx: Any, loss: Tensor, _: Tensor | None) -> Tensor:
            return loss.expand(2, 5)

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return Both.apply(self.up(x))  # type: ignore[no-any-return, no-untyped-call]

    net, borders, problems = Compiled(), list[Border](), list[str]()
    recorder = Borders(net, borders.append, Settings(), failed=problems.append)
    recorder.begin_pass(0, 0)
    net(torch.ones(2, 3))[0].backward()
    assert not problems
    assert border_file.PARAMETER_GRADIENT in {border.kind for border in borders}


def test_a_copy_of_the_model_records_nothing() -> None:
    """An average of the weights may be called between steps."""
    borders, problems, net = recorded()
    before = len(borders)
    copy.deepcopy(net)(torch.ones(2, 3))
    assert (len(borders), problems) == (before, [])


def test_a_failing_hook_ends_the_record_and_not_the_script() -> None:
    """The reason is reported once."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

        @property
        def weight(self) -> Tensor:
            raise RuntimeError("no weight")

    net, told = nn.Sequential(Odd(), nn.Linear(3, 1)), list[str]()
    recorder = Borders(net, lambda _: None, Settings(), failed=told.append)
    recorder.begin_pass(0, 0)
    net(torch.ones(2, 3)).sum().backward()
    assert told == ["values at borders can't be recorded (RuntimeError: no weight)"]


def test_a_value_that_several_modules_use_belongs_to_what_contains_them() -> None:
    """Nested users are one; parts of one module are that module."""
    assert _common(["block", "block.norm"]) == "block.norm"
    assert _common(["block", "block.q", "block.k"]) == "block"
    assert _common(["first.q", "second.q"]) == ""
