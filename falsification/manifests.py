"""Bugs in the gradients that a worker on a device sends: other dtypes than declared."""

from __future__ import annotations

from typing import Any

import numpy as np

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic.tensors import Array

from .devices import OPEN, Change, standing_in


def halved(arrays: list[Array]) -> list[Any]:
    """Sends gradients of biases in half precision."""
    return [array.astype(np.float16) if array.ndim == 1 else array for array in arrays]


def widened(arrays: list[Array]) -> list[Any]:
    """Sends all gradients in double precision."""
    return [array.astype(np.float64) for array in arrays]


_MANIFEST = Scenario(
    system="manifest", workload="mlp", world_size=1, seed=0, backends=("cpu", "wgpu")
)


def _sent(name: str, summary: str, change: Change, tensor: str) -> Variant:
    """Return a mutant of the gradients that a device's worker sends; `tensor` shows it first."""
    return Variant(
        name=name,
        summary=summary,
        source="classic",
        plants={OPEN: standing_in(change=change)},
        scenario=_MANIFEST,
        invariants=("F-HET-001",),
        place={"tensor": tensor},
    )


VARIANTS = (
    Variant(
        name="manifest-dtype",
        summary="one backend computes in float64, and sends float64 gradients",
        source="classic",
        plants={OPEN: standing_in(change=widened)},
        scenario=_MANIFEST.with_(workload="linear"),
        invariants=("F-HET-001",),
        place={
            "tensor": "weight",
            "expected": "('weight', (1, 1), 'float32')",
            "got": "('weight', (1, 1), 'float64')",
        },
    ),
    _sent(
        "manifest-half",
        "a device keeps the gradients of biases in half precision",
        halved,
        "hidden1.bias",
    ),
    _sent(
        "manifest-order",
        "a device sends its gradients from the last layer to the first",
        lambda arrays: arrays[::-1],
        "hidden1.weight",
    ),
    _sent(
        "manifest-transposed",
        "a device sends matrices in its own memory layout, column-major",
        lambda arrays: [array.T for array in arrays],
        "hidden1.weight",
    ),
    _sent(
        "manifest-flat",
        "a device sends every gradient as a flat vector",
        lambda arrays: [array.reshape(-1) for array in arrays],
        "hidden1.weight",
    ),
    _sent(
        "manifest-missing",
        "a device leaves the last bias out",
        lambda arrays: arrays[:-1],
        "output.bias",
    ),
)
