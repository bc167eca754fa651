"""`entrenar ledger verify`: is a ledger whole, and does training again give the same bits?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py import trace
from entrenar_py.errors import ForeignTrace, TraceError, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.service import digest, exit_codes, ledger_extent
from entrenar_py.service.ledger_extent import Extent
from entrenar_py.trace import ledger
from entrenar_py.untrusted import files, printing


@dataclass
class Account:
    """What a whole ledger says: the weights after each step, and who computed them.

    `weights` are digests by step (`digest.of`). `devices` are the backends that served, each with
    its device. `quarrel` says where two workers hold different weights after one step.
    """

    scenario: Scenario
    environment: dict[str, object]
    extent: Extent
    weights: dict[int, str] = field(default_factory=dict)
    devices: set[tuple[str, str]] = field(default_factory=set)
    halt: trace.Halt | None = None
    end: trace.End | None = None
    quarrel: str | None = None

    @property
    def backends(self) -> set[str]:
        """The names of what computed."""
        return {name for name, _ in self.devices} or set(self.scenario.backends)

    def take(self, events: Iterable[trace.Event]) -> None:
        """Reads on."""
        for event in events:
            self.extent.take(event)
            self.end = event if isinstance(event, trace.End) else None
            if isinstance(event, trace.Attempt) and event.served:
                self.devices.add((event.backend, event.device))
            elif isinstance(event, trace.Halt):
                self.halt = event
            elif isinstance(event, trace.Update):
                self._compare(event)

    def _compare(self, update: trace.Update) -> None:
        found = digest.of(update.weights, update.buffers)
        known = self.weights.setdefault(update.step, found)
        if known != found and self.quarrel is None:
            self.quarrel = (
                f"worker {update.rank} holds weights {found} after step {update.step}, where "
                f"another, or the same before a resume, held {known}"
            )


def verify(path: Path, *, replay: bool) -> int:
    """Says whether the ledger at `path` is right; the exit code.

    Raises UsageError for a file that can't be read, is no ledger, or can't be replayed as it is.
    """
    try:
        account = _read(path)
    except ForeignTrace:
        raise
    except TraceError as error:
        printing.say(f"broken: {error}")
        return exit_codes.WRONG
    for sentence in account.extent.sentences():
        printing.say(f"{path}: {sentence}")
    printing.say(f"{path}: {_stands(account)}")
    for missing in account.extent.missing():
        printing.say(f"incomplete: {ledger_extent.steps(*missing)} not in it, and nothing says why")
        return exit_codes.WRONG
    if account.quarrel is not None:
        printing.say(f"different: {account.quarrel}")
        return exit_codes.WRONG
    if not replay:
        return exit_codes.DONE
    from entrenar_py.service import retraining  # brings torch

    return retraining.replay(account, path)


def _read(path: Path) -> Account:
    try:
        with files.open_file(path) as file:
            reader = ledger.Reader(file, path)
            scenario = reader.head.scenario
            found = Extent(reader.chain)
            account = Account(scenario, dict(reader.head.environment), found)
            account.take(reader)
            found.num_lines, found.last = reader.num_lines, reader.chain
            return account
    except OSError as error:
        raise UsageError(f"ledger {path}: can't be read ({error.strerror})") from error


def _stands(account: Account) -> str:
    """How far the run came."""
    if not account.weights:
        return "no step in it"
    first, last = min(account.weights), max(account.weights)
    stands = f"steps {first} to {last} of 0 to {account.scenario.num_steps - 1}"
    stands += f", weights {account.weights[last]} after step {last}"
    if account.end is None:
        return f"{stands}; not over there"
    reason = f" ({account.end.reason})" if account.end.reason else ""
    return f"{stands}; {account.end.status}{reason}"
