"""The three verdicts (the worst wins), and the finding: a verdict with its evidence.

A judge reports HELD only if it made at least one comparison, all comparisons succeeded, and none
was missing. A failed comparison gives FALSIFIED. All other cases are INCONCLUSIVE, with the reason:
a failed run, a missing record, a crashed check. So a green report never means that nothing was
compared. FALSIFIED needs a `Counterexample`, which names the place (step, rank, tensor, element)
and both values. A planted bug is killed for the right reason only if the counterexample names the
place where it was planted.

A judge adds its comparisons to a `Tally`, which returns the finding at the end. If several
comparisons fail, the tally keeps the one with the lowest step, since later failures may follow from
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

from entrenar_py.shared.codec import WORDS, Form, Schema
from entrenar_py.shared.scenario import OBSERVED, Scenario


class Verdict(StrEnum):
    """The result of judging one invariant."""

    HELD = "held"
    INCONCLUSIVE = "inconclusive"
    FALSIFIED = "falsified"

    @property
    def badness(self) -> int:
        """The order of the verdicts: 0 for held, 1 for inconclusive, 2 for falsified."""
        return _ORDER.index(self)


_ORDER = (Verdict.HELD, Verdict.INCONCLUSIVE, Verdict.FALSIFIED)
_SHOWN = 3  # reasons or files that are listed in a message
MEANING = "which could mean: "  # begins the list of possible causes in a reason


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of `verdicts`, or INCONCLUSIVE if there are none."""
    return max(verdicts, key=lambda verdict: verdict.badness, default=Verdict.INCONCLUSIVE)


@dataclass(frozen=True, kw_only=True)
class Counterexample:
    """The first place at which an invariant broke. A field that does not apply is None or empty.

    - `step`: counts optimizer steps from 0; -1 is the state before the first step.
    - `expected`, `got`: digests or numbers, as text.
    - `scenario`: the scenario of the run that broke the invariant.
    - `element`: an index into the tensor's elements in C order; `index` is the same place, one
      index for each axis.
    - `or_rank`: a second rank, if it is unknown which of the two broke the invariant.
    """

    message: str
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    element: int | None = None
    sample_ids: tuple[int, ...] = ()
    expected: str | None = None
    got: str | None = None
    scenario: Mapping[str, Any] | None = None
    index: tuple[int, ...] = ()
    or_rank: int | None = None

    def place(self) -> str:
        """Return the known fields in words, such as `step 3, rank 1, shard 2, tensor w[7]`.

        A script has micro-batches in place of shards. They are named only if a rank has several per
        step.
        """
        ranks = self.rank if self.or_rank is None else f"{self.rank} or {self.or_rank}"
        parts = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("rank", ranks), self._shard())
            if value is not None
        ]
        if self.step == -1:
            parts[0] = "before the first step"
        if self.tensor is not None:
            element = ", ".join(map(str, self.index)) or self.element
            parts.append(f"tensor {self.tensor}" + ("" if element is None else f"[{element}]"))
        if self.sample_ids:
            shown = ", ".join(map(str, self.sample_ids[:8]))
            more = ", ..." if len(self.sample_ids) > 8 else ""
            parts.append(f"samples {shown}{more}")
        return ", ".join(parts)

    def _shard(self) -> tuple[str, int | None]:
        if self.shard is None or self.scenario is None or self.scenario.get("system") != OBSERVED:
            return "shard", self.shard
        return micro_batch(self.shard, accumulation=self.scenario.get("accumulation", 1))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one invariant: how many comparisons were made, and what broke or is missing.

    - `reason`: why the verdict isn't HELD; "" for HELD.
    - `notes`: facts to print whatever the verdict is (a software adapter, a skipped backend).
    - `vacuous`: true if the verdict is INCONCLUSIVE because there was nothing to compare; false if
      a comparison lacked a fact that it needed.
    - `applies`: false if the runs lack what the invariant is about (such as clipping). `reason`
      then says what they lack, and the finding counts neither as held nor as inconclusive.
    """

    invariant: str
    verdict: Verdict
    compared: int
    reason: str = ""
    counterexample: Counterexample | None = None
    notes: tuple[str, ...] = ()
    vacuous: bool = False
    applies: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that JSON can hold."""
        return _SCHEMA.dump(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` wrote as `record`.

        Raises UsageError if it is malformed.
        """
        return _SCHEMA.load(record)


def _read_verdict(text: Any) -> Verdict:
    if text not in tuple(Verdict):
        raise ValueError(f"use one of {', '.join(Verdict)}")
    return Verdict(text)


_BROKEN = Schema(Counterexample, what="counterexample", forms={"Mapping[str, Any]": WORDS})
_SCHEMA = Schema(
    Finding,
    what="finding",
    forms={
        "Verdict": Form(_read_verdict, str),
        "Counterexample": Form(_BROKEN.load, _BROKEN.dump),
    },
)


def micro_batch(shard: int, *, accumulation: int) -> tuple[str, int | None]:
    """Return "micro-batch" and the index of `shard` in its rank, None if a rank has only one."""
    return "micro-batch", shard % accumulation if accumulation > 1 else None


def inconclusive(invariant: str, reason: str, compared: int = 0) -> Finding:
    """Return an INCONCLUSIVE finding with this reason. `compared` counts the comparisons made."""
    return Finding(
        invariant=invariant, verdict=Verdict.INCONCLUSIVE, compared=compared, reason=reason
    )


def not_applied(invariant: str, reason: str) -> Finding:
    """Return a finding that the invariant does not apply; `reason` says what the runs lack."""
    return Finding(
        invariant=invariant,
        verdict=Verdict.INCONCLUSIVE,
        compared=0,
        reason=reason,
        applies=False,
    )


def first_few(texts: Sequence[str], *, separator: str = "; ") -> str:
    """Return the first three of `texts`, joined, with the number of the others."""
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return separator.join([*texts[:_SHOWN], *more])


@dataclass
class Tally:
    """The comparisons that a judge has made so far, to be turned into a finding at the end.

    A judge adds its comparisons one by one. If several fail, the tally keeps the one with the
    lowest step, and within that step the one that was added first. `observed` is true if the runs
    are of a script that calls `observe`. Reasons then name calls of the script instead of records
    of a trace (`check.evidence.missing`).
    """

    invariant: str
    observed: bool = False
    compared: int = 0
    broken: Counterexample | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, holds: bool, message: str, **place: Any) -> bool:
        """Count one comparison, and return `holds`.

        If `holds` is false, a counterexample with the fields in `place` is kept. In `place`,
        `scenario` is a Scenario or None, and `shapes` maps tensor names to shapes, so that an
        element can be shown with an index for each axis.
        """
        self.compared += 1
        shapes: Mapping[str, Sequence[int]] = place.pop("shapes", {})
        if not holds:
            shape = shapes.get(place.get("tensor", ""), ())
            place["index"] = _index(place.get("element"), shape)
            run: Scenario | None = place.pop("scenario", None)
            place["scenario"] = None if run is None else run.to_dict()
            counterexample = Counterexample(message=message, **place)
            if self.broken is None or _step(counterexample) < _step(self.broken):
                self.broken = counterexample
        return holds

    def equal(self, expected: object, got: object, message: str, **place: Any) -> bool:
        """Count one comparison of `expected` and `got` with `==`, and show both if they differ.

        Return whether they are equal. NaN equals NaN here: two runs that both recorded NaN do not
        differ.
        """
        if expected == got or (expected != expected and got != got):
            self.compared += 1
            return True
        return self.check(False, message, expected=str(expected), got=str(got), **place)

    def at_most(
        self, most: float, got: float, message: str, *, form: str = "", **place: Any
    ) -> bool:
        """Count the comparison `got <= most`, and return its result.

        `form` is the format specification with which both numbers are shown.
        """
        shown = {"expected": f"<= {most:{form}}", "got": f"{got:{form}}"}
        return self.check(got <= most, message, **shown, **place)

    def close(
        self, expected: float, got: float, allowed: float, message: str, **place: Any
    ) -> bool:
        """Count the comparison whether `got` is within `allowed` of `expected`; return its result.

        NaN always fails. An infinity equals itself.
        """
        shown = {"expected": repr(expected), "got": repr(got)}
        near = got == expected or abs(got - expected) <= allowed
        return self.check(near, message, **shown, **place)

    def would_keep(self, step: int) -> bool:
        """Return whether a comparison that fails in `step` would become the counterexample."""
        return self.broken is None or step < _step(self.broken)

    def take(self, other: Tally) -> None:
        """Add the comparisons that `other` made, without the reasons for missing comparisons."""
        self.compared += other.compared
        broken = other.broken
        if broken is not None and (self.broken is None or _step(broken) < _step(self.broken)):
            self.broken = broken

    def miss(self, reason: str) -> None:
        """Record the reason why a comparison could not be made."""
        if reason not in self.missing:
            self.missing.append(reason)

    def note(self, fact: str) -> None:
        """Record a fact to print with the verdict."""
        if fact not in self.notes:
            self.notes.append(fact)

    def finding(self, *, nothing: str) -> Finding:
        """Return the finding on all comparisons. `nothing` is the reason if none was made."""
        verdict, reason = Verdict.HELD, ""
        if self.broken is not None:
            verdict, reason = Verdict.FALSIFIED, self.broken.message
        elif self.missing:
            verdict, reason = Verdict.INCONCLUSIVE, first_few(self.missing)
        elif self.compared == 0:
            verdict, reason = Verdict.INCONCLUSIVE, nothing
        return Finding(
            invariant=self.invariant,
            verdict=verdict,
            compared=self.compared,
            reason=reason,
            counterexample=self.broken,
            notes=tuple(self.notes),
            vacuous=not (self.broken or self.missing or self.compared),
        )


def _index(element: int | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index along each axis of `element`, which counts in C order.

    Return () if `element` is None or outside of `shape`.
    """
    if element is None or not 0 <= element < prod(shape):
        return ()
    index = []
    for size in reversed(shape):
        element, place = divmod(element, size)
        index.append(place)
    return tuple(reversed(index))


def _step(counterexample: Counterexample) -> float:
    return float("inf") if counterexample.step is None else counterexample.step
