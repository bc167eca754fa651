"""The events of a script that is observed: what it declares, and what its ranks notice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entrenar_py.shared.trace.events import Event

# What a report points to, whoever wrote the trace; `records` refuses all else.
SiteName = str  # one of SITES
SourceFile = str  # a path of at most FILE_BYTES_MAX bytes
SourceLine = int  # from 1 to LINE_MAX
SITES = ("step", "samples", "save")
FILE_BYTES_MAX = 4096
LINE_MAX = 2**31 - 1


def is_source_file(path: str) -> bool:
    """Return whether `path` can be the path of a file, and is short enough for one."""
    try:
        return 0 < len(os.fsencode(path)) <= FILE_BYTES_MAX and "\0" not in path
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Event):
    """The script of worker `rank` declares this about its parameters, from `step` on.

    `frozen` names those that never change, or is None if it doesn't say. Each of `tied` has the
    names of one tensor. `averages` are the labels of averages of the weights in `extra`.
    """

    step: int
    rank: int
    frozen: tuple[str, ...] | None = None
    tied: tuple[tuple[str, ...], ...] = ()
    averages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled(Event):
    """From `step` on an optimizer of worker `rank` steps the tensors `names` by this rule.

    `rule` is the name of a class of torch.optim, and `constants` are those of a parameter group. If
    the optimizer is of another class, which is `derived` from that one, it may step otherwise. If
    it is of none, `rule` is "", and `derived` says that the class is the script's own.
    """

    step: int
    rank: int
    rule: str
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    derived: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Event):
    """Worker `rank` drew random numbers in `step`, in the rank's own micro-batch `micro_batch`.

    `generator` is `torch`, `numpy`, `python`, a device, or the name of a generator of the script's
    own. `before` and `after` are digests of its state. `where`: in the forward pass (`forward`), in
    the backward pass (`backward`), there by a module that is computed again with a generator that
    was not set back (`recomputed`), or in the optimizer's step (`step`); before the forward pass
    (`batch`), between it and the backward pass (`loss`), or between this and the optimizer's step
    (`gradient`); as the data set was read (`loader`, by the loader's `worker`, if it has any, for
    its first samples `ids`); or since the step before (`between`). `part` is the index of the part
    of the batch that the rank draws, which other ranks may draw, too.
    """

    step: int
    rank: int
    where: str
    generator: str
    before: str
    after: str
    micro_batch: int | None = None
    part: int | None = None
    worker: int | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Event):
    """The script of worker `rank` first calls `what` at line `line` of the file `file`.

    `what` is `step` (of the optimizer), `samples` (a loader, or the report of samples) or `save`
    (of a checkpoint).
    """

    rank: int
    what: SiteName
    file: SourceFile
    line: SourceLine
