"""The memory of each buffer of a schedule, and when it is free for another one.

Everything given to a run lies in one block. What a dispatch writes never shares memory with what
it reads: a binding may not be read and written in one dispatch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from entrenar_py.backends.wgpu.emitter import Buffer
from entrenar_py.backends.wgpu.lower import Lowered
from entrenar_py.backends.wgpu.values import Step

ALIGNMENT = 256  # WebGPU's largest min-storage-buffer-offset-alignment


@dataclass(frozen=True)
class Plan:
    """`once` are the dispatches that need no input of a run, `steps` the others.

    `kept` are the buffers that `once` writes. `slots` says which piece of shared
    memory each other one has, `slot_bytes` how large the pieces are.
    """

    once: tuple[Step, ...]
    steps: tuple[Step, ...]
    kept: tuple[Buffer, ...]
    slots: dict[Buffer, int]
    slot_bytes: tuple[int, ...]


def plan(lowered: Lowered, given: Collection[Buffer]) -> Plan:
    """The plan for a graph whose inputs `given` change with every run, the others never."""
    changing = _changing(lowered.steps, given)
    once = tuple(step for step in lowered.steps if step.writes not in changing)
    steps = tuple(step for step in lowered.steps if step.writes in changing)
    slots, slot_bytes = _assign(steps, changing, [one.buffer for one in lowered.results])
    kept = tuple(dict.fromkeys(step.writes for step in once))
    return Plan(once, steps, kept, slots, slot_bytes)


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets in one block of pieces of these sizes, and the block's size, in bytes."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, total


def _changing(steps: Sequence[Step], given: Collection[Buffer]) -> set[Buffer]:
    """`given` and all that is computed of it."""
    changing = set(given)
    while True:
        more = {step.writes for step in steps if not changing.isdisjoint(step.bindings)}
        if more <= changing:
            return changing
        changing |= more


def _assign(
    steps: Sequence[Step], changing: set[Buffer], results: Sequence[Buffer]
) -> tuple[dict[Buffer, int], tuple[int, ...]]:
    """Best fit: the smallest free piece that is large enough, but not more than twice that."""
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
        # Only now: what this dispatch reads for the last time is not what it writes.
        free |= {slots[one] for one in step.bindings if one in slots and last[one] == number}
    return slots, tuple(sizes)
