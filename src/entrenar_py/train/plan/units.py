"""Sizes and times in the words of a plan: `23.6 MB`, `0.19 s`."""

from __future__ import annotations

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size(num_bytes: float) -> str:
    """Return bytes with three digits, in powers of 1000."""
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def short(num_bytes: float) -> str:
    """Return bytes as `23.6M`, for a narrow column."""
    return size(num_bytes).replace(" ", "").removesuffix("B") or "0"


def seconds(number: float) -> str:
    """Return a time with two digits or more."""
    if number >= 1:
        return f"{_digits(number)} s"
    return f"{_digits(number * 1e3)} ms"


def _digits(number: float) -> str:
    places = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{places}f}"
