"""The declarations that a script makes to `observe`, and the first look at its parameters.

Declarations are validated, and their patterns resolved. The first look goes beyond the values of
parameters: names that share a tensor, tensors that are stepped twice, and tensors that look
uninitialised.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.rank_files.layout import STAGES, Layout
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError, did_you_mean
from entrenar_py.shared.trace.traits import CHOICES
from entrenar_py.shared.wording import listed

_NEGATED = "!"
_REDUCTIONS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """The declarations that a script makes.

    - `frozen`: patterns of the parameters that never change; None if undeclared.
    - `clip_norm`: the largest L2 norm of an applied gradient.
    - `synchronised`: patterns of the buffers that forward passes change in the same way on all
      ranks.
    - `reduction`: the dtype in which ranks add gradients; "" if undeclared.
    - `averages`: name -> average of the weights that the script keeps.
    - `loss_over`: "batch" or "micro-batch", as for `observe`; "" if undeclared.
    """

    frozen: tuple[str, ...] | None = None
    synchronised: tuple[str, ...] = ()
    clip_norm: float | None = None
    reduction: str = ""
    loss_over: str = ""
    averages: Mapping[str, Any] = field(default_factory=dict)

    def frozen_of(self, names: Mapping[str, str]) -> tuple[str, ...] | None:
        """Return the parameters that are declared frozen; None if the script doesn't declare any.

        `names` maps all names of parameters to the names under which they are recorded.
        """
        if self.frozen is None:
            return None
        return tuple(dict.fromkeys(names[name] for name in _matching(self.frozen, names)))

    def synchronised_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of the buffers `names` are declared synchronised."""
        return _matching(self.synchronised, names)

    def facts(self) -> dict[str, Any]:
        """Return the declarations that concern the whole run, as values for JSON."""
        return {
            "clip_norm": self.clip_norm,
            "reduction": self.reduction,
            "loss_over": self.loss_over,
        }


def declarations_of(
    names: Sequence[str],
    buffers: Sequence[str],
    layout: Layout | None,
    *,
    frozen: Any = None,
    synchronised_buffers: Any = (),
    clip_norm: Any = None,
    reduce_dtype: Any = None,
    loss_over: Any = None,
    averages: Any = None,
) -> Declarations:
    """Return the declarations of a model with parameters of these `names`.

    Raises UsageError for a value that is not allowed. Also raises UsageError for a name or pattern
    that matches no parameter, or no buffer, unless ranks have stages of the model.
    """
    in_stages = layout is not None and layout.has(STAGES)
    patterns = None if frozen is None else _patterns("frozen", frozen)
    synchronised = _patterns("synchronised_buffers", synchronised_buffers)
    if not in_stages:
        for pattern in patterns or ():
            _require_match("frozen", "parameter", pattern, names)
        for pattern in synchronised:
            _require_match("synchronised_buffers", "buffer", pattern, buffers)
        for tie in layout.tied if layout is not None else ():
            for name in tie:
                _require_name(name, names)
    return Declarations(
        frozen=patterns,
        synchronised=synchronised,
        clip_norm=_clip_norm(clip_norm),
        reduction=_reduction(reduce_dtype),
        loss_over=_loss_over(loss_over),
        averages=_averages(averages),
    )


def _matching(patterns: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the `names` that `patterns` match.

    A pattern is a name, the name of a module for all parameters in it, or has wildcards as in a
    shell. A pattern that begins with `!` excludes names again.
    """
    known = tuple(names)
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern.startswith(_NEGATED):
            chosen.difference_update(_fitting(pattern.removeprefix(_NEGATED), known))
        else:
            chosen.update(_fitting(pattern, known))
    return tuple(name for name in known if name in chosen)


def _fitting(pattern: str, names: Iterable[str]) -> list[str]:
    return [
        name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    ]


def _patterns(argument: str, patterns: Any) -> tuple[str, ...]:
    """Return patterns in the form of recorded parameter names, without parts that wrappers add."""
    listed = (patterns,) if isinstance(patterns, str) else patterns
    names = tuple(listed) if isinstance(listed, Iterable) else (listed,)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"{argument}={patterns!r:.80}: give names or patterns, such as "
            f'{argument}=("embedding.*",)'
        )
    return tuple(map(tensors.plain_name, names))


def _require_match(argument: str, kind: str, pattern: str, names: Sequence[str]) -> None:
    wanted = pattern.removeprefix(_NEGATED)
    if not _fitting(wanted, names):
        near = did_you_mean(wanted.strip("*."), names, otherwise=_some(kind, names))
        raise UsageError(f"{argument}={pattern!r}: the model has no {kind} with this name; {near}")


def _require_name(name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = did_you_mean(name, names, otherwise=_some("parameter", names))
        raise UsageError(f"tied: {name!r}: the model has no parameter with this name; {near}")


def _some(kind: str, names: Sequence[str]) -> str:
    return f"its names are {listed(names, most=5)}" if names else f"it has no {kind}"


def _clip_norm(clip_norm: Any) -> float | None:
    try:
        norm = math.inf if clip_norm is None else float(clip_norm)
    except (TypeError, ValueError):
        norm = math.nan
    if isinstance(clip_norm, bool) or not norm > 0:
        raise UsageError(
            f"clip_norm={clip_norm!r:.80}: give the largest L2 norm of an applied gradient, a "
            "number above 0; or None if nothing is clipped"
        )
    return norm if math.isfinite(norm) else None


def _reduction(dtype: Any) -> str:
    if dtype is None:
        return ""
    if dtype not in _REDUCTIONS:
        allowed = ", ".join(map(str, _REDUCTIONS))
        raise UsageError(f"reduce_dtype={dtype!r:.80}: use one of {allowed}")
    return str(dtype).removeprefix("torch.")


def _averages(averages: Any) -> Mapping[str, Any]:
    if averages is None:
        return {}
    if not isinstance(averages, Mapping) or not all(
        isinstance(name, str) and name and "/" not in name for name in averages
    ):
        raise UsageError(
            f"averages={averages!r:.80}: give averages of the weights by names without a slash, "
            'averages={"ema": ema}'
        )
    return averages


def _loss_over(loss_over: Any) -> str:
    allowed = CHOICES["loss_over"]
    if loss_over is not None and loss_over not in allowed[1:]:
        raise UsageError(
            f"loss_over={loss_over!r:.80}: use one of {', '.join(map(repr, allowed[1:]))}"
        )
    return loss_over or ""


# --- the first look -------------------------------------------------------------------------------


Names = tuple[str, ...]


class FirstLook:
    """The first look at a rank's parameters.

    The names that share a tensor are determined when the script calls `observe`.
    """

    def __init__(self, subject: Subject, declared: Declarations) -> None:
        self._subject, self._declared = subject, declared
        self._shared = shared(subject.model)

    def events(self, step: int) -> Iterator[trace.Event]:
        """Yield the script's declarations about its parameters, and the facts of the first look.

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
    """Return the names of each tensor that the model has under several names.

    Parameters that are views of the same memory count as one tensor.
    """
    names_of: dict[object, dict[str, None]] = defaultdict(dict)
    for name, parameter in [*flat_parameters.named(model)]:
        names_of[_memory(parameter)][name] = None
    return tuple(tuple(names) for names in names_of.values() if len(names) > 1)


def names_of(model: nn.Module) -> dict[str, str]:
    """Return all names of parameters, each mapped to the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    named = [*flat_parameters.named(model)]
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def doubled(optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> Names:
    """Return the names of the parameters that one optimizer steps more than once."""
    twice: set[object] = set()
    for optimizer in optimizers:
        held = [_memory(p) for group in optimizer.param_groups for p in group["params"]]
        twice.update(memory for memory, count in Counter(held).items() if count > 1)
    return tuple(name for name, p in parameters.items() if _memory(p) in twice)


def peculiar(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name of a peculiar parameter -> `nan`, `inf`, `zero` or `uninitialised`.

    `zero` is a matrix of zeros. `uninitialised` is a tensor with numbers that no initialisation
    draws, but that uninitialised memory often has.
    """
    looks = {name: _look(tensors.local(p)) for name, p in parameters.items()}
    return {name: look for name, look in looks.items() if look}


def alike(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return pairs of an embedding's weight and another parameter with the same values.

    They are two tensors. Equal values suggest that they were one tensor before a copy or a load.
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

# Heap memory has addresses, which are often denormal numbers if read as floats, and floats with
# exponents of any size. Weights of a trained model may have a few denormal numbers.
_DENORMAL_SHARE = 0.01
_HUGE = 1e20


def _memory(parameter: Tensor) -> object:
    """Return a key that is equal for parameters that have the same memory."""
    own = tensors.local(parameter)
    if own.is_meta or not own.numel():
        return id(parameter)
    return own.device, own.data_ptr(), own.numel(), own.dtype


def _look(tensor: Tensor) -> str:
    if tensor.is_meta or not tensor.numel() or not tensor.dtype.is_floating_point:
        return ""
    if tensor.isnan().any():
        return "nan"
    if tensor.isinf().any():
        return "inf"
    size = tensor.abs()
    if not size.any():
        return "zero" if tensor.ndim > 1 and tensor.numel() > 1 else ""
    # Small weights in float16 may well be denormal.
    tiny = 0.0 if tensor.dtype is torch.float16 else torch.finfo(tensor.dtype).tiny
    num_denormal = int(((size > 0) & (size < tiny)).sum())
    if num_denormal > _DENORMAL_SHARE * tensor.numel() or bool((size > _HUGE).any()):
        return "uninitialised"
    return ""


def _embeddings(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield tensors.plain_name(f"{path}.weight" if path else "weight")


def _are_alike(weight: Tensor, parameter: Tensor) -> bool:
    if _memory(weight) == _memory(parameter) or weight.shape != parameter.shape:
        return False
    mine, theirs = tensors.local(weight), tensors.local(parameter)
    if mine.shape != theirs.shape or mine.is_meta or theirs.is_meta or mine.numel() < 2:
        return False
    varied = bool((mine != mine.flatten()[0]).any())
    return varied and mine.device == theirs.device and bool((mine == theirs).all())
