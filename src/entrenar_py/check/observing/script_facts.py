"""Facts about the data and losses of a script, beyond what the line `observe` declares."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from entrenar_py.check.observing import call_sites, checkpoints, script_text, surroundings
from entrenar_py.check.observing.batches import Iteration
from entrenar_py.check.observing.call_sites import CallSites
from entrenar_py.check.observing.iterations import LoaderHooks
from entrenar_py.check.observing.micro_batches import MicroBatches
from entrenar_py.check.observing.outer_synchronisation import Exchanges
from entrenar_py.check.observing.recording import Recording
from entrenar_py.check.observing.samples import Samples
from entrenar_py.check.observing.seen_samples import Batches, SeenSamples
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.observing.torch_calls import Ear
from entrenar_py.shared import trace


class ScriptFacts:
    """Facts about a script with the line `observe`, or, if `seen` is passed, without the line.

    If the line has no sampler, samples are identified by the model's inputs, unless the script
    reports them. `samples` has the samples of micro-batches, and `header` the facts that are known
    at the beginning.
    """

    def __init__(
        self,
        seen: Samples | None,
        *,
        sampler: Any,
        dataset: Any,
        scheduler: Any,
        resumed: bool,
        rank: int,
    ) -> None:
        self._scheduler, self._sites = scheduler, CallSites(rank)
        self._rank, self._is_line = rank, seen is None
        self._loaders: list[LoaderHooks] = []
        call_sites.Backward.site = None
        if seen is None:
            call_sites.Samples.site = None
            self._loaders.append(LoaderHooks(lambda _: call_sites.Samples.drawn()))
        self._finds_samples = seen is None and sampler is None
        if seen is None and sampler is not None:
            seen = Samples(sampler, dataset, resumed=resumed)
        elif seen is None:
            batches = Batches()
            seen = SeenSamples(batches, dataset)
            self._loaders.append(LoaderHooks(partial(Iteration, batches)))
        self.samples: Samples = seen
        self.header = self._written = seen.facts()
        self._has_begun = False  # whether the first step has begun
        # Whether torch's wrapper keeps a copy of the model on each rank; None if that isn't needed.
        self._replicas: bool | None = None
        self._ear: Ear | None = None
        self._exchanges = Exchanges()
        self._shown: dict[str, Any] = {}  # facts from the script's text, and from its wrappers

    def listen(
        self,
        recording: Recording,
        micro_batches: MicroBatches,
        skipped: Callable[[], object],
        clipped: Callable[[Any, float, float], None],
    ) -> None:
        """Observe losses, saves, clipping and skipped steps of a script with the line `observe`."""
        self._recording = recording
        if self._is_line:
            self._ear = Ear(micro_batches, skipped=skipped, saved=self.saved, clipped=clipped)
            self._ear.listen()

    def saved(self) -> None:
        """Record the line of the script that saves a file."""
        if not self._sites.is_known("save"):
            self._recording.write(self._sites.event("save", call_sites.here()))

    def begin(self, subject: Subject, num_made: Callable[[], int]) -> None:
        """Called when the first pass of the model begins: wrappers and schedule exist by then.

        `num_made` returns the number of steps taken so far.
        """
        self._exchanges.begin()
        if self._finds_samples:
            self._replicas = surroundings.are_replicas(subject.model)
        if self._scheduler is None:
            self._scheduler = surroundings.schedule_of(subject.optimizers)
        self._shown = _shown()
        if surroundings.are_joined(subject.model):
            self._shown["joined"] = True
        checkpoints.watch(
            dict.fromkeys(subject.trained.values()), num_made
        )  # several parameters may share a flat tensor

    def schedule_place(self) -> int | None:
        """Return the position of the learning rate's schedule; None if it is unknown."""
        place = getattr(self._scheduler, "last_epoch", None)
        return None if place is None else int(place)

    def best_metric(self) -> float | None:
        """Return the best value of the metric that controls a schedule; None if there is none."""
        best = getattr(self._scheduler, "best", None)
        known = float(best) if isinstance(best, int | float | Tensor) else math.nan
        return known if math.isfinite(known) else None

    def progress(self) -> dict[str, int]:
        """Return the position that a checkpoint must restore, if it is known."""
        place = self.schedule_place()
        return {} if place is None else {"schedule": place}

    def first_step(self) -> list[trace.Event]:
        """Return the facts that become known in the first step; [] after the first call.

        These are the samples of an epoch, if it has only a part of the data set, and the script's
        lines that step and draw. Once there are micro-batches, it is known whether the script
        reports its own samples.
        """
        if self._has_begun:
            return []
        self._has_begun = True
        checkpoints.first_step()
        selected = self.samples.selected()
        selection = [] if selected is None else [trace.Selection(rank=self._rank, ids=selected)]
        sites = {
            "step": call_sites.here(),
            "samples": call_sites.Samples.site,
            "backward": call_sites.Backward.site,
        }
        lines = [self._sites.event(what, site) for what, site in sites.items()]
        return [*selection, *chain.from_iterable(lines)]

    def write(self, recording: Recording, micro_batches: MicroBatches, **known: Any) -> None:
        """Write all known facts and the caller's facts `known`, if any of them has changed."""
        facts = {**self.samples.facts(), **self._exchanges.facts(), **known}
        if "samples" in facts and self._replicas is not None:
            facts["replicas"] = self._replicas
        facts |= self._shown
        if micro_batches.has_backward_losses:
            facts["losses"] = "backward"
        if facts != self._written:
            self._written = facts
            recording.note_data(facts)

    def remove(self) -> None:
        """Stop observing the script."""
        self.samples.remove()
        for loaders in self._loaders:
            loaders.remove()
        if self._ear is not None:
            self._ear.stop()


def _shown() -> dict[str, Any]:
    """Return the script's lines that may select rows at random, or that depend on the epoch."""
    facts: dict[str, Any] = {}
    if selects := script_text.selecting_line():
        own, _ = script_text.texts()
        again = script_text.line_again(script_text.SELECTS, own)
        facts["selects"] = again or selects
        facts["selects_in_steps"] = bool(again)
        facts["one_source"] = script_text.are_alike(script_text.SELECTS, own)
    if by_epoch := script_text.line_by_epoch():
        facts["by_epoch"] = by_epoch
    return facts
