"""The link from a checkpoint to the last ledger line before it, by which lost lines are noticed.

Puts the link into a checkpoint's progress, reads it back, and puts a ledger's gap in words.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError
from entrenar_py.shared.trace.writer import Mark
from entrenar_py.shared.untrusted import escaping

KEY = "ledger"  # in the progress of a checkpoint; earlier releases did not write it

_CHAIN = re.compile(r"[0-9a-f]{32}")
_NONE_KEPT = "no ledger was kept when the checkpoint was written"
_UNNAMED = "the checkpoint was written by an earlier build, which did not name the ledger's line"
_NOT_THERE = "the ledger that the checkpoint names was not there"


def to_record(last: Mark | None) -> Mapping[str, Any] | None:
    """Return what a checkpoint notes of the ledger's line `last`, as JSON can hold it."""
    return None if last is None else {"line": last.line, "chain": last.chain}


def since(progress: Mapping[str, Any], path: Path) -> trace.Gap:
    """Return the Gap event that begins a new ledger after a resume from the checkpoint at `path`.

    `progress` is that checkpoint's metadata. Raises CheckpointError if its KEY entry is malformed.
    """
    step = int(progress["step"])
    named = progress.get(KEY)
    if named is None:
        return trace.Gap(step=step, reason=_NONE_KEPT if KEY in progress else _UNNAMED)
    match named:
        case {"line": line, "chain": str(digest)} if _is_mark(line, digest):
            return trace.Gap(step=step, lines=line, digest=digest, reason=_NOT_THERE)
    raise CheckpointError(
        f"checkpoint {path}: {KEY}={reprlib.repr(named)}: it does not name a line of a ledger "
        "and its digest; use an earlier checkpoint"
    )


def _is_mark(line: object, digest: str) -> bool:
    return type(line) is int and line > 0 and _CHAIN.fullmatch(digest) is not None


def say(gap: trace.Gap) -> str:
    """Return in words which steps a ledger with this gap lacks."""
    steps = f"steps 0 to {gap.step - 1} are not in it" if gap.step else "no step is missing"
    if gap.digest is None:
        return f"{steps}, {escaping.shortened(gap.reason)}"
    digest = escaping.shortened(gap.digest)
    return f"{steps}, but in a ledger of {gap.lines} lines, the last with digest {digest}"


def unchecked(gap: trace.Gap) -> str:
    """Return a note that only the number of steps links the ledger to the checkpoint."""
    return f"it was not checked that the ledger belongs to the checkpoint: {gap.reason}"
