"""Every exception this package raises on purpose.

    EntrenarError
    ├── ContractError        a contract file is wrong (carries every problem found)    exit 2
    ├── UsageError           the command line or a scenario asks for the impossible    exit 2
    │   └── TraceError       a stored trace or replay file can't be trusted            exit 2
    ├── CheckpointError      a checkpoint is missing, damaged or of another run
    ├── BackendUnavailable   a device is absent, failed, or gave a non-finite result
    └── SystemFailure        a trainer could not be run to an end                      inconclusive

Findings are results, never exceptions: a falsified invariant raises nothing. A message says what
was given (name = value), where, what is allowed, and what to do.
"""


class EntrenarError(Exception):
    """Root of the tree: no result is possible."""


class UsageError(EntrenarError):
    """What was asked for can't be done; nothing ran."""


class TraceError(UsageError):
    """A stored trace or replay file is of another version, truncated, reordered or edited."""


class ContractError(EntrenarError):
    """A contract is invalid.

    `problems` holds one line per problem, each starting with `file:line:column:`; the message is
    all of them, one a line.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class CheckpointError(EntrenarError):
    """A checkpoint can't be resumed from."""


class BackendUnavailable(EntrenarError):
    """A backend can't serve: absent, failed to start, out of memory, or not finite."""


class SystemFailure(EntrenarError):
    """A system could not carry a scenario to its end."""
