"""The `observe` line in a script: no effect unless a run is recorded, and the recorded events."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import entrenar_py
from entrenar_py.check.observing import FAULTS, Observation, checkpoints, surroundings, tensors
from entrenar_py.check.observing.sources import InOrder
from entrenar_py.check.rank_files import rank_file
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import Drawn, Injected, Shard, Start, Update
from tests.check.observing.recording import begun, of, recorded


def test_inert() -> None:
    """Without the harness no hook is set and nothing is imported, not even torch."""
    code = (
        "import sys, entrenar_py\n"
        "obs = entrenar_py.observe(None, None)\n"
        "obs.samples([1]); obs.loss(1.0, 2); obs.close()\n"
        "assert 'torch' not in sys.modules and 'blake3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, obs: Observation, num_steps: int = 2
) -> None:
    """Train for some steps of two micro-batches, with two samples each."""
    for step in range(num_steps):
        for micro in range(2):
            ids = [4 * step + 2 * micro, 4 * step + 2 * micro + 1]
            obs.samples(ids)
            loss = model(torch.tensor(ids).float()[:, None]).square().mean()
            obs.loss(loss, 2)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    obs.close()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_group_that_the_script_lets_go_of_is_not_taken_down(
    is_kept: bool, tmp_path: Path
) -> None:
    """It would wait for its thread, which may wait for the lock of Python's that this one has."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    if is_kept:
        surroundings.keep_groups()
    dist.destroy_process_group()
    gc.collect()
    assert (group() is not None) == is_kept


def trained(folder: Path, model: nn.Module, num_steps: int = 2) -> RankTrace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    train(model, optimizer, entrenar_py.observe(model, optimizer), num_steps)
    (path,) = sorted(folder.glob("*.rank.jsonl"))[-1:]
    return rank_file.load(path)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_checkpoint_that_is_loaded_after_a_pass_to_warm_up(
    folder: Path, *, is_read: bool
) -> None:
    """Training begins with what it gave, and the pass before it belongs to no step."""
    model, optimizer, obs = begun()
    model(torch.ones(3, 1)).sum().backward()
    optimizer.zero_grad()
    (folder / "last.pt").touch()
    if is_read:
        checkpoints.loaded(folder / "last.pt")
    nn.init.constant_(model.weight, 4.0)
    train(model, optimizer, obs, num_steps=1)
    record = recorded(folder)
    (start,) = of(Start, record)
    known = start.weights["weight"].values()
    assert known is not None
    assert (known.item() == 4.0) is is_read
    (update,) = of(Update, record)
    assert bool(update.edited) is not is_read
    assert len(of(Shard, record)) == (2 if is_read else 3)


@pytest.mark.parametrize(("declared", "clips"), [(None, 0.5), (2.0, None)])
def test_the_norm_that_a_line_does_not_say_is_that_of_the_calls(
    folder: Path, declared: float | None, clips: float | None
) -> None:
    """The gradients are recorded before a call that clips them, too, and not for other tensors."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optimizer, clip_norm=declared)
    for step in range(2):
        model(torch.full((2, 1), 3.0)).square().mean().backward()
        nn.utils.clip_grad_norm_((model if step else other).parameters(), 0.5)
        if not step:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    obs.close()
    record = recorded(folder)
    assert (record.header["clip_norm"], record.header.get("clips")) == (declared, clips)
    assert all(one.unclipped.keys() == one.gradient.keys() for one in of(Update, record))


def test_clipping_by_a_norm_that_was_computed_before(folder: Path) -> None:
    """The gradients are recorded before it. Which norm that is isn't known."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optimizer)
    model(torch.full((2, 1), 3.0)).square().mean().backward()
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    nn.utils.clip_grads_with_norm_(iter([*model.parameters()]), 0.5, norm)
    optimizer.step()
    obs.close()
    record = recorded(folder)
    assert record.header.get("clips") is None
    (update,) = of(Update, record)
    assert update.unclipped.keys() == update.gradient.keys()
    assert update.unclipped["bias"].digest != update.gradient["bias"].digest


def test_what_is_recorded(folder: Path) -> None:
    """The record has a start, each micro-batch's gradient, and the results of each step."""
    model = nn.Linear(1, 1)
    before = model.weight.item()
    record = trained(folder, model)
    (start,) = of(Start, record)
    assert isinstance(start, Start)
    assert start.trainable == ("weight", "bias")
    known = start.weights["weight"].values()
    assert known is not None
    assert known.tolist() == pytest.approx([before])
    shards = of(Shard, record)
    assert [(one.step, one.shard, one.ids) for one in shards] == [
        *((0, 0, (0, 1)), (0, 1, (2, 3))),
        *((1, 0, (4, 5)), (1, 1, (6, 7))),
    ]
    updates = of(Update, record)
    assert [one.step for one in updates] == [0, 1]
    total = sum(one.gradient["weight"].values()[0] for one in shards[:2])  # type: ignore[index]
    applied = updates[0].gradient["weight"].values()
    assert applied is not None
    assert applied[0] == pytest.approx(total)
    assert list(updates[0].optimizer) == ["weight/momentum_buffer", "bias/momentum_buffer"]
    assert record.ended
    assert record.header["groups"][0]["momentum"] == 0.5


class Compiled(nn.Module):
    """A module with the parameter names that torch.compile gives it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the inner module."""
        return cast(torch.Tensor, self._orig_mod(x))


def test_a_wrapper_is_looked_through(folder: Path) -> None:
    """Names are those of the user's own module."""
    (start,) = of(Start, trained(folder, Compiled(nn.Linear(1, 1))))
    assert isinstance(start, Start)
    assert start.trainable == ("weight", "bias")


class Passing(torch.optim.Optimizer):
    """An optimizer as accelerate wraps it: it passes calls on, and has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the inner optimizer's groups."""
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the inner optimizer's gradients."""
        self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_around_an_optimizer(folder: Path) -> None:
    """The hooks are set on the inner optimizer, which steps."""
    model = nn.Linear(1, 1)
    optimizer = Passing(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5))
    train(model, optimizer, entrenar_py.observe(model, optimizer))
    record = recorded(folder)
    assert len(of(Update, record)) == 2
    assert record.header["optimizer"] == "SGD"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure(kind: type[torch.optim.Optimizer], folder: Path) -> None:
    """A closure computes the gradient in the step, once or several times.

    The first gradient is recorded, together with the micro-batches before it.
    """
    model = nn.Linear(1, 1)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    obs = entrenar_py.observe(model, optimizer)

    def backward(sample: int) -> float:
        obs.samples([sample])
        loss = model(torch.ones(1, 1)).square().sum()
        obs.loss(loss, 1)
        loss.backward()
        return float(loss.detach())

    for step in range(2):
        optimizer.zero_grad()
        backward(2 * step)
        optimizer.step(lambda step=step: backward(2 * step + 1))  # type: ignore[misc]
    obs.close()
    record = recorded(folder)
    shards = of(Shard, record)
    assert [(one.step, one.ids) for one in shards] == [
        *((0, (0,)), (0, (1,))),
        *((1, (2,)), (1, (3,))),
    ]
    update = next(event for event in record.events if isinstance(event, Update))
    total = sum(one.gradient["weight"].values()[0] for one in shards[:2])  # type: ignore[index]
    assert update.gradient["weight"].values() == pytest.approx([total])


def test_micro_batches_that_are_fetched_together(folder: Path) -> None:
    """Each micro-batch has its own samples, even if its forward pass runs twice."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.arange(6.0)[:, None]), batch_size=2)
    obs = entrenar_py.observe(model, optimizer, sampler=InOrder(loader))
    for (inputs,) in list(loader):
        model(inputs)
        model(inputs).sum().backward()
    optimizer.step()
    obs.close()
    assert [one.ids for one in of(Shard, folder)] == [(0, 1), (2, 3), (4, 5)]


def test_random_numbers(folder: Path) -> None:
    """A forward pass that draws random numbers records the generator's state; others don't."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
    drawn = [s.draws for s in trained(folder, model).events if isinstance(s, Shard)]
    assert len(set(drawn)) == 4
    assert None not in drawn
    calm = trained(folder, nn.Linear(1, 1))
    assert {s.draws for s in calm.events if isinstance(s, Shard)} == {None}


def test_a_planted_value(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted value strikes once, in its step, and its micro-batch is recorded as not finite."""
    fault = '[{"kind": "non_finite_gradient", "step": 1, "value": "nan"}]'
    monkeypatch.setenv(FAULTS, fault)
    record = trained(folder, nn.Linear(1, 1))
    assert [one.finite for one in of(Shard, record)] == [True, True, False, True]


def test_a_planted_value_strikes_what_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If passes leave the first tensor out, another one is struck."""
    monkeypatch.setenv(FAULTS, '[{"kind": "non_finite_gradient", "step": 1, "value": "nan"}]')
    model, optimizer, obs = begun(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    for step in range(2):
        obs.samples([step])
        with torch.no_grad():
            hidden = model[0](torch.ones(1, 1))
        model.forward = model[1].forward
        model(hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    obs.close()
    assert [one.finite for one in of(Shard, folder)] == [True, False]


def test_a_planted_value_waits_where_one_optimizer_steps_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next pass may be one through it, for another. After some steps it is none."""
    monkeypatch.setenv(FAULTS, '[{"kind": "non_finite_gradient", "step": 1, "value": "nan"}]')
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in model)
    obs = entrenar_py.observe(model, [first, second])
    model.forward = model[0].forward  # type: ignore[method-assign]
    for step in range(5):
        obs.samples([step])
        model(torch.ones(1, 1)).sum().backward()
        first.step()
        model.zero_grad()
    second.step()
    obs.close()
    events = recorded(folder).events
    shards = [event for event in events if isinstance(event, Shard)]
    assert [(one.step, one.finite) for one in shards][3:] == [(3, True), (4, False)]
    assert [event.step for event in events if isinstance(event, Injected)] == [4]


def test_evaluation_mode(folder: Path) -> None:
    """A micro-batch that is trained in evaluation mode is recorded as such."""
    model, optimizer, obs = begun()
    for step in range(3):
        model.train(step != 1)
        obs.samples([step])
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    obs.close()
    assert [one.evaluating for one in of(Shard, folder)] == [False, True, False]


def test_weights_that_other_ranks_step(folder: Path) -> None:
    """Where the optimizer lacks parameters, weights are recorded as the next pass finds them."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.01)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(2):
        obs.samples([step])
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.bias.fill_(step)  # as a broadcast does
    obs.close()
    assert [one.weights["bias"].values() for one in of(Update, folder)] == [0.0, 1.0]


def test_a_step_that_a_scaler_skips(folder: Path) -> None:
    """A skipped step is recorded without change, and its samples don't count for the next."""
    torch.manual_seed(0)  # with a loss near zero no scale would be too large
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(4):
        obs.samples([step])
        loss = (model(torch.tensor([[9.0]])) + 1).square().mean()
        obs.loss(loss, 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**127 if step == 0 else 1.0)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    obs.close()
    record = recorded(folder)
    assert [(one.step, one.ids, one.finite) for one in of(Shard, record)] == [
        (step, (step,), True) for step in range(4)
    ]
    updates = of(Update, record)
    assert [bool(one.gradient) for one in updates] == [False, False, True, True]
    assert updates[0].weights == updates[1].weights != updates[2].weights


def test_several_optimizers(folder: Path) -> None:
    """A step is over when each optimizer has stepped, and has the gradients that each applied."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    both = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in model]
    obs = entrenar_py.observe(model, both)
    for step in range(2):
        for index, optimizer in enumerate(both):
            obs.samples([2 * step + index])
            model(torch.ones(1, 1)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    obs.close()
    record = recorded(folder)
    assert [(e.step, e.ids) for e in record.events if isinstance(e, Shard)] == [
        *((0, (0,)), (0, (1,)), (1, (2,)), (1, (3,)))
    ]
    updates = of(Update, record)
    assert [one.step for one in updates] == [0, 1]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [list(one.gradient) for one in updates] == [names, names]
    assert [list(one.optimizer) for one in updates] == [[f"{n}/momentum_buffer" for n in names]] * 2


def test_a_loss_that_passes_through_parameters_of_a_seldom_optimizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has its own pass, with its draws and its faults; both networks have one batch."""
    fault = {"kind": "non_finite_gradient", "step": 2, "tensor": "1.weight", "value": "nan"}
    monkeypatch.setenv(FAULTS, json.dumps([fault]))
    maker, judge = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1)), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (maker, judge)]
    loader = DataLoader(TensorDataset(torch.ones(7, 1)))
    obs = entrenar_py.observe(nn.ModuleList([maker[1], judge]), optimizers, sampler=loader)
    for step, (real,) in enumerate(loader):
        optimizers[0].zero_grad()
        judge(made := maker(real)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(maker.parameters(), 9.0)
        optimizers[0].step()
        if step % 5 == 0:
            optimizers[1].zero_grad()
            (judge(real) - judge(made.detach())).square().mean().backward()
            optimizers[1].step()
    obs.close()
    record = recorded(folder)
    shards = of(Shard, record)
    passes = [(step, 0, (step,)) for step in range(7)]
    own = [*passes[:1], (0, 1, ()), *passes[1:6], (5, 1, ()), passes[6]]
    assert [(one.step, one.shard, one.ids) for one in shards] == own
    updates = of(Update, record)
    assert [len(one.gradient) for one in updates] == [4, 2, 2, 2, 2, 4, 2]
    of_judge = {"1.weight": (1,), "1.bias": (1,)}
    assert [one.summed for one in updates] == [of_judge, {}, {}, {}, {}, of_judge, {}]
    assert not any(one.kept for one in updates)
    for shard, update in zip(shards[2:6], updates[1:5], strict=True):
        for gradient in (update.gradient, update.unclipped):
            assert gradient["0.weight"].digest == shard.gradient["0.weight"].digest
    (planted,) = of(Injected, record)
    assert [(one.step, one.shard) for one in shards if not one.finite] == [
        (planted.step, planted.shard)
    ]
    drawn = [(one.step, one.micro_batch) for one in of(Drawn, record) if one.where == "batch"]
    assert drawn == [(step, 0) for step in range(7)]


def test_an_optimizer_that_applies_the_passes_of_two_steps(folder: Path) -> None:
    """The gradient that it applies is known to contain them since the first of them."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    obs = entrenar_py.observe(model, both)
    for step in range(4):
        obs.samples([step])
        model(torch.ones(1, 1)).square().mean().backward()
        for optimizer in both[: 1 + step % 2]:
            optimizer.step()
            optimizer.zero_grad()
    obs.close()
    record = recorded(folder)
    assert [(one.step, one.shard, one.ids) for one in of(Shard, record)] == [
        (step, 0, (step,)) for step in range(4)
    ]
    kept = [one.kept for one in of(Update, record)]
    assert kept == [{}, {"1.weight": 0, "1.bias": 0}, {}, {"1.weight": 2, "1.bias": 2}]


@pytest.mark.parametrize("values_max", [10, 1000])
def test_floats_of_eight_bits(
    values_max: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen weight or a buffer of 8 bits is recorded as the numbers that it has."""
    monkeypatch.setattr(tensors, "VALUES_MAX", values_max)
    model = nn.Linear(8, 4)
    held = torch.randn(8, 8).to(torch.float8_e4m3fn)
    model.frozen = nn.Parameter(held, requires_grad=False)
    model.register_buffer("scales", torch.ones(3).to(torch.float8_e5m2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, optimizer)
    model(model.frozen.float()).square().mean().backward()
    optimizer.step()
    obs.close()
    (start,), (update,) = of(Start, folder), of(Update, folder)
    assert start.weights["frozen"] == update.weights["frozen"]
    assert update.finite
    if values_max == 1000:
        numbers = start.weights["frozen"].values()
        assert numbers is not None
        assert (numbers == held.float().flatten().numpy()).all()


def test_what_is_no_training_draws_nothing(folder: Path) -> None:
    """An evaluation, or a block that is computed again in the backward pass, records no draws."""

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, checkpoint(self.block, x, use_reentrant=False))

    model = Saving()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(2):
        obs.samples([step])
        model(torch.ones(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model(torch.ones(1, 1))
        model.train()
        with torch.no_grad():
            model(torch.ones(1, 1))
    obs.close()
    assert [(one.step, one.ids) for one in of(Shard, folder)] == [(0, (0,)), (1, (1,))]


def test_rates_that_are_tensors(folder: Path) -> None:
    """Learning rates may be tensors, as captured optimizers have them."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    entrenar_py.observe(model, optimizer).close()
    (path,) = folder.glob("*.rank.jsonl")
    (group,) = rank_file.load(path).header["groups"]
    assert (group["lr"], group["betas"]) == (0.5, [0.9, 0.999])


def test_two_lives(folder: Path) -> None:
    """A script that observes again to continue has a second file."""
    trained(folder, nn.Linear(1, 1))
    again = trained(folder, nn.Linear(1, 1))
    assert again.life == 1


def test_a_file_that_was_cut_off(folder: Path) -> None:
    """A truncated file is read up to its last whole line; a file without a header is refused."""
    whole = trained(folder, nn.Linear(1, 1))
    (path,) = folder.glob("*.rank.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, -1) - 10])
    cut = rank_file.load(path)
    assert not cut.ended
    assert cut.events == whole.events[: len(cut.events)]
    for broken in (b"", b"{\n", b"[]\n", b'{"kind":"rank","version":9}\n'):
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=path.name):
            rank_file.load(path)


def test_a_planted_value_spares_what_is_thrown_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator's pass goes through a discriminator, and trains nothing there."""
    monkeypatch.setenv(FAULTS, '[{"kind": "non_finite_gradient", "step": 2, "value": "nan"}]')
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    generator, judge = (torch.optim.SGD(part.parameters(), lr=0.01) for part in model)
    obs = entrenar_py.observe(model, [judge, generator])
    for step in range(3):
        judge.zero_grad()
        obs.samples([step])
        model[1](torch.ones(1, 1)).sum().backward()
        judge.step()
        generator.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        generator.step()
    obs.close()
    events = recorded(folder).events
    shards = [event for event in events if isinstance(event, Shard)]
    assert [(one.step, one.finite) for one in shards][:5] == [
        *((step, True) for step in (0, 0, 1, 1)),
        (2, False),
    ]
    assert [event.step for event in events if isinstance(event, Injected)] == [2]
