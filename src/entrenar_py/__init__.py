"""entrenar-py: falsify distributed trainers before people trust them."""

from typing import TYPE_CHECKING, Any

from entrenar_py.check.observing import Observation, observe
from entrenar_py.shared.errors import WatchFinding

if TYPE_CHECKING:
    from entrenar_py.train.canonical import (
        canonical_all_reduce,
        canonical_reduce_scatter,
        require_deterministic,
    )

__all__ = [
    "Observation",
    "WatchFinding",
    "canonical_all_reduce",
    "canonical_reduce_scatter",
    "observe",
    "require_deterministic",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a name from the trainer, imported here so that the checker need not import it."""
    if name in ("canonical_all_reduce", "canonical_reduce_scatter", "require_deterministic"):
        from entrenar_py.train import canonical

        return getattr(canonical, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
