"""`entrenar ledger verify`: is a ledger whole, and does training again give the same bits?"""

from __future__ import annotations

from pathlib import Path

from entrenar_py.errors import ForeignTrace, TraceError
from entrenar_py.service import exit_codes, ledger_account, ledger_extent
from entrenar_py.service.ledger_account import Account
from entrenar_py.untrusted import printing


def verify(path: Path, *, replay: bool) -> int:
    """Says whether the ledger at `path` is right; the exit code.

    Raises UsageError for a file that can't be read, is no ledger, or can't be replayed as it is.
    """
    try:
        account = ledger_account.read(path)
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


def _stands(account: Account) -> str:
    """Return in words how far the run came."""
    if not account.weights:
        return "no step in it"
    first, last = min(account.weights), max(account.weights)
    stands = f"steps {first} to {last} of 0 to {account.scenario.num_steps - 1}"
    stands += f", weights {account.weights[last]} after step {last}"
    if account.end is None:
        return f"{stands}; not over there"
    reason = f" ({account.end.reason})" if account.end.reason else ""
    return f"{stands}; {account.end.status}{reason}"
