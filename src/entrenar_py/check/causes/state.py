"""Compare training state that must be equal, part by part: weights, optimizer state and buffers.

The holders of a state are ranks, at their start or after a step, and checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import culprit
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.shared.trace import Saved, Start, TensorRecord, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally

PARTS = ("weights", "optimizer", "buffers")

Holder = Start | Update | Saved
ByRank = Mapping[int, Start] | Mapping[int, Update]


class Comparison:
    """The comparisons in one trace, counted in `tally`. Call `tell` at the end to report gaps."""

    def __init__(self, tally: Tally, trace: Trace) -> None:
        self.trace = trace
        self._tally = tally
        self._recorded = missing.recorded(trace)
        self._gaps = missing.Gaps()
        self._in_pieces = keys_in_pieces(trace)

    def tell(self) -> None:
        """Count as missing the parts that some ranks did not record."""
        self._gaps.tell(self._tally)

    def is_sharded(self, by_rank: ByRank) -> bool:
        """Return whether the optimizer state is sharded over ranks (ZeRO-1), and note it if so.

        It is sharded if no rank has all of it. If one rank has, the others lost what they lack.
        """
        names_of = [set(holder.optimizer) for holder in by_rank.values()]
        everything = set().union(*names_of)
        sharded = all(names < everything for names in names_of)
        if sharded:
            self._tally.note(
                "optimizer state is sharded over ranks: only what two of them hold was compared"
            )
        return sharded

    def compare(
        self, part: str, expected: Holder, got: Holder, message: str, *, sharded: bool, step: int
    ) -> None:
        """Compare a part of two states. Of sharded optimizer state compare what both hold."""
        left, right = getattr(expected, part), getattr(got, part)
        bare = got if left else expected
        if bool(left) != bool(right) and missing.is_unknown(self._recorded, bare, part):
            self._miss(bare, part, step)
            return
        if sharded and part == "optimizer":
            left, right = (
                {name: record for name, record in one.items() if name in other}
                for one, other in ((left, right), (right, left))
            )
        place = {**self._place, "step": step, "rank": got.rank}
        closeness.compare_exact(self._tally, left, right, message, **place)

    def compare_ranks(self, step: int, by_rank: ByRank, parts: Sequence[str]) -> None:
        """Compare each rank with the state that most ranks hold, to name the rank that deviates.

        Of two ranks either may deviate, unless what they recorded in the step tells which. A rank
        with an unknown part is counted as missing.
        """
        if len(by_rank) < 2:
            return
        sharded = "optimizer" in parts and self.is_sharded(by_rank)
        for part in parts:
            tensors_of: dict[int, Tensors] = {
                rank: getattr(by_rank[rank], part) for rank in sorted(by_rank)
            }
            if part == "optimizer" and self._in_pieces:
                tensors_of = {rank: self._whole(state) for rank, state in tensors_of.items()}
            apart = sharded and part == "optimizer"
            if not apart:
                tensors_of = self._known(part, step, by_rank, tensors_of)
            for name in dict.fromkeys(name for tensors in tensors_of.values() for name in tensors):
                self._compare_tensor(
                    step, part, name, _sharers(tensors_of, name) if apart else tensors_of
                )

    def _whole(self, state: Tensors) -> Tensors:
        """Return optimizer state without the keys of which each rank holds a piece; note them."""
        keys = ", ".join(sorted(self._in_pieces))
        self._tally.note(f"each rank holds a piece of the optimizer's {keys}: not compared")
        return {name: item for name, item in state.items() if _key(name) not in self._in_pieces}

    def _known(
        self, part: str, step: int, by_rank: ByRank, tensors_of: Mapping[int, Tensors]
    ) -> dict[int, Tensors]:
        """Return `tensors_of` without the ranks whose part is unknown: {} if none recorded it."""
        anyone = any(tensors_of.values())
        if not (anyone or self._is_due(part, by_rank)):
            return {}
        known = {}
        for rank, tensors in tensors_of.items():
            holder = by_rank[rank]
            if tensors or (anyone and not missing.is_unknown(self._recorded, holder, part)):
                known[rank] = tensors
            else:
                self._miss(holder, part, step)
        return known

    def _is_due(self, part: str, by_rank: ByRank) -> bool:
        """Return whether ranks must hold a part: weights always, other parts after a step only.

        Those are optimizer state, if the workers keep any, and parts that any update recorded.
        """
        if part == "weights":
            return True
        stepped = any(isinstance(holder, Update) for holder in by_rank.values())
        kept = self.trace.traits.updates == "workers"
        traits, optimizer = self.trace.traits, self.trace.scenario.optimizer
        known = traits.rule == "known" and traits.steps == "model" and optimizer != "sgd"
        stateful = part == "optimizer" and kept and known
        recorded = any(kind is Update and part == there for kind, _, there in self._recorded)
        return stepped and (stateful or recorded)

    def _miss(self, holder: Holder, part: str, step: int) -> None:
        fact = facts.of_state(type(holder).__name__, part)
        self._gaps.add(f"recorded no {part}", fact, rank=holder.rank, step=step)

    def _compare_tensor(self, step: int, part: str, name: str, held: Mapping[int, Tensors]) -> None:
        digests = {rank: t[name].digest if name in t else "absent" for rank, t in held.items()}
        usual = Counter(digests.values()).most_common(2)
        model = next(rank for rank, digest in digests.items() if digest == usual[0][0])
        is_known = len(usual) < 2 or usual[0][1] > usual[1][1]  # the minority deviates
        for rank in (rank for rank in digests if rank != model):
            wrong, right, words, known = rank, model, "", is_known
            if digests[rank] != digests[model] and self._tally.would_keep(step):
                blame = culprit.of(self.trace, step, name, model, rank)
                words = blame.words
                if blame.rank == model:
                    wrong, right = model, rank
                known = is_known or blame.rank is not None
            due, got = (
                {name: tensors[name]} if name in tensors else {}
                for tensors in (held[right], held[wrong])
            )
            message = f"rank {wrong} and rank {right} hold different {part}"
            place = {**self._place, "step": step, "rank": wrong}
            place |= {} if known else {"or_rank": right}
            closeness.compare_exact(self._tally, due, got, message, words=words, **place)

    @property
    def _place(self) -> dict[str, Any]:
        """The fields of a counterexample that are the same for the whole run."""
        return {"scenario": self.trace.scenario, "shapes": self.trace.shapes}


def keys_in_pieces(trace: Trace) -> set[str]:
    """Return the keys of a user's optimizer state of which each rank may hold a piece (ZeRO-1).

    They have another number of elements than their parameter, and differ between ranks.
    """
    if trace.scenario.workload != "own":
        return set()
    by_rank = next((held for _, held in evidence.ranks_by_step(trace) if len(held) > 1), {})
    keys = set()
    for name in {name for update in by_rank.values() for name in update.optimizer}:
        held = [u.optimizer[name] for u in by_rank.values() if name in u.optimizer]
        weights = [u.weights.get(name.partition("/")[0]) for u in by_rank.values()]
        differ = len({record.digest for record in held}) > 1
        if differ and (due := _sizes(weights)) and not _sizes(held) <= {1, *due}:
            keys.add(_key(name))
    return keys


def _sizes(records: Iterable[TensorRecord | None]) -> set[int]:
    """Return the numbers of elements of tensors whose values were recorded."""
    values = (None if record is None else record.values() for record in records)
    return {known.size for known in values if known is not None}


def _key(name: str) -> str:
    """Return the key of optimizer state, whose name is `parameter/key`."""
    return name.partition("/")[2]


def _sharers(tensors_of: Mapping[int, Tensors], name: str) -> dict[int, Tensors]:
    """Return the ranks that hold sharded tensor `name`; all if just one of 3 or more lacks it."""
    sharers = {rank: tensors for rank, tensors in tensors_of.items() if name in tensors}
    return dict(tensors_of) if len(tensors_of) - 1 == len(sharers) > 1 else sharers
