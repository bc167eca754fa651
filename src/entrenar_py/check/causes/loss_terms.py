"""Judge by which numbers a script divides its micro-batches' losses, if it doesn't report them.

The value on which `backward` is called is a sum of terms, each over a number of elements
(`Shard.terms`, read from autograd's graph). Over a step, the elements must count as in one mean, or
as in one sum. A division by the number of micro-batches also shows that a mean is meant. Any other
factor may be the weight of one of several losses.

If a script divides by nothing, it may want the sum of its micro-batches' means, so nothing is
decided. But if the micro-batches come from one loader and ranks take the mean, a sum is not meant.
A script may also divide by the number of micro-batches although the library that calls `backward`
does, too: then the loss is divided twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from entrenar_py.check import evidence
from entrenar_py.check.evidence import facts, missing, step_sums
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed, named

# For each step: rank -> update, and the micro-batches.
Parts = list[tuple[Mapping[int, Update], list[Shard]]]
# A number of micro-batches. A divisor of 2 is recorded twice only if the script's text uses 2 as
# their number.
_PAIR = 2
_STEPS_MIN = 3  # in fewer steps, two sequences of numbers may be in proportion by chance
_BOUND = 1e-3  # relative: numbers are Python's or float32, and different counts differ by more


@dataclass(frozen=True)
class _Term:
    """A term of a loss: `count` elements (0 if unknown), each with the factor `share`.

    If the count is unknown, `share` is the factor of the whole term. `divisors` are the numbers by
    which the term was divided, without the one that makes it a mean over its elements. A mean times
    the number of its elements is their sum.
    """

    count: float
    share: float
    divisors: tuple[float, ...]
    is_mean: bool

    @classmethod
    def of(cls, recorded: Sequence[float], rows: int) -> _Term:
        count, share, *divisors = recorded
        own = next((n for n in (count, float(rows)) if n and n in divisors), None)
        if own is not None:
            divisors.remove(own)
        is_sum = count and (own is None or (own > 1 and alike(abs(share), 1.0)))
        return cls(count, abs(share), tuple(divisors), is_mean=not is_sum)

    @property
    def whole(self) -> float:
        """The weight of the term's mean: share times number of elements."""
        return self.share * (self.count or 1.0)

    def is_divided_by(self, number: int, *, times: int = 1) -> bool:
        return sum(alike(divisor, number) for divisor in self.divisors) >= times


@dataclass(frozen=True)
class _Step:
    """A step of a run: rank -> micro-batch -> terms of its loss.

    All micro-batches have as many terms.
    """

    update: Update
    by_rank: Mapping[int, Sequence[Sequence[_Term]]]
    shards: Sequence[Shard]
    divisor: float | None  # the number by which the sum over all micro-batches was divided

    @property
    def sizes(self) -> set[int]:
        """The numbers of micro-batches that ranks have."""
        return {len(micro_batches) for micro_batches in self.by_rank.values()}

    @property
    def columns(self) -> list[list[_Term]]:
        """For each term, its instances in all micro-batches of all ranks."""
        every = [terms for micro_batches in self.by_rank.values() for terms in micro_batches]
        return [[*column] for column in zip(*every, strict=True)]

    @property
    def total(self) -> float:
        """The sum of the weights of all means."""
        return sum(term.whole for column in self.columns for term in column)

    @property
    def num_elements(self) -> float:
        """The number of elements of all first terms together; 0 if it is unknown."""
        counts = [term.count for term in self.columns[0]]
        return sum(counts) if all(counts) else 0.0

    def is_divided(self) -> bool:
        """Return whether each term is divided by the number of its rank's micro-batches."""
        columns = self.columns
        numbers = [len(own) for own in self.by_rank.values() for _ in own]
        # A mean of two losses is divided by 2, and so are the losses of two micro-batches.
        is_mean = all(alike(column[0].whole, columns[0][0].whole) for column in columns)
        return all(
            term.is_divided_by(number, times=1 + (is_mean and 1 < number == len(columns)))
            for column in columns
            for term, number in zip(column, numbers, strict=True)
        )

    def is_divided_twice(self) -> bool:
        """Return whether each loss is divided by the number of micro-batches once too often."""
        (number, *others), (terms, *further) = self.sizes, self.columns
        ranks = len(self.by_rank)
        is_averaged = self.divisor is not None and alike(self.divisor, ranks)
        # Halves of halves count like a mean that is added up over two ranks.
        is_known = self.parts() and not (number == ranks == _PAIR and is_averaged)
        if others or further or number < _PAIR or is_known:
            return False
        twice = (t.count and t.is_mean and t.is_divided_by(number, times=2) for t in terms)
        return all(twice) and bool(self._parts_of(number * self.total))

    def is_sum_of_means(self) -> bool:
        """Return whether ranks add up whole means over different samples, then average the sums."""
        number, ranks = max(self.sizes), len(self.by_rank)
        terms = [term for column in self.columns for term in column]
        wholes = (t.count > 1 and t.is_mean and not t.divisors and alike(t.whole, 1) for t in terms)
        is_averaged = self.divisor is not None and alike(self.divisor, ranks)
        is_known = len(self.sizes) == len(self.columns) == 1 and number not in {
            t.count for t in terms
        }
        return (
            ranks > 1
            and is_known
            and is_averaged
            and all(wholes)
            and step_sums.are_apart(self.shards)
        )

    def parts(self) -> set[str]:
        """Return what the micro-batches together are one mean of: `all` ranks, or `each` rank.

        `applied` means one mean after the division of the applied gradient. Several may be true.
        """
        if self._is_weight():
            return set()
        return self._parts_of(self.total) or self._parts_of(self._total_of_labels())

    def _total_of_labels(self) -> float:
        """Return the sum of the weights of all means, as shares of the labels before their shift.

        Before the shift each row has one more label, which is no target (`Trainer` divides by this
        number). Return NaN if there are several terms, or if elements are unknown or count
        unequally.
        """
        if len(self.columns) > 1 or not self.num_elements or not self.is_even():
            return math.nan
        rows = sum(len(shard.ids) for shard in self.shards)
        return self.total * (self.num_elements + rows) / self.num_elements

    def _parts_of(self, total: float) -> set[str]:
        known = {"all": 1, "each": len(self.by_rank), "applied": self.divisor or math.nan}
        return {name for name, number in known.items() if alike(total, number)}

    def is_even(self) -> bool:
        """Return whether all elements of a term count equally, as far as is known."""
        return all(
            alike(term.share, column[0].share) or not (term.count and column[0].count)
            for column in self.columns
            for term in column
        )

    def _is_weight(self) -> bool:
        terms = [term for column in self.columns for term in column]
        return self.sizes == {2} and not any(term.divisors or not term.is_mean for term in terms)

    def wholes(self, rank: int | None = None) -> list[float]:
        """Return for each term the sum of the weights of its means, for one rank or for all."""
        own = self.by_rank.values() if rank is None else [self.by_rank[rank]]
        every = [terms for micro_batches in own for terms in micro_batches]
        return [sum(term.whole for term in column) for column in zip(*every, strict=True)]

    def shares_of_sum(self) -> list[float] | None:
        """Return the factor of an element of each term if all terms are sums; otherwise None."""
        columns = self.columns
        is_sum = all(not term.is_mean for column in columns for term in column)
        even = all(alike(term.share, column[0].share) for column in columns for term in column)
        return [column[0].share for column in columns] if is_sum and even else None


def are_all(shards: Sequence[Shard], *, means: bool) -> bool:
    """Return whether all losses are known to be means over elements (with `means=False`: sums)."""
    return bool(shards) and all(
        shard.terms and all(_Term.of(term, len(shard.ids)).is_mean is means for term in shard.terms)
        for shard in shards
    )


def are_one_mean(shards: Sequence[Shard]) -> bool:
    """Return whether the losses of each rank together have the weight of one mean."""
    wholes: dict[int, list[list[float]]] = {}
    for shard in shards:
        own = [_Term.of(term, len(shard.ids)).whole for term in shard.terms]
        wholes.setdefault(shard.rank, []).append(own)
    return bool(wholes) and all(
        all(own) and alike(max(map(sum, zip(*own, strict=False))), 1) for own in wholes.values()
    )


def judge(tally: Tally, trace: Trace) -> None:
    """Judge a run step by step, if its losses are the values on which `backward` is called."""
    if trace.traits.losses != "backward":
        return
    for parts in _networks(trace).values():
        steps = [*_steps(parts)]
        for step in steps:
            _rows(tally, trace, step)
        _own_elements(tally, trace, steps)
        _short_steps(tally, trace, steps)
        _cut_windows(tally, trace, steps)
        _divided_afterwards(tally, trace, steps)
        counts = {len(held) for _, held in parts}
        if len(counts) > 1 and not _is_known(tally, trace, parts):
            told = f"steps have {' or '.join(map(str, sorted(counts)))} micro-batches"
            why = f"{told}, and it is unknown by which number each divides its losses"
            missing.ask(tally, why, facts.LOSS_AND_WEIGHT)


def require_other_numbers(tally: Tally, runs: Sequence[Trace]) -> None:
    """Report as missing what divides losses, if a rank always adds up equally many micro-batches.

    Different numbers of micro-batches would show what divides the losses.
    """
    known = [(run, _networks(run)) for run in runs if run.traits.losses == "backward"]
    for run, networks in known:
        for parts in networks.values():
            _divided_twice(tally, run, parts)
    for name in dict.fromkeys(name for _, networks in known for name in networks):
        own = [(run, networks[name]) for run, networks in known if name in networks]
        counts = {
            sum(shard.rank == one.rank for shard in held)
            for _, parts in own
            for _, held in parts
            if step_sums.are_apart(held)
            for one in held
        }
        if len(counts) != 1 or max(counts) < 2:
            continue
        if all(_is_known(tally, run, parts) for run, parts in own):
            continue
        if all(_are_of_unlike_loaders(parts) for _, parts in own):
            continue
        if {_adds_up_means(tally, run, parts) for run, parts in own} == {True}:
            continue
        why = f"a rank adds up {max(counts)} micro-batches in each step of every run, and "
        steps = [step for _, parts in own for step in _steps(parts)]
        missing.ask(tally, why + _open(steps), facts.LOSS_AND_WEIGHT)


def _open(steps: Sequence[_Step]) -> str:
    """Return a phrase about what is undecided in the losses of `steps` ([]: they are unknown)."""
    if not steps:
        return (
            "it is unknown by which number it divides their losses; put {accumulation} into the "
            "command"
        )
    if all(step.is_divided() or step.parts() for step in steps):
        counts = sorted({term.count for term in steps[0].columns[0]})
        return (
            f"those of {listed([f'{count:g}' for count in counts], most=3)} elements count "
            'equally: right if that is meant, observe(..., loss_over="micro-batch"), wrong if '
            "each element should count equally"
        )
    return (
        "they are added without division: right if their sum is meant, wrong if their mean is meant"
    )


def _is_known(tally: Tally, trace: Trace, parts: Parts) -> bool:
    """Return whether each step is a mean, or all are sums with elements that count equally."""
    steps = [*_steps(parts)]
    if not steps or len(steps) < len(parts):
        return False
    is_sum = _are_sums(steps)
    divided = all(step.is_divided() for step in steps)
    is_mean = divided or bool(set.intersection(*(step.parts() for step in steps)))
    is_mean = is_mean or _are_of_step(steps)
    is_even = trace.traits.loss_over == "micro-batch" or all(step.is_even() for step in steps)
    if is_sum or (is_mean and is_even):
        tally.compared += len(steps)
        return True
    return False


def are_means_of_steps(trace: Trace) -> bool:
    """Return whether all losses are known to be divided by the number of elements in their step."""
    networks = [(parts, [*_steps(parts)]) for parts in _networks(trace).values()]
    return bool(networks) and all(
        len(steps) == len(parts) and _are_of_step(steps) for parts, steps in networks
    )


def _are_of_step(steps: Sequence[_Step]) -> bool:
    """Return whether an element counts less, the more elements its step has."""
    return (
        len({step.num_elements for step in steps}) > 1
        and all(step.num_elements and step.is_even() for step in steps)
        and all(
            len(step.wholes()) == len(steps[0].wholes())
            and all(map(alike, step.wholes(), steps[0].wholes()))
            for step in steps
        )
    )


def _own_elements(tally: Tally, trace: Trace, steps: Sequence[_Step]) -> None:
    """Check that ranks with unequal numbers of elements don't count equally.

    This applies to ranks that add up micro-batches of unequal sizes so that each of their elements
    counts equally.
    """
    if trace.traits.loss_over == "micro-batch" or not _are_of_ranks(steps):
        return
    for step in steps:
        counts = {rank: _count(own) for rank, own in step.by_rank.items()}
        total = sum(counts.values())
        for rank, count in counts.items():
            due, got = count / total, 1 / len(counts)
            shard = next(shard for shard in step.shards if shard.rank == rank)
            tally.check(
                alike(got, due),
                f"the losses of rank {rank} count {got / due:.3g} times as much as its share of "
                f"{count:g} in {total:g} elements: each rank divides by its own number of "
                "elements; divide by the number on all ranks, summed by an all-reduce",
                expected=f"{due:.6g} of the step",
                got=f"{got:.6g} of the step",
                **evidence.place(trace, shard),
            )


def _are_of_ranks(steps: Sequence[_Step]) -> bool:
    """Return whether each rank takes one mean over micro-batches with unequally many elements."""
    first = steps[0].wholes(min(steps[0].by_rank)) if steps else []
    ranks = [(step.by_rank[rank], step.wholes(rank)) for step in steps for rank in step.by_rank]
    return (
        bool(first)
        and any(len({terms[0].count for terms in own}) > 1 for own, _ in ranks)
        and all(
            _is_even(own) and len(wholes) == len(first) and all(map(alike, wholes, first))
            for own, wholes in ranks
        )
    )


def _is_even(micro_batches: Sequence[Sequence[_Term]]) -> bool:
    return all(
        term.count and alike(term.share, column[0].share)
        for column in zip(*micro_batches, strict=True)
        for term in column
    )


def _count(micro_batches: Sequence[Sequence[_Term]]) -> float:
    return sum(terms[0].count for terms in micro_batches)


def _divided_afterwards(tally: Tally, trace: Trace, steps: Sequence[_Step]) -> None:
    """Check that a gradient of sums over elements is divided by the elements of the whole step.

    It may also be divided by one number in all steps. Different numbers are wrong if they are
    counts of elements that the script may have confused with those of the step.
    """
    got = [step.divisor or math.nan for step in steps]
    if not _are_sums(steps) or not all(step.num_elements for step in steps):
        return
    whole = [step.num_elements for step in steps]
    if _are_in_proportion(got, [1.0] * len(got)) or _are_in_proportion(got, whole):
        tally.compared += len(steps)
        return
    ranks = sorted(steps[0].by_rank)
    counts: dict[str, list[float]] = {
        "the last micro-batch of each rank alone": [_of_micro_batch(step, -1) for step in steps],
        "the first micro-batch of each rank alone": [_of_micro_batch(step, 0) for step in steps],
        "all steps so far": [*itertools.accumulate(whole)],
    }
    for rank in ranks if len(ranks) > 1 else ():
        own = [step.by_rank.get(rank, ()) for step in steps]
        counts[f"rank {rank} alone"] = [_count(micro_batches) for micro_batches in own]
        last = [_count(micro_batches[-1:]) for micro_batches in own]
        counts[f"the last micro-batch of rank {rank} alone"] = last
    name = next((name for name, other in counts.items() if _are_in_proportion(got, other)), None)
    if name is None:
        return
    at = max(range(len(steps)), key=lambda n: abs(counts[name][n] / whole[n] - 1))
    tally.check(
        False,
        f"the gradient, a sum over elements, is divided by the number of elements of {name} in "
        f"each step: {counts[name][at]:g} where the step has {whole[at]:g}",
        expected=f"{whole[at]:g}",
        got=f"{counts[name][at]:g}",
        **evidence.place(trace, steps[at].update),
    )


def _are_sums(steps: Sequence[_Step]) -> bool:
    sums = [step.shares_of_sum() for step in steps]
    first = sums[0] if sums else None
    return first is not None and all(
        shares is not None and len(shares) == len(first) and all(map(alike, shares, first))
        for shares in sums
    )


def _of_micro_batch(step: _Step, index: int) -> float:
    return sum(own[index][0].count for own in step.by_rank.values())


def _are_in_proportion(numbers: Sequence[float], others: Sequence[float]) -> bool:
    known = len(numbers) >= _STEPS_MIN and all(map(math.isfinite, numbers)) and all(others)
    return known and all(
        alike(number / other, numbers[0] / others[0])
        for number, other in zip(numbers, others, strict=True)
    )


def _are_of_unlike_loaders(parts: Parts) -> bool:
    """Return whether each of a rank's micro-batches comes from its own loader, in every step.

    Their losses are then different losses, not parts of one. Each loader counts its own epochs.
    """
    epochs = [
        [[shard.epoch for shard in held if shard.rank == rank] for rank in by_rank]
        for by_rank, held in parts
    ]
    every = [epoch for step in epochs for of_rank in step for epoch in {*of_rank}]
    are_unlike = all(len({*of_rank}) == len(of_rank) for step in epochs for of_rank in step)
    return are_unlike and len(every) > len({*every}) * len(parts[0][0])


def _adds_up_means(tally: Tally, trace: Trace, parts: Parts) -> bool:
    """Report means of one loader's batches that are added up while ranks take the mean.

    Return whether there are any. Batches of several loaders, or the parts of a loss over the same
    samples, may be added up on purpose. Without a loader there may be several sources, such as
    tasks, unless one line selects the rows of all micro-batches.
    """
    if trace.traits.sample_ids == "content" and not trace.traits.one_source:
        return False
    every = [*_steps(parts)]
    # The first step of FSDP may have no divisor.
    steps = [step for step in every if step.divisor is not None]
    if len(every) < len(parts) or not steps or not all(map(_Step.is_sum_of_means, steps)):
        return False
    if not any(len({shard.epoch for shard in step.shards}) == 1 for step in steps):
        return False
    for step in steps:
        (number,) = step.sizes
        tally.check(
            False,
            f"the gradient is the mean over ranks, and the sum over a rank's {number} "
            f"micro-batches, {number} times the gradient of the mean loss: divide each loss by "
            f"{number}, or call obs.loss(loss, 1) if the sum is meant",
            expected="1",
            got=f"{number}",
            **evidence.place(trace, step.update),
        )
    return True


def _divided_twice(tally: Tally, trace: Trace, parts: Parts) -> None:
    """Check that no step divides losses by the number of its micro-batches once too often."""
    for step in filter(_Step.is_divided_twice, _steps(parts)):
        number = max(step.sizes)
        tally.check(
            False,
            f"each of a rank's {number} micro-batches has its loss divided by {number} "
            "twice, which could mean: the script divides it, and so does the library "
            "that calls backward",
            expected="1",
            got=f"{1 / number:.6g}",
            **evidence.place(trace, step.update),
        )


def _rows(tally: Tally, trace: Trace, step: _Step) -> None:
    """Check that means over different numbers of samples are weighted by these numbers.

    A script may rightly want different numbers of tokens to count equally.
    """
    columns = step.columns
    if len(columns) != 1 or trace.traits.loss_over == "micro-batch":
        return
    if not (step.is_divided() or step.parts()):
        return
    sizes = [len(shard.ids) for shard in step.shards]
    terms = columns[0]
    if len({*sizes}) < 2 or not all(sizes) or not all(term.count for term in terms):
        return
    per_row = terms[0].count / sizes[0]
    if not all(alike(t.count, per_row * n) for t, n in zip(terms, sizes, strict=True)):
        return
    total, whole = sum(sizes), sum(term.whole for term in terms)
    for shard, term in zip(step.shards, terms, strict=True):
        due, got = len(shard.ids) / total, term.whole / whole
        tally.check(
            alike(got, due),
            f"the loss of micro-batch {shard.shard} counts {got / due:.3g} times as much as its "
            f"share of {len(shard.ids)} in {total} samples, which could mean: a mean of means",
            expected=f"{due:.6g} of the step",
            got=f"{got:.6g} of the step",
            **evidence.place(trace, shard),
        )


def _short_steps(tally: Tally, trace: Trace, steps: Sequence[_Step]) -> None:
    """Check that steps with an unusual number of micro-batches are divided by their own number.

    The usual number is the one of most steps.
    """
    sizes = [max(step.sizes) for step in steps if len(step.sizes) == 1]
    usual = max({*sizes}, key=sizes.count, default=0)
    model = next((step for step in steps if step.sizes == {usual} and step.is_divided()), None)
    if model is None or usual < 2:
        return
    due = _divided(model, usual)
    for step in steps:
        got, number = _divided(step, usual), max(step.sizes)
        if due is None or got is None or step.sizes != {number} or number == usual:
            continue
        if step.is_divided() or not alike(got, due):
            continue
        meaning = (
            "the last of an epoch are left for the next step"
            if number > usual
            else "the number is that of full steps only"
        )
        tally.check(
            False,
            f"{number} micro-batches of a rank are divided by the same number as "
            f"{usual} in step {model.update.step}, so their samples count "
            f"{number / usual:.3g} times as much, which could mean: {meaning}",
            expected="1",
            got=f"{number / usual:.6g}",
            **evidence.place(trace, step.update),
        )


def _cut_windows(tally: Tally, trace: Trace, steps: Sequence[_Step]) -> None:
    """Check that a mean over the elements of several micro-batches is applied in one step.

    If an engine steps too early, several steps have some of the micro-batches each, divided by the
    elements of all. Together these steps count as much as a full step.
    """
    known = all(len(step.sizes) == 1 and step.num_elements and step.is_even() for step in steps)
    usual = max((max(step.sizes) for step in steps), default=0)
    whole = [step for step in steps if max(step.sizes) == usual]
    # Otherwise a constant divisor of all steps would look like the number of elements of several
    # steps.
    if not (known and _are_of_step(whole)):
        return
    full, window = [step.wholes() for step in whole], list[_Step]()
    for step in steps:
        window = [*window, step] if max(step.sizes) < usual else []
        if sum(max(part.sizes) for part in window) < usual:
            continue
        parts = [part.wholes() for part in window]
        shares = [[column[0].share for column in part.columns] for part in window]
        is_one = all(
            len(of_step) == len(full[0]) and all(map(alike, of_step, shares[0]))
            for of_step in shares
        )
        if is_one and all(map(alike, map(sum, zip(*parts, strict=True)), full[0])):
            numbers = [part.update.step for part in window]
            total = sum(part.num_elements for part in window)
            tally.check(
                False,
                f"{named('step', numbers)} each divide their losses by the {total:g} elements of "
                f"{'both' if len(window) == 2 else 'all of them'}, and other steps by their own: "
                "the optimizer steps before all micro-batches have come (accelerate does where a "
                "loader ends, once its last batch was fetched)",
                expected=f"{window[0].num_elements:g}",
                got=f"{total:g}",
                **evidence.place(trace, window[0].update),
            )
        window = []


def _divided(step: _Step, number: int) -> float | None:
    column = step.columns[0]
    if not all(
        term.is_divided_by(number) and alike(term.whole, column[0].whole) for term in column
    ):
        return None
    return column[0].whole


def _networks(trace: Trace) -> dict[str, Parts]:
    """Return the first tensor of a network -> what is added up in each step for the network.

    Networks that are trained in turn have separate losses.
    """
    shards = evidence.shards(trace)
    networks: dict[str, Parts] = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        for held in step_sums.parts(by_rank, shards.get(step, ())):
            names = {name for shard in held for name in step_sums.summed(by_rank, shard)}
            networks.setdefault(min(names, default=""), []).append((by_rank, held))
    return networks


def _steps(parts: Parts) -> Iterator[_Step]:
    """Yield the steps in which the terms of each micro-batch are known.

    A rank without a batch multiplies a loss by zero to stay in step with the others. That adds
    nothing to a sum; whether a mean counts it is unknown.
    """
    for by_rank, of_step in parts:
        counted = _counted(of_step)
        terms = [[_Term.of(one, len(shard.ids)) for one in shard.terms] for shard in counted]
        known = all(own and all(t.share and math.isfinite(t.share) for t in own) for own in terms)
        if not counted or not known or len({*map(len, terms)}) != 1:
            continue
        of_rank: dict[int, list[list[_Term]]] = {}
        ordered = sorted(zip(counted, terms, strict=True), key=lambda pair: pair[0].rank)
        for shard, own in ordered:
            of_rank.setdefault(shard.rank, []).append(own)
        update = evidence.any_rank(by_rank)
        divisor = _applied_divisor(by_rank, counted, update)
        yield _Step(update, of_rank, [shard for shard, _ in ordered], divisor)


def _counted(shards: Sequence[Shard]) -> Sequence[Shard]:
    counted = [shard for shard in shards if any(share for _, share, *_ in shard.terms)]
    return counted if are_all(counted, means=False) else shards


def _applied_divisor(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], update: Update
) -> float | None:
    applied = update.unclipped or update.gradient
    total, mean = step_sums.total(by_rank, shards), evidence.vectors(applied)
    if not total or mean is None or not total.keys() <= mean.keys():
        return None
    mean = {name: mean[name] for name in total}
    if step_sums.shapes(total) != step_sums.shapes(mean):
        return None
    return step_sums.divisor(total, mean)


def alike(one: float, other: float) -> bool:
    """Return whether two shares or counts are equal, except for float32 rounding."""
    return abs(one - other) <= _BOUND * abs(other)
