"""The faults that can be injected into a run, as plain records inside a scenario.

A Fault says what goes wrong and where. The system that runs the scenario injects it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from entrenar_py.shared.codec import UNCHECKED, Schema
from entrenar_py.shared.errors import UsageError, did_you_mean

# Kind -> its effect. The docs, the validation and the systems read this table. `rank` and `shard`
# restrict a planted value to the shards of that rank, or to that shard. Without them, all shards
# get it.
KINDS: dict[str, str] = {
    "non_finite_gradient": "one element of a shard's gradient becomes `value` (nan, inf, -inf)",
    "non_finite_loss": "a shard's loss becomes `value` (nan, inf, -inf), its gradient stays",
    "huge_gradient": "one element of a shard's per-sample gradients becomes `value`, finite",
    "corrupt_gradient": "one element of the gradient of `shard` becomes wrong in worker `rank`, "
    "once and silently: as if it were `value`, finite, in every sample",
    "corrupt_worker": "from step `step` on, one element of the gradient of every shard that "
    "worker `rank` computes becomes wrong silently: as if it were `value`, "
    "finite, in every sample",
    "nudged_weights": "each weight of a user's script changes by `value` times itself",
    "common_numbers": "a user's script draws the same random numbers for all samples and ranks",
    "common_order": "as `common_numbers`, and loaders fetch the samples in the same order for any "
    "number of workers",
    "mirrored_ranks": "as `common_numbers`, and all ranks load the same samples; a single worker "
    "loads what one of `value` workers would load",
    "repeated_share": "as `mirrored_ranks` on one worker, which loads its part `value` times in "
    "each batch",
    "merged_batches": "one worker loads the batches of `value` workers at once",
    "replayed_batches": "one worker gets the joined batches of `value` workers of another run",
    "replayed_in_turn": "one worker gets the batches of `value` workers of another run, one after "
    "the other, as its micro-batches",
    "shortened_epochs": "each epoch of a user's script ends after `value` batches of a rank; the "
    "samples of all omitted batches count as part of the last batch",
    "more_steps": (
        "a user's script makes `value` optimizer steps, more than usual, and is then ended"
    ),
    "reordered_groups": (
        "an optimizer of a user's own class is built with the parameters of each group in a "
        "different order"
    ),
    "leave": "worker `rank` dies while it computes step `step`; its shards go to the others",
    "join": "worker `rank` joins, or rejoins, before step `step` and gets the full state",
    "kill": "worker `rank` is killed (SIGKILL) at message `at` of step `step`",
    "freeze": "worker `rank` is stopped (SIGSTOP) for `seconds` at message `at` of step `step`",
    "cut": "the connection of worker `rank` breaks in the middle of message `at` of step `step`",
    "half_open": "from message `at` of step `step` on, no bytes pass, and neither end is notified",
    "delay": "message `at` of step `step`, and those after it, arrive `seconds` later",
    "duplicate": "message `at` of step `step` is sent twice",
    "reorder": "message `at` of step `step` is sent after the one that follows it",
    "truncate": "the second half of message `at` of step `step` is lost",
    "flip": "one bit of message `at` of step `step` is flipped",
    "lie": "worker `rank` sends a false message at message `at` of step `step`: `value`",
    "stranger": "a peer that must be refused connects in step `step`: `value`",
    "restart": "the coordinator dies at message `at` of step `step`; a new one resumes",
    "absent": "backend `backend` is missing",
    "init_error": "backend `backend` fails when it is opened",
    "out_of_memory": "backend `backend` runs out of memory while computing",
    "non_finite_output": "backend `backend` returns a result with a NaN in it",
    "device_lost": "the adapter of backend wgpu is destroyed between submission and result",
    "too_large": "backend wgpu requests a buffer that is larger than its adapter allows",
    "shader_rejected": "backend wgpu gives its adapter a truncated shader",
}

# Kind -> its required fields. A fault without one of them would never happen, silently.
NEEDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("non_finite_gradient", "non_finite_loss", "huge_gradient"), ("step", "value")),
    "corrupt_gradient": ("step", "rank", "shard", "value"),
    "corrupt_worker": ("step", "rank", "value"),
    **dict.fromkeys(("nudged_weights", "merged_batches", "shortened_epochs"), ("step", "value")),
    **dict.fromkeys(("replayed_batches", "replayed_in_turn"), ("step", "value")),
    **dict.fromkeys(("common_numbers", "common_order", "reordered_groups"), ("step",)),
    "more_steps": ("step", "value"),
    **dict.fromkeys(("mirrored_ranks", "repeated_share"), ("step", "value")),
    **dict.fromkeys(("leave", "join"), ("step", "rank")),
    **dict.fromkeys(("kill", "cut", "half_open"), ("step", "rank", "at")),
    **dict.fromkeys(("duplicate", "reorder", "truncate", "flip"), ("step", "rank", "at")),
    **dict.fromkeys(("freeze", "delay"), ("step", "rank", "at", "seconds")),
    "lie": ("step", "rank", "at", "value"),
    "stranger": ("step", "value"),
    "restart": ("step", "at"),
    **dict.fromkeys(("absent", "init_error", "out_of_memory", "non_finite_output"), ("backend",)),
    **dict.fromkeys(("device_lost", "too_large", "shader_rejected"), ("backend",)),
}

# Kind -> its optional fields. `tensor` and `element` default to the first tensor and element.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "non_finite_gradient": ("rank", "shard", "tensor", "element"),
    "non_finite_loss": ("rank", "shard"),
    "huge_gradient": ("rank", "shard", "tensor", "element"),
    "corrupt_gradient": ("tensor", "element"),
    "corrupt_worker": ("tensor", "element"),
    "stranger": ("rank",),
    "non_finite_output": ("element",),
}
# The kinds that replace a number with the fault's `value`.
PLANTED = ("non_finite_gradient", "non_finite_loss", "huge_gradient")
# Finite corruptions that the worker's own records don't show. Only an audit detects them.
SILENT = ("corrupt_gradient", "corrupt_worker")

# Only for a user's script: measures the effect of rounding on the training.
NUDGED = "nudged_weights"
# Only for a user's script: these remove the legitimate differences between runs on different
# numbers of workers, so that the rest can be compared.
COMMON, ORDERED, MIRRORED, REPEATED = CONTROLLED = (
    *("common_numbers", "common_order"),
    *("mirrored_ranks", "repeated_share"),
)

# Only for a user's script: each epoch ends after a few steps.
SHORTENED = "shortened_epochs"
# Only for a user's script: one worker gets the batches of several workers, although its script is
# configured for one.
MERGED = "merged_batches"
# Like MERGED, for scripts with loaders that can't be changed: the batches that the script draws are
# replaced.
REPLAYED, IN_TURN = OF_RECORDS = "replayed_batches", "replayed_in_turn"
JOINED = (MERGED, *OF_RECORDS)
OF_LOADERS = (SHORTENED, MERGED)
# Only for a user's script that writes its first checkpoint late: the run is ended later.
LONGER = "more_steps"
# Only for a user's script: the order of the parameters is changed, which no step may depend on.
REORDERED = "reordered_groups"
# These begin before a script's first line, in the module of `check/observing/` with their name.
OF_THE_START = (REORDERED,)
# Faults that last for a whole run.
LASTING = (*CONTROLLED, *OF_LOADERS, *OF_RECORDS, LONGER, REORDERED)
# Runs with these faults only show whether other runs can be compared, or what others are too short
# to show.
OF_WITNESSES = (NUDGED, *LASTING)

# Failures that a real GPU adapter is made to report itself.
OF_ADAPTERS = ("device_lost", "too_large", "shader_rejected")

# Faults of a worker process or of a message, for systems with workers that exchange messages.
ON_THE_WAY = (
    *("kill", "freeze", "cut", "half_open"),
    *("delay", "duplicate", "reorder", "truncate", "flip"),
)
# The messages of a step at which these faults can strike (`train.wire.messages`).
PLACES = ("Assign", "TreeNode", "Computed", "Average", "Staged", "Commit", "Applied")
# The same for a ring, which sends partial sums instead of tree nodes.
RING_PLACES = tuple("Partial" if place == "TreeNode" else place for place in PLACES)
# The same for a star with a server that makes the update: it sends new weights, not averages.
SERVED_PLACES = tuple("Weights" if place == "Average" else place for place in PLACES)
# The same for a pipeline: its stages send each other hidden states and the gradients of these.
PIPELINE_PLACES = (
    *("Assign", "Activation", "ActivationGradient", "Summed", "TreeNode"),
    *("Weights", "Staged", "Commit", "Applied"),
)
# Elastic ranks have no messages of their own. These are moments of a step: in the first forward
# pass, before the last gradient is sent, after that, in the optimizer's step, and after the commit.
ELASTIC_PLACES = ("Forward", "Backward", "Exchange", "Stepping", "Committed")

# The false messages that a worker can send, followed by the messages in which it can send them.
LIES: dict[str, str] = {
    "old_step": "it sends its message of the previous step again",
    "too_long": "the payload is four bytes longer than the manifest allows",
    "not_mine": "it names shards that were not assigned to it",
    "twice": "it sends the whole message twice",
    "for_another": "its trace events have the rank of another worker",
}
LIE_PLACES: dict[str, tuple[str, ...]] = {
    "old_step": ("TreeNode", "Partial", "Computed", "Staged", "Applied"),
    "too_long": ("TreeNode", "Partial"),
    "not_mine": ("TreeNode", "Computed"),
    "twice": ("TreeNode", "Partial", "Computed", "Staged", "Applied"),
    "for_another": ("Computed", "Applied"),
}
# The connections that a coordinator must refuse.
STRANGERS: dict[str, str] = {
    "taken_rank": "it knows the secret, and claims `rank`, which a live worker has",
    "one_too_many": "it knows the secret, but every rank is taken",
    "wrong_secret": "it does not know the secret",
    "wrong_run": "it belongs to a different run",
    "wrong_manifest": "it has different tensors",
    "wrong_data": "it has a different data set",
    "garbage": "it sends random bytes",
    "huge_claim": "it announces 2^62 bytes",
    "silent": "it sends nothing",
    "slow_loris": "it sends a correct message, one byte a second",
}
# Faults after which a worker may be absent for some steps.
MOVING = ("leave", "join", "restart", "lie", *ON_THE_WAY)
# Faults that may change which worker computes, and when, but not the numbers or backends.
SURVIVED = (*MOVING, "stranger")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planned fault. `step` counts from 0.

    `value` is a number as text ("nan"), so that JSON can hold it, or a key of LIES or STRANGERS.
    Raises UsageError for an unknown kind, a field of the wrong type, a required field that is None,
    or a field that the kind does not use.
    """

    kind: str
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    element: int | None = None
    value: str | None = None
    backend: str | None = None
    at: str | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in tuple(KINDS):
            raise UsageError(f"fault kind={self.kind!r}: {did_you_mean(self.kind, KINDS)}")
        for name in ("step", "rank", "shard", "element"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 0):
                self._refuse(name, "use a whole number >= 0")
        for name in ("tensor", "value", "backend", "at"):
            if not isinstance(getattr(self, name), str | None):
                self._refuse(name, "use text, in quotes")
        of_messages = (*PLACES, *RING_PLACES, *SERVED_PLACES, *PIPELINE_PLACES)
        places = tuple(dict.fromkeys((*of_messages, *ELASTIC_PLACES)))
        if self.at not in (None, *places):
            self._refuse("at", f"use one of {', '.join(places)}")
        if self.seconds is not None and not _is_duration(self.seconds):
            self._refuse("seconds", "use a number > 0")
        self._check_fields()
        self._check_value()

    def _check_fields(self) -> None:
        needed = NEEDED[self.kind]
        taken = (*needed, *OPTIONAL.get(self.kind, ()))
        for name in self.__dataclass_fields__:
            if name not in ("kind", *taken) and getattr(self, name) is not None:
                self._refuse(name, f"this kind doesn't take it; it takes {', '.join(taken)}")
        for name in needed:
            if getattr(self, name) is None:
                self._refuse(name, f"{self.kind} needs {' and '.join(needed)}")

    def _check_value(self) -> None:
        if self.kind == "lie":
            self._check_lie()
        elif self.kind == "stranger":
            self._check_stranger()
        elif self.value is not None:
            self._check_number(self.value)

    def _check_lie(self) -> None:
        if self.value not in LIES:
            self._refuse("value", f"use one of {', '.join(LIES)}")
        if self.at not in LIE_PLACES[self.value]:
            places = ", ".join(LIE_PLACES[self.value])
            self._refuse("at", f"use one of {places} with value={self.value}")
        if self.value == "old_step" and self.step == 0:
            self._refuse("step", "there is no previous step; use 1 or more")

    def _check_stranger(self) -> None:
        if self.value not in STRANGERS:
            self._refuse("value", f"use one of {', '.join(STRANGERS)}")
        if (self.rank is not None) != (self.value == "taken_rank"):
            self._refuse("rank", "value=taken_rank needs a rank, and all others take none")

    def _check_number(self, value: str) -> None:
        finite = self.kind in ("huge_gradient", *OF_WITNESSES, *SILENT)
        try:
            fits = math.isfinite(float(value)) == finite
        except ValueError:
            fits = False
        if not fits:
            self._refuse("value", "use a finite number" if finite else "use nan, inf or -inf")

    def _refuse(self, name: str, advice: str) -> NoReturn:
        raise UsageError(f"fault {self.kind} {name}={getattr(self, name)!r}: {advice}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None, as a dict that JSON can hold."""
        return _SCHEMA.dump(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fault:
        """Return the fault that `to_dict` wrote. Raises UsageError that names an unknown key."""
        return _SCHEMA.load(record)


def has_kind(planned: Iterable[Fault], *kinds: str) -> bool:
    """Return whether any fault in `planned` is of one of these kinds."""
    return any(fault.kind in kinds for fault in planned)


def are_of_witnesses(planned: Iterable[Fault]) -> bool:
    """Return whether a run with these faults only helps to judge other runs; see OF_WITNESSES."""
    return has_kind(planned, *OF_WITNESSES)


def steps_of(planned: Iterable[Fault]) -> int | None:
    """Return the number of steps after which the faults `planned` end a run; None if they don't."""
    return next((int(fault.value or 0) for fault in planned if fault.kind == LONGER), None)


_SCHEMA = Schema(Fault, what="fault", forms=UNCHECKED, sparse=True)


def _is_duration(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]
