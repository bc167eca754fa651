"""The systems that train; the others probe one thing, whatever trainer is asked for."""

from __future__ import annotations

from collections.abc import Collection

from entrenar_py.errors import UsageError
from entrenar_py.scenario import DEFAULTS
from entrenar_py.systems import SYSTEMS

NAMES = tuple(name for name, system in SYSTEMS.items() if system.trains)


def require(name: str | None, backends: Collection[str]) -> None:
    """Return if `name`, or the usual trainer for None, can train on `backends`; else UsageError."""
    if name is not None and name not in NAMES:
        raise UsageError.of("system", name, f"allowed are {', '.join(NAMES)}")
    for backend in backends:
        SYSTEMS[name or DEFAULTS["system"]].require_backend(backend, "")
