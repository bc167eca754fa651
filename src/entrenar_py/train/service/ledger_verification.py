"""`entrenar ledger verify`: checks that a ledger is whole, and that retraining gives its bits."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.shared.errors import ForeignTrace, TraceError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.service import exit_codes, ledger_account


def verify(path: Path, *, replay: bool) -> int:
    """Print whether the ledger at `path` is right, and return the exit code.

    Raises UsageError for a file that can't be read, is no ledger, or can't be replayed.
    """
    try:
        account = ledger_account.read(path)
    except ForeignTrace:
        raise
    except TraceError as error:
        printing.say(f"broken: {error}")
        return exit_codes.WRONG
    for sentence in account.sentences():
        printing.say(f"{path}: {sentence}")
    for missing in account.missing():
        steps = ledger_account.steps(*missing)
        printing.say(f"incomplete: {steps} missing, and no gap explains it")
        return exit_codes.WRONG
    if account.quarrel is not None:
        printing.say(f"different: {account.quarrel}")
        return exit_codes.WRONG
    if not replay:
        return exit_codes.DONE
    from entrenar_py.train.service import retraining  # brings torch

    return retraining.replay(account, path)
