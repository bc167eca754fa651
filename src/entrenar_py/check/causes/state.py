"""Compare training state that must be equal, part by part, and say which rank is wrong.

The parts are weights, optimizer state and buffers. A state belongs to a rank, at its start or after
a step, or to a checkpoint. If two ranks differ, their records of the step decide which is wrong:
the gradients that they applied, their learning rates, and whether their updates follow from these.
If the records don't decide, either rank may be wrong.

Buffers that depend on a rank's own samples, such as BatchNorm's running statistics, may differ
between ranks. But one rank's buffers must be the same in two runs, and after a resume. That is
judged for the lowest rank, since scripts save its buffers for all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import rounding_bounds, update_rule
from entrenar_py.check.evidence import closeness, factors, facts, missing, step_sums
from entrenar_py.shared.trace import Noticed, Saved, Start, TensorRecord, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

PARTS = ("weights", "optimizer", "buffers")

Holder = Start | Update | Saved
ByRank = Mapping[int, Start] | Mapping[int, Update]


class Comparison:
    """Compares states within one trace, and counts the comparisons in `tally`.

    Call `tell` at the end to report what some ranks did not record.
    """

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
        """Return whether optimizer state is sharded over ranks (ZeRO-1). If it is, add a note.

        It is sharded if no rank has all of it. If one rank has all of it, the others lost what they
        lack.
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
        """Compare a part of two states. Of sharded optimizer state, compare what both have."""
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
        """Compare each rank with the state of the majority, to name the rank that deviates.

        Of two ranks either may deviate, unless their records of the step decide. A rank with an
        unknown part is counted as missing.
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
        keys = ", ".join(sorted(self._in_pieces))
        self._tally.note(f"each rank holds a piece of the optimizer's {keys}: not compared")
        return {name: item for name, item in state.items() if _key(name) not in self._in_pieces}

    def _known(
        self, part: str, step: int, by_rank: ByRank, tensors_of: Mapping[int, Tensors]
    ) -> dict[int, Tensors]:
        """Return `tensors_of` for the ranks with a known part; {} if none recorded it.

        The other ranks are counted as missing.
        """
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
        """Return whether ranks must record a part: weights always, other parts only after a step.

        Other parts are optimizer state, if the workers keep any, and parts that any update
        recorded.
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

    def _compare_tensor(
        self, step: int, part: str, name: str, tensors_of: Mapping[int, Tensors]
    ) -> None:
        digests = {
            rank: t[name].digest if name in t else "absent" for rank, t in tensors_of.items()
        }
        usual = Counter(digests.values()).most_common(2)
        model = next(rank for rank, digest in digests.items() if digest == usual[0][0])
        is_known = len(usual) < 2 or usual[0][1] > usual[1][1]  # the minority deviates
        for rank in (rank for rank in digests if rank != model):
            wrong, right, words, known = rank, model, "", is_known
            if digests[rank] != digests[model] and self._tally.would_keep(step):
                blame = blame_of(self.trace, step, name, model, rank)
                words = blame.words
                if blame.rank == model:
                    wrong, right = model, rank
                known = is_known or blame.rank is not None
            due, got = (
                {name: tensors[name]} if name in tensors else {}
                for tensors in (tensors_of[right], tensors_of[wrong])
            )
            message = f"rank {wrong} and rank {right} hold different {part}"
            place = {**self._place, "step": step, "rank": wrong}
            place |= {} if known else {"or_rank": right}
            closeness.compare_exact(self._tally, due, got, message, words=words, **place)

    @property
    def _place(self) -> dict[str, Any]:
        return {"scenario": self.trace.scenario, "shapes": self.trace.shapes}


def keys_in_pieces(trace: Trace) -> set[str]:
    """Return the keys of a user's optimizer state that ranks may have in pieces (ZeRO-1).

    The state under such a key differs between ranks, and in its number of elements from its
    parameter.
    """
    if trace.scenario.workload != "own":
        return set()
    by_rank = next(
        (records for _, records in evidence.ranks_by_step(trace) if len(records) > 1), {}
    )
    keys = set()
    for name in {name for update in by_rank.values() for name in update.optimizer}:
        records = [u.optimizer[name] for u in by_rank.values() if name in u.optimizer]
        weights = [u.weights.get(name.partition("/")[0]) for u in by_rank.values()]
        differ = len({record.digest for record in records}) > 1
        if differ and (due := _sizes(weights)) and not _sizes(records) <= {1, *due}:
            keys.add(_key(name))
    return keys


def _sizes(records: Iterable[TensorRecord | None]) -> set[int]:
    values = (None if record is None else record.values() for record in records)
    return {known.size for known in values if known is not None}


def _key(name: str) -> str:
    return name.partition("/")[2]


def _sharers(tensors_of: Mapping[int, Tensors], name: str) -> dict[int, Tensors]:
    sharers = {rank: tensors for rank, tensors in tensors_of.items() if name in tensors}
    return dict(tensors_of) if len(tensors_of) - 1 == len(sharers) > 1 else sharers


# --- which of two ranks is wrong ------------------------------------------------------------------


Vector = NDArray[Any]

_ULP = 2.0**-23
_GRADIENT_BOUND = rounding_bounds.GRADIENT_BOUND


@dataclass(frozen=True)
class Blame:
    """Which rank is wrong (None: unknown), and the reason in words, or ""."""

    rank: int | None = None
    words: str = ""


def blame_of(trace: Trace, step: int, name: str, usual: int, other: int) -> Blame:
    """Return which of the ranks `usual` and `other` made tensor `name` differ in `step`.

    The optimizer's state of a parameter has the parameter's name and a key: `weight/exp_avg`.
    """
    by_rank = evidence.updates(trace).get(step, {})
    pair = (usual, other)
    if not all(rank in by_rank for rank in pair):
        return Blame()
    parameter = name if name in by_rank[usual].gradient else name.rpartition("/")[0]
    for decide in (_by_edit, _by_gradient, _by_rate, _by_rule):
        blame = decide(trace, step, parameter, pair)
        if blame is not None:
            return blame
    words = _movement(trace, step, parameter, pair)
    return Blame(words=f"rank {other} {words}" if words else "")


def _by_edit(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    by_rank = evidence.updates(trace)[step]
    edited = [rank for rank in pair if name in by_rank[rank].edited]
    if len(edited) != 1:
        return None
    return Blame(edited[0], f"rank {edited[0]} changed it outside of the optimizer before the step")


def _by_gradient(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    """Blame by the applied gradients, compared with each other and with those of micro-batches.

    Return None if they are equal or unknown.
    """
    by_rank = evidence.updates(trace)[step]
    left, right = (_vector(by_rank[rank].gradient, name) for rank in pair)
    if left is None or right is None or left.shape != right.shape:
        lacking = [rank for rank in pair if name not in by_rank[rank].gradient]
        if len(lacking) == 1:
            return Blame(words=f"rank {lacking[0]} applied no gradient of {name}")
        return None
    if np.array_equal(left, right):
        return None
    follows = [_follows(trace, step, name, rank) for rank in pair]
    if all(follow == "all" for follow in follows) or not any(follows):
        words = factors.of(left, right, trace.scenario, _GRADIENT_BOUND)
        relation = f": {words}" if words else ""
        words = f"rank {pair[1]} applied a different gradient from rank {pair[0]}{relation}"
        return Blame(words=words)
    if all(follow == "own" for follow in follows):
        return Blame(words="each rank applied the gradient of its own samples alone")
    wrong = [rank for rank, follow in zip(pair, follows, strict=True) if follow != "all"]
    if len(wrong) != 1:
        return Blame(words=f"rank {pair[1]} applied a different gradient from rank {pair[0]}")
    (rank,) = wrong
    relation = (
        "the gradient of its own samples alone"
        if "own" in follows
        else "not the gradient of all samples"
    )
    return Blame(rank, f"the gradient that rank {rank} applied is {relation}")


def _follows(trace: Trace, step: int, name: str, rank: int) -> str:
    """Return "all" or "own": the samples with the gradient that a rank applied; "" if unclear.

    These are the samples of all ranks, or only the rank's own. The applied gradient may be a
    positive multiple of theirs.
    """
    by_rank = evidence.updates(trace)[step]
    applied = _vector(by_rank[rank].gradient, name)
    shards = evidence.shards(trace).get(step, ())
    own = [shard for shard in shards if shard.rank == rank]
    if applied is None or not own:
        return ""
    for word, chosen in (("all", shards), ("own", own)):
        given = (step_sums.total(by_rank, chosen) or {}).get(name)
        if given is not None and given.shape == applied.shape:
            factor = factors.ratio(given, applied, _GRADIENT_BOUND)
            if factor is not None and factor > 0:
                return word
    return ""


def _by_rate(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    by_rank = evidence.updates(trace)[step]
    usual, other = (by_rank[rank].rate_of(name) for rank in pair)
    if usual == other:
        return None
    return Blame(
        words=f"the learning rate is {other:.6g} on rank {pair[1]}, {usual:.6g} on rank {pair[0]}"
    )


def _by_rule(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    """Blame the rank with an update that does not follow from its gradient, if the other's does."""
    kept_to = [update_rule.is_followed(trace, step, rank, name) for rank in pair]
    if sorted(map(str, kept_to)) != ["False", "True"]:
        return None
    wrong = pair[kept_to.index(False)]
    words = _movement(trace, step, name, (pair[kept_to.index(True)], wrong))
    told = f": it {words}" if words else ""
    return Blame(wrong, f"rank {wrong}'s update does not follow from its gradient{told}")


def _movement(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> str:
    """Return how far the second rank's weights moved, compared with the first's; "" if unclear."""
    before = [_weights_before(trace, step, name, rank) for rank in pair]
    by_rank = evidence.updates(trace)[step]
    after = [_vector(by_rank[rank].weights, name) for rank in pair]
    if any(one is None for one in (*before, *after)):
        return ""
    usual, other = (
        np.asarray(now, np.float64) - np.asarray(then, np.float64)
        for now, then in zip(after, before, strict=True)
    )
    moved = float(np.linalg.norm(usual))
    noise = 4 * _ULP * float(np.linalg.norm(np.asarray(after[0], np.float64)))
    if not moved or not math.isfinite(moved) or noise > moved / 100:
        return ""
    if not other.any():
        return "did not move it"
    words = factors.multiple(usual, other, trace.scenario, noise / moved, measure="far")
    return f"moved it {words}" if words else ""


def _weights_before(trace: Trace, step: int, name: str, rank: int) -> Vector | None:
    before = evidence.updates(trace).get(step - 1, {}).get(rank)
    if before is not None:
        return _vector(before.weights, name)
    start = update_rule.start_of(trace, step, rank)
    return None if start is None else _vector(start.weights, name)


def _vector(tensors: Tensors, name: str) -> Vector | None:
    return tensors[name].vector() if name in tensors else None


# --- buffers that follow from the samples of a rank -----------------------------------------------


_AGREED_MIN = 2  # steps; in fewer, ranks with different samples may agree by chance


def tell_local_buffers(tally: Tally, trace: Trace) -> None:
    """Note which buffers are not compared between ranks. Report those that began to differ."""
    names: dict[str, None] = {}
    agreed: dict[str, int] = {}  # name -> number of steps that changed it alike on all ranks
    last = {name: one.digest for start in trace.of(Start) for name, one in start.local.items()}
    for step, by_rank in evidence.ranks_by_step(trace):
        if len(by_rank) < 2:
            continue
        for name, record in evidence.any_rank(by_rank).local.items():
            names[name] = None
            before, last[name] = last.get(name), record.digest
            if _agree(name, by_rank):  # while a module is frozen, its buffers stay as they are
                agreed[name] = agreed.get(name, 0) + (record.digest != before)
            elif agreed.pop(name, 0) >= _AGREED_MIN and _is_float(name, by_rank):
                tally.miss(
                    f"{name} agreed on all ranks until step {step}, and differs from then on: "
                    f"if ranks synchronise it, declare {_declaration(name)}"
                )
    if names:
        tally.note(
            "these buffers are not compared between ranks, since a rank's own samples may change "
            f"them: {listed([*names], most=4)}; if all ranks change them in the same way, "
            f"declare {_declaration(next(iter(names)))}"
        )


def compare_local_buffers(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the lowest rank's local buffers after each step that both runs took."""
    expected = evidence.updates(model)
    for step, by_rank in evidence.ranks_by_step(trace):
        lowest = evidence.any_rank(by_rank)
        other = expected.get(step, {}).get(lowest.rank)
        if other is None or not other.local or not lowest.local:
            continue
        place = evidence.place(trace, lowest)
        closeness.compare_exact(tally, other.local, lowest.local, message, **place)


def _declaration(name: str) -> str:
    return f'observe(..., synchronised_buffers=("{name}",))'


def _agree(name: str, by_rank: Mapping[int, Update]) -> bool:
    records = [update.local.get(name) for update in by_rank.values()]
    return len({record.digest if record else "absent" for record in records}) == 1


def _is_float(name: str, by_rank: Mapping[int, Update]) -> bool:
    return evidence.any_rank(by_rank).local[name].dtype.startswith("float")


# --- weights that are no good start ---------------------------------------------------------------


_INITIALISE = "initialise every parameter after to_empty() (reset_parameters), or load a checkpoint"


def judge_first_weights(tally: Tally, traces: Iterable[Trace]) -> None:
    """Check that no run trains from weights with a NaN or Inf.

    A run that stopped at such weights is reported, too.
    """
    for trace in traces:
        for look, words in (("nan", "NaN"), ("inf", "Inf")):
            places = _places(trace, look)
            if not places:
                continue
            ranks = set().union(*places.values())
            message = (
                f"weights hold {words} before the first step ({listed([*places], most=3)} on "
                f"{missing.named(ranks)}): {_INITIALISE}"
            )
            if trace.of(Update):
                place = {"step": -1, "rank": min(ranks), "scenario": trace.scenario}
                tally.check(False, message, tensor=next(iter(places)), **place)
            else:
                tally.miss(message)


def tell_peculiar(tally: Tally, trace: Trace) -> None:
    """Note matrices that start from zero, and report tensors that look uninitialised.

    A matrix may rightly be zero (LoRA's B, the last layer of a block). But if all matrices of
    several layers are zero, no layer gets a gradient.
    """
    unwritten = _places(trace, "uninitialised")
    if unwritten:
        holders = set().union(*unwritten.values())
        tally.miss(
            f"{listed([*unwritten], most=3)} look uninitialised on {missing.named(holders)}: "
            f"before the first step they hold numbers that no initialisation draws; {_INITIALISE}"
        )
    ranks = {event.rank for event in trace.of(Noticed)}
    zero = [name for name, ranks_of in _places(trace, "zero").items() if ranks_of == ranks]
    if not zero:
        return
    if len(zero) > 1 and not _other_matrices(trace, zero):
        tally.miss(
            f"all matrices are zero before the first step ({listed(zero, most=3)}), so that no "
            f"layer that follows another has a gradient: {_INITIALISE}"
        )
    else:
        tally.note(f"zero before the first step: {listed(zero, most=3)}")


def _places(trace: Trace, look: str) -> Mapping[str, set[int]]:
    places: dict[str, set[int]] = {}
    for event in trace.of(Noticed):
        for name, seen in event.peculiar.items():
            if seen == look and not event.step:
                places.setdefault(name, set()).add(event.rank)
    return places


def _other_matrices(trace: Trace, zero: Iterable[str]) -> bool:
    shapes = [start.shapes for start in trace.of(Start) if start.shapes]
    names = {name for known in shapes for name, shape in known.items() if len(shape) > 1}
    return not shapes or bool(names - set(zero))
