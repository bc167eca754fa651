"""Notes to the harness from processes that are observed without a line (`--auto`).

`check/observing/auto/startup/sitecustomize.py` writes these files, too, where this package is
missing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from entrenar_py.shared.untrusted import files

ASKED = "auto.asked"  # exists if the command was launched to be observed without a line
LOADED = "auto.loaded"  # exists if any Python of the command ran the start-up module
NOTES = "auto-*.note.txt"
_BYTES_MAX = 2**16


def write(folder: Path, text: str) -> None:
    """Add a line for the harness to read; nothing is written if the folder is gone."""
    with (
        suppress(OSError),
        (folder / NOTES.replace("*", str(os.getpid()))).open("a", encoding="utf-8") as file,
    ):
        file.write(text.replace("\n", " ") + "\n")


def why_nothing(folder: Path) -> str:
    """Return why a run that was to be observed without a line left no record.

    Returns "" for other runs.
    """
    if not (folder / ASKED).exists():
        return ""
    if lines := read(folder):
        return "; ".join(lines[:2])
    if not (folder / LOADED).exists():
        return (
            "no Python of the command ran the start-up module of --auto: an interpreter ignores "
            "PYTHONPATH (python -I, -E or -S), or something clears the environment; change that, "
            "or add the line to the script"
        )
    return (
        "no process stepped a torch optimizer on a model that it trained: --auto sees nothing of "
        "trainers that use other libraries"
    )


def read(folder: Path) -> list[str]:
    """Return the lines that the processes have written, each once."""
    lines: dict[str, None] = {}
    for path in sorted(folder.glob(NOTES)):
        with suppress(OSError):
            text = files.read(path, bytes_max=_BYTES_MAX).decode(errors="replace")
            lines.update(dict.fromkeys(line for line in text.splitlines() if line))
    return list(lines)
