"""A ledger read to its end: the weights after each step, and the devices that computed them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py import trace
from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.service import digest
from entrenar_py.service.ledger_extent import Extent
from entrenar_py.trace import ledger
from entrenar_py.untrusted import files


@dataclass
class Account:
    """The account of a whole ledger: the weights after each step, and who computed them.

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


def read(path: Path) -> Account:
    """Return what the ledger at `path` says.

    Raises TraceError if it is broken, UsageError if it can't be read.
    """
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
