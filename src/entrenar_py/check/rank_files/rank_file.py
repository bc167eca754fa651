"""The file in which one rank of a user's trainer records a run, as the rank writes it.

The file is JSON lines: a header, then an event a line. Lines between the events say how the ranks
are arranged, which pieces of tensors this rank holds, which buffers depend on its own samples, and
whether the optimizer's constants or the compression of gradients have changed. The last line says
that training ended. Each line is written at once, so it stays when the process dies. `rank_trace`
reads the file back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from entrenar_py.check.rank_files import rank_header
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError

SUFFIX = ".rank.jsonl"
STACK_SUFFIX = ".stack.txt"  # of the rank's stack, written on SIGUSR1


def line(kind: str, **fields: Any) -> str:
    """Return the text of a line that is no event."""
    return json.dumps({"kind": kind, **fields}) + "\n"


class RankFile:
    """A new file in `folder` for a rank's next `life`; the rank's stack can go to `stack`.

    A rank that is started again, or observes twice, has a file for each life.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self.life = _new(folder, int(header["rank"]))
        self.path = Path(os.fsdecode(self._file.name))
        self.stack = folder / f"{header['rank']:05}-{self.life:03}{STACK_SUFFIX}"
        self.note("rank", version=rank_header.VERSION, **header)

    def append(self, events: Iterable[trace.Event]) -> None:
        """Write `events`; none of them is lost if the process is killed afterwards."""
        self._write(trace.dump_events(events).decode())

    def note(self, kind: str, **fields: Any) -> None:
        """Write a line between events; `rank_trace` lists the kinds of these lines."""
        self._write(line(kind, **fields))

    def close(self, problem: str = "") -> None:
        """Write that training is over, with the error `problem` if any, and close the file."""
        self.note("closed", problem=problem)
        self._file.close()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return  # training is over: later reports of the script don't belong to it
        rest = memoryview(text.encode())
        while rest.nbytes:
            rest = rest[self._file.write(rest) :]


def _new(folder: Path, rank: int) -> tuple[FileIO, int]:
    """Create the file of the rank's next life; return it and the number of that life."""
    for life in count():
        with suppress(FileExistsError):
            return FileIO(folder / f"{rank:05}-{life:03}{SUFFIX}", "x"), life
    raise AssertionError("there is always one more")


def environment_rank() -> tuple[int, int]:
    """Return rank and world size as torchrun sets them, or 0 and 1 without torchrun.

    ENTRENAR_RANK and ENTRENAR_WORLD_SIZE come first, as RANK may count within a part of the job.
    Raises UsageError if only one of them is set.
    """
    own = {name: os.environ.get(f"ENTRENAR_{name}") for name in ("RANK", "WORLD_SIZE")}
    is_own = None not in own.values()
    if not is_own and any(own.values()):
        said, left = sorted(own, key=lambda name: own[name] is None)
        raise UsageError(
            f"ENTRENAR_{said}={own[said]} is set, and ENTRENAR_{left} isn't: set both, to the "
            "place of this process in the whole job, or neither"
        )
    names = own if is_own else {name: os.environ.get(name) for name in own}
    rank, world_size = names.values()
    return int(rank or 0), int(world_size or 1)
