"""The folder of a command's runs, and the working folder of each: the user's folder as it was.

A run alone writes in its working folder. Otherwise it would find the checkpoint that another has
left, and go on from there. The folder of all runs is kept if the user named it, or if a finding
needs it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrenar_py.check import observing
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.verdict import Verdict

FOLDER = observing.COPY
ENTRIES_MAX = 4000  # of a run's folder; what is past it is linked, a folder at a time
FOLDER_ENTRIES_MAX = 1000  # a folder with more is data, and linked as one
ABOVE_ENTRIES_MAX = 200  # a folder further above than the parent is left empty if it has more
FILE_BYTES_MAX = 2**26  # a larger file is linked
BYTES_MAX = 2**28  # copied for one run
# Folders that are linked as one: compiled code and installed packages. So are hidden ones.
_AS_ONE = ("__pycache__", "node_modules", "site-packages")
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
# Programs that run a command where links to this machine's files, or a temporary folder, may not
# exist: in a container, on another machine.
_ELSEWHERE = (
    *("docker", "podman", "nerdctl", "singularity", "apptainer", "kubectl", "enroot"),
    *("ssh", "srun", "sbatch", "salloc", "qsub", "bsub", "flux", "mpirun", "mpiexec", "ray"),
)


def runs_elsewhere(command: Sequence[str]) -> bool:
    """Return whether a command runs in a container or on other machines, as far as it shows."""
    return any(Path(word).name in _ELSEWHERE for word in command[:1])


@contextmanager
def own_folder(source: Path | None, root: Path) -> Iterator[OwnFolder | None]:
    """Make a copy of the folder `source` below `root`, and clear it in the end.

    Yields None if `source` is None, or if no copy can be made: then the command runs in the
    launcher's folder, and a warning says so.
    """
    if source is None:
        yield None
        return
    own = OwnFolder(source, root)
    try:
        try:
            own.make()
        except OSError as error:
            printing.warn(
                f"{source}: no copy of it can be made in {root} ({error.strerror}), so the command "
                "runs in the folder itself; give another --trace-dir, or --in-place"
            )
            yield None
        else:
            yield own
    finally:
        own.clear()


@dataclass
class OwnFolder:
    """A copy of the folder `source` below `root`, at `path`.

    Files are copied, with their times and modes. Large files, hidden folders, virtual environments
    and folders with very many files are links to the user's. The folders above `source` exist,
    too, with links to what they hold, so that `..` leads where it leads from `source`.
    """

    source: Path
    root: Path
    _made: list[Path] = field(default_factory=list)
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # -> time (ns) and size

    @property
    def path(self) -> Path:
        """The folder in which the command runs."""
        return self.root.joinpath(*self.source.parts[1:])

    def make(self) -> None:
        """Make the folder. What is above `root` is left out of it.

        Raises OSError if links or files can't be made.
        """
        self._make_ancestors()
        budget = _Budget(self.source.stat().st_dev)
        folders = deque([(self.source, self.path)])
        while folders:
            source, target = folders.popleft()
            for entry in _entries(source):
                place = target / entry.name
                if Path(entry.path) in self.root.parents:
                    continue
                if entry.is_dir(follow_symlinks=False) and budget.has_room_for(entry):
                    place.mkdir()
                    folders.append((Path(entry.path), place))
                elif not (budget.may_copy(entry) and self._copy(entry.path, place)):
                    self._link(entry.path, place)

    def clear(self) -> None:
        """Remove all links, and the files that are still as they were copied.

        Files that the command has made or changed stay.
        """
        for place in self._made:
            with suppress(OSError):
                if place.is_symlink() or _stamp(place) == self._copied.get(place):
                    place.unlink()
        for folder, _, _ in sorted(os.walk(self.root), reverse=True):
            with suppress(OSError):
                Path(folder).rmdir()  # fails if something is left in it

    def launched(self, launch: Callable[..., Ended]) -> Callable[..., Ended]:
        """Return `launch`, for commands that run in this folder."""

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
        place.symlink_to(source)
        self._made.append(place)

    def _copy(self, source: str, place: Path) -> bool:
        """Copy a file; return False if it can't be read, or is gone."""
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
    """The budget of files that may still be copied for a run from the file system `device`."""

    device: int
    entries: int = ENTRIES_MAX
    bytes: int = BYTES_MAX

    def has_room_for(self, folder: os.DirEntry[str]) -> bool:
        """Return whether a folder is copied entry by entry; if it is, count its entries."""
        if folder.name.startswith(".") or folder.name in _AS_ONE:
            return False
        inside = _entries(Path(folder.path))
        if len(inside) > min(FOLDER_ENTRIES_MAX, self.entries):
            return False
        if folder.stat().st_dev != self.device or any(e.name in _ENVIRONMENTS for e in inside):
            return False
        self.entries -= len(inside)
        return True

    def may_copy(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is a file to copy; if it is, count its bytes."""
        if not entry.is_file(follow_symlinks=False):
            return False
        size = entry.stat(follow_symlinks=False).st_size
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


def _stamp(file: Path) -> tuple[int, int]:
    status = file.lstat()
    return status.st_mtime_ns, status.st_size


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
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="entrenar-")))
    try:
        yield folder
    finally:
        if folder.is_needed:
            printing.warn(
                f"the runs are kept in {folder.path}: --judge judges them again, --trace-dir "
                "sets another folder"
            )
        else:
            shutil.rmtree(folder.path, ignore_errors=True)
