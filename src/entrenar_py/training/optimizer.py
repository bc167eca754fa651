"""From the summed gradient to new weights: weighted mean, norm, clip, step.

Elementwise float32 on flat vectors, equal to torch.optim's SGD and AdamW and to
torch.nn.utils.clip_grad_norm_ within rounding. The order of operations is fixed here, so that every
replica gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
State = dict[str, Vector]

_BLOCK = 2**15  # elements of a step that are taken at a time: 128 KiB of each vector
_ALONE = 2**20  # elements up to which one thread is as fast
_THREADS = 4
MOMENTUM = 0.9
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

# The state vectors of each optimizer, float32 [num_trainable]; "count" is [1].
STATE: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum",),
    "adamw": ("exp_avg", "exp_avg_sq", "count"),
}


@dataclass(frozen=True)
class Rule:
    """An optimizer's kind and constants. `decayed` holds 1 where weight decay applies, else 0."""

    kind: str
    weight_decay: float
    decayed: Vector | None


def initial_state(kind: str, num_trainable: int) -> State:
    """Return the state of optimizer `kind` before its first step: float32 zeros."""
    shapes = initial_shapes(kind, num_trainable)
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def initial_shapes(kind: str, num_trainable: int) -> dict[str, tuple[int]]:
    """Return the shapes of the state vectors of optimizer `kind`."""
    return {name: (1 if name == "count" else num_trainable,) for name in STATE[kind]}


def mean(total: Vector, weight: float) -> Vector:
    """Return `total` / `weight` (samples or tokens), a new vector: float32 [num_trainable]."""
    return total / np.float32(weight)


def norm_l2(gradient: Vector) -> float:
    """Return the L2 norm of float32 [num_trainable], accumulated in float64."""
    squares = np.zeros(-(-len(gradient) // _BLOCK))

    def of(part: slice) -> None:
        squares[part.start // _BLOCK] = np.square(gradient[part], dtype=np.float64).sum()

    _for_blocks(len(gradient), of)
    return math.sqrt(squares.sum())


def clip(gradient: Vector, norm: float, clip_norm: float | None) -> Vector:
    """Return `gradient`, scaled down to a norm of `clip_norm` if its `norm` is larger.

    The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    """
    if clip_norm is None or clip_norm / (norm + 1e-6) >= 1:
        return gradient
    return gradient * np.float32(clip_norm / (norm + 1e-6))


def step(rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float) -> None:
    """Take one step of `rule` with learning rate `rate`, in place on `weights` and `state`.

    Overflow becomes inf or NaN silently, as in torch. The caller checks the weights. The step is
    elementwise, and made in blocks whose intermediate results stay in the processor's cache.
    """
    if "count" in state:
        state["count"] += 1

    def of(part: slice) -> None:
        decayed = None if rule.decayed is None else rule.decayed[part]
        parts = {name: one if name == "count" else one[part] for name, one in state.items()}
        here = Rule(rule.kind, rule.weight_decay, decayed)
        with np.errstate(over="ignore", invalid="ignore"):  # of the thread that this runs in
            _STEPS[rule.kind](here, weights[part], gradient[part], parts, rate)

    _for_blocks(len(weights), of)


def _for_blocks(length: int, work: Callable[[slice], None]) -> None:
    """Call `work` for each block of a vector, in any order; large vectors get threads."""
    blocks = [slice(start, start + _BLOCK) for start in range(0, length, _BLOCK)]
    if length < _ALONE:
        for block in blocks:
            work(block)
        return

    def of(share: Sequence[slice]) -> None:
        for block in share:
            work(block)

    shares = [blocks[number::_THREADS] for number in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:  # not kept: a process may fork
        for done in [pool.submit(of, share) for share in shares]:
            done.result()


def _sgd(rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float) -> None:
    weights -= np.float32(rate) * _coupled(rule, weights, gradient)


def _momentum(rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float) -> None:
    velocity = state["momentum"]
    velocity *= np.float32(MOMENTUM)
    velocity += _coupled(rule, weights, gradient)
    weights -= np.float32(rate) * velocity


def _adamw(rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float) -> None:
    count = float(state["count"][0])
    if rule.weight_decay and rule.decayed is not None:
        weights *= 1 - np.float32(rate * rule.weight_decay) * rule.decayed
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first += np.float32(1 - BETA1) * (gradient - first)
    second *= np.float32(BETA2)
    second += np.float32(1 - BETA2) * np.square(gradient)
    denominator = np.sqrt(second) / np.float32(math.sqrt(1 - BETA2**count)) + np.float32(EPSILON)
    weights -= np.float32(rate / (1 - BETA1**count)) * (first / denominator)


def _coupled(rule: Rule, weights: Vector, gradient: Vector) -> Vector:
    """Return the gradient with weight decay added, as torch.optim.SGD does."""
    if not rule.weight_decay or rule.decayed is None:
        return gradient
    return gradient + np.float32(rule.weight_decay) * rule.decayed * weights


_STEPS = {"sgd": _sgd, "momentum": _momentum, "adamw": _adamw}
