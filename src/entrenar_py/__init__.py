"""entrenar-py: falsify distributed trainers before people trust them."""

from entrenar_py.check.observing import Observation, observe
from entrenar_py.shared.errors import WatchFinding
from entrenar_py.train.canonical import canonical_all_reduce, require_deterministic

__all__ = [
    "Observation",
    "WatchFinding",
    "canonical_all_reduce",
    "observe",
    "require_deterministic",
]
__version__ = "0.1.0"
