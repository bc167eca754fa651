"""The folder of a command's runs: kept where it was asked for, or where a finding is about it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.reports.report import Entry
from entrenar_py.untrusted import printing
from entrenar_py.verdict import Verdict


@dataclass
class Kept:
    """`is_needed` is whether something was found that can be looked up there."""

    path: Path
    is_needed: bool = False

    def see(self, entry: Entry) -> Entry:
        """`entry`, once it is noted whether it is about what is kept here."""
        found = entry.finding
        told = " ".join((found.reason, *found.notes))
        self.is_needed |= found.verdict is Verdict.FALSIFIED or str(self.path) in told
        return entry


@contextmanager
def folder(given: Path | None) -> Iterator[Kept]:
    """`given`; else a new one for temporary files, which is removed again unless it is needed, and
    then named.
    """
    if given is not None:
        yield Kept(given)
        return
    kept = Kept(Path(tempfile.mkdtemp(prefix="entrenar-")))
    try:
        yield kept
    finally:
        if kept.is_needed:
            printing.warn(
                f"the runs are kept in {kept.path} (--trace-dir says where; --judge judges again)"
            )
        else:
            shutil.rmtree(kept.path, ignore_errors=True)
