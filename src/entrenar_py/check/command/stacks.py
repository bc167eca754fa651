"""The lines of a script at which the ranks of a hanging run stand, read from their stacks.

Every rank that observes answers SIGUSR1 with its stack, even while it waits inside a call to torch
(`observing.recording`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check.rank_files.rank_file import STACK_SUFFIX, SUFFIX
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.shared.wording import named

PATIENCE_S = 3.0
_HEADER_BYTES_MAX = _STACK_BYTES_MAX = 2**20
_POLL_S = 0.05
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# A rank waits for the others in a collective (this file has them all), or in the autograd engine,
# which runs the hooks of DistributedDataParallel.
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_NOT_THE_SCRIPT = ("/torch/", "/entrenar_py/", "/lib/python", "<")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The line of the script where a rank stands, and the collective it waits in ("": none)."""

    file: str
    line: int
    call: str

    def __str__(self) -> str:
        return f"in {self.call or 'no collective'} ({self.file}:{self.line})"


def ask(folder: Path, alive: Collection[int]) -> None:
    """Ask the ranks that record to `folder` for their stacks, and wait up to PATIENCE_S for them.

    `alive` are the process ids of the run; no other process is sent a signal.
    """
    waiting = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            with files.open_file(path) as file:
                pid = int(json_text.load(file.readline(_HEADER_BYTES_MAX))["pid"])
            if pid in alive:
                os.kill(pid, signal.SIGUSR1)
                waiting.append(path.with_name(path.name.removesuffix(SUFFIX) + STACK_SUFFIX))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(map(_is_whole, waiting)):
        time.sleep(_POLL_S)


def _is_whole(path: Path) -> bool:
    """Return whether a stack is complete down to the script's outermost frame, `<module>`."""
    return "in <module>" in _text(path)


def _text(path: Path) -> str:
    """Return the text of the file at `path`; "" if it can't be read."""
    with suppress(OSError):
        return files.read(path, bytes_max=_STACK_BYTES_MAX).decode(errors="replace")
    return ""


def places(folder: Path) -> dict[int, Place]:
    """Return the place of each rank that answered."""
    places = {}
    for path in sorted(folder.glob(f"*{STACK_SUFFIX}")):
        place = _place(_text(path))
        if place is not None:
            places[int(path.name.partition("-")[0])] = place
    return places


def _place(text: str) -> Place | None:
    """Return the place in the main thread's stack, which is the last stack in `text`."""
    main = text.rpartition("hread 0x")[2]
    frames = [frame for line in main.splitlines() if (frame := _FRAME.fullmatch(line))]
    own = next((f for f in frames if not any(s in f["file"] for s in _NOT_THE_SCRIPT)), None)
    if own is None:
        return None
    inside = frames[: frames.index(own)]
    calls = [f["name"] for f in inside if f["file"].endswith(_COLLECTIVES)]
    if any(f["name"] == _BACKWARD for f in inside):
        calls.append("backward")
    return Place(file=own["file"], line=int(own["line"]), call=calls[-1] if calls else "")


def in_words(where: Mapping[int, Place], world_size: int) -> str:
    """Return where each rank stood, and which ranks never reached the call that others wait in."""
    stood = [f"rank {rank} {place}" for rank, place in sorted(where.items())]
    stood += [f"rank {rank} did not answer" for rank in range(world_size) if rank not in where]
    waiting = {place.call for place in where.values() if place.call}
    absent = [rank for rank in range(world_size) if rank not in where or not where[rank].call]
    if waiting and absent:
        calls = " or ".join(sorted(waiting))
        stood.append(f"{named('rank', absent)} never came to {calls}")
    return "; ".join(stood)
