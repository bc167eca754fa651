"""Records in which part of a training step random numbers are drawn, and by which generator.

Loaders draw random numbers for the order of an epoch and while they fetch samples, in this process
and in their workers (`LoaderDraws`). A backward pass draws, too, when an activation checkpoint
computes a module again (`Recomputed`): the checkpoint first restores the states of the generators.
If it doesn't, the module draws other numbers than in the forward pass, and the gradient is not that
of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from entrenar_py.check.observing import common_numbers, generators, iterations
from entrenar_py.check.observing.generators import Generators, States
from entrenar_py.check.observing.iterations import OrderHooks
from entrenar_py.check.observing.sources import positions_of
from entrenar_py.shared import hook_calls, trace

_COMMON = "common numbers"
_NONE_DRAWN = {_COMMON: "0"}  # the state when a loader yields a batch


class RandomNumbers:
    """Compares the states of the generators from mark to mark, and records which were used.

    `place` returns the current step and micro-batch of this rank.
    """

    def __init__(
        self,
        generators: Generators,
        rank: int,
        place: Callable[[], tuple[int, int]],
        write: Callable[[Sequence[trace.Event]], None],
        *,
        compiles: Callable[[], bool] = hook_calls.has_compiled,
    ) -> None:
        self._generators, self._rank, self._place, self._write = generators, rank, place, write
        self._last = self._states()
        drawn = partial(self.mark, "recomputed")
        self._recomputed = Recomputed(self._are_not_set_back, drawn, compiles)

    def since(self, states: States) -> None:
        """Update the states at the last mark with `states`."""
        common = {} if common_numbers.CURRENT is None or not states else _NONE_DRAWN
        self._last = {**self._last, **states, **common}

    def begin_backward(self) -> None:
        """Record which generators the loss has used, and observe which modules are recomputed.

        A module that is called before `end_backward` counts as recomputed.
        """
        self.mark("loss")
        self._recomputed.begin()

    def end_backward(self) -> None:
        """Record which generators the backward pass has used."""
        self.remove()
        self.mark("backward")

    def were_recomputed(self) -> bool:
        """Return whether modules were called in a backward pass since the last such call."""
        return self._recomputed.were_called()

    def remove(self) -> None:
        """Remove the hooks of a backward pass."""
        self._recomputed.end()

    def _states(self) -> States:
        common, states = common_numbers.CURRENT, self._generators.states()
        return states if common is None else {**states, _COMMON: str(common.drawn)}

    def _are_not_set_back(self) -> bool:
        return self._states() == self._last

    def mark(
        self, where: str | None, *, worker: int | None = None, ids: tuple[int, ...] = ()
    ) -> tuple[States, list[str]]:
        """Record which generators were used since the last mark, at the place `where`.

        Record nothing if `where` is None.

        In a worker process of a loader, `worker` is its number and `ids` are the samples that it
        fetched. Return the states at the last mark, and the names of the generators that were used.
        """
        before, now = self._last, self._states()
        self._last = now
        drawn = generators.moved(before, now)
        if where == "between" and generators.is_just_seeded():
            # Torch's generator was seeded after observe().
            drawn = [name for name in drawn if name != "torch"]
        if where is not None and drawn:
            step, micro_batch = self._place()
            self._write(
                [
                    trace.Drawn(
                        step=step,
                        rank=self._rank,
                        micro_batch=micro_batch,
                        where=where,
                        worker=worker,
                        ids=ids,
                        generator=name,
                        before=before[name],
                        after=now[name],
                    )
                    for name in drawn
                ]
            )
        return before, drawn


class Recomputed:
    """Observes the modules that are called during a backward pass.

    `are_not_set_back` returns whether all generators are in the states that were recorded last, so
    no checkpoint has restored earlier ones. `drawn` is called after each outermost module that
    began in these states. `compiles` returns whether the trained model may have been compiled in
    this process.
    """

    def __init__(
        self,
        are_not_set_back: Callable[[], bool],
        drawn: Callable[[], object],
        compiles: Callable[[], bool],
    ) -> None:
        self._are_not_set_back, self._drawn, self._compiles = are_not_set_back, drawn, compiles
        self._handles: list[Any] = []
        self._depth, self._goes_on, self._were_called = 0, False, False

    def begin(self) -> None:
        """Observe modules from here on, unless the script compiles.

        Compiled code depends on whether global module hooks exist, so it would be compiled again.
        """
        if self._handles or self._compiles():
            return
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            # always_call: a checkpoint stops the recomputation early, by an exception.
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def end(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._depth = 0

    def were_called(self) -> bool:
        """Return whether any module was called since the last call of this method."""
        were_called, self._were_called = self._were_called, False
        return were_called

    def _enter(self, _module: Any, _inputs: Any) -> None:
        self._depth += 1
        self._were_called = True
        if self._depth == 1:
            self._goes_on = self._are_not_set_back()

    def _leave(self, _module: Any, _inputs: Any, _output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._goes_on:
            self._drawn()


_FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
_HEARING: list[LoaderDraws] = []


class LoaderDraws:
    """Reports to `numbers` when loaders draw: for the order of an epoch, and to fetch samples.

    Only samples of `trained` count, the data set on which the script trains, or samples of any data
    set if `trained` is None. A worker process is forked with a copy of these hooks, so the worker
    also records what it draws for its first batch.
    """

    def __init__(self, numbers: RandomNumbers, *, trained: object) -> None:
        self._numbers, self._trained = numbers, trained
        self._begun: set[int] = set()  # fetchers in a worker that have already fetched
        self._order = OrderHooks(self._around_order)
        for kind in _FETCHERS:
            iterations.replace(kind, "fetch", _telling_fetch)
        _HEARING.append(self)

    def remove(self) -> None:
        """Restore torch's methods."""
        if self not in _HEARING:
            return
        self._order.remove()
        for kind in _FETCHERS:
            iterations.put_back(kind, "fetch")
        _HEARING.remove(self)

    def _around_order(self, is_over: bool) -> None:
        if get_worker_info() is None:
            self._numbers.mark(None if is_over else "between")

    def before_fetch(self) -> None:
        """Called when samples are about to be fetched."""
        self._numbers.mark("between" if get_worker_info() is None else None)

    def after_fetch(self, fetcher: Any, index: Any) -> None:
        """Called when the samples at `index` were fetched."""
        counts = self._trained is None or fetcher.dataset is self._trained
        worker = get_worker_info()
        if worker is None:
            self._numbers.mark("loader" if counts else None)
        elif counts and id(fetcher) not in self._begun:
            self._begun.add(id(fetcher))
            self._numbers.mark("loader", worker=worker.id, ids=positions_of(index) or ())


def _telling_fetch(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(self: Any, index: Any) -> Any:
        for each in _HEARING:
            each.before_fetch()
        try:
            return inner(self, index)
        finally:
            for each in _HEARING:
                each.after_fetch(self, index)

    return fetch
