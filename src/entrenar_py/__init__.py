"""entrenar-py: falsify distributed trainers before people trust them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from entrenar_py.check.observing import Observation, observe
from entrenar_py.shared.errors import WatchFinding

if TYPE_CHECKING:
    from entrenar_py.train.canonical import (
        canonical_all_reduce,
        canonical_reduce_scatter,
        require_deterministic,
    )
    from entrenar_py.train.elastic import elastic

__all__ = [
    "Observation",
    "WatchFinding",
    "canonical_all_reduce",
    "canonical_reduce_scatter",
    "elastic",
    "observe",
    "require_deterministic",
]
__version__ = "0.1.0"


_IN_TRAINER = {
    "canonical_all_reduce": "entrenar_py.train.canonical",
    "canonical_reduce_scatter": "entrenar_py.train.canonical",
    "elastic": "entrenar_py.train.elastic",
    "require_deterministic": "entrenar_py.train.canonical",
}


def __getattr__(name: str) -> Any:
    """Return a name from the trainer, imported here so that the checker need not import it."""
    if name in _IN_TRAINER:
        return getattr(import_module(_IN_TRAINER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
