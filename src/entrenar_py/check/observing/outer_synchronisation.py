"""The synchronisations of ranks that otherwise train independently (local SGD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entrenar_py.check.observing import tensors
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import trace


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """The optimizer of the outer step; `optimizer` is None if ranks only average their weights.

    `weights` are the tensors that it updates, with the parameter names as keys. `inner_steps` is
    the declared number of inner steps per round; None if the script doesn't declare it.
    """

    optimizer: torch.optim.Optimizer | None
    weights: Mapping[str, Tensor]
    inner_steps: int | None

    def rule(self) -> dict[str, Any]:
        """Return the rule of the outer step, as values for JSON.

        Its name is `nesterov` (torch's SGD with Nesterov momentum, or with no momentum), `momentum`
        or `other`.
        """
        declared = {} if self.inner_steps is None else {"inner_steps": self.inner_steps}
        if self.optimizer is None:
            return {**declared, "rule": "nesterov", "lr": 1.0, "momentum": 0.0}
        first, *others = tensors.groups([self.optimizer])
        momentum = float(first.get("momentum") or 0.0)
        unusual = any(first.get(name) for name in ("maximize", "weight_decay", "dampening"))
        if (
            type(self.optimizer) is not torch.optim.SGD
            or any(group != first for group in others)
            or unusual
            or not 0 <= momentum < 1
        ):
            return {**declared, "rule": "other"}
        rule = "nesterov" if first.get("nesterov") or not momentum else "momentum"
        return {**declared, "rule": rule, "lr": float(first["lr"]), "momentum": momentum}


class OuterSynchronisations:
    """Counts the collectives in synchronisations, and separately those between synchronisations."""

    def __init__(self) -> None:
        self._begun: int | None = None
        self._stepped: int | None = None
        self._last: tuple[int, dict[str, trace.TensorRecord]] = -1, {}

    def stepped(self) -> None:
        """Called when the rank has taken a step.

        Counting begins with the rank's first step.
        """
        self._stepped = num_collectives()
        self._begun = self._stepped if self._begun is None else self._begun

    def event(
        self, subject: Subject, outer: OuterOptimizer, step: int
    ) -> trace.Synchronised | None:
        """Return the record of a synchronisation after `step`, and restart counting.

        Return None before the first step of the run (`step` is -1): then ranks receive their
        initial weights, which are in the record of the start. Several calls after the same step,
        each for some of the tensors, count as one synchronisation.
        """
        if step < 0:
            return None
        begun, stepped, now = self._begun, self._stepped, num_collectives()
        self._begun = self._stepped = now
        names = {tensor: [name] for name, tensor in outer.weights.items()}
        state: dict[str, trace.TensorRecord] = {}
        if outer.optimizer is not None:
            state = dict(subject.record(dict(tensors.optimizer_state(outer.optimizer, names))))
        if self._last[0] == step:
            state = self._last[1] | state
        self._last = step, state
        return trace.Synchronised(
            step=step,
            rank=subject.rank,
            weights=subject.record(subject.parameters),
            optimizer=state,
            buffers=subject.buffer_records(),
            collectives=_difference(stepped, now),
            collectives_alone=_difference(begun, stepped),
        )


class Exchanges:
    """Tells whether this rank communicates with others in its steps, if torch counts that."""

    def __init__(self) -> None:
        self._begun: int | None = None

    def begin(self) -> None:
        """Called when the first step begins."""
        self._begun = num_exchanges()

    def facts(self) -> dict[str, bool]:
        """Return whether the rank has exchanged nothing since its first step.

        Return {} if that is unknown.

        Communication that bypasses torch.distributed (sockets, files, MPI) isn't counted.
        """
        now = num_exchanges()
        return {} if None in (self._begun, now) else {"alone": now == self._begun}


def num_exchanges() -> int | None:
    """Return how often this process has communicated with others; None if that isn't counted.

    Only the gloo backend also counts messages between two ranks.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    groups: Any = [*torch.distributed.distributed_c10d._world.pg_map]
    try:
        backends = {
            group._get_backend(device)
            for group in groups
            if group.size() > 1
            for device in group._device_types
            if device.type != "cuda" or torch.cuda.is_available()
        }
        if any(backend.name() != "gloo" for backend in backends):
            return None
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except (AttributeError, RuntimeError):
        return None


def num_collectives() -> int | None:
    """Return how many collectives this process has called; None if they aren't counted."""
    if not torch.distributed.is_initialized():
        return None
    group: Any = torch.distributed.group.WORLD  # torch's type stubs lack the method
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
