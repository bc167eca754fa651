"""Notice facts about a rank's parameters before the first step, beyond their values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import dtensors, flat_parameters, tensors
from entrenar_py.check.observing.declarations import Declarations
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import trace

Names = tuple[str, ...]


class FirstLook:
    """The first look at a rank's parameters.

    Names that share a tensor are those that share it when the script calls `observe`.
    """

    def __init__(self, subject: Subject, declared: Declarations) -> None:
        self._subject, self._declared = subject, declared
        self._shared = shared(subject.model)

    def events(self, step: int) -> Iterator[trace.Event]:
        """Yield what the script declares of its parameters, and what is seen of them.

        `step` is the number of the first step.
        """
        subject, ties = self._subject, self._subject.layout.tied if self._subject.layout else ()
        frozen = self._declared.frozen_of(names_of(subject.model))
        yield trace.Declared(
            step=step,
            rank=subject.rank,
            frozen=frozen,
            tied=ties,
            averages=tuple(self._declared.averages),
        )
        yield trace.Noticed(
            step=step,
            rank=subject.rank,
            shared=self._shared,
            alike=alike(subject.model),
            doubled=doubled(subject.optimizers, subject.parameters),
            peculiar=peculiar(subject.own_weights()),
        )


def shared(model: nn.Module) -> tuple[Names, ...]:
    """Return the names of each tensor that the model holds under several names.

    Parameters that are views of the same memory count as one tensor.
    """
    names_of: dict[object, dict[str, None]] = defaultdict(dict)
    for name, parameter in [*flat_parameters.named(model)]:
        names_of[_memory(parameter)][name] = None
    return tuple(tuple(names) for names in names_of.values() if len(names) > 1)


def names_of(model: nn.Module) -> dict[str, str]:
    """Return all names of parameters, each with the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    named = [*flat_parameters.named(model)]
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def doubled(optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> Names:
    """Return the names of the parameters whose memory one optimizer steps more than once."""
    twice: set[object] = set()
    for optimizer in optimizers:
        held = [_memory(p) for group in optimizer.param_groups for p in group["params"]]
        twice.update(memory for memory, count in Counter(held).items() if count > 1)
    return tuple(name for name, p in parameters.items() if _memory(p) in twice)


def peculiar(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the peculiar parameters by name: `nan`, `inf`, `zero` or `uninitialised`.

    `zero` are matrices without any other number. `uninitialised` are tensors with numbers that no
    initialisation draws, but that memory often holds.
    """
    looks = {name: _look(dtensors.local(p)) for name, p in parameters.items()}
    return {name: look for name, look in looks.items() if look}


def alike(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return pairs of an embedding's weight and another parameter with the same values.

    They are two tensors. Equal values suggest that they were one before a copy or a load.
    """
    every = dict(flat_parameters.named(model))
    first = names_of(model)
    parameters = {n: p for n, p in every.items() if p.requires_grad and first[n] == n}
    return tuple(
        (name, other)
        for name in _embeddings(model)
        if name in every and every[name].requires_grad
        for other, parameter in parameters.items()
        if other != name and _are_alike(every[name], parameter)
    )


# --- one tensor -------------------------------------------------------------------------------

# Heap memory holds addresses, half of which are denormal numbers as floats, and exponents of any
# size. Weights of a trained model may have a few denormal numbers.
_DENORMAL_SHARE = 0.01
_HUGE = 1e20


def _memory(parameter: Tensor) -> object:
    """Return a key that is equal for parameters that are the same numbers in memory."""
    held = dtensors.local(parameter)
    if held.is_meta or not held.numel():
        return id(parameter)
    return held.device, held.data_ptr(), held.numel(), held.dtype


def _look(held: Tensor) -> str:
    if held.is_meta or not held.numel() or not held.dtype.is_floating_point:
        return ""
    if held.isnan().any():
        return "nan"
    if held.isinf().any():
        return "inf"
    size = held.abs()
    if not size.any():
        return "zero" if held.ndim > 1 and held.numel() > 1 else ""
    # Small weights in float16 are rightly denormal.
    tiny = 0.0 if held.dtype is torch.float16 else torch.finfo(held.dtype).tiny
    num_denormal = int(((size > 0) & (size < tiny)).sum())
    if num_denormal > _DENORMAL_SHARE * held.numel() or bool((size > _HUGE).any()):
        return "uninitialised"
    return ""


def _embeddings(model: nn.Module) -> Iterator[str]:
    """Yield the names of the weights of embeddings."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield tensors.plain_name(f"{path}.weight" if path else "weight")


def _are_alike(weight: Tensor, parameter: Tensor) -> bool:
    if _memory(weight) == _memory(parameter) or weight.shape != parameter.shape:
        return False
    mine, theirs = dtensors.local(weight), dtensors.local(parameter)
    if mine.shape != theirs.shape or mine.is_meta or theirs.is_meta or mine.numel() < 2:
        return False
    varied = bool((mine != mine.flatten()[0]).any())
    return varied and mine.device == theirs.device and bool((mine == theirs).all())
