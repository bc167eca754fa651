"""Every exception this package raises on purpose.

    EntrenarError
    ├── ContractError        a contract file is wrong (carries every problem found)    exit 2
    ├── UsageError           the command line or a scenario asks for the impossible    exit 2
    │   ├── RowsError        rows to learn from can't be used (a line for each)         exit 2
    │   └── TraceError       a stored trace or replay file can't be trusted            exit 2
    │       └── ForeignTrace a file that is no trace, or of another version            exit 2
    ├── CheckpointError      a checkpoint is missing, damaged or of another run
    ├── ProtocolError        a peer broke the protocol: only its connection ends
    ├── BackendUnavailable   a device is absent, failed, or gave a non-finite result
    ├── SystemFailure        a trainer could not finish its run                        inconclusive
    └── WatchFinding         a training that is watched broke a clause, and stops

Findings are results, never exceptions: a falsified invariant raises nothing. The one exception is
the watch in production, which raises to stop the training. A message says what was given
(name = value), where, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Self

# No suggestions for a shorter name, which resembles too many others, or for a longer one, which
# would take long to compare and is no typing error.
_NAME_CHARS_MIN, _NAME_CHARS_MAX = 2, 64


class EntrenarError(Exception):
    """Root of the tree: no result is possible."""


class UsageError(EntrenarError):
    """Raised when a request can't be carried out; nothing was run.

    `field` names the wrong option, key or field, as Python spells it (`world_size`). It is "" where
    no single field is wrong. Code that read the value from a file uses it to find the line.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, advice: str) -> Self:
        """Return the error of one field: `field=value: advice`."""
        return cls(f"{field}={value!r}: {advice}", field=field)


class RowsError(UsageError):
    """Raised when rows of a file can't be used. The message has a line for each of the first."""


class TraceError(UsageError):
    """A stored trace or replay file is of another version, truncated, reordered or edited."""


class ForeignTrace(TraceError):
    """A file that is no trace of this version, so that nothing shows whether it was edited."""


class ContractError(EntrenarError):
    """A contract is invalid.

    `problems` holds one line per problem, each starting with `file:line:column: error: `. The
    message is these lines joined.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class CheckpointError(EntrenarError):
    """A checkpoint can't be resumed from."""


class ProtocolError(EntrenarError):
    """A peer sent bytes that are no message, or a message that is not legal now."""


class BackendUnavailable(EntrenarError):
    """A backend is absent, failed to start, is out of memory, or gave a non-finite result."""


class SystemFailure(EntrenarError):
    """A system could not run a scenario to its end."""


class WatchFinding(EntrenarError):
    """A watched training broke `clause` at `step` on `ranks`, seen first in `tensor`."""

    def __init__(
        self, message: str, *, clause: str, step: int, ranks: tuple[int, ...], tensor: str
    ) -> None:
        super().__init__(f"{clause}: step {step}, tensor {tensor}: {message}")
        self.clause = clause
        self.step = step
        self.ranks = ranks
        self.tensor = tensor


def did_you_mean(name: object, allowed: Collection[str], *, otherwise: str | None = None) -> str:
    """Return the advice on a name that is not allowed, such as `did you mean 'x'?`.

    If no allowed name is similar, return `otherwise`, or if that is None, list all allowed names.
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
    ]  # steps: num_steps rather than stops
    return longer if 1 <= len(longer) <= 2 else get_close_matches(name, allowed, n=1)
