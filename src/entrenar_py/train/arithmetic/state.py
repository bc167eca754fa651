"""The whole state of a training as bytes: the progress, every tensor, the optimizer's vectors.

A worker can go on from them. To read them, the tensors' specs and the optimizer must be known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from entrenar_py.train.arithmetic import optimizer, sharding
from entrenar_py.train.arithmetic.tensors import Array, TensorSpec

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a training between two steps: the next sample, and the schedule's step."""

    position: sharding.Position
    schedule_step: int


_PROGRESS = struct.Struct("<3Q")


def num_bytes(specs: Sequence[TensorSpec], kind: str) -> int:
    """Return the size in bytes of a `dump` for tensors `specs` and an optimizer of `kind`."""
    return _PROGRESS.size + 4 * sum(prod(shape) for _, shape in _parts(specs, kind))


def dump(
    specs: Sequence[TensorSpec],
    kind: str,
    progress: Progress,
    tensors: Mapping[str, Array],
    moments: optimizer.State,
) -> bytearray:
    """Return the state as little-endian bytes. Every array is copied once.

    First come three uint64 (`progress`), then float32: `tensors`, ordered as `specs`, `moments`.
    """
    data = bytearray(num_bytes(specs, kind))
    stands = (progress.position.epoch, progress.position.offset, progress.schedule_step)
    _PROGRESS.pack_into(data, 0, *stands)
    everything = {**tensors, **{_in_state(name): vector for name, vector in moments.items()}}
    for name, part in _views(specs, kind, data):
        part[...] = everything[name]
    return data


def progress_of(data: Buffer) -> Progress:
    """Return the progress at the beginning of `data`, the bytes of a state."""
    epoch, offset, schedule_step = _PROGRESS.unpack_from(data)
    return Progress(position=sharding.Position(epoch, offset), schedule_step=schedule_step)


def load(
    specs: Sequence[TensorSpec], kind: str, data: Buffer
) -> tuple[Progress, dict[str, Array], optimizer.State]:
    """Return copies of the progress, the tensors and the moments that `dump` wrote.

    Raises ValueError unless `data` has exactly `num_bytes`.
    """
    if len(data) != num_bytes(specs, kind):
        raise ValueError(f"a state of {len(data)} bytes: expected {num_bytes(specs, kind)}")
    parts = {name: part.astype(np.float32) for name, part in _views(specs, kind, data)}
    moments = {name: parts[_in_state(name)] for name in optimizer.STATE[kind]}
    return progress_of(data), {spec.name: parts[spec.name] for spec in specs}, moments


def _views(specs: Sequence[TensorSpec], kind: str, data: Buffer) -> Iterator[tuple[str, Array]]:
    """Yield each part of a state: its name, and a view of `data`."""
    start = _PROGRESS.size
    for name, shape in _parts(specs, kind):
        yield name, np.frombuffer(data, "<f4", prod(shape), start).reshape(shape)
        start += 4 * prod(shape)


def _parts(specs: Sequence[TensorSpec], kind: str) -> list[tuple[str, tuple[int, ...]]]:
    num_trainable = sum(prod(spec.shape) for spec in specs if spec.role == "trainable")
    state = optimizer.initial_shapes(kind, num_trainable)
    return [
        *((spec.name, spec.shape) for spec in specs),
        *((_in_state(name), shape) for name, shape in state.items()),
    ]


def _in_state(name: str) -> str:
    """Return the name of an optimizer vector in a state; no tensor has such a name."""
    return f"optimizer/{name}"
