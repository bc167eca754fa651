"""`entrenar coordinator --wire v2`: averages for workers that speak the original system's wire."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.page import console
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.service import (
    averaging_config,
    averaging_record,
    exit_codes,
    file_locks,
    progress,
    signals,
)
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.averaging_config import AveragingConfig
from entrenar_py.train.service.averaging_record import AveragingRecord
from entrenar_py.train.service.metrics import Metrics
from entrenar_py.train.service.run_events import Listener
from entrenar_py.train.upstream.server import AveragingServer


def run(path: Path, *, insecure: bool) -> int:
    """Serve the run that the file at `path` describes; return the exit code.

    `insecure` allows connections of other machines. Raises ContractError or UsageError for a
    problem found before the run begins, and SystemFailure if the ledger can't be written.
    """
    config = averaging_config.load(path)
    with ExitStack() as stack:
        _claim(config, stack)
        shown = console.standard_output(color=True)
        listeners: list[Listener] = [
            stack.enter_context(progress.opened(shown, num_steps=config.run.num_steps))
        ]
        if config.metrics is not None:
            metrics = Metrics(config.metrics)
            stack.callback(metrics.close)
            listeners.append(metrics)
        return asyncio.run(_serve(config, listeners, stack, insecure=insecure))


def _claim(config: AveragingConfig, stack: ExitStack) -> None:
    """Lock the ledger until `stack` is closed; UsageError if a path can't be used."""
    file_locks.require_distinct({"ledger": config.ledger, "metrics": config.metrics})
    if config.ledger is not None:
        stack.enter_context(file_locks.claimed(config.ledger, "ledger", warn=_warn))


def _warn(text: str) -> None:
    printing.warn(f"entrenar: {text}")


async def _serve(
    config: AveragingConfig, listeners: list[Listener], stack: ExitStack, *, insecure: bool
) -> int:
    ledger = None
    if config.ledger is not None:
        ledger = averaging_record.new_ledger(config.ledger, config.run)
    record = AveragingRecord(config.run, ledger=ledger, listeners=listeners)
    stack.callback(record.close)
    server = AveragingServer(
        config.run,
        patience=config.patience,
        frame_bytes_max=config.frame_bytes_max,
        notify=record.notify,
    )
    record.averages = lambda: server.end.averages
    record.traffic = lambda: (server.bytes_in, server.bytes_out)
    loop = asyncio.get_running_loop()
    record.give_up = lambda reason: _end_soon(loop, server, reason)
    try:
        at = await server.listen(*config.listen, insecure=insecure)
    except (OSError, UsageError) as error:
        if config.ledger is not None:
            config.ledger.unlink()  # it was just made, and would block the next attempt
        if isinstance(error, UsageError):
            raise
        problem = f"can't listen there ({error.strerror or error}); use another one"
        raise UsageError(f"listen={config.listen}: {problem}") from error
    signals.deliver(_Stopper(server, record).stop)
    record.note("listening", f"listens at {Address(*at)} for workers of the original system")
    finish = await server.finish()
    signals.ignore()
    number, last = server.strangers
    if number:
        here, why = last[-1]
        text = f"{number} connections ended without joining; the last from {here}: {why}"
        record.note("strangers", text)
    if record.broken is not None:
        raise SystemFailure(f"{record.broken}; make room or give access, and start it again")
    return exit_codes.OF_FINISH[finish.status]


def _end_soon(loop: asyncio.AbstractEventLoop, server: AveragingServer, reason: str) -> None:
    """Stop `server` in the loop's next turn, because `server` is in one of its callbacks."""
    loop.call_soon(partial(server.stop, reason, at_once=True))


class _Stopper:
    """Ends a run on signals. The first lets the current step finish; the second ends it at once."""

    def __init__(self, server: AveragingServer, record: AveragingRecord) -> None:
        self._server, self._record = server, record
        self._again = False

    def stop(self, number: signal.Signals) -> None:
        """Handle the signal `number`."""
        when = "now" if self._again else "after the step in work"
        self._record.note("stopping", f"{number.name}: stops {when}")
        reason = f"the coordinator was stopped by {number.name}"
        self._server.stop(reason, at_once=self._again)
        self._again = True
