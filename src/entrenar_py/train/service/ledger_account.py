"""The summary (account) of a whole ledger, and its verification.

An account has the ledger's extent, the weights after each step, and the devices. A checkpoint
refers to the last ledger line before it, which reveals lost lines.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError, ForeignTrace, TraceError, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.trace import Tensors, ledger
from entrenar_py.shared.trace.writer import Mark
from entrenar_py.shared.untrusted import escaping, files, printing
from entrenar_py.train.service import exit_codes

LEDGER_KEY = "ledger"  # in the progress of a checkpoint; absent in earlier releases

_CHAIN = re.compile(r"[0-9a-f]{32}")
_NONE_KEPT = "no ledger was kept when the checkpoint was written"
_UNNAMED = "the checkpoint was written by an earlier build, which did not name the ledger's line"
_NOT_THERE = "the ledger that the checkpoint names was missing"


def mark_record(last: Mark | None) -> Mapping[str, Any] | None:
    """Return the checkpoint's reference to the ledger's line `last`, as JSON values."""
    return None if last is None else {"line": last.line, "chain": last.chain}


def gap_since(progress: Mapping[str, Any], path: Path) -> trace.Gap:
    """Return the Gap event that begins a new ledger after a resume from the checkpoint at `path`.

    `progress` is that checkpoint's metadata. Raises CheckpointError if its LEDGER_KEY entry is
    malformed.
    """
    step = int(progress["step"])
    named = progress.get(LEDGER_KEY)
    if named is None:
        return trace.Gap(step=step, reason=_NONE_KEPT if LEDGER_KEY in progress else _UNNAMED)
    match named:
        case {"line": line, "chain": str(digest)} if _is_mark(line, digest):
            return trace.Gap(step=step, lines=line, digest=digest, reason=_NOT_THERE)
    raise CheckpointError(
        f"checkpoint {path}: {LEDGER_KEY}={reprlib.repr(named)}: it does not name a line of a "
        "ledger and its digest; use an earlier checkpoint"
    )


def _is_mark(line: object, digest: str) -> bool:
    return type(line) is int and line > 0 and _CHAIN.fullmatch(digest) is not None


def gap_in_words(gap: trace.Gap) -> str:
    """Return a phrase that says which steps a ledger with this gap lacks."""
    steps = f"steps 0 to {gap.step - 1} are not in it" if gap.step else "no step is missing"
    if gap.digest is None:
        return f"{steps}, {escaping.shortened(gap.reason)}"
    digest = escaping.shortened(gap.digest)
    return f"{steps}, but in a ledger of {gap.lines} lines, the last with digest {digest}"


def unchecked(gap: trace.Gap) -> str:
    """Return a note that only the step count connects the ledger to the checkpoint."""
    return f"it was not checked that the ledger belongs to the checkpoint: {gap.reason}"


@dataclass
class Account:
    """The summary of a ledger of `num_lines`, from digest `first` to digest `last`.

    `weights` has a digest for each step after which weights were recorded (`weights_digest`);
    torchrun ranks record weights with each checkpoint. `averages` has digests of the steps'
    averages if the coordinator has no weights. `devices` has the (backend, device) pairs that were
    used. `quarrel` says where weights after the same step first differ; None if they don't. `made`
    lists stretches of applied steps, as (first, last), in order. A resume begins a new stretch.
    """

    plan: TrainingPlan
    environment: dict[str, object]
    first: str
    last: str = ""
    num_lines: int = 0
    made: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[trace.Gap] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    averages: dict[int, str] = field(default_factory=dict)
    devices: set[tuple[str, str]] = field(default_factory=set)
    halt: trace.Halt | None = None
    end: trace.End | None = None
    quarrel: str | None = None
    _goes_back: bool = False  # a worker started at a step that was already applied

    @property
    def backends(self) -> set[str]:
        """The names of the backends that computed."""
        return {name for name, _ in self.devices} or set(self.plan.backends)

    def take(self, events: Iterable[trace.Event]) -> None:
        """Add the next `events` of the ledger to the account."""
        for event in events:
            self.end = event if isinstance(event, trace.End) else None
            match event:
                case trace.Gap():
                    self.gaps.append(event)
                case trace.Start() if self.made and event.step <= self.made[-1][1]:
                    self._goes_back = True
                case trace.Attempt(served=True):
                    self.devices.add((event.backend, event.device))
                case trace.Halt():
                    self.halt = event
                case trace.Averaged():
                    self._extend(event.step)
                    self.averages[event.step] = weights_digest(event.gradient, {})
                case trace.Update():
                    self._extend(event.step)
                    if event.weights:
                        self._compare(event)
                case trace.Saved() if event.weights and event.step > 0:
                    digest = weights_digest(event.weights, event.buffers)
                    self.weights.setdefault(event.step - 1, digest)

    def _extend(self, step: int) -> None:
        begun, last = self.made[-1] if self.made else (step, -1)
        if self.made and not self._goes_back and step in (last, last + 1):
            self.made[-1] = (begun, step)
        else:
            self.made.append((step, step))
        self._goes_back = False

    def _compare(self, update: trace.Update) -> None:
        digest = weights_digest(update.weights, update.buffers)
        known = self.weights.setdefault(update.step, digest)
        if known != digest and self.quarrel is None:
            self.quarrel = (
                f"worker {update.rank} holds weights {digest} after step {update.step}; another "
                f"worker, or the same one before a resume, held {known}"
            )

    # --- its extent -------------------------------------------------------------------------------

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last step of each missing stretch that no Gap event explains."""
        explained = {gap.step for gap in self.gaps}
        for reached, begun, _ in self._stretches():
            if 0 <= reached < begun - 1 and begun not in explained:
                yield reached + 1, begun - 1

    def twice(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last step of each stretch that was repeated."""
        for reached, begun, last in self._stretches():
            if begun <= reached:
                yield begun, min(last, reached)

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yield each stretch as (last step reached before it, its first step, its last step)."""
        reached = -1
        for begun, last in self.made:
            yield reached, begun, last
            reached = max(reached, last)

    def sentences(self) -> Iterator[str]:
        """Yield sentences on the ledger's start, repeated steps and end."""
        yield (
            f"{self.num_lines} lines, none changed, moved or missing from the first (digest "
            f"{self.first}) to the last (digest {self.last})"
        )
        yield from (f"starts over: {gap_in_words(gap)}" for gap in self.gaps)
        begun = self.made[0][0] if self.made else 0
        if begun and not self.gaps:
            yield f"begins with step {begun}: {steps(0, begun - 1)} missing, and no gap explains it"
        for again in self.twice():
            yield f"{steps(*again)} in it twice: the run was resumed from an earlier checkpoint"
        yield self._stands()

    def _stands(self) -> str:
        digests, of = (self.weights, "weights") if self.weights else (self.averages, "average")
        if not digests:
            return "no step in it"
        known = max(digests)
        first = min(begun for begun, _ in self.made) if self.made else known
        last = max((last for _, last in self.made), default=known)
        stands = f"steps {first} to {last} of 0 to {self.plan.num_steps - 1}"
        stands += f", {of} {digests[known]} {'after' if self.weights else 'of'} step {known}"
        if self.end is None:
            return f"{stands}; the run is not over"
        reason = f" ({self.end.reason})" if self.end.reason else ""
        return f"{stands}; {self.end.status}{reason}"


def read(path: Path) -> Account:
    """Return the account of the ledger at `path`.

    Raises TraceError if it is broken, UsageError if it can't be read.
    """
    try:
        with files.open_file(path) as file:
            reader = ledger.Reader(file, path)
            account = Account(reader.head.plan, dict(reader.head.environment), reader.chain)
            account.take(reader)
            account.num_lines, account.last = reader.num_lines, reader.chain
            return account
    except OSError as error:
        problem = f"can't be read ({error.strerror}); give a ledger that can be read"
        raise UsageError(f"ledger {path}: {problem}") from error


def weights_digest(weights: Tensors, buffers: Tensors) -> str:
    """Return 16 hex digits, a digest of the names and digests of `weights` and `buffers`."""
    tensors = {**weights, **buffers}
    text = "\n".join(f"{name} {record.digest}" for name, record in tensors.items())
    return str(blake3(text.encode("utf-8", "backslashreplace")).hexdigest(8))


def steps(first: int, last: int) -> str:
    """Return "steps 3 to 5 are" if `first` is 3 and `last` is 5; "step 3 is" if both are 3."""
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def verify(path: Path, *, replay: bool) -> int:
    """Print whether the ledger at `path` is correct; return the exit code.

    Raises UsageError for a file that can't be read, isn't a ledger, or can't be replayed.
    """
    try:
        account = read(path)
    except ForeignTrace:
        raise
    except TraceError as error:
        printing.say(f"broken: {error}")
        return exit_codes.WRONG
    for sentence in account.sentences():
        printing.say(f"{path}: {sentence}")
    for missing in account.missing():
        printing.say(f"incomplete: {steps(*missing)} missing, and no gap explains it")
        return exit_codes.WRONG
    if account.quarrel is not None:
        printing.say(f"different: {account.quarrel}")
        return exit_codes.WRONG
    if not replay:
        return exit_codes.DONE
    from entrenar_py.train.service import retraining  # loads torch

    return retraining.replay(account, path)
