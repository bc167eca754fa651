"""Records for a training loop that torch's hooks can't observe; see docs/traces.md."""

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import *  # noqa: F403  (the same names, under the published one)

__all__ = [*trace.__all__, "Scenario"]
