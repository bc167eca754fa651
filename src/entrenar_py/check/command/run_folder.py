"""The folder of a command's runs: kept if the user named it, or if a finding needs it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.verdict import Verdict


@dataclass
class RunFolder:
    """The folder `path`; `is_needed` is set by a finding that is falsified, or that names the
    folder or one of the runs in it.
    """

    path: Path
    is_needed: bool = False

    def see(self, entry: Entry) -> Entry:
        """Note whether the folder must be kept because of `entry`, and return `entry`."""
        finding = entry.finding
        text = " ".join((finding.reason, *finding.notes))
        names = [str(self.path), *(file.stem for file in self.path.glob("*.jsonl"))]
        self.is_needed |= finding.verdict is Verdict.FALSIFIED
        self.is_needed |= any(name in text for name in names)
        return entry


@contextmanager
def temporary() -> Iterator[RunFolder]:
    """Yield a new folder. It is removed again, unless it `is_needed`: then its path is printed."""
    made = RunFolder(Path(tempfile.mkdtemp(prefix="entrenar-")))
    try:
        yield made
    finally:
        if made.is_needed:
            printing.warn(
                f"the runs are kept in {made.path}: --judge judges them again, --trace-dir "
                "sets another folder"
            )
        else:
            shutil.rmtree(made.path, ignore_errors=True)
