"""Common random numbers: random draws that are equal for all samples, ranks and micro-batches.

Noise, masks and augmentation may depend on the rank and on how a batch is split, so a run on
several workers can't be compared with the run on one worker. In a run with common numbers (a
planned `Fault` of CONTROLLED) they don't. A tensor of random numbers consists of one random vector,
repeated along all dimensions except the last, so every sample gets the same numbers. Dropout keeps
all units. The vectors are determined by the step, and by the number of draws since the last batch.
Samples that a loader fetches have separate vectors, which are determined by their index.

The generators of torch don't advance, so draws that this module doesn't replace still show. The
generators of numpy and Python are seeded with the same value before every micro-batch and sample.
So are the generators of a data set or collator, before a sample is read and when the collator
accesses it.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from entrenar_py.check.observing import (
    contents,
    generators,
    mirrored_batches,
    planned_faults,
    replayed_batches,
)
from entrenar_py.shared.faults import CONTROLLED, IN_TURN, OF_RECORDS

# In-place draws. Their arguments are a tensor, and the parameters of the distribution.
_FILLS = (
    *("normal_", "uniform_", "random_", "exponential_"),
    *("log_normal_", "cauchy_", "geometric_"),
)
_OF_LIKE = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
_OF_SIZE = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}
# Draws by tensors of parameters, with a generator as the last argument -> whether a number depends
# on a whole row of parameters.
_OF_PARAMETERS = {
    "_sample_dirichlet": True,
    **dict.fromkeys(("_standard_gamma", "poisson", "binomial"), False),
}
_LOOKS = ("dtype", "layout", "device", "pin_memory")

CURRENT: CommonNumbers | None = None  # those of this process


def begin_if_planned() -> CommonNumbers | None:
    """Draw common numbers from here on, if a fault plans that.

    Return the object that does, or None.
    """
    global CURRENT
    planned = planned_faults.planned()
    mirrored_batches.begin(planned)
    for fault in planned:
        if fault.kind in OF_RECORDS:
            in_turn = fault.kind == IN_TURN
            replayed_batches.begin_giving(int(fault.value or 1), in_turn=in_turn)
    if CURRENT is None and any(fault.kind in CONTROLLED for fault in planned):
        CURRENT = CommonNumbers()
        CURRENT.__enter__()  # type: ignore[no-untyped-call]
        CURRENT.seed()
        # These wrappers stay. Methods that hooks replace are restored later, and are inside of
        # these wrappers.
        fetcher: Any = fetch._MapDatasetFetcher
        fetcher.fetch = _fetching(fetcher.fetch)
        iterator: Any = _BaseDataLoaderIter
        iterator.__next__ = _yielding(iterator.__next__)
    return CURRENT


class CommonNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the numbers that torch draws, in this thread and in workers that it forks.

    `reseeded` is called after the generators of numpy and Python were seeded. `drawn` is a checksum
    of the draws since then. If it differs, two ranks or runs didn't draw the same numbers. (If rows
    are selected at random, half as many rows give a different selection.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reseeded: Callable[[], object] = lambda: None
        self._step, self._key, self._count = 0, 0, 0
        # For the last batch that a loader handed out: its number of samples, and the order of
        # copies of samples.
        self._num_samples, self._order = 0, ""
        self.drawn = 0
        # Generators of the data set or collator that reads samples now.
        self.own: Collection[Any] = ()

    def seed(self, step: int | None = None) -> None:
        """Begin a micro-batch of `step`; None means the current step."""
        self._step = self._step if step is None else step
        self._begin(self._step)
        self.reseeded()

    def begin_batch(self, num_samples: int) -> None:
        """Begin a micro-batch with a batch of `num_samples` samples."""
        self._num_samples, self._order = num_samples, ""
        self.seed()

    def seed_sample(self, index: int) -> None:
        """Begin reading the sample `index` of a data set."""
        self._begin(1 << 20 | index & 0xFFFFF)

    def state(self) -> tuple[Any, ...]:
        """Return the state of all generators here, for `set_state`."""
        numpy = sys.modules.get("numpy.random")
        others = random.getstate(), None if numpy is None else numpy.get_state()
        return (self._key, self._count, self.drawn), *others

    def set_state(self, own: tuple[int, int, int], python: Any, numpy: Any) -> None:
        """Restore a state that `state` returned."""
        self._key, self._count, self.drawn = own
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(numpy)

    def _begin(self, key: int) -> None:
        self._key, self._count, self.drawn = key, 0, 0
        random.seed(key)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed(key)
        for generator in self.own:
            generators.seed(generator, key)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func._schema.name.removeprefix("aten::")
            if name == "randperm" and named.get("generator") is not None:
                return func(*args, **named)  # a sampler's order
            drawn = self._drawn(name, args, {k: v for k, v in named.items() if k != "generator"})
            if drawn is not None:
                return drawn
            for place, argument in enumerate(func._schema.arguments):
                if argument.name == "dropout_p" and place < len(args):
                    args = (*args[:place], 0.0, *args[place + 1 :])
                elif argument.name == "dropout_p" and "dropout_p" in named:
                    named["dropout_p"] = 0.0
        return func(*args, **named)

    def _drawn(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the result of a drawing operation with common numbers; None if it is unknown."""
        if any(isinstance(arg, Tensor) and type(arg) not in _PLAIN for arg in args):
            return None  # pieces of a DTensor
        if name in _FILLS:
            return self._filled(args[0], name, *args[1:], **named)
        looks = {key: value for key, value in named.items() if key in _LOOKS and value is not None}
        if name in _OF_LIKE:
            bounds = args[1:] if len(args) != 2 else (0, args[1])
            return self._filled(torch.empty_like(args[0], **looks), _OF_LIKE[name], *bounds)
        if name in _OF_SIZE:
            looks.setdefault("dtype", torch.int64 if name == "randint" else None)
            bounds = args[:-1] if len(args) != 2 else (0, args[0])
            return self._filled(torch.empty(args[-1], **looks), _OF_SIZE[name], *bounds)
        return self._kept(name, args, looks)

    def _kept(self, name: str, args: tuple[Any, ...], looks: dict[str, Any]) -> Any:
        """Return dropout, a permutation or choices with common numbers.

        None for other operations.
        """
        first = args[0]
        if name == "randperm":
            self._note(name, first)
            return torch.arange(first, **looks)
        if name == "bernoulli_":
            likely = args[1] if len(args) > 1 else 0.5
            if isinstance(likely, Tensor):
                return first.copy_(likely >= 0.5)
            return first.fill_(likely > 0)
        if name == "bernoulli" and len(args) == 1:
            return (first >= 0.5).to(first.dtype)
        if name == "multinomial":
            return self._chosen(first, *args[1:3])
        if name in _OF_PARAMETERS:
            parameters = [arg for arg in args if isinstance(arg, Tensor)]
            return self._of_parameters(name, parameters, is_whole=_OF_PARAMETERS[name])
        if name in ("native_dropout", "_fused_dropout") and args[-1] is not False:
            share = 1 - args[1] if name == "native_dropout" else args[1]
            mask = torch.ones_like(first, dtype=torch.bool)
            return first / max(share, 1e-12), mask
        if name == "normal" and any(isinstance(arg, Tensor) for arg in args[:2]):
            mean = args[0] + torch.zeros_like(torch.as_tensor(args[1]))
            return mean + args[1] * self._filled(torch.empty_like(mean), "normal_")
        if name == "normal" and len(args) == 3:
            return self._filled(torch.empty(args[2], **looks), "normal_", *args[:2])
        return None

    def _chosen(self, shares: Tensor, number: int, replaces: bool = False) -> Tensor | None:
        """Return one choice by probability, repeated for all rows; None if it may select rows."""
        if shares.dim() > 1 and number == 1:
            return self._chosen_by_row(shares)
        if shares.dim() > 1 or not replaces:
            return None
        self._count += 1
        self._note("multinomial", len(shares))
        generator = torch.Generator().manual_seed(self._key << 20 | self._count)
        choice = torch.multinomial(shares.detach().cpu(), 1, generator=generator)
        return choice.to(shares.device).expand(number).clone()

    def _chosen_by_row(self, shares: Tensor) -> Tensor:
        """Return the choice of each row. Copies of one sample choose by different numbers."""
        copies = self._copies(shares)
        self._note("multinomial", self._order, 0 if copies is None else int(copies.max()))
        if copies is None:
            return shares.argmax(-1, keepdim=True)
        self._count += 1
        generator = torch.Generator().manual_seed(self._key << 20 | self._count)
        places = torch.rand(int(copies.max()) + 1, 1, generator=generator, dtype=torch.float64)
        sums = shares.detach().double().cumsum(-1)
        chosen = torch.searchsorted(sums, places[copies].to(sums.device) * sums[:, -1:], right=True)
        return chosen.clamp_(max=shares.shape[-1] - 1)

    def _copies(self, shares: Tensor) -> Tensor | None:
        """Return each row's index among the copies of its sample; None if samples have no copies.

        All copies of a sample begin with the same values, and samples differ. So the first choice
        after a batch shows whether the copies of a sample follow one another, or the samples do.
        """
        num_rows, num = len(shares), self._num_samples
        if shares.dim() != 2 or not num or num_rows <= num or num_rows % num:
            return None
        num_copies, rows = num_rows // num, torch.arange(num_rows)
        if not self._order:
            of_samples, in_turn = shares.view(num, num_copies, -1), shares.view(num_copies, num, -1)
            together = torch.allclose(of_samples, of_samples[:, :1].expand_as(of_samples))
            apart = torch.allclose(in_turn, in_turn[:1].expand_as(in_turn))
            is_one = together and (num == 1 or not apart)
            self._order = "together" if is_one else "apart" if apart > together else "unknown"
        by_order = {"together": rows % num_copies, "apart": rows // num}
        return by_order.get(self._order)

    def _of_parameters(self, name: str, parameters: list[Tensor], *, is_whole: bool) -> Tensor:
        """Return draws by tensors of parameters, with the same random numbers for each row."""
        self._count += 1
        self._note(name, parameters[0].shape[-1:])
        draw, shape = getattr(torch, name), parameters[0].shape
        length = shape[-1] if is_whole or len(shape) > 1 else 1

        def drawn(*row: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(self._key << 20 | self._count)
            result: Tensor = draw(*row, generator=generator)
            return result

        rows = [parameter.detach().cpu().reshape(-1, length) for parameter in parameters]
        result = torch.stack([drawn(*row) for row in zip(*rows, strict=True)])
        return result.reshape(shape).to(parameters[0].device)

    def _filled(self, tensor: Tensor, fill: str, *given: Any, **named: Any) -> Tensor:
        """Return `tensor`, filled with one random vector along its last dimension."""
        self._count += 1
        # An integer for each row may be its time step, or the number of a row.
        is_for_rows = tensor.dim() == 1 and not tensor.is_floating_point()
        self._note(fill, given, () if is_for_rows else tensor.shape[-1:])
        generator = torch.Generator().manual_seed(self._key << 20 | self._count)
        shape = tensor.shape[-1:] if tensor.dim() > 1 else ()
        vector = torch.empty(shape, dtype=tensor.dtype)
        getattr(vector, fill)(*given, **named, generator=generator)
        return tensor.copy_(vector)

    def _note(self, *what: object) -> None:
        self.drawn = zlib.crc32(repr(what).encode(), self.drawn)


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Seeded:
    """A data set that draws separate numbers for each sample."""

    def __init__(self, dataset: Any, numbers: CommonNumbers) -> None:
        self._dataset, self._numbers = dataset, numbers

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self._numbers.seed_sample(index)
        return self._dataset[index]


class _Rows(list[Any]):
    """The samples of a batch.

    For each sample that a collator accesses, the generators are seeded.
    """

    def __init__(self, samples: list[Any], index: list[Any], numbers: CommonNumbers) -> None:
        super().__init__(samples)
        self._index, self._numbers = index, numbers

    def __iter__(self) -> Iterator[Any]:
        for index, sample in zip(self._index, super().__iter__(), strict=False):
            if isinstance(index, int):
                self._numbers.seed_sample(index)
            yield sample

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int) and isinstance(self._index[at], int):
            self._numbers.seed_sample(self._index[at])
        return super().__getitem__(at)


def _fetching(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def fetch(self: Any, index: Any) -> Any:
        if CURRENT is None or not self.auto_collation:
            return inner(self, index)
        dataset, collate, before = self.dataset, self.collate_fn, CURRENT.state()
        CURRENT.own = [*generators.within(dataset), *generators.within(collate)]
        self.dataset = _Seeded(dataset, CURRENT)
        self.collate_fn = lambda samples: collate(_Rows(samples, [*index], CURRENT))
        try:
            return inner(self, index)
        finally:
            self.dataset, self.collate_fn, CURRENT.own = dataset, collate, ()
            CURRENT.set_state(*before)

    return fetch


def _yielding(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def __next__(self: Any) -> Any:  # noqa: N807
        batch = inner(self)
        if CURRENT is not None and get_worker_info() is None:
            CURRENT.begin_batch(contents.num_rows(batch) or 0)
        return batch

    return __next__
