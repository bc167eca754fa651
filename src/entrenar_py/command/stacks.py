"""Where the ranks of a run that hangs stand: their stacks, asked for, and what these say.

Every rank that observes answers SIGUSR1 with its stack, also when it waits inside of a call of
torch's (`observing.observer`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.rank_files.rank_file import STACK_SUFFIX, SUFFIX
from entrenar_py.untrusted import files

PATIENCE_S = 3.0
_HEADER_BYTES_MAX = _STACK_BYTES_MAX = 2**20
_POLL_S = 0.05
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# What waits for the other ranks: the files in which such calls are, and the engine, which waits in
# what DistributedDataParallel has hooked into it.
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_NOT_THE_SCRIPT = ("/torch/", "/entrenar_py/", "/lib/python", "<")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands: in the script, and in which call that needs the others; "" in none."""

    file: str
    line: int
    call: str

    def __str__(self) -> str:
        return f"in {self.call or 'no collective'} ({self.file}:{self.line})"


def ask(folder: Path, alive: Collection[int]) -> None:
    """Has the ranks that record to `folder` write their stacks there; returns when they have."""
    waiting = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            with files.open_file(path) as file:
                pid = int(json.loads(file.readline(_HEADER_BYTES_MAX))["pid"])
            if pid in alive:
                os.kill(pid, signal.SIGUSR1)
                waiting.append(path.with_name(path.name.removesuffix(SUFFIX) + STACK_SUFFIX))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(map(_is_whole, waiting)):
        time.sleep(_POLL_S)


def _is_whole(path: Path) -> bool:
    """Whether a stack goes down to the script: the outermost frame is `<module>`'s."""
    return "in <module>" in _text(path)


def _text(path: Path) -> str:
    """Return what stands there so far; "" for what is no file, or longer than any stack."""
    with suppress(OSError):
        return files.read(path, bytes_max=_STACK_BYTES_MAX).decode(errors="replace")
    return ""


def places(folder: Path) -> dict[int, Place]:
    """Rank -> where it stood when it was asked, of those that answered."""
    found = {}
    for path in sorted(folder.glob(f"*{STACK_SUFFIX}")):
        place = _place(_text(path))
        if place is not None:
            found[int(path.name.partition("-")[0])] = place
    return found


def _place(text: str) -> Place | None:
    """What the stack of the main thread says, which is the last one, and has the script in it."""
    main = text.rpartition("hread 0x")[2]
    frames = [one for line in main.splitlines() if (one := _FRAME.fullmatch(line))]
    own = next((f for f in frames if not any(s in f["file"] for s in _NOT_THE_SCRIPT)), None)
    if own is None:
        return None
    inside = frames[: frames.index(own)]
    calls = [f["name"] for f in inside if f["file"].endswith(_COLLECTIVES)]
    if any(f["name"] == _BACKWARD for f in inside):
        calls.append("backward")
    return Place(file=own["file"], line=int(own["line"]), call=calls[-1] if calls else "")


def told(where: Mapping[int, Place], world_size: int) -> str:
    """In words: where each rank stood, and who did not come to what the others wait in."""
    stood = [f"rank {rank} {place}" for rank, place in sorted(where.items())]
    stood += [f"rank {rank} did not answer" for rank in range(world_size) if rank not in where]
    waiting = {place.call for place in where.values() if place.call}
    absent = [rank for rank in range(world_size) if rank not in where or not where[rank].call]
    if waiting and absent:
        names = ", ".join(map(str, absent))
        calls = " or ".join(sorted(waiting))
        stood.append(f"rank{'s' if absent[1:] else ''} {names} never came to {calls}")
    return "; ".join(stood)
