"""entrenar-py: falsify distributed trainers before people trust them."""

from entrenar_py.observing import Observation, observe

__all__ = ["Observation", "observe"]
__version__ = "0.1.0"
