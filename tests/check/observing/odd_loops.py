"""Ways to go through a loader, and to train with what it yields, as people write them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# --- ways to go through a loader --------------------------------------------------------------


def _by_hand(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return


def _zipped_with_itself(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    yield from (pair[0] for pair in zip(batches, batches, strict=False))


def _nested(loader: Any) -> Iterator[Any]:
    for outer in itertools.islice(loader, 2):
        yield outer
        yield from itertools.islice(loader, 2)


def _sent(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    yield next(batches)
    if hasattr(batches, "send"):
        yield batches.send(0)
        yield batches.throw(ValueError("wanted"))
        batches.close()
    yield next(batches, torch.ones(1, 4))


def _begun_again(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    yield next(batches)
    yield from iter(batches)


def _passed_on(loader: Any) -> Iterator[Any]:
    yield from pickle.loads(pickle.dumps(loader))


WALKS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "for": iter,
    "by hand": _by_hand,
    "twice": lambda loader: itertools.chain(loader, loader),
    "enumerated": lambda loader: (batch for index, batch in enumerate(loader) if index != 1),
    "ahead": lambda loader: iter([*itertools.islice(loader, 5)]),
    "backwards": lambda loader: reversed([*itertools.islice(loader, 5)]),
    "cycled": lambda loader: itertools.cycle(itertools.islice(loader, 2)),
    "a copy": lambda loader: iter(copy.copy(loader)),
    "a deep copy": lambda loader: iter(copy.deepcopy(loader)),
    "pickled": _passed_on,
    "zipped with itself": _zipped_with_itself,
    "nested": _nested,
    "sent": _sent,
    "begun again": _begun_again,
    "first of each": lambda loader: (next(iter(loader)) for _ in range(3)),
    "its iterator is copied": lambda loader: iter(copy.copy(iter(loader))),
}


# --- ways to train ----------------------------------------------------------------------------


class Net(nn.Module):
    """A model with dropout, normalisation, a checkpointed block, and names that it makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.2)

    def __getattr__(self, name: str) -> Any:
        if name == "nickname":
            return "net"
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row of `x`."""
        hidden = cast(Tensor, checkpoint(self.first, x, use_reentrant=False))
        if len(x) > 1:
            hidden = self.norm(hidden)
        return cast(Tensor, self.second(self.drop(hidden)))


Loss = Callable[[], Tensor]


def _plain(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


def _closure(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for optimizer in optimizers:
        optimizer.step(closure)


def _scaled(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss()).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


def _sharpness_aware(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.01)
    model.zero_grad()
    _plain(loss, optimizers, model)


def _penalised(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    value = loss()
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    slopes = torch.autograd.grad(value, used, create_graph=True, allow_unused=True)
    penalty = sum((s.square().sum() for s in slopes if s is not None), torch.zeros(()))
    model.zero_grad()
    (value + 0.1 * penalty).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


def _in_evaluation_mode(loss: Loss, optimizers: list[Any], model: nn.Module) -> None:
    model.eval()
    _plain(loss, optimizers, model)
    model.train()


STEPS: dict[str, Callable[[Loss, list[Any], nn.Module], None]] = {
    "plain": _plain,
    "closure": _closure,
    "scaled": _scaled,
    "sharpness-aware": _sharpness_aware,
    "penalised": _penalised,
    "in evaluation mode": _in_evaluation_mode,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)],
    "Adam, foreach": lambda model: [torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)],
    "AdamW, fused": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)],
    "LBFGS": lambda model: [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)],
    "two": lambda model: [
        torch.optim.SGD([model.get_parameter("first.weight")], lr=0.1),
        torch.optim.Adagrad([model.get_parameter("second.weight")], lr=0.1),
    ],
}

# --- what a script does besides ---------------------------------------------------------------

Say = Callable[..., None]


def _saved(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    for thing in (model, *optimizers):
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        say(sorted(again.state_dict()))


def _averaged(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    say(average(torch.ones(2, 4)).sum().item())  # in training mode, like a target network


def _evaluated(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    model.eval()
    with torch.no_grad():
        say(model(torch.ones(2, 4)).sum().item())
    model.train()


def _hooked(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    model.register_forward_hook(lambda _, inputs, output: output + inputs[0].sum())
    model.get_parameter("first.weight").register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: say("stepped"))


def _looked_at(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    say(type(model), repr(model), model.nickname, [*model.state_dict()])
    for optimizer in optimizers:
        say(type(optimizer), optimizer.__class__, sorted(optimizer.state_dict()), repr(optimizer))
    say(type(loader), isinstance(loader, type(loader)), hasattr(loader, "__len__"))


def _copied(model: nn.Module, optimizers: list[Any], loader: Any, say: Say) -> None:
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 4)).sum().backward()
    say([None if p.grad is None else float(p.grad.sum()) for p in twin.parameters()])
    say([type(copy.deepcopy(optimizer)) for optimizer in optimizers])
    weights: dict[str, Tensor] = dict(twin.named_parameters())
    say(torch.func.functional_call(model, weights, torch.ones(2, 4)).sum().item())


EXTRAS: dict[str, Callable[[nn.Module, list[Any], Any, Say], None]] = {
    "saved": _saved,
    "averaged": _averaged,
    "evaluated": _evaluated,
    "hooked": _hooked,
    "looked at": _looked_at,
    "copied": _copied,
}
