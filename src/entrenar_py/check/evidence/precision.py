"""Infer the floating-point precision of a run's arithmetic from its tensors.

Nothing is judged here.

Under autocast, parameters and gradients are float32, but a gradient was computed in 16 bits and
cast, so its last bits are zero. Sums of gradients don't show this any more. So the precision is
read from the gradients of shards. It is also read from the weights of updates, which may themselves
be stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.trace import Shard, TensorRecord, Tensors, Trace, Update

FLOAT32 = 2.0**-24  # relative error of one rounding, at most
# numpy has no bfloat16: traces keep it as float32.
BFLOAT16 = 2.0**-8
SIXTEEN = {"bfloat16": (BFLOAT16, 0xFFFF), "float16": (2.0**-11, 0x1FFF)}
# A few numbers may have zero last bits by chance (2^-16 each). This many do not.
_NUMBERS_MIN = 8
# A tensor that is smaller than the largest one by this factor may be a remainder of cancellation.
_NOISE = 2.0**-20


def unit(*traces: Trace) -> float:
    """Return the largest relative error of one rounding in the coarsest arithmetic of the runs."""
    return max(map(_unit, traces), default=FLOAT32)


def _unit(trace: Trace) -> float:
    compressed = trace.traits.compressed
    if compressed in SIXTEEN:  # gradients are compressed for the transfer between ranks
        return SIXTEEN[compressed][0]
    shards = trace.of(Shard)
    units = [unit_of(shard.gradient) for shard in shards[:1]]
    units += [unit_of(update.weights) for update in trace.of(Update)[:1]]
    return max(units, default=FLOAT32)


def unit_of(tensors: Tensors) -> float:
    """Return the largest relative error of one rounding in the coarsest of `tensors`.

    When float32 numbers cancel (as in the gradient of a key's bias), only a few last bits remain,
    which look like 16-bit values. Such a tensor is much smaller than the rest, and is ignored.
    """
    known = [
        values
        for values in (record.elements() for record in tensors.values())
        if values is not None
    ]
    sizes = [float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in known]
    least = _NOISE * max(sizes, default=0.0)
    telling = (values for values, size in zip(known, sizes, strict=True) if size >= least)
    return max(map(unit_of_values, telling), default=FLOAT32)


def unit_of_values(*tensors: NDArray[Any]) -> float:
    """Return the largest relative error of one rounding, for flat arrays of one precision."""
    values = [tensor[np.isfinite(tensor)] for tensor in tensors]
    if all(tensor.dtype == np.float16 for tensor in values):
        return SIXTEEN["float16"][0]
    if any(tensor.dtype != np.float32 for tensor in values):
        return FLOAT32
    return max(_units(values), default=FLOAT32)


def may_be_coarse(record: TensorRecord) -> bool:
    """Return whether all known elements of a tensor may have been rounded to 16 bits."""
    values = record.elements()
    if values is None or values.dtype != np.float32:
        return True
    cut_off = min(cut_off for _, cut_off in SIXTEEN.values())
    return not (values.view(np.uint32) & cut_off).any()


def _units(values: Iterable[NDArray[Any]]) -> Iterable[float]:
    bits = np.concatenate([array[array != 0].view(np.uint32) for array in values])
    # Powers of two (such as initial weights of 1 and 0.5) and zeros have few bits in any dtype, and
    # prove nothing.
    telling = bits[(bits & 0x7FFFFF) != 0]
    if np.unique(telling).size < _NUMBERS_MIN:
        return
    for error, cut_off in SIXTEEN.values():
        if not (telling & cut_off).any():
            yield error
