"""Every exception this package raises on purpose.

    EntrenarError
    ├── ContractError        a contract file is wrong (carries every problem found)    exit 2
    ├── UsageError           the command line or a scenario asks for the impossible    exit 2
    │   └── TraceError       a stored trace or replay file can't be trusted            exit 2
    │       └── ForeignTrace a file that is no trace, or of another version            exit 2
    ├── CheckpointError      a checkpoint is missing, damaged or of another run
    ├── ProtocolError        a peer sent what it must not: its connection ends, nothing else
    ├── BackendUnavailable   a device is absent, failed, or gave a non-finite result
    ├── SystemFailure        a trainer could not be run to an end                      inconclusive
    └── WatchFinding         a training that is watched broke a clause, and stops

Findings are results, never exceptions: a falsified invariant raises nothing. (In production the
watch has a training to stop: it raises.) A message says what
was given (name = value), where, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Self

# A shorter name is near to anything; nobody types a longer one, and comparing takes time that grows
# with its length.
_NAME_CHARS_MIN, _NAME_CHARS_MAX = 2, 64


class EntrenarError(Exception):
    """Root of the tree: no result is possible."""


class UsageError(EntrenarError):
    """Raised when what was asked for can't be done; nothing ran.

    `field` names the option, key or field that is wrong, as Python spells it (`world_size`); it is
    "" where no single one is. Whoever read the value from a file finds its place there by it.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, advice: str) -> Self:
        """Return the error of one field: `field=value: advice`."""
        return cls(f"{field}={value!r}: {advice}", field=field)


class TraceError(UsageError):
    """A stored trace or replay file is of another version, truncated, reordered or edited."""


class ForeignTrace(TraceError):
    """A file that this release knows nothing of: it can't say that anything was changed in it."""


class ContractError(EntrenarError):
    """A contract is invalid.

    `problems` holds one line per problem, each starting with `file:line:column: error: `; the
    message is all of them, one a line.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class CheckpointError(EntrenarError):
    """A checkpoint can't be resumed from."""


class ProtocolError(EntrenarError):
    """A peer sent what is no message, or one that it may not send now."""


class BackendUnavailable(EntrenarError):
    """A backend can't serve: absent, failed to start, out of memory, or not finite."""


class SystemFailure(EntrenarError):
    """A system could not carry a scenario to its end."""


class WatchFinding(EntrenarError):
    """A training that is watched broke `clause` at `step`: on `ranks`, first seen in `tensor`."""

    def __init__(
        self, message: str, *, clause: str, step: int, ranks: tuple[int, ...], tensor: str
    ) -> None:
        super().__init__(f"{clause}: step {step}, tensor {tensor}: {message}")
        self.clause = clause
        self.step = step
        self.ranks = ranks
        self.tensor = tensor


def did_you_mean(given: object, allowed: Collection[str], *, otherwise: str | None = None) -> str:
    """Return the advice on a name that is not `allowed`: the nearest one, `did you mean 'x'?`.

    Where none is near it is `otherwise`; without that, all that are allowed.
    """
    near = " or ".join(map(repr, _nearest(str(given), allowed)))
    if near:
        return f"did you mean {near}?"
    return f"allowed are {', '.join(allowed)}" if otherwise is None else otherwise


def _nearest(name: str, allowed: Collection[str]) -> list[str]:
    if not _NAME_CHARS_MIN <= len(name) <= _NAME_CHARS_MAX:
        return []
    longer = [
        candidate for candidate in allowed if name in candidate
    ]  # steps: num_steps rather than stops
    return longer if 1 <= len(longer) <= 2 else get_close_matches(name, allowed, n=1)
