"""The folder of a command's runs, and each run's working folder, a copy of the user's folder.

In a shared working folder, a run would find the checkpoint of an earlier run and resume from it.
The folder of all runs is kept if the user named it or if a finding needs it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from entrenar_py.check import observing
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.verdict import Verdict

FOLDER = observing.COPY
ENTRIES_MAX = 4000  # copied for one run; every folder after that is linked as a whole
FOLDER_ENTRIES_MAX = 1000  # a larger folder is assumed to contain data, and linked as a whole
ABOVE_ENTRIES_MAX = 200  # a folder above the parent is left empty if it has more
FILE_BYTES_MAX = 2**26  # a larger file is linked
BYTES_MAX = 2**28  # copied for one run; the files that remain are linked
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors")  # copied first, as a run may overwrite them
# Folders that are linked as a whole: compiled code, installed packages. So are hidden folders.
_AS_ONE = ("__pycache__", "node_modules", "site-packages")
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
# Programs that run a command in a container or on another machine, where links to this machine's
# files, or a temporary folder, may not exist.
_ELSEWHERE = (
    *("docker", "podman", "nerdctl", "singularity", "apptainer", "kubectl", "enroot"),
    *("ssh", "srun", "sbatch", "salloc", "qsub", "bsub", "flux", "mpirun", "mpiexec", "ray"),
)
_BEFORE = ("env", "sudo", "time", "nice")
_OF_THOSE = re.compile(r"[A-Za-z_]\w*=.*|-.*|\d+", re.DOTALL)  # NAME=value, -n 10


def runs_elsewhere(command: Sequence[str]) -> bool:
    """Return whether a command's program runs it in a container or on other machines.

    The program may follow `env NAME=value`, `sudo`, `time` or `nice`, with their simplest options.
    """
    words = [*command]
    while words and (Path(words[0]).name in _BEFORE or _OF_THOSE.fullmatch(words[0])):
        del words[: 2 if words[0] == "-u" else 1]
    return any(Path(word).name in _ELSEWHERE for word in words[:1])


@contextmanager
def own_folder(source: Path | None, root: Path) -> Iterator[OwnFolder | None]:
    """Copy the folder `source` below `root`, yield the copy, and clear it at the end.

    Yield None if `source` is None: the command then runs in the launcher's folder. Raises
    SystemFailure if no copy can be made. Only the user may decide that the command runs in the
    folder itself, as it may overwrite files there.
    """
    if source is None:
        yield None
        return
    own = OwnFolder(source, root)
    try:
        try:
            own.make()
        except OSError as error:
            raise SystemFailure(
                f"{source}: no copy of it can be made in {root} ({error.strerror}); give another "
                "--trace-dir (or TMPDIR), or --in-place to run the command in the folder itself"
            ) from error
        yield own
    finally:
        own.clear()


@dataclass
class OwnFolder:
    """A copy of the folder `source` below `root`, as the working folder of a run.

    Files are copied with their times and modes: checkpoints first, then small files, up to
    BYTES_MAX in all. Other files, hidden folders, virtual environments and folders with very many
    files become links to the user's files. The parents of `source` are created as well, with links
    to their contents, so that `..` leads to the same files as from `source`.
    """

    source: Path
    root: Path
    _made: list[Path] = field(default_factory=list)
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # -> time (ns) and size
    _shared: dict[Path, tuple[int, int]] = field(default_factory=dict)  # the user's linked files

    @property
    def path(self) -> Path:
        """The folder in which the command runs."""
        return self.root.joinpath(*self.source.parts[1:])

    def make(self) -> None:
        """Create the folder. If a folder contains `root`, it is left out of the copy.

        Raises OSError if links or files can't be created.
        """
        self._make_ancestors()
        budget = _Budget(self.source.stat().st_dev)
        above = self.root.resolve().parents
        files: list[tuple[os.DirEntry[str], Path]] = []
        folders = deque([(self.source.resolve(), self.path)])
        while folders:
            source, target = folders.popleft()
            for entry in _entries(source):
                place = target / entry.name
                if Path(entry.path) in above:
                    continue
                if entry.is_dir(follow_symlinks=False) and budget.has_room_for(entry):
                    place.mkdir()
                    folders.append((Path(entry.path), place))
                elif entry.is_file(follow_symlinks=False):
                    files.append((entry, place))
                else:
                    self._link(entry.path, place)
        for entry, place in sorted(files, key=lambda file: _turn(file[0])):
            if not (budget.may_copy(entry) and self._copy(entry.path, place)):
                self._link(entry.path, place)
                with suppress(OSError):
                    self._shared[Path(entry.path)] = _stamp(Path(entry.path))

    def clear(self) -> None:
        """Remove all links, and the copied files that the command has not changed.

        Files that the command created or changed stay. Print a warning for each of the user's own
        files that was changed through a link.
        """
        for file, before in self._shared.items():
            with suppress(OSError):
                if _stamp(file) != before:
                    _warn_of_change(file)
        for place in self._made:
            with suppress(OSError):
                if place.is_symlink() or _stamp(place) == self._copied.get(place):
                    place.unlink()
        for folder, _, _ in sorted(os.walk(self.root), reverse=True):
            with suppress(OSError):
                Path(folder).rmdir()  # fails if the folder isn't empty

    def launched(self, launch: Callable[..., Ended]) -> Callable[..., Ended]:
        """Return a function like `launch` that runs the command in this folder."""

        def launch_here(
            command: Sequence[str], *, variables: Mapping[str, str], **settings: Any
        ) -> Ended:
            here = {**variables, "PWD": str(self.path)}
            return launch(command, variables=here, cwd=self.path, **settings)

        return launch_here

    def _make_ancestors(self) -> None:
        self.path.mkdir(parents=True)
        place = self.root
        for inner in reversed([self.source, *self.source.parents][:-1]):
            entries = _entries(inner.parent)
            limit = ENTRIES_MAX if inner == self.source else ABOVE_ENTRIES_MAX
            for entry in entries if len(entries) <= limit else ():
                if entry.name != inner.name:
                    self._link(entry.path, place / entry.name)
            place = place / inner.name

    def _link(self, source: str, place: Path) -> None:
        if os.path.lexists(source):  # it may have been removed since its folder was listed
            place.symlink_to(source)
            self._made.append(place)

    def _copy(self, source: str, place: Path) -> bool:
        """Copy the file `source` to `place`.

        Return False if it can't be read or no longer exists.
        """
        try:
            shutil.copy2(source, place)
        except OSError:
            place.unlink(missing_ok=True)
            return False
        self._made.append(place)
        self._copied[place] = _stamp(place)
        return True


@dataclass
class _Budget:
    """How many files may still be copied for a run. They are on the file system `device`."""

    device: int
    entries: int = ENTRIES_MAX
    bytes: int = BYTES_MAX

    def has_room_for(self, folder: os.DirEntry[str]) -> bool:
        """Return whether a folder is copied entry by entry. If so, count its entries."""
        if folder.name.startswith(".") or folder.name in _AS_ONE:
            return False
        inside = _entries(Path(folder.path))
        if len(inside) > min(FOLDER_ENTRIES_MAX, self.entries):
            return False
        try:
            device = folder.stat().st_dev
        except OSError:  # removed, or not to be read
            return False
        if device != self.device or any(e.name in _ENVIRONMENTS for e in inside):
            return False
        self.entries -= len(inside)
        return True

    def may_copy(self, entry: os.DirEntry[str]) -> bool:
        """Return whether a file is copied. If so, count its bytes."""
        size = _size(entry)
        if size > min(FILE_BYTES_MAX, self.bytes):
            return False
        self.bytes -= size
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _turn(file: os.DirEntry[str]) -> tuple[bool, int]:
    """Return what sorts files by when they are copied."""
    return not file.name.endswith(_CHECKPOINTS), _size(file)


def _size(file: os.DirEntry[str]) -> int:
    with suppress(OSError):  # removed, or not to be read: then it isn't copied
        return file.stat(follow_symlinks=False).st_size
    return 0


@cache  # once, not for each run
def _warn_of_change(file: Path) -> None:
    printing.warn(
        f"{file}: changed while the command ran. It is your own file and not a copy, since no file "
        f"above {FILE_BYTES_MAX >> 20} MiB is copied, and {BYTES_MAX >> 20} MiB in all for a run. "
        "If the command changed it, let the command write to another path, or move the file away"
    )


def _stamp(file: Path) -> tuple[int, int]:
    status = file.lstat()
    return status.st_mtime_ns, status.st_size


@dataclass
class RunFolder:
    """The folder at `path`, with the files of a command's runs.

    `is_needed` says whether it must be kept: an entry of the report is falsified, or names the
    folder or a run in it.
    """

    path: Path
    is_needed: bool = False

    def see(self, entry: Entry) -> Entry:
        """Set `is_needed` if the folder must be kept because of `entry`, and return `entry`."""
        finding = entry.finding
        text = " ".join((finding.reason, *finding.notes))
        names = [str(self.path), *(file.stem for file in self.path.glob("*.jsonl"))]
        self.is_needed |= finding.verdict is Verdict.FALSIFIED
        self.is_needed |= any(name in text for name in names)
        return entry


@contextmanager
def temporary() -> Iterator[RunFolder]:
    """Yield a new temporary folder.

    At the end it is removed, or if it `is_needed`, its path printed.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="entrenar-")))
    try:
        yield folder
    finally:
        if folder.is_needed:
            printing.warn(
                f"the runs are kept in {folder.path}, which may be deleted: --judge judges them "
                "again, --trace-dir sets another folder"
            )
        else:
            shutil.rmtree(folder.path, ignore_errors=True)
