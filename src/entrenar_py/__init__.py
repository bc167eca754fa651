"""entrenar-py: falsify distributed trainers before people trust them."""

from entrenar_py.canonical import canonical_all_reduce, require_deterministic
from entrenar_py.errors import WatchFinding
from entrenar_py.observing import Observation, observe

__all__ = [
    "Observation",
    "WatchFinding",
    "canonical_all_reduce",
    "observe",
    "require_deterministic",
]
__version__ = "0.1.0"
