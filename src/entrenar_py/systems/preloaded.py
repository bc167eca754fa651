"""Modules that the parent of all worker processes has loaded, whichever system starts it: there is
one for a process, and what it lacks every worker would have to import for itself.
"""

from __future__ import annotations

import sys

STAR = ("entrenar_py.systems.star.worker_process", "entrenar_py.training.decoder")
MODULES = (
    "entrenar_py.observing.observer",
    "entrenar_py.systems.torch.ranks",
    *STAR,
    "torch._dynamo.aot_compile",  # which the first optimizer of a process loads
    "torch.nn.parallel",
)


def of_star() -> tuple[str, ...]:
    """Return what a star's workers need; all, where this process may start torch's ranks too.

    Those need as much again as torch itself, which stars of a run without them would wait for.
    """
    return MODULES if "entrenar_py.systems.torch.ranks" in sys.modules else STAR
