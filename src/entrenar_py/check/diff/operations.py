"""The first operation in which two runs differ, between two borders that both runs have.

The operations between the last border that agrees and the first that doesn't are aligned by their
names. Operations that only one run has are harmless if a later pair agrees again, as if a product
was divided differently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from entrenar_py.check.diff import judge
from entrenar_py.check.diff.alignment import Pair, align
from entrenar_py.check.diff.judge import Difference, Ranks
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border

Operation = list[Border]  # its outputs
_WINDOW_MAX = 5000  # operations that are aligned
_FRACTION = re.compile(r"(?<![\w.])-?(?:inf|\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+))(?![\w.])")
_WORD = re.compile(r"(?:, )?(?:\w+=)?'\w*'")  # as of another approximation; a default isn't shown
_ROUNDED = 1e-5  # relative
_ADDS = ("add(", "add_(")
# Parts of names of operations in which threads may add to the same element.
_UNORDERED = (
    *("index_put", "index_add", "scatter", "put_", "embedding_bag", "bincount", "histc"),
    *("grid_sampler", "upsample", "max_pool3d", "adaptive_", "_pad", "ctc_loss", "nll_loss2d"),
)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first operation that differs, as each run has it; "" where a run has none.

    `where` is the path of the module that calls it, "" for the script itself. A caller is the
    script's line from which a library's site was reached, "" if the site is the script's own. With
    `other_factors` both runs call it, with inputs of the same bits, and with another scale, eps or
    the like, or another variant by its name.
    """

    where: str
    first: str = ""
    second: str = ""
    first_site: str = ""
    second_site: str = ""
    first_caller: str = ""
    second_caller: str = ""
    phase: str = "forward"
    other_factors: bool = False

    @property
    def is_alike(self) -> bool:
        """Whether both runs call it with the same arguments, apart from tensors."""
        return self.first == self.second


def culprit(
    first: Ranks,
    second: Ranks,
    disturbed: Sequence[Ranks],
    difference: Difference,
    *,
    in_bits: bool = False,
) -> Culprit | None:
    """Return the first operation that explains a difference; None if none was recorded.

    The runs have the operations of the difference's step. Each difference of an operation is
    measured by the operations of the `disturbed` runs, unless any difference `in_bits` counts. If
    no output differs, it is the first operation with other arguments.
    """
    own, far = _window(first, second, difference)
    relative = _relative(difference)
    spreads = _spreads(first, disturbed, difference, own)
    names, others = [[one[0].name for one in many] for many in (own, far)]
    waiting: Culprit | None = None
    by_arguments: Culprit | None = None
    for tag, low, high, other_low, other_high in SequenceMatcher(
        None, names, others, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            if waiting is None:
                waiting = _between(own[low:high], far[other_low:other_high])
            continue
        for at in range(high - low):
            operation, other = own[low + at], far[other_low + at]
            differs = _differs(operation, other, spreads.get(low + at, 0.0), relative)
            if differs or (in_bits and operation[0].digest != other[0].digest):
                named = waiting or _between([operation], [other])
                named = _new_term(named, first, second, difference) or named
                # Inputs with the same bits: no operation before it differs in any.
                same = in_bits and waiting is None
                return replace(named, other_factors=same and _other_factors(named))
            if operation[0].numbers is not None:
                waiting = None
            if by_arguments is None and operation[0].text != other[0].text:
                by_arguments = _between([operation], [other])
    if waiting is not None:
        waiting = _new_term(waiting, first, second, difference) or waiting
    return waiting or by_arguments


def _new_term(
    named: Culprit, first: Ranks, second: Ranks, difference: Difference
) -> Culprit | None:
    """Return the operation that made a new term of a gradient, if `named` adds one; else None.

    Autograd adds up what all uses of a value send back. If only one run adds there, only that run
    has such a use. What came from it was computed in this pass, by operations that only it has.
    """
    only_first, only_second = not named.second, not named.first
    is_sum = (named.first or named.second).startswith(_ADDS)
    if named.phase != "backward" or not is_sum or not (only_first or only_second):
        return None
    own, far = _passes(first, second, difference)
    names, others = [[one[0].name for one in many] for many in (own, far)]
    for tag, low, high, other_low, other_high in SequenceMatcher(
        None, names, others, autojunk=False
    ).get_opcodes():
        if tag == "delete" and only_first:
            return _between(own[low:high], [])
        if tag == "insert" and only_second:
            return _between([], far[other_low:other_high])
    return None


def unordered(first: Ranks, second: Ranks, difference: Difference) -> Culprit | None:
    """Return the first operation before a difference that may add in no fixed order."""
    for operation in _window(first, second, difference)[0]:
        if any(word in operation[0].name for word in _UNORDERED):
            return _between([operation], [operation])
    return None


def _window(
    first: Ranks, second: Ranks, difference: Difference
) -> tuple[list[Operation], list[Operation]]:
    """Return the operations of both runs between the last border that agrees and the difference."""
    border, pairs = difference.border, _until(first, second, difference)
    if not pairs:
        return [], []
    end = pairs.pop()
    earlier = [pair for pair in pairs if pair.second.order < end.second.order]
    begin = earlier[-1] if earlier else None
    rank, low = difference.rank, begin.first.order if begin else 0
    other_low = begin.second.order if begin else 0
    if border.kind == border_file.BUFFER:  # changed in a forward pass, and recorded after the step
        low = other_low = 0
    own = _between_orders(first, rank, low, end.first.order)
    far = _between_orders(second, end.second_rank, other_low, end.second.order)
    if border.kind == border_file.BUFFER:
        own, far = ([one for one in many if one[0].where == border.where] for many in (own, far))
    return own, far


def _passes(
    first: Ranks, second: Ranks, difference: Difference
) -> tuple[list[Operation], list[Operation]]:
    """Return the operations of both runs in the backward pass before a difference."""
    pairs = _until(first, second, difference)
    if not pairs:
        return [], []
    end = pairs[-1]
    begins = (pair for pair in reversed(pairs) if pair.first.kind == border_file.LOSS)
    begin = next(begins, pairs[0])
    own = _between_orders(first, difference.rank, begin.first.order, end.first.order)
    far = _between_orders(second, end.second_rank, begin.second.order, end.second.order)
    return own, far


def _until(first: Ranks, second: Ranks, difference: Difference) -> list[Pair]:
    """Return the pairs of a step up to a difference, which is the last of them."""
    pairs = [pair for pair in align(first, second).pairs if pair.rank == difference.rank]
    border = difference.border
    pairs = [pair for pair in pairs if pair.first.step == border.step]
    at = next((n for n, pair in enumerate(pairs) if _is(pair, border)), None)
    if at is None:  # only one run has this border
        following = [n for n, pair in enumerate(pairs) if pair.first.order > difference.order]
        at = following[0] if following else len(pairs) - 1
    return pairs[: at + 1]


def _is(pair: Pair, border: Border) -> bool:
    return (
        pair.first.micro_batch == border.micro_batch
        and pair.first.key == border.key
        and pair.first.phase == border.phase
    )


def _between_orders(ranks: Ranks, rank: int, low: int, high: int) -> list[Operation]:
    operations: list[Operation] = []
    borders = next((one.borders for one in ranks if one.rank == rank), ranks[0].borders)
    for border in borders:
        if border.kind == border_file.OPERATION and low < border.order < high:
            if border.part == "0" or not operations:
                operations.append([])
            operations[-1].append(border)
    return operations[-_WINDOW_MAX:]


def _relative(difference: Difference) -> float:
    scale = difference.border.scale
    return difference.spread / scale if scale > 0 else 0.0


def _spreads(
    first: Ranks, disturbed: Sequence[Ranks], difference: Difference, own: Sequence[Operation]
) -> dict[int, float]:
    """Return by the index of an operation the largest distance of its outputs when disturbed."""
    largest: dict[int, float] = {}
    for run in disturbed:
        mine, theirs = _window(first, run, difference)
        names, others = [[one[0].name for one in many] for many in (mine, theirs)]
        if names == others == [one[0].name for one in own]:
            for index, pair in enumerate(zip(mine, theirs, strict=True)):
                away = max(_distances(*pair), default=0.0)
                largest[index] = max(largest.get(index, 0.0), away)
    return largest


def _distances(one: Operation, other: Operation) -> Iterator[float]:
    for border, partner in zip(one, other, strict=False):
        if border.numbers is not None and partner.numbers is not None:
            yield judge.distance(border, partner)


def _differs(one: Operation, other: Operation, spread: float, relative: float) -> bool:
    for border, partner in zip(one, other, strict=False):
        away = judge.distance(border, partner)
        # A masked score has an infinite norm, which is the measure of no rounding.
        scale = border.scale if math.isfinite(border.scale) else 0.0
        limit = max(
            judge.MULTIPLE * max(spread, relative * scale),
            judge.FLOOR * judge.rounding(border, partner),
        )
        if away > limit:
            return True
    return False


def _other_factors(culprit: Culprit) -> bool:
    """Return whether the calls differ in words, or in fractions by more than their rounding.

    No other argument may differ. A word in an operation of torch names what is computed, and never
    a kernel.
    """
    texts = culprit.first, culprit.second
    plain = [_WORD.sub("", text) for text in texts]
    if _FRACTION.sub("", plain[0]) != _FRACTION.sub("", plain[1]):
        return False
    both = (map(float, _FRACTION.findall(text)) for text in plain)
    apart = any(not math.isclose(a, b, rel_tol=_ROUNDED) for a, b in zip(*both, strict=True))
    return apart or _WORD.findall(texts[0]) != _WORD.findall(texts[1])


def _between(own: Sequence[Operation], far: Sequence[Operation]) -> Culprit:
    first, second = own[0][0] if own else None, far[0][0] if far else None
    known = first or second
    assert known is not None, "one of both has an operation"
    return Culprit(
        where=known.where,
        first=first.text if first else "",
        second=second.text if second else "",
        first_site=first.site if first else "",
        second_site=second.site if second else "",
        first_caller=first.caller if first else "",
        second_caller=second.caller if second else "",
        phase=known.phase,
    )
