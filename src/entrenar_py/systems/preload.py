"""Modules that the fork server loads before it forks worker processes.

All systems in a process share one fork server. A worker imports all other modules itself.
"""

from __future__ import annotations

import sys

from entrenar_py.shared import mutants

STAR = (
    "encodings.idna",  # loaded when a host name is first used
    "entrenar_py.compute.on_torch",
    "entrenar_py.systems.star.worker_process",
    "entrenar_py.train.arithmetic.decoder",
    "numpy.random",
)
MODULES = (
    "entrenar_py.check.observing.observer",
    "entrenar_py.systems.torch.ranks",
    *STAR,
    "torch._dynamo.aot_compile",  # loaded by the first optimizer of a process
    "torch.nn.parallel",
)
MUTANTS = "entrenar_py.systems.preload_mutants"


def of_ranks() -> tuple[str, ...]:
    """Return the modules that torch ranks need, with mutants if this process may plant any."""
    return (*MODULES, MUTANTS) if mutants.PACKAGE in sys.modules else MODULES


def of_star() -> tuple[str, ...]:
    """Return the modules that a star's workers need; all if this process may start torch ranks.

    The modules of torch ranks take as long to load as torch itself; a star does not need them.
    """
    return of_ranks() if "entrenar_py.systems.torch.ranks" in sys.modules else STAR
