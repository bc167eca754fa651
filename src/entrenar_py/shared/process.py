"""The process of a command: it crashes with a word, and begins and ends without delay."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import sys

_NEW_OBJECTS = 10_000


def begin() -> None:
    """Prepare the process of a command; not for a command within another program."""
    collect_seldom()
    if sys.stderr is not None:  # closed by whoever started it
        faulthandler.enable()  # says which signal, and where, if native code kills it
    atexit.register(_skip_last_collection)


def collect_seldom() -> None:
    """Search for garbage after every 10,000 new objects, instead of 700.

    Importing torch and transformers makes a million that stay. To search among them again and again
    took a fifth of that time.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def _skip_last_collection() -> None:
    """Save the half second that the last collection takes, of all of torch.

    Not if Triton is loaded, which reports what is not collected in a hundred lines.
    """
    if "triton" not in sys.modules:
        gc.freeze()
