"""Every exception that this package raises on purpose.

    EntrenarError
    ├── ContractError        a contract file is wrong (carries every problem)           exit 2
    ├── UsageError           the command line or a scenario requests the impossible    exit 2
    │   ├── RowsError        rows to learn from can't be used (a line for each)         exit 2
    │   └── TraceError       a stored trace or replay file can't be trusted            exit 2
    │       └── ForeignTrace a file is not a trace, or is of a different version       exit 2
    ├── CheckpointError      a checkpoint is missing, damaged or of a different run
    ├── ProtocolError        a peer broke the protocol: only its connection ends
    ├── BackendUnavailable   a device is absent, failed, or gave a non-finite result
    ├── SystemFailure        a trainer could not finish its run                        inconclusive
    └── WatchFinding         a watched training run broke a clause, and stops

Findings are results, not exceptions: a falsified invariant raises nothing. The only exception to
this is the watch in production, which raises to stop the training run. A message says what was
given (name = value), where, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Self

# No suggestion for a shorter name, which resembles too many others. None for a longer name, which
# would take long to compare and is not a typing error.
_NAME_CHARS_MIN, _NAME_CHARS_MAX = 2, 64


class EntrenarError(Exception):
    """The base class of this package's errors.

    `kind` is a stable name that code and traces compare, since messages may change. It is "" if
    nothing depends on it.
    """

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class UsageError(EntrenarError):
    """Raised when the command line or a scenario requests something impossible; nothing was run.

    `field` is the Python name of the wrong option, key or field (`world_size`), or "" if no single
    field is wrong. Code that read the value from a file uses it to find the line.
    """

    def __init__(self, message: str, *, field: str = "", kind: str = "") -> None:
        super().__init__(message, kind=kind)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, advice: str) -> Self:
        """Return the error about one field, with the message `field=value: advice`."""
        return cls(f"{field}={value!r}: {advice}", field=field)


class RowsError(UsageError):
    """Raised when rows of a file can't be used. The message shows the first ones."""


class TraceError(UsageError):
    """Raised when a trace or replay file is truncated, reordered, edited or of another version."""


class ForeignTrace(TraceError):
    """Raised when a file is no trace of this version, so that it can't be checked for edits."""


class ContractError(EntrenarError):
    """Raised when a contract is invalid.

    `problems` holds one line per problem, each starting with `file:line:column: error: `. The
    message is these lines joined.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class CheckpointError(EntrenarError):
    """Raised when a run can't be resumed from a checkpoint."""


class ProtocolError(EntrenarError):
    """Raised when a peer sent bytes that are not a message, or a message that is not legal now."""


class BackendUnavailable(EntrenarError):
    """Raised when a backend is absent, can't start, lacks memory, or gave a non-finite result."""


class SystemFailure(EntrenarError):
    """Raised when a system could not run a scenario to its end."""


class WatchFinding(EntrenarError):
    """Raised when a watched run broke `clause` at `step` on `ranks`, first seen in `tensor`."""

    def __init__(
        self, message: str, *, clause: str, step: int, ranks: tuple[int, ...], tensor: str
    ) -> None:
        super().__init__(f"{clause}: step {step}, tensor {tensor}: {message}")
        self.clause = clause
        self.step = step
        self.ranks = ranks
        self.tensor = tensor


def did_you_mean(name: object, allowed: Collection[str], *, otherwise: str | None = None) -> str:
    """Return advice on an unknown name, such as `did you mean 'x'?`.

    If no allowed name is similar, return `otherwise`; if that is None, list all allowed names.
    """
    near = " or ".join(map(repr, _nearest(str(name), allowed)))
    if near:
        return f"did you mean {near}?"
    return f"allowed are {', '.join(allowed)}" if otherwise is None else otherwise


def _nearest(name: str, allowed: Collection[str]) -> list[str]:
    if not _NAME_CHARS_MIN <= len(name) <= _NAME_CHARS_MAX:
        return []
    longer = [
        candidate for candidate in allowed if name in candidate
    ]  # for `steps`, num_steps is better than stops
    return longer if 1 <= len(longer) <= 2 else get_close_matches(name, allowed, n=1)
