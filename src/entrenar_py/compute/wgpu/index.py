"""Symbolic positions of elements, which are simplified when views are combined.

An index is `constant + sum(coefficient * atom)`. An atom is a loop variable, a value that a kernel
has read (an embedding's row), or a quotient or remainder of another index that no rule simplifies.
An atom's value is in `range(size)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ROW = 0  # the level of atoms that no loop of the kernel changes


@dataclass(frozen=True)
class Atom:
    """The WGSL expression `text`, or `of / by` or `of % by`: then `text` is "/" or "%".

    `level` is the number of the loop that the atom changes with, or `ROW`.
    """

    text: str
    size: int
    level: int
    of: Index | None = None
    by: int = 1


@dataclass(frozen=True)
class Index:
    """A position: `constant` plus the sum of `terms`.

    Each term is an atom and its coefficient, which is not 0; no atom occurs twice.
    """

    constant: int
    terms: tuple[tuple[Atom, int], ...] = ()

    def __add__(self, other: Index) -> Index:
        sums: dict[Atom, int] = dict(self.terms)
        for atom, coefficient in other.terms:
            sums[atom] = sums.get(atom, 0) + coefficient
        terms = tuple((atom, c) for atom, c in sums.items() if c)
        return Index(self.constant + other.constant, terms)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index(0)
        return Index(self.constant * factor, tuple((atom, c * factor) for atom, c in self.terms))

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value that the atoms' sizes allow."""
        ends = [(c * (atom.size - 1)) for atom, c in self.terms]
        low = self.constant + sum(end for end in ends if end < 0)
        return low, self.constant + sum(end for end in ends if end > 0)

    @property
    def level(self) -> int:
        """The number of the loop that the index changes with, or ROW."""
        return join(atom.level for atom, _ in self.terms)

    def _split(self, by: int) -> tuple[Index, Index] | None:
        """Return (quotient, remainder) of a division by `by`, or None if no rule applies."""
        whole = tuple((atom, c) for atom, c in self.terms if c % by == 0)
        rest = Index(self.constant % by, tuple((atom, c) for atom, c in self.terms if c % by != 0))
        low, high = rest.bounds
        if low < 0 or high >= by:
            return None
        quotient = Index(self.constant // by, tuple((atom, c // by) for atom, c in whole))
        return quotient, rest

    def divide(self, by: int) -> Index:
        """Return floor(self / by). The index must not be negative."""
        split = self._split(by)
        if split is not None:
            return split[0]
        size = self.bounds[1] // by + 1
        return Index(0, ((Atom("/", size, self.level, self, by), 1),))

    def modulo(self, by: int) -> Index:
        """Return self % by. The index must not be negative."""
        split = self._split(by)
        if split is not None:
            return split[1]
        return Index(0, ((Atom("%", by, self.level, self, by), 1),))


Indices = tuple[Index, ...]


def join(levels: Iterable[int]) -> int:
    """Return the level of a value computed from values of these levels."""
    loops = set(levels) - {ROW}
    assert len(loops) <= 1, "a value of one loop is used in another"
    return loops.pop() if loops else ROW


def variable(text: str, size: int, level: int = ROW) -> Index:
    """Return a loop variable in `range(size)`, or the constant 0 for size 1."""
    return Index(0, ((Atom(text, size, level), 1),)) if size > 1 else Index(0)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def place(indices: Sequence[Index], strides: Sequence[int], offset: int = 0) -> Index:
    """Return the position in memory of a strided tensor's element at `indices`."""
    total = Index(offset)
    for index, stride in zip(indices, strides, strict=True):
        total += index * stride
    return total


def unravel(position: Index, shape: Sequence[int]) -> Indices:
    """Return the indices of a contiguous tensor's element at `position`."""
    indices = []
    for dim, stride in enumerate(strides_of(shape)):
        inner = position.divide(stride) if shape[dim] > 1 else Index(0)
        indices.append(inner.modulo(shape[dim]) if shape[dim] > 1 and dim else inner)
    return tuple(indices)


def reshape(indices: Sequence[Index], shape: Sequence[int], to: Sequence[int]) -> Indices:
    """Convert indices into a tensor of `shape` to indices into its reshape to `to` (C order)."""
    return unravel(place(indices, strides_of(shape)), to)


def leaves(index: Index) -> Iterable[Index]:
    """Yield `index` and all indices that are divided inside it."""
    yield index
    for atom, _ in index.terms:
        if atom.of is not None:
            yield from leaves(atom.of)


def substitute(index: Index, change: Callable[[Atom], Index]) -> Index:
    """Return `index` with each atom replaced by `change(atom)`, also inside quotients."""
    total = Index(index.constant)
    for atom, coefficient in index.terms:
        if atom.of is None:
            term = change(atom)
        else:
            inner = substitute(atom.of, change)
            term = inner.divide(atom.by) if atom.text == "/" else inner.modulo(atom.by)
        total += term * coefficient
    return total


def render(index: Index) -> str:
    """Return the index as a WGSL expression of type i32."""
    text = ""
    for atom, coefficient in index.terms:
        name = atom.text if atom.of is None else f"({render(atom.of)}) {atom.text} {atom.by}"
        name = name if atom.of is None else f"({name})"
        sign = " - " if coefficient < 0 else " + " if text else ""
        text += sign + (name if abs(coefficient) == 1 else f"{name} * {abs(coefficient)}")
    if index.constant or not text:
        text += f" + {index.constant}" if text and index.constant >= 0 else f" {index.constant}"
    return text.strip()
