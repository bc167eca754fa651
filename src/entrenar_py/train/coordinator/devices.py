"""The backends that the workers of one run compute on."""

from __future__ import annotations

from dataclasses import asdict

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import AUTO
from entrenar_py.train.coordinator.recorder import Recorder


class Devices:
    """The backends of the workers in this process, each opened once, at its first use.

    `auto` walks the fallback chain once and records each try as an Attempt event. The backend that
    works serves all `auto` workers to the end of the run. Other names have no fallback.
    """

    def __init__(self, scenario: Scenario, recorder: Recorder) -> None:
        self._scenario = scenario
        self._recorder = recorder
        self._opened: dict[str, Backend] = {}

    def of(self, rank: int) -> Backend:
        """Return the backend of worker `rank`; raise BackendUnavailable if it can't be opened."""
        name = self._scenario.backend_of(rank)
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    @property
    def alike(self) -> bool:
        """True if all workers compute on one backend; two backends may round differently."""
        return len({backend.name for backend in self._opened.values()}) == 1

    def _open(self, name: str) -> Backend:
        if name == AUTO:
            return chain.auto(on_attempt=self._record)
        return backends.open_backend(name)

    def _record(self, attempt: chain.Attempt) -> None:
        self._recorder.emit(trace.Attempt(**asdict(attempt)))
