"""Requires that a checkpoint's contents fit the run: a right digest says only who wrote it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from entrenar_py.errors import CheckpointError
from entrenar_py.training.checkpoint import Arrays

_ADVICE = "use an earlier checkpoint"
# Of the file, beside the tensors: their names, the scenario, the progress.
_DESCRIPTION_BYTES_MAX = 2**24


def bytes_max(expected: Arrays) -> int:
    """The most bytes that a checkpoint of arrays such as `expected` has."""
    return sum(array.nbytes for array in expected.values()) + _DESCRIPTION_BYTES_MAX


def require(
    path: Path,
    arrays: Arrays,
    progress: Mapping[str, Any],
    *,
    expected: Arrays,
    limits: Mapping[str, int],
) -> None:
    """Returns if `arrays` have the names, shapes and dtypes of `expected` and are finite, and each
    of `limits` is a whole number in `progress` from 0 to that.

    Raises CheckpointError, which names what differs in the file at `path`.
    """
    for name, most in limits.items():
        value = progress.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise CheckpointError(
                f"checkpoint {path}: {name}={reprlib.repr(value)}: this run has 0 to {most}; "
                f"{_ADVICE}"
            )
    for name in sorted(expected.keys() ^ arrays.keys()):
        found = "is not there" if name in expected else "is none of this model's"
        raise CheckpointError(f"checkpoint {path}: tensor {name} {found}; {_ADVICE}")
    for name, model in expected.items():
        array = arrays[name]
        if (array.shape, array.dtype) != (model.shape, model.dtype):
            raise CheckpointError(
                f"checkpoint {path}: tensor {name} is {array.dtype} {list(array.shape)}, this "
                f"run's is {model.dtype} {list(model.shape)}; {_ADVICE}"
            )
        if not np.isfinite(array).all():
            raise CheckpointError(f"checkpoint {path}: tensor {name} is not finite; {_ADVICE}")
