"""The facts of a loader or a sampler: its data set, its samplers, and what they draw."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from entrenar_py.check.observing import call_sites, script_text
from entrenar_py.check.observing.batches import Ids
from entrenar_py.check.observing.numbering import Numbering
from entrenar_py.shared.errors import UsageError

_DEPTH_MAX = 8
_DISPATCHER = "DataLoaderDispatcher"  # accelerate's, with dispatch_batches=True
# What a sampler of the script's calls to draw samples again, and what orders each of them once.
_CALL = r"(?:[^()]|\([^()]*\))*"
_REPLACES = re.compile(
    rf"\bmultinomial\({_CALL}?(?:replacement\s*=\s*True|,\s*True\b)|\bchoices\("
    rf"|\brandint\(|\.integers\(|\brandom\.choice\((?!{_CALL}replace\s*=\s*False)"
)
_ORDERS = re.compile(r"\b(randperm|shuffle|permutation|permuted)\(")
# Libraries whose samplers draw every sample of a data set in each epoch.
_THOROUGH = ("torch", "torchdata", "accelerate", "transformers", "lightning", "pytorch_lightning")


@dataclass(frozen=True)
class InOrder:
    """A loader that is read several batches ahead, and whose batches are used in order."""

    source: Any


class _Weakly:
    """A weak reference to an object, or a strong one where the object allows no weak one.

    The script decides when its loader, and the workers of it, are gone.
    """

    def __init__(self, held: Any) -> None:
        try:
            self.held: Callable[[], Any] = weakref.ref(held)
        except TypeError:
            self.held = lambda: held


class Source:
    """A DataLoader, a batch sampler or a sampler; or an object around a loader.

    - `numbering`: the numbers of the samples of its data set.
    - `selected`: the samples that are drawn in an epoch by all ranks, None for all.
    - `is_thorough`: all of them are drawn in an epoch; False if a sampler of the script's decides.
    - `is_ordered`: a sampler of the script's decides the order, and no line draws it at random.
    - `splits`: a sampler gives each rank its part of the data set.
    - `drop_last`: an incomplete last batch is dropped. `replacement`: samples are drawn again.
    - `is_accelerate_s`: it is a loader that accelerate has prepared.
    - `is_dispatched`: one rank iterates it for all (accelerate with `dispatch_batches`), so no rank
      knows its own samples.

    Raises UsageError for an object that can't be iterated.
    """

    def __init__(self, given: Any) -> None:
        if not hasattr(given, "__iter__"):
            raise UsageError(
                f"sampler={given!r}: give the DataLoader, batch sampler or sampler that draws the "
                "samples, or leave it out and report them by samples(ids)"
            )
        self._given = _Weakly(given)
        loaders = [*_loaders(given)]
        self.has_loader = bool(loaders)
        self.is_accelerate_s = _library_of(given) == "accelerate"
        self.is_dispatched = any(_is_dispatcher(each) for each in [given, *loaders])
        parts = [part for each in loaders or [given] for part in _parts(each, _DEPTH_MAX)]
        self._concerned = {id(part): _Weakly(part) for part in parts}
        self.drop_last = any(bool(_attribute(part, "drop_last")) for part in parts)
        self.replacement = any(map(_replaces, parts))
        self.splits = any(_splits(part) for part in parts)
        self.numbering = Numbering(_data_of(parts))
        samplers = [part for part in parts if not isinstance(part, DataLoader)]
        self.is_thorough = all(map(_is_thorough, samplers))
        self.is_ordered = _are_ordered(samplers)
        self.selected = self.numbering.selected()
        for part in samplers:
            if isinstance(part, SubsetRandomSampler):
                self.selected = self.numbering.selected([*map(int, part.indices)])

    @property
    def drawn_from(self) -> tuple[Any, ...]:
        """The data sets and the selection that are drawn from, equal if these are the same."""
        return self.numbering.bottoms, self.selected

    @property
    def given(self) -> Any:
        """The loader or sampler, None if the script has dropped it."""
        return self._given.held()

    def concerns(self, loader: Any) -> bool:
        """Return whether `loader` is the source, is in it, or has the same sampler."""
        return any(
            (known := self._concerned.get(id(part))) is not None and known.held() is part
            for part in _parts(loader, _DEPTH_MAX)
        )


def data_set(given: Any) -> Any:
    """Return the data set of a loader or sampler, None if it has none."""
    return _data_of([part for each in _all_loaders(given) for part in _parts(each, _DEPTH_MAX)])


def generators(given: Any) -> list[Any]:
    """Return the generators that a loader or sampler draws an epoch's seed and order from."""
    parts = [part for each in _all_loaders(given) for part in _parts(each, _DEPTH_MAX)]
    return [_attribute(part, "generator") for part in parts]


def _all_loaders(given: Any) -> list[Any]:
    inner = given.source if isinstance(given, InOrder) else given
    return [*_loaders(inner)] or [inner]


def positions_of(index: Any) -> Ids | None:
    """Return the positions that a sampler drew, of a sample or a batch; None for anything else."""
    if isinstance(index, np.ndarray | torch.Tensor):
        index = index.tolist() if index.ndim < 2 else None
    if not isinstance(index, list) and type(index) not in (tuple, range):
        index = (index,)
    positions = tuple(map(_position, index))
    known = tuple(position for position in positions if position is not None)
    return known if len(known) == len(positions) else None


def _position(index: Any) -> int | None:
    if isinstance(index, torch.Tensor) and index.ndim == 0:
        index = index.item()
    if isinstance(index, bool) or not isinstance(index, Integral):
        return None
    return int(index)


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute, or None if there is none; the object may look for it in its own way."""
    with suppress(Exception):
        return getattr(holder, name, None)
    return None


def _loaders(given: Any) -> Iterator[Any]:
    """Yield `given` if it is a DataLoader, else the DataLoaders that it holds."""
    if issubclass(type(given), DataLoader):
        yield given
        return
    attributes = getattr(given, "__dict__", None)
    for value in attributes.values() if isinstance(attributes, dict) else ():
        if issubclass(type(value), DataLoader):
            yield value


def _parts(part: Any, depth: int) -> Iterator[Any]:
    """Yield a loader or sampler, and the samplers inside it, the innermost last."""
    yield part
    for name in ("batch_sampler", "sampler"):
        inner = _attribute(part, name)
        if inner is not None and depth:
            yield from _parts(inner, depth - 1)


def _data_of(parts: list[Any]) -> Any:
    for part in parts:
        for name in ("dataset", "data_source"):
            data = _attribute(part, name)
            if data is not None:
                return data
    return None


def _splits(part: Any) -> bool:
    ranks = [_attribute(part, name) for name in ("num_replicas", "num_processes")]
    return any(isinstance(number, int) and number > 1 for number in ranks)


def _replaces(part: Any) -> bool:
    """Return whether a sampler draws samples again, as it says or as its text shows."""
    said = _attribute(part, "replacement")
    if said is not None or isinstance(part, DataLoader) or _is_thorough(part):
        return said is True
    try:
        text = inspect.getsource(type(part))
    except (OSError, TypeError):  # a class may have no text
        return False
    # Beside an order, a random number may be its seed.
    return bool(_REPLACES.search(text)) and not _ORDERS.search(text)


def _are_ordered(samplers: list[Any]) -> bool:
    """Return whether samplers of the script's decide the order, and its text has no random one."""
    deciding = [one for one in samplers if not _is_thorough(one)]
    return bool(deciding) and all(map(_is_written, deciding)) and not script_text.shuffles()


def _is_written(sampler: Any) -> bool:
    """Return whether the script has a sampler's class in its own text."""
    try:
        return call_sites.is_own(inspect.getfile(type(sampler)))
    except (OSError, TypeError):  # a class may have no text
        return False


def _is_dispatcher(loader: Any) -> bool:
    return any(kind.__name__ == _DISPATCHER for kind in type(loader).__mro__)


def _is_thorough(sampler: Any) -> bool:
    return _library_of(sampler) in _THOROUGH


def _library_of(part: Any) -> str:
    return type(part).__module__.partition(".")[0]
