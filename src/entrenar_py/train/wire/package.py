"""The files of a run, which workers fetch from the coordinator: named by their SHA-256, in pieces.

A package is a set of files. Its own digest is that of one of them, which lists the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PIECE_BYTES = 2**20  # a late worker's pieces come between the messages of a step
WANTED_MAX = 4  # pieces that a worker wants before the first of them has come


@dataclass(frozen=True, slots=True)
class Package:
    """The files by digest: `sizes` in bytes. `digest` is that of the list."""

    digest: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker lacks of a file of `num_bytes`: all from `start` on."""

    file: str
    num_bytes: int
    start: int

    def offsets(self) -> Iterator[int]:
        """Yield where each piece begins."""
        return iter(range(self.start, self.num_bytes, PIECE_BYTES))


def piece_bytes(num_bytes: int, offset: int) -> int:
    """Return the size of the piece at `offset` of a file of `num_bytes`."""
    return min(PIECE_BYTES, num_bytes - offset)
