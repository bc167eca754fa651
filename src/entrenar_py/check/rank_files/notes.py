"""Notes to the harness from the processes of a run: problems of `--auto`, and checkpoints.

If this package is missing in the command's Python, `check/observing/auto/startup/sitecustomize.py`
writes the problems.

Each process writes its notes on checkpoints to its own file. So do processes that a rank has
started, since a checkpoint may be written in the background. The first line of a file says what the
process looks for. Each later line is about a file that can contain the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.shared.untrusted import files, json_text

ASKED = "auto.asked"  # exists if the command is to be observed without the line `observe`
LOADED = "auto.loaded"  # exists if any Python of the command ran the start-up module
PROBLEMS = "auto-*.note.txt"
UNSEEN = "unseen-*.note.txt"
_PROBLEMS_BYTES_MAX = 2**16


def write_problem(folder: Path, text: str, pattern: str = PROBLEMS) -> None:
    """Write a line for the harness to read, unless the folder no longer exists.

    A line in the files UNSEEN counts only if nothing else is recorded.
    """
    with (
        suppress(OSError),
        (folder / pattern.replace("*", str(os.getpid()))).open("a", encoding="utf-8") as file,
    ):
        file.write(text.replace("\n", " ") + "\n")


def why_nothing(folder: Path) -> str:
    """Return why a run that should be observed without the line `observe` left no record.

    Return "" for any other run.
    """
    if not (folder / ASKED).exists():
        return ""
    if lines := problems(folder) or problems(folder, UNSEEN):
        return "; ".join(lines[:2])
    if not (folder / LOADED).exists():
        return (
            "no Python of the command ran the start-up module of --auto: an interpreter ignores "
            "PYTHONPATH (python -I, -E or -S), or something clears the environment; change that, "
            "or add the line to the script"
        )
    return (
        "no process stepped a torch optimizer on a model that it trained: --auto sees nothing of "
        "trainers that change weights by hand, or with another library; entrenar_py.trace records "
        "them"
    )


def problems(folder: Path, pattern: str = PROBLEMS) -> list[str]:
    """Return the lines that the processes wrote with `write_problem`, without duplicates."""
    lines: dict[str, None] = {}
    for path in sorted(folder.glob(pattern)):
        with suppress(OSError):
            text = files.read(path, bytes_max=_PROBLEMS_BYTES_MAX).decode(errors="replace")
            lines.update(dict.fromkeys(line for line in text.splitlines() if line))
    return list(lines)


# --- checkpoints ----------------------------------------------------------------------------------


SAVES = "saves-*.jsonl"
LEAST_SHARE = 8  # a file with the weights has at least one part in this many of their bytes
_BYTES_MAX = 2**20
_FILES_MAX = 4000
# First bytes of files as torch, numpy, pickle and h5py write them.
_BEGINNINGS = (b"PK\x03\x04", b"\x93NUMPY", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_HDF = b"\x89HDF"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the processes of a run saved and loaded, as far as this was observed.

    - `is_known`: whether the processes noted what they saved; otherwise the other fields mean
      nothing.
    - `after`: the numbers of steps that had been taken when weights were saved.
    - `behind`: how many steps saved weights may be older than that, at most.
    - `left`: whether a file that can contain the weights was left.
    - `unreached`: the first line of the script that would save something, but was not reached; or
      "".
    - `library`: such a line of the library that trains; or "".
    - `loads`: whether a line of the script may load the weights.
    - `loads_late`: whether all such lines run only after the script has trained.
    - `resumes`: whether a line of the script has a word for resuming.
    - `option`: an option of the script that seems to resume it, such as `--resume PATH`, or "".
    - `read_back`: the first line that loaded a file with the weights of a step, in a process that
      trained afterwards, or "".
    - `read_only`: such a line in a process that didn't train, or "".
    - `restarts`: whether the launcher may start workers again.
    """

    is_known: bool = False
    after: tuple[int, ...] = ()
    behind: int = 0
    left: bool = False
    unreached: str = ""
    library: str = ""
    loads: bool = True
    loads_late: bool = False
    resumes: bool = True
    option: str = ""
    read_back: str = ""
    read_only: str = ""
    restarts: bool = True

    def traits(self, *, is_cut: bool) -> dict[str, Any]:
        """Return the fields of `Traits` that these notes decide.

        If the harness ended the run (`is_cut`), the library might have saved something later.
        """
        if not self.is_known:
            return {}
        saves = bool(self.after or self.left)
        return {
            "saves": "weights" if saves else "nothing",
            "saved_after": self.after,
            "saved_behind": self.behind,
            "unreached": "" if saves else self.unreached or (self.library if is_cut else ""),
            "loads": self._loads(),
            "resume_option": self.option,
            "read_back": self.read_back,
            "restarts": "" if self.restarts else "nothing",
        }

    def _loads(self) -> str:
        if not self.loads:
            return "nothing"
        if self.loads_late:
            return "late"
        return "" if self.resumes or self.option or self.read_back else "other"


def write_save(folder: Path, **said: Any) -> None:
    """Write a line on a save for the harness to read, unless the folder no longer exists."""
    path = folder / SAVES.replace("*", str(os.getpid()))
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")


def saved(folder: Path) -> Saved:
    """Return what the processes of the run in `folder` noted, and which files they left."""
    by_process = [[*_lines(path)] for path in sorted(folder.glob(SAVES))]
    notes = [note for own in by_process for note in own]
    begun = [note for note in notes if "weights" in note]
    if not begun:
        return Saved()
    stepped = [note for note in notes if "loads_late" in note]
    least = min(int(note["weights"]) for note in begun) // LEAST_SHARE
    return Saved(
        is_known=True,
        after=tuple(sorted({int(note["after"]) for note in notes if "after" in note})),
        behind=max((int(note.get("behind", 0)) for note in notes), default=0),
        left=any(_may_hold(path, least) for path in _left(folder)),
        unreached=_said("unreached", begun),
        library=_said("library", begun),
        loads=any(note.get("loads") for note in begun),
        loads_late=bool(stepped) and all(note["loads_late"] for note in stepped),
        resumes=any(note.get("resumes", True) for note in begun),
        option=_said("option", begun),
        read_back=_read(by_process, trains=True),
        read_only=_read(by_process, trains=False),
        restarts=any(note.get("restarts") for note in begun),
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, to be passed to a script that is started again.

    The result is the only file with more than the weights, or the only file. If there are several
    files, it is their folder, to which several ranks may have written. Return None if it isn't
    clear.
    """
    saves = [
        (path.name, int(note["after"]), Path(str(note["path"])), bool(note.get("is_whole")))
        for path in sorted(folder.glob(SAVES))
        for note in _lines(path)
        if "path" in note and Path(str(note["path"])).is_file()
    ]
    if not saves:
        return None
    after = max(saves, key=lambda save: save[2].stat().st_mtime_ns)[1]
    by_process: dict[str, dict[Path, bool]] = {}
    for process, when, file, is_whole in saves:
        if when == after:
            by_process.setdefault(process, {})[file] = is_whole
    own = max(by_process.values(), key=len)
    whole = [file for file, is_whole in own.items() if is_whole]
    others = {file for files in by_process.values() for file in files} - own.keys()
    if not others and (len(whole) == 1 or len(own) == 1):
        return [*whole, *own][0]
    folders = {file.parent for file in (*own, *others)}
    return folders.pop() if len(own) > 1 and len(folders) == 1 else None


def _read(by_process: list[list[dict[str, Any]]], *, trains: bool) -> str:
    """Return the first line that loaded weights of a step, "" if there is none.

    If `trains`, only processes that train count, otherwise only processes that don't.
    """
    saved = {note.get("file") for own in by_process for note in own if note.get("after")} - {None}
    return next(
        (
            str(note["line"])
            for own in by_process
            if any("weights" in note for note in own) is trains
            for note in own
            if note.get("loaded") in saved
        ),
        "",
    )


def _said(what: str, notes: list[dict[str, Any]]) -> str:
    return next((str(note[what]) for note in notes if note.get(what)), "")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for line in files.read(path, bytes_max=_BYTES_MAX).splitlines():
            with suppress(ValueError):  # cut off when its process died
                note = json_text.load(line)
                if isinstance(note, dict):
                    yield note


def _left(folder: Path) -> Iterator[Path]:
    """Yield the files that a run left in its copy of the user's folder, or below {workdir}."""
    seen = 0
    for root in ("root", "work"):
        for path, _, names in os.walk(folder / root):
            for name in names:
                seen += 1
                if seen > _FILES_MAX:
                    return
                yield Path(path) / name


def _may_hold(path: Path, least: int) -> bool:
    """Return whether a file looks like a file of tensors and has at least `least` bytes."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size < least:
            return False
        with files.open_file(path) as file:
            begins = file.read(10)
    except OSError:
        return False
    is_safetensors = begins[8:] == b'{"' and begins[4:8] == b"\0\0\0\0"
    return begins.startswith((*_BEGINNINGS, _HDF)) or is_safetensors
