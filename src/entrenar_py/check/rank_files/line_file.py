"""The file of one process with what the script's statements did, for `entrenar-check diff --again`.

Each line is an event: a call of a function of the script, a statement that ended, or a return. It
has digests of the values that the statement's variables have then, and of the generators that moved
since the event before. The first letter of a digest tells what kind of value it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from entrenar_py.check.rank_files import border_file
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.untrusted import files, json_text

SUFFIX = ".lines.jsonl"
FILE_BYTES_MAX = 2**28
CALL, LINE, RETURN = "call", "line", "return"
MODEL, TENSOR, SET, PLAIN = "M", "T", "S", "P"  # first letters of digests
SORTED = "/"  # what follows it in the digest of a list doesn't depend on the order
# What begins the name of a module's variable, or of a generator; the name of a returned value.
GLOBAL, GENERATOR, RETURNED = "global ", "generator ", "return"


@dataclass(frozen=True, slots=True)
class Event:
    """What one statement did.

    - `frame`, `parent`: the numbers of the running function's call, and of the script's function
      that called it; 0 for none.
    - `order`: the number of borders that were recorded before the end of the statement.
    - `values`: name -> digest, "" if nothing is known of the value.
    """

    frame: int
    parent: int
    kind: str
    file: str
    line: int
    order: int
    values: Mapping[str, str]

    @property
    def place(self) -> tuple[str, str, int]:
        """The place in the script, which is the same in each run."""
        return self.kind, self.file, self.line


def create(folder: Path, rank: int, worker: int | None = None) -> FileIO:
    """Return a new file for a rank, or for a worker of one of its loaders."""
    process = "" if worker is None else f"-worker-{worker}"
    return border_file.new_file(folder, f"{rank:05}{process}", SUFFIX)


def append(file: FileIO, event: Sequence[Any]) -> None:
    """Write one event; it isn't lost if the process is killed afterwards."""
    file.write((json.dumps(event) + "\n").encode())


def load_folder(folder: Path | None, rank: int) -> list[list[Event]]:
    """Return the events of a rank's processes, its own process first; none without a folder.

    Raises TraceError for a file that no process writes.
    """
    if folder is None:
        return []
    of_workers = sorted(folder.glob(f"{rank:05}-worker-*{SUFFIX}"))
    own = [load(path) for path in folder.glob(f"{rank:05}-*{SUFFIX}") if path not in of_workers]
    # A process that starts ranks may have a file of its own, without a step.
    own.sort(key=lambda events: -events[-1].order if events else 0)
    return own[:1] + [load(path) for path in of_workers]


def load(path: Path) -> list[Event]:
    """Return the events of a process; an incomplete last line is left out."""
    events = []
    try:
        with files.open_file(path, bytes_max=FILE_BYTES_MAX) as file:
            for number, text in enumerate(files.lines(file), start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    events.append(_event(json_text.load(text)))
                except (ValueError, TypeError) as error:
                    raise TraceError(f"{path}:{number}: no event of a script ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: can't be read ({error.strerror})") from error
    return events


def _event(record: Any) -> Event:
    frame, parent, kind, file, line, order, values = record
    if any(type(number) is not int for number in (frame, parent, line, order)):
        raise ValueError("numbers of frames and lines")
    texts = (kind, file, *values, *values.values())
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("names and digests")
    return Event(frame, parent, kind, file, line, order, values)
