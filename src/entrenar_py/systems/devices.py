"""The backends that the workers of one run compute on."""

from __future__ import annotations

from dataclasses import asdict

from entrenar_py import backends, trace
from entrenar_py.backends import Backend, chain
from entrenar_py.scenario import Scenario
from entrenar_py.systems import AUTO
from entrenar_py.systems.recorder import Recorder


class Devices:
    """Every worker's backend, opened once, before training starts.

    `auto` walks the fallback chain once, each try an Attempt event; whoever served there serves
    all workers of that name to the end of the run. A backend asked for by its own name is that one
    or none. Raises BackendUnavailable.
    """

    def __init__(self, scenario: Scenario, recorder: Recorder) -> None:
        self._scenario = scenario
        self._recorder = recorder
        used = scenario.backends[: scenario.world_size]
        self._opened = {name: self._open(name) for name in dict.fromkeys(used)}

    def of(self, rank: int) -> Backend:
        """The backend of worker `rank`."""
        return self._opened[self._scenario.backend_of(rank)]

    @property
    def alike(self) -> bool:
        """Whether all workers compute on one backend; kernels of two round differently."""
        return len({backend.name for backend in self._opened.values()}) == 1

    def _open(self, name: str) -> Backend:
        if name == AUTO:
            return chain.auto(on_attempt=self._record)
        return backends.open_backend(name)

    def _record(self, attempt: chain.Attempt) -> None:
        self._recorder.emit(trace.Attempt(**asdict(attempt)))
