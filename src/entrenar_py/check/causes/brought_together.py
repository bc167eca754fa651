"""Test whether weights that ranks train alone are brought together outside of the optimizer.

Local SGD does that, in many ways: all weights or some of them, at once or step by step. Ranks that
only lack a reduction drift apart, and nothing brings them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import divergence
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence import rounds
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Tensors, Trace, Update

NEARER = 0.95  # of the distance between two ranks, after they are brought together


def lacking(compared: Compared) -> str:
    """Return where ranks that step alone are brought together, undeclared; "" for nowhere."""
    for trace in (compared.trace, compared.model):
        if rounds.are_in(trace):
            continue
        if place := first(trace):
            step, name = place
            return (
                f"in {run_name(trace)} each rank steps with a gradient of its own, and {name} is "
                f"brought nearer to the others' outside of the optimizer, before step {step}: if "
                "workers are meant to step alone (local SGD, DiLoCo), call obs.synchronised(...) "
                "where they get the same weights, and check by local-sgd-v1.yaml; if not, reduce "
                "the gradients"
            )
    return ""


def before(compared: Compared) -> Compared | None:
    """Return the comparison of the weights before the first step, if it is of one run."""
    if not compared.is_one_run:
        return None
    trace = divergence.until(compared.trace, 0)
    return replace(compared, model=trace, trace=trace)


def first(trace: Trace) -> tuple[int, str] | None:
    """Return the first step before which a tensor was brought together, and its name."""
    before: Mapping[int, Update] = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        ranks = sorted(before.keys() & by_rank.keys())
        for name in by_rank[ranks[0]].edited if len(ranks) > 1 else ():
            if not _apart(name, [before[rank].gradient for rank in ranks]):
                continue
            then = _distance(name, [before[rank].weights for rank in ranks])
            now = _distance(name, [by_rank[rank].edited for rank in ranks])
            if then and now is not None and now < NEARER * then:
                return step, name
        before = by_rank
    return None


def _apart(name: str, held: Sequence[Tensors]) -> bool:
    """Return whether ranks have different values of a tensor."""
    return len({tensors[name].digest for tensors in held if name in tensors}) > 1


def _distance(name: str, held: Sequence[Tensors]) -> float | None:
    """Return the largest distance of a tensor from the first rank's; None if one is unknown."""
    vectors = [tensors[name].vector() if name in tensors else None for tensors in held]
    known = [vector for vector in vectors if vector is not None]
    if len(known) < len(vectors) or len({vector.shape for vector in known}) > 1:
        return None
    first, *others = (vector.astype(np.float64) for vector in known)
    return max((float(np.linalg.norm(other - first)) for other in others), default=0.0)
