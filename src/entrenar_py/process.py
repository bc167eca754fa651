"""The process of a command: it crashes with a word, and ends without delay."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import sys


def begin() -> None:
    """Prepare the process of a command for its end; not for a command within another program."""
    if sys.stderr is not None:  # closed by whoever started it
        faulthandler.enable()  # says which signal, and where, if native code kills it
    atexit.register(_skip_last_collection)


def _skip_last_collection() -> None:
    """Save the half second that the last collection takes, of all of torch.

    Not if Triton is loaded, which reports what is not collected in a hundred lines.
    """
    if "triton" not in sys.modules:
        gc.freeze()
