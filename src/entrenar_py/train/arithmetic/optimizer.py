"""The way from the summed gradient to new weights: weighted mean, norm, clipping, step.

Elementwise float32 on flat vectors, equal to torch.optim's SGD and AdamW and to
torch.nn.utils.clip_grad_norm_ within rounding. The order of operations is fixed here, so that every
replica gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.train.arithmetic import reduction


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly to `peak` over `warmup_steps`. Then it stays constant (`constant`), or falls
    to 0 at `num_steps` along a line (`linear`) or half a cosine (`cosine`).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return peak
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    remaining = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * remaining


Vector = NDArray[np.float32]
State = dict[str, Vector]

# Elements of a step processed at a time. With fewer, threads wait for the interpreter.
_BLOCK = 2**18
SQUARES = 2**15  # elements in one sum of squares; these sums are then added
_ALONE = 2**20  # up to this many elements, one thread is as fast
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
    """The kind and the constants of an optimizer.

    `decayed` is 1 where weight decay applies, else 0.
    """

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
    """Return `total` / `weight` (samples or tokens) as a new vector, float32 [num_trainable]."""
    return total / np.float32(weight)


def norm_l2(gradient: Vector) -> float:
    """Return the L2 norm of `gradient`, float32 [num_trainable], accumulated in float64.

    Squares are added in rows of SQUARES by halves: the second half of a row is added to the first,
    until one element is left. The rows' sums are added likewise. So a device can add in the same
    order (`on_device`). Zeros fill the last row, and the rows' sums up to a power of two.
    """
    sums = np.zeros(power_of_two(-(-len(gradient) // SQUARES)))

    def of(part: slice, spare: NDArray[Any]) -> None:
        here = gradient[part]
        width = min(SQUARES, power_of_two(len(here)))
        num_rows = -(-len(here) // width)
        squares = spare[: num_rows * width]
        np.square(here, dtype=np.float64, out=squares[: len(here)])
        squares[len(here) :] = 0
        first = part.start // SQUARES
        sums[first : first + num_rows] = _added_by_halves(squares.reshape(num_rows, width))

    _for_blocks(len(gradient), of, dtype=np.float64)
    return math.sqrt(_added_by_halves(sums[None])[0])


def _added_by_halves(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of each row of `rows`, [n, a power of two], and overwrite `rows`."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        np.add(rows[:, :width], rows[:, width : 2 * width], out=rows[:, :width])
    return rows[:, 0]


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def clip(gradient: Vector, norm: float, clip_norm: float | None) -> Vector:
    """Return `gradient`, scaled down to a norm of `clip_norm` if its `norm` is larger.

    The constant 1e-6 comes from torch.nn.utils.clip_grad_norm_.
    """
    if clip_norm is None or clip_norm / (norm + 1e-6) >= 1:
        return gradient
    clipped, factor = np.empty_like(gradient), np.float32(clip_norm / (norm + 1e-6))

    def of(part: slice, _: Vector) -> None:
        np.multiply(gradient[part], factor, out=clipped[part])

    _for_blocks(len(gradient), of)
    return clipped


def step(rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float) -> None:
    """Take one step of `rule` with learning rate `rate`, in place on `weights` and `state`.

    Overflow becomes inf or NaN silently, as in torch. The caller checks the weights. The step is
    elementwise and is applied in blocks, so that intermediate results stay in the processor's
    cache.
    """
    if "count" in state:
        state["count"] += 1

    def of(part: slice, spare: Vector) -> None:
        decayed = None if rule.decayed is None else rule.decayed[part]
        parts = {name: one if name == "count" else one[part] for name, one in state.items()}
        here, room = Rule(rule.kind, rule.weight_decay, decayed), spare[: len(weights[part])]
        # set here, because numpy keeps it for each thread
        with np.errstate(over="ignore", invalid="ignore"):
            _STEPS[rule.kind](here, weights[part], gradient[part], parts, rate, room)

    _for_blocks(len(weights), of)


def _for_blocks(
    length: int, work: Callable[[slice, NDArray[Any]], None], *, dtype: Any = np.float32
) -> None:
    """Call `work` for each block of a vector, in any order; large vectors use threads.

    `work` also gets scratch memory for a block of `dtype`: allocating new pages for each result
    would cost more than filling them.
    """
    blocks = [slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]

    def of(share: Sequence[slice]) -> None:
        spare = np.empty(min(_BLOCK, power_of_two(length)), dtype)
        for block in share:
            work(block, spare)

    if length < _ALONE:
        of(blocks)
    else:
        reduction.share_out(blocks, of)


def _sgd(
    rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float, spare: Vector
) -> None:
    weights -= np.multiply(_coupled(rule, weights, gradient), np.float32(rate), out=spare)


def _momentum(
    rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float, spare: Vector
) -> None:
    velocity = state["momentum"]
    velocity *= np.float32(MOMENTUM)
    velocity += _coupled(rule, weights, gradient)
    weights -= np.multiply(velocity, np.float32(rate), out=spare)


def _adamw(
    rule: Rule, weights: Vector, gradient: Vector, state: State, rate: float, spare: Vector
) -> None:
    count = float(state["count"][0])
    if rule.weight_decay and rule.decayed is not None:
        np.multiply(rule.decayed, np.float32(rate * rule.weight_decay), out=spare)
        weights *= np.subtract(np.float32(1), spare, out=spare)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    np.subtract(gradient, first, out=spare)
    first += np.multiply(spare, np.float32(1 - BETA1), out=spare)
    second *= np.float32(BETA2)
    np.square(gradient, out=spare)
    second += np.multiply(spare, np.float32(1 - BETA2), out=spare)
    np.sqrt(second, out=spare)
    spare /= np.float32(math.sqrt(1 - BETA2**count))
    spare += np.float32(EPSILON)
    np.divide(first, spare, out=spare)
    weights -= np.multiply(spare, np.float32(rate / (1 - BETA1**count)), out=spare)


def _coupled(rule: Rule, weights: Vector, gradient: Vector) -> Vector:
    """Return the gradient with weight decay added, as torch.optim.SGD does."""
    if not rule.weight_decay or rule.decayed is None:
        return gradient
    return gradient + np.float32(rule.weight_decay) * rule.decayed * weights


_STEPS = {"sgd": _sgd, "momentum": _momentum, "adamw": _adamw}
