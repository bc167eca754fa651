"""Modules that the fork server loads before it forks worker processes.

All systems in a process share one fork server. Each worker must import any other module itself.
"""

from __future__ import annotations

import sys

STAR = (
    "encodings.idna",  # which the first name of a host loads
    "entrenar_py.backends.cpu",
    "entrenar_py.systems.star.worker_process",
    "entrenar_py.training.decoder",
    "numpy.random",
)
MODULES = (
    "entrenar_py.observing.observer",
    "entrenar_py.systems.torch.ranks",
    *STAR,
    "torch._dynamo.aot_compile",  # loaded by the first optimizer of a process
    "torch.nn.parallel",
)


def of_star() -> tuple[str, ...]:
    """Return the modules that a star's workers need, or all if this process may start torch ranks.

    The modules of torch ranks take as long to load as torch, so stars alone do without them.
    """
    return MODULES if "entrenar_py.systems.torch.ranks" in sys.modules else STAR
