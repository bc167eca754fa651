"""Events of an observed script: facts that the script declares, and facts that its ranks notice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entrenar_py.shared.trace.events import Event

# The places in a source file that a report points to. `records` refuses all other values.
SiteName = str  # one of SITES
SourceFile = str  # a path of at most FILE_BYTES_MAX bytes
SourceLine = int  # from 1 to LINE_MAX
SITES = ("step", "samples", "save", "backward")
FILE_BYTES_MAX = 4096
LINE_MAX = 2**31 - 1


def is_source_file(path: str) -> bool:
    """Return whether `path` can be a file's path of at most FILE_BYTES_MAX bytes."""
    try:
        return 0 < len(os.fsencode(path)) <= FILE_BYTES_MAX and "\0" not in path
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Event):
    """The script of worker `rank` declares these facts about its parameters, from `step` on.

    `frozen` has the names of the parameters that never change; None means that the script doesn't
    say. Each entry of `tied` has the names of one shared tensor. `averages` has the labels of those
    entries of `extra` (in Start and Update) that are averages of the weights.
    """

    step: int
    rank: int
    frozen: tuple[str, ...] | None = None
    tied: tuple[tuple[str, ...], ...] = ()
    averages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled(Event):
    """From `step` on, an optimizer of worker `rank` updates the tensors `names` by this rule.

    `rule` is the name of a class of torch.optim, and `constants` are the settings of a parameter
    group. `derived` is true for a subclass of that class, which may update differently. For a class
    that has nothing to do with torch.optim, `rule` is "", and `derived` says whether the script
    itself defines it.
    """

    step: int
    rank: int
    rule: str
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    derived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Event):
    """Worker `rank` noticed these facts about its parameters before `step`.

    - `shared`: the names of tensors with several names when observing began; each entry is one
      tensor.
    - `alike`: pairs of an embedding and another tensor with equal values.
    - `doubled`: the tensors that an optimizer holds twice.
    - `peculiar`: the tensors that are `nan`, `inf` or `zero` (a matrix), or that look
      `uninitialised`.
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

    - `generator`: `torch`, `numpy`, `python`, a device, or the name of a generator of the script.
    - `before`, `after`: digests of the generator's state.
    - `part`: the index of the rank's part of the batch. Several ranks may have the same part.
    - `where`: the place of the draw:

      - `forward`: in the forward pass.
      - `backward`: in the backward pass.
      - `recomputed`: in the backward pass, by a module under activation checkpointing, with a
        generator that was not reset.
      - `step`: in the optimizer's step.
      - `batch`: before the forward pass.
      - `loss`: between the forward and the backward pass.
      - `gradient`: between the backward pass and the optimizer's step.
      - `loader`: while the data loader read the data set, in its process `worker` if it has
        workers, for samples that begin with `ids`.
      - `between`: since the previous step.
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

    `what` is `step` (of the optimizer), `samples` (of a loader, or the call that reports samples),
    `save` (of a checkpoint) or `backward` (a backward pass).
    """

    rank: int
    what: SiteName
    file: SourceFile
    line: SourceLine
