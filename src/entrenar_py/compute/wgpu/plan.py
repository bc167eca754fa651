"""Assigns memory to the buffers of a schedule, and reuses it.

All inputs of a run are in one block. A dispatch never writes to memory that it reads: WebGPU
doesn't allow one buffer to be read and written in the same dispatch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from entrenar_py.compute.wgpu.emitter import Buffer
from entrenar_py.compute.wgpu.lower import Lowered
from entrenar_py.compute.wgpu.values import Step

ALIGNMENT = 256  # WebGPU's largest min-storage-buffer-offset-alignment


@dataclass(frozen=True)
class Plan:
    """The dispatches: `once` are those that need no input of a run, `steps` those of each run.

    `kept` are the buffers that `once` writes. `slots` has the index of the shared piece of memory
    for each buffer that `steps` write, `slot_bytes` the sizes of these pieces.
    """

    once: tuple[Step, ...]
    steps: tuple[Step, ...]
    kept: tuple[Buffer, ...]
    slots: dict[Buffer, int]
    slot_bytes: tuple[int, ...]


def plan(lowered: Lowered, given: Collection[Buffer]) -> Plan:
    """Return the plan for a graph of which only the inputs `given` change between runs."""
    changing = _changing(lowered.steps, given)
    once = tuple(step for step in lowered.steps if step.writes not in changing)
    steps = tuple(step for step in lowered.steps if step.writes in changing)
    results = [one.buffer for one in lowered.results if one.buffer is not None]
    slots, slot_bytes = _assign(steps, changing, results)
    kept = tuple(dict.fromkeys(step.writes for step in once))
    return Plan(once, steps, kept, slots, slot_bytes)


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for pieces of `sizes` in one block, and the block's size, in bytes."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, total


def _changing(steps: Sequence[Step], given: Collection[Buffer]) -> set[Buffer]:
    """Return `given` and all buffers computed from it."""
    changing = set(given)
    while True:
        more = {step.writes for step in steps if not changing.isdisjoint(step.bindings)}
        if more <= changing:
            return changing
        changing |= more


def _assign(
    steps: Sequence[Step], changing: set[Buffer], results: Sequence[Buffer]
) -> tuple[dict[Buffer, int], tuple[int, ...]]:
    """Return each written buffer's piece (the best free fit or a new one) and all pieces' sizes."""
    last = {buffer: number for number, step in enumerate(steps) for buffer in step.bindings}
    last |= dict.fromkeys(results, len(steps))
    slots: dict[Buffer, int] = {}
    sizes: list[int] = []
    free: set[int] = set()
    for number, step in enumerate(steps):
        out = step.writes
        if out not in slots:
            fitting = [i for i in free if out.num_bytes <= sizes[i] <= 2 * out.num_bytes]
            if fitting:
                slots[out] = min(fitting, key=lambda i: (sizes[i], i))
                free.discard(slots[out])
            else:
                slots[out] = len(sizes)
                sizes.append(out.num_bytes)
        # Free pieces after `out` got one, so that this dispatch doesn't write to what it reads.
        free |= {slots[one] for one in step.bindings if one in slots and last[one] == number}
    return slots, tuple(sizes)
