"""The judge of a watched step: it turns the rows of all ranks into findings, on the host.

Every rank has all rows, and so produces the same findings. A contract selects the clauses. Nothing
here needs torch, since `entrenar watch` reads the contract before it becomes the command.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import contract
from entrenar_py.check.contract import TOLERANCE_KINDS, CheckTerms, Invariant, Vocabulary
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError, WatchFinding
from entrenar_py.shared.wording import named

IDENTITY, FINITENESS, LIVENESS = "replica_identity", "finiteness", "liveness"
# Check -> the clause that it decides if there is no contract.
ALL = {IDENTITY: "F-DP-001", FINITENESS: "F-DP-003", LIVENESS: "F-TI-004"}


class _Open(Vocabulary):
    """A vocabulary that accepts any check, since other clauses than the watch's are no errors."""

    def check_of(self, clause: Invariant) -> CheckTerms:
        """Return the check that `clause` names.

        If it names none, the result is the check that ALL has for the clause's id, or an unnamed
        check.
        """
        named = clause.check or next((name for name, id_ in ALL.items() if id_ == clause.id), "")
        return CheckTerms(
            name=named, id=clause.id, tolerance_kinds=TOLERANCE_KINDS, takes_tolerance=True
        )


def select_clauses(named: str | Path | None) -> Mapping[str, str]:
    """Return check -> id of the first clause that it decides in the contract `named`.

    `named` is a file or the name of a shipped contract. If it is None, the result is ALL. Raises
    UsageError if the contract has no clause that can be watched, and ContractError if the file is
    not a contract.
    """
    if named is None:
        return ALL
    vocabulary = _Open(checks=(), mutants=lambda: None)
    path = package_data.contract_path(str(named))
    loaded = contract.load(path, vocabulary=vocabulary)
    ids = {vocabulary.check_of(clause).name: clause.id for clause in reversed(loaded.invariants)}
    selected = {check: ids[check] for check in ALL if check in ids}
    if not selected:
        raise UsageError(
            f"contract={str(named)!r}: it has no clause that can be watched; give a contract with "
            f"the check {', '.join(ALL)}"
        )
    return selected


Rows = NDArray[np.int64]  # int64 [ranks, rows, words]

# The dtypes in which NaN and Inf are recognised on every device.
_SEEN = {"float64", "float32", "bfloat16", "float16", "complex128", "complex64"}


@dataclass(frozen=True)
class Piece:
    """A tensor, or a shard of a tensor, on one rank.

    Ranks with equal pieces must have equal values. `shard` has (dimension, coordinate) for each
    mesh dimension that doesn't replicate the tensor.
    """

    name: str
    shard: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Watched:
    """How often a clause was checked: in `steps` steps, with `comparisons` comparisons in all.

    `note` says what is not checked, and why. It is "" if everything is checked.
    """

    clause: str
    check: str
    steps: int
    comparisons: int
    note: str


class Judge:
    """Judges the rows of a training run in which rank r has the pieces `ranks[r]`.

    `clauses` maps each check to the id of its clause. A tensor must move within `patience` steps.
    """

    def __init__(
        self, ranks: Sequence[Sequence[Piece]], clauses: Mapping[str, str], patience: int
    ) -> None:
        self._ranks, self._clauses, self._patience = ranks, clauses, patience
        shape = (len(ranks), max(map(len, ranks)))
        self._held = holders(ranks)
        self._copies = _places(place for held in self._held for place in held[1:])
        self._firsts = _places(held[0] for held in self._held for _ in held[1:])
        self._floating = np.zeros(shape, bool)
        self._there = np.zeros(shape, bool)
        for rank, pieces in enumerate(ranks):
            self._floating[rank, : len(pieces)] = [piece.dtype in _SEEN for piece in pieces]
            self._there[rank, : len(pieces)] = True
        self._last: Rows | None = None
        self._idle = np.zeros(shape, bool)  # did not move between the last two watched steps
        self._since = np.zeros(shape, np.int64)  # the last step in which it may have moved
        self._steps: Counter[str] = Counter()
        self._comparisons: Counter[str] = Counter()

    def look(self, step: int, rows: Rows) -> list[WatchFinding]:
        """Return the findings at `step`: at most one per clause, about the first broken tensor."""
        judges = {IDENTITY: self._differing, FINITENESS: self._not_finite, LIVENESS: self._dead}
        findings = []
        for check in self._clauses:
            broken, compared = judges[check](step, rows)
            if compared:
                self._steps[check] += 1
                self._comparisons[check] += compared
            findings += broken
        return findings

    def idle(self, rank: int) -> list[int]:
        """Return the rows of `rank` that did not move between the last two watched steps."""
        if LIVENESS not in self._clauses:
            return []
        return [int(row) for row in np.flatnonzero(self._idle[rank])]

    def watched(self) -> tuple[Watched, ...]:
        """Return for each clause how often it was checked, including clauses never checked."""
        notes = {IDENTITY: self._alone(), FINITENESS: self._unseen(), LIVENESS: ""}
        return tuple(
            Watched(id_, check, self._steps[check], self._comparisons[check], notes[check])
            for check, id_ in self._clauses.items()
        )

    # --- identity ---------------------------------------------------------------------------------

    def _differing(self, step: int, rows: Rows) -> tuple[list[WatchFinding], int]:
        copies, firsts = self._copies.T, self._firsts.T
        differ = (rows[*copies, :2] != rows[*firsts, :2]).any(axis=1)
        if not differ.any():
            return [], len(differ)
        broken = {tuple(place) for place in self._firsts[differ].tolist()}
        held = [places for places in self._held if places[0] in broken]
        return [self._difference(step, held[0], rows, len(held))], len(differ)

    def _difference(
        self, step: int, places: Sequence[tuple[int, int]], rows: Rows, num_tensors: int
    ) -> WatchFinding:
        digests = {rank: rows[rank, row, :2].tobytes()[::-1].hex() for rank, row in places}
        (most, votes), *_ = Counter(digests.values()).most_common()
        odd = {rank: digest for rank, digest in digests.items() if digest != most}
        if votes <= len(digests) - votes:  # without a majority, it is unknown which ranks are right
            odd = digests
        others = [rank for rank in digests if rank not in odd]
        what = (
            f"hold different weights from {named('rank', others)}"
            if others
            else "hold different weights"
        )
        shown = ", ".join(f"rank {rank}: {digest}" for rank, digest in list(odd.items())[:4])
        right = f"; the others: {most}" if others else ""
        return self._finding(
            IDENTITY,
            step,
            list(odd),
            self._name(places[0]),
            f"{named('rank', odd)} {what if len(odd) > 1 else what.replace('hold', 'holds', 1)} "
            f"({shown}{right}){_more(num_tensors)}",
        )

    def _alone(self) -> str:
        if len(self._ranks) == 1:
            return "there is only one process, and no other to compare it with"
        compared = {place for held in self._held for place in held}
        alone = [
            self._name((rank, row))
            for rank, pieces in enumerate(self._ranks)
            for row in range(len(pieces))
            if (rank, row) not in compared
        ]
        if not alone:
            return ""
        return f"{len(alone)} tensors or shards are held by one rank alone, the first {alone[0]}"

    # --- finiteness -------------------------------------------------------------------------------

    def _not_finite(self, step: int, rows: Rows) -> tuple[list[WatchFinding], int]:
        bad = self._floating & (rows[:, :, 2] != 0)
        message = "NaN or Inf in the weights after the step"
        return list(self._named(FINITENESS, step, bad, message)), int(self._floating.sum())

    def _unseen(self) -> str:
        unseen = sorted({p.dtype for held in self._ranks for p in held if p.dtype not in _SEEN})
        return f"tensors of dtype {', '.join(unseen)} are not checked" if unseen else ""

    # --- liveness ---------------------------------------------------------------------------------

    def _dead(self, step: int, rows: Rows) -> tuple[list[WatchFinding], int]:
        last, self._last = self._last, rows
        if last is None:
            self._since[:] = step
            return [], 0
        self._idle = self._there & (rows[:, :, :2] == last[:, :, :2]).all(axis=2)
        stuck = self._idle & (rows[:, :, 3] != 0)
        self._since[~stuck] = step
        dead = stuck & (step - self._since >= self._patience)
        self._since[dead] = step  # reported again `patience` steps later at the earliest
        message = (
            f"did not move in {self._patience} steps or more, though it is trainable and its "
            "gradient was not zero: it is not in the optimizer, or its updates round to nothing"
        )
        # A tensor that did not move and has no mark was not examined: it may be frozen.
        looked_at = (self._there & ~self._idle) | stuck
        return list(self._named(LIVENESS, step, dead, message)), int(looked_at.sum())

    # --- all --------------------------------------------------------------------------------------

    def _named(
        self, check: str, step: int, broken: NDArray[np.bool_], message: str
    ) -> Iterator[WatchFinding]:
        """Yield a finding about the first tensor that is broken on any rank; nothing if none is."""
        rows = np.flatnonzero(broken.any(axis=0))
        if len(rows):
            ranks = [int(rank) for rank in np.flatnonzero(broken[:, rows[0]])]
            name = self._name((ranks[0], int(rows[0])))
            ranks = [rank for rank in ranks if self._name((rank, int(rows[0]))) == name]
            said = f"{named('rank', ranks)}: {message}{_more(len(rows))}"
            yield self._finding(check, step, ranks, name, said)

    def _finding(
        self, check: str, step: int, ranks: Sequence[int], tensor: str, message: str
    ) -> WatchFinding:
        return WatchFinding(
            message, clause=self._clauses[check], step=step, ranks=tuple(ranks), tensor=tensor
        )

    def _name(self, place: tuple[int, int]) -> str:
        rank, row = place
        return self._ranks[rank][row].name


def holders(ranks: Sequence[Sequence[Piece]]) -> list[list[tuple[int, int]]]:
    """Return, for each piece that several ranks have, the (rank, row) of all of them, in order."""
    by_piece: defaultdict[Piece, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for row, piece in enumerate(pieces):
            by_piece[piece].append((rank, row))
    return [held for held in by_piece.values() if len(held) > 1]


def _places(places: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(list(places), np.int64).reshape(-1, 2)


def _more(num_tensors: int) -> str:
    return f"; {num_tensors} tensors in all" if num_tensors > 1 else ""
