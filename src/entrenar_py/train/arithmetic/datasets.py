"""Data that needs no download: handwritten digits (digits.md), and the standard library's source.

Nothing is shuffled. Every process gets the same first rows.
"""

from __future__ import annotations

import gzip
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.compute import Array
from entrenar_py.shared.errors import UsageError

NUM_PIXELS = 64
NUM_DIGITS = 10
LINE_BYTES_MIN = 2  # one byte to read and one to predict
LINE_BYTES_MAX = 32

# Small, old modules in pure Python that every distribution has; their lines differ in length.
MODULES = ("colorsys", "bisect", "heapq", "textwrap", "shlex", "fractions", "statistics")


def digest(*arrays: NDArray[Any]) -> str:
    """Return 32 hex digits of BLAKE3 over the bytes of the C-contiguous `arrays`, in order."""
    hasher = blake3()
    for array in arrays:
        hasher.update(array.tobytes())
    return hasher.hexdigest(16)


def digits(num_samples: int) -> tuple[Array, NDArray[np.int64]]:
    """Return the first digits: pixels in [0, 1], float32 [n, 64], and labels, int64 [n].

    Raises UsageError when `num_samples` is larger than the data set.
    """
    table = _digit_table()
    _require("mlp", num_samples, len(table))
    pixels = (table[:num_samples, :NUM_PIXELS] / 16).astype(np.float32)
    return pixels, table[:num_samples, NUM_PIXELS].astype(np.int64)


def lines(num_samples: int) -> tuple[bytes, ...]:
    """Return the first lines of the standard library's source, 2 to 32 bytes each.

    Indentation and line ends are stripped, short lines are skipped, and long lines are cut. The
    text may differ between Python versions; the workload's `data_digest` shows whether it does.
    Raises UsageError when `num_samples` is larger than the data set.
    """
    text = _source_lines()
    _require("decoder", num_samples, len(text))
    return text[:num_samples]


@lru_cache(maxsize=1)
def _digit_table() -> NDArray[np.uint8]:
    """Return uint8 [1797, 65]: 64 pixels from 0 to 16, and the digit."""
    rows = gzip.decompress(Path(__file__).with_name("digits.gz").read_bytes())
    return np.frombuffer(rows, dtype=np.uint8).reshape(-1, NUM_PIXELS + 1)


@lru_cache(maxsize=1)
def _source_lines() -> tuple[bytes, ...]:
    library = Path(sysconfig.get_path("stdlib"))
    source = b"\n".join((library / f"{module}.py").read_bytes() for module in MODULES)
    stripped = (line.strip() for line in source.splitlines())
    return tuple(line[:LINE_BYTES_MAX] for line in stripped if len(line) >= LINE_BYTES_MIN)


def _require(workload: str, num_samples: int, available: int) -> None:
    if num_samples > available:
        raise UsageError(
            f"num_samples={num_samples} with workload={workload}: its data set has {available} "
            f"samples; use num_samples<={available}"
        )
