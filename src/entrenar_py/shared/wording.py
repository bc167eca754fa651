"""Numbers and lists as words for a sentence: `3 runs`, `ranks 0, 1 and 6 more`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1: `1,000 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named(noun: str, numbers: Iterable[int], *, most: int = 8) -> str:
    """Return `rank 3` or `ranks 0, 1, 2` for distinct numbers; at most `most` are listed."""
    known = sorted(numbers)
    return f"{noun}{'s' if known[1:] else ''} {listed(known, most=most)}"


def spanned(noun: str, numbers: range) -> str:
    """Return `block 3` or `blocks 0 to 2` for consecutive numbers."""
    last = numbers.stop - 1
    return f"{noun} {last}" if len(numbers) == 1 else f"{noun}s {numbers.start} to {last}"


def listed(names: Sequence[object], *, most: int) -> str:
    """Return `a, b and 3 more`: the first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"
