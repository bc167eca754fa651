"""The events of a script that is observed: what it declares, and what its ranks notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from entrenar_py.trace.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Event):
    """The script of worker `rank` declares this about its parameters, from `step` on.

    `frozen` names those that never change, or is None if it doesn't say. Each of `tied` has the
    names of one tensor.
    """

    step: int
    rank: int
    frozen: tuple[str, ...] | None = None
    tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Event):
    """Worker `rank` noticed this about its parameters before `step`.

    Each of `shared` has the names that one tensor had when observing began. `alike` are pairs of an
    embedding and another tensor with the same values. `doubled` names tensors that one optimizer
    holds twice. `peculiar` says of a tensor by name that it is `nan`, `inf`, `zero` (a matrix) or
    looks `uninitialised`.
    """

    step: int
    rank: int
    shared: tuple[tuple[str, ...], ...] = ()
    alike: tuple[tuple[str, str], ...] = ()
    doubled: tuple[str, ...] = ()
    peculiar: Mapping[str, str] = field(default_factory=dict)
