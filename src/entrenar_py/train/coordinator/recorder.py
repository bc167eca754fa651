"""Collects the events of one run and turns arrays into tensor records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared import patience, process, trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import reduction

_ALONE = 2**22  # bytes up to which one thread is as fast
_THREADS_MAX = 4


class Recorder:
    """The growing trace of one run of `scenario`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._values = scenario.detail == "values"
        self._events: list[trace.Event] = []

    def emit(self, event: trace.Event) -> None:
        """Keep `event`, which is a sign of progress."""
        self._events.append(event)
        patience.mark()

    def tensors(self, arrays: Mapping[str, NDArray[Any]]) -> trace.Tensors:
        """Return records of the present values of `arrays`, which must be C-contiguous."""
        records: dict[str, trace.TensorRecord] = {}

        def of(names: Sequence[str]) -> None:
            for name in names:
                records[name] = trace.record_tensor(arrays[name], values=self._values)

        names = list(arrays)
        if sum(array.nbytes for array in arrays.values()) < _ALONE:
            of(names)
        else:
            reduction.share_out(names, of, threads_max=_THREADS_MAX)
        return {name: records[name] for name in names}

    def slices(self, vector: NDArray[np.float32], parts: Mapping[str, slice]) -> trace.Tensors:
        """Return records of the named `parts` of a flat vector."""
        return self.tensors({name: vector[part] for name, part in parts.items()})

    def of(self, kind: type[trace.E]) -> list[trace.E]:
        """Return the events of `kind` that are kept so far."""
        return [event for event in self._events if isinstance(event, kind)]

    def drain(self) -> list[trace.Event]:
        """Return the events kept so far, and drop them."""
        events = list(self._events)
        self._events.clear()
        return events

    def finish(self, *, promises: Iterable[str] = (), status: str, reason: str = "") -> trace.Trace:
        """Emit an End event and return the trace."""
        self.emit(trace.End(status=status, reason=reason))
        return trace.Trace(
            scenario=self.scenario,
            environment=process.environment(),
            promises=tuple(promises),
            events=tuple(self._events),
        )
